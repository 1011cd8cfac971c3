"""Transport over a torch.distributed process group: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .base import Handle, Peer, Transport


class _Works(Handle):
    def __init__(self, works: list[dist.Work], tensors: list[torch.Tensor]) -> None:
        self._works = works
        self._tensors = tensors  # alive until the transfer is done

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors.clear()


class ProcessGroupTransport(Transport):
    """Point-to-point transfers in one batch an exchange; group ranks are translated to global ones."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # weak, so that what is kept for a group goes with it
        self._group = weakref.ref(group)
        self._name = group.group_name
        self._global_ranks = dist.get_process_group_ranks(group)
        # such as {"cpu": "gloo", "cuda": "nccl"}
        self._backends = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
        self._control: Any = None  # a ProcessGroupGloo
        self._connected: set[str] = set()

    def check_device(self, device: torch.device) -> None:
        backend = self._backends.get(device.type)
        if backend is None or (device.type == "cuda" and backend == "gloo"):
            wanted = "nccl" if device.type == "cuda" else "gloo"
            has = ",".join(sorted(set(self._backends.values())))
            raise ValueError(
                f"q is on {device.type}, but the group's backend is {has}: tensors on {device.type} need a {wanted} group"
            )

    def connect(self, device: torch.device) -> None:
        if device.type not in self._connected and self._backends[device.type] == "nccl":
            # NCCL sets up a communicator in a group's first call, in which all ranks must take part; in an exchange some may idle
            dist.all_reduce(torch.zeros(1, device=device), group=self._group())
        self._connected.add(device.type)

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer]) -> Handle:
        group = self._group()
        ops = [dist.P2POp(dist.isend, x, self._global_ranks[rank], group) for rank, x in sends if x.numel()]
        ops += [dist.P2POp(dist.irecv, x, self._global_ranks[rank], group) for rank, x in receives if x.numel()]
        tensors = [peer.tensor for peer in (*sends, *receives)]
        return _Works(dist.batch_isend_irecv(ops) if ops else [], tensors)

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        if self._control is None:
            self._control = self._make_control()
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        work = self._control.allgather([everyone], [mine])
        if patience is not None:
            deadline = time.monotonic() + patience
            while not work.is_completed():
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.002)
        work.wait()
        return [bytes(x.numpy()) for x in everyone]

    def _make_control(self) -> Any:
        # dist.new_group would need the job's other ranks, or that all members have made equally many groups before
        store = dist.distributed_c10d._get_default_store()
        # names come back when a group has been destroyed, keys of the store stay
        generation = store.add(f"ringattn/{self._name}/{self.rank}", 1)
        prefix = dist.distributed_c10d.PrefixStore(f"ringattn/{self._name}/{generation}/", store)
        return dist.ProcessGroupGloo(prefix, self.rank, self.size, timeout=timedelta(minutes=30))
