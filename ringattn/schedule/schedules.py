"""Schedules: which rows of K/V move from whom to whom in which step, as data.

Time runs in steps that all ranks number alike. A rank starts with buffer 0, its own shard. Transfers fill its buffer of step t while
earlier steps compute, and in step t it computes with that buffer. A schedule is the list of all ranks' transfers. Every rank derives the
same list from the plan, so nothing is negotiated: between two ranks, sends and receives match by their order. Each step has one
exchange, so that links of all kinds work at once. A transfer that would take longer than a step is cut into pieces, one a step.

Gradients need no schedule of their own. dK/dV follow the K/V transfers that are `followed`, one step behind. Where no such transfer leads
on, they go home to their owner.

Sources: ring (Ring Attention, Liu et al. 2023, section 3); one wave of all owners (Llama 3, Dubey et al. 2024, section 3.3.2); double
ring (LoongTrain, Gu et al. 2024, section 4.3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..check import flag, instance, integer
from ..digest import Digested, constant
from ..geometry.plan import Plan
from ..geometry.rows import Rows

# dK/dV that came home wait for so many more steps before they are added to the rank's own
WAITING = 1
# rows of a shard up to which two waves are faster than one: measured on four H200s
_SHORT = 8192
# unevenness (see below) from which waves of two owners are faster than a ring: predicted
_UNEVEN = 1.25
# the most shards that a rank may need if ranks with unequal work gather
_GATHERED = 8


class Transfer(NamedTuple):
    """`rows` of an owner's K/V, or of its dK/dV, move from rank `src` to rank `dst` in step `step`.

    Buffers are numbered by step; buffer 0 is a rank's own shard. K/V leave src's buffer `held` <= step for dst's buffer `into` > step.
    dK/dV leave the sums of src's buffer `held` < step, which are complete by then. They are added to the sums of dst's buffer
    `into` <= step.
    """

    src: int
    dst: int
    owner: int
    rows: Rows
    held: int
    into: int
    step: int
    followed: bool = False  # K/V: dK/dV of these rows leave src for dst too


@dataclass(frozen=True, eq=False)
class Traffic:
    """K/V transfers, ordered by the buffer they go into, and what each rank knows of those of all ranks.

    last: the largest number of a buffer. crowded: whether several messages come to one rank in the first step.
    """

    transfers: list[Transfer]
    last: int
    crowded: bool

    @classmethod
    def whole(cls, transfers: list[Transfer]) -> Traffic:
        """Of the transfers of all ranks."""
        first = Counter(t.dst for t in transfers if t.step == 0)
        return cls(transfers, max((t.into for t in transfers), default=0), max(first.values(), default=0) > 1)


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
        """This schedule, with what it leaves open chosen. Raises ValueError if it does not fit the ranks or the memory.

        backward_bytes: the bytes of a schedule in the backward pass, for schedules by memory.
        """
        return self

    @property
    def in_forward(self) -> Schedule:
        """The schedule of the forward pass, which holds no gradients."""
        return self

    @abstractmethod
    def transfers(self, plan: Plan) -> list[Transfer]:
        """All K/V transfers of all ranks, ordered by the buffer they go into."""

    def traffic(self, plan: Plan, rank: int) -> Traffic:
        """At least the transfers of which the K/V, or their dK/dV, leave a rank or come to it."""
        return Traffic.whole(self.transfers(plan))

    def return_steps(self, plan: Plan, holder: int, owner: int, buffer: int) -> int:
        """Over how many steps dK/dV of an owner's rows in a holder's `buffer` go home, if that many are left."""
        return 1


@dataclass(frozen=True)
class Ring(Schedule):
    """K/V go to the next rank each step, without the rows that no later rank needs. A rank holds two shards of K/V."""

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
    """K/V come straight from their owners, nearest first, `width` owners a wave, while the wave before computes.

    A rank's waves hold the owners of which it needs rows. The last wave is the smallest: its gradients are the last to go home. In the
    forward pass waves are three times as wide. Their 16-bit K/V take no more memory than K/V and fp32 dK/dV in the backward pass.
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
        return _in_time([t for rank in range(plan.world_size) for t in self._into(plan, rank, enumerate(_owners(plan, rank)))])

    def traffic(self, plan: Plan, rank: int) -> Traffic:
        n = plan.world_size
        others = plan.needed > 0
        others.flat[:: n + 1] = False
        below = np.zeros((n, n + 1), dtype=np.int64)  # of how many owners below another one a rank needs rows
        others.cumsum(axis=1, out=below[:, 1:])
        all_owners = below[:, -1]
        most = int(all_owners.max())
        # K/V, and so dK/dV, go between a rank and an owner alone
        askers = others[:, rank].nonzero()[0]
        # of how many owners each of them needs rows, from the nearest one before it on, until this rank comes
        before = below[askers, askers] - below[askers, rank] + all_owners[askers] * (askers < rank) - 1
        number_of: dict[int, int] = dict(zip(askers.tolist(), before.tolist()))  # pyrefly: ignore[bad-argument-type]
        found: list[Transfer] = []
        for dst in sorted([rank, *number_of]):
            found += self._into(plan, dst, enumerate(_owners(plan, rank)) if dst == rank else [(number_of[dst], rank)])
        return Traffic(_in_time(found), -(-most // self.width) if self.width else min(1, most), min(most, self.width or most) > 1)

    def _into(self, plan: Plan, rank: int, owners: Iterable[tuple[int, int]]) -> Iterator[Transfer]:
        """The transfers that come to a rank from some owners, each with its number in the order of `_owners`."""
        for i, owner in owners:
            wave = 1 + (i // self.width if self.width else 0)
            yield Transfer(owner, rank, owner, plan.needs(rank, owner), 0, wave, wave - 1)

    def __repr__(self) -> str:
        if self.memory is not None:
            return f"waves(memory={self.memory})"
        return "gather()" if self.width is None else f"waves({self.width})"


@dataclass(frozen=True)
class DoubleRing(Schedule):
    """A ring over the ranks of each node, while the shards that it began with travel to the next node.

    Rank = node * ranks_per_node + local rank. In round n, the shards of the n-th node before go around the ranks of this one. Between
    nodes, each rank sends K/V to the rank of its number on the next node, one piece a step. dK/dV gather along the inner ring and go
    straight home to their owner, also in pieces.
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
            # (rank, buffer) of the ranks that need something; the others are skipped
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


@dataclass(frozen=True)
class PassQ(Schedule):
    """Queries move to the keys that they see, and their partials come back: K/V stay. `over`: how they move, as K/V would.

    All is said of the transposed plan, in which queries and keys have each other's place.
    """

    over: Schedule | None = None

    def resolve(self, plan: Plan, ranks_per_node: int | None, backward_bytes: CountBytes | None = None) -> Schedule:
        over = default_schedule(plan.transposed, ranks_per_node) if self.over is None else self.over
        return PassQ(over.resolve(plan.transposed, ranks_per_node))

    @property
    def moving(self) -> Schedule:
        """How queries move."""
        return Waves(None) if self.over is None else self.over

    def transfers(self, plan: Plan) -> list[Transfer]:
        """Those of queries."""
        return self.moving.transfers(plan.transposed)

    def __repr__(self) -> str:
        return f"pass_q({'' if self.over is None else self.over})"


class RowTraffic(NamedTuple):
    """Bytes that cross between ranks, in all passes of a call, for each row of K/V that moves, and for each row of Q."""

    kv: int
    q: int

    @classmethod
    def of(cls, h: int, hk: int, d: int, d_v: int, itemsize: int, backward: bool) -> RowTraffic:
        """For h heads of q, hk of k and v, and their head dims. backward: also count the backward pass."""
        exact = max(4, itemsize)
        kv, q = hk * (d + d_v) * itemsize, h * (d * itemsize + (d_v + 2) * exact)
        if backward:
            kv += hk * (d + d_v) * (itemsize + exact)
            q += h * ((d + d_v) * itemsize + 3 * exact + d * exact)
        return cls(kv, q)

    def moved(self, schedule: Schedule, plan: Plan) -> int:
        """Bytes of all messages of all ranks."""
        return (self.q if isinstance(schedule, PassQ) else self.kv) * sum(len(t.rows) for t in schedule.transfers(plan))


@constant
def ring() -> Schedule:
    """K/V go around the ring, one hop a step, while the rank computes with the K/V of the hop before."""
    return Ring()


@constant
def gather() -> Schedule:
    """All K/V rows that a rank needs come at once, straight from their owners, for one launch: a single wave."""
    return Waves(None)


@constant
def waves(width: int | None = None, *, memory: int | None = None) -> Schedule:
    """K/V come straight from their owners, nearest first, `width` owners and one launch a wave, while the wave before computes.

    width: owners a wave. The forward pass, which holds no gradients, takes three times as many. None for all at once: `gather()`.
    memory: instead of a width, the bytes that a rank may hold of other ranks' K/V and fp32 dK/dV in the backward pass. The widest waves
        that fit are chosen.

    Raises ValueError if both are given or one is less than 1; a call, if the memory does not hold one owner at a time.
    """
    if width is not None and memory is not None:
        raise ValueError(f"width is {width} and memory is {memory}, but only one of them chooses the waves: leave one out")
    width = None if width is None else integer("width", width, least=1)
    return Waves(width, None if memory is None else integer("memory", memory, least=1))


@constant
def double_ring(ranks_per_node: int | None = None) -> Schedule:
    """A ring within each node, inside a ring over the nodes. Every rank sends to the next node, and has a whole round's time for it.

    ranks_per_node: a divisor of the group's size; by default as many as the launcher started on each node (`LOCAL_WORLD_SIZE`).
        Ranks of a node are next to each other in the group. A call raises ValueError if it does not divide.
    """
    return DoubleRing(None if ranks_per_node is None else integer("ranks_per_node", ranks_per_node, least=1))


@constant
def pass_q(over: Schedule | None = None) -> Schedule:
    """Queries move, and partials of their attention come back to be merged; K/V stay: for few queries and many keys.

    over: how queries move, as K/V would: `ring()`, `gather()`, `waves(width)` or `double_ring()`; by default `default_schedule` of the plan
        in which queries and keys have each other's place. Raises ValueError for anything else.

    In the backward pass queries move with the gradients of their outputs, and dQ comes back. Gradients of the tensors of a score are then
    those of a rank's keys, and not of its queries; their sum over the ranks is the same.

    Source: pass-Q (Yang et al. 2024, section 3.5).
    """
    if over is not None:
        instance("over", over, Schedule, "build one with ring(), waves(width) and the like")
        if isinstance(over, PassQ) or over.by_memory:
            raise ValueError(f"over is {over}, but queries move by ring(), gather(), waves(width) or double_ring()")
    return PassQ(over)


def cross_schedule(plan: Plan, traffic: RowTraffic, ranks_per_node: int | None = None, copy_engines: bool = False) -> Schedule:
    """`default_schedule`, or `pass_q` if that moves fewer bytes."""
    keys, queries = default_schedule(plan, ranks_per_node, copy_engines), PassQ()
    keys, queries = (x.resolve(plan, ranks_per_node) for x in (keys, queries))
    return queries if traffic.moved(queries, plan) < traffic.moved(keys, plan) else keys


def default_schedule(plan: Plan, ranks_per_node: int | None = None, copy_engines: bool = False) -> Schedule:
    """The schedule that suits a plan.

    - `gather` if no rank needs more rows of other ranks than three shards hold: few ranks, windows, documents.
    - `gather`, too, if ranks have unequal work in each step and need no more than three shards on average, and eight at most, as with
      documents that are `placed`: a few ranks need much, and waves or hops would make the others wait for them.
    - else `double_ring` over several nodes with several ranks each (`ranks_per_node`; None for one node).
    - else `ring`: long causal sequences over many ranks.
    - `waves(2)` instead of `gather` of more than two shards of at most 8,192 rows where `copy_engines` move messages: there is too little
      computation for all gradients to hide behind on their way home.
    - `waves(2)` instead of `ring` if the ranks have unequal work in each step, as with packed documents: each hop of a ring would wait for
      the busiest rank.
    """
    instance("plan", plan, Plan, "make one with make_plan(layout, mask)")
    flag("copy_engines", copy_engines)
    ranks_per_node = None if ranks_per_node is None else integer("ranks_per_node", ranks_per_node, least=1)
    n = plan.world_size
    if n == 1:
        return Waves(None)
    shard = max(plan.lengths)
    needed = (plan.needed.sum(axis=1) - plan.needed.diagonal()).tolist()
    if max(needed) <= 2 * shard:
        return Waves(None)
    uneven = _unevenness(plan) > _UNEVEN
    if uneven and sum(needed) <= 3 * shard * n and max(needed) <= _GATHERED * shard:
        return Waves(None)
    if max(needed) <= 3 * shard:
        return Waves(2 if copy_engines and shard <= _SHORT else None)
    if ranks_per_node is not None and 1 < ranks_per_node < n:
        return DoubleRing(ranks_per_node)
    return Waves(2) if uneven else Ring()


def _unevenness(plan: Plan) -> float:
    """The sum over a ring's steps of the busiest rank's live pairs, over the live pairs of the rank that is busiest in all."""
    pairs = plan.pairs()
    ranks = np.arange(plan.world_size)
    steps = np.stack([pairs[ranks, ranks - hop] for hop in ranks])  # (steps, ranks)
    return float(steps.max(axis=1).sum() / steps.sum(axis=0).max())


def gradient_transfers(schedule: Schedule, plan: Plan, transfers: Sequence[Transfer], last: int | None = None) -> list[Transfer]:
    """The transfers of dK/dV that K/V transfers lead to, by step. last: see `Traffic`, if these are not all transfers."""
    came: dict[tuple[int, int, int], list[Transfer]] = defaultdict(list)
    onward: dict[tuple[int, int, int], list[Transfer]] = defaultdict(list)
    for t in transfers:
        came[t.dst, t.into, t.owner].append(t)
        if t.followed:
            onward[t.src, t.held, t.owner].append(t)
    last = max((t.into for t in transfers), default=0) if last is None else last
    found = []
    for (rank, buffer, owner), arrivals in came.items():
        rows = plan.needs(rank, owner)
        for t in arrivals:
            if t.followed:
                rows = rows | t.rows
        for t in onward.get((rank, buffer, owner), ()):
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
    """The other ranks of which a rank needs rows; the nearest one before it comes first."""
    needed = plan.needed_by_owner(rank)
    before = [(rank - distance) % plan.world_size for distance in range(1, plan.world_size)]
    return [owner for owner in before if needed[owner]]


def _needed_from(plan: Plan, owner: int, path: list[int]) -> list[Rows]:
    """Entry i: the rows of an owner that path[i] and the ranks after it need."""
    return _unions_from([plan.needs(rank, owner) for rank in path])


def _unions_from(sets: list[Rows]) -> list[Rows]:
    """Entry i: the union of sets[i:]."""
    unions = sets[-1:]
    for rows in reversed(sets[:-1]):
        unions.append(unions[-1] if rows == unions[-1] or not len(rows) else rows | unions[-1])
    return unions[::-1]


def _in_time(transfers: list[Transfer]) -> list[Transfer]:
    return sorted(transfers, key=lambda t: t.into)
