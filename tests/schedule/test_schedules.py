"""Schedules: only needed rows move, each once to a rank and in time, and the bytes sent are those announced."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.geometry.rows import Rows
from ringattn.schedule.schedules import DoubleRing, Traffic, bytes_sent, gradient_transfers
from ringattn.transport import run_ranks
from tests.schedule.cases import SCHEDULES, fitting

pytestmark = pytest.mark.usefixtures("one_thread")

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


@every_schedule
@settings(max_examples=30)
@given(st.data())
@pytest.mark.some(4)
def test_only_rows_that_someone_still_needs_move(cases, schedule, data):
    """A transfer holds rows that its receiver, or a rank to which the receiver passes them, needs. No rank gets a row twice."""
    layout, mask = data.draw(cases)
    plan = ra.make_plan(layout, mask)
    transfers = fitting(schedule, layout.world_size).transfers(plan)
    after = {}  # transfers out of the buffer that a transfer goes into, by owner
    for t in transfers:
        after.setdefault((t.src, t.held, t.owner), []).append(t)
        assert t.held <= t.step < t.into
        assert t.held > 0 or t.src == t.owner

    def needed(rank, owner, buffer):
        rows = plan.needs(rank, owner)
        for t in after.get((rank, buffer, owner), ()):
            rows = rows | needed(t.dst, owner, t.into)
        return rows

    for rank in range(layout.world_size):
        for owner in range(layout.world_size):
            came = [t for t in transfers if (t.dst, t.owner) == (rank, owner)]
            total = Rows(np.concatenate([t.rows.ranges for t in came])) if came else Rows.span(0, 0)
            assert len(total) == sum(len(t.rows) for t in came)
            assert total == (needed(rank, owner, came[0].into) if came else plan.needs(rank, owner) if rank != owner else total)


@pytest.mark.parametrize("row_bytes", [1, 4096])
def test_a_window_moves_only_the_neighbours_rows(row_bytes):
    window, seq_len = 100, 8192
    plan = ra.make_plan(ra.contiguous(seq_len, 8), ra.sliding_window(window))
    for schedule in SCHEDULES.values():
        sent = [bytes_sent(schedule, plan, rank, row_bytes) for rank in range(8)]
        # no rank comes after the last
        assert sent == [window * row_bytes] * 7 + [0]


def test_documents_on_ranks_of_their_own_move_nothing():
    plan = ra.make_plan(ra.contiguous(64, 4), ra.documents([16, 16, 32]))
    for schedule in SCHEDULES.values():
        assert [bytes_sent(schedule, plan, rank, 1) for rank in range(4)] == [0, 0, 16, 0]


def test_bytes_of_causal_and_full_attention():
    seq_len, world_size = 8192, 8
    own = seq_len // world_size
    full = ra.make_plan(ra.zigzag(seq_len, world_size), ra.full())
    for schedule in SCHEDULES.values():
        assert [bytes_sent(schedule, full, rank, 1) for rank in range(world_size)] == [(world_size - 1) * own] * world_size
    # under a causal mask, contiguous ranks send only to later ranks
    causal = ra.make_plan(ra.contiguous(seq_len, world_size), ra.causal())
    assert [bytes_sent(ra.gather(), causal, rank, 1) for rank in range(world_size)] == [
        own * (7 - rank) for rank in range(world_size)
    ]


@every_schedule
@pytest.mark.parametrize(
    ("mask", "make_layout"),
    [
        (ra.sliding_window(10), ra.contiguous),
        (ra.causal(), ra.zigzag),
        (ra.documents([30, 60, 110]), ra.striped),
        (ra.dilated_window((9, 2), 3), ra.zigzag),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
@pytest.mark.some(9)
def test_a_forward_pass_sends_the_bytes_that_bytes_sent_predicts(schedule, mask, make_layout):
    world_size, seq_len = 8, 203
    layout = make_layout(seq_len, world_size)
    b, h, hk, d, d_v = 2, 4, 2, 8, 6

    def work(transport):
        tokens = layout.lengths[transport.rank]
        q, k, v = torch.randn(b, tokens, h, d), torch.randn(b, tokens, hk, d), torch.randn(b, tokens, hk, d_v)
        ra.ring_attention(q, k, v, layout=layout, mask=mask, group=transport, schedule=schedule)
        return transport.bytes_sent

    plan = ra.make_plan(layout, mask)
    row_bytes = b * hk * (d + d_v) * 4
    assert run_ranks(world_size, work) == [bytes_sent(schedule, plan, rank, row_bytes) for rank in range(world_size)]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (2, 3), (2, 4), (3, 2)])
@pytest.mark.parametrize("schedule", [ra.ring(), ra.double_ring()], ids=repr)
@pytest.mark.some(4)
def test_bytes_between_nodes(schedule, nodes, ranks_per_node):
    """K/V of each owner come to each other node once in each pass; its dK/dV leave each other node once."""
    world_size, tokens, hk, d = nodes * ranks_per_node, 6, 2, 4
    layout = ra.contiguous(world_size * tokens, world_size)

    def work(transport):
        q = torch.randn(1, tokens, hk, d, requires_grad=True)
        out = ra.ring_attention(q, q, q, layout=layout, mask=ra.full(), group=transport, schedule=schedule)
        forward = list(transport.bytes_sent_to)
        out.sum().backward()
        return [(forward[dst], transport.bytes_sent_to[dst] - forward[dst]) for dst in range(world_size)]

    sent = run_ranks(world_size, work, ranks_per_node)
    shard = 2 * tokens * hk * d * 4  # K and V
    for node in range(nodes):
        inside = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        forward, backward = (
            sum(sent[src][dst][part] for src in inside for dst in range(world_size) if dst not in inside) for part in (0, 1)
        )
        if isinstance(schedule, DoubleRing):
            assert forward == ranks_per_node * (nodes - 1) * shard
            assert backward == 2 * forward
        else:
            assert forward == (world_size - 1) * shard


@pytest.mark.parametrize("size", [1, 3, 10])
def test_waves_of_owners(size):
    """Each rank fetches owners in order of distance, `size` a step, directly from the owner; the last wave may be smaller."""
    plan = ra.make_plan(ra.contiguous(80, 8), ra.full())
    for rank in range(8):
        fetched = [t for t in ra.waves(size).transfers(plan) if t.dst == rank]
        assert [t.owner for t in fetched] == [(rank - distance) % 8 for distance in range(1, 8)]
        assert [t.step for t in fetched] == [i // size for i in range(7)]
        assert all(t.src == t.owner and t.into == t.step + 1 for t in fetched)


def test_waves_skip_owners_whose_rows_are_not_needed():
    plan = ra.make_plan(ra.contiguous(80, 8), ra.global_tokens([35]))
    for rank in set(range(8)) - {3}:
        assert [(t.owner, t.into) for t in ra.waves(1).transfers(plan) if t.dst == rank] == [(3, 1)]


def test_one_wave_of_all_is_gather():
    assert ra.waves() == ra.gather() != ra.waves(7)
    plan = ra.make_plan(ra.zigzag(70, 7), ra.causal())
    gathered, waved = (
        [(t.src, t.dst, t.into, t.rows) for t in schedule.transfers(plan)] for schedule in (ra.gather(), ra.waves(6))
    )
    assert gathered == waved


def test_waves_by_memory_in_a_call():
    q, layout = torch.randn(1, 8, 2, 4), ra.contiguous(64, 8)
    shard = 8 * 2 * (4 + 4) * 4

    def work(transport, memory):
        return ra.ring_attention(q, q, q, layout=layout, mask=ra.full(), group=transport, schedule=ra.waves(memory=memory))

    assert torch.equal(run_ranks(8, lambda t: work(t, 6 * shard))[0], run_ranks(8, lambda t: work(t, 10 * shard))[0])
    with pytest.raises(
        ValueError, match=f"waves have {6 * shard - 1} bytes of memory, but one owner at a time takes {6 * shard} bytes"
    ):
        run_ranks(8, lambda t: work(t, 6 * shard - 1))


BAD = {
    "no width": (lambda: ra.waves(0), "width is 0, but must be at least 1"),
    "half a width": (lambda: ra.waves(1.5), "width is 1.5, but must be an integer"),
    "width and memory": (lambda: ra.waves(2, memory=100), "width is 2 and memory is 100, but only one of them chooses the waves"),
    "no memory": (lambda: ra.waves(memory=0), "memory is 0, but must be at least 1"),
    "no ranks": (lambda: ra.double_ring(0), "ranks_per_node is 0, but must be at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_schedules(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_double_ring_must_fit_the_group():
    q = torch.randn(1, 4, 1, 4)

    def work(transport, schedule):
        with pytest.raises(ValueError) as error:
            ra.ring_attention(q, q, q, layout=ra.contiguous(24, 6), group=transport, schedule=schedule)
        assert transport.bytes_sent == 0
        return str(error.value)

    for message in run_ranks(6, lambda t: work(t, ra.double_ring(4))):
        assert "double_ring has 4 ranks a node, which does not divide the group's 6" in message
    plan = ra.make_plan(ra.contiguous(24, 6), ra.full())
    with pytest.raises(ValueError, match="ranks do not lie node by node"):
        ra.double_ring().resolve(plan, None, None)


@pytest.mark.parametrize(
    ("mask", "make_layout", "world_size", "wanted"),
    [
        (ra.causal(), ra.zigzag, 8, "ring()"),
        (ra.full(), ra.contiguous, 8, "ring()"),
        (ra.full(), ra.contiguous, 5, "ring()"),
        (ra.full(), ra.contiguous, 4, "gather()"),
        (ra.full(), ra.contiguous, 2, "gather()"),
        (ra.sliding_window(64), ra.contiguous, 8, "gather()"),
        (ra.documents([512] * 8), ra.contiguous, 8, "gather()"),
        (ra.causal(), ra.zigzag, 1, "gather()"),
    ],
    ids=lambda value: None if callable(value) else repr(value),
)
def test_default_schedule(mask, make_layout, world_size, wanted):
    assert repr(ra.default_schedule(ra.make_plan(make_layout(4096, world_size), mask))) == wanted


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "wanted"),
    [(8, 4, "double_ring(4)"), (8, 8, "ring()"), (8, 1, "ring()"), (8, None, "ring()"), (4, 2, "gather()")],
)
def test_default_schedule_over_nodes(world_size, ranks_per_node, wanted):
    plan = ra.make_plan(ra.zigzag(4096, world_size), ra.causal())
    assert repr(ra.default_schedule(plan, ranks_per_node)) == wanted


@pytest.mark.parametrize(
    ("rows", "world_size", "mask", "wanted"),
    [
        (8192, 4, ra.causal(), "waves(2)"),
        (8193, 4, ra.causal(), "gather()"),
        (1024, 3, ra.causal(), "gather()"),
        (1024, 4, ra.sliding_window(64), "gather()"),
        (1024, 8, ra.causal(), "ring()"),
    ],
)
def test_default_schedule_over_copy_engines(rows, world_size, mask, wanted):
    plan = ra.make_plan(ra.default_layout(mask, rows * world_size, world_size), mask)
    assert repr(ra.default_schedule(plan, world_size, copy_engines=True)) == wanted


SKEWED = ra.documents(lengths=[11000, 5500, 3600, 2700, 2200, 1800, 1500, 1300, 1200, 1100, 868])


@pytest.mark.parametrize(
    ("layout", "mask", "ranks_per_node", "wanted"),
    [
        (ra.balanced(SKEWED, 32768, 8), SKEWED, None, "waves(2)"),
        (ra.balanced(SKEWED, 32768, 8), SKEWED, 8, "waves(2)"),
        (ra.balanced(SKEWED, 32768, 8), SKEWED, 4, "double_ring(4)"),
        (ra.balanced(SKEWED, 32768, 4), SKEWED, None, "gather()"),
        (ra.zigzag(32768, 8), ra.prefix(9999), None, "ring()"),
        (ra.contiguous(32768, 8), ra.causal(), None, "ring()"),
    ],
    ids=["documents", "one-node", "nodes", "few-ranks", "prefix", "idle-ranks"],
)
def test_the_default_for_unequal_steps_is_waves_instead_of_a_ring(layout, mask, ranks_per_node, wanted):
    plan = ra.make_plan(layout, mask)
    assert repr(ra.default_schedule(plan, ranks_per_node)) == wanted
    assert repr(ra.default_schedule(plan, ranks_per_node, copy_engines=True)) == wanted


GIANT = ra.documents(lengths=[30_000, *[500] * 70])
# the last rank needs all, the others next to nothing; the first rank is busiest with its own rows
LAST = ra.documents(lengths=[640], causal=False) | ra.global_tokens(range(7680 - 64, 7680))


@pytest.mark.parametrize(
    ("layout", "mask", "most", "wanted"),
    [
        (ra.placed(GIANT, 65_000, 8), GIANT, 3, "gather()"),
        (ra.contiguous(7680, 12), LAST, 8, "waves(2)"),
        (ra.contiguous(7680, 8), LAST, 3, "gather()"),
    ],
    ids=["documents", "too-much", "one-rank"],
)
def test_where_few_ranks_need_much_they_gather(layout, mask, most, wanted):
    plan, n = ra.make_plan(layout, mask), layout.world_size
    needed = [sum(len(plan.needs(rank, owner)) for owner in range(n) if owner != rank) for rank in range(n)]
    assert max(needed) > most * max(plan.lengths)
    assert sum(needed) <= 3 * n * max(plan.lengths)
    assert repr(ra.default_schedule(plan)) == repr(ra.default_schedule(plan, copy_engines=True)) == wanted


def test_schedules_are_values():
    assert ra.double_ring(2) == ra.double_ring(2) != ra.double_ring(3)
    assert ra.ring() == ra.ring() != ra.gather()
    assert len({ra.ring(), ra.ring(), ra.gather()}) == 2


@pytest.mark.parametrize("schedule", [ra.gather(), *(ra.waves(width) for width in (1, 2, 3, 7))], ids=repr)
@given(st.data())
@pytest.mark.some(2)
def test_the_traffic_of_a_rank_is_all_that_concerns_it(layout_strategy, mask_strategy, schedule, data):
    """Transfers of K/V and of dK/dV that leave a rank or come to it, in order; and what it knows of the others."""
    seq_len, world_size = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 6))
    mask, _ = data.draw(mask_strategy(seq_len))
    plan = ra.make_plan(data.draw(layout_strategy(seq_len, world_size)), mask)
    whole = Traffic.whole(schedule.transfers(plan))
    for rank in range(world_size):
        own = schedule.traffic(plan, rank)
        assert (own.last, own.crowded) == (whole.last, whole.crowded)

        def of_rank(transfers, rank=rank):
            return [t for t in transfers if rank in (t.src, t.dst)]

        assert of_rank(own.transfers) == of_rank(whole.transfers)
        gradients = [gradient_transfers(schedule, plan, traffic.transfers, traffic.last) for traffic in (own, whole)]
        assert of_rank(gradients[0]) == of_rank(gradients[1])
        # and none of pairs of other ranks
        assert len(own.transfers) == len(of_rank(own.transfers))
