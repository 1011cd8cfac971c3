"""The ranks of `finetune_long_document.py` on this host: started, ended, and agreed about failures."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.rendezvous import rendezvous

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class CheckpointError(OSError):
    """A checkpoint, or the folder for it, cannot be written or read; the message names the file."""


def start_ranks(function: Callable[..., None], arguments: tuple[Any, ...], count: int, method: str) -> None:
    """Run `function(rank, *arguments)` in `count` processes and wait for them. They end with this process, however it ends."""
    context = mp.start_processes(_run, (os.getpid(), function, arguments), nprocs=count, join=False, start_method=method)
    # until here SIGTERM ends this process at once, and the kernel then ends its ranks
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:
        sys.exit(error.exit_code)
    finally:
        for process in context.processes:
            process.kill()
        for process in context.processes:
            process.join()


def _run(rank: int, parent: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """In a rank's process: the kernel kills it when its parent has ended. Torch would have SIGINT sent, which shells may ignore."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
    # all ranks are on this host: nothing listens on its network
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    function(rank, *arguments)


def join_ranks(backend: str, rank: int, ranks: int, file: str | None) -> None:
    """Set up the process group: ranks of this host meet at a file, torchrun's (`file` is None) where its variables say."""
    if file is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host: no other one needs to reach them
        dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks)
    elif os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun (2.13) keeps its store over --max-restarts, with the addresses of processes that have ended
        store, rank, ranks = next(rendezvous("env://"))
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(backend, store=dist.PrefixStore(f"life-{life}", store), rank=rank, world_size=ranks)
    else:
        # nodes count restarts each for itself: there, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives every start a new store
        dist.init_process_group(backend)


def everyone(device: torch.device, work: Callable[[], Any]) -> list[Any]:
    """What `work()` returns on each rank, as JSON; a collective.

    If `work` raises CheckpointError on any rank, every rank raises the first rank's.
    """
    try:
        own = {"value": work()}
    except CheckpointError as error:
        own = {"error": str(error)}
    replies = [json.loads(text) for text in _gather(json.dumps(own), device)]
    for reply in replies:
        if "error" in reply:
            raise CheckpointError(reply["error"])
    return [reply["value"] for reply in replies]


def _gather(text: str, device: torch.device) -> list[str]:
    """Every rank's text. It travels as bytes: collectives of objects would pickle it."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([len(own)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    sizes = [int(each) for each in lengths]
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes)]
