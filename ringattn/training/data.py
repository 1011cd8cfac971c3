"""Batches: documents packed into one sequence, each of which sees itself only, and each rank's rows of a batch.

    batch = pack([[5, 6, 7], [8, 9]])                     # one sequence of 5 tokens
    batch = shard_batch(batch, layout, rank)               # this rank's rows of it
    loss = ... model(**batch)                              # an attached transformers model takes it as it is

Shapes: b batch, s tokens of the whole sequence, s_local tokens of this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import check
from ..geometry.layout import Layout, shard
from ..geometry.mask import Documents, Mask, documents
from ..runtime.agree import Facts, gather_integers, refusing
from ..transport import Ranks
from .ahead import Ahead
from .causal_lm import IGNORE, shift_labels

__all__ = ["ShardedBatches", "pack", "shard_batch"]

Batch = dict[str, Any]

# these describe the whole sequence on every rank, whatever their shape
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_WHOLE = frozenset({*_BOUNDS, "max_length_q", "max_length_k", "num_items_in_batch"})
_END: Any = object()  # what follows a loader's last batch


def pack(
    tokens: Sequence[Sequence[int] | torch.Tensor], labels: Sequence[Sequence[int] | torch.Tensor] | None = None, *, to: int = 0
) -> Batch:
    """Pack documents of any lengths into one sequence: a batch of whole tensors, for `shard_batch`.

    Args:
        tokens: the documents, each a list or 1-D tensor of token ids; empty documents are left out.
        labels: of the same lengths, not shifted; the tokens by default. A label `IGNORE` is not predicted.
        to: fill up to this many tokens with one more document of token 0 whose labels are all `IGNORE`.

    Returns `input_ids`, `shift_labels`, `position_ids` (1, s), int64, and the documents' bounds as `cu_seq_lens_q` and
    `cu_seq_lens_k` (documents + 1), int32, which are transformers' names for them. The last token of a document predicts
    nothing: `shift_labels` is `IGNORE` there. Raises ValueError if there is no token, or if the tokens do not fit `to`.

    >>> from ringattn.training.data import pack
    >>> pack([[5, 6, 7], [8, 9]])["shift_labels"]
    tensor([[   6,    7, -100,    9, -100]])
    """
    parts = _documents("tokens", tokens)
    targets = parts if labels is None else _documents("labels", labels)
    if [len(part) for part in parts] != [len(part) for part in targets]:
        raise ValueError(
            f"labels have the lengths {[len(part) for part in targets]} and tokens {[len(part) for part in parts]}: give one per token"
        )
    lengths = [len(part) for part in parts if len(part)]
    total = sum(lengths)
    if not total:
        raise ValueError(f"tokens holds {len(parts)} documents without a token: give at least one token")
    fill = check.integer("to", to, most=check.MAX_TOKENS) - total
    if to and fill < 0:
        raise ValueError(f"the documents have {total} tokens, but to is {to}: give fewer documents, or a larger to")
    shifted = [shift_labels(part[None])[0] for part in targets if len(part)]
    if to and fill:
        lengths.append(fill)
        parts.append(torch.zeros(fill, dtype=torch.int64))
        shifted.append(torch.full((fill,), IGNORE))
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ids = torch.cat(parts)[None]
    packed = documents(lengths=lengths)
    assert isinstance(packed, Documents)
    positions = packed_positions(packed, torch.arange(ids.shape[1]))[None]
    return dict(
        input_ids=ids, shift_labels=torch.cat(shifted)[None], position_ids=positions, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds
    )


def shard_batch(batch: Mapping[str, Any], layout: Layout, rank: int) -> Batch:
    """This rank's rows of a batch of whole sequences, for an attached model and the losses.

    - Tensors of `layout.seq_len` columns, (b, s) or (b, s, ...), are cut along the columns; so are `position_ids` of (3, b, s).
    - `labels` are first shifted over the whole sequence and become `shift_labels`, int64. With packed documents (given by their bounds, or
      by `position_ids` that restart), no label crosses a bound, and tokens past the last bound have no label.
    - `position_ids` are added if missing: global positions, or positions that restart at each document.
    - `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, which describe the whole sequence, stay as they are, and
      so does everything that is not a tensor. NumPy's arrays of numbers become tensors. Bounds that end before the sequence get its end:
      what follows the last document is padding, and a document of its own.
    - An `attention_mask` of ones is dropped. One with zeros on the right of its rows (padding) is cut.

    Raises ValueError for tokens that are not a tensor of sequences, a tensor of another length, labels that are not one integer per
    token, both `labels` and `shift_labels`, bounds that do not fit this sequence, `position_ids` that are not one per token, and an
    `attention_mask` that has zeros before ones, counts documents, or has not two dimensions. Where it has zeros, labels must be `IGNORE`.
    """
    check.instance("layout", layout, Layout, check.BUILD_A_LAYOUT)
    check.instance("batch", batch, Mapping, "give a dict of whole sequences")
    out = {name: torch.from_numpy(value) if _is_numeric(value) else value for name, value in batch.items()}
    tokens = tokens_of(out)
    packed = packed_documents(out)
    if packed is not None and packed.cu_seqlens[-1] > layout.seq_len:
        raise ValueError(
            f"cu_seq_lens_q ends with {packed.cu_seqlens[-1]}, but the sequence has {layout.seq_len} tokens: give the bounds within a row; "
            "they hold for all rows of the batch"
        )
    out |= _ends_of_padding(out, packed, layout.seq_len)
    mask = _padded_mask(out.pop("attention_mask", None))
    _check_positions(out.get("position_ids"))
    if out.get("labels") is not None:
        if out.get("shift_labels") is not None:
            raise ValueError("the batch has both labels and shift_labels: give one of them")
        out["shift_labels"] = _shifted(_targets("labels", out.pop("labels"), tokens), packed, out.get("position_ids"))
    elif out.get("shift_labels") is not None:
        out["shift_labels"] = _targets("shift_labels", out["shift_labels"], tokens)
    if mask is not None:
        out["attention_mask"] = mask
        _check_padding(mask, packed, out.get("shift_labels"))
    here = layout.positions(rank)
    if out.get("position_ids") is None:
        positions = here if packed is None else packed_positions(packed, here)
        out["position_ids"] = positions.to(tokens.device).expand(tokens.shape[0], -1)
        skipped = _WHOLE | {"position_ids"}
    else:
        skipped = _WHOLE
    for name, value in out.items():
        if name in skipped or not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        dim = 2 if name == "position_ids" and value.dim() == 3 else 1
        if value.shape[dim] != layout.seq_len:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but {layout!r} is for {layout.seq_len} tokens in dim {dim}: "
                "give the whole sequence, before it is split"
            )
        out[name] = shard(value, layout, rank, dim)
    return out


class _Loaded(NamedTuple):
    """A batch of the loader, and the loader's state after it, if a thread goes on with the loader."""

    batch: Any
    state: Any


class _CutBatch(NamedTuple):
    """A batch as it is yielded, and the loader's state after it."""

    found: tuple[Layout, Batch]
    state: Any


@dataclass(frozen=True)
class ShardedBatches:
    """A data loader's batches, each cut to this rank's rows with `shard_batch`. Every rank of a ring iterates over the same loader.

    Args:
        layouts: returns the layout for a number of tokens: `lambda tokens: ra.zigzag(tokens, world_size)`.
        of_documents: returns the layout of a batch with document bounds, from its mask and its number of tokens:
            `lambda mask, tokens: ra.balanced(mask, tokens, world_size)`. By default `layouts` does.
        prepare: called with the layout and the mask (None without bounds) of each batch before it is needed, such as
            `functools.partial(ra.prepare, like=(q, k, v))`. With it, a thread loads the next batch while this one is computed, and cuts
            and prepares it in the second half of the step, or once it is asked for: before, that would delay what the step queues.

    Iteration yields each batch with its layout, for `attach`, in the order of the loader, whose workers start on the thread that iterates;
    with `prepare`, its own code runs on the other: give it a generator of its own where it draws numbers. An error comes in the place of
    its batch. A dropped iterator ends its thread, after the batch under way. On GPUs, `prepare` runs on the stream that was current at the
    first batch.

    A loader that can be resumed (torchdata's `StatefulDataLoader`) has `state_dict` and `load_state_dict`. Call those of `ShardedBatches`:
    with `prepare`, the loader's own state is already that of the next batch.
    """

    loader: Iterable[Mapping[str, Any]]
    layouts: Callable[[int], Layout]
    rank: int
    of_documents: Callable[[Mask, int], Layout] | None = None
    prepare: Callable[[Layout, Mask | None], object] | None = None
    _latest: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)  # state after the batch yielded last

    def __post_init__(self) -> None:
        check.function("layouts", self.layouts, "of a number of tokens")
        if self.of_documents is not None:
            check.function("of_documents", self.of_documents, "of a mask and a number of tokens")
        if self.prepare is not None:
            check.function("prepare", self.prepare, "of a layout and a mask")

    def __iter__(self) -> Iterator[tuple[Layout, Batch]]:
        loader = iter(self.loader)
        if self.prepare is None:
            while (loaded := self._load(loader)) is not None:
                yield self._ready(None, loaded).found
            return
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        with Ahead(partial(self._load, loader), partial(self._ready, stream), "ringattn-batches") as ahead:
            while (loaded := ahead.result()) is not None:
                self._latest[:] = [loaded.state]
                yield loaded.found
        self._latest.clear()

    def state_dict(self) -> Any:
        """The loader's state after the batch that was yielded last, for a checkpoint. Raises ValueError where the loader has none."""
        of_now = self._of_loader("state_dict")
        return self._latest[0] if self._latest else of_now()

    def load_state_dict(self, state: Any) -> None:
        """Let the next iteration go on where `state_dict` was called. Raises ValueError for a loader without `load_state_dict`."""
        self._of_loader("load_state_dict")(state)
        self._latest.clear()

    def _of_loader(self, name: str) -> Callable[..., Any]:
        """A function of the loader."""
        found = getattr(self.loader, name, None)
        if found is None:
            raise ValueError(
                f"the loader is a {type(self.loader).__name__}, which has no {name}: give one that can be resumed, such as torchdata's "
                "StatefulDataLoader, or skip the batches that were trained on"
            )
        return found

    def _load(self, loader: Iterator[Any]) -> _Loaded | None:
        """The loader's next batch; None after the last."""
        batch = next(loader, _END)
        if batch is _END:
            return None
        # a copy: a state may hold what the loader goes on with
        resumes = self.prepare is not None and hasattr(self.loader, "state_dict")
        return _Loaded(batch, copy.deepcopy(self._of_loader("state_dict")()) if resumes else None)

    def _ready(self, stream: torch.cuda.Stream | None, loaded: _Loaded) -> _CutBatch:
        """A batch, cut and prepared."""
        batch = loaded.batch
        check.instance("a batch of the loader", batch, Mapping, "give a dict of whole sequences")
        tokens = tokens_of(batch).shape[1]
        mask = packed_documents(batch)
        if ends := _ends_of_padding(batch, mask, tokens):
            mask = packed_documents({**batch, **ends})
        layout = self.layouts(tokens) if mask is None or self.of_documents is None else self.of_documents(mask, tokens)
        rows = shard_batch(batch, layout, self.rank)
        if self.prepare is not None:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self.prepare(layout, mask)
        return _CutBatch((layout, rows), loaded.state)


def tokens_of(batch: Mapping[str, Any]) -> torch.Tensor:
    """`input_ids` (b, s), or else `inputs_embeds` (b, s, n). Raises ValueError if the batch has neither, or for another shape."""
    found = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if found is None:
        raise ValueError(f"the batch has {sorted(batch)}, but neither input_ids nor inputs_embeds")
    found = torch.from_numpy(found) if _is_numeric(found) else found
    if not isinstance(found, torch.Tensor) or found.dim() < 2:
        raise ValueError(f"the batch's tokens are {_shown(found)}, but must be a tensor (batch, tokens) of whole sequences")
    return found


def _ends_of_padding(batch: Mapping[str, Any], packed: Documents | None, tokens: int) -> Batch:
    """The bounds of a batch of `tokens` columns with the end of what follows the last document; nothing where they reach it."""
    if packed is None or packed.cu_seqlens[-1] >= tokens:
        return {}
    given = {name: torch.as_tensor(batch[name]) for name in _BOUNDS if batch.get(name) is not None}
    return {name: torch.cat([bounds, bounds.new_full((1,), tokens)]) for name, bounds in given.items()}


def packed_positions(packed: Documents, positions: torch.Tensor) -> torch.Tensor:
    """Positions (s_local,) within their documents, from global positions; past the last document they count from its end."""
    starts = torch.tensor(sorted(set(packed.cu_seqlens)))
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


def documents_of_positions(position_ids: torch.Tensor, layout: Layout, ranks: Ranks) -> Documents | None:
    """The documents at which `position_ids` (b, s_local) restart, or None if the ids are the global positions; a collective.

    A token at global position p with position id i belongs to the document that starts at p - i. So each rank knows where its own
    tokens' documents start, and the hosts swap these starts. Raises ValueError, on every rank, if the ids neither restart at
    documents nor are the global positions, and if they restart just at the shards' bounds, as those counted within shards do.
    """
    here = layout.positions(ranks.rank)
    with refusing(ranks):
        starts = _starts(position_ids, here)
    listed = gather_integers(ranks, Facts({"function": "position_ids of packed documents"}), starts)
    every = np.unique(np.concatenate(listed))
    bounds = [*every.tolist(), layout.seq_len]
    packed = documents(cu_seqlens=bounds)
    assert isinstance(packed, Documents)
    if _counted_within_shards(every.tolist(), layout):
        raise ValueError(
            f"position_ids restart just where the shards of {layout!r} do, as positions counted within shards would: leave them out, give "
            "layout.positions(rank), or, if there is a document a rank, say so with cu_seq_lens_q and cu_seq_lens_k"
        )
    with refusing(ranks):
        if every[0] != 0 or not torch.equal(packed_positions(packed, here), position_ids[0].cpu().to(torch.int64)):
            raise ValueError(
                "position_ids neither are the global positions nor restart at packed documents only: pass what is live as "
                "attach(model, mask=...), and they serve as positions alone"
            )
    return None if len(every) == 1 else packed


def packed_documents(batch: Mapping[str, Any]) -> Documents | None:
    """The documents whose bounds a batch has as `cu_seq_lens_q` and `cu_seq_lens_k`, as flash attention takes them; None without them.

    Raises ValueError for bad bounds, and for bounds of queries and keys that differ.
    """
    given = {name: check.integers(name, batch[name]).tolist() for name in _BOUNDS if batch.get(name) is not None}
    if not given:
        return None
    if len(given) == 2 and given[_BOUNDS[0]] != given[_BOUNDS[1]]:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ, but queries and keys are the same tokens: give the same bounds")
    name, bounds = next(iter(given.items()))
    if bounds[:1] != [0]:
        raise ValueError(f"{name} starts with {bounds[:1]}, but must start with 0 and give the bounds of all documents")
    packed = documents(cu_seqlens=bounds)
    assert isinstance(packed, Documents)
    return packed


def _counted_within_shards(starts: list[int], layout: Layout) -> bool:
    """Whether documents start just where the shards do, each of which is one run of positions."""
    shards = [layout.positions(rank) for rank in range(layout.world_size) if layout.lengths[rank]] if len(starts) > 1 else []
    return starts == sorted(int(shard[0]) for shard in shards) and all(
        torch.equal(shard - shard[0], torch.arange(len(shard))) for shard in shards
    )


def _starts(position_ids: torch.Tensor, here: torch.Tensor) -> np.ndarray:
    """The starts of the documents of this rank's tokens, ascending."""
    if position_ids.dim() != 2 or position_ids.shape[1] != len(here):
        raise ValueError(
            f"position_ids have shape {tuple(position_ids.shape)}, but must be (batch, {len(here)}), one per token of this rank; for "
            "several kinds of positions, pass what is live as attach(model, mask=...)"
        )
    if not bool((position_ids == position_ids[:1]).all()):
        raise ValueError(
            "position_ids differ between the rows of the batch, but the ring has one mask for all rows: give one row per call"
        )
    starts = np.unique((here - position_ids[0].cpu()).numpy())
    if starts[0] < 0:
        raise ValueError(
            "position_ids run ahead of the global positions, so they are not positions within packed documents: pass what is live "
            "as attach(model, mask=...), and they serve as positions alone"
        )
    return starts


def _documents(name: str, given: Sequence[Sequence[int] | torch.Tensor]) -> list[torch.Tensor]:
    listed = check.listed(name, given, "a list of documents")
    return [torch.as_tensor(check.integers(f"{name}[{i}]", part)) for i, part in enumerate(listed)]


def _check_padding(mask: torch.Tensor, packed: Documents | None, labels: torch.Tensor | None) -> None:
    """Raise ValueError for padding (b, s) in packed documents, and for labels (b, s) of it that count."""
    if packed is not None:
        raise ValueError(
            "attention_mask hides tokens, and cu_seq_lens_q is given: leave the mask out; what follows the last document is hidden"
        )
    if labels is not None and labels.shape == mask.shape and bool((labels.to(mask.device) != IGNORE)[mask == 0].any()):
        raise ValueError(
            f"attention_mask hides tokens that have labels: set the labels of padding to {IGNORE}, so that they do not count"
        )


def _padded_mask(mask: Any) -> torch.Tensor | None:
    """An attention_mask with padding on the right; None for one of ones. Raises ValueError for all others."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        array = check.as_array("attention_mask", mask, "a tensor (batch, tokens) of ones, or None")
        if not _is_numeric(array):
            raise ValueError(f"attention_mask is {mask!r}, but must be a tensor (batch, tokens) of ones, or None")
        mask = torch.from_numpy(array.astype(np.float64))
    if mask.is_meta or mask.layout != torch.strided:
        raise ValueError(f"attention_mask is on {mask.device} with the layout {mask.layout}, but must be dense, with values")
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but only a mask (batch, tokens) of ones is dropped: leave it out, and "
            "pass what is live as attach(model, mask=...)"
        )
    if mask.numel() and mask.max() > 1:
        raise ValueError(
            f"attention_mask counts to {int(mask.max())}, as for packed documents: give their bounds as cu_seq_lens_q and "
            "cu_seq_lens_k, or position_ids that restart"
        )
    if bool((mask[:, 1:].bool() & ~mask[:, :-1].bool()).any()) or (mask.numel() and not bool(mask[:, 0].all())):
        raise ValueError(
            "attention_mask hides tokens before others that it shows, or all of a row: pad on the right "
            "(tokenizer.padding_side = 'right'), or pack the sequences with pack(...), which needs no padding"
        )
    return None if bool(mask.all()) else mask.to(torch.int64)


def _check_positions(position_ids: Any) -> None:
    if position_ids is not None and not (isinstance(position_ids, torch.Tensor) and position_ids.dim() in (2, 3)):
        raise ValueError(
            f"position_ids are {_shown(position_ids)}, but must be a tensor (batch, tokens), or (kinds, batch, tokens) of several kinds: "
            "give one per token, or leave them out"
        )


def _targets(name: str, labels: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Labels (b, s) in int64."""
    if not isinstance(labels, torch.Tensor) or labels.shape != tokens.shape[:2]:
        raise ValueError(f"{name} are {_shown(labels)}, but must be a tensor of shape {tuple(tokens.shape[:2])}, one per token")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{name} are of {labels.dtype}, but must be integers, the ids of tokens")
    return labels.to(torch.int64)


def _shifted(labels: torch.Tensor, packed: Documents | None, position_ids: torch.Tensor | None) -> torch.Tensor:
    """The labels (b, s) shifted within their documents."""
    shifted = shift_labels(labels)
    if packed is not None:
        ends = torch.tensor(packed.cu_seqlens[1:]) - 1
        shifted[:, ends[ends >= 0]] = IGNORE
        shifted[:, packed.cu_seqlens[-1] :] = IGNORE
    elif position_ids is not None and position_ids.dim() == 2:
        shifted[:, :-1].masked_fill_(position_ids[:, 1:] <= position_ids[:, :-1], IGNORE)
    return shifted


def _is_numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def _shown(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, (torch.Tensor, np.ndarray)) else f"a {type(value).__name__}"
