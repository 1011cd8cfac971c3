"""The job's store as a slow channel between the ranks of a group, until all of them have come.

Whatever becomes of the store, a roll call ends: the store's functions may block without a bound, because the process that serves it
may be stopped or gone, so they run in a thread of their own, which is given up if it does not come back.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from .roster import Roster

T = TypeVar("T")

_TCP: Any = dist.TCPStore
_SHORTEST, _LONGEST = 0.001, 0.05  # seconds between looks into the store
_CHECK_EVERY = 0.25  # seconds between checks of who has come, and who has ended
_CHECK_UNKNOWN_EVERY = 1.0  # seconds between checks of ranks that have not come yet
_ANSWER = 3.0  # seconds that a store gets to answer after the time is up


class RollCall:
    """Gathers values of the ranks of a roster, who give it the same name and call its methods in the same order."""

    def __init__(self, name: str, roster: Roster) -> None:
        self._name = name
        self._roster = roster
        self._number = 0
        self._store: Any = None

    @property
    def store(self) -> Any:
        """A store of these ranks alone; it exists once a value was gathered."""
        assert self._store is not None
        return self._store

    def close(self) -> None:
        """Let go of the store's connection."""
        self._store = None

    def gather(self, value: bytes, until: float, come: Callable[[int, bytes], None] | None = None) -> dict[int, bytes]:
        """The values of the ranks that have come before the time `until`. `come` is called with each value as soon as it is there.

        Raises RuntimeError if a rank has ended before it came, and if the store is lost or does not answer.
        """
        number, self._number = self._number, self._number + 1
        given_up = threading.Event()
        future = in_thread(lambda: self._gather(number, value, until, come, given_up))
        try:
            done = wait([future], max(0.0, until - time.monotonic()) + _ANSWER).done
        finally:
            given_up.set()
        if not done:
            raise self._no_answer()
        return future.result()

    def _gather(
        self, number: int, value: bytes, until: float, come: Callable[[int, bytes], None] | None, given_up: threading.Event
    ) -> dict[int, bytes]:
        size, found = len(self._roster.members), {}

        def missing() -> list[int]:
            return [rank for rank in range(size) if rank not in found]

        def look(each: bool) -> None:
            """Fetch what has come: of all ranks if all have come, else, with `each`, of those that have."""
            keys = {rank: f"{number}/{rank}" for rank in missing()}
            everyone = self._store.check(list(keys.values()))
            for rank, key in keys.items() if everyone or each else ():
                if everyone or self._store.check([key]):
                    found[rank] = self._store.get(key)
                    if come is not None:
                        come(rank, found[rank])

        self._reach(lambda: self._send(f"{number}/{self._roster.rank}", value, until))
        pause, check_at, check_unknown_at = _SHORTEST, 0.0, time.monotonic() + _CHECK_UNKNOWN_EVERY

        def still_missing() -> list[int]:
            self._reach(lambda: look(True))
            return missing()

        while missing():
            now = time.monotonic()
            each = now >= min(check_at, until)
            self._reach(lambda each=each: look(each))
            if each and missing():
                self._roster.check(still_missing)
                check_at = now + _CHECK_EVERY
                if now > check_unknown_at:
                    self._roster.check_unknown(still_missing)
                    check_unknown_at = now + _CHECK_UNKNOWN_EVERY
            if now >= until or given_up.wait(pause):
                break
            pause = min(1.5 * pause, _LONGEST)
        return found

    def _send(self, key: str, value: bytes, until: float) -> None:
        if self._store is None:
            job: Any = dist.distributed_c10d._get_default_store()
            # a new group may get the name of a destroyed one, whose keys are still in the store
            generation = f"ringattn/{self._name}/generation/{job.add(f'ringattn/{self._name}/{self._roster.rank}', 1)}"
            root: Any = job
            while isinstance(root, dist.distributed_c10d.PrefixStore):
                root = root.underlying_store
            if isinstance(root, _TCP):
                # the first rank to come draws the prefix of the group's keys: that of the job's, if any, cannot be read
                generation = f"ringattn/{job.compare_set(generation, '', uuid.uuid4().hex).decode()}"
                job = _connect(root.host, root.port, until)
            elif hasattr(job, "clone"):  # torch 2.8 has none
                job = job.clone()
            self._store = dist.distributed_c10d.PrefixStore(generation, job)
        self._store.set(key, value)  # pyrefly: ignore[bad-argument-type]

    def _reach(self, use: Callable[[], None]) -> None:
        """Use the store. Raises RuntimeError if it is lost or cannot be connected to."""
        try:
            use()
        except _Unreachable as error:
            raise self._no_answer() from error
        except RuntimeError as error:
            raise self._roster.silent(
                "the job's store is lost: look at the output of the process that serves it, rank 0 of the job, unless a launcher serves it"
            ) from error

    def _no_answer(self) -> RuntimeError:
        return self._roster.silent(
            "the job's store does not answer: look at the process that serves it, rank 0 of the job, unless a launcher serves it"
        )


class _Unreachable(RuntimeError):
    """The store took no connection in time."""


def _connect(host: str, port: int, until: float) -> Any:
    """A connection of one's own to a store, which serves one call at a time: the job's other threads use the job's connection.

    A store's `clone` would try for five minutes to connect, whatever the store's timeout. Torch tries twice, for as long each time.
    """
    left = timedelta(seconds=max(0.1, (until - time.monotonic()) / 2))
    try:
        return _TCP(host, port, is_master=False, wait_for_workers=False, timeout=left)
    except RuntimeError as error:
        raise _Unreachable(str(error)) from error


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Do work in a thread that the process does not wait for when it ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
