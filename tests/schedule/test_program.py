"""Programs run on positions instead of numbers: every live pair is computed once, every gradient reaches its owner once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.geometry.plan import live_pairs
from ringattn.geometry.rows import Rows
from ringattn.schedule.instructions import Add, Buffer, Close, Exchange, Fence, Holds, Launch, Message, Open, Stream, Wait, Zero
from ringattn.schedule.memory import RowBytes, backward_bytes, peak_bytes
from ringattn.schedule.program import Pass, compile_program, compile_programs
from tests.schedule.cases import SCHEDULES, fitting, listed

pytestmark = pytest.mark.usefixtures("one_thread")


class Wires:
    """Rows under way between ranks in one step, matched in posting order."""

    def __init__(self):
        self.posted = {}

    def send(self, src, dst, rows):
        assert src != dst
        self.posted.setdefault((src, dst), []).append(rows)

    def receive(self, src, dst, length):
        rows = self.posted[src, dst].pop(0)
        assert len(rows) == length > 0
        return rows

    def assert_empty(self):
        assert not any(self.posted.values())


class Rank:
    """A rank whose K/V rows are their positions, and whose sums count, for each key, each query's contribution.

    Launches of the backward pass run as early or as late as fences allow: in steps that `early` selects, before the launches of the
    step before; in other steps, only when a fence waits for them.
    """

    def __init__(self, program: Pass, positions, rank, live, early=lambda step: False):
        self.program, self.rank, self.early = program, rank, early
        self.queries, self.seq_len = positions[rank], len(live)
        self.memory = {program.own: positions[rank]}
        # a rank alone adds nothing later, so its gradients have the inputs' dtype; others have the sums' dtype
        self.dtype = np.int16 if program.alone else np.int64
        self.seen = np.zeros_like(live)
        self.late, self.done, self.receives = [], set(), ()
        if program.sums is not None:
            self.open(Open(0, program.sums))

    def run(self, step, wires):
        """All instructions of a step; yields once its messages have been sent."""
        instructions = [x for x in self.program.instructions if x.step == step]
        launches = [x for x in instructions if isinstance(x, Launch)]
        adds = [x for x in instructions if isinstance(x, Add) and x.stream is Stream.EXCHANGES]
        # an Add may run while the launch of its step computes
        assert not any(add.buffer is launch.sums for add in adds for launch in launches)
        sent = False
        for x in instructions:
            if isinstance(x, Wait) and not sent:
                yield
                sent = True
            match x:
                case Fence(stream=Stream.EXCHANGES):
                    if self.early(step):
                        self.compute(launches)
                    self.compute(self.late)
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
                    self.send(x, wires)
                case Wait():
                    self.receive(wires)
                case Add():
                    self.memory[x.buffer][listed(x.rows)] += self.memory[x.staging]
                case Zero():
                    self.memory[x.buffer][x.begin : x.end] = 0
        if not sent:
            yield

    def open(self, x):
        # fill opened buffers with values that no result may hold
        shape, value = ((x.buffer.rows,), -1) if x.buffer.holds is Holds.KV else ((x.buffer.rows, self.seq_len), 1000)
        fresh = np.full(shape, value, np.int64 if x.buffer.holds is Holds.KV else self.dtype)
        assert x.buffer not in self.memory
        if x.reuse is not None:
            old = self.memory.pop(x.reuse)
            assert (old.shape, old.dtype, x.reuse.holds) == (fresh.shape, fresh.dtype, x.buffer.holds)
        self.memory[x.buffer] = fresh

    def send(self, x, wires):
        for message in x.sends:
            assert message.whole == (len(message.rows) == message.buffer.rows)
            rows = self.memory[message.buffer][listed(message.rows)]
            assert message.buffer.holds is Holds.SUMS or (rows >= 0).all()
            wires.send(self.rank, message.peer, rows)
        self.receives = x.receives

    def receive(self, wires):
        for message in self.receives:
            assert message.whole == (len(message.rows) == message.buffer.rows)
            rows = listed(message.rows)
            got = wires.receive(message.peer, self.rank, len(rows))
            assert got.dtype == self.memory[message.buffer].dtype
            assert (self.memory[message.buffer][rows] == (-1 if message.buffer.holds is Holds.KV else 1000)).all()
            self.memory[message.buffer][rows] = got

    def compute(self, launches):
        for x in [x for x in launches if x not in self.done]:
            self.done.add(x)
            keys = self.memory[x.keys][x.begin : x.end]
            assert live_pairs(x.tiles) == x.pairs
            assert x.tiles.k_rows == len(keys)
            assert (keys >= 0).all() or not x.pairs
            counts = np.zeros((len(keys), self.seq_len), int)
            for q_begin, q_end, k_begin, k_end, lo, hi in x.tiles.tiles.tolist():
                for i in range(q_begin, q_end):
                    for j in range(max(k_begin, i - hi), min(k_end, i - lo + 1)):
                        counts[j, self.queries[i]] += 1
            if x.sums is None:
                np.add.at(self.seen, (slice(None), keys), counts.T)
            else:
                sums = self.memory[x.sums]
                sums[x.begin : x.end] = counts + (sums[x.begin : x.end] if x.add else 0)
        if launches is self.late:
            launches.clear()


def run(world):
    """All ranks' programs, step by step."""
    for step in range(world[0].program.steps):
        wires = Wires()
        steps = [rank.run(step, wires) for rank in world]
        for each in steps:
            next(each)
        for each in steps:
            assert next(each, None) is None
        wires.assert_empty()
    for rank in world:
        rank.compute(rank.late)


def simulate(schedule, layout, mask):
    plan = ra.make_plan(layout, mask)
    ranks = range(layout.world_size)
    positions = [
        layout.positions(r).numpy() if plan.order[r] is None else layout.positions(r).numpy()[plan.order[r].rows] for r in ranks
    ]
    programs = compile_programs(schedule, plan, ranks)
    assert len({(program.forward.steps, program.backward.steps) for program in programs}) == 1
    live = mask.dense(layout.seq_len).numpy().astype(int)
    # forward: each query has seen its keys once, and the last launch is marked `last`
    world = [Rank(programs[rank].forward, positions, rank, live) for rank in ranks]
    run(world)
    assert np.array_equal(sum(rank.seen for rank in world), live)
    for rank in world:
        assert [launch.last for launch in rank.program.launches] == [False] * (len(rank.program.launches) - 1) + [True]
        assert rank.memory.keys() == {rank.program.own}
    # backward: every query's contribution to every key it sees is at the key's owner, once. Odd steps run as early and even steps as
    # late as they may, then the other way round
    for odd in range(2):
        world = [
            Rank(programs[rank].backward, positions, rank, live, early=lambda step, odd=odd: step % 2 == odd) for rank in ranks
        ]
        run(world)
        for rank in world:
            staging = {x.staging for x in rank.program.instructions if isinstance(x, Add) and x.stream is Stream.CALLER}
            assert rank.memory.keys() == {rank.program.own, rank.program.sums} | staging
            assert np.array_equal(rank.memory[rank.program.sums], live[:, rank.queries].T)


@settings(max_examples=150)
@given(st.sampled_from(sorted(SCHEDULES)), st.data())
def test_simulated_passes(cases, schedule, data):
    layout, mask = data.draw(cases)
    simulate(fitting(SCHEDULES[schedule], layout.world_size), layout, mask)


@settings(max_examples=100)
@given(st.sampled_from([(2, 2), (2, 3), (2, 4), (3, 2), (4, 2), (1, 4), (4, 1)]), st.data())
def test_simulated_double_rings(layout_strategy, mask_strategy, nodes, data):
    seq_len = data.draw(st.integers(0, 30))
    mask, _ = data.draw(mask_strategy(seq_len))
    simulate(ra.double_ring(nodes[1]), data.draw(layout_strategy(seq_len, math.prod(nodes))), mask)


def test_the_simulation_finds_a_missing_fence(monkeypatch):
    """Without the fence before exchanges, sums leave before they are computed."""
    fence = Rank.compute
    monkeypatch.setattr(
        Rank, "compute", lambda rank, launches: None if launches is rank.late and rank.late else fence(rank, launches)
    )
    with pytest.raises((AssertionError, KeyError)):
        simulate(ra.ring(), ra.zigzag(24, 3), ra.causal())


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_steps_have_the_order_that_the_docstring_gives(world_size):
    wanted = [Open, Fence, Add, Close, Open, Exchange, Launch, Wait, Fence, Close]
    for schedule in SCHEDULES.values():
        plan = ra.make_plan(ra.zigzag(64, world_size), ra.full())
        program = compile_program(fitting(schedule, world_size), plan, 1)
        for step in range(program.backward.steps - 1):
            kinds = [type(x) for x in program.backward.instructions if x.step == step and not isinstance(x, Zero)]
            left = iter(wanted)
            assert all(kind in left for kind, _ in itertools.groupby(kinds)), kinds
        kinds = [type(x) for x in program.forward.instructions]
        assert kinds.count(Exchange) == kinds.count(Wait)


@pytest.mark.parametrize(
    ("schedule", "rows", "world_size", "wanted"),
    [
        (ra.gather(), 16384, 4, True),
        (ra.gather(), 16386, 4, False),
        (ra.waves(2), 8192, 4, True),
        (ra.waves(2), 8194, 4, False),
        (ra.waves(1), 4096, 4, True),
        (ra.waves(1), 4098, 4, False),
        (ra.ring(), 1024, 2, True),
        (ra.ring(), 1024, 4, False),
        (ra.waves(1), 1024, 8, False),
        (ra.gather(), 1024, 1, False),
    ],
)
def test_where_launches_run_side_by_side(schedule, rows, world_size, wanted):
    """Only if no sums lie between them; the more launches, the shorter the shards must be."""
    plan = ra.make_plan(ra.zigzag(rows * world_size, world_size), ra.causal())
    assert {compile_program(schedule, plan, rank).backward.side_by_side for rank in range(world_size)} == {wanted}


@pytest.mark.parametrize("schedule", [ra.ring(), ra.waves(1), ra.waves(2)], ids=repr)
def test_later_steps_reuse_buffers(schedule):
    """With shards of one size, a pass makes as many buffers on 19 ranks as on 13: later steps reuse those of earlier ones."""

    def made(world_size):
        program = compile_program(schedule, ra.make_plan(ra.contiguous(4 * world_size, world_size), ra.full()), 1)
        opens = [[x for x in each.instructions if isinstance(x, Open)] for each in (program.forward, program.backward)]
        return [sum(x.reuse is None for x in each) for each in opens]

    assert made(19) == made(13)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_launches_come_after_what_they_read_and_memory_keeps_its_kind(schedule, world_size):
    """Each launch that reads K/V of others comes after a fence that follows their wait; no buffer takes memory of the other kind."""
    plan = ra.make_plan(ra.zigzag(16 * world_size, world_size), ra.full())
    for program in compile_programs(fitting(SCHEDULES[schedule], world_size), plan, range(world_size)):
        moving, arrived, ready = set(), set(), {program.backward.own}
        for x in program.backward.instructions:
            match x:
                case Exchange():
                    moving = {message.buffer for message in x.receives}
                case Wait():
                    arrived |= moving
                case Fence() if x.stream is Stream.LAUNCHES:
                    ready |= arrived
                case Launch():
                    assert x.keys in ready
                case Open() if x.reuse is not None:
                    assert (x.reuse.rows, x.reuse.holds) == (x.buffer.rows, x.buffer.holds)


def test_a_rank_alone_exchanges_nothing():
    for schedule in SCHEDULES.values():
        program = compile_program(fitting(schedule, 1), ra.make_plan(ra.zigzag(16, 1), ra.causal()), 0)
        for each in (program.forward, program.backward):
            (launch,) = each.instructions
            assert launch.pairs == live_pairs(launch.tiles) == 16 * 17 // 2


ROW = RowBytes(kv=1, sums=2)


def test_waves_as_wide_as_memory_allows():
    """A rank's bytes in the backward pass: K/V of this wave and the next, dK/dV of this wave, of the last, and of two received ones."""
    plan = ra.make_plan(ra.contiguous(80, 8), ra.full())

    def count(schedule):
        return backward_bytes(schedule, plan, ROW)

    # shards have 10 rows: in the middle of a pass of at least four waves, each unit of width takes (2 * 1 + 4 * 2) * 10 bytes
    wanted = {100: "waves(1)", 189: "waves(1)", 190: "waves(2)", 220: "waves(3)", 10_000: "waves(7)"}
    for memory, name in wanted.items():
        assert repr(ra.waves(memory=memory).resolve(plan, 8, count)) == name
    with pytest.raises(ValueError, match="waves have 99 bytes of memory, but one owner at a time takes 100 bytes a rank"):
        ra.waves(memory=99).resolve(plan, 8, count)


def test_bytes_of_a_hand_written_pass():
    own, a, b, sums = Buffer(9, Holds.KV), Buffer(10, Holds.KV), Buffer(10, Holds.KV), Buffer(3, Holds.SUMS)
    program = Pass((Open(0, a), Open(0, sums), Close(1, (sums,)), Open(1, b, reuse=a), Close(2, (b,))), 3, own)
    assert peak_bytes(program, ROW) == 10 + 6


def test_bytes_of_rows_that_are_gathered_to_be_sent():
    own = Buffer(9, Holds.KV)
    scattered, whole = Rows(np.array([[0, 2], [4, 7]])), Rows.span(0, 9)
    for rows, copied in ((scattered, 5), (whole, 0)):
        exchange = Exchange(0, (Message(1, own, rows, whole=rows is whole),), ())
        program = Pass((exchange, Open(0, Buffer(10, Holds.KV)), Wait(0)), 1, own)
        assert peak_bytes(program, ROW, gathered=True) == 10 + copied
        assert peak_bytes(program, ROW) == 10
