"""A transport over a torch.distributed process group: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack, to_dlpack

from .base import Done, Handle, Peer, Transport
from .host_channel import HostChannel
from .roster import Roster
from .torch_groups import closed_by, timeout_of


class _Works(Handle):
    """Works of a process group, and the tensors that they use.

    NCCL's stream begins a transfer after the current stream's earlier operations, and `wait` lets the current stream go on after the
    transfer: memory freed from then on is reused only after it. Until then `outstanding` keeps this handle, and so sources and targets,
    alive even if the caller drops it, so that nothing else is allocated there while NCCL reads and writes.
    """

    def __init__(self, works: list[dist.Work], peers: list[Peer], roster: Roster, outstanding: set[Handle]) -> None:
        self._works = works
        self._peers = peers
        self._roster = roster
        self._outstanding = outstanding
        outstanding.add(self)

    def wait(self) -> None:
        done = 0
        try:
            for work in self._works:
                work.wait()
                done += 1
        except RuntimeError as error:
            # gloo has a work for each peer, NCCL one for all of them
            peers = self._peers[done : done + 1] if len(self._works) == len(self._peers) else self._peers
            raise self._roster.failed(sorted({peer.rank for peer in peers})) from error
        self._outstanding.discard(self)
        self._peers.clear()


class ProcessGroupTransport(Transport):
    """Point-to-point transfers, one batch per exchange; it translates group ranks to global ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # weak, so that the group can be freed: this transport is kept with it
        self._group = weakref.ref(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        # such as {"cpu": "gloo", "cuda": "nccl"}
        self._backends = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
        self._channel = HostChannel(group.group_name, self.rank, self._global_ranks, timeout_of(group), closed_by(group))
        self._connected: set[str] = set()
        self._outstanding: set[Handle] = set()

    @property
    def ranks_per_node(self) -> int | None:
        return _ranks_per_node(self._global_ranks)

    def check_device(self, device: torch.device) -> None:
        backend = self._backends.get(device.type)
        if backend is None or (device.type == "cuda" and backend == "gloo"):
            wanted = "nccl" if device.type == "cuda" else "gloo"
            has = ",".join(sorted(set(self._backends.values())))
            raise ValueError(
                f"q is on {device.type}, but the group's backend is {has}: tensors on {device.type} need a group of {wanted}"
            )

    def connect(self, device: torch.device) -> None:
        self._channel.connect_ranks()
        if device.type not in self._connected and self._backends[device.type] == "nccl":
            # NCCL sets up a communicator in a group's first call, and all ranks must take part: some may idle in an exchange
            dist.all_reduce(torch.zeros(1, device=device), group=self._group())
        self._connected.add(device.type)

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        group, peers = self._group(), [peer for peer in (*sends, *receives) if peer.tensor.numel()]
        ops = [dist.P2POp(dist.isend, _lent(x), self._global_ranks[rank], group) for rank, x in sends if x.numel()]
        ops += [dist.P2POp(dist.irecv, _lent(x), self._global_ranks[rank], group) for rank, x in receives if x.numel()]
        if not ops:
            return Done()
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._channel.roster.failed(sorted({peer.rank for peer in peers})) from error
        return _Works(works, peers, self._channel.roster, self._outstanding)

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        return self._channel.all_gather_control(record, patience)

    def posting(self, quick: Any = None) -> Callable[[bytes], Callable[[], list[bytes]]]:
        return self._channel.posting(quick)


def _lent(x: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor that torch's allocator does not know.

    With any setting, torch marks tensors of NCCL's sends and receives as used by NCCL's stream (`record_stream`). The allocator then
    reuses freed memory only once the GPU has reached that point, so a host far ahead would take more and more memory. `_Works`
    keeps the memory safe without that. Only the native allocator ignores addresses that it did not give out; others may refuse them.
    """
    return from_dlpack(to_dlpack(x)) if x.is_cuda and torch.cuda.get_allocator_backend() == "native" else x


def _ranks_per_node(global_ranks: list[int]) -> int | None:
    """Ranks on each node, from the launcher's LOCAL_WORLD_SIZE (consecutive ranks); without it all are on one node.

    None if the group's nodes hold different numbers of ranks, or ranks that are not consecutive. Raises ValueError if the variable is no
    number of ranks.
    """
    size = os.environ.get("LOCAL_WORLD_SIZE")
    if size is None:
        return len(global_ranks)
    if not (size.isascii() and size.isdigit()) or int(size) == 0:
        raise ValueError(
            f"LOCAL_WORLD_SIZE is {size!r} in the environment, but must be the number of ranks on each node: set it as the launcher does, "
            "or unset it"
        )
    nodes = [rank // int(size) for rank in global_ranks]
    count = nodes.count(nodes[0])
    node_by_node = all(len(set(nodes[i : i + count])) == 1 for i in range(0, len(nodes), count))
    return count if node_by_node and len(nodes) == count * len(set(nodes)) else None
