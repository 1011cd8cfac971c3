"""The protocol of the symmetric transport, on simulated memory: every message arrives whole, in whatever order operations run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.transport import Peer, run_ranks
from ringattn.transport import staged as staged_module
from ringattn.transport.channels import Channel, make_chunks, split_at, usable
from ringattn.transport.exchange_plan import make_exchange_plan
from ringattn.transport.listed_channels import ListedChannels
from ringattn_kernels.recorder import recorder
from tests.strategies import examples
from tests.transport.simulated import Deadlock, Listing, SimulatedQueue, SimulatedTransport, World

pytestmark = pytest.mark.usefixtures("one_thread")


class Rank:
    """The attributes that a transport reads from the transport of its records."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@dataclass
class Case:
    """The sizes in bytes of each exchange's messages from rank to rank; `depth` exchanges are outstanding at once.

    at_rest: whether the first exchange is at rest, the second, and so on; from the start again after the last.
    """

    size: int
    capacity: int
    depth: int
    exchanges: list[dict[tuple[int, int], list[int]]]
    seed: int = 0
    serial: bool = False
    at_rest: tuple[bool, ...] = (False,)


@st.composite
def cases(draw):
    size = draw(st.integers(2, 4))
    pairs = [(src, dst) for src in range(size) for dst in range(size) if src != dst]
    messages = st.lists(st.one_of(st.integers(0, 3000), st.sampled_from([0, 511, 512, 513, 1024, 2048])), max_size=3)
    exchanges = draw(st.lists(st.dictionaries(st.sampled_from(pairs), messages), min_size=1, max_size=5))
    capacity = 1024 * draw(st.integers(2, 8))
    at_rest = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=4)))
    return Case(size, capacity, draw(st.integers(1, 3)), exchanges, draw(st.integers(0, 2**32)), draw(st.booleans()), at_rest)


def policy(seed):
    """Chooses the queue of the highest priority; priorities change at random, so that some queues fall far behind others."""
    rng = random.Random(seed)
    priorities = {}

    def choose(able):
        if rng.random() < 0.1:
            priorities.clear()
        return max(able, key=lambda queue: priorities.setdefault(queue, rng.random()))

    return choose


def content(src, dst, exchange, index, nbytes, turn=0):
    generator = torch.Generator().manual_seed((((src * 8 + dst) * 64 + exchange) * 8 + index) * 64 + turn)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def program(transport, case, turn=lambda: 0):
    """Queue all of a rank's work: write tensors just before they are sent, check them when they have arrived, then overwrite them.

    Their content depends on `turn()` when the write runs.
    """
    waiting = []

    queue = transport.memory.current

    def run(action):
        queue.run(action)
        recorder.note(lambda listing, find: listing.do(queue, lambda numbers: queue.run(action)))

    def finish():
        handle, checks, sent = waiting.pop(0)
        handle.wait()
        run(lambda: [check() for check in checks])
        run(lambda: [x.fill_(0xAA) for x in sent])

    for number, exchange in enumerate(case.exchanges):
        sends, receives, checks = [], [], []
        for (src, dst), sizes in exchange.items():
            for index, nbytes in enumerate(sizes):
                which = src, dst, number, index, nbytes
                if src == transport.rank:
                    sends.append(Peer(dst, torch.full((nbytes,), 0x11, dtype=torch.uint8)))
                    run(lambda target=sends[-1].tensor, which=which: target.copy_(content(*which, turn())))
                if dst == transport.rank:
                    receives.append(Peer(src, torch.full((nbytes,), 0x22, dtype=torch.uint8)))
                    checks.append(lambda got=receives[-1].tensor, which=which: check(got, content(*which, turn())))
        at_rest = case.at_rest[number % len(case.at_rest)]
        waiting.append((transport.exchange(sends, receives, at_rest=at_rest), checks, [peer.tensor for peer in sends]))
        if len(waiting) == case.depth:
            finish()
    while waiting:
        finish()


def check(got, wanted):
    assert torch.equal(got, wanted)


def simulate(case):
    world = World(case.size, case.capacity, policy(case.seed), serial=case.serial)
    transports = [SimulatedTransport(Rank(rank, case.size), world) for rank in range(case.size)]
    for transport in transports:
        program(transport, case)
    world.finish()
    assert not any(transport._outstanding for transport in transports)


@settings(max_examples=examples(250))
@given(cases())
@example(Case(2, 4096, 2, [{(0, 1): [2091, 1110, 100]}, {(0, 1): [100, 512], (1, 0): [2829]}], 341435123))
@example(Case(2, 2048, 2, [{(0, 1): [1024, 1024, 1024, 10]}, {(0, 1): [10]}], 5))
@example(Case(2, 2048, 1, [{(0, 1): [3000]}, {(1, 0): [512, 512, 512]}], serial=True))
def test_every_message_arrives_whole(case):
    simulate(case)


FAR = [Case(3, 4096, 2, [{(0, 1): [1500, 700], (1, 2): [900], (2, 0): [2048]}] * 4, seed) for seed in range(40)]
NEAR = [Case(3, 4096, 2, [{(0, 1): [500, 400], (1, 2): [900], (2, 0): [100]}] * 4, seed, at_rest=(True,)) for seed in range(40)]
busy = pytest.mark.parametrize("cases", [FAR, NEAR], ids=["far", "near"])


def fails(run, case):
    try:
        run(case)
    except AssertionError:
        return True
    return False


def found(cases, run=simulate):
    """How many cases show an error."""
    return sum(fails(run, case) for case in cases)


def any_found(cases, run=simulate):
    """Whether some case shows an error."""
    return any(fails(run, case) for case in cases)


@busy
@pytest.mark.parametrize("ready", [True, False], ids=["until it is ready", "until it is read"])
@pytest.mark.some(2)
def test_no_wait_can_be_left_out(monkeypatch, cases, ready):
    def impatient(queue, values):
        wait(queue, [(count, value) for count, value in values if count.ready != ready])

    wait = SimulatedQueue.wait
    assert found(cases) == 0
    monkeypatch.setattr(SimulatedQueue, "wait", impatient)
    assert found(cases) > len(cases) // 4


@pytest.mark.parametrize(
    ("cases", "ready", "off"),
    # a near channel holds more than these exchanges send, so waiting for one read chunk more does no harm there
    [(FAR, True, 1), (FAR, True, -1), (FAR, False, 1), (FAR, False, -1), (NEAR, True, 1), (NEAR, True, -1), (NEAR, False, -1)],
    ids=lambda value: None if isinstance(value, (bool, int)) else value[0].at_rest[0],
)
def test_no_wait_can_be_for_another_chunk(monkeypatch, cases, ready, off):
    def wrong(queue, values):
        wait(queue, [(count, value + off * (count.ready == ready)) for count, value in values])

    wait = SimulatedQueue.wait
    monkeypatch.setattr(SimulatedQueue, "wait", wrong)
    assert any_found(cases)


@busy
def test_tensors_may_not_change_before_the_wait(monkeypatch, cases):
    monkeypatch.setattr(SimulatedQueue, "after", lambda queue, mark: None)
    assert found(cases) > len(cases) // 4


GRAPHS = "abaab"  # two graphs, in this order


def replay(case, order=GRAPHS):
    """Run the case once a turn, with other content each turn.

    order: for each turn "a", a graph of all exchanges; "b", a graph of the last exchange alone; or ".", without a graph.
    """
    world = World(case.size, case.capacity, policy(case.seed), serial=case.serial)
    transports = [SimulatedTransport(Rank(rank, case.size), world) for rank in range(case.size)]
    works = {"a": case, "b": replace(case, exchanges=case.exchanges[-1:]), ".": case}
    turns, graphs = [0] * case.size, {}

    def queue(work, turn):
        for rank, transport in enumerate(transports):
            current = transport.memory.current
            current.run(lambda rank=rank: turns.__setitem__(rank, turn))
            if work == ".":
                program(transport, case, lambda rank=rank: turns[rank])
            else:
                graphs[rank, work].run(current)

    queue(".", 0)
    # a capture begins on an idle device
    world.finish()
    for rank, transport in enumerate(transports):
        for work in "ab":
            with transport.memory.capture() as graph:
                program(transport, works[work], lambda rank=rank: turns[rank])
            graphs[rank, work] = graph
    for turn, work in enumerate(order, 1):
        queue(work, turn)
    world.finish()
    assert not any(transport._outstanding for transport in transports)
    assert not any(value for (_, count), value in world.counts.items() if count.captured)


@settings(max_examples=examples(60))
@given(cases(), st.text("ab.", min_size=2, max_size=5))
@example(Case(2, 2048, 1, [{(0, 1): [3000]}, {(1, 0): [512, 512, 512]}], serial=True), GRAPHS)
def test_graphs_run_again_and_again(case, order):
    replay(case, order)


LONG = [Case(3, 2048, 2, [{(0, 1): [3000], (1, 2): [2500], (2, 0): [2048]}] * 2, seed) for seed in range(40)]
SERIAL = [replace(case, serial=True) for case in FAR[:4] + NEAR[:4] + LONG[:12]]
replays = pytest.mark.parametrize("cases", [FAR, NEAR, LONG], ids=["far", "near", "long"])


@replays
@pytest.mark.some(1)
def test_counts_must_be_set_back(monkeypatch, cases):
    assert found(cases[:5], replay) == 0
    monkeypatch.setattr(SimulatedQueue, "set_back", lambda queue, counts: None)
    assert found(cases[:5], replay) == 5


@replays
def test_ready_counts_must_be_set_back_before_all_is_read(monkeypatch, cases):
    late = []

    def set_back_late(queue, counts):
        late.extend((queue, count) for count in counts if count.ready)
        set_back(queue, [count for count in counts if not count.ready])

    def raise_to(queue, values):
        raise_first(queue, values)
        for of_queue, count in [pair for pair in late if pair[0] is queue]:
            late.remove((of_queue, count))
            set_back(queue, [count])

    set_back, raise_first = SimulatedQueue.set_back, SimulatedQueue.raise_to
    monkeypatch.setattr(SimulatedQueue, "set_back", set_back_late)
    monkeypatch.setattr(SimulatedQueue, "raise_to", raise_to)
    assert any_found(cases[:12], replay)


@replays
@pytest.mark.parametrize("order", [GRAPHS, ".a.a.a."], ids=["graphs", "between others"])
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "not captured"])
@pytest.mark.some(3)
def test_senders_must_wait_until_all_is_read(monkeypatch, cases, order, captured):
    def drain(queue, channels, in_graph, pulls):
        if in_graph != captured:
            kept(queue, channels, in_graph, pulls)
        elif in_graph:
            # set the count back without waiting for it
            with monkeypatch.context() as patch:
                patch.setattr(SimulatedQueue, "wait", lambda queue, values: None)
                kept(queue, channels, in_graph, pulls)

    def run(case):
        replay(case, order)

    assert found(cases[:5], run) == 0
    kept = staged_module._drain
    monkeypatch.setattr(staged_module, "_drain", drain)
    assert any_found(cases[:12], run) == (captured or "." in order)


def test_operations_queued_before_a_wait_precede_it_in_a_graph(monkeypatch):
    """Also on a device that runs a graph's operations one at a time, in any order that the edges allow."""

    def follow(queues, others):
        if any(queue is queue._memory.current for queue in (*queues, *others)):
            kept(queues, others)

    assert found(SERIAL, replay) == 0
    kept = staged_module._follow
    monkeypatch.setattr(staged_module, "_follow", follow)
    assert any_found(SERIAL, replay)


def play(case, order):
    """Run the case once a turn, with other content each turn. A rank runs it as it is in turn 0, and then plays what it recorded there.

    order: for each later turn, which ranks run it as it is again.
    """
    world = World(case.size, case.capacity, policy(case.seed), serial=case.serial)
    transports = [SimulatedTransport(Rank(rank, case.size), world) for rank in range(case.size)]
    turns, plays = [0] * case.size, []
    for rank, transport in enumerate(transports):
        recorder.steps = []
        program(transport, case, lambda rank=rank: turns[rank])
        steps, recorder.steps = recorder.steps, None
        listing = Listing(transport.memory.current)
        plays.append((listing, [later for later in [step(listing, lambda x: x) for step in steps] if later is not None]))
    for turn, as_it_is in enumerate(order, 1):
        for rank, transport in enumerate(transports):
            transport.memory.current.run(lambda rank=rank, turn=turn: turns.__setitem__(rank, turn))
            listing, later = plays[rank]
            if rank in as_it_is:
                program(transport, case, lambda rank=rank: turns[rank])
            else:
                listing([number for numbers in later for number in numbers()])
    world.finish()
    assert not any(transport._outstanding for transport in transports)


@settings(max_examples=80)
@given(cases(), st.lists(st.sets(st.integers(0, 3), max_size=2), min_size=1, max_size=4))
@example(Case(2, 2048, 1, [{(0, 1): [3000]}, {(1, 0): [512, 512, 512]}], serial=True), [set(), {1}, {0}, set()])
def test_recorded_exchanges_are_those_of_their_ranks(case, order):
    play(case, order)


@busy
def test_recorded_exchanges_have_places_and_counts_of_their_own(monkeypatch, cases):
    def stale(channels):
        found = kept(channels)
        return first.setdefault(id(channels), found) if len(found) else found

    first, kept, order = {}, ListedChannels.next_places, [set()] * 4
    assert found(cases[:5], lambda case: play(case, order)) == 0
    monkeypatch.setattr(ListedChannels, "next_places", stale)
    assert found(cases[:5], lambda case: play(case, order)) == 5


def test_a_deadlock_is_found():
    world = World(2, 2048, policy(0))
    transports = [SimulatedTransport(Rank(rank, 2), world) for rank in range(2)]
    transports[0].exchange([], [Peer(1, torch.empty(4))]).wait()
    with pytest.raises(Deadlock):
        world.finish()


def messages(sizes):
    return [(number, 0, nbytes) for number, nbytes in enumerate(sizes)]


@given(st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=4), max_size=10), st.integers(1, 6), st.integers(2, 5))
def test_places_in_a_channel(exchanges, halves, size):
    """Chunks cover the messages in order, and no chunk overlaps one that may not have been read yet."""
    capacity = halves * 1024 + 300
    channel = Channel(1, 0, size, capacity, sends=True)
    base = (size - 2) * capacity
    unread = []
    for sizes in exchanges:
        joined = []
        for chunk in make_chunks(messages(sizes), usable(capacity)):
            end = 0
            for part in chunk.parts:
                assert part.offset == -(-end // 512) * 512
                end = part.offset + part.nbytes
                joined += [(part.number, part.begin + i) for i in range(part.nbytes)]
            placed = channel.place(chunk, ())
            assert end <= chunk.nbytes < end + 512
            assert placed.parts == chunk.parts
            assert base <= placed.offset and placed.offset + chunk.nbytes <= base + capacity
            assert placed.offset % 512 == base % 512
            assert placed.must_be_read < channel.count
            unread = [(number, old, stop) for number, old, stop in unread if number >= placed.must_be_read]
            stop = placed.offset + chunk.nbytes
            assert all(other <= placed.offset or stop <= begin for _, begin, other in unread)
            unread.append((channel.count - 1, placed.offset, stop))
        assert joined == [(number, i) for number, nbytes in enumerate(sizes) for i in range(nbytes)]


@pytest.mark.parametrize("size", range(2, 9))
def test_each_channel_has_a_place_of_its_own(size):
    """A far channel lies with a third rank, or with the reader of two ranks; a near channel lies with the sender."""
    world = World(size, 4096, policy(0))
    places = []
    for src in range(size):
        transport = SimulatedTransport(Rank(src, size), world)
        for dst in {*range(size)} - {src}:
            for channel in transport._channels.out[dst]:
                placed = channel.place(*make_chunks(messages([1]), 512), ())
                places.append((placed.keeper, placed.offset))
                assert 0 <= placed.offset < 4096 * (size - 1)
                assert placed.keeper == src if channel.ready.near else placed.keeper not in (src, *([dst] if size > 2 else []))
            assert [channel.ready.near for channel in transport._channels.out[dst]] == [False, True]
    assert len(set(places)) == len(places)


def test_exchanges_at_rest_use_the_near_channel_if_it_holds_twice_as_much():
    transport = SimulatedTransport(Rank(0, 3), World(3, 8192, policy(0)))
    small, large = (torch.empty(nbytes, dtype=torch.uint8) for nbytes in (2048, 2049))
    for tensors, at_rest, near in (
        ([small], True, True),
        ([small], False, False),
        ([large], True, False),
        ([small] * 2, True, False),
    ):
        before = [channel.count for channel in transport._channels.out[1]]
        transport.exchange([Peer(1, x) for x in tensors], [], at_rest=at_rest)
        after = [channel.count for channel in transport._channels.out[1]]
        assert [later > earlier for earlier, later in zip(before, after)] == [not near, near]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("nbytes", [700, 9000, 40000])
def test_nobody_waits_for_the_computation_of_another(monkeypatch, size, nbytes):
    """Rank 0 computes until the others have all its messages; as on a GPU, copies within rank 0 wait for its computation."""
    world = World(size, 8192, policy(size))
    transports = [SimulatedTransport(Rank(rank, size), world) for rank in range(size)]
    computes, arrived = [], []

    def patient(queue, target, source):
        within = queue._rank == queue.keeper == 0
        queue.run(lambda: target.copy_(source), lambda: not (within and computes))

    messages = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(size)]
    for name in ("stage", "pull"):
        kept = getattr(SimulatedQueue, name)

        def one_by_one(queue, chunks, kept=kept):
            for chunk in chunks:
                queue.keeper = chunk.keeper
                kept(queue, [chunk])

        monkeypatch.setattr(SimulatedQueue, name, one_by_one)
    monkeypatch.setattr(SimulatedQueue, "_copy", patient)
    for rank, transport in enumerate(transports):
        sends = [Peer(peer, torch.full((nbytes,), 7, dtype=torch.uint8)) for peer in range(1, size)] if rank == 0 else []
        handle = transport.exchange(sends, [Peer(0, messages[rank])] if rank else [])
        if rank == 0:
            transport.memory.current.run(lambda: computes.append(True))
            transport.memory.current.run(computes.clear, lambda: len(arrived) == size - 1)
        handle.wait()
        if rank:
            transport.memory.current.run(lambda: arrived.append(True))
    world.finish()
    assert all((message == 7).all() for message in messages[1:])


@given(st.lists(st.integers(1, 9000), max_size=5), st.integers(2, 8))
def test_the_first_part_of_a_split_fits_and_the_rest_follows(sizes, halves):
    capacity, largest = 1024 * halves, 512 * halves
    channel = Channel(0, 1, 2, capacity, sends=True, near=True)
    channel.place(*make_chunks(messages([700]), largest), ())
    first, rest = split_at(messages(sizes), capacity, largest)
    covered = [(number, begin + i) for number, begin, nbytes in (*first, *rest) for i in range(nbytes)]
    assert sorted(covered) == [(number, i) for number, nbytes in enumerate(sizes) for i in range(nbytes)]
    assert all(channel.place(chunk, ()).must_be_read <= 1 for chunk in make_chunks(first, largest))
    assert not rest or sum(-(-nbytes // 512) * 512 for *_, nbytes in first) > largest - 512


def test_long_messages_are_pulled_while_they_are_staged():
    found = make_chunks(messages([2000, 100, 400]), 1024)
    assert [[part[:3] for part in chunk.parts] for chunk in found] == [[(0, 0, 1024)], [(0, 1024, 976)], [(1, 0, 100), (2, 0, 400)]]
    # of eight ranks, a far channel holds a chunk that is pulled beside one that is staged
    capacity = 36 << 20
    (far, *_), *_ = make_exchange_plan(0, 8, capacity, ((1, 64 << 20),), (), False, 1).rounds
    channel = Channel(0, 1, 8, capacity // 2, sends=True)
    assert [channel.place(far[0].chunk, ()).must_be_read for _ in range(4)] == [0, 0, 1, 2]


@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather()], ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.some(3)
def test_attention_over_staged_messages(size, schedule):
    """Forward and backward give the same bits as over a plain transport, with arenas far smaller than a shard."""
    seq_len = 61
    generator = torch.Generator().manual_seed(size)
    q, dout = (torch.randn(1, seq_len, 4, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, seq_len, 2, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    layout = ra.striped(seq_len, size)
    world = World(size, 2048, policy(size))

    def work(plain):
        staged = SimulatedTransport(plain, world, on_host=True)
        results = []
        for transport in (plain, staged, staged):
            leaves = [ra.shard(x, layout, plain.rank).requires_grad_() for x in (q, k, v)]
            out = ra.ring_attention(*leaves, layout=layout, group=transport, schedule=schedule)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, ra.shard(dout, layout, plain.rank))])
        return results

    for plain, *others in run_ranks(size, work):
        for other in others:
            assert all(torch.equal(x, y) for x, y in zip(plain, other, strict=True))
