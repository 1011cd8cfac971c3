"""The batch of a step that `verify` compares: of which sequence each tensor is, and a rank's rows of it.

A batch may have two sequences: that of the queries, and that of the keys of cross-attention, such as an encoder's tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .collective import shard
from .geometry.layout import Layout, zigzag
from .step_checks import has_encoder_and_decoder
from .training.data import shard_batch, tokens_of

# of an encoder with a decoder
_OF_TEXT, _OF_ANSWER = ("input_ids", "inputs_embeds"), ("decoder_input_ids", "decoder_inputs_embeds", "labels")
_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class StepBatch:
    """Whole sequences, with labels. kv_layout: of the tensors named `of_keys`; `layout` is that of all others.

    is_answer: whether labels are the decoder's, one for each token, and not to be shifted.
    """

    tensors: Mapping[str, Any]
    layout: Layout
    kv_layout: Layout | None = None
    of_keys: frozenset[str] = frozenset()
    is_answer: bool = False

    def shards(self, rank: int) -> dict[str, Any]:
        """This rank's rows. Raises ValueError for a tensor of another length."""
        if self.kv_layout is None:
            return shard_batch(self.tensors, self.layout, rank)
        found = {name: _cut(name, self.tensors[name], self.kv_layout, rank) for name in sorted(self.of_keys)}
        rest = {name: value for name, value in self.tensors.items() if name not in self.of_keys}
        if not self.is_answer:
            return found | shard_batch(rest, self.layout, rank)
        found |= {name: _cut(name, value, self.layout, rank) for name, value in rest.items()}
        found["shift_labels"] = found.pop("labels")
        return found

    def whole(self) -> dict[str, Any]:
        """All rows, as `shards` makes them."""
        # a layout of one rank holds all positions in order: the whole sequence gets labels and positions as the shards do
        keys = None if self.kv_layout is None else zigzag(self.kv_layout.seq_len, 1)
        return replace(self, layout=zigzag(self.layout.seq_len, 1), kv_layout=keys).shards(0)


def step_batch(
    model: nn.Module,
    batch: Mapping[str, Any],
    layout: Layout | None,
    kv_layout: Layout | None,
    of_keys: Collection[str],
    whole: nn.Module | None,
    ranks: int,
) -> StepBatch:
    """A batch with its layouts, zigzag by default, and its labels. Raises ValueError for what cannot be told apart."""
    if whole is None and has_encoder_and_decoder(model):
        return _text_and_answer(model, batch, layout, kv_layout, of_keys, ranks)
    layout = zigzag(tokens_of(batch).shape[1], ranks) if layout is None else layout
    batch = _with_labels(batch)
    if kv_layout is None and not of_keys:
        return StepBatch(batch, layout)
    kind = type(model).__name__
    if whole is None:
        raise ValueError(
            f"kv_layout or of_keys is given, but {kind} is compared with one sequence: leave them out; or, if it attends to other keys by "
            "itself, give whole=, a copy of it with dense attention"
        )
    if kv_layout is None or not of_keys:
        given, other = ("of_keys", "kv_layout") if kv_layout is None else ("kv_layout", "of_keys")
        raise ValueError(
            f"{given} is given without {other}: give both, the layout of the keys' tokens and the tensors that are of these"
        )
    missing = sorted(name for name in of_keys if not isinstance(batch.get(name), torch.Tensor))
    if missing:
        raise ValueError(f"of_keys holds {missing[0]!r}, but the batch has no such tensor, but {sorted(batch)}")
    return StepBatch(batch, layout, kv_layout, frozenset(of_keys))


def _text_and_answer(
    model: Any, batch: Mapping[str, Any], layout: Layout | None, kv_layout: Layout | None, of_keys: Collection[str], ranks: int
) -> StepBatch:
    """The batch of a model of transformers with an encoder and a decoder."""
    kind = type(model).__name__
    if of_keys:
        raise ValueError(f"of_keys is given, but {kind} says itself that its encoder takes {' or '.join(_OF_TEXT)}: leave it out")
    batch = {name: value for name, value in batch.items() if value is not None}
    for name in _MASKS:
        mask = batch.pop(name, None)
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise ValueError(f"{name} hides tokens, but {kind} is compared without padding: give rows of one length")
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        raise ValueError(f"{kind} has an encoder and a decoder: give labels, a tensor (batch, tokens), of its answer")
    if not any(name in batch for name in _OF_ANSWER[:2]):
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    unknown = sorted(batch.keys() - {*_OF_TEXT, *_OF_ANSWER})
    if unknown:
        raise ValueError(f"the batch has {unknown[0]!r}, but for {kind} verify takes {', '.join((*_OF_TEXT, *_OF_ANSWER))} alone")
    layout = zigzag(labels.shape[1], ranks) if layout is None else layout
    kv_layout = zigzag(tokens_of(batch).shape[1], ranks) if kv_layout is None else kv_layout
    return StepBatch(batch, layout, kv_layout, frozenset(batch.keys() & {*_OF_TEXT}), is_answer=True)


def _cut(name: str, x: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    if x.dim() < 2 or x.shape[1] != layout.seq_len:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, but {layout!r} is for {layout.seq_len} tokens in dim 1: give the whole sequence"
        )
    return shard(x, layout, rank)


def _with_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch, with its tokens as labels if it has none."""
    if batch.get("labels") is not None or batch.get("shift_labels") is not None:
        return batch
    if batch.get("input_ids") is None:
        raise ValueError(f"the batch has {sorted(batch)}, but neither labels nor input_ids to take them from: give labels")
    return {**batch, "labels": batch["input_ids"]}
