"""How the doctor's ranks talk to each other when nothing else may work: notices in the job's store, and a watch that ends a hang.

`Board` swaps small records between ranks through the TCP store where they met, without a collective. `Watch` is a thread with its own
connection to the store. It prints a report that names the rank to look at, and ends its process, as soon as a stage takes too long, a
rank fails, or the launcher ends the ranks because one is gone.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_FOREVER = timedelta(days=1)  # the watch ends a wait that is in vain
_TICK = 0.2  # seconds
_LAST_WORDS = 2.0  # seconds in which every rank that still runs leaves its last words


@dataclass(frozen=True)
class Place:
    """How far a rank has come: the number of places it has passed, the name of this one, and the rank's host."""

    count: int
    name: str
    host: str


@dataclass(frozen=True)
class LastWords:
    """What a rank leaves before its watch ends it: how many ranks did so before it, and the error that it raised, if any."""

    order: int
    failure: str | None


class Board:
    """Notices of `size` ranks in a store."""

    def __init__(self, store: Store, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        self.store = store
        self._swaps, self._places = itertools.count(), itertools.count(1)
        self._place = ""

    def swap(self, record: Any) -> list[Any]:
        """Every rank's record, in rank order. A record is anything that JSON can hold. Waits until all ranks have called."""
        number = next(self._swaps)
        keys = [f"swap/{number}/{rank}" for rank in range(self.size)]
        # a rank that reaches the swap has come further than one that hangs before it
        self.at(self._place)
        self.store.set(keys[self.rank], json.dumps(record))
        self.store.wait(keys, _FOREVER)
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def at(self, place: str) -> None:
        """Tell the others how far this rank is."""
        self._place = place
        self.store.set(f"at/{self.rank}", json.dumps(asdict(Place(next(self._places), place, self.host))))


@dataclass(frozen=True)
class End:
    """Why an examination could not be finished, and the ranks to look at."""

    text: str
    ranks: tuple[int, ...]


class Watch(threading.Thread):
    """Calls `report(End)` on one of the ranks that still run, and ends them all with status 1.

    The main thread enters and leaves it. SIGTERM comes as a byte in a pipe, which this thread reads: a handler of Python's would wait for
    the main thread, which may hang.
    """

    def __init__(self, board: Board, patience: float, report: Callable[[End], None]) -> None:
        super().__init__(daemon=True)
        self._board, self._patience, self._report = board, patience, report
        self._deadline = time.monotonic() + patience
        self._over = threading.Event()
        self._failure: str | None = None
        self._pipe = -1, -1
        self._before: tuple[Any, int] = signal.SIG_DFL, -1

    def next_stage(self) -> None:
        """Begin a stage: it may take all of the patience again."""
        self._deadline = time.monotonic() + self._patience

    def __enter__(self) -> Watch:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: None), wakeup
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, SystemExit):
            self._over.set()
            self.join()
            signal.signal(signal.SIGTERM, self._before[0])
            signal.set_wakeup_fd(self._before[1])
            for end in self._pipe:
                os.close(end)
            return
        traceback.print_exception(kind, error, trace)
        self._failure = f"{type(error).__name__}: {error}".splitlines()[0]
        self.join()

    def run(self) -> None:
        store = self._board.store
        while not self._over.is_set():
            killed = self._is_killed()
            try:
                late = time.monotonic() > self._deadline
                if self._failure is not None or killed or late or store.check(["ending"]):
                    self._end()
            except dist.DistError as error:
                print(
                    f"rank {self._board.rank}: lost the job's store, so the host that serves it is gone: {error}", file=sys.stderr
                )
                _exit()

    def _is_killed(self) -> bool:
        """Whether SIGTERM has come, after a wait of at most a tick."""
        ready, _, _ = select.select([self._pipe[0]], [], [], _TICK)
        return bool(ready) and signal.SIGTERM in os.read(self._pipe[0], 1024)

    def _end(self) -> None:
        board = self._board
        store = board.store
        store.set(f"last/{board.rank}", json.dumps(asdict(LastWords(store.add("order", 1), self._failure))))
        store.set("ending", "")
        time.sleep(_LAST_WORDS)
        lasts = {rank: LastWords(**found) for rank, found in self._notices("last").items()}
        if board.rank == min(lasts):
            places = {rank: Place(**found) for rank, found in self._notices("at").items()}
            self._report(blame(board.size, places, lasts, self._patience))
        _exit()

    def _notices(self, kind: str) -> dict[int, dict]:
        """The notices of one kind that ranks have left, by rank."""
        store = self._board.store
        return {rank: json.loads(store.get(key)) for rank in range(self._board.size) if store.check([key := f"{kind}/{rank}"])}


def blame(size: int, places: dict[int, Place], lasts: dict[int, LastWords], patience: float) -> End:
    """The ranks to look at, from each rank's last place, and from the last words of those that could still leave some."""
    absent = [rank for rank in range(size) if rank not in places]
    if absent:
        return End(f"{_ranks(absent)} of {size} never arrived within {patience:.0f} s", tuple(absent))
    hosts = {rank: place.host for rank, place in places.items()}
    silent = [rank for rank in range(size) if rank not in lasts]
    if silent:
        where = ", ".join(sorted({places[rank].name for rank in silent}))
        return End(f"{_ranks(silent, hosts)} ended, or stopped, without a word in: {where}", tuple(silent))
    failed = [rank for rank, last in lasts.items() if last.failure is not None]
    if failed:
        first = min(failed, key=lambda rank: lasts[rank].order)
        return End(f"{_ranks([first], hosts)} failed: {lasts[first].failure}, in: {places[first].name}", (first,))
    least = min(place.count for place in places.values())
    behind = [rank for rank in range(size) if places[rank].count == least]
    place = places[behind[0]].name
    if len(behind) == size:
        return End(f"no rank gets past {place} within {patience:.0f} s: set NCCL_DEBUG=INFO and look at the network", ())
    return End(f"{_ranks(behind, hosts)} did not get past {place} within {patience:.0f} s, as the others did", tuple(behind))


def _ranks(ranks: Sequence[int], hosts: dict[int, str] | None = None) -> str:
    listed = [f"{rank} ({hosts[rank]})" if hosts else str(rank) for rank in ranks]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(listed)}"


def _exit() -> None:
    """End the process without the clean-up, which would wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
