"""Schedules: what one rank sends another receives, rows come in time, gradients get home once, and nothing needless moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringattn as ra
from ringattn.plan import Rows
from ringattn.schedule import bytes_sent, make_steps
from ringattn.transport import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = {"ring": ra.ring(), "gather": ra.gather()}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def listed(rows: Rows) -> list[int]:
    return rows.index(torch.device("cpu")).tolist()


@st.composite
def _cases(draw, layout_strategy, mask_strategy):
    seq_len = draw(st.integers(0, 30))
    world_size = draw(st.integers(1, 8))
    mask, _ = draw(mask_strategy(seq_len))
    return draw(layout_strategy(seq_len, world_size)), mask


@pytest.fixture(scope="session")
def cases(layout_strategy, mask_strategy):
    """Draws (layout, mask)."""
    return _cases(layout_strategy, mask_strategy)


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


@every_schedule
@given(st.data())
def test_simulated_passes(cases, schedule, data):
    """A forward and a backward pass of integers: each K/V row is its position, each gradient a count per (query, key)."""
    layout, mask = data.draw(cases)
    plan = ra.make_plan(layout, mask)
    live = mask.dense(layout.seq_len).numpy()
    ranks = range(layout.world_size)
    order = [
        layout.positions(r).numpy() if plan.order[r] is None else layout.positions(r).numpy()[plan.order[r].rows] for r in ranks
    ]
    steps = [make_steps(schedule, plan, rank) for rank in ranks]
    assert len({len(part) for part in steps}) == 1
    held = list(order)
    # gradient of a buffer row: how often each query has added to it
    own = [np.zeros((len(keys), layout.seq_len), dtype=int) for keys in order]
    previous, grads = [None] * len(ranks), list(own)
    for t in range(len(steps[0])):
        wires = Wires()
        for rank in ranks:
            step = steps[rank][t]
            assert step.k_rows == len(held[rank])
            for message in step.sends:
                wires.send(rank, message.peer, held[rank][listed(message.slots)])
            for message in step.grads_out:
                wires.send(rank, message.peer, previous[rank][listed(message.slots)])
        arriving, inbox = [], []
        for rank in ranks:
            step = steps[rank][t]
            rows = np.full(sum(len(message.slots) for message in step.receives), -1)
            for message in step.receives:
                rows[listed(message.slots)] = wires.receive(message.peer, rank, len(message.slots))
            assert (rows >= 0).all()
            arriving.append(rows)
            for target, messages in ((grads, step.grads_in), (own, step.grads_own)):
                inbox += [(target, rank, message, wires.receive(message.peer, rank, len(message.slots))) for message in messages]
        wires.assert_empty()
        for rank in ranks:
            for q_begin, q_end, k_begin, k_end, lo, hi in steps[rank][t].tiles.rows:
                for i in range(q_begin, q_end):
                    for j in range(max(k_begin, i - hi), min(k_end, i - lo + 1)):
                        grads[rank][j, order[rank][i]] += 1
                        assert live[order[rank][i], held[rank][j]]
        for target, rank, message, rows in inbox:
            target[rank][listed(message.slots)] += rows
        previous, held = grads, arriving
        grads = [np.zeros((len(rows), layout.seq_len), dtype=int) for rows in held]
    # every query's contribution to every key it sees is at the key's owner, once
    for rank in ranks:
        assert np.array_equal(own[rank], live[:, order[rank]].T)


@every_schedule
@given(st.data())
def test_only_rows_that_someone_still_needs_move(cases, schedule, data):
    layout, mask = data.draw(cases)
    plan = ra.make_plan(layout, mask)
    ranks = range(layout.world_size)
    for rank in ranks:
        for t in range(schedule.steps(layout.world_size)):
            for transfer in schedule.outgoing(plan, rank, t):
                # in a ring the ranks from the receiver on to the owner come after
                distance = (transfer.owner - transfer.dst) % layout.world_size
                later = [(transfer.dst + i) % layout.world_size for i in range(distance)]
                users = [transfer.dst] if schedule == ra.gather() else later
                needed = Rows(np.concatenate([plan.needs(user, transfer.owner).ranges for user in users]))
                assert transfer.rows == needed


@pytest.mark.parametrize("row_bytes", [1, 4096])
def test_a_window_moves_only_the_neighbours_rows(row_bytes):
    window, seq_len = 100, 8192
    plan = ra.make_plan(ra.contiguous(seq_len, 8), ra.sliding_window(window))
    for schedule in SCHEDULES.values():
        sent = [bytes_sent(schedule, plan, rank, row_bytes) for rank in range(8)]
        # the last rank has no neighbour behind it
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
    # under a causal mask contiguous ranks send only to those behind them
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
    ids=repr,
)
def test_a_forward_pass_sends_the_bytes_that_are_told(schedule, mask, make_layout):
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


def test_schedules_are_values():
    assert ra.ring() == ra.ring() != ra.gather()
    assert len({ra.ring(), ra.ring(), ra.gather()}) == 2


def test_a_rank_alone_exchanges_nothing():
    for schedule in SCHEDULES.values():
        steps = make_steps(schedule, ra.make_plan(ra.zigzag(16, 1), ra.causal()), 0)
        for step in steps:
            assert not any((step.sends, step.receives, step.grads_out, step.grads_in, step.grads_own))
        assert sum(step.tiles.pairs for step in steps) == 16 * 17 // 2
