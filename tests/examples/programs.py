"""Programs as a person starts them, and what they wrote."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def start(*command: object, gpus: bool = False) -> subprocess.CompletedProcess:
    """Without GPUs, unless asked for: there may be fewer than the command's ranks."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=280)


def succeed(*command: object, gpus: bool = False) -> str:
    done = start(*command, gpus=gpus)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(out: Path) -> dict:
    return json.loads((out / "figures.json").read_text())
