"""Schedules: what one rank sends another receives, rows come in time, gradients get home once, and nothing needless moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.geometry.rows import Rows
from ringattn.predict.machine import H200
from ringattn.predict.simulation import Option, Simulation, Workload
from ringattn.schedule.program import make_steps
from ringattn.schedule.schedules import DoubleRing, RowBytes, Waves, bytes_sent
from ringattn.transport import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = {
    "ring": ra.ring(),
    "gather": ra.gather(),
    "waves-1": ra.waves(1),
    "waves-2": ra.waves(2),
    "waves-3": ra.waves(3),
    "double-ring-2": ra.double_ring(2),
    "double-ring-4": ra.double_ring(4),
}
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


def fitting(schedule, world_size):
    """The schedule for so many ranks."""
    return ra.double_ring(math.gcd(world_size, schedule.ranks_per_node)) if isinstance(schedule, DoubleRing) else schedule


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


class Simulated:
    """A rank whose K/V rows are their positions, and whose dK/dV count, for each key, each query's contribution."""

    def __init__(self, steps, order, rank, seq_len):
        self.steps, self.rank, self.seq_len = steps, rank, seq_len
        self.queries = order[rank]
        self.buffers = {0: order[rank]}
        # who is alone adds nothing later: its gradients are of the inputs' dtype, all others of the sums'
        self.dtype = np.int16 if steps.alone else np.int64
        # what is not written is not zero
        self.grads = {0: np.full((len(order[rank]), seq_len), 1000, self.dtype)}
        if steps.backward[-1].adds:
            self.grads[0][steps.backward[-1].begin :] = 0
        self.received = {}  # box: what came in it
        self.computed = 0

    def begin_gradients(self, t, early):
        """All of step t before its exchange; with `early` it is computed before the step before."""
        step = self.steps.backward[t]
        self.open_gradients(step.grads_opens)
        if early:
            self.add(step)
        if t:
            self.finish(t - 1)
        self.computed += early
        # the step may compute meanwhile
        assert not any(step.collects and message.buffer == step.buffer for message, _ in step.sums)
        self.sum(step.sums)
        for number in step.boxes_close:
            del self.grads[number]
        self.open_gradients(step.box_opens)

    def finish(self, t):
        """Compute step t, if that has not been done, and let go of its K/V."""
        if self.computed == t:
            self.add(self.steps.backward[t])
            self.computed += 1
        for number in self.steps.backward[t].closes:
            del self.buffers[number]

    def sum(self, sums):
        for message, box in sums:
            assert np.array_equal(self.grads[box.buffer], self.received.pop(box.buffer))
            self.grads[message.buffer][listed(message.slots)] += self.grads[box.buffer]

    def open_gradients(self, opens):
        self.open(opens, self.grads, lambda rows: np.full((rows, self.seq_len), 1000, self.dtype))

    def begin(self, step, wires, grads):
        self.open(step.opens, self.buffers, lambda rows: np.full(rows, -1))
        for message in step.sends:
            assert message.whole == (len(message.slots) == len(self.buffers[message.buffer]))
            rows = self.buffers[message.buffer][listed(message.slots)]
            assert (rows >= 0).all()
            wires.send(self.rank, message.peer, rows)
        for message in step.grads_out if grads else ():
            assert message.whole == (len(message.slots) == len(self.grads[message.buffer]))
            wires.send(self.rank, message.peer, self.grads[message.buffer][listed(message.slots)])

    @staticmethod
    def open(opens, buffers, make):
        for number, rows, old in opens:
            assert number not in buffers
            fresh = make(rows)
            # what is reused has the size that is wanted, and holds nothing that is
            assert old is None or buffers.pop(old).shape == fresh.shape
            buffers[number] = fresh

    def compute(self, step):
        """(queries, keys) of the step's pairs."""
        if not len(step.tiles):
            return
        keys = self.buffers[step.buffer][step.begin : step.begin + step.tiles.k_rows]
        assert len(keys) == step.tiles.k_rows
        assert (keys >= 0).all()
        for q_begin, q_end, k_begin, k_end, lo, hi in step.tiles.rows:
            for i in range(q_begin, q_end):
                for j in range(max(k_begin, i - hi), min(k_end, i - lo + 1)):
                    yield self.queries[i], keys[j], step.begin + j

    def add(self, step):
        if step.collects and not step.adds:
            self.grads[step.buffer][step.begin : step.begin + step.tiles.k_rows] = 0
        for query, _, row in self.compute(step):
            self.grads[step.buffer][row, query] += 1

    def end(self, step, wires, grads):
        for message in step.receives:
            assert message.whole == (len(message.slots) == len(self.buffers[message.buffer]))
            rows = listed(message.slots)
            assert (self.buffers[message.buffer][rows] == -1).all()
            self.buffers[message.buffer][rows] = wires.receive(message.peer, self.rank, len(rows))
        for message, box in zip(step.grads_in, step.boxes, strict=True) if grads else ():
            received = wires.receive(message.peer, self.rank, len(message.slots))
            assert received.dtype == self.dtype
            assert self.grads[box.buffer].shape == received.shape
            self.grads[box.buffer][:] = received
            self.received[box.buffer] = received
        for number in () if grads else step.closes:
            del self.buffers[number]
        for number in step.grads_close if grads else ():
            del self.grads[number]


def simulate(schedule, layout, mask):
    plan = ra.make_plan(layout, mask)
    ranks = range(layout.world_size)
    order = [
        layout.positions(r).numpy() if plan.order[r] is None else layout.positions(r).numpy()[plan.order[r].rows] for r in ranks
    ]
    steps = [make_steps(schedule, plan, rank) for rank in ranks]
    assert len({(len(part.forward), len(part.backward)) for part in steps}) == 1
    live = mask.dense(layout.seq_len).numpy().astype(int)
    # forward: each query has seen its keys once
    world = [Simulated(steps[rank], order, rank, layout.seq_len) for rank in ranks]
    seen = np.zeros_like(live)
    for t in range(len(steps[0].forward)):
        wires = Wires()
        for rank in world:
            rank.begin(rank.steps.forward[t], wires, grads=False)
        for rank in world:
            for query, key, _ in rank.compute(rank.steps.forward[t]):
                seen[query, key] += 1
        for rank in world:
            rank.end(rank.steps.forward[t], wires, grads=False)
        wires.assert_empty()
    assert np.array_equal(seen, live)
    # backward: every query's contribution to every key it sees is at the key's owner, once, whether odd steps are computed as early
    # and even ones as late as they may be, or the other way round
    for odd in range(2):
        world = [Simulated(steps[rank], order, rank, layout.seq_len) for rank in ranks]
        for t in range(len(steps[0].backward)):
            wires = Wires()
            for rank in world:
                rank.begin_gradients(t, early=t % 2 == odd)
                rank.begin(rank.steps.backward[t], wires, grads=True)
            for rank in world:
                rank.end(rank.steps.backward[t], wires, grads=True)
            wires.assert_empty()
        for rank in world:
            rank.finish(t)
            rank.sum(rank.steps.sums)
            assert not rank.received
            assert rank.buffers.keys() == {0}
            assert rank.grads.keys() == {0} | {box.buffer for _, box in rank.steps.sums}
            assert np.array_equal(rank.grads[0], live[:, rank.queries].T)


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


@every_schedule
@settings(max_examples=30)
@given(st.data())
def test_only_rows_that_someone_still_needs_move(cases, schedule, data):
    """Each transfer is of what the receiver and those after it need, and brings no rank a row twice."""
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


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (2, 3), (2, 4), (3, 2)])
@pytest.mark.parametrize("schedule", [ra.ring(), ra.double_ring()], ids=repr)
def test_bytes_between_nodes(schedule, nodes, ranks_per_node):
    """K/V of each owner come to each other node once, twice with the backward pass; its dK/dV leave each once."""
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
    """Each rank's owners by distance, so many a step, straight from themselves, and the smallest wave last."""
    plan = ra.make_plan(ra.contiguous(80, 8), ra.full())
    for rank in range(8):
        fetched = [t for t in ra.waves(size).transfers(plan) if t.dst == rank]
        assert [t.owner for t in fetched] == [(rank - distance) % 8 for distance in range(1, 8)]
        assert [t.step for t in fetched] == [i // size for i in range(7)]
        assert all(t.src == t.owner and t.into == t.step + 1 for t in fetched)


def test_owners_of_which_nothing_is_needed_have_no_place_in_a_wave():
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


def test_waves_as_wide_as_memory_allows():
    """Bytes a rank in the backward pass: K/V of this wave and the next, dK/dV of this wave, of the last, and of two that came home."""
    plan = ra.make_plan(ra.contiguous(80, 8), ra.full())
    row = RowBytes(kv=1, grads=2)
    # shards of 10 rows, in the middle of the pass: (2 * 1 + 4 * 2) * 10 a width, where four waves are at hand
    wanted = {100: "waves(1)", 189: "waves(1)", 190: "waves(2)", 220: "waves(3)", 10_000: "waves(7)"}
    for memory, name in wanted.items():
        assert repr(ra.waves(memory=memory).resolve(plan, 8, row)) == name
    with pytest.raises(ValueError, match="waves have 99 bytes of memory, but one owner at a time takes 100 bytes a rank"):
        ra.waves(memory=99).resolve(plan, 8, row)


def held(schedule, plan, row):
    """The most bytes of others' K/V and dK/dV that a rank holds at a time in the backward pass."""
    most = 0
    for rank in range(plan.world_size):
        kv, grads, closes = {}, {}, ()

        def open_(opens, buffers):
            for number, rows, old in opens:
                buffers.pop(old, None)
                buffers[number] = rows

        for step in make_steps(schedule, plan, rank).backward:
            open_(step.grads_opens, grads)
            most = max(most, row.kv * sum(kv.values()) + row.grads * sum(grads.values()))
            for buffers, numbers in ((kv, closes), (grads, step.boxes_close)):
                for number in numbers:
                    del buffers[number]
            open_(step.opens, kv)
            open_(step.box_opens, grads)
            most = max(most, row.kv * sum(kv.values()) + row.grads * sum(grads.values()))
            for number in step.grads_close:
                del grads[number]
            closes = step.closes
    return most


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("mask", [ra.full(), ra.causal(), ra.sliding_window(30)], ids=repr)
def test_memory_that_is_counted_is_what_steps_hold(mask, world_size):
    work = Workload(40 * world_size, 8, 4, 16, mask)
    plan = ra.make_plan(ra.default_layout(mask, work.tokens, world_size), mask)
    for schedule in (ra.ring(), ra.gather(), ra.waves(1), ra.waves(2), ra.double_ring(2 - world_size % 2)):
        world = Simulation(H200, work, world_size, 8, Option(schedule))
        row = RowBytes(world.kv_row, world.grad_row)
        assert world.others_bytes() == held(schedule, plan, row)
        if isinstance(schedule, Waves) and schedule.width:
            assert schedule._bytes(plan, schedule.width, row) == held(schedule, plan, row)


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
def test_rings_of_unequal_steps_are_waves_by_default(layout, mask, ranks_per_node, wanted):
    plan = ra.make_plan(layout, mask)
    assert repr(ra.default_schedule(plan, ranks_per_node)) == wanted
    assert repr(ra.default_schedule(plan, ranks_per_node, copy_engines=True)) == wanted


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
    """Not with sums between them, and the fewer the longer they are."""
    plan = ra.make_plan(ra.zigzag(rows * world_size, world_size), ra.causal())
    assert {make_steps(schedule, plan, rank).side_by_side for rank in range(world_size)} == {wanted}


def test_schedules_are_values():
    assert ra.double_ring(2) == ra.double_ring(2) != ra.double_ring(3)
    assert ra.ring() == ra.ring() != ra.gather()
    assert len({ra.ring(), ra.ring(), ra.gather()}) == 2


@pytest.mark.parametrize("schedule", [ra.ring(), ra.waves(1), ra.waves(2)], ids=repr)
def test_a_hop_makes_no_buffer_anew(schedule):
    """With shards of one size, a pass makes as many buffers on 19 ranks as on 13: later steps reuse those of earlier ones."""

    def made(world_size):
        steps = make_steps(schedule, ra.make_plan(ra.contiguous(4 * world_size, world_size), ra.full()), 1)
        gradients = [step.grads_opens + step.box_opens for step in steps.backward]
        opens = [step.opens for step in steps.forward], gradients
        return [sum(opening.old is None for step in part for opening in step) for part in opens]

    assert made(19) == made(13)


def test_a_rank_alone_exchanges_nothing():
    for schedule in SCHEDULES.values():
        steps = make_steps(fitting(schedule, 1), ra.make_plan(ra.zigzag(16, 1), ra.causal()), 0)
        for part in (steps.forward, steps.backward):
            for step in part:
                assert not any((step.opens, step.sends, step.receives, step.grads_out, step.grads_in))
            assert sum(step.tiles.pairs for step in part) == 16 * 17 // 2
