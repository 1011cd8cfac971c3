"""Where the instructions of a backward pass run: all on the caller's stream, or launches side by side.

Blocks of keys differ in work, and a launch has few more of them than the GPU has multiprocessors. At the end of a launch most
multiprocessors are idle, for up to the time of a block. Launches that do not need each other's results take turns on two streams, so that
blocks of the next launch fill the multiprocessors that the last one leaves. Exchanges, and the sums of what they bring, go to a third
stream with priority. Without it these small kernels would wait for whole launches.

If a single launch has other ranks' keys, it goes before both halves of the rank's own, also before what is left of the first half: its
gradients travel while the own ones are computed.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ringattn_kernels.recorder import recorder

from ..schedule.instructions import Launch, Stream

if TYPE_CHECKING:
    from ringattn_kernels.recorder import Find
    from ringattn_kernels.submission import Submission


class Streams(ABC):
    """The order of a pass on the device; a context. The caller's stream waits at its end for all that was queued inside."""

    exchanges: AbstractContextManager  # for exchanges, and sums of what they bring

    @abstractmethod
    def launch(self, x: Launch) -> AbstractContextManager:
        """For a launch. It begins when what was queued for exchanges before the last fence of launches is done."""

    @abstractmethod
    def fence(self, stream: Stream) -> None:
        """What `stream` is given from now on comes after what the others have been given so far. See `Fence`."""

    @abstractmethod
    def __enter__(self) -> Streams:
        pass

    @abstractmethod
    def __exit__(self, *exception: object) -> None:
        pass


class InOrder(Streams):
    """All on the current stream, or on a device without streams."""

    exchanges = nullcontext()

    def launch(self, x: Launch) -> AbstractContextManager:
        return self.exchanges

    def fence(self, stream: Stream) -> None:
        pass

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class SideBySide(Streams):
    """Two launches at a time, on streams that begin after the caller's stream, which goes on after them.

    Memory belongs to the caller's stream. What is let go of inside and used again inside must be in order without that stream.
    """

    def __init__(self, device: torch.device, far: Launch | None = None, began: Moment | None = None) -> None:
        """far: the only launch over other ranks' keys, if there is a single one. began: exchanges come after that alone, not after all that
        the caller's stream was given before the context is entered."""
        self._began = began
        self._caller = torch.cuda.current_stream(device)
        exchanges, before, *launches = (_On(stream, self._caller) for stream in _streams(device))
        self.exchanges = self._exchanges = exchanges
        self._far, self._before_others, self._turns = far, before, launches
        self._start, self._end = Moment(), Moment()
        self._sending: torch.cuda.Stream | None = None  # with launches whose gradients are sent next
        self._used: dict[torch.cuda.Stream, None] = {}  # with launches
        self._joined = False
        self._followed = False  # whether exchanges come after all that was prepared

    def __enter__(self) -> Streams:
        self._start.record(self._caller)
        (self._began or self._start).before(self._exchanges.stream)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._joined:
            self.fence(Stream.CALLER)

    def launch(self, x: Launch) -> AbstractContextManager:
        if x is self._far:
            on = self._before_others
        else:
            self._turns.reverse()
            on = self._turns[0]
        if self._far in (None, x):
            self._sending = on.stream
        self._used[on.stream] = None
        self._start.before(on.stream)
        return on

    def fence(self, stream: Stream) -> None:
        if stream is Stream.LAUNCHES:
            if not self._followed:
                # what is prepared on the caller's stream, maybe since the first exchange
                self._come_after(self._exchanges.stream, self._caller)
                self._followed = True
            self._start.record(self._exchanges.stream)
        elif stream is Stream.CALLER:
            self._joined = True
            for other in (self._exchanges.stream, *self._used):
                self._come_after(self._caller, other)
        elif self._sending is not None:
            # the launch before this one was waited for by the fence before
            self._come_after(self._exchanges.stream, self._sending)

    def _come_after(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        self._end.record(other)
        self._end.before(stream)


class Moment:
    """A point in a stream, noted where the pass is recorded."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._listed: Any = None

    def record(self, stream: torch.cuda.Stream) -> None:
        """Now, in this stream."""
        if not recorder.rehearses:
            self._event.record(stream)
        if recorder.steps is not None:
            recorder.note(functools.partial(self._list_mark, stream.cuda_stream))

    def before(self, stream: torch.cuda.Stream) -> None:
        """What this stream does next comes after it."""
        if not recorder.rehearses:
            stream.wait_event(self._event)
        if recorder.steps is not None:
            recorder.note(functools.partial(self._list_wait, stream.cuda_stream))

    def _list_mark(self, stream: int, submission: Submission, find: Find) -> None:
        self._listed = submission.mark(stream)

    def _list_wait(self, stream: int, submission: Submission, find: Find) -> None:
        submission.after(stream, self._listed)


class _On(AbstractContextManager):
    """Makes a stream the current one, then restores `caller`, which is passed to save a lookup."""

    def __init__(self, stream: torch.cuda.Stream, caller: torch.cuda.Stream) -> None:
        self.stream, self._caller = stream, caller

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_stream(self._caller)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """For exchanges, for a launch that goes before the others, and two for those."""
    return tuple([torch.cuda.Stream(device, priority=priority) for priority in (-2, -1, 0, 0)])
