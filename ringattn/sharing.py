"""Ranks that share GPUs, to see on one GPU what a program does on many: `torchrun --nproc-per-node 8 -m ringattn share train.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import torch

from .transport.symmetric import SHARES


def shared_gpu(rank: int, local_rank: int, ranks: int, gpus: int) -> dict[str, str]:
    """Environment variables of one of a host's ranks, so that they share its GPUs; none if each has its own.

    They have to be set before the process makes its first group. To NCCL two ranks of one host on one GPU are a mistake, so each rank is
    on a host of its own. torch's symmetric memory asks for permission.
    """
    told = {"LOCAL_RANK": str(local_rank % gpus), "NCCL_HOSTID": f"rank {rank}", SHARES: "1"}
    return told if ranks > gpus else {}


def run_shared(program: Sequence[str]) -> None:
    """Replace this process, a rank under torchrun, by `python program`, whose ranks share GPUs if the host has fewer than ranks.

    Raises ValueError outside of torchrun, and where there is no GPU.
    """
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, **_settings(os.environ, torch.cuda.device_count())})


def _settings(environment: Mapping[str, str], gpus: int) -> dict[str, str]:
    try:
        rank, local_rank, ranks = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except (KeyError, ValueError):
        raise ValueError(
            "RANK, LOCAL_RANK and LOCAL_WORLD_SIZE are not set: start ranks with torchrun --nproc-per-node 8 -m ringattn share train.py"
        ) from None
    if not gpus:
        raise ValueError("there is no GPU here that ranks could share: CUDA_VISIBLE_DEVICES, or torch's build, may hide it")
    return shared_gpu(rank, local_rank, ranks, gpus)
