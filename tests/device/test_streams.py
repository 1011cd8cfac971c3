"""Launches side by side: a pass gives the same bits however late each launch is computed."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

import ringattn as ra
from ringattn.device import local, streams
from ringattn.schedule.instructions import Buffer, Holds, Launch, Stream
from ringattn.transport import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = [ra.ring(), ra.gather(), ra.waves(1), ra.waves(2), ra.double_ring(2)]


class Late(streams.InOrder):
    """Computes each launch as late as fences allow: when a later operation must wait for it."""

    current = threading.local()

    def __init__(self, far):
        self.far, self.waiting = far, []
        self.current.streams = self

    @contextmanager
    def launch(self, x):
        self.recording = x
        yield
        self.recording = None

    recording = None

    def fence(self, stream):
        if stream is Stream.CALLER:
            self.compute(lambda x: True)
        elif stream is Stream.EXCHANGES:
            self.compute(lambda x: self.far in (None, x))

    def compute(self, due):
        waiting, self.waiting = self.waiting, []
        for x, compute in waiting:
            if due(x):
                compute()
            else:
                self.waiting.append((x, compute))

    def __exit__(self, *exception):
        self.fence(Stream.CALLER)
        self.current.streams = None


@pytest.fixture
def late(monkeypatch):
    """Backward passes on `Late` streams."""
    compute = local.backward

    def backward(*arguments, **options):
        own = Late.current.streams
        assert own.recording is not None
        own.waiting.append((own.recording, lambda: compute(*arguments, **options)))

    monkeypatch.setattr(local, "streams", lambda queries, k, v, dq, program, score, began: Late(program.far))
    monkeypatch.setattr(local, "backward", backward)


def gradients(schedule, mask, layout):
    def work(transport):
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(1, layout.seq_len, h, 4, generator=generator) for h in (4, 2, 2, 4)]
        q, k, v, dout = (ra.shard(x, layout, transport.rank) for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ra.ring_attention(*leaves, layout=layout, mask=mask, group=transport, schedule=schedule)
        return torch.autograd.grad(out, leaves, dout)

    return run_ranks(layout.world_size, work)


@pytest.fixture
def in_order(request):
    schedule, mask, layout = request.param
    return *request.param, gradients(schedule, mask, layout)


@pytest.mark.parametrize(
    "in_order",
    [
        *((schedule, ra.causal(), ra.zigzag(61, 4)) for schedule in SCHEDULES),
        *((schedule, ra.full(), ra.contiguous(64, 4)) for schedule in SCHEDULES),
        (ra.waves(1), ra.sliding_window(9), ra.striped(40, 6)),
        (ra.ring(), ra.documents([30, 10, 60]) & ra.causal(), ra.contiguous(100, 6)),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}",
    indirect=True,
)
def test_late_launches_give_the_same_bits(in_order, late):
    schedule, mask, layout, wanted = in_order
    for got, expected in zip(gradients(schedule, mask, layout), wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


class FakeStream:
    """`done` holds what has ended before anything that the stream is given from now on."""

    current = None

    def __init__(self, *_, priority=0):
        self.priority, self.done = priority, set()

    def wait_event(self, event):
        self.done |= event.done


class FakeEvent:
    def record(self, stream):
        self.done = set(stream.done)


@pytest.fixture
def fake_cuda(monkeypatch):
    """Streams that only note what comes before what; the caller's is the first current one."""
    FakeStream.current = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(FakeStream, "current", stream))
    streams._streams.cache_clear()
    yield
    streams._streams.cache_clear()


def launch_of(name):
    return Launch(0, Buffer(0, Holds.KV), 0, 0, 0, lambda: pytest.fail(f"{name} needs no tiles"))


def queue(name, stream):
    """What has ended before this, and this itself."""
    with stream:
        FakeStream.current.done.add(name)
        return set(FakeStream.current.done)


def test_exchanges_leave_before_what_is_prepared_and_launches_come_after_both(fake_cuda):
    caller = FakeStream.current
    caller.done.add("inputs")
    began = streams.Moment()
    began.record(caller)
    caller.done.add("queries")
    with streams.SideBySide(torch.device("cuda", 0), began=began) as side:
        assert queue("K/V", side.exchanges) == {"inputs", "K/V"}
        assert queue("own", side.launch(launch_of("own"))) == {"inputs", "queries", "own"}
        side.fence(Stream.LAUNCHES)
        assert queue("next", side.launch(launch_of("next"))) == {"inputs", "queries", "K/V", "next"}


def test_streams_wait_for_each_other_where_fences_say_so(fake_cuda):
    caller = FakeStream.current
    caller.done.add("inputs")
    with streams.SideBySide(torch.device("cuda", 0)) as side:
        assert queue("first launch", side.launch(launch_of("first"))) == {"inputs", "first launch"}
        queue("first exchange", side.exchanges)
        side.fence(Stream.LAUNCHES)
        second = queue("second launch", side.launch(launch_of("second")))
        assert "first exchange" in second  # its K/V
        assert "first launch" not in second  # beside it
        assert "second launch" not in queue("second exchange", side.exchanges)
        side.fence(Stream.EXCHANGES)
        assert "second launch" in queue("third exchange", side.exchanges)  # its gradients
        assert FakeStream.current is caller
    everything = {"first launch", "second launch", "first exchange", "second exchange", "third exchange"}
    assert everything <= caller.done


def test_gradients_of_other_ranks_wait_for_no_launch_over_own_keys(fake_cuda):
    far = launch_of("far")
    with streams.SideBySide(torch.device("cuda", 0), far) as side:
        side.fence(Stream.EXCHANGES)
        first = side.launch(launch_of("first half"))
        queue("first half", first)
        queue("keys come", side.exchanges)
        side.fence(Stream.LAUNCHES)
        side.fence(Stream.EXCHANGES)
        before_others = side.launch(far)
        assert before_others.stream.priority < first.stream.priority
        assert "keys come" in queue("far", before_others)
        side.fence(Stream.LAUNCHES)
        side.fence(Stream.EXCHANGES)
        sent = queue("gradients leave", side.exchanges)
        assert "far" in sent and "first half" not in sent
        assert side.exchanges.stream.priority < before_others.stream.priority
        second = queue("second half", side.launch(launch_of("second half")))
        assert not {"first half", "far", "gradients leave"} & second  # beside them
    assert {"first half", "far", "gradients leave", "second half"} <= FakeStream.current.done
