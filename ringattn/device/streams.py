"""Where the launches of a backward pass run: one after another, or side by side.

Blocks of keys differ in work, and there are few more of them than multiprocessors: at the end of a launch most of these are idle, for up
to the time of a block. Launches that do not need each other's results take turns on two streams, the lanes: blocks of the next fill
what those of the last leave. Small kernels and exchanges that lie between them go to a third, with priority: they would wait
for whole launches otherwise.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch


class Lanes(ABC):
    """The order of a pass on the device; a context: what is queued in neither `launch` nor `between` comes before, or after, all of it."""

    @abstractmethod
    def launch(self) -> AbstractContextManager:
        """For a launch. It begins when what was queued in `between` before the last `go_on` is done."""

    @abstractmethod
    def between(self) -> AbstractContextManager:
        """For exchanges, and sums of what they bring."""

    @abstractmethod
    def join(self) -> None:
        """What is queued in `between` from now on comes after the launches so far."""

    @abstractmethod
    def go_on(self) -> None:
        """The next launch comes after what is queued in `between` so far."""

    @abstractmethod
    def __enter__(self) -> Lanes:
        pass

    @abstractmethod
    def __exit__(self, *exception: object) -> None:
        pass


class InOrder(Lanes):
    """All on the current stream, or on a device without streams."""

    def launch(self) -> AbstractContextManager:
        return nullcontext()

    def between(self) -> AbstractContextManager:
        return nullcontext()

    def join(self) -> None:
        pass

    def go_on(self) -> None:
        pass

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class SideBySide(Lanes):
    """Two launches at a time, on streams that begin after the current one, which goes on after them.

    Memory is the current stream's: what is let go of inside and used again there must be in order without that stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._home = torch.cuda.current_stream(device)
        self._streams = _streams(device)
        between, *lanes = self._streams
        self._between = _On(between, self._home)
        self._lane, self._other = (_On(lane, self._home) for lane in lanes)
        self._start, self._end = torch.cuda.Event(), torch.cuda.Event()

    def __enter__(self) -> Lanes:
        self._start.record(self._home)
        for stream in self._streams:
            stream.wait_event(self._start)
        return self

    def __exit__(self, *exception: object) -> None:
        for stream in self._streams:
            self._come_after(self._home, stream)

    def launch(self) -> AbstractContextManager:
        self._lane, self._other = self._other, self._lane
        self._lane.stream.wait_event(self._start)
        return self._lane

    def between(self) -> AbstractContextManager:
        return self._between

    def join(self) -> None:
        self._come_after(self._between.stream, self._lane.stream)

    def go_on(self) -> None:
        self._start.record(self._between.stream)

    def _come_after(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        self._end.record(other)
        stream.wait_event(self._end)


class _On(AbstractContextManager):
    """Makes a stream the current one, and then that which is so outside: known beforehand, which saves to look for it."""

    def __init__(self, stream: torch.cuda.Stream, home: torch.cuda.Stream) -> None:
        self.stream, self._home = stream, home

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_stream(self._home)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device), torch.cuda.Stream(device)
