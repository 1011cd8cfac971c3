"""Sequence to heads and back, around a ring: attention on a grid of ranks, `ring` x `heads`.

Rank r of the grid is the `r % heads.size`-th on its heads axis and the `r // heads.size`-th on its ring axis, and holds shard r of the
layout. On the heads axis (size u) an all-to-all gives each rank all rows of the u ranks for 1/u of the heads; a ring whose shards
are the u ranks' rows, one after the other, runs along the other axis; the inverse all-to-all takes the output back. With a ring of
one rank this is Ulysses, with a heads axis of one rank ring attention.

Sources: DeepSpeed-Ulysses (Jacobs et al. 2023, section 3); USP, both at once (Fang and Zhao 2024, section 3.1).

Shapes: b batch, s tokens of this rank, S tokens of its heads axis, h query heads, hk key/value heads, d head dim, d_v value head dim.
What moves between ranks is (rows, b, heads, d), so that a rank's rows are one contiguous message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np
import torch

from . import local, passes
from .layout import Layout
from .plan import Order
from .score import Score
from .span import Span
from .steps import Steps
from .transport import Peer, Ranks, Transport


class Hybrid(Ranks):
    """A grid of ranks, row by row: `rank = ring.rank * heads.size + heads.rank`. Pass it as `group`; `hybrid` makes one of a mesh.

    `everyone` are all ranks of the grid, in any order: rank r of the grid is `members[r]` there.
    """

    def __init__(self, ring: Transport, heads: Transport, everyone: Ranks, members: Sequence[int] | None = None) -> None:
        self.ring = ring
        self.heads = heads
        self.rank = ring.rank * heads.size + heads.rank
        self.size = ring.size * heads.size
        self._everyone = everyone
        self._members = tuple(range(self.size)) if members is None else tuple(members)
        assert self._members[self.rank] == everyone.rank
        assert self.size == everyone.size == len(set(self._members))

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        records = self._everyone.all_gather_control(record, patience)
        return None if records is None else [records[member] for member in self._members]

    def check_device(self, device: torch.device) -> None:
        for axis in (self.ring, self.heads):
            axis.check_device(device)

    def connect(self, device: torch.device) -> None:
        for axis in (self.ring, self.heads):
            axis.connect(device)

    def check_heads(self, h: int) -> None:
        """Raise ValueError if the heads axis cannot share h query heads."""
        if h % self.heads.size:
            raise ValueError(
                f"q has {h} heads, which the {self.heads.size} ranks of the heads axis do not divide: "
                "make the heads axis shorter and the ring longer"
            )

    def kv_heads(self, h: int, hk: int) -> int:
        """K/V heads on each rank of the ring."""
        return kv_copies(h, hk, self.heads.size) * hk // self.heads.size

    def rows(self, layout: Layout) -> tuple[int, ...]:
        """Rows of each rank of this rank's heads axis."""
        first = self.rank - self.heads.rank
        return layout.lengths[first : first + self.heads.size]

    def axis_layout(self, layout: Layout) -> Layout:
        """The rows of this rank's heads axis, one rank's after the other's, as a layout of their own."""
        starts = accumulate(self.rows(layout), initial=0)
        return Layout(sum(self.rows(layout)), tuple((Span(start, n),) for start, n in zip(starts, self.rows(layout))), "rows")

    @cached_property
    def facts(self) -> dict[str, object]:
        """What must be equal on all ranks for the grid to be one."""
        order = "in order" if self._members == tuple(range(self.size)) else f"in the order {self._members}"
        return {"mesh": f"{self!r} {order}"}

    def __repr__(self) -> str:
        return f"hybrid(ring={self.ring.size}, heads={self.heads.size})"


def ring_layout(layout: Layout, u: int) -> Layout:
    """The layout of the ring: the shards of each heads axis of u ranks, one after the other."""
    shards = (layout.spans[first : first + u] for first in range(0, layout.world_size, u))
    return Layout(layout.seq_len, tuple(tuple(span for spans in shard for span in spans) for shard in shards), layout.name)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The all-to-all of a heads axis whose ranks hold `rows` rows each."""

    transport: Transport
    rows: tuple[int, ...]

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        ends = list(accumulate(self.rows))
        return [(end - n, end) for end, n in zip(ends, self.rows)]

    def own_order(self, order: Order | None) -> Order | None:
        """This rank's part of an order of all the axis's rows: a plan sorts rows within spans, and so within ranks."""
        if order is None:
            return None
        begin, end = self._bounds[self.transport.rank]
        own = order.rows[begin:end] - begin
        assert ((own >= 0) & (own < end - begin)).all()
        return None if (own == np.arange(end - begin)).all() else Order(own)

    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Each (b, s, n, d), n a multiple of the axis's size, to (b, S, n / size, d): the axis's rows, this rank's heads."""
        u, mine = self.transport.size, self.transport.rank
        slabs = [x.unflatten(2, (u, -1)).permute(2, 1, 0, 3, 4).contiguous() for x in tensors]  # (u, s, b, n / u, d)
        found = [x.new_empty(sum(self.rows), *x.shape[2:]) for x in slabs]
        sends, receives = [], []
        for slab, rows in zip(slabs, found):
            for peer, (begin, end) in enumerate(self._bounds):
                if peer == mine:
                    rows[begin:end] = slab[peer]
                else:
                    sends.append(Peer(peer, slab[peer]))
                    receives.append(Peer(peer, rows[begin:end]))
        self.transport.exchange(sends, receives).wait()
        return [rows.transpose(0, 1) for rows in found]

    def to_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The inverse: each (b, S, n / size, d) to (b, s, n, d)."""
        u, mine = self.transport.size, self.transport.rank
        whole = [x.transpose(0, 1).contiguous() for x in tensors]  # (S, b, n / u, d)
        found = [x.new_empty(u, self.rows[mine], *x.shape[1:]) for x in whole]
        sends, receives = [], []
        for rows, slabs in zip(whole, found):
            for peer, (begin, end) in enumerate(self._bounds):
                if peer == mine:
                    slabs[peer] = rows[begin:end]
                else:
                    sends.append(Peer(peer, rows[begin:end]))
                    receives.append(Peer(peer, slabs[peer]))
        self.transport.exchange(sends, receives).wait()
        return [slabs.permute(2, 1, 0, 3, 4).flatten(2, 3) for slabs in found]


@dataclass(frozen=True, eq=False)
class HybridRun:
    """What autograd carries besides tensors. `stats`: whether the statistics go back to the rows' owners."""

    exchange: HeadExchange
    ring: Transport
    steps: Steps
    score: Score
    stats: bool


class HybridAttention(torch.autograd.Function):
    """out (b, s, h, d_v), and row_max and row_sum (b, h, s), empty unless `run.stats`, of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: HybridRun) -> tuple[torch.Tensor, ...]:
        ctx.copies = kv_copies(q.shape[2], k.shape[2], run.exchange.transport.size)
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = run.exchange.to_heads(q, _repeated(k, ctx.copies), _repeated(v, ctx.copies))
            out, row_max, row_sum = passes.forward(run.ring, run.steps, run.score, q, k, v, final=True)
            ctx.save_for_backward(q, k, v, out, row_max, row_sum)
            stats = [_as_rows(x) for x in (row_max, row_sum)] if run.stats else []
            own_out, *own_stats = run.exchange.to_rows(out, *stats)
        own_max, own_sum = (_as_stats(x) for x in own_stats) if run.stats else (row_max.new_empty(0), row_sum.new_empty(0))
        ctx.run = run
        ctx.mark_non_differentiable(own_max)
        ctx.set_materialize_grads(False)
        return own_out, own_max, own_sum

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        own_dout, _, own_dsum = grads
        if torch.is_grad_enabled():
            raise ValueError("ring attention has no second derivative: call backward without create_graph=True")
        q, k, v, out, row_max, row_sum = ctx.saved_tensors
        run: HybridRun = ctx.run
        b, h, s = q.shape[0], q.shape[2] * run.exchange.transport.size, run.exchange.rows[run.exchange.transport.rank]
        if own_dout is None:
            own_dout = out.new_zeros(b, s, h, v.shape[3])
        with torch.autocast(q.device.type, enabled=False):
            if own_dsum is None:
                own_dsum = row_sum.new_zeros(b, h, s)
            # whether a rank's loss knows of the statistics is its own affair: all ranks send
            dout, *dsum = run.exchange.to_heads(own_dout, *([_as_rows(own_dsum)] if run.stats else []))
            delta = local.delta(out, dout)
            if run.stats:
                # d lse = d row_sum * row_sum enters dS = P (dP - delta) as P d lse
                delta = delta - _as_stats(dsum[0]) * row_sum
            kv_dtype = k.dtype if ctx.copies == 1 else row_sum.dtype
            inputs = q, k, v, dout, row_max, row_sum, delta
            dq, dk, dv = passes.backward(run.ring, run.steps, run.score, *inputs, kv_dtype=kv_dtype)
            dq, dk, dv = run.exchange.to_rows(dq, dk, dv)
            return dq, _summed(dk, ctx.copies, k.dtype), _summed(dv, ctx.copies, v.dtype), None


def kv_copies(h: int, hk: int, u: int) -> int:
    """How often each K/V head goes along, so that each of u ranks gets those of its h / u query heads, in groups of equal size."""
    return h // hk // gcd(h // u, h // hk)


def _repeated(x: torch.Tensor, copies: int) -> torch.Tensor:
    return x if copies == 1 else x.repeat_interleave(copies, dim=2)


def _summed(dx: torch.Tensor, copies: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradients of a head's copies as one, in a fixed order, rounded once."""
    return dx if copies == 1 else dx.unflatten(2, (-1, copies)).sum(3).to(dtype)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """(b, h, s) as (b, s, h, 1)."""
    return x.transpose(1, 2).unsqueeze(-1)


def _as_stats(x: torch.Tensor) -> torch.Tensor:
    """(b, s, h, 1) as (b, h, s)."""
    return x.squeeze(-1).transpose(1, 2).contiguous()
