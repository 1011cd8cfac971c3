"""Arguments of the plain kernels for what happens to scores and weights."""

from __future__ import annotations

import numpy as np
import torch

from .modifiers import Dropout, Modifiers
from .table import BlockTable, TileTable

# numbers that may be anything: another one is no other kernel
NOT_SPECIALIZED = ("place_stride", "slopes_stride", "seed_low", "seed_high", "offset", "all_heads", "first_head", "dropped")
_FARTHEST = (1 << 31) - 1


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
    found |= dict(places_ptr=blocks.places, place_stride=table.stride, cap=modifiers.softcap)
    if modifiers.slopes is not None:
        rows, heads = modifiers.slopes.shape
        assert modifiers.slopes.is_contiguous() and modifiers.slopes.dtype == torch.float32
        found |= dict(slopes_ptr=modifiers.slopes, slopes_stride=heads if rows > 1 else 0)
    if modifiers.bias is not None:
        values, edges = modifiers.bias.values, padded_edges(modifiers.bias.edges, table, device)
        assert values.is_contiguous() and values.dtype == torch.float32
        found |= dict(edges_ptr=edges, values_ptr=values, EDGES=len(edges), PIECES=values.shape[1])
    if modifiers.dropout is not None:
        found |= dropout_arguments(modifiers.dropout)
    return found


def padded_edges(edges: tuple[int, ...], table: TileTable, device: torch.device) -> torch.Tensor:
    """The edges in int32, and at least one beyond all distances: as many as a power of 2. Kept with the table."""

    def build() -> torch.Tensor:
        size = max(2, 1 << len(edges).bit_length())
        found = np.full(size, _FARTHEST, dtype=np.int64)
        found[: len(edges)] = np.clip(edges, -_FARTHEST, _FARTHEST)
        return torch.from_numpy(found.astype(np.int32)).to(device)

    return table.derived(("edges", edges, device), build)


def dropout_arguments(dropout: Dropout) -> dict:
    """Keyword arguments of a launch that drops pairs."""
    return dict(
        seed_low=_signed(dropout.seed & 0xFFFFFFFF),
        seed_high=_signed(dropout.seed >> 32),
        offset=_signed(dropout.offset),
        all_heads=dropout.heads,
        first_head=dropout.first_head,
        dropped=dropout.dropped,
        whole=1 / (1 - dropout.p),
    )


def _signed(word: int) -> int:
    """A word of 32 bits as an int32."""
    return word - (1 << 32) if word >> 31 else word
