"""Attention on a grid of ranks, `ring` x `heads`: an all-to-all from sequence to heads, a ring, and an all-to-all back.

Rank r of the grid is the `r % heads.size`-th on its heads axis and the `r // heads.size`-th on its ring axis, and holds shard r of the
layout. On the heads axis (size u) an all-to-all gives each rank all rows of the u ranks for 1/u of the heads. A ring runs along the
other axis; its shards are the u ranks' rows, one after the other. The inverse all-to-all takes the output back. With a ring of one
rank this is Ulysses; with a heads axis of one rank it is ring attention.

Sources: DeepSpeed-Ulysses (Jacobs et al. 2023, section 3); USP, both at once (Fang and Zhao 2024, section 3.1).

Shapes: b batch, s tokens of this rank, S tokens of its heads axis, h query heads, hk key/value heads, d head dim, d_v value head dim.
Messages have the shape (rows, b, heads, d), so that a rank's rows are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd

import numpy as np
import torch

from ..geometry.layout import Layout
from ..geometry.rows import Order
from ..geometry.span import Span
from ..transport import Peer, Ranks, Transport


class Hybrid(Ranks):
    """A grid of ranks, row by row: `rank = ring.rank * heads.size + heads.rank`. Pass it as `group`; `hybrid` makes one from a mesh.

    `everyone` holds all ranks of the grid, in any order: rank r of the grid is rank `members[r]` of `everyone`. `names` are the names
    of the axes' process groups, if the axes are process groups; compiled graphs find the grid by them.
    """

    def __init__(
        self,
        ring: Transport,
        heads: Transport,
        everyone: Ranks,
        members: Sequence[int] | None = None,
        names: tuple[str, str] | None = None,
    ) -> None:
        self.ring = ring
        self.heads = heads
        self.names = names
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
        """Raise ValueError if h query heads cannot be divided among the ranks of the heads axis."""
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
        """A layout of the rows of this rank's heads axis alone, rank after rank."""
        starts = accumulate(self.rows(layout), initial=0)
        return Layout(sum(self.rows(layout)), tuple((Span(start, n),) for start, n in zip(starts, self.rows(layout))), "rows")

    @cached_property
    def facts(self) -> dict[str, object]:
        """Facts of the grid that must be equal on all ranks."""
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
        """This rank's part of an order of all rows of the axis. A plan sorts rows only within spans, hence only within ranks."""
        if order is None:
            return None
        begin, end = self._bounds[self.transport.rank]
        own = order.rows[begin:end] - begin
        assert ((own >= 0) & (own < end - begin)).all()
        return None if (own == np.arange(end - begin)).all() else Order(own)

    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Each (b, s, n, d), with n a multiple of the axis's size, to (b, S, n / size, d): the axis's rows, this rank's heads."""
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


def kv_copies(h: int, hk: int, u: int) -> int:
    """How many copies of each K/V head are sent, so that each of u ranks gets those of its h / u query heads, in equal groups."""
    return h // hk // gcd(h // u, h // hk)
