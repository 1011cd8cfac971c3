"""`SymmetricTransport`, for GPUs of one host that reach each other's memory, and `AutomaticTransport`, which uses it where it can."""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .base import Handle, Peer, Ranks, Transport
from .cuda_memory import CudaMemory, load_driver, unmap_kept
from .mailbox import Mailbox
from .meeting import Meeting
from .process_group import ProcessGroupTransport
from .processes import host
from .staged import StagedTransport

DEFAULT_BUDGET = 256 << 20  # bytes
SHARES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # "1": ranks may share a GPU
_LEAST = 64 << 10  # bytes of an arena for each other rank

_log = logging.getLogger(__name__)


class SymmetricTransport(StagedTransport):
    """Copy engines move messages through memory that all ranks map, so that kernels have all multiprocessors; NCCL is not used.

    From the first call on, and as long as the transport lives, each rank keeps one arena of `budget` bytes on its GPU, divided equally
    among the other ranks. Messages larger than that go in pieces. Small rows that all ranks gather go by a `Mailbox`. All ranks must be
    on one host, each on its own GPU unless torch is told to let them share one, and the GPUs must reach each other's memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        budget: int = DEFAULT_BUDGET,
        control: Ranks | None = None,
    ) -> None:
        super().__init__(ProcessGroupTransport(group) if control is None else control)
        least = _LEAST * max(1, self.size - 1)
        if budget < least:
            raise ValueError(f"budget is {budget} bytes, but {self.size} ranks need at least {least}: 64 KiB for each other rank")
        self.budget = budget
        self._device: torch.device | None = None
        self._mailbox: list[Mailbox] | None = None  # one or none; None before the first call that asks for it

    @property
    def copy_engines(self) -> bool:
        return True

    def check_device(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"q is on {device.type}, but the symmetric transport moves tensors between GPUs: use process_group() for these"
            )

    def connect(self, device: torch.device) -> None:
        if self._device is None:
            reason = self.open(device)
            if reason is not None:
                raise ValueError(f"the symmetric transport cannot be used: {reason}; use process_group() instead")
        if self._device != device:
            raise ValueError(f"q is on {device}, but this transport's memory is on {self._device}: use one GPU a rank")

    def open(self, device: torch.device) -> str | None:
        """Make the arenas. Returns None, or why that is impossible, the same on every rank; all ranks call it together."""
        if self.size > 1:
            if torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "the symmetric transport cannot map memory while a CUDA graph is captured: make the same call once before"
                )
            meeting = Meeting(self)
            reason = obstacle(meeting.swap({**_facts(device), "budget": self.budget}))
            if reason is not None:
                return reason
            made: list[CudaMemory] = []
            reason = meeting.take(
                {
                    "could not allocate its memory": lambda: made.append(self._allocate(device)),
                    "could not map the other ranks' memory": lambda: made[0].meet(meeting),
                }
            )
            if reason is not None:
                return reason
            self._use(made[0])
        self._device = device
        return None

    def _allocate(self, device: torch.device) -> CudaMemory:
        return CudaMemory(self.rank, self.size, device, self.budget // (self.size - 1) // 512 * 512)

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        unmap_kept()
        # the driver's functions use the thread's current device
        with torch.cuda.device(self._device):
            return super().exchange(sends, receives, at_rest=at_rest)

    def all_gather(self, rows: torch.Tensor) -> None:
        mailbox = self._open_mailbox()
        if mailbox is not None and mailbox.takes(rows):
            with torch.cuda.device(self._device):
                mailbox.all_gather(rows)
        else:
            super().all_gather(rows)

    def _open_mailbox(self) -> Mailbox | None:
        """Made by the first call, which all ranks make together; None during a capture before it, and where that failed on some rank."""
        if self._mailbox is None and not torch.cuda.is_current_stream_capturing():
            device, made = self._device, list[Mailbox]()
            assert device is not None
            meeting = Meeting(self)
            reason = meeting.take(
                {
                    "could not allocate memory for small tensors": lambda: made.append(Mailbox(self.rank, self.size, device)),
                    "could not map the other ranks' memory for small tensors": lambda: made[0].meet(meeting),
                }
            )
            if reason is not None:
                _log.info("ringattn gathers small tensors by copy engines: %s", reason)
            self._mailbox = made[:1] if reason is None else []
        return self._mailbox[0] if self._mailbox else None


class AutomaticTransport(Transport):
    """NCCL, or the symmetric transport if the first call with tensors on GPUs finds that the ranks can use it; it logs the choice once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._process_group = ProcessGroupTransport(group)
        self._group = weakref.ref(group)
        self._gpu: Transport | None = None
        self.rank = self._process_group.rank
        self.size = self._process_group.size

    @property
    def ranks_per_node(self) -> int | None:
        return self._process_group.ranks_per_node

    @property
    def copy_engines(self) -> bool:
        return self._gpu is not None and self._gpu.copy_engines

    @property
    def recorded_with(self) -> tuple | None:
        return None if self._gpu is None else self._gpu.recorded_with

    def check_device(self, device: torch.device) -> None:
        self._process_group.check_device(device)

    def connect(self, device: torch.device) -> None:
        if device.type == "cuda" and self._gpu is None:
            self._gpu = self._choose(device)
        self._of(device).connect(device)

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        tensor = next((peer.tensor for peer in (*sends, *receives)), None)
        transport = self._process_group if tensor is None else self._of(tensor.device)
        return transport.exchange(sends, receives, at_rest=at_rest)

    def all_gather(self, rows: torch.Tensor) -> None:
        self._of(rows.device).all_gather(rows)

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        return self._process_group.all_gather_control(record, patience)

    def posting(self, quick: Any = None) -> Callable[[bytes], Callable[[], list[bytes]]]:
        return self._process_group.posting(quick)

    def _of(self, device: torch.device) -> Transport:
        return self._gpu if device.type == "cuda" and self._gpu is not None else self._process_group

    def _choose(self, device: torch.device) -> Transport:
        group = self._group()
        assert group is not None
        symmetric = SymmetricTransport(group, control=self._process_group)
        reason = symmetric.open(device)
        if self.rank == 0:
            chosen = f"NCCL: {reason}"
            if reason is None:
                size = symmetric.budget >> 20
                chosen = f"copy engines ({size} MiB each): all {self.size} ranks are on one host and reach each other's memory"
            _log.info("ringattn moves tensors by %s", chosen)
        return symmetric if reason is None else self._process_group


def obstacle(records: Sequence[dict]) -> str | None:
    """Why ranks with these facts cannot share memory, or None if they can."""
    budgets = [record["budget"] for record in records]
    if len(set(budgets)) > 1:
        return f"ranks have different budgets, {budgets} bytes: pass the same on every rank"
    for rank, record in enumerate(records):
        if record["host"] != records[0]["host"]:
            return (
                f"rank {rank} is on host {record['name']} and rank 0 on {records[0]['name']}, or in containers that are kept apart"
            )
        if not record["driver"]:
            return f"the driver of rank {rank} has no batched copies: it is older than CUDA 12.8"
        twin = next((other for other in range(rank) if records[other]["gpu"] == record["gpu"]), None)
        if twin is not None and not (record["shares"] and records[twin]["shares"]):
            return f"ranks {twin} and {rank} share a GPU, which only {SHARES}=1 on every rank allows"
    for rank, record in enumerate(records):
        for peer, other in enumerate(records):
            if other["gpu"] not in record["visible"]:
                return f"rank {rank} does not see rank {peer}'s GPU (CUDA_VISIBLE_DEVICES leaves it out)"
            if other["gpu"] not in (record["gpu"], *record["reached"]):
                return f"rank {rank}'s GPU does not reach rank {peer}'s memory"
    return None


def _facts(device: torch.device) -> dict:
    """What `obstacle` needs to know about this rank."""
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    gpus = [str(torch.cuda.get_device_properties(other).uuid)[:18] for other in range(count)]
    reached = [gpus[other] for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)]
    return {
        "host": host(),
        "name": socket.gethostname(),
        "driver": load_driver() is not None,
        "gpu": gpus[index],
        "shares": os.environ.get(SHARES) == "1",
        "visible": gpus,
        "reached": reached,
    }
