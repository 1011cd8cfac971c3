"""Records between the processes of some ranks of the job, without waiting for a GPU: through memory on one host, else over gloo."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import shared_records
from .base import Ranks
from .shared_records import SharedRecords

_TIMEOUT = timedelta(minutes=30)


class HostChannel(Ranks):
    """A channel between `size` ranks of the job's default group. The name is theirs alone; the first record sets the channel up."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._name = name
        self._group: Any = None  # a ProcessGroupGloo
        self._shared: SharedRecords | None = None

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        if self._group is None:
            group = self._connect()
            self._shared = self._share(group)
            self._group = group
        if self._shared is not None:
            return self._shared.all_gather(record, patience, _TIMEOUT)
        return self._over_gloo(self._group, record, patience)

    def _over_gloo(self, group: Any, record: bytes, patience: float | None = None) -> list[bytes] | None:
        length = len(record)
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        everyone = bytearray(length * self.size)
        found = torch.frombuffer(everyone, dtype=torch.uint8).split_with_sizes([length] * self.size)
        work = group.allgather([list(found)], [mine])
        if patience is not None:
            deadline = time.monotonic() + patience
            while not work.is_completed():
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.002)
        work.wait()
        return [bytes(everyone[begin : begin + length]) for begin in range(0, len(everyone), length)]

    def _connect(self) -> Any:
        # dist.new_group would need the job's other ranks, or members that have all made the same number of groups before
        store: Any = dist.distributed_c10d._get_default_store()
        # a store serves one call at a time, so a thread that waits in it for this one would wait for ever: use a clone
        store = store.clone() if hasattr(store, "clone") else store  # torch 2.8 has no clone
        # a new group may get the name of a destroyed one, whose keys are still in the store
        generation = store.add(f"ringattn/{self._name}/{self.rank}", 1)
        prefix = dist.distributed_c10d.PrefixStore(f"ringattn/{self._name}/{generation}/", store)
        return dist.ProcessGroupGloo(prefix, self.rank, self.size, timeout=_TIMEOUT)

    def _share(self, group: Any) -> SharedRecords | None:
        """Memory that all ranks map, or None if one of them cannot map it."""
        file, mine = None, b"\0" * shared_records.KEY
        if self.rank == 0:
            with contextlib.suppress(OSError):
                file, mine = shared_records.create(self.size)
        keys = self._over_gloo(group, mine)
        assert keys is not None
        key = keys[0]
        shared = None
        with contextlib.suppress(OSError):
            file = shared_records.find(key, self.size) if file is None else file
            shared = SharedRecords(file, self.rank, self.size)
        verdicts = self._over_gloo(group, b"no " if shared is None else b"yes")
        assert verdicts is not None
        if self.rank == 0 and file is not None:
            shared_records.forget(key)
        return shared if set(verdicts) == {b"yes"} else None
