"""Every schedule for worlds of 1 to 16 ranks, proved: no deadlock, each live pair once, dK/dV home once, counts and bytes as planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.geometry import plan as plan_module
from ringattn.predict.machine import H200
from ringattn.predict.simulation import Option, Simulation, Workload
from ringattn.runtime.ulysses import HeadExchange, ring_layout
from ringattn.schedule.instructions import Add, Exchange, Fence, Launch, Stream, Wait
from ringattn.schedule.memory import backward_bytes
from ringattn.schedule.program import compile_programs
from ringattn.schedule.schedules import bytes_sent, gradient_transfers
from ringattn.transport.base import Done
from tests.schedule import rendezvous as rendezvous_module
from tests.schedule.rendezvous import ROW, Deadlock, Wires, prove, rendezvous

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def rows_with_gaps(monkeypatch):
    """Gaps between needed rows stay, as in long shards, so that messages are of scattered rows."""
    monkeypatch.setattr(plan_module, "_GAP", 0)


def uneven(n):
    """Shards of mixed strides and unequal lengths, out of order; the last of several ranks has nothing."""
    holders = max(1, n - 1)
    shards = [(ra.Span(3 * n + 2 * r + 1, 1), ra.Span(r, 3, n), ra.Span(3 * n + 2 * r, 1)) for r in range(holders)]
    rest = tuple(ra.Span(r, 3, n) for r in range(holders, n))
    shards[0] += rest
    return ra.Layout(3 * n + 2 * holders, tuple(shards) + ((),) * (n - holders))


# (layout, mask) of a number of ranks
CASES = [
    lambda n: (ra.zigzag(3 * n + 5, n), ra.causal()),
    lambda n: (ra.contiguous(2 * n + 1, n), ra.full()),
    lambda n: (ra.contiguous(3 * n, n), ra.sliding_window(4, 1)),
    lambda n: (ra.striped(3 * n, n), ra.dilated_window((3, 1), 2) | ra.global_tokens([n, 2 * n])),
    lambda n: (uneven(n), ra.sliding_window(n, 3) & holes(uneven(n).seq_len, n)),
    lambda n: packed(n),
]


def holes(seq_len, size):
    """All pairs but those of blocks on the diagonal."""
    return ra.block_sparse(~np.eye(-(-seq_len // size), dtype=bool), size)


def packed(n):
    mask = ra.documents(lengths=[n, 2, 0, n // 2, 1, n])
    return ra.balanced(mask, 4 * n + 1, n), mask


def schedules(n):
    """Every kind of schedule for n ranks; of double rings, those of every number of ranks a node."""
    found = [ra.ring(), ra.gather(), ra.waves(1), ra.waves(2)]
    found += [ra.double_ring(size) for size in range(1, n + 1) if n % size == 0]
    # these two are one of the others in the end
    return [*found, ra.waves(memory=1), ra.default_schedule] if n <= 8 else found


def chosen(schedule, plan):
    """The schedule, with what it leaves open chosen; waves by memory get twice what the narrowest take."""
    if schedule is ra.default_schedule:
        return schedule(plan)
    if schedule.by_memory:
        schedule = ra.waves(memory=max(1, 2 * backward_bytes(ra.waves(1), plan, ROW)))
    return schedule.resolve(plan, None, lambda candidate: backward_bytes(candidate, plan, ROW))


def by_step(transfers, steps, world_size):
    """Rows that leave each rank in each step: (world_size, steps)."""
    rows = np.zeros((world_size, steps), int)
    for t in transfers:
        rows[t.src, t.step] += len(t.rows)
    return rows


@pytest.mark.parametrize(
    ("world_size", "number"),
    [
        pytest.param(
            n,
            number,
            id=f"{n}-{getattr(schedule, '__name__', schedule)}",
            marks=pytest.mark.thorough if n in (11, 13, 14, 15) else (),
        )
        for n in range(1, 17)
        for number, schedule in enumerate(schedules(n))
    ],
)
@pytest.mark.some(40)
def test_every_schedule(world_size, number):
    # as worlds grow, a schedule meets one case after another; small worlds take two
    for case in {(world_size + number) % 6, (world_size + number + 3) % 6} if world_size < 8 else {(world_size + number) % 6}:
        layout, mask = CASES[case](world_size)
        plan = ra.make_plan(layout, mask)
        schedule = chosen(schedules(world_size)[number], plan)
        proof = prove(schedule, layout, mask, early=(0, 1) if world_size < 8 else (world_size % 2,))
        pairs = plan.pairs().sum(axis=1).tolist()
        assert [rank.pairs.sum() for rank in proof.forward] == [rank.pairs.sum() for rank in proof.backward] == pairs
        assert [rank.sent.sum() for rank in proof.forward] == [bytes_sent(schedule, plan, rank, 1) for rank in range(world_size)]
        kv = schedule.transfers(plan)
        for holds, transfers in enumerate((kv, gradient_transfers(schedule, plan, kv))):
            sent = by_step(transfers, proof.backward[0].steps, world_size)
            assert np.array_equal([rank.sent[:, holds] for rank in proof.backward], sent)


@pytest.mark.parametrize("world_size", [3, 6])
def test_the_simulation_counts_what_programs_do(world_size):
    for number, schedule in enumerate(schedules(world_size)):
        layout, mask = CASES[number % 6](world_size)
        schedule = chosen(schedule, ra.make_plan(layout, mask))
        proof = prove(schedule, layout, mask)
        world = Simulation(H200, Workload(layout.seq_len, 4, 2, 16, mask), world_size, 2, Option(schedule), layout)
        row_bytes = np.array([world.kv_row, world.grad_row])
        for counts, ranks in ((world.forward_counts, proof.forward), (world.backward_counts, proof.backward)):
            assert np.array_equal(counts.pairs.T, [rank.pairs for rank in ranks])
            for way, name in enumerate(("sent", "received")):
                moved = counts.moved[:, way].sum(axis=-1).T
                assert np.array_equal(moved, [getattr(rank, name) @ row_bytes for rank in ranks])


class Traced:
    """A transport that keeps what is exchanged, as (peer, elements), instead of sending it."""

    def __init__(self, rank, size):
        self.rank, self.size, self.exchanges = rank, size, []

    def exchange(self, sends, receives, *, at_rest=False):
        self.exchanges.append([[(peer, x.numel()) for peer, x in peers] for peers in (sends, receives)])
        return Done()


def on_grid(wires, rank, u, swaps, program):
    """A rank of a grid: the all-to-all to heads, the ring's exchanges, and the all-to-all back."""
    ring, heads = divmod(rank, u)

    def swap(sends, receives):
        posted = wires.post(rank, [(ring * u + peer, size) for peer, size in sends], [ring * u + peer for peer, _ in receives])
        yield posted
        assert posted.arrived == [size for _, size in receives]

    yield from swap(*swaps[0])
    for x in program.instructions:
        if isinstance(x, Exchange):
            sends = [(m.peer * u + heads, len(m.rows)) for m in x.sends]
            posted = wires.post(rank, sends, [m.peer * u + heads for m in x.receives])
            sizes = [len(m.rows) for m in x.receives]
        elif isinstance(x, Wait):
            yield posted
            assert posted.arrived == sizes
    yield from swap(*swaps[1])


@pytest.mark.parametrize("u", range(2, 17))
def test_every_grid(u):
    """All grids of up to 16 ranks with u ranks on the heads axis."""
    for ring in range(1, 16 // u + 1):
        case = (u + ring) % 6
        whole, mask = CASES[case](u * ring)
        layout = ring_layout(whole, u)
        plan = ra.make_plan(layout, mask)
        numbers = schedules(ring)
        schedule = chosen(numbers[(u + 2 * ring) % len(numbers)], plan)
        programs = prove(schedule, layout, mask).programs
        for name in ("forward", "backward"):
            wires, ranks = Wires(), []
            for rank in range(u * ring):
                first = rank - rank % u
                exchange = HeadExchange(Traced(rank % u, u), whole.lengths[first : first + u])
                rows = whole.lengths[rank]
                there = exchange.to_heads(torch.empty(1, rows, 2 * u, 3), torch.empty(1, rows, u, 2))
                exchange.to_rows(*there)
                ranks.append(on_grid(wires, rank, u, exchange.transport.exchanges, getattr(programs[rank // u], name)))
            rendezvous(ranks)


def without(kind, **attributes):
    """Leaves the first such instruction out of a list."""

    def change(instructions):
        found = next(
            x for x in instructions if isinstance(x, kind) and all(getattr(x, name) == value for name, value in attributes.items())
        )
        return [x for x in instructions if x is not found]

    return change


def turned_around(instructions):
    """The messages of the second exchange come first."""
    first, second, *_ = [x for x in instructions if isinstance(x, Exchange)]
    swapped = {first: replace(second, step=first.step), second: replace(first, step=second.step)}
    return [swapped.get(x, x) for x in instructions]


def without_a_message(name):
    def change(instructions):
        exchange = next(x for x in instructions if isinstance(x, Exchange) and getattr(x, name))
        return [replace(x, **{name: getattr(x, name)[1:]}) if x is exchange else x for x in instructions]

    return change


FAULTS = {
    "a send is missing": without_a_message("sends"),
    "a receive is missing": without_a_message("receives"),
    "exchanges change places": turned_around,
    "a launch is missing": without(Launch, step=1),
    "an Add is missing": without(Add),
    "a fence is missing": without(Fence, stream=Stream.EXCHANGES, step=2),
    "nobody waits": without(Wait),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("schedule", [ra.ring(), ra.waves(1), ra.double_ring(2)], ids=repr)
def test_the_proof_finds_faults_of_one_rank(monkeypatch, schedule, fault):
    def faulty(*args):
        programs = compile_programs(*args)
        backward = programs[1].backward
        changed = replace(backward, instructions=tuple(FAULTS[fault](backward.instructions)))
        programs[1] = replace(programs[1], make_backward=lambda: changed)
        return programs

    monkeypatch.setattr(rendezvous_module, "compile_programs", faulty)
    with pytest.raises((AssertionError, KeyError)):
        prove(schedule, ra.zigzag(32, 4), ra.full())


def test_a_deadlock_is_found():
    """Each of two ranks waits for the other's message before it sends its own."""
    wires = Wires()

    def work(rank):
        yield wires.post(rank, [], [1 - rank])
        yield wires.post(rank, [(1 - rank, "late")], [])

    with pytest.raises(Deadlock, match=r"ranks \[0, 1\] wait"):
        rendezvous(work(rank) for rank in range(2))
