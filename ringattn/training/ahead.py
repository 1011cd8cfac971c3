"""The next step's work on a thread, at a time when the step under way leaves Python's interpreter free."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from time import monotonic
from types import TracebackType
from typing import Generic, TypeVar

L = TypeVar("L")
R = TypeVar("R")

_LONGEST = 1.0  # seconds of a pause, which a process that ends waits for


class Ahead(Generic[L, R]):
    """Results of two functions, `ready(load())`, one for each step, computed on a thread during the step before; a load of None ends them.

    A step first queues its work, and in the end waits for its GPU, or is ahead of it. Two threads that compute in Python take turns with
    the interpreter, so what computes at the beginning of a step leaves the GPU idle. So the thread loads at once, which is mostly to wait,
    but readies what it has loaded after half of the time that the latest step took, at most a second, or once the result is asked for.
    """

    def __init__(self, load: Callable[[], L | None], ready: Callable[[L], R], name: str) -> None:
        """name: of the thread."""
        self._load, self._ready = load, ready
        self._asked = Event()
        self._began, self._step = monotonic(), 0.0  # when the step under way began, and what the latest one took; seconds
        self._thread = ThreadPoolExecutor(1, name)
        self._following: Future[R | None] = self._thread.submit(self._follow)

    def __enter__(self) -> Ahead[L, R]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._asked.set()
        self._thread.shutdown()

    def result(self) -> R | None:
        """That of the step that begins now; raises what a function raised. It ends the step before."""
        self._step = monotonic() - self._began
        self._asked.set()
        found = self._following.result()
        if found is not None:
            self._asked.clear()
            self._began = monotonic()
            self._following = self._thread.submit(self._follow)
        return found

    def _follow(self) -> R | None:
        loaded = self._load()
        if loaded is None:
            return None
        self._asked.wait(min(max(0.0, self._began + self._step / 2 - monotonic()), _LONGEST))
        return self._ready(loaded)
