"""What the doctor reads off: versions, settings, and which paths of the library are open.

In each check every rank calls `observe`; then all ranks call `judge` on the records of all.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.cuda import nccl

import ringattn

from ..transport.symmetric import SymmetricTransport
from .board import Board

SETTINGS = re.compile(r"(NCCL|TORCH|GLOO|CUDA|TRITON|PYTORCH|CUBLAS|CUDNN|OMP|MKL|UCX|FI)_|(LD_PRELOAD|PYTHONHASHSEED)$")
# settings that a launcher gives each rank separately
OWN_SETTINGS = re.compile(
    r"TORCHELASTIC_|TORCH_NCCL_ASYNC_ERROR_HANDLING$|CUDA_VISIBLE_DEVICES$|CUDA_MPS_PIPE_DIRECTORY$|NCCL_HOSTID$"
)
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class Verdict(enum.Enum):
    """The result of a check."""

    FINE = "ok"
    NOTE = "note"
    LOOK = "LOOK"


@dataclass(frozen=True)
class Finding:
    """A row of the table: what was seen, and the ranks to look at."""

    check: str
    verdict: Verdict
    text: str
    ranks: tuple[int, ...] = ()
    records: Sequence[Any] = ()


@dataclass(frozen=True)
class Site:
    """Where a rank is, and the limits of the checks."""

    rank: int
    size: int
    hosts: tuple[str, ...]  # of each rank
    device: torch.device
    board: Board
    group: dist.ProcessGroup  # of all ranks
    slow: float  # a rank is slow above this many times the median
    link: float  # a link is slow below this share of the upper quartile of its kind
    skew: float  # a clock is off above this many seconds

    def peers(self, rank: int) -> list[int]:
        """The ranks on a rank's host."""
        return [other for other in range(self.size) if self.hosts[other] == self.hosts[rank]]


def named(ranks: Sequence[int]) -> str:
    """`rank 2` or `ranks 2, 3`; a long list is cut."""
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def odd_ones(values: Sequence[Hashable]) -> list[int]:
    """The ranks whose value is not the most common one. Of equally common values, that of the lowest rank counts as common."""
    common = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != common]


def compare(check: str, records: Sequence[dict[str, str]], fine: str) -> Finding:
    """Compare records that must be equal: name what differs, on which ranks, and from which value."""
    texts, ranks = [], set()
    for name in sorted(set().union(*records)):
        values = [record.get(name, "not set") for record in records]
        odd = odd_ones(values)
        if odd:
            rest = [rank for rank in range(len(values)) if rank not in odd]
            shown = "; ".join(f"{values[rank]} on rank {rank}" for rank in odd[:4])
            texts.append(f"{name} is {shown}, but {values[rest[0]]} on {named(rest)}")
            ranks |= set(odd)
    if not texts:
        return Finding(check, Verdict.FINE, fine, (), records)
    return Finding(check, Verdict.LOOK, "; ".join(texts), tuple(sorted(ranks)), records)


class Versions:
    """Software, driver and kind of GPU must be the same everywhere."""

    name = "versions"

    def observe(self, site: Site) -> dict[str, str]:
        return versions(site.device)

    def judge(self, site: Site, records: list[dict[str, str]]) -> Finding:
        common = records[0]
        return compare(self.name, records, ", ".join(f"{name} {value}" for name, value in common.items()))


def versions(device: torch.device) -> dict[str, str]:
    """The versions of everything that a step depends on."""
    found = {"Python": platform.python_version(), "torch": torch.__version__}
    found |= {name: installed(name) for name in ("triton", "fla-core", "transformers", "deepspeed")}
    found |= {"ringattn": ringattn.__version__, "its code": source_digest()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, nccl.version())),
            "driver": driver(),
            "GPU": properties.name,
            "multiprocessors": str(properties.multi_processor_count),
            "GPU memory": f"{properties.total_memory / 2**30:.0f} GiB",
        }
    return found


def installed(name: str) -> str:
    """The version of a package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def source_digest() -> str:
    """A fingerprint of the two packages' files, as two checkouts of one version may differ."""
    digest = hashlib.blake2b(digest_size=4)
    for package in ("ringattn", "ringattn_kernels"):
        found = importlib.util.find_spec(package)
        folders = [] if found is None else found.submodule_search_locations or []
        for folder in map(Path, folders):
            for path in sorted(folder.rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(folder).as_posix()}".encode() + path.read_bytes())
    return digest.hexdigest()


def driver() -> str:
    """The version of NVIDIA's kernel module."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module[^0-9]*(?:for \S+\s+)?([\d.]+)", path.read_text()) if path.exists() else None
    return found.group(1) if found else "unknown"


class Environment:
    """The libraries' settings must be the same everywhere, and multicast off."""

    name = "environment"

    def observe(self, site: Site) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if SETTINGS.match(name) and not OWN_SETTINGS.match(name)}

    def judge(self, site: Site, records: list[dict[str, str]]) -> Finding:
        found = compare(self.name, records, f"{len(records[0])} settings, equal on all ranks")
        if site.device.type != "cuda":
            return found
        wrong = [rank for rank, record in enumerate(records) if any(record.get(n) != v for n, v in MULTICAST_OFF.items())]
        if not wrong:
            return found
        wanted = " and ".join(f"{name}={value}" for name, value in MULTICAST_OFF.items())
        text = f"{named(wrong)}: start with {wanted}, as launch/jobs/torchrun.sh does"
        if found.ranks:
            text = f"{found.text}; {text}"
        return Finding(self.name, Verdict.LOOK, text, tuple(sorted({*found.ranks, *wrong})), records)


class KernelChoice:
    """Which kernels a bf16 call with head dim 128 runs, and why."""

    name = "kernels"

    def observe(self, site: Site) -> dict[str, str]:
        if site.device.type != "cuda":
            return dict.fromkeys(("forward", "backward"), "plain torch: no GPU")
        from ringattn_kernels import TileTable, dispatch

        q, dout = (torch.zeros(1, 256, 4, 128, device=site.device, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.zeros(1, 256, 2, 128, device=site.device, dtype=torch.bfloat16) for _ in range(2))
        table = TileTable(np.array([(0, 256, 0, 256, 0, 256)]), 256, 256)
        choices = {
            "forward": dispatch.choose_forward(q, k, v, 128**-0.5),
            "backward": dispatch.choose_backward(q, k, v, dout, table),
        }
        return {name: f"{choice.kernels.value} ({choice.reason})" for name, choice in choices.items()}

    def judge(self, site: Site, records: list[dict[str, str]]) -> Finding:
        return compare(self.name, records, ", ".join(f"{name} {choice}" for name, choice in records[0].items()))


class SymmetricMemory:
    """Whether copy engines can move messages through memory that all ranks map, or why not. Tried as the library itself does it."""

    name = "symmetric memory"

    def observe(self, site: Site) -> str:
        """Empty if it works, else the reason, which is the same on every rank."""
        if site.device.type != "cuda":
            return "needs GPUs"
        return "one rank" if site.size == 1 else SymmetricTransport(site.group).open(site.device) or ""

    def judge(self, site: Site, records: list[str]) -> Finding:
        reason = next((record for record in records if record), "")
        if not reason:
            return Finding(self.name, Verdict.FINE, "all ranks map each other's memory; copy engines move messages", (), records)
        failed = re.match(r"rank (\d+) could not", reason)
        if failed:
            return Finding(self.name, Verdict.LOOK, reason, (int(failed.group(1)),), records)
        return Finding(self.name, Verdict.NOTE, f"not available: {reason}", (), records)
