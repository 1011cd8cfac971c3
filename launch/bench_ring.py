"""Ring attention on all GPUs of a host: speed, memory and bytes moved, beside its peers and one GPU's kernels in the same run.

Methods take turns, forward and backward, in another order each round and each from rest; `ring_methods.py` names them. Times are those of
the slowest rank: medians over the rounds, with quartiles; *host* is what both passes take the host, which runs ahead of its GPU. *ratio* is
of the rate, forward and backward: to the fastest peer, where there is one, else to the first method; with `--scaling` to the same method
on one rank. The results of all are first compared with those of the first one. Starts a process a GPU by itself, or runs in those that
torchrun started. With `--device cpu` it runs over gloo, at toy sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ring_report
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ring_methods import PEER_METHODS, Case, Method, Ranks, count_sent, make_method
from ring_methods import check as check_method
from timing import REST, spread

import ringattn as ra

_LONG = 15.0  # seconds of a round that is not repeated
_CHECK_TOKENS = 2048  # a rank
_AHEAD = 24_000_000  # clock cycles, about twelve milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", help="total tokens (default: 64k, 128k, 512k and 1M)")
    parser.add_argument(
        "--methods",
        nargs="+",
        help="(default: every transport's ring and gather, the peers there are, and local; of documents on balanced shards too)",
    )
    add_shape(parser)
    parser.add_argument("--mask", default="causal", help="causal, full, window:TOKENS or documents:NUMBER (of skewed lengths)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--memory", action="store_true", help="only peak memory, at six sizes, with its fit to a line")
    kind.add_argument(
        "--scaling", action="store_true", help="on 1, 2, 4, ... of the ranks in turns, with --tokens a rank (default: 64k)"
    )
    parser.add_argument("--seconds", type=float, default=8, help="time for the rounds of one size after its first (default 8)")
    parser.add_argument(
        "--trace", action="store_true", help="also profile a pass of each method: a trace, and exposed communication"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for ring.json, ring.png and traces")


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The arguments of every benchmark of many ranks."""
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--world-size", type=int, help="ranks (default: one a GPU; 2 on a CPU)")
    parser.add_argument("--budget", type=int, help="MiB of a rank's memory for the symmetric transport (default: the library's)")


def main(arguments: argparse.Namespace) -> None:
    if arguments.tokens is None:
        counts = (1,) if arguments.scaling else (1, 2, 3, 4, 6, 8) if arguments.memory else (1, 2, 8, 16)
        arguments.tokens = [n << 16 for n in counts]
    try:
        check(arguments)
    except ValueError as error:
        raise SystemExit(f"bench.py ring: {error}") from None
    launch(run_rank, arguments)


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for what no rank could run, before any is started."""
    for name in ("heads", "kv_heads", "head_dim", "world_size", "budget", "tokens"):
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
    if arguments.heads % arguments.kv_heads:
        raise ValueError(f"kv_heads is {arguments.kv_heads}, which does not divide the {arguments.heads} heads")
    for tokens in arguments.tokens:
        parse_mask(arguments.mask, tokens)
    for name in arguments.methods or ():
        check_method(name, arguments.device, arguments.mask)


def launch(function: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> None:
    """Call a function on every rank: those that torchrun started, or one a GPU."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if "RANK" in os.environ:
        _join(int(os.environ.get("LOCAL_RANK", "0")), function, arguments)
        return
    world_size = arguments.world_size or (torch.cuda.device_count() if arguments.device == "cuda" else 2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_start, args=(world_size, store.port, function, arguments), nprocs=world_size)


def _start(rank: int, world_size: int, port: int, function: Callable, arguments: argparse.Namespace) -> None:
    if arguments.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    _join(rank, function, arguments, store=store, rank=rank, world_size=world_size)


def _join(local_rank: int, function: Callable, arguments: argparse.Namespace, **meet: object) -> None:
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo", **meet)
    if arguments.device == "cuda":
        torch.cuda.set_device(local_rank)
    function(arguments)
    dist.destroy_process_group()


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure every size; rank 0 prints and writes what is there after each."""
    names = arguments.methods or _default_methods(arguments)
    everyone = dist.get_world_size()
    sizes = [everyone]
    if arguments.scaling:
        sizes = sorted({everyone, *(1 << n for n in range(everyone.bit_length()))})
    groups = [Ranks(size, arguments.device, arguments.budget and arguments.budget << 20) for size in sizes]
    shortest = min(arguments.tokens) * (everyone if arguments.scaling else 1)
    small = make_case(min(shortest, _CHECK_TOKENS * everyone), groups[-1], arguments)
    errors = compare(small, names)
    ring_report.say_errors(errors, small.tokens)
    rows = []
    for tokens in arguments.tokens:
        cases = [make_case(tokens * (ranks.size if arguments.scaling else 1), ranks, arguments) for ranks in groups]
        entries = [Entry(name, case) for case in cases for name in names]
        new = measure(entries, None if arguments.memory else arguments.seconds)
        if arguments.trace:
            ring_report.trace(entries, arguments.out, new)
        ring_report.add_ratios(new, PEER_METHODS)
        rows += new
        if dist.get_rank() == 0:
            ring_report.table(new, header=rows == new)
            ring_report.write(rows, errors, arguments)
    if dist.get_rank() == 0:
        ring_report.say_fits(rows)


def make_case(tokens: int, ranks: Ranks, arguments: argparse.Namespace) -> Case:
    shape = arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.device
    return Case(tokens, *shape, parse_mask(arguments.mask, tokens), ranks)


def _default_methods(arguments: argparse.Namespace) -> list[str]:
    names = ["ring", "gather"]
    if arguments.device == "cuda":
        names += ["ring+symmetric", "waves-1+symmetric", "gather+symmetric"]
    if arguments.scaling:
        return names
    if arguments.mask == "causal" and not arguments.memory:
        if arguments.kv_heads % dist.get_world_size() == 0:
            names.append("ulysses")
        if arguments.device == "cuda":
            names += ["cp-alltoall", "cp-allgather"]
        if importlib.util.find_spec("ring_flash_attn"):
            names.append("ring_flash_attn")
    if not arguments.memory:
        names.append("local")
    return [*names, *(f"{name}@balanced" for name in names)] if arguments.mask.startswith("documents") else names


def parse_mask(text: str, tokens: int) -> ra.Mask:
    """`documents:N`: the n-th of N documents is proportional to 1 / n, so that the first is long and most are short."""
    word, _, number = text.partition(":")
    counted = number.isdigit() and int(number) > 0
    if not (counted if word in ("window", "documents") else word in ("causal", "full") and not number):
        raise ValueError(f"mask is {text!r}, but must be causal, full, window:TOKENS or documents:NUMBER, such as window:4096")
    if word == "documents":
        weights = [1 / (n + 1) for n in range(int(number))]
        lengths = [int(tokens * weight / sum(weights)) for weight in weights]
        return ra.documents(lengths=[tokens - sum(lengths[1:]), *lengths[1:]]) & ra.causal()
    if word == "window":
        return ra.sliding_window(int(number) - 1, 0)
    return ra.causal() if word == "causal" else ra.full()


def compare(case: Case, names: list[str]) -> dict[str, float]:
    """Largest difference of out, dq, dk and dv of each method from those of the first, relative to their norm."""
    first, errors = None, {}
    for name in names:
        if name.startswith("local"):
            continue
        method = make_method(name, case, same=True)
        whole = [ra.unshard(x, method.layout, case.ranks.transports[""]).double() for x in method.results()]
        first = first or whole
        errors[name] = max(float((x - y).norm() / y.norm()) for x, y in zip(whole, first))
    return errors


@dataclass
class Entry:
    """A method on a case, and what is measured of it on this rank; where the rank takes no part, zeros, which others exceed."""

    name: str
    case: Case
    method: Method | None = None
    times: list[tuple[float, float, float]] = field(default_factory=list)
    memory: int = 0
    sent: int = 0

    def turn(self) -> None:
        """Forward and backward once, from rest; ranks start together."""
        _rest(self.case.device)
        self.times.append((0.0, 0.0, 0.0) if self.method is None else once(self.method, self.case.device))

    def make(self) -> Method | None:
        """The method, on ranks that take part."""
        return make_method(self.name, self.case) if self.case.ranks.takes_part else None

    def first_turn(self) -> None:
        """Make the method, and measure its memory and messages as well."""
        self.method = self.make()
        before = _reset_peak(self.case.device)
        if self.method is None:
            self.turn()
            return
        with count_sent(self.method) as sent:
            self.turn()
        self.sent = sum(sent)
        if self.case.device == "cuda":
            self.memory = torch.cuda.max_memory_allocated() - before - self.method.results_bytes


def measure(entries: list[Entry], seconds: float | None) -> list[dict]:
    """A row for each entry; its peak memory and messages are those of the first round.

    That round warms up, and counts only if it took so long that there is no other, or with `seconds` None.
    """
    device = entries[0].case.device
    for entry in entries:
        entry.first_turn()
    rounds = rounds_after([entry.times[0] for entry in entries], seconds, device)
    order, shuffler = list(entries), random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for entry in order:
            entry.turn()
    rows = [_row(entry, entry.times[1:] if rounds else entry.times) for entry in entries]
    for entry in entries:
        entry.method = None
    return rows


def rounds_after(first: list[tuple[float, float, float]], seconds: float | None, device: str) -> int:
    """How many rounds follow the first, of which these are the times, in about so many seconds: none if its GPUs took long.

    A GPU that is as slow as its host has waited for kernels to compile.
    """
    _, both, host = (sum(column) for column in zip(*first))
    total, computed = slowest([both + REST * len(first), both - host * (device == "cuda")], device)
    return 0 if seconds is None or computed > _LONG else min(10, max(2, int(seconds / total)))


def _row(entry: Entry, times: list[tuple[float, float, float]]) -> dict:
    case = entry.case
    found = [slowest(list(one), case.device) for one in times]
    forward, both, host = (spread([1e3 * seconds for seconds in column]) for column in zip(*found))
    memory, sent = slowest([entry.memory, entry.sent], case.device)
    flop = case.forward_flop
    return {
        "method": entry.name,
        "ranks": case.ranks.size,
        "tokens": case.tokens,
        "tokens_per_gpu": case.tokens // case.ranks.size,
        "rounds": len(times),
        "forward_ms": forward.median,
        "forward_ms_quartiles": [forward.lower, forward.upper],
        "forward_backward_ms": both.median,
        "forward_backward_ms_quartiles": [both.lower, both.upper],
        "host_ms": host.median,
        "forward_tflops": flop / forward.median / 1e9,
        "forward_backward_tflops": 3.5 * flop / both.median / 1e9,
        "peak_bytes_beyond_inputs": int(memory),
        "sent_bytes": int(sent) if sent else None,
    }


def once(method: Method, device: str) -> tuple[float, float, float]:
    """Seconds of the forward pass and of both, with the host ahead of its GPU as it is in training; and of the host."""
    if device == "cpu":
        marks = [time.perf_counter()]
        for step in (method.forward, method.backward):
            step()
            marks.append(time.perf_counter())
        return marks[1] - marks[0], marks[2] - marks[0], marks[2] - marks[0]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda._sleep(_AHEAD)
    events[0].record()
    began = time.perf_counter()
    method.forward()
    events[1].record()
    method.backward()
    host = time.perf_counter() - began
    events[2].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3, events[0].elapsed_time(events[2]) / 1e3, host


def _rest(device: str) -> None:
    """Leave all ranks at rest for a moment, and then together: what ran before must not lower the clocks of what comes."""
    if device == "cpu":
        dist.barrier()
        return
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    time.sleep(REST)
    # ranks leave this when the last one has come
    dist.all_reduce(torch.zeros(1, device="cuda"))


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
