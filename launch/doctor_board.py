"""How the doctor's ranks hear of each other, whatever else works: notices in the job's store, and a watch that ends what hangs.

`Board` swaps small records between ranks through the TCP store that they met at, without a collective. `Watch` is a thread with a
connection of its own. It ends its process, after a report that names the rank to look at, once a stage has taken too long,
a rank has failed, or the launcher ends the ranks because one is gone.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_FOREVER = timedelta(days=1)  # the watch ends what waits in vain
_TICK = 0.2  # seconds
_LAST_WORDS = 2.0  # seconds in which all ranks that can still say something do


class Board:
    """Notices of `size` ranks in a store."""

    def __init__(self, store: dist.Store, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        self.store = store
        self._swaps, self._places = itertools.count(), itertools.count(1)
        self._place = ""

    def swap(self, record: Any) -> list[Any]:
        """Every rank's record, in rank order; of anything that JSON can hold. Waits until all have called."""
        number = next(self._swaps)
        keys = [f"swap/{number}/{rank}" for rank in range(self.size)]
        # further than a rank that hangs there
        self.at(self._place)
        self.store.set(keys[self.rank], json.dumps(record))
        self.store.wait(keys, _FOREVER)
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def at(self, place: str) -> None:
        """Tell the others how far this rank is."""
        self._place = place
        self.store.set(f"at/{self.rank}", json.dumps([next(self._places), place, self.host]))


@dataclass(frozen=True)
class End:
    """Why an examination could not be finished, and the ranks that are to blame."""

    text: str
    ranks: tuple[int, ...]


class Watch(threading.Thread):
    """Calls `report(End)` on one of the ranks that are still there, and ends them all with status 1.

    SIGTERM must be blocked in all threads, as it is waited for here.
    """

    def __init__(self, board: Board, patience: float, report: Callable[[End], None]) -> None:
        super().__init__(daemon=True)
        self._board, self._patience, self._report = board, patience, report
        self._deadline = time.monotonic() + patience
        self._over = threading.Event()
        self._failure: str | None = None

    def next_stage(self) -> None:
        """Allow all of the patience again."""
        self._deadline = time.monotonic() + self._patience

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, SystemExit):
            self._over.set()
            self.join()
            return
        traceback.print_exception(kind, error, trace)
        self._failure = f"{type(error).__name__}: {error}".splitlines()[0]
        self.join()

    def run(self) -> None:
        store = self._board.store
        while not self._over.is_set():
            killed = signal.sigtimedwait([signal.SIGTERM], _TICK)
            try:
                if self._failure is not None:
                    self._end(f"failed: {self._failure}")
                elif killed:
                    self._end("killed")
                elif time.monotonic() > self._deadline:
                    self._end("late")
                elif store.check(["ending"]):
                    self._end("heard")
            except dist.DistError as error:
                print(f"rank {self._board.rank}: the store of the job is gone, and with it its host: {error}", file=sys.stderr)
                _exit()

    def _end(self, how: str) -> None:
        board = self._board
        store = board.store
        store.set(f"last/{board.rank}", json.dumps([store.add("order", 1), how]))
        store.set("ending", "")
        time.sleep(_LAST_WORDS)
        lasts = {rank: json.loads(store.get(key)) for rank in range(board.size) if store.check([key := f"last/{rank}"])}
        if board.rank == min(lasts):
            places = {rank: json.loads(store.get(key)) for rank in range(board.size) if store.check([key := f"at/{rank}"])}
            self._report(blame(board.size, places, lasts, self._patience))
        _exit()


def blame(size: int, places: dict[int, list], lasts: dict[int, list], patience: float) -> End:
    """Who is to blame, from where each rank was last, (count, place, host), and its last words, (order, how), if it came to say any."""
    absent = [rank for rank in range(size) if rank not in places]
    if absent:
        return End(f"{_ranks(absent)} of {size} never arrived within {patience:.0f} s", tuple(absent))
    hosts = {rank: host for rank, (_, _, host) in places.items()}
    silent = [rank for rank in range(size) if rank not in lasts]
    if silent:
        where = ", ".join(sorted({places[rank][1] for rank in silent}))
        return End(f"{_ranks(silent, hosts)} ended, or stopped, without a word in: {where}", tuple(silent))
    failures = {order: (rank, how) for rank, (order, how) in lasts.items() if how.startswith("failed")}
    if failures:
        rank, how = failures[min(failures)]
        return End(f"{_ranks([rank], hosts)} {how}, in: {places[rank][1]}", (rank,))
    least = min(count for count, _, _ in places.values())
    behind = [rank for rank in range(size) if places[rank][0] == least]
    place = places[behind[0]][1]
    if len(behind) == size:
        return End(f"no rank gets past {place} within {patience:.0f} s: set NCCL_DEBUG=INFO and look at the network", ())
    return End(f"{_ranks(behind, hosts)} did not get past {place} within {patience:.0f} s, as the others did", tuple(behind))


def _ranks(ranks: Sequence[int], hosts: dict[int, str] | None = None) -> str:
    listed = [f"{rank} ({hosts[rank]})" if hosts else str(rank) for rank in ranks]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(listed)}"


def _exit() -> None:
    """Without the clean-up that would wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
