"""Work for the next step: when it begins, in what order results come, and how it ends."""

import functools
import itertools
import queue
import threading
import time

import pytest

from ringattn.training import ahead
from ringattn.training.ahead import Ahead

LONG = 600.0  # seconds that no test waits


class Clock:
    """Time that stands still until a test moves it, and how long the pauses are that begin."""

    def __init__(self):
        self.now, self.pauses = 100.0, queue.Queue()

    def event(self):
        event = threading.Event()
        event.wait = self.pauses.put
        return event


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ahead, "monotonic", lambda: clock.now)
    monkeypatch.setattr(ahead, "Event", clock.event)
    return clock


def same(x):
    return x


def count():
    """Loads 1, 2, 3 ..."""
    return functools.partial(next, itertools.count(1))


def pauses(load, clock, steps):
    """How long a loaded batch waits in each step, for steps of so many seconds, in which the loader does not move the clock any more."""
    with Ahead(load, same, "ahead") as batches:
        found = [clock.pauses.get(timeout=LONG)]
        for seconds in steps:
            assert batches.result() is not None
            found.append(clock.pauses.get(timeout=LONG))
            clock.now += seconds
    return found


def test_a_batch_is_readied_in_the_middle_of_a_step(clock):
    """By what the step before took, of which there is none before the first two results; but it waits no longer than a second."""
    assert pauses(count(), clock, [1.0, 0.5, 30.0, 0.0]) == [0.0, 0.0, 0.5, 0.25, 1.0]


def test_time_that_has_gone_is_not_waited_for(clock):
    loading = 0.25

    def load():
        clock.now += loading
        return True

    assert pauses(load, clock, [1.25, 0.25, 0.0]) == [0.0, 0.0, (1.25 + loading) / 2 - loading, 0.0]


def paused(monkeypatch):
    """Batches in a pause that would last longer than any test."""
    monkeypatch.setattr(ahead, "_LONGEST", LONG)
    batches, begun = Ahead(count(), same, "ahead"), queue.Queue()
    wait = batches._asked.wait
    assert batches.result() == 1
    batches._asked.wait = lambda seconds: (begun.put(seconds), wait(seconds))
    batches._began -= 2 * LONG  # the step under way began long ago
    assert batches.result() == 2
    while begun.get(timeout=LONG) == 0:
        pass  # of the batch before
    return batches


def test_who_asks_does_not_wait_for_the_middle(monkeypatch):
    with paused(monkeypatch) as batches:
        began = time.monotonic()
        assert batches.result() == 3
        assert time.monotonic() - began < LONG / 2


def test_the_thread_readies():
    readied = queue.Queue()

    def ready(number):
        readied.put(threading.current_thread())
        return number

    with Ahead(count(), ready, "ahead") as batches:
        for number in (1, 2, 3):
            assert readied.get(timeout=LONG) is not threading.current_thread()
            assert batches.result() == number


def test_none_is_the_last():
    numbers = iter([1, 2])
    loads = []

    def load():
        loads.append(1)
        return next(numbers, None)

    with Ahead(load, same, "ahead") as batches:
        assert [batches.result() for _ in range(3)] == [1, 2, None]
    assert len(loads) == 3


def running():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


@pytest.mark.parametrize("place", ["load", "ready"])
def test_an_error_comes_in_the_place_of_its_result(place):
    def fails(*_):
        raise KeyError("a batch")

    functions = {"load": lambda: 1, "ready": same} | {place: fails}
    with Ahead(*functions.values(), "ahead") as batches, pytest.raises(KeyError, match="a batch"):
        batches.result()
    assert not running()


def test_leaving_ends_a_pause(monkeypatch):
    began = time.monotonic()
    with paused(monkeypatch):
        pass
    assert time.monotonic() - began < LONG / 2
    assert not running()
