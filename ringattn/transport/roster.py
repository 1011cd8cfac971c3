"""What is known of the ranks of a group that do not come: who has ended, who is stopped, and who has left because of another.

A rank whose call fails because of another rank soon ends itself. So that the ranks that wait for it learn of the first one, each rank
leaves a note before it raises an error: because of whom. All groups of a process share what they know, because the group in which a
rank waits need not hold the rank that has ended.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from mmap import mmap
from weakref import WeakSet

from .processes import Process, State, host

_GRACE = 1.0  # seconds: connections of a process that ends close before the process is gone
_NOTE = struct.Struct("<I")

_rosters: WeakSet[Roster] = WeakSet()  # of all groups of this process


class Notes:
    """Notes of ranks in memory that they share: 1 + the rank of the job because of which a rank has left, or 0."""

    def __init__(self, memory: mmap, begin: int) -> None:
        self._memory = memory
        self._begin = begin

    @staticmethod
    def nbytes(size: int) -> int:
        return _NOTE.size * size

    def write(self, rank: int, cause: int) -> None:
        _NOTE.pack_into(self._memory, self._begin + _NOTE.size * rank, 1 + cause)

    def read(self, rank: int) -> int | None:
        note = _NOTE.unpack_from(self._memory, self._begin + _NOTE.size * rank)[0]
        return note - 1 if note else None


class Roster:
    """A group's ranks: `members` are their ranks in the job, `processes` those known so far, by rank of the group.

    Errors name ranks of the group, with the rank of the job where that differs. `closed` says whether a rank has closed its connection to
    this one.
    """

    def __init__(self, rank: int, members: Sequence[int], timeout: timedelta, closed: Callable[[int], bool] | None = None) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.timeout = timeout
        self.processes: dict[int, Process] = {}
        self.notes: Notes | None = None
        self._closed = closed
        self._lost: set[int] = set()  # ranks that have closed their connections
        _rosters.add(self)

    def seconds(self, patience: float | None) -> float:
        """How long to wait: never longer than the group's timeout."""
        longest = self.timeout.total_seconds()
        return longest if patience is None else min(patience, longest)

    def check(self, missing: Callable[[], list[int]]) -> None:
        """Raise RuntimeError if a rank has ended, and is still missing."""
        ended = [rank for rank, process in self.processes.items() if process.state is State.ENDED]
        # what an ended rank has sent is there
        ended = [rank for rank in missing() if rank in ended] if ended else []
        if ended:
            raise self._error(ended, f"made this call within {self.timeout}")

    def check_unknown(self, missing: Callable[[], list[int]]) -> None:
        """Raise RuntimeError if a missing rank of which this host knows nothing has closed its connection to this one."""
        lost = self._disconnected(missing())
        self._lost = lost.intersection(missing()) if lost else lost
        if self._lost:
            raise self._error(sorted(self._lost), f"made this call within {self.timeout}")

    def late(self, missing: list[int]) -> RuntimeError:
        """The error for ranks that have not come in time."""
        return self._error(missing, f"made this call within {self.timeout}")

    def failed(self, peers: list[int]) -> RuntimeError:
        """The error for a transfer with these ranks that failed in the middle of a call."""
        self._leave(self.members[peers[0]])
        # a peer on another host may have left because of a third rank: all that are disconnected are named
        gone = self._gone(peers) or sorted({*peers, *self._disconnected(range(len(self.members)))})
        return self._error(gone, "done its part of this call")

    def silent(self, otherwise: str) -> RuntimeError:
        """The error for the job's store. It names rank 0 of the job, which serves most stores, if that has ended or is stopped.

        Another rank may have ended because of the store, or may have served it: the text `otherwise` goes before its name.
        """
        gone = [rank for rank, process in self.processes.items() if process.state is not State.RUNS]
        for rank in gone:
            if self.members[rank] == 0:
                return self._error([rank], f"made this call within {self.timeout}")
        names = self._names([self.members[rank] for rank in gone])
        return RuntimeError(
            f"{otherwise}; {names} {'has' if len(gone) == 1 else 'have'} ended or stopped, too" if gone else otherwise
        )

    def _gone(self, peers: list[int]) -> list[int]:
        """Which of some ranks have ended, are stopped or have left, or else which others. A rank that has ended early owes nobody anything.

        A process that ends closes its connections first, so wait a moment.
        """
        until = time.monotonic() + _GRACE
        while True:
            gone = [rank for rank, process in self.processes.items() if process.state is not State.RUNS]
            found = [rank for rank in peers if rank in gone or self._causes([self.members[rank]]) != [self.members[rank]]]
            if found or time.monotonic() > until:
                return found or gone
            time.sleep(0.01)

    def _disconnected(self, ranks: Iterable[int]) -> set[int]:
        """The ranks among these of which this host knows nothing else, and which have closed their connections to this one."""
        if self._closed is None:
            return set()
        here = host()
        known = {rank for rank, process in self.processes.items() if process.host == here} | {self.rank}
        return {rank for rank in ranks if rank not in known and self._closed(rank)}

    def _error(self, ranks: list[int], what: str) -> RuntimeError:
        """What to say of ranks because of which this rank leaves. The ended ones among them are named alone, then the stopped ones."""
        causes = self._causes([self.members[rank] for rank in ranks])
        known = {other.members[rank]: process for other in list(_rosters) for rank, process in other.processes.items()}
        states = {job: known[job].state if job in known else State.RUNS for job in causes}
        lost = (self.members[rank] for rank in self._lost)
        # what the system shows of a process of this host goes before what its connection suggests
        states |= {job: State.ENDED for job in lost if job not in known or known[job].host != host()}
        for state in (State.ENDED, State.STOPPED, State.RUNS):
            found = [job for job in causes if states[job] is state]
            if found:
                break
        self._leave(found[0])
        names, has = self._names(found), "has" if len(found) == 1 else "have"
        if state is State.ENDED:
            it = "it" if len(found) == 1 else "them"
            return RuntimeError(f"{names} {has} ended, and this rank waits for {it}: look at the output of {names}")
        if state is State.STOPPED:
            numbers = ", ".join(str(known[job].pid) for job in found)
            return RuntimeError(f"{names} {has} not {what}: process {numbers} is stopped: let it go on, or end it")
        # a rank that runs may itself wait for one that is stopped
        stopped = [job for job in self.members if job in known and known[job].state is State.STOPPED]
        if stopped:
            numbers = ", ".join(str(known[job].pid) for job in stopped)
            verb = "is" if len(stopped) == 1 else "are"
            return RuntimeError(
                f"{names} {has} not {what}, and {self._names(stopped)} {verb} stopped (process {numbers}): let it go on, or end it"
            )
        return RuntimeError(f"{names} {has} not {what}: find out where it hangs, and look at its output")

    def _causes(self, jobs: list[int]) -> list[int]:
        """The ranks because of which others among these have left, or these themselves. All are ranks of the job."""
        left = {}
        for other in list(_rosters):
            for rank, job in enumerate(other.members):
                cause = None if other.notes is None or rank == other.rank else other.notes.read(rank)
                if cause is not None and cause != self.members[self.rank]:
                    left[job] = cause
        found = []
        for job in jobs:
            passed = set()
            while job in left and job not in passed:
                passed.add(job)
                job = left[job]
            if job not in found:
                found.append(job)
        return found

    def _leave(self, cause: int) -> None:
        for other in list(_rosters):
            if other.notes is not None:
                other.notes.write(other.rank, cause)

    def _names(self, jobs: list[int]) -> str:
        ranks = {job: rank for rank, job in enumerate(self.members)}
        if all(ranks.get(job) == job for job in jobs):
            return f"rank{'s' if len(jobs) > 1 else ''} {', '.join(map(str, jobs))}"
        return ", ".join(
            f"rank {job} of the job" if job not in ranks else f"rank {ranks[job]} (rank {job} of the job)" for job in jobs
        )
