"""Records between the hosts of some ranks of the job, over a gloo connection of their own, which waits for no GPU."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .base import Ranks


class HostChannel(Ranks):
    """`size` ranks of the job's default group under a name that they share and no other ranks use; set up by the first record."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._name = name
        self._group: Any = None  # a ProcessGroupGloo

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        if self._group is None:
            self._group = self._connect()
        length = len(record)
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        everyone = bytearray(length * self.size)
        found = torch.frombuffer(everyone, dtype=torch.uint8).split_with_sizes([length] * self.size)
        work = self._group.allgather([list(found)], [mine])
        if patience is not None:
            deadline = time.monotonic() + patience
            while not work.is_completed():
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.002)
        work.wait()
        return [bytes(everyone[begin : begin + length]) for begin in range(0, len(everyone), length)]

    def _connect(self) -> Any:
        # dist.new_group would need the job's other ranks, or that all members have made equally many groups before
        store: Any = dist.distributed_c10d._get_default_store()
        # a store answers one call at a time: another thread that waits in it for this one would wait for ever
        store = store.clone() if hasattr(store, "clone") else store  # torch 2.8
        # names come back when a group has been destroyed, keys of the store stay
        generation = store.add(f"ringattn/{self._name}/{self.rank}", 1)
        prefix = dist.distributed_c10d.PrefixStore(f"ringattn/{self._name}/{generation}/", store)
        return dist.ProcessGroupGloo(prefix, self.rank, self.size, timeout=timedelta(minutes=30))
