"""Arguments of kernels for what happens to scores and weights."""

from __future__ import annotations

import numpy as np
import torch

from .distances import spread
from .modifiers import LEVELS, Bias, Dropout, Modifiers
from .table import BlockTable, TileTable, on_device
from .units import LOG2_E

# numbers that may be anything: another one is no other kernel
NOT_SPECIALIZED = (
    "place_stride", "slopes_stride", "slopes_count", "biases_count", "nearest", "seed_low", "seed_high", "offset", "all_heads",
    "first_head", "dropped",
)  # fmt: skip
HOPPER_ARGUMENTS = (
    "into_cap", "per_unit", "slopes_ptr", "slopes_count", "biases_ptr", "biases_count", "nearest", "places_ptr", "place_stride",
    "seed_low", "seed_high", "offset", "all_heads", "first_head", "dropped", "kept_share",
)  # fmt: skip
_FARTHEST = (1 << 31) - 1
# positions of blocks of rows that Hopper kernels draw for are multiples of it
ALIGNED = 16
# of the numbers that drop a pair: Hopper kernels compare them as fp16, whose infinity this is
_MOST_DROPPED = 0x7C00
# of distances, whose biases Hopper kernels look up one by one
_MOST_BIASES = 1 << 14


def score_arguments(modifiers: Modifiers | None, blocks: BlockTable, table: TileTable, device: torch.device) -> dict:
    """Keyword arguments of a launch over these blocks of a table."""
    found: dict = dict.fromkeys(
        ("places_ptr", "cap", "slopes_ptr", "edges_ptr", "values_ptr", "seed_low", "seed_high", "offset", "all_heads", "whole")
    )
    found |= dict.fromkeys(("place_stride", "slopes_stride", "first_head", "dropped"))
    found |= dict(MODIFIED=modifiers is not None, EDGES=1, PIECES=1)
    if modifiers is None:
        return found
    # a softcap alone has no places
    found |= dict(places_ptr=blocks.places, place_stride=table.stride)
    if modifiers.slopes is not None:
        rows, heads = modifiers.slopes.shape
        found |= dict(slopes_stride=heads if rows > 1 else 0)
    if modifiers.bias is not None:
        edges = padded_edges(modifiers.bias.edges, table, device)
        found |= dict(edges_ptr=edges, EDGES=len(edges), PIECES=modifiers.bias.values.shape[1])
    if modifiers.dropout is not None:
        found |= _dropout_arguments(modifiers.dropout)
    return found | moving_score_arguments(modifiers)


def moving_score_arguments(modifiers: Modifiers | None) -> dict:
    """Those of `score_arguments` that may differ between launches of a kind (see `launches`)."""
    found: dict = {}
    if modifiers is None:
        return found
    found |= _slopes_and_words(modifiers)
    if modifiers.softcap is not None:
        found |= dict(cap=float(modifiers.softcap))
    if modifiers.bias is not None:
        assert modifiers.bias.values.is_contiguous() and modifiers.bias.values.dtype == torch.float32
        found |= dict(values_ptr=modifiers.bias.values)
    if modifiers.dropout is not None:
        found |= dict(whole=1 / (1 - modifiers.dropout.p))
    return found


def _slopes_and_words(modifiers: Modifiers) -> dict:
    """What moves alike in plain kernels and in those for Hopper."""
    if modifiers.slopes is None:
        return modifiers.words
    assert modifiers.slopes.is_contiguous() and modifiers.slopes.dtype == torch.float32
    return modifiers.words | dict(slopes_ptr=modifiers.slopes)


def hopper_obstacle(modifiers: Modifiers, table: TileTable, softmax_scale: float) -> str:
    """Why Hopper kernels do not modify scores so over this table; empty where they do."""
    if not softmax_scale > 0:
        # times another scale, the least score of a pair that is not live would be the greatest
        return f"softmax_scale is {softmax_scale}, and Hopper kernels modify scores only if it is positive"
    if modifiers.bias is not None and biases_count(modifiers.bias) > _MOST_BIASES:
        return f"the edges of a bias are more than {_MOST_BIASES} positions apart"
    if modifiers.dropout is not None and not table.aligned(ALIGNED):
        return f"tiles do not begin at positions that are multiples of {ALIGNED}, where pairs are drawn fast"
    if modifiers.dropout is not None and modifiers.dropout.dropped > _MOST_DROPPED:
        return f"dropout of {modifiers.dropout.p} is above {_MOST_DROPPED / LEVELS}"
    return ""


def facts_of(modifiers: Modifiers | None) -> tuple:
    """What arguments that do not move depend on besides the table: those of another kind are another launch."""
    if modifiers is None:
        return ()
    slopes, bias, dropout = modifiers.slopes, modifiers.bias, modifiers.dropout
    return (
        modifiers.softcap is not None,
        None if slopes is None else len(slopes),
        None if bias is None else bias.edges,
        None if dropout is None else (dropout.heads, dropout.first_head, dropout.dropped),
    )


def moving_arguments(modifiers: Modifiers | None, table: TileTable, softmax_scale: float, device: torch.device) -> dict:
    """Keyword arguments of a launch of a Hopper kernel that may differ between launches of a kind (see `launches`)."""
    if modifiers is None:
        return dict(scale=softmax_scale * LOG2_E.value)
    unit = modifiers.softcap or softmax_scale
    found: dict = dict(scale=unit * LOG2_E.value, per_unit=1 / unit) | _slopes_and_words(modifiers)
    if modifiers.softcap is not None:
        found |= dict(into_cap=softmax_scale / unit)
    if modifiers.bias is not None:
        found |= dict(biases_ptr=biases(modifiers.bias, table, device))
    if modifiers.dropout is not None:
        found |= dict(kept_share=1 - modifiers.dropout.p)
    return found


def unmodified() -> dict:
    """The keyword arguments of a launch of a Hopper kernel for what happens to scores, if nothing does."""
    return dict.fromkeys(HOPPER_ARGUMENTS) | dict(MODIFIED=False)


def fixed_arguments(modifiers: Modifiers | None, table: TileTable, places: torch.Tensor | None) -> dict:
    """As `unmodified`, with those that do not move of what happens. places: of the segments that the launch walks."""
    found = unmodified()
    if modifiers is None:
        return found
    found["MODIFIED"] = True
    if modifiers.placed:
        found |= dict(places_ptr=places, place_stride=table.stride)
    if modifiers.slopes is not None:
        found |= dict(slopes_count=modifiers.slopes.numel())
    if modifiers.bias is not None:
        found |= dict(biases_count=biases_count(modifiers.bias), nearest=_nearest(modifiers.bias))
    if modifiers.dropout is not None:
        found |= _dropout_arguments(modifiers.dropout)
    return found


def _nearest(bias: Bias) -> int:
    """The distance of the first of `biases`."""
    return bias.edges[0] - 1 if bias.edges else 0


def biases_count(bias: Bias) -> int:
    """How many distances lie between the first piece and the last, and one in each of these."""
    return bias.edges[-1] - bias.edges[0] + 2 if bias.edges else 1


def biases(bias: Bias, table: TileTable, device: torch.device) -> torch.Tensor:
    """The bias of each distance from `_nearest` on: (h, biases_count), contiguous. Those beyond are as the first and the last."""
    return spread(bias.values, pieces_of_distances(bias, table, device)[0])


def pieces_of_distances(bias: Bias, table: TileTable, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The piece of each distance from `_nearest` on, (biases_count,), and the first of each piece's distances there, and their count,
    (pieces + 1,): int32. Kept with the table."""

    def build() -> tuple[torch.Tensor, torch.Tensor]:
        distances = np.arange(biases_count(bias)) + _nearest(bias)
        pieces = np.searchsorted(bias.edges, distances, side="right")
        firsts = np.searchsorted(pieces, np.arange(len(bias.edges) + 2))
        found = on_device((pieces.astype(np.int32), firsts.astype(np.int32)), device)
        return found[0], found[1]

    return table.derived(("pieces", bias.edges, device), build)


def padded_edges(edges: tuple[int, ...], table: TileTable, device: torch.device) -> torch.Tensor:
    """The edges in int32, and at least one beyond all distances: as many as a power of 2. Kept with the table."""

    def build() -> torch.Tensor:
        size = max(2, 1 << len(edges).bit_length())
        found = np.full(size, _FARTHEST, dtype=np.int64)
        found[: len(edges)] = np.clip(edges, -_FARTHEST, _FARTHEST)
        return torch.from_numpy(found.astype(np.int32)).to(device)

    return table.derived(("edges", edges, device), build)


def _dropout_arguments(dropout: Dropout) -> dict:
    """Those keyword arguments of a launch that drops pairs that do not move."""
    return dict(all_heads=dropout.heads, first_head=dropout.first_head, dropped=dropout.dropped)
