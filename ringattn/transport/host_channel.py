"""Records between the processes of some ranks of the job, without waiting for a GPU: through memory on one host, else over gloo."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from datetime import timedelta
from io import FileIO
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import shared_records
from .base import Ranks
from .processes import Process, this_process
from .roll_call import RollCall, in_thread
from .roster import Roster
from .shared_records import SharedRecords

_CHECK_EVERY = 0.25  # seconds between checks that the ranks to connect to are alive
_LAST_WORDS = 2.0  # seconds in which the ranks that are left after a failure tell each other


class _First(NamedTuple):
    """What a rank sends through the store: whether it waits for all ranks, its process, the key of its shared file, and its record."""

    waits: bool
    process: Process
    key: str
    record: bytes

    def packed(self) -> bytes:
        return json.dumps(self[:3]).encode() + b"\n" + self.record

    @classmethod
    def unpack(cls, value: bytes) -> _First:
        waits, process, key = json.loads(value[: value.index(b"\n")])
        return cls(waits, Process(*process), key, value[value.index(b"\n") + 1 :])


class HostChannel(Ranks):
    """A channel between some ranks of the job's default group, `members`. The name is theirs alone.

    Records go through the job's store up to the first one for which all ranks wait; then the ranks connect. So a rank that refuses its
    input before others have come leaves its record for them. No wait is longer than `timeout`. `closed` says whether a rank has closed its
    connection to this one, if that is known.
    """

    def __init__(
        self, name: str, rank: int, members: Sequence[int], timeout: timedelta, closed: Callable[[int], bool] | None = None
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self.roster = Roster(rank, members, timeout, closed)
        self._roll = RollCall(name, self.roster)
        self._group: Any = None  # a ProcessGroupGloo
        self._shared: SharedRecords | None = None
        self._failure: str | None = None  # why the ranks are not connected

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        if self._shared is not None:
            return self._shared.all_gather(record, patience)
        if self._group is not None:
            return self._over_gloo(self._group, record, patience)
        if self._failure is not None:
            raise RuntimeError(f"this group was not set up, and cannot be used: {self._failure}")
        self._failure = "its first call was interrupted"
        try:
            records = self._through_store(record, patience)
        except RuntimeError as error:
            self._failure = str(error)
            self._roll.close()
            self.roster.notes = None  # which keep the memory
            raise
        self._failure = None
        return records

    def posting(self, quick: Any = None) -> Callable[[bytes], Callable[[], list[bytes]]]:
        return super().posting(quick) if self._shared is None else self._shared.posting(quick)

    def connect_ranks(self) -> None:
        """Connect the ranks, who call this together, if they are not connected: only then do they learn of each other's end."""
        if self._shared is None and self._group is None:
            self.all_gather_control(b"connect")

    def _through_store(self, record: bytes, patience: float | None) -> list[bytes] | None:
        with contextlib.ExitStack() as stack:
            file, key = None, ""
            if self.rank == 0:
                with contextlib.suppress(OSError):
                    file, key = shared_records.create(self.size)
                    stack.enter_context(file)
            first: dict[int, _First] = {}

            def come(rank: int, value: bytes) -> None:
                first[rank] = _First.unpack(value)
                self.roster.processes[rank] = first[rank].process

            mine = _First(patience is None, this_process(), key, record)
            self._roll.gather(mine.packed(), time.monotonic() + self.roster.seconds(patience), come)
            missing = [rank for rank in range(self.size) if rank not in first]
            if missing and patience is not None:
                return None
            if missing:
                raise self.roster.late(missing)
            for rank, other in first.items():
                if len(other.record) != len(record):
                    raise RuntimeError(shared_records.different(rank, len(other.record), len(record)))
            if all(other.waits for other in first.values()):
                self._connect(file, first[0].key)
            return [first[rank].record for rank in range(self.size)]

    def _connect(self, file: FileIO | None, key: str) -> None:
        until = time.monotonic() + self.roster.seconds(None)
        hosts = {process.host for process in self.roster.processes.values()}
        if len(hosts) == 1 and key:
            shared = self._map(file, key)
            verdicts = self._roll.gather(b"no" if shared is None else b"yes", until)
            if len(verdicts) < self.size:
                raise self.roster.late([rank for rank in range(self.size) if rank not in verdicts])
            if set(verdicts.values()) == {b"yes"}:
                self._shared = shared
                self._roll.close()
                return
            self.roster.notes = None
        # dist.new_group would need the job's other ranks, or members that have all made the same number of groups before
        store = dist.distributed_c10d.PrefixStore("gloo", self._roll.store)
        future = in_thread(lambda: dist.ProcessGroupGloo(store, self.rank, self.size, timeout=self.roster.timeout))
        while not wait([future], _CHECK_EVERY).done:
            self.roster.check(self._others)
            self.roster.check_unknown(self._others)
            if time.monotonic() > until:
                raise self.roster.late(self._others())
        try:
            self._group = future.result()
        except RuntimeError as error:
            raise self.roster.failed(self._others()) from error
        # a rank that ended now would break the connections that others still make
        connected = self._roll.gather(b"", until)
        if len(connected) < self.size:
            raise self.roster.late([rank for rank in range(self.size) if rank not in connected])

    def _map(self, own: FileIO | None, key: str) -> SharedRecords | None:
        """The memory of a file that all ranks map, or None if this rank cannot. Rank 0 keeps its `own` open for the others."""
        with contextlib.suppress(OSError):
            if own is not None:
                return SharedRecords(own, self.rank, self.roster)
            with shared_records.find(key, self.size) as file:
                return SharedRecords(file, self.rank, self.roster)

    def _over_gloo(self, group: Any, record: bytes, patience: float | None) -> list[bytes] | None:
        length = len(record)
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        everyone = bytearray(length * self.size)
        found = torch.frombuffer(everyone, dtype=torch.uint8).split_with_sizes([length] * self.size)
        try:
            work = group.allgather([list(found)], [mine])
            if patience is not None:
                deadline = time.monotonic() + patience
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        return None
                    time.sleep(0.002)
            work.wait()
        except RuntimeError as error:
            raise self.roster.failed(self._silent()) from error
        return [bytes(everyone[begin : begin + length]) for begin in range(0, len(everyone), length)]

    def _silent(self) -> list[int]:
        """The other ranks that do not answer after a failure that all ranks notice, or all others if each answers."""
        with contextlib.suppress(RuntimeError):
            here = self._roll.gather(b"", time.monotonic() + _LAST_WORDS)
            return [rank for rank in self._others() if rank not in here] or self._others()
        return self._others()

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]
