"""Schedules: which rows of K/V move from whom to whom in which step, as data.

Time runs in steps, numbered alike on all ranks. A rank starts with buffer 0, its own shard, which is always at hand; transfers
fill its buffer of step t while earlier steps compute, and in step t it computes with that buffer. A schedule is the list of all
ranks' transfers, in an order that all ranks derive alike from the plan: nothing is negotiated, and between two ranks sends and
receives match by their order. Each step has one exchange, so that links of all kinds work at once; what takes longer than a step is cut
into a piece a step.

Gradients need no schedule of their own: dK/dV follow the K/V transfers that are `followed`, one step behind, and go home to
their owner from where no such transfer leads on.

Sources: ring (Ring Attention, Liu et al. 2023, section 3); one wave of all owners (Llama 3, Dubey et al. 2024, section 3.3.2); double
ring (LoongTrain, Gu et al. 2024, section 4.3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..check import integer
from ..digest import Digested, constant
from ..geometry.plan import Plan
from ..geometry.rows import Rows

# steps for which dK/dV that came home wait beside the rank's own before they are added
WAITING = 1
# rows of a shard up to which two waves are faster than one: measured on four H200s
_SHORT = 8192
# work of the busiest ranks of a ring's steps, over that of the busiest rank in all, from which on waves of two are faster: predicted
_UNEVEN = 1.25


@dataclass(frozen=True, eq=False)
class Transfer:
    """`rows` of an owner's K/V, or of its dK/dV, under way from rank `src` to rank `dst` in step `step`.

    K/V leave src's buffer of step `held` <= step for dst's buffer of step `into` > step; what leaves the owner leaves its shard.
    dK/dV leave those of src's buffer of step `held` < step, complete by then, and are added to those of dst's buffer of step `into`
    <= step. Buffer 0 is a rank's own shard.
    """

    src: int
    dst: int
    owner: int
    rows: Rows
    held: int
    into: int
    step: int
    followed: bool = False  # K/V: dK/dV of these rows leave src for dst too


CountBytes = Callable[["Schedule"], int]


class Schedule(Digested, ABC):
    """Who sends which rows to whom, step by step."""

    def _key(self) -> bytes:
        return repr(self).encode()

    @property
    def by_memory(self) -> bool:
        """Whether `resolve` needs to know bytes."""
        return False

    def resolve(self, plan: Plan, ranks_per_node: int | None, backward_bytes: CountBytes | None = None) -> Schedule:
        """This schedule with all that it leaves open chosen. Raises ValueError if it does not fit the ranks or the memory.

        backward_bytes: the bytes of a schedule in the backward pass, for schedules by memory.
        """
        return self

    @property
    def in_forward(self) -> Schedule:
        """The schedule of the forward pass, which holds no gradients."""
        return self

    @abstractmethod
    def transfers(self, plan: Plan) -> list[Transfer]:
        """All K/V transfers of all ranks, those into an earlier buffer first."""

    def return_steps(self, plan: Plan, holder: int, owner: int, buffer: int) -> int:
        """Over how many steps dK/dV of an owner's rows in a holder's `buffer` are spread on their way home, if so many are left."""
        return 1


@dataclass(frozen=True)
class Ring(Schedule):
    """K/V go to the next rank each step; rows that no later rank needs stay behind. Memory for two shards of K/V."""

    def transfers(self, plan: Plan) -> list[Transfer]:
        n = plan.world_size
        found = []
        for owner in range(n):
            path = [(owner + hop) % n for hop in range(1, n)]
            for hop, (rank, rows) in enumerate(zip(path, _needed_from(plan, owner, path)), 1):
                if len(rows):
                    found.append(Transfer((rank - 1) % n, rank, owner, rows, hop - 1, hop, hop - 1, followed=hop > 1))
        return _in_time(found)

    def __repr__(self) -> str:
        return "ring()"


@dataclass(frozen=True)
class Waves(Schedule):
    """Owners in order of distance, `width` at a time, straight from themselves, with the next wave under way.

    A rank's owners are those it needs rows of. The last wave has what is left over: its gradients are the last to go home. In the forward
    pass waves are three times as wide: their K/V, in 16 bits, take no more memory than those and the fp32 dK/dV of the backward pass.
    """

    width: int | None
    memory: int | None = None

    @property
    def in_forward(self) -> Schedule:
        return self if self.width is None else Waves(3 * self.width)

    @property
    def by_memory(self) -> bool:
        return self.memory is not None

    def resolve(self, plan: Plan, ranks_per_node: int | None, backward_bytes: CountBytes | None = None) -> Schedule:
        if self.memory is None:
            return self
        assert backward_bytes is not None
        least = backward_bytes(Waves(1))
        if least > self.memory:
            raise ValueError(
                f"waves have {self.memory} bytes of memory, but one owner at a time takes {least} bytes a rank in the backward pass: "
                "give them more memory, or spread the sequence over more ranks"
            )
        widths = range(1, max(2, plan.world_size))
        return Waves(bisect_right(widths, self.memory, key=lambda width: backward_bytes(Waves(width))))

    def transfers(self, plan: Plan) -> list[Transfer]:
        found = []
        for rank in range(plan.world_size):
            for i, owner in enumerate(_owners(plan, rank)):
                wave = 1 + (i // self.width if self.width else 0)
                found.append(Transfer(owner, rank, owner, plan.needs(rank, owner), 0, wave, wave - 1))
        return _in_time(found)

    def __repr__(self) -> str:
        if self.memory is not None:
            return f"waves(memory={self.memory})"
        return "gather()" if self.width is None else f"waves({self.width})"


@dataclass(frozen=True)
class DoubleRing(Schedule):
    """A ring over the ranks of each node, while the shards that it began with travel to the next node.

    Rank = node * ranks_per_node + local rank. Round n of an inner ring is of the shards of the n-th node before. Between nodes each rank
    passes K/V on to its like on the next, in a piece a step; dK/dV gather along the inner ring and go straight home, likewise in pieces.
    """

    ranks_per_node: int | None

    def resolve(self, plan: Plan, ranks_per_node: int | None, backward_bytes: CountBytes | None = None) -> Schedule:
        size = ranks_per_node if self.ranks_per_node is None else self.ranks_per_node
        if size is None:
            raise ValueError(
                "double_ring() takes the ranks of each node from the launcher, but this group's ranks do not lie node by node, equally "
                "many on each: pass ranks_per_node, or a group that does"
            )
        if plan.world_size % size:
            raise ValueError(
                f"double_ring has {size} ranks a node, which does not divide the group's {plan.world_size}: "
                "pass ranks_per_node, a divisor, with the ranks of a node next to each other in the group"
            )
        return DoubleRing(size)

    def transfers(self, plan: Plan) -> list[Transfer]:
        found = []
        for owner in range(plan.world_size):
            found += self._of_owner(plan, owner)
        return _in_time(found)

    def _of_owner(self, plan: Plan, owner: int) -> list[Transfer]:
        size, nodes = self._sizes(plan)
        rounds = []
        for turn in range(nodes):
            node = (owner // size + turn) % nodes
            ranks = [(node * size + (owner + hop) % size, turn * size + hop) for hop in range(size)]
            # (rank, buffer) of those who need something; others are passed by
            stops = [(rank, buffer) for rank, buffer in ranks if rank != owner and len(plan.needs(rank, owner))]
            if stops:
                rounds.append((turn, stops, _needed_from(plan, owner, [rank for rank, _ in stops])))
        outer = _unions_from([rows[0] for _, _, rows in rounds])
        found = []
        source, held = owner, 0
        for (turn, stops, inner), onward in zip(rounds, outer):
            if turn > 0:
                head, into = stops[0]
                pieces = onward.cut(min(size, into - held))
                found += [Transfer(source, head, owner, rows, held, into, into - len(pieces) + i) for i, rows in enumerate(pieces)]
                source, held = head, into
            else:
                stops, inner = [(owner, 0), *stops], [Rows.span(0, 0), *inner]
            for (src, a), (dst, b), rows in zip(stops, stops[1:], inner[1:]):
                found.append(Transfer(src, dst, owner, rows, a, b, b - 1, followed=src != owner))
        return found

    def return_steps(self, plan: Plan, holder: int, owner: int, buffer: int) -> int:
        size, _ = self._sizes(plan)
        return 1 if holder // size == owner // size else size

    def _sizes(self, plan: Plan) -> tuple[int, int]:
        assert self.ranks_per_node is not None
        return self.ranks_per_node, plan.world_size // self.ranks_per_node

    def __repr__(self) -> str:
        return f"double_ring({'' if self.ranks_per_node is None else self.ranks_per_node})"


@constant
def ring() -> Schedule:
    """K/V go around the ring, a hop a step, with the next hop in flight while this one is computed."""
    return Ring()


@constant
def gather() -> Schedule:
    """All K/V rows that a rank needs at once, straight from their owners, in one launch: one wave."""
    return Waves(None)


@constant
def waves(width: int | None = None, *, memory: int | None = None) -> Schedule:
    """Owners in order of distance, `width` at a time and one launch a wave, straight from themselves; the next wave is under way.

    width: owners a wave, and three times as many in the forward pass, which holds no gradients; None for all of them: `gather()`.
    memory: instead, bytes a rank for K/V on their way and fp32 dK/dV of others in the backward pass: the widest waves that fit.

    Raises ValueError if both are given or one is less than 1; a call, if the memory does not hold one owner at a time.
    """
    if width is not None and memory is not None:
        raise ValueError(f"width is {width} and memory is {memory}, but only one of them chooses the waves: leave one out")
    width = None if width is None else integer("width", width, least=1)
    return Waves(width, None if memory is None else integer("memory", memory, least=1))


@constant
def double_ring(ranks_per_node: int | None = None) -> Schedule:
    """Rings within nodes inside a ring over nodes: every rank, not one of each node, sends to the next node, and in a whole round's time.

    ranks_per_node: a divisor of the group's size; by default as many as the launcher started on each node (`LOCAL_WORLD_SIZE`).
        Ranks of a node are next to each other in the group. A call raises ValueError if it does not divide.
    """
    return DoubleRing(None if ranks_per_node is None else integer("ranks_per_node", ranks_per_node, least=1))


def default_schedule(plan: Plan, ranks_per_node: int | None = None, copy_engines: bool = False) -> Schedule:
    """`gather` where no rank needs more rows from the others than three shards hold, else `ring`; over several nodes `double_ring`.

    Few ranks, windows and documents gather; long causal sequences over many ranks go around the ring. `ranks_per_node` is the
    number of ranks of each node, None for one node. Where `copy_engines` move messages, two owners a wave take the place of a
    `gather` of more than two shards of at most 8,192 rows: there is too little to compute for their gradients to go home behind. So
    they do of a `ring` whose ranks have unequal work in each step, as packed documents may give them: each hop would wait for
    the busiest.
    """
    n = plan.world_size
    shard = max(plan.lengths)
    needed = max(sum(len(plan.needs(rank, owner)) for owner in range(n) if owner != rank) for rank in range(n))
    if needed <= 3 * shard:
        return Waves(2 if copy_engines and shard <= _SHORT and needed > 2 * shard else None)
    if ranks_per_node is not None and 1 < ranks_per_node < n:
        return DoubleRing(ranks_per_node)
    return Waves(2) if _unevenness(plan) > _UNEVEN else Ring()


def _unevenness(plan: Plan) -> float:
    """Live pairs of the busiest rank of each of a ring's steps, together, over those of the busiest rank in all."""
    pairs = plan.pairs()
    ranks = np.arange(plan.world_size)
    steps = np.stack([pairs[ranks, ranks - hop] for hop in ranks])  # (steps, ranks)
    return float(steps.max(axis=1).sum() / steps.sum(axis=0).max())


def forward_transfers(schedule: Schedule, plan: Plan, transfers: list[Transfer]) -> list[Transfer]:
    """The K/V transfers of the forward pass; `transfers`, those of the backward pass, where the schedule is the same."""
    return transfers if schedule.in_forward is schedule else schedule.in_forward.transfers(plan)


def gradient_transfers(schedule: Schedule, plan: Plan, transfers: Sequence[Transfer]) -> list[Transfer]:
    """The transfers of dK/dV that K/V transfers lead to, those that leave first first."""
    came: dict[tuple[int, int, int], list[Transfer]] = defaultdict(list)
    onward: dict[tuple[int, int, int], list[Transfer]] = defaultdict(list)
    for t in transfers:
        came[t.dst, t.into, t.owner].append(t)
        if t.followed:
            onward[t.src, t.held, t.owner].append(t)
    last = max((t.into for t in transfers), default=0)
    found = []
    for (rank, buffer, owner), arrivals in came.items():
        rows = plan.needs(rank, owner)
        for t in arrivals:
            if t.followed:
                rows = rows | t.rows
        for t in onward[rank, buffer, owner]:
            rows = rows - t.rows
            found.append(Transfer(rank, t.dst, owner, t.rows, buffer, t.into, t.into))
        if len(rows):
            parts = rows.cut(min(schedule.return_steps(plan, rank, owner, buffer), last + 1 - buffer))
            found += [Transfer(rank, owner, owner, part, buffer, 0, buffer + 1 + i) for i, part in enumerate(parts)]
    return sorted(found, key=lambda t: t.step)


def bytes_sent(schedule: Schedule, plan: Plan, rank: int, row_bytes: int) -> int:
    """Bytes of K/V that a rank sends in a forward pass, at `row_bytes` for the K and V of one row."""
    return row_bytes * sum(len(t.rows) for t in schedule.in_forward.transfers(plan) if t.src == rank)


def _owners(plan: Plan, rank: int) -> list[int]:
    """The other ranks of which a rank needs rows, nearest before it first."""
    before = [(rank - distance) % plan.world_size for distance in range(1, plan.world_size)]
    return [owner for owner in before if len(plan.needs(rank, owner))]


def _needed_from(plan: Plan, owner: int, path: list[int]) -> list[Rows]:
    """Entry i: the rows of an owner that the ranks from path[i] on need."""
    return _unions_from([plan.needs(rank, owner) for rank in path])


def _unions_from(sets: list[Rows]) -> list[Rows]:
    """Entry i: the union of sets[i:]."""
    unions = sets[-1:]
    for rows in reversed(sets[:-1]):
        unions.append(unions[-1] if rows == unions[-1] or not len(rows) else rows | unions[-1])
    return unions[::-1]


def _in_time(transfers: list[Transfer]) -> list[Transfer]:
    return sorted(transfers, key=lambda t: t.into)
