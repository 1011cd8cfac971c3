"""Tables of launches made ahead of their first call: `prepare_forward` and `prepare_backward` leave with a `TileTable` what launches read.

They choose as `attention.forward` and `attention.backward` do, from shapes alone, and launch nothing. They know of no modified scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from . import dispatch, hopper
from .attention import forward_choice
from .config import architecture, launch_for
from .continued import RowPart
from .dispatch import Kernels
from .queries import Queries
from .splits import key_splits, query_splits
from .table import TileTable


@dataclass(frozen=True)
class TensorKind:
    """What launches ask of a tensor besides its values: rows (b, s, h, d) at aligned addresses. strides: contiguous by default."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, int, int, int] | None = None

    def stride(self, dim: int | None = None) -> Any:
        _, s, h, d = self.shape
        strides = self.strides or (s * h * d, h * d, d, 1)
        return strides if dim is None else strides[dim]

    def data_ptr(self) -> int:
        return 0

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize


def prepare_forward(
    q: Any, k: Any, v: Any, table: TileTable, *, softmax_scale: float, first: bool, final: bool, part: RowPart | None = None
) -> None:
    """Make what `attention.forward` makes of a table in its first call. q, k, v: `TensorKind`, or tensors.

    first: no state comes in. final: as in `attention.forward`. part: of `continued_rows`.
    """
    if not q.numel():
        return
    on_hopper, config, how = forward_choice(q, k, v, table, softmax_scale, part=part if final else None)
    if on_hopper:
        forward_queues(q, k, v, table, config, how.most, first=first, final=final, part=part)
    else:
        table.query_blocks(config.block, config.step, q.device, how.most)


def forward_queues(
    q: Any, k: Any, v: Any, table: TileTable, config: Any, splits: int, *, first: bool, final: bool, part: RowPart | None
) -> None:
    """Make the queues of works that a Hopper forward reads, as `attention.forward` asks for them; arguments as in `prepare_forward`."""
    parts, touched_only = [None], splits > 1 or not (first or final)
    if part is not None and (first or (final and splits == 1)):
        parts = [part, part.others] if first else [part]
    for rows in parts:
        hopper.forward.work_queue(q, k, v, table, config, splits, touched_only, part=rows)


def prepare_backward(q: Any, k: Any, v: Any, dout: Any, table: TileTable, *, softmax_scale: float) -> None:
    """Make what `attention.backward` makes of a table in its first call. q, k, v, dout: `TensorKind`, or tensors."""
    if not q.numel() or not len(table):
        return
    statistics: Any = None
    chosen = dispatch.backward_kernels(Queries(q, dout, statistics, statistics, statistics), k, v, table, softmax_scale)
    (b, _, h, d), hk = q.shape, k.shape[2]
    if chosen in (Kernels.HOPPER_FUSED, Kernels.HOPPER_ORDERED):
        ordered = chosen == Kernels.HOPPER_ORDERED
        block, step = hopper.fused.block_and_step(d, v.shape[3])
        config = hopper.fused.config_for(hopper.head_dims.chosen_in_one(d, v.shape[3])[0])
        how = key_splits(table, block, step, b * hk, h // hk, q.device, 1 if ordered else None)
        if ordered:
            turns = hopper.turns.key_turns(table, block, step, q.device)
            hopper.fused.programs_for(table, config, b * hk * len(turns), b * hk, h // hk, q.device)
        else:
            hopper.backward.key_blocks_of(table, k.device, how.most, config)
            if hopper.fused.owns_heads(q, k, v, table):
                hopper.touches.touches_on(table, block, hopper.fused.config_for(d, owned=True).step, k.device)
    elif chosen == Kernels.HOPPER:
        hopper.backward.make_blocks(table, d, v.shape[3], q.device)
    else:
        arch, head_dim = architecture(q.device), max(d, v.shape[3])
        config = launch_for("dkdv", arch, head_dim, q.dtype)
        how = key_splits(table, config.block, config.step, b * hk, h // hk, q.device)
        table.key_blocks(config.block, config.step, q.device, how.most)
        config = launch_for("dq", arch, head_dim, q.dtype)
        how = query_splits(table, config.block, config.step, b * h, q.device)
        table.query_blocks(config.block, config.step, q.device, how.most)
