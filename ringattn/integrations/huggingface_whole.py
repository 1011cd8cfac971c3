"""Calls of an attached model with whole sequences: every rank of a ring gives the whole batch, and gets what belongs to each token.

Trainers that make their losses from numbers per token (trl's: log-probabilities, entropies) then need to know nothing of shards. A
hook before the model cuts a call's batch to this rank's rows; a hook after it swaps the numbers per token, so that each rank has those of
whole sequences. No rank ever has logits of the whole sequence.

Rows that begin with padding are turned, so that the padding is at their end, and their numbers are turned back.

Shapes: b rows, s columns of the whole batch, n columns that are computed (at least s), s_local columns of this rank, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..collective import unshard
from ..geometry.layout import Layout, zigzag
from ..runtime.agree import Facts, agree, refusing
from ..training.causal_lm import IGNORE
from ..training.data import packed_documents, shard_batch
from .huggingface_attachment import NAME, Attachment, not_compiled
from .huggingface_inputs import CACHES

# what a fused head of trl returns of each token, (b, s_local)
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
# columns of a batch, with what padding at the end of a row holds
_COLUMNS = {"input_ids": 0, "labels": IGNORE, "attention_mask": 0, "position_ids": 0}
_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_PASSED = ("use_cache", "fused_lm_head", "return_dict", "output_router_logits")
_NAME = "ringattn_whole"  # of the attribute that holds a `WholeCalls`
_FACTS = Facts({"function": "a model's call with a whole batch"})
_MODULUS = (1 << 61) - 1  # of digests, as numbers of 61 bits


@dataclass(frozen=True)
class _CutCall:
    """How a call's batch was cut. starts: (b,), where each row begins; None if all begin at once. columns: s.

    smoothed: this rank's labels, if the call asks for losses of smoothed labels, and the smoothing.
    """

    layout: Layout
    columns: int
    starts: torch.Tensor | None
    num_items: Any
    smoothed: tuple[torch.Tensor, float] | None


class WholeCalls:
    """Lets an attached model be called with whole sequences, (b, s) on every rank of its ring, by hooks.

    model: attached without a layout. layouts: returns the layout for a number of tokens; zigzag by default.

    - `model(input_ids=, attention_mask=, labels=, fused_lm_head=True)`, where trl's `add_fused_lm_head` was applied, returns the numbers
      of whole sequences, (b, s - 1), on every rank. Their gradient is that of the sum of all ranks' losses, so that gradients averaged
      over the ranks are those of one process, if each rank makes the whole loss.
    - `model(input_ids=, attention_mask=, labels=, label_smoothing=)` returns a dict with `losses` (b, s - 1), of labels smoothed as by
      `torch.nn.functional.cross_entropy`; 0 where a label does not count.
    - A call with a layout, of this rank's rows, and one with a `RingCache` are left as they are; so is every call after `detach`, or
      after `attach` was called again.

    A call is refused, on every rank, if it asks for other things, if the ranks' batches differ, and if a row has padding between tokens.
    """

    def __init__(self, model: nn.Module, attachment: Attachment, layouts: Callable[[int], Layout] | None = None) -> None:
        self.attachment, self.layouts = attachment, layouts
        self._cuts: list[_CutCall | None] = []
        before: WholeCalls | None = vars(model).get(_NAME)
        for handle in () if before is None else before._handles:
            handle.remove()
        self._handles = (
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        )
        setattr(model, _NAME, self)

    def __deepcopy__(self, memo: dict) -> WholeCalls:
        return self  # a copied model stays on the same ring

    @not_compiled
    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Before the model runs: this rank's rows instead of the whole batch."""
        self._cuts.append(None)
        is_attached = getattr(model, NAME, None) is self.attachment
        if not is_attached or any(kwargs.get(name) is not None for name in ("layout", *CACHES)):
            return None
        ranks = self.attachment.ranks
        with refusing(ranks):
            if args:
                raise ValueError(
                    f"{type(model).__name__} is called with arguments without names: give input_ids= and the others by name"
                )
            batch, passed, smoothing = _sorted(model, kwargs)
            digest = _digest(batch)
        if ranks.size > 1:
            digests, _ = agree(ranks, _FACTS, digest)
            if len(set(digests)) > 1:
                raise ValueError(
                    "the ranks of a ring are called with different batches, but must all have the same sequences: deal rows to rings, "
                    "not to ranks"
                )
        with refusing(ranks):
            batch, starts = _turned(batch)
            columns = batch["input_ids"].shape[1]
            layout = self._layout(columns)
            if layout.seq_len > columns:
                batch = _padded(batch, layout.seq_len)
            num_items = batch.pop("num_items_in_batch", None)
            shards = shard_batch(batch, layout, self.attachment.rank)
        smoothed = None if smoothing is None else (shards.pop("shift_labels"), smoothing)
        self._cuts[-1] = _CutCall(layout, columns, starts, num_items, smoothed)
        return (), {**passed, **shards, "layout": layout}

    @not_compiled
    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """After it ran, or failed: the numbers per token of the whole batch."""
        cut = self._cuts.pop() if self._cuts else None
        if cut is None or output is None:
            return None
        if cut.smoothed is not None:
            labels, smoothing = cut.smoothed
            logits = output.logits if output.logits.dtype == torch.float64 else output.logits.float()
            losses = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none", label_smoothing=smoothing
            )
            return {"losses": self._whole(cut, losses.view(1, *labels.shape))[0]}
        local = {name: getattr(output, name) for name in _PER_TOKEN if getattr(output, name) is not None}
        dtype = local["log_probs"].dtype
        whole = self._whole(cut, torch.stack([values.to(dtype) for values in local.values()]))
        found: dict[str, Any] = {name: values.to(local[name].dtype) for name, values in zip(local, whole.unbind(), strict=True)}
        count = found["label_mask"].sum().clamp(min=1) if cut.num_items is None else cut.num_items
        return type(output)(loss=-found["log_probs"].sum() / count, **found)

    def _whole(self, cut: _CutCall, values: torch.Tensor) -> torch.Tensor:
        """Numbers of each token (k, b, s_local) on every rank for all tokens that have a next one, (k, b, s - 1)."""
        whole = unshard(values, cut.layout, self.attachment.group, dim=2)[:, :, : cut.columns]
        if cut.starts is not None:
            at = (torch.arange(cut.columns, device=values.device) - cut.starts[:, None]) % cut.columns
            whole = whole.gather(2, at.expand(whole.shape[0], -1, -1))
        return whole[:, :, :-1]

    def _layout(self, tokens: int) -> Layout:
        """The layout of a batch of so many columns, or of so many more that each rank holds one."""
        size = self.attachment.ranks.size
        make = self.layouts if self.layouts is not None else lambda tokens: zigzag(tokens, size)
        layout = make(tokens)
        return make(2 * size) if tokens < 2 * size and 0 in layout.lengths else layout


def _sorted(model: nn.Module, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], float | None]:
    """A call's batch, what is passed on, and the smoothing of labels. Raises ValueError for what a call with a whole batch cannot have."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    kind = type(model).__name__
    smoothing = given.pop("label_smoothing", None)
    if not given.get("fused_lm_head") and smoothing is None:
        raise ValueError(
            f"{kind} is called for logits of whole sequences, which no rank holds: trl's trainers ask for them with compute_loss_func, "
            "compute_metrics, predict(...) and generation without a RingCache"
        )
    if given.pop("seq_idx", None) is not None and given.get("cu_seq_lens_q") is None:
        raise ValueError(
            "seq_idx is given without cu_seq_lens_q and cu_seq_lens_k, which say where packed documents end: give these"
        )
    if given.get("output_router_logits"):
        raise ValueError(
            "output_router_logits is True, but the routers' loss would be of this rank's tokens alone: set router_aux_loss_coef=0.0"
        )
    for name in ("input_ids", "labels"):
        if not isinstance(given.get(name), torch.Tensor) or given[name].dim() != 2:
            raise ValueError(f"{name} of a call with a whole batch must be a tensor (batch, tokens) of all tokens: give one")
    batch = {name: given.pop(name) for name in (*_COLUMNS, *_DOCUMENTS, "num_items_in_batch") if name in given}
    passed = {name: given.pop(name) for name in _PASSED if name in given}
    other = sorted(name for name, value in given.items() if value is not False)
    if other:
        raise ValueError(f"{other[0]} is given to {kind}, but a call with a whole batch takes text alone: leave it out")
    tokens = batch["input_ids"].shape
    for name in _COLUMNS:
        if name in batch and tuple(batch[name].shape) != tuple(tokens):
            raise ValueError(f"{name} has shape {tuple(batch[name].shape)}, but must have that of input_ids, {tuple(tokens)}")
    return batch, passed, smoothing


def _digest(batch: dict[str, Any]) -> int:
    """A number that almost surely differs for batches that differ; it waits for the device."""
    parts = [batch[name].flatten() for name in _COLUMNS if name in batch]
    parts += [torch.as_tensor(batch[name], device=parts[0].device).flatten() for name in _DOCUMENTS if name in batch]
    rows, columns = batch["input_ids"].shape
    whole = torch.cat([part.to(torch.int64) for part in parts])
    # odd factors without a pattern: a product of 64 bits, of which the high ones count
    factors = torch.arange(1, len(whole) + 1, device=whole.device) * 0x2545F4914F6CDD1D | 1
    total = int(((whole + 1) * factors).sum())
    return (total ^ (rows << 40) ^ columns) % _MODULUS


def _turned(batch: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor | None]:
    """A batch whose rows begin with tokens, and where they began, (b,); None if all began so.

    Positions that only count tokens are left out, as the layout gives them. Raises ValueError for padding between tokens, and for the
    label of a first token after padding, which nothing predicts.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return batch, None
    if packed_documents(batch) is not None:
        return batch, None  # shard_batch says what is wrong with both
    live, (_, columns) = mask.bool(), mask.shape
    starts, lengths = live.int().argmax(dim=1), live.sum(dim=1)
    at = torch.arange(columns, device=mask.device)
    gaps = live != ((at >= starts[:, None]) & (at < (starts + lengths)[:, None]))
    if bool(gaps.any()):
        row = int(gaps.any(dim=1).int().argmax())
        raise ValueError(
            f"attention_mask hides tokens of row {row} between others that it shows, but padding is possible at the ends of a row only: "
            "move it there"
        )
    is_turned = bool(starts.any())
    if is_turned:
        first = batch["labels"].gather(1, starts[:, None])[:, 0]
        if bool(((starts > 0) & (first != IGNORE)).any()):
            raise ValueError(
                f"labels count the first token after padding on the left, which only padding comes before: set its label to {IGNORE}"
            )
        turn = (at + starts[:, None]) % columns
        batch = {name: value.gather(1, turn) if name in _COLUMNS else value for name, value in batch.items()}
    if "position_ids" in batch:
        from_start = batch["position_ids"] - at
        if not bool(((from_start != from_start[:, :1]) & batch["attention_mask"].bool()).any()):
            batch = {name: value for name, value in batch.items() if name != "position_ids"}
    return batch, starts if is_turned else None


def _padded(batch: dict[str, Any], columns: int) -> dict[str, Any]:
    """A batch with padding at the end of its rows, (b, columns)."""
    tokens = batch["input_ids"]
    if "attention_mask" not in batch and packed_documents(batch) is None and "position_ids" not in batch:
        batch = {**batch, "attention_mask": torch.ones_like(tokens)}
    more = columns - tokens.shape[1]
    return {name: F.pad(value, (0, more), value=_COLUMNS[name]) if name in _COLUMNS else value for name, value in batch.items()}
