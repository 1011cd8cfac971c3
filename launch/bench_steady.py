"""Steady state: many steps of ring attention, forward and backward, in which nothing should grow and no host should wait for its GPU.

Each method first warms up. From there to its last step: the growth of what tensors take (*allocated*), of what torch keeps of the GPU
(*reserved*) and of the host's memory (*host*), and how often torch asked the driver for memory or gave it back (*driver calls*); the
largest of all ranks. At last one step is queued behind a GPU that is kept busy: a host that is through before its GPU begins has
waited for nothing. With `--device cpu` only the host's memory is looked at.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from bench_ring import add_shape, launch, make_case, slowest
from ring_methods import Ranks, make_method
from ring_report import circumstances

_WARM_UP = 20  # steps at least
_BUSY = 1_000_000_000  # clock cycles, about half a second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32768, help="total tokens (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", help="(default: ring and gather, on a GPU over both transports)")
    parser.add_argument("--mask", default="causal", help="as that of bench.py ring")
    add_shape(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for steady.json")


def main(arguments: argparse.Namespace) -> None:
    launch(run_rank, arguments)


def run_rank(arguments: argparse.Namespace) -> None:
    on_gpu = arguments.device == "cuda"
    ranks = Ranks(dist.get_world_size(), arguments.device, arguments.budget and arguments.budget << 20)
    case = make_case(arguments.tokens, ranks, arguments)
    names = arguments.methods or ["ring", "gather", *(["ring+symmetric", "gather+symmetric"] if on_gpu else [])]
    rows = []
    for name in names:
        method = make_method(name, case)

        def step(method=method) -> None:
            method.forward()
            method.backward()

        rows.append({"method": name, **steady(step, arguments.steps, arguments.device)})
        del method, step
        if dist.get_rank() == 0:
            print(line(rows[-1]), flush=True)
            write(rows, arguments)


def steady(step: Callable[[], None], steps: int, device: str) -> dict:
    """What grew in so many steps after the warm-up, and whether the host waited for its GPU: of the rank with most."""
    # long enough for the host to run as far ahead as it ever will
    for _ in range(max(_WARM_UP, steps // 10)):
        step()
    before = state(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    after = state(device)
    seconds = time.perf_counter() - began
    found = {name: after[name] - before[name] for name in before} | {"ms_a_step": 1e3 * seconds / steps}
    if device == "cuda":
        found["host_waits"] = waits(step)
    names, values = zip(*found.items())
    largest = dict(zip(names, slowest([float(value) for value in values], device)))
    return {"steps": steps, **{name: x if name == "ms_a_step" else int(x) for name, x in largest.items()}}


def state(device: str) -> dict[str, int]:
    """Bytes in use, and requests to the driver so far, with all ranks' work done."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    gc.collect()
    found = {"host_bytes": resident_bytes()}
    if device == "cuda":
        stats = torch.cuda.memory_stats()
        found |= {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
        found["driver_calls"] = stats["segment.all.allocated"] + stats["segment.all.freed"]
    return found


def resident_bytes() -> int:
    """Of this process, without what files share with others."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def waits(step: Callable[[], None]) -> bool:
    """Whether the host is through with a step only after its GPU has begun it."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    begun = torch.cuda.Event()
    begun.record()
    step()
    waited = begun.query()
    torch.cuda.synchronize()
    return waited


def line(row: dict) -> str:
    parts = [f"{row['method']}: {row['steps']} steps of {row['ms_a_step']:.2f} ms"]
    parts += [f"{name} {row[f'{name}_bytes']:+,} bytes" for name in ("allocated", "reserved", "host") if f"{name}_bytes" in row]
    if "driver_calls" in row:
        parts.append(f"{row['driver_calls']} driver calls")
        parts.append("the host " + ("waits for its GPU" if row["host_waits"] else "waits for nothing"))
    return ", ".join(parts)


def write(rows: list[dict], arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {**circumstances(arguments), "tokens": arguments.tokens, "rows": rows}
    (arguments.out / "steady.json").write_text(json.dumps(record, indent=1) + "\n")
