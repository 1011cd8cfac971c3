"""Times the first call of a process, with an empty cache of compiled kernels and after `python -m ringattn warm`.

Each row is a process of its own on one GPU, with a new folder as TRITON_CACHE_DIR:

    start     seconds to import torch and ringattn and to wake the GPU
    forward   of the first call
    backward  of the first call
    second    milliseconds of the second forward and backward
    compiled  kernels that were added to the cache
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_FIRST_CALLS = """
import json, sys, time
began = time.perf_counter()
import torch, ringattn
tokens, heads, kv_heads, head_dim = map(int, sys.argv[1:])
shapes = ((1, tokens, h, head_dim) for h in (heads, kv_heads, kv_heads))
q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
dout = torch.randn_like(q)
torch.cuda.synchronize()
times = [time.perf_counter()]
for _ in range(2):
    out = ringattn.ring_attention(q, k, v)
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    out.backward(dout)
    torch.cuda.synchronize()
    times.append(time.perf_counter())
woken, forward, backward, _, second = times
print(json.dumps({"start": woken - began, "forward": forward - woken, "backward": backward - forward, "second": second - backward}))
"""
_ROOT = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16384, help="(default: %(default)s)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="K/V heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default: %(default)s)")


def main(arguments: argparse.Namespace) -> None:
    shape = list(map(str, (arguments.tokens, arguments.heads, arguments.kv_heads, arguments.head_dim)))
    with tempfile.TemporaryDirectory() as folder:
        print(line("empty cache", first_call(Path(folder), shape)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run(["-m", "ringattn", "warm", "--head-dim", str(arguments.head_dim)], Path(folder))
        print(f"python -m ringattn warm: {time.perf_counter() - began:.1f} s, {len(kernels(Path(folder)))} kernels", flush=True)
        print(line("after warm", first_call(Path(folder), shape)), flush=True)


def first_call(cache: Path, shape: list[str]) -> dict[str, float]:
    """Seconds of the parts of a process's first call, and how many kernels it compiled."""
    before = kernels(cache)
    found = json.loads(run(["-c", _FIRST_CALLS, *shape], cache).splitlines()[-1])
    return {**found, "compiled": len(kernels(cache) - before)}


def run(command: list[str], cache: Path) -> str:
    """What a Python process prints that keeps its compiled kernels in this folder."""
    path = os.pathsep.join(map(str, (_ROOT, _ROOT / "kernels")))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    return subprocess.run([sys.executable, *command], env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout


def kernels(cache: Path) -> set[Path]:
    """The compiled kernels in a cache."""
    return set(cache.rglob("*.cubin"))


def line(name: str, found: dict[str, float]) -> str:
    """A row for a person."""
    return (
        f"{name}: start {found['start']:.1f} s, first forward {found['forward']:.2f} s and backward {found['backward']:.2f} s, "
        f"in all {found['forward'] + found['backward']:.2f} s, second {1e3 * found['second']:.1f} ms, {found['compiled']} kernels compiled"
    )
