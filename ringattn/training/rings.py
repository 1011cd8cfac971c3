"""Rings that change with the batch: each sequence goes to as few ranks as hold it (dynamic context parallelism).

    rings = RingGroups()                                        # once: makes all process groups
    for ring in rings.deal(lengths, tokens_per_rank=8192):      # this rank's ring in each step of a global batch
        layout, batch = ring.batch(sequences, rank)             # this rank's rows of the ring's sequences, packed
        attach(model, layout=layout, group=rings[ring])
        ...                                                     # loss and backward pass, added up over the steps

The loss of a global batch is the mean over its tokens, whatever the rings: `mean_loss(..., tokens=count_tokens(*labels))` over all ranks
(see `loss.py`).

Source: rings of different sizes for sequences of different lengths (FlexSP, Wang et al. 2025; dynamic context parallelism of Megatron
Core).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import check
from ..geometry.layout import Layout
from ..geometry.placement import placed
from .causal_lm import IGNORE
from .data import Batch, pack, packed_documents, shard_batch

__all__ = ["RingGroup", "RingGroups", "deal_sequences"]


@dataclass(frozen=True)
class RingGroup:
    """The ranks `first` to `first + size - 1` of the job, and the numbers of the sequences that they hold in a step; maybe none."""

    first: int
    size: int
    sequences: tuple[int, ...]

    def batch(
        self,
        tokens: Sequence[Sequence[int] | torch.Tensor],
        rank: int,
        labels: Sequence[Sequence[int] | torch.Tensor] | None = None,
    ) -> tuple[Layout, Batch]:
        """The layout of this ring's packed sequences, and the rows of `rank`, a rank of the job, as from `pack` and `shard_batch`.

        tokens, labels: of all sequences of the global batch; only those of this ring are read. A ring with fewer tokens than ranks, or
        with none, is filled up to one token a rank. These have no label, so that all ranks run the model alike, as FSDP needs it. Raises
        ValueError if the ring does not hold the rank, or the batch does not hold the ring's sequences.
        """
        local = check.integer("rank", rank) - self.first
        if not 0 <= local < self.size:
            raise ValueError(f"rank is {rank}, but the ring has the ranks {self.first} to {self.first + self.size - 1}")
        mine = self._own("tokens", tokens) or [[0]] * self.size
        targets = [[IGNORE]] * self.size if not self.sequences else None if labels is None else self._own("labels", labels)
        whole = pack(mine, targets, to=max(self.size, sum(map(len, mine))))
        mask = packed_documents(whole)
        assert mask is not None
        layout = placed(mask, whole["input_ids"].shape[1], self.size)
        return layout, shard_batch(whole, layout, local)

    def _own(self, name: str, given: Sequence[Any]) -> list[Any]:
        """What is given for this ring's sequences."""
        try:
            return [given[i] for i in self.sequences]
        except IndexError:
            raise ValueError(
                f"{name} holds {len(given)} sequences, but the ring has number {max(self.sequences)}: give those of the whole batch"
            ) from None


class RingGroups:
    """The process groups of all rings: aligned runs of 1, 2, 4, ... ranks of the job. Make it once, on every rank; a collective.

    `rings[ring]` is the process group of a ring that holds this rank. Without a default group the job is this process alone, whose rings
    have the group None.
    """

    def __init__(self) -> None:
        here = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if here else (0, 1)
        self._groups: dict[tuple[int, int], dist.ProcessGroup | None] = {} if here else {(0, 1): None}
        size = 1
        while here and size <= self.world_size:
            for first in range(0, self.world_size - size + 1, size):
                # torch makes each group on all ranks
                group: Any = dist.group.WORLD if size == self.world_size else dist.new_group(list(range(first, first + size)))
                if first <= self.rank < first + size:
                    self._groups[first, size] = group
            size *= 2

    def __getitem__(self, ring: RingGroup) -> dist.ProcessGroup | None:
        if (ring.first, ring.size) not in self._groups:
            raise KeyError(f"{ring} does not hold rank {self.rank}, or is no aligned power of two of the {self.world_size} ranks")
        return self._groups[ring.first, ring.size]

    def deal(
        self, lengths: Sequence[int] | torch.Tensor, tokens_per_rank: int, ranks_per_node: int | None = None
    ) -> Iterator[RingGroup]:
        """This rank's ring in each step of `deal_sequences`."""
        for step in deal_sequences(lengths, self.world_size, tokens_per_rank, ranks_per_node):
            yield next(ring for ring in step if ring.first <= self.rank < ring.first + ring.size)


def deal_sequences(
    lengths: Sequence[int] | torch.Tensor, world_size: int, tokens_per_rank: int, ranks_per_node: int | None = None
) -> list[tuple[RingGroup, ...]]:
    """The rings of each step in which a global batch of sequences is trained. Every rank is in one ring of each step.

    lengths: tokens of each sequence. world_size: ranks in all. tokens_per_rank: the most tokens that a rank holds in a step, on average
    over its ring. ranks_per_node: a ring has at most so many ranks, unless a sequence needs more to hold it; None: no such limit.

    Longest first, a sequence joins the ring with room that has the least causal work a rank afterwards, or opens one. This has as few
    ranks, a power of two, as hold the sequence and carry its work in an even step. A new step begins when no step has room. Last, the
    busiest rings of a step take the ranks that are left, as long as each rank of a ring has a token. The result is the same on all
    ranks. Raises ValueError for a length that is not positive, and for one that exceeds what the largest power of two of the ranks holds.

    >>> from ringattn.training.rings import deal_sequences
    >>> for ring in deal_sequences([500, 60, 500, 50], world_size=4, tokens_per_rank=300)[0]:
    ...     print(ring.first, ring.size, ring.sequences)
    0 2 (0, 1)
    2 2 (2, 3)
    """
    listed = check.integers("lengths", lengths).tolist()
    world_size = check.integer("world_size", world_size, least=1, most=check.MAX_RANKS)
    room = check.integer("tokens_per_rank", tokens_per_rank, least=1)
    largest = _power_of_two_within(world_size)
    of_node = world_size if ranks_per_node is None else check.integer("ranks_per_node", ranks_per_node, least=1)
    for i, length in enumerate(listed):
        if not 0 < length <= largest * room:
            raise ValueError(
                f"lengths[{i}] is {length}, but must be from 1 to {largest * room}: {largest} ranks, the largest power of two of "
                f"{world_size}, hold {room} tokens each"
            )
    # the work of a rank in a step, if all is even
    even = sum(n * (n + 1) // 2 for n in listed) / world_size / max(1, ceil(sum(listed) / (world_size * room)))
    steps, rings = list[_Step](), _OpenRings(room)
    for i in sorted(range(len(listed)), key=lambda i: -listed[i]):
        length = listed[i]
        work = length * (length + 1) // 2
        # a rank without a token carries no work
        carry = min(ceil(work / even), _power_of_two_within(min(length, of_node)))
        least = min(largest, _power_of_two(max(ceil(length / room), carry)))
        # (work a rank, step, its ring), the least first; a ring's number one past the last opens a new one
        choices = [rings.best(least, length, work)]
        choices += [(work / least, at, len(step.rings)) for at, step in enumerate(steps) if step.free >= least][:1]
        found = min([x for x in choices if x is not None], default=None)
        if found is None:
            found = work / least, len(steps), 0
            steps.append(_Step(world_size))
        _, at, number = found
        rings.set(at, number, steps[at].add(number, least, i, length, work))
    return [step.rings_in_place(of_node) for step in steps]


def _power_of_two_within(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


class _OpenRings:
    """The rings of all steps in columns, which a batch of thousands of sequences asks again for each: step, number, size, tokens, work."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._places: dict[tuple[int, int], int] = {}
        self._columns = np.zeros((5, 64))

    def best(self, least: int, tokens: int, work: int) -> tuple[float, int, int] | None:
        """(work a rank with one more sequence, step, number) of the first of the rings with the least, among those that take it."""
        at, number, size, held, done = self._columns[:, : len(self._places)]
        takes = np.flatnonzero((size >= least) & (held + tokens <= size * self._room))
        if not len(takes):
            return None
        # sizes are powers of two: these are the quotients of exact numbers, rounded
        share = (done[takes] + work) / size[takes]
        first = takes[share == share.min()]
        at, number = min(zip(at[first].tolist(), number[first].tolist()))
        return float(share.min()), int(at), int(number)

    def set(self, at: int, number: int, ring: _OpenRing) -> None:
        """What a ring holds now."""
        place = self._places.setdefault((at, number), len(self._places))
        if place == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[:, place] = at, number, ring.size, ring.tokens, ring.work


@dataclass
class _OpenRing:
    """A ring that is being filled."""

    size: int
    sequences: list[int]
    tokens: int = 0
    work: int = 0


class _Step:
    """Rings side by side, and the ranks that are free."""

    def __init__(self, world_size: int) -> None:
        self.world_size = self.free = world_size
        self.rings: list[_OpenRing] = []

    def add(self, number: int, size: int, sequence: int, tokens: int, work: int) -> _OpenRing:
        """The ring that gets a sequence; a new one of this size, if `number` is one past the last."""
        if number == len(self.rings):
            self.rings.append(_OpenRing(size, []))
            self.free -= size
        ring = self.rings[number]
        ring.sequences.append(sequence)
        ring.tokens += tokens
        ring.work += work
        return ring

    def rings_in_place(self, most: int) -> tuple[RingGroup, ...]:
        """The rings, the largest first, so that each begins at a multiple of its size. most: ranks up to which rings grow."""
        while True:
            busiest = max(self.rings, key=lambda ring: ring.work / ring.size)
            if busiest.size > self.free or 2 * busiest.size > min(most, busiest.tokens):
                break
            self.free -= busiest.size
            busiest.size *= 2
        idle = [_OpenRing(1 << bit, []) for bit in range(self.free.bit_length()) if self.free >> bit & 1]
        placed_rings, first = [], 0
        for ring in sorted([*self.rings, *idle], key=lambda ring: -ring.size):
            placed_rings.append(RingGroup(first, ring.size, tuple(sorted(ring.sequences))))
            first += ring.size
        assert first == self.world_size
        return tuple(placed_rings)
