"""Programs of drawn layouts and masks, and what programs look like. `test_proof.py` runs those of every schedule and world."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.geometry import plan as plan_module
from ringattn.geometry.plan import live_pairs
from ringattn.geometry.rows import Rows
from ringattn.schedule.instructions import Add, Buffer, Close, Exchange, Fence, Holds, Launch, Message, Open, Stream, Wait, Zero
from ringattn.schedule.memory import backward_bytes, peak_bytes
from ringattn.schedule.program import Pass, compile_program, compile_programs, local_program
from tests.schedule.cases import SCHEDULES, fitting
from tests.schedule.rendezvous import ROW, prove

pytestmark = pytest.mark.usefixtures("one_thread")


GAPS = st.sampled_from([0, 3, 64])


@settings(max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), GAPS, st.data())
def test_programs_of_any_layout_and_mask(cases, schedule, gap, data):
    layout, mask = data.draw(cases)
    with mock.patch.object(plan_module, "_GAP", gap):
        prove(fitting(SCHEDULES[schedule], layout.world_size), layout, mask)


@settings(max_examples=40)
@given(st.sampled_from([(2, 2), (2, 3), (2, 4), (3, 2), (4, 2), (1, 4), (4, 1)]), GAPS, st.data())
def test_double_rings_of_any_layout_and_mask(layout_strategy, mask_strategy, nodes, gap, data):
    seq_len = data.draw(st.integers(0, 30))
    mask, _ = data.draw(mask_strategy(seq_len))
    with mock.patch.object(plan_module, "_GAP", gap):
        prove(ra.double_ring(nodes[1]), data.draw(layout_strategy(seq_len, math.prod(nodes))), mask)


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


@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather(), ra.waves(1), ra.pass_q()], ids=repr)
def test_a_plan_is_freed_with_the_last_program_that_needs_it(schedule):
    """At once, as its tables may be on a GPU, whose memory Python's search for cycles does not know."""
    plan = ra.make_plan(ra.zigzag(64, 4), ra.documents(lengths=[30, 34]))
    programs = [
        compile_program(schedule.resolve(plan, None), plan, 1),
        *compile_programs(schedule.resolve(plan, None), plan, range(4)),
    ]
    tables = [x.tiles.tiles for program in programs for x in (*program.forward.launches, *program.backward.launches)]
    known = [weakref.ref(x) for x in (plan, *tables)]
    gc.collect()
    gc.disable()
    try:
        del plan, programs, tables
        assert not any(x() for x in known)
    finally:
        gc.enable()


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_of_the_only_launch_over_other_keys_wait_for_no_other(world_size):
    for schedule, lone in ((ra.gather(), True), (ra.waves(1), world_size == 2)):
        plan = ra.make_plan(ra.zigzag(16 * world_size, world_size), ra.causal())
        for program in compile_programs(schedule, plan, range(world_size)):
            far = program.backward.far
            assert (far is not None) is lone and (far is None or far.keys is not program.backward.own)
            assert local_program(program.forward.launches[0].tiles).backward.far is None


def test_a_rank_alone_exchanges_nothing():
    for schedule in SCHEDULES.values():
        program = compile_program(fitting(schedule, 1), ra.make_plan(ra.zigzag(16, 1), ra.causal()), 0)
        for each in (program.forward, program.backward):
            (launch,) = each.instructions
            assert launch.pairs == live_pairs(launch.tiles) == 16 * 17 // 2


# 3 documents on 8 ranks: one on the ranks 0 to 4, one on rank 5 alone, one on the ranks 6 and 7
UNEQUAL = ra.make_plan(ra.contiguous(800, 8), ra.documents(lengths=[500, 100, 200]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nobody_waits_for_a_rank_that_has_nothing_for_it(schedule):
    """A rank of whole documents launches and does nothing else; messages stay among the ranks of a document."""
    programs = compile_programs(fitting(SCHEDULES[schedule], 8), UNEQUAL, range(8))
    for each in (programs[5].forward, programs[5].backward):
        (launch,) = each.instructions
        assert isinstance(launch, Launch)
    for rank, program in enumerate(programs):
        together = range(5) if rank < 5 else (6, 7) if rank > 5 else ()
        for each in (program.forward, program.backward):
            exchanges = [x for x in each.instructions if isinstance(x, Exchange)]
            messages = [message for x in exchanges for message in (*x.sends, *x.receives)]
            assert all(x.sends or x.receives for x in exchanges)
            assert all(len(message.rows) and message.peer in together for message in messages)
            assert sum(isinstance(x, Wait) for x in each.instructions) == len(exchanges)


@pytest.mark.parametrize("schedule", [ra.waves(1), ra.ring()], ids=repr)
def test_steps_of_others_hold_no_instructions(schedule):
    """Ranks 6 and 7 swap in the first steps; the longer document of ranks 0 to 4 takes more."""
    programs = compile_programs(schedule, UNEQUAL, range(8))
    assert programs[7].backward.steps == programs[0].backward.steps == 6
    # rank 7 computes with rank 6's rows in step 1, and returns their gradients in step 2; rank 6 adds them in step 4
    for rank, wanted in ((6, {0, 2, 4}), (7, {0, 1, 2})):
        assert {x.step for x in programs[rank].backward.instructions} == wanted


def test_messages_of_placed_documents_are_few():
    """64 documents of about 1,000 tokens on 8 ranks: most ranks send and receive nothing in either pass."""
    lengths = np.random.default_rng(0).lognormal(6.5, 0.7, 64).astype(int).tolist()
    mask, n = ra.documents(lengths=lengths), sum(lengths)
    counts = []
    for layout in (ra.placed(mask, n, 8), ra.balanced(mask, n, 8)):
        programs = compile_programs(ra.gather(), ra.make_plan(layout, mask), range(8))
        instructions = [x for program in programs for each in (program.forward, program.backward) for x in each.instructions]
        counts.append(sum(len(x.sends) for x in instructions if isinstance(x, Exchange)))
    assert counts[0] <= 12
    assert counts[0] < counts[1] / 4


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
