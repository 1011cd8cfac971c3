"""The ranks of a benchmark: starts one process per GPU, forms groups of them, and reduces what they measured to the slowest rank's.

More ranks than GPUs share them. They show that a benchmark runs, and what calls cost the host; other times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ringattn as ra
from ringattn.sharing import shared_gpu
from ringattn.transport import Transport


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """The arguments of every benchmark of many ranks that say what a rank is."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--world-size", type=int, help="ranks (default: one per GPU; 2 on a CPU)")
    parser.add_argument(
        "--budget", type=int, help="MiB of each rank's memory for the symmetric transport (default: the library's default)"
    )


def start_ranks(function: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> None:
    """Call a function on every rank: in the processes that torchrun started, else in one new process per GPU."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if "RANK" in os.environ:
        _join(int(os.environ.get("LOCAL_RANK", "0")), function, arguments)
        return
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
    world_size = arguments.world_size or gpus or 2
    if 0 < gpus < world_size:
        print(f"{world_size} ranks share {gpus} GPUs: of the times, only those of the host mean something")
    # forked ranks need no imports, but a process that has initialized CUDA must not be forked
    method = "spawn" if arguments.device == "cuda" else "fork"
    with tempfile.TemporaryDirectory() as folder:
        given = world_size, f"{folder}/store", function, arguments
        ranks = mp.start_processes(_start, given, world_size, join=False, start_method=method)
        try:
            while not ranks.join():
                pass
        finally:  # an interrupted bench would wait for its ranks to end
            for process in ranks.processes:
                process.kill()


def _start(rank: int, world_size: int, path: str, function: Callable, arguments: argparse.Namespace) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    else:
        os.environ.update(shared_gpu(rank, rank, world_size, torch.cuda.device_count()))
    # a file, because torch's other store listens on all interfaces, whatever its address
    _join(rank, function, arguments, store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)


def _join(local_rank: int, function: Callable, arguments: argparse.Namespace, **meet: object) -> None:
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", **meet)
    if arguments.device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    function(arguments)
    dist.barrier()  # a rank that ended now would break connections that others still make
    dist.destroy_process_group()


class RankGroup:
    """The first `size` ranks of this job.

    A rank that is one of them (`takes_part`) also has their process group, and their transports by the name that a method gives them:
    "" is NCCL (gloo on a CPU), "symmetric" is symmetric memory. `budget` is in bytes.
    """

    def __init__(self, size: int, device: str, budget: int | None = None) -> None:
        whole = size == dist.get_world_size()
        # every rank must call new_group, also one that is not in the group
        group = dist.group.WORLD if whole else dist.new_group(range(size))
        self.size, self.takes_part = size, dist.get_rank() < size
        if not self.takes_part:
            return
        self.group = group
        self.transports: dict[str, Transport] = {"": ra.process_group(group)}
        if device == "cuda":
            self.transports["symmetric"] = ra.symmetric(group, **({} if budget is None else {"budget": budget}))


def group_of(size: int, arguments: argparse.Namespace) -> RankGroup:
    """The first `size` ranks, with the device and the budget of the command line."""
    return RankGroup(size, arguments.device, arguments.budget and arguments.budget << 20)


def slowest(values: Sequence[float], device: str) -> list[float]:
    """The greatest of all ranks, value by value."""
    x = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist()


def write_record(name: str, arguments: argparse.Namespace, **fields: Any) -> dict:
    """Write `name`.json into the folder `--out`: how a benchmark of many ranks was run, and further fields. Returns the record."""
    record = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "world_size": dist.get_world_size(),
        "torch": torch.__version__,
        "date": str(date.today()),
        "mask": arguments.mask,
        **fields,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return record
