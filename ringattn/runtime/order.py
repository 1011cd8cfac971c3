"""The order of a group's calls: what tells two calls of equal facts apart, and that only one thread calls at a time.

Ranks that make equal calls in different orders would mix up the calls' keys and values, and no shape would show it. So every call of
a group has a number, which its backward pass carries too, and a label: the name that the caller gives it, or else the line that calls.
"""

from __future__ import annotations

import hashlib
import os
import sys
from functools import lru_cache
from pathlib import Path
from threading import RLock
from types import FrameType, TracebackType
from typing import NamedTuple

_PACKAGE = __name__.split(".", 1)[0]
_FOLDER = str(Path(__file__).parents[1]) + os.sep
_REMEMBERED = 1024  # labels of the latest calls, for messages about their backward passes


class Label(NamedTuple):
    """What a call is known by on all ranks. Only labels of the same `kind` are compared: 0 (unknown), 1 (a line) or 2 (a name)."""

    kind: int
    digest: bytes
    text: str


UNKNOWN = Label(0, bytes(8), "")
FACTS = {1: "line that calls", 2: "name"}


def label(name: str | None = None) -> Label:
    """The label of a call with this name; without one, that of the innermost line outside of ringattn that is running."""
    if name is not None:
        return _named(name)
    return line_from(sys._getframe(1))[0]


def line_from(frame: FrameType | None) -> tuple[Label, FrameType | None]:
    """The label of the innermost line outside of ringattn, from that of a frame on, and its frame."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        # a call that torch.compile leaves alone comes from the compiler's wrapper
        if module != _PACKAGE and not module.startswith((_PACKAGE + ".", "torch._dynamo.")):
            return _line(frame.f_code.co_filename, frame.f_lineno), frame
        frame = frame.f_back
    return UNKNOWN, None


def traced_label(name: str | None) -> Label:
    """The same while torch.compile traces: the line is that of the code which it traces."""
    from torch._guards import TracingContext  # loaded by now, and slow to import

    if name is not None:
        return _named(name)
    lines = TracingContext.extract_stack() if TracingContext.try_get() is not None else []
    outside = [line for line in lines if not line.filename.startswith(_FOLDER) and line.lineno is not None]
    return _line(outside[-1].filename, outside[-1].lineno) if outside else UNKNOWN


@lru_cache(4096)
def _named(name: str) -> Label:
    return Label(2, _digest(name), repr(name))


@lru_cache(4096)
def _line(path: str, number: int) -> Label:
    # folders differ between hosts, and names of generated code between processes
    file = path.replace("\\", "/").rsplit("/", 1)[-1]
    text = f"{'generated code' if file.startswith('<') else file}:{number}"
    return Label(1, _digest(text), text)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


class CallOrder:
    """The calls of one group on this rank. `with order:` around a call keeps other threads out meanwhile; it may be nested."""

    def __init__(self) -> None:
        self.latest = 0  # the number of the latest call
        self._numbers, self._labels = [0] * _REMEMBERED, [UNKNOWN] * _REMEMBERED
        self._lock = RLock()
        self.two_threads = False  # whether two threads have ever called at once

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            # the other thread's call goes on: a record of this one now would be taken for its own
            self.two_threads = True
            self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    def check(self) -> None:
        """Raise ValueError if two threads have ever called at once."""
        if self.two_threads:
            raise ValueError(
                "two threads called with this group at once, so other ranks may have paired their calls differently, and results may be "
                "wrong: let one thread make all calls with a group, or give each thread a group of its own; this group refuses further "
                "calls"
            )

    def add(self, number: int, label: Label) -> None:
        """The ranks have agreed on a call, and on its number."""
        self.latest = number
        self._numbers[number % _REMEMBERED] = number
        self._labels[number % _REMEMBERED] = label

    def describe(self, number: int) -> str:
        """A call as messages name it: its number, and its label if it is known."""
        kept, label = self._numbers[number % _REMEMBERED], self._labels[number % _REMEMBERED]
        return f"call {number}" + (f" ({label.text})" if label.text and kept == number else "")
