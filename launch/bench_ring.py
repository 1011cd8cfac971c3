"""Ring attention on all GPUs of a host: speed and memory, beside its peers and one GPU's kernels in the same run.

Methods take turns in every round, forward and backward; `ring_methods.py` names them. The results of all are first compared with those of
the first one. Starts a process a GPU by itself, or runs in those that torchrun started. With `--device cpu` it runs over gloo, at
toy sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import ring_report
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ring_methods import Case, Method, make_method

import ringattn as ra

_LONG = 15.0  # seconds of a round that is not repeated
_CHECK_TOKENS = 2048  # a rank
_AHEAD = 8_000_000  # clock cycles, about four milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", help="total tokens (default: 64k, 128k, 512k and 1M)")
    parser.add_argument("--methods", nargs="+", help="(default: every transport's ring and gather, the peers there are, and local)")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mask", default="causal", help="causal, full, window:TOKENS or documents:NUMBER (of skewed lengths)")
    parser.add_argument("--balanced", action="store_true", help="ring attention's shards by `balanced`, not `zigzag`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--world-size", type=int, help="ranks (default: one a GPU; 2 on a CPU)")
    parser.add_argument("--memory", action="store_true", help="only peak memory, at six sizes, with its fit to a line")
    parser.add_argument("--seconds", type=float, default=8, help="time for the rounds of one size after its first (default 8)")
    parser.add_argument("--budget", type=int, help="MiB of a rank's memory for the symmetric transport (default: the library's)")
    parser.add_argument(
        "--trace", action="store_true", help="also profile a pass of each method: a trace, and exposed communication"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for ring.json, ring.png and traces")


def main(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    arguments.tokens = arguments.tokens or [n << 16 for n in ((1, 2, 3, 4, 6, 8) if arguments.memory else (1, 2, 8, 16))]
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
        run_rank(int(os.environ.get("LOCAL_RANK", "0")), arguments)
        return
    world_size = arguments.world_size or (torch.cuda.device_count() if arguments.device == "cuda" else 2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_start, args=(world_size, store.port, arguments), nprocs=world_size)


def _start(rank: int, world_size: int, port: int, arguments: argparse.Namespace) -> None:
    if arguments.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    run_rank(rank, arguments)


def run_rank(local_rank: int, arguments: argparse.Namespace) -> None:
    """Measure every size; rank 0 prints and writes what is there after each."""
    if arguments.device == "cuda":
        torch.cuda.set_device(local_rank)
    groups = _groups(arguments.device, arguments.budget)
    names = arguments.methods or _default_methods(arguments)
    shape = arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.device
    cases = [Case(n, *shape, parse_mask(arguments.mask, n), arguments.balanced) for n in arguments.tokens]
    small = min(cases[0].tokens, _CHECK_TOKENS * dist.get_world_size())
    errors = compare(replace(cases[0], tokens=small, mask=parse_mask(arguments.mask, small)), names, groups)
    ring_report.say_errors(errors, small)
    rows = []
    for case in cases:
        new = measure(case, names, groups, None if arguments.memory else arguments.seconds)
        if arguments.trace:
            ring_report.trace(case, names, groups, arguments.out, new)
        rows += new
        if dist.get_rank() == 0:
            ring_report.table(new, header=case is cases[0])
            ring_report.write(rows, errors, arguments)
    if dist.get_rank() == 0:
        ring_report.say_fits(rows)
    dist.destroy_process_group()


def _groups(device: str, budget: int | None) -> dict[str, object]:
    """What to pass as `group` for each transport."""
    groups: dict[str, object] = {"": ra.process_group(dist.group.WORLD)}
    if device == "cuda":
        options = {} if budget is None else {"budget": budget << 20}
        groups["symmetric"] = ra.symmetric(dist.group.WORLD, **options)
    return groups


def _default_methods(arguments: argparse.Namespace) -> list[str]:
    names = ["ring", "gather"]
    if arguments.device == "cuda":
        names += ["ring+symmetric", "waves-1+symmetric", "gather+symmetric"]
    if arguments.mask == "causal" and not arguments.memory:
        if arguments.kv_heads % dist.get_world_size() == 0:
            names.append("ulysses")
        if arguments.device == "cuda":
            names += ["cp-alltoall", "cp-allgather"]
        if importlib.util.find_spec("ring_flash_attn"):
            names.append("ring_flash_attn")
    return names if arguments.memory else [*names, "local"]


def parse_mask(text: str, tokens: int) -> ra.Mask:
    """`documents:N`: the n-th of N documents is proportional to 1 / n, so that the first is long and most are short."""
    word, _, number = text.partition(":")
    if word == "documents":
        weights = [1 / (n + 1) for n in range(int(number))]
        lengths = [int(tokens * weight / sum(weights)) for weight in weights]
        return ra.documents(lengths=[tokens - sum(lengths[1:]), *lengths[1:]]) & ra.causal()
    makers = {"causal": ra.causal, "full": ra.full, "window": lambda: ra.sliding_window(int(number) - 1, 0)}
    if word not in makers:
        raise ValueError(f"mask is {text!r}, but must be causal, full, window:TOKENS or documents:NUMBER")
    return makers[word]()


def compare(case: Case, names: list[str], groups: dict[str, object]) -> dict[str, float]:
    """Largest difference of out, dq, dk and dv of each method from those of the first, relative to their norm."""
    first, errors = None, {}
    for name in names:
        if name == "local":
            continue
        method = make_method(name, case, groups, same=True)
        whole = [ra.unshard(x, method.layout, groups[""]).double() for x in method.results()]  # type: ignore[arg-type]
        first = first or whole
        errors[name] = max(float((x - y).norm() / y.norm()) for x, y in zip(whole, first))
    return errors


def measure(case: Case, names: list[str], groups: dict[str, object], seconds: float | None) -> list[dict]:
    """A row for each method: medians over rounds of the slowest rank's times, and the peak memory of the first round.

    The first round warms up, and counts only if it took so long that there is no other, or with `seconds` None.
    """
    began = time.monotonic()
    methods = {name: make_method(name, case, groups) for name in names}
    memory = {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name, method in methods.items():
        before = _reset_peak(case.device)
        times[name].append(once(method, case.device))
        memory[name] = _peak(case.device) - before - method.results_bytes if case.device == "cuda" else 0
    (round_seconds,) = slowest([time.monotonic() - began], case.device)
    rounds = 0 if seconds is None or round_seconds > _LONG else min(10, max(2, int(seconds / round_seconds)))
    for _ in range(rounds):
        for name, method in methods.items():
            times[name].append(once(method, case.device))
    return [_row(case, name, times[name][1:] if rounds else times[name], memory[name]) for name in names]


def _row(case: Case, name: str, times: list[tuple[float, float]], memory: int) -> dict:
    pairs = [slowest(list(pair), case.device) for pair in times]
    forward, both = (statistics.median(column) for column in zip(*pairs))
    return {
        "method": name,
        "tokens": case.tokens,
        "tokens_per_gpu": case.tokens // dist.get_world_size(),
        "rounds": len(times),
        "forward_ms": forward * 1e3,
        "forward_backward_ms": both * 1e3,
        "forward_backward_ms_range": [1e3 * extreme(both for _, both in pairs) for extreme in (min, max)],
        "forward_tflops": case.forward_flop / forward / 1e12,
        "forward_backward_tflops": 3.5 * case.forward_flop / both / 1e12,
        "peak_bytes_beyond_inputs": int(slowest([memory], case.device)[0]),
    }


def once(method: Method, device: str) -> tuple[float, float]:
    """Seconds of the forward pass and of both; ranks start together, with the host ahead of its GPU as it is in training."""
    if device == "cpu":
        dist.barrier()
        marks = [time.perf_counter()]
        for step in (method.forward, method.backward):
            step()
            marks.append(time.perf_counter())
        return marks[1] - marks[0], marks[2] - marks[0]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda._sleep(_AHEAD)
    events[0].record()
    method.forward()
    events[1].record()
    method.backward()
    events[2].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3, events[0].elapsed_time(events[2]) / 1e3


def slowest(values: list[float], device: str) -> list[float]:
    """The greatest of all ranks, value by value."""
    x = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist()


def _reset_peak(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0
