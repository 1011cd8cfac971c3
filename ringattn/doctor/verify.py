"""`python -m ringattn verify`: one step of attention on the ranks of a job, against dense attention over the whole sequence."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..geometry.layout import Layout
from ..geometry.mask import Mask
from .measure import shares


def verify_attention(layout: Layout, mask: Mask, sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> int:
    """Print each rank's errors, over those that are allowed, on rank 0; the exit status: 0 if none is above 1.

    Every rank of a job calls it; without torchrun this process is the only rank. Dense attention holds all scores of the sequence, so that
    a rank needs memory for their square. Raises ValueError for what `ring_attention` refuses.
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    place = torch.device(device)
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device is cuda, but this machine has no GPU: give --device cpu")
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    ours = size > 1 and not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        wide = torch.float64 if place.type == "cpu" else torch.float32
        found = shares(None, rank, place, layout, mask, sizes, dtype, wide, name="verify")
        mine = torch.tensor(list(found.values()), device=place)
        every = [torch.empty_like(mine) for _ in range(size)]
        if size > 1:
            dist.all_gather(every, mine)
        records = [mine.tolist()] if size == 1 else [record.tolist() for record in every]
    finally:
        if ours:
            dist.destroy_process_group()
    fine = all(share <= 1 for record in records for share in record)  # NaN too is wrong
    if rank == 0:
        print(f"{layout!r}, {mask!r}, {str(dtype).removeprefix('torch.')} on {place.type}: errors over those allowed")
        print("\n| rank | out | dq | dk | dv |\n|---|---|---|---|---|")
        for number, record in enumerate(records):
            print(f"| {number} | " + " | ".join(f"{share:.2f}" for share in record) + " |")
        print("\nall is well" if fine else "\nnot well: an error is above what is allowed")
    return int(not fine)
