"""Checks over many steps of ring attention that memory stays flat and that no host waits for its GPU.

Each method first warms up. From the end of the warm-up to the last step the benchmark reports the growth of

    allocated     bytes of tensors
    reserved      bytes of the GPU that torch keeps
    host          bytes of the host's memory
    driver calls  how often torch asked the driver for memory or gave memory back

each of the rank where it is largest. At the end it queues one step behind a GPU that is kept busy: if the host finishes before its GPU
begins, the host has waited for nothing. With `--device cpu` only the host's memory is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from .shared.cases import add_shape, make_case
from .shared.methods import make_method
from .shared.ranks import add_ranks, group_of, slowest, start_ranks, write_record

_WARM_UP = 20  # steps at least
_BUSY = 1_000_000_000  # clock cycles, about half a second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1000, help="steps after the warm-up (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32768, help="total tokens (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", help="default: ring and gather, on a GPU over both transports")
    add_shape(parser)
    add_ranks(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for steady.json")


def main(arguments: argparse.Namespace) -> None:
    start_ranks(run_rank, arguments)


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure every method; rank 0 prints and writes the results after each."""
    on_gpu = arguments.device == "cuda"
    case = make_case(arguments.tokens, group_of(dist.get_world_size(), arguments), arguments)
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
    """What grew in so many steps after the warm-up, and whether the host waited for its GPU: the largest of all ranks."""
    # warm up until the host runs as far ahead of its GPU as it ever will
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
    """Bytes in use, and requests to the driver so far, when all ranks have finished their work."""
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
    """Resident memory of this process, without pages that files share with other processes."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def waits(step: Callable[[], None]) -> bool:
    """Whether the host finishes a step only after its GPU has begun it."""
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
    """A row for a person."""
    parts = [f"{row['method']}: {row['steps']} steps of {row['ms_a_step']:.2f} ms"]
    parts += [f"{name} {row[f'{name}_bytes']:+,} bytes" for name in ("allocated", "reserved", "host") if f"{name}_bytes" in row]
    if "driver_calls" in row:
        parts.append(f"{row['driver_calls']} driver calls")
        parts.append("the host " + ("waits for its GPU" if row["host_waits"] else "waits for nothing"))
    return ", ".join(parts)


def write(rows: list[dict], arguments: argparse.Namespace) -> None:
    """Write steady.json."""
    write_record("steady", arguments, tokens=arguments.tokens, rows=rows)
