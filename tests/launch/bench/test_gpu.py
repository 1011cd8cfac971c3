"""Benchmarks that need a GPU, at toy sizes: each runs to its end and prints the rows that it is asked for.

Ranks that are more than the GPUs share them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"

MODEL = "doors --layers 1 --width 128 --inner 128 --heads 2 --kv-heads 1 --vocabulary 64 "
# arguments, what a row is, and how many there are
RUNS = {
    "kernels": (
        "kernels --kinds dense --sequences 1024 2048 --head-dims 64 --masks causal --kv-heads 8 --peers cudnn",
        r"^\| .* ± .*; cudnn \d.*\|$",
        2,
    ),
    "sweep": ("sweep --sequence 512 --heads 2 --head-dims 64 --workers 4", r"^(?:forward|dkdv|dq) .*(?:causal|full).*TFLOP/s", 10),
    "scores": (
        "scores --tokens 1024 --heads 4 --kv-heads 2 --head-dim 64 --parts none softcap dropout --rounds 2",
        r"^(?:none|softcap|dropout) ",
        3,
    ),
    "cold": ("cold --tokens 512 --heads 4 --kv-heads 2 --head-dim 64", r"second [\d.]+ ms, \d+ kernels compiled", 2),
    "overhead": (
        "overhead --real --world-size 2 --tokens 1024 --rounds 2 --methods default+symmetric ring ulysses",
        r"^ *(?:default\+symmetric|ring|ulysses) +\d+ +\d+$",
        3,
    ),
    "ring": (
        "ring --world-size 2 --tokens 2048 --methods default+symmetric ring gather ulysses local --seconds 1 --one-by-one --out {}",
        r"^ *2 +2048 +(?:default\+symmetric|ring|gather|ulysses|local) ",
        5,
    ),
    "packed": (
        "packed --world-size 2 --tokens 1024 --means 256 --layouts placed zigzag --steps 3 --rounds 1 --out {}",
        r"^\| 1,024 \| 256 \| (?:new|ahead|prepared|seen) \| (?:placed|zigzag) \| ",
        8,
    ),
    "steady": ("steady --world-size 2 --steps 5 --tokens 2048 --out {}", r"^(?:ring|gather)[^:]*: 5 steps of ", 4),
    "doors": (
        MODEL
        + "--world-size 2 --tokens 512 --mean 128 --steps 1 --warm-up 1 --rounds 1 --ways attach replicas --cases packed --out {}",
        r"^\| packed \| (?:attach|replicas) \| ",
        2,
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_a_toy_run(name, tmp_path):
    options, row, count = RUNS[name]
    environment = {**os.environ, "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, LAUNCH / "bench", *options.format(tmp_path).split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(row, done.stdout, re.MULTILINE)) >= count, done.stdout
