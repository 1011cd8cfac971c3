"""The processes of ranks, as other processes of their host see them: they run, are stopped, or have ended."""

from __future__ import annotations

import functools
import os
import socket
from enum import Enum
from pathlib import Path
from typing import NamedTuple

_EXITING = 0x4  # PF_EXITING, among the flags of a process: it frees its memory, which may take seconds


class State(Enum):
    """What a process does. A process of another host is taken for one that runs."""

    RUNS = "runs"
    STOPPED = "is stopped"
    ENDED = "has ended"


class Process(NamedTuple):
    """A process: its host, its number there, and when it started, which tells it from a later process with that number."""

    host: str
    pid: int
    started: int

    @property
    def state(self) -> State:
        if self.host != host():
            return State.RUNS
        status = _status(self.pid)
        if status is None:
            return State.RUNS if _exists(self.pid) else State.ENDED
        if status.started != self.started or status.state in "ZX" or status.flags & _EXITING:
            return State.ENDED
        return State.STOPPED if status.state in "Tt" else State.RUNS


class _Status(NamedTuple):
    state: str
    flags: int
    started: int


def this_process() -> Process:
    status = _status(os.getpid())
    return Process(host(), os.getpid(), 0 if status is None else status.started)


@functools.cache
def host() -> str:
    """A text that is equal for processes that can share memory: one running kernel, and one view of files, processes and network."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.exists() else socket.gethostname()
    spaces = [Path("/proc/self/ns", name) for name in ("mnt", "pid", "net")]
    return " ".join([kernel, *(os.readlink(space) for space in spaces if space.exists())])


def _status(pid: int) -> _Status | None:
    """What the system shows of a process, or None if it shows nothing."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # the second field is the program's name, in parentheses, and may hold anything
    fields = text.rpartition(b")")[2].split()
    return _Status(fields[0].decode(), int(fields[6]), int(fields[19])) if len(fields) > 19 else None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
