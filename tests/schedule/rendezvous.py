"""Compiled programs of all ranks, run together on positions instead of numbers, with messages that rendezvous.

A message moves once its sender and its receiver have both posted it. An exchange ends once all of its messages have moved. Between two
ranks, messages match in the order of posting. So what a rank waits for does not depend on how fast the others are: if ranks are stuck in
one order of running, they are stuck in every order, and if they end in one, they end in all.

K/V rows are their positions. Sums count, for each key, each query's contribution.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

import ringattn as ra
from ringattn.geometry.plan import Plan, live_pairs
from ringattn.schedule.instructions import Add, Close, Exchange, Fence, Holds, Launch, Open, Stream, Wait, Zero
from ringattn.schedule.memory import RowBytes, peak_bytes
from ringattn.schedule.program import Pass, Program, compile_programs
from ringattn.schedule.schedules import Schedule
from tests.schedule.cases import listed

ROW = RowBytes(kv=1, sums=2)
# what no result may hold: in K/V, and in sums
_NOTHING = {Holds.KV: -1, Holds.SUMS: 1000}


class Deadlock(AssertionError):
    """Ranks wait for messages that have no partner."""


@dataclass
class Posted:
    """An exchange of a rank: how many of its messages still wait for a partner, and what has come."""

    pending: int
    arrived: list


class Wires:
    """Messages between ranks, matched in posting order. A content may be anything."""

    def __init__(self) -> None:
        self._sends: defaultdict[tuple[int, int], deque] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int], deque] = defaultdict(deque)

    def post(self, rank: int, sends: Iterable[tuple[int, object]], sources: Iterable[int]) -> Posted:
        """Post the messages (peer, content) that leave, and one from each of `sources`."""
        sends, sources = list(sends), list(sources)
        posted = Posted(len(sends) + len(sources), [None] * len(sources))
        for peer, content in sends:
            assert peer != rank
            self._sends[rank, peer].append((posted, content))
            self._move(rank, peer)
        for at, peer in enumerate(sources):
            self._receives[peer, rank].append((posted, at))
            self._move(peer, rank)
        return posted

    def _move(self, src: int, dst: int) -> None:
        if self._sends[src, dst] and self._receives[src, dst]:
            sent, content = self._sends[src, dst].popleft()
            received, at = self._receives[src, dst].popleft()
            received.arrived[at] = content
            sent.pending -= 1
            received.pending -= 1


def rendezvous(ranks: Iterable[Iterator[Posted]]) -> None:
    """Run all ranks to their ends. Each yields the exchange that it waits for. Raises Deadlock."""
    running = dict(enumerate(ranks))
    waits: dict[int, Posted] = {}
    while running:
        able = [rank for rank in running if rank not in waits or not waits[rank].pending]
        if not able:
            raise Deadlock(f"ranks {sorted(running)} wait for messages without a partner")
        for rank in able:
            posted = next(running[rank], None)
            if posted is None:
                del running[rank]
            else:
                waits[rank] = posted


@dataclass
class Counted:
    """What a rank did in a pass."""

    steps: int
    pairs: np.ndarray = field(init=False)  # (steps): live pairs computed
    sent: np.ndarray = field(init=False)  # (steps, 2): rows of K/V and of sums that left
    received: np.ndarray = field(init=False)  # (steps, 2)
    peak: int = 0  # the most bytes held at a time of other ranks' K/V and sums

    def __post_init__(self) -> None:
        self.pairs = np.zeros(self.steps, int)
        self.sent, self.received = np.zeros((2, self.steps, 2), int)


class Rank:
    """A rank whose K/V rows are their positions, and whose sums count each query's contribution to each key.

    Launches of the backward pass run as early or as late as fences allow: in steps that `early` selects, before the launches of the
    step before; in other steps, only when a fence waits for them.
    """

    def __init__(self, program: Pass, positions, rank: int, seq_len: int, wires: Wires, early=lambda step: False) -> None:
        self.program, self.rank, self.wires, self.early = program, rank, wires, early
        self.queries, self.seq_len = positions[rank], seq_len
        self.memory = {program.own: positions[rank]}
        # a rank alone adds nothing later, so its gradients have the inputs' dtype; others have the sums' dtype
        self.dtype = np.int16 if program.alone else np.int32
        self.seen = np.zeros((seq_len, seq_len), np.int16)
        self.counted = Counted(program.steps)
        self.late: list[Launch] = []
        self.done: set[Launch] = set()
        if program.sums is not None:
            self.open(Open(0, program.sums))

    def run(self) -> Iterator[Posted]:
        """All instructions; yields the exchange at each Wait."""
        launches = defaultdict(list)
        for x in self.program.instructions:
            if isinstance(x, Launch):
                launches[x.step].append(x)
        exchange, posted, sent = None, None, []
        for x in self.program.instructions:
            match x:
                case Fence(stream=Stream.EXCHANGES):
                    if self.early(x.step):
                        self.compute(launches[x.step])
                    self.compute([launch for launch in self.late if self.program.far in (None, launch)])
                case Fence(stream=Stream.CALLER):
                    self.compute(self.late)
                case Launch() if self.program.sums is None:
                    self.compute([x])
                case Launch():
                    self.late.append(x)
                case Open():
                    self.open(x)
                case Close():
                    for buffer in x.buffers:
                        del self.memory[buffer]
                case Exchange():
                    assert exchange is None, "an exchange is under way"
                    exchange = x
                    sent = [self.rows_of(message) for message in x.sends]
                    for message in x.receives:
                        assert (self.rows_of(message) == _NOTHING[message.buffer.holds]).all()
                    contents = [(m.peer, (m.buffer.holds, rows)) for m, rows in zip(x.sends, sent)]
                    posted = self.wires.post(self.rank, contents, [m.peer for m in x.receives])
                case Wait():
                    yield posted
                    # nothing has written what left meanwhile
                    assert all(np.array_equal(self.rows_of(m), rows) for m, rows in zip(exchange.sends, sent))
                    self.receive(exchange, posted.arrived)
                    exchange = None
                case Add():
                    # an Add may run while the launch of its step computes
                    assert x.stream is Stream.CALLER or all(x.buffer is not launch.sums for launch in launches[x.step])
                    self.memory[x.buffer][index(x)] += self.memory[x.staging]
                case Zero():
                    self.memory[x.buffer][x.begin : x.end] = 0
        assert exchange is None
        self.compute(self.late)

    def open(self, x: Open) -> None:
        """A new buffer holds what no result may hold."""
        shape = (x.buffer.rows,) if x.buffer.holds is Holds.KV else (x.buffer.rows, self.seq_len)
        fresh = np.full(shape, _NOTHING[x.buffer.holds], np.int64 if x.buffer.holds is Holds.KV else self.dtype)
        assert x.buffer not in self.memory
        if x.reuse is not None:
            old = self.memory.pop(x.reuse)
            assert (old.shape, old.dtype, x.reuse.holds) == (fresh.shape, fresh.dtype, x.buffer.holds)
        self.memory[x.buffer] = fresh
        others = [buffer for buffer in self.memory if buffer not in (self.program.own, self.program.sums)]
        self.counted.peak = max(self.counted.peak, sum(buffer.rows * ROW.of_buffer(buffer.holds) for buffer in others))

    def rows_of(self, message) -> np.ndarray:
        """A copy of the rows that a message is about."""
        assert message.whole == (len(message.rows) == message.buffer.rows)
        rows = self.memory[message.buffer][index(message)]
        return rows.copy() if message.whole else rows

    def receive(self, x: Exchange, arrived: list) -> None:
        for message in x.sends:
            self.counted.sent[x.step, int(message.buffer.holds is Holds.SUMS)] += len(message.rows)
        for message, (holds, rows) in zip(x.receives, arrived, strict=True):
            target = self.memory[message.buffer]
            assert (holds, len(rows), rows.dtype) == (message.buffer.holds, len(message.rows), target.dtype)
            assert len(rows)
            assert holds is Holds.SUMS or (rows >= 0).all()
            # nothing has written there meanwhile
            assert (target[index(message)] == _NOTHING[holds]).all()
            target[index(message)] = rows
            self.counted.received[x.step, int(holds is Holds.SUMS)] += len(rows)

    def compute(self, launches: list[Launch]) -> None:
        for x in [x for x in launches if x not in self.done]:
            self.done.add(x)
            keys = self.memory[x.keys][x.begin : x.end]
            assert live_pairs(x.tiles) == x.pairs
            assert x.tiles.k_rows == len(keys)
            assert (keys >= 0).all() or not x.pairs
            self.counted.pairs[x.step] += x.pairs
            counts = pair_counts(x)
            if x.sums is None:
                self.seen[np.ix_(self.queries, keys)] += counts.T
                continue
            sums = self.memory[x.sums][x.begin : x.end]
            if not x.add:
                sums[:] = 0
            sums[:, self.queries] += counts
        self.late = [x for x in self.late if x not in self.done]


def index(x) -> slice | list[int]:
    """Rows as an index."""
    ranges = x.rows.ranges
    return slice(*ranges[0].tolist()) if len(ranges) == 1 else listed(x.rows)


def pair_counts(launch: Launch) -> np.ndarray:
    """How often a launch computes each pair: (keys, queries)."""
    counts = np.zeros((launch.tiles.k_rows, launch.tiles.q_rows), np.int16)
    for q_begin, q_end, k_begin, k_end, lo, hi in launch.tiles.tiles.tolist():
        distance = np.arange(q_begin, q_end) - np.arange(k_begin, k_end)[:, None]
        counts[k_begin:k_end, q_begin:q_end] += (lo <= distance) & (distance <= hi)
    return counts


@dataclass
class Proof:
    """A plan, its programs, and what each rank counted in each pass."""

    plan: Plan
    programs: list[Program]
    forward: list[Counted]
    backward: list[Counted]


def prove(schedule: Schedule, layout: ra.Layout, mask: ra.Mask, early: Sequence[int] = (0, 1)) -> Proof:
    """Run both passes of all ranks. Assert that every rank ends, that each live pair is computed once, that the sums of dK/dV come home
    with each query's contribution once, and that `peak_bytes` is what is held.

    The backward pass runs once for each of `early`: with 0, even steps run as early and odd steps as late as they may; with 1, the other
    way round.
    """
    plan = ra.make_plan(layout, mask)
    ranks = range(layout.world_size)
    positions = [layout.positions(r).numpy() for r in ranks]
    positions = [p if order is None else p[order.rows] for p, order in zip(positions, plan.order)]
    programs = compile_programs(schedule, plan, ranks)
    assert len({(program.forward.steps, program.backward.steps) for program in programs}) == 1
    live = mask.dense(layout.seq_len).numpy().astype(np.int16)

    def run(passes: list[Pass], early=lambda step: False) -> list[Rank]:
        wires = Wires()
        world = [Rank(each, positions, rank, layout.seq_len, wires, early) for rank, each in zip(ranks, passes)]
        rendezvous(rank.run() for rank in world)
        for rank in world:
            assert rank.counted.peak == peak_bytes(rank.program, ROW)
        return world

    # forward: each query has seen its keys once, and the last launch is marked `last`
    world = run([program.forward for program in programs])
    assert np.array_equal(sum(rank.seen for rank in world), live)
    for rank in world:
        assert [launch.last for launch in rank.program.launches] == [False] * (len(rank.program.launches) - 1) + [True]
        assert rank.memory.keys() == {rank.program.own}
    forward = [rank.counted for rank in world]
    # backward: every query's contribution to every key it sees is at the key's owner, once
    for odd in early:
        world = run([program.backward for program in programs], early=lambda step, odd=odd: step % 2 == odd)
        for rank in world:
            staging = {x.staging for x in rank.program.instructions if isinstance(x, Add) and x.stream is Stream.CALLER}
            assert rank.memory.keys() == {rank.program.own, rank.program.sums} | staging
            assert np.array_equal(rank.memory[rank.program.sums], live[:, rank.queries].T)
    return Proof(plan, programs, forward, [rank.counted for rank in world])
