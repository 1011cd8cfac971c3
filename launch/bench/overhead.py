"""Measures what a call of `ring_attention` costs the host, in microseconds, forward and backward.

By default one rank runs alone: a transport that moves nothing stands in for the other ranks, and the kernels are left out. The time is
that of the library's own Python and of torch's dispatch of small operations, with autograd.

With `--real` all ranks run, one per GPU, and nothing is left out: the time is what the host takes to queue a call, with launches,
transfers and the swap of records, while its GPU is behind. It is a median, of the rank where it is longest. Torch runs a backward pass on a
thread of its own for each GPU, and the host waits for threads to wake; with `--one-thread` it runs on the thread that calls. With
`--layers` each pass is of several calls, as of a model's layers, and the time is that of one: the threads wake once for all of them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.device import local
from ringattn.transport import Ranks, SilentTransport

from .scores import parts
from .shared.cases import make_case
from .shared.methods import Method, check_method, make_method
from .shared.peers import PEER_METHODS
from .shared.ranks import group_of, slowest, start_ranks

_BUSY = 40_000_000  # clock cycles, about twenty milliseconds

SCHEDULES: dict[str, Callable[[int], ra.Schedule]] = {
    "ring": lambda ranks: ra.ring(),
    "gather": lambda ranks: ra.gather(),
    "waves(3)": lambda ranks: ra.waves(3),
    "double_ring": lambda ranks: ra.double_ring(max(1, ranks // 2)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--calls", type=int, default=50, help="calls per round (default 50)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds; the fastest one counts (default 40)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--real", action="store_true", help="measure on all GPUs, with kernels and transfers")
    parser.add_argument("--one-thread", action="store_true", help="for --real: backward passes run on the thread that calls")
    parser.add_argument("--layers", type=int, default=1, help="for --real: calls of a pass (default %(default)s)")
    parser.add_argument("--methods", nargs="+", help="for --real: methods as `bench ring` names them, peers too (default: four)")
    parser.add_argument("--score", default="none", help="for --real: what happens to scores, a part as `bench scores` names it")
    parser.add_argument("--head-dim", type=int, default=128, help="for --real (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="for --real: total tokens (default: %(default)s)")
    parser.add_argument("--world-size", type=int, help="for --real: ranks (default: one per GPU; 2 on a CPU)")
    parser.set_defaults(mask="causal", heads=32, kv_heads=8, budget=None)


def main(arguments: argparse.Namespace) -> None:
    if arguments.real:
        if arguments.layers < 1:
            raise ValueError(f"--layers is {arguments.layers}, but must be at least 1")
        if arguments.score not in (names := parts(1, "cpu")):
            raise ValueError(f"--score is {arguments.score!r}, but must be one of {', '.join(names)}")
        for name in arguments.methods or ():
            check_method(name, arguments.device, arguments.mask)
            if name in PEER_METHODS and arguments.score != "none":
                raise ValueError(f"method {name!r} is a peer, which modifies no scores")
            if name.startswith("local") or "+graph" in name:
                raise ValueError(f"method {name!r} makes no calls of attention whose host time could be told")
        start_ranks(run_rank, arguments)
        return
    torch.set_num_threads(1)
    print(
        f"{'ranks':>5} {'schedule':>12}  {'forward':>8} {'backward':>8}   microseconds per call on the host, without kernels and transfers"
    )
    for world_size in arguments.world_sizes:
        for name, make in SCHEDULES.items():
            forward, backward = measure(world_size, make(world_size), arguments)
            print(f"{world_size:>5} {name:>12}  {forward:>8.0f} {backward:>8.0f}", flush=True)


def measure(world_size: int, schedule: ra.Schedule, arguments: argparse.Namespace) -> tuple[float, float]:
    """Microseconds of a forward and of a backward call: the least of many rounds, as other programs can only slow a round down."""
    tokens, layout = 16, ra.zigzag(16 * world_size, world_size)
    group = SilentTransport(world_size // 2, world_size)
    q, k, v, dout = (torch.randn(1, tokens, h, 8, device=arguments.device) for h in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    statistic = torch.ones(1, 4, tokens, device=arguments.device)
    fresh = torch.zeros_like(dout), statistic, statistic

    def call() -> torch.Tensor:
        return ra.ring_attention(*leaves, layout=layout, mask=ra.causal(), group=group, schedule=schedule)

    def forward_stub(*args: object, state: local.State | None, **options: object) -> local.State:
        # new tensors, because autograd makes them outputs; later steps update them in place
        return tuple(x.detach() for x in fresh) if state is None else state

    with mock.patch.multiple(
        local,
        forward=forward_stub,
        queries=lambda q, out, dout, row_max, row_sum, *args, **options: local.Queries(q, dout, row_max, row_sum, statistic),
        backward=lambda *args, **options: None,
    ):
        rounds = [_round(call, leaves, dout, arguments.calls) for _ in range(arguments.rounds)]
        if arguments.profile:
            _profile(_round, call, leaves, dout, arguments.calls)
    forward, backward = map(min, zip(*rounds))
    return forward, backward


def _round(call: Callable[[], torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor, calls: int) -> tuple[float, float]:
    """Microseconds per call, forward and backward, of the process's own CPU time."""
    marks = [time.process_time()]
    outs = [call() for _ in range(calls)]
    marks.append(time.process_time())
    for out in outs:
        torch.autograd.grad(out, leaves, dout)
    marks.append(time.process_time())
    forward, backward = ((b - a) / calls * 1e6 for a, b in zip(marks, marks[1:]))
    return forward, backward


def run_rank(arguments: argparse.Namespace) -> None:
    """One rank of `--real`."""
    on_gpu = arguments.device == "cuda"
    case = make_case(arguments.tokens, group_of(dist.get_world_size(), arguments), arguments)
    case = replace(case, score=parts(case.heads, case.device)[arguments.score])
    names = arguments.methods or [name + "+symmetric" * on_gpu for name in ("ring", "waves-1", "gather", "default")]
    first = dist.get_rank() == 0
    if first:
        what = f"microseconds per call on the host, {case.tokens} tokens on {case.ranks.size} ranks"
        print(f"{'method':>20}  {'forward':>8} {'backward':>8}   {what}")
    for name in names:
        layers = Layers([make_method(name, case) for _ in range(arguments.layers)])
        options = layers, case.ranks.transports[""], case.device
        calls_of(*options)  # the first calls compile
        with torch.autograd.set_multithreading_enabled(not arguments.one_thread):
            times = [pair for _ in range(arguments.rounds) for pair in calls_of(*options)]
        forward, backward = slowest([1e6 * median(column) for column in zip(*times)], case.device)
        if first:
            print(f"{name:>20}  {forward:>8.0f} {backward:>8.0f}", flush=True)
        if arguments.profile:
            (_profile if first else lambda function, *options: function(*options))(calls_of, *options, arguments.calls)


class Layers:
    """Calls of one method, each on inputs of its own, as the layers of a model: one after another, then one backward pass through all."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = methods

    def forward(self) -> None:
        for method in self.methods:
            method.forward()

    def backward(self) -> None:
        outs, leaves, douts = zip(*[(x.out, x.leaves, x.dout) for x in self.methods])
        with self.methods[0].surroundings():
            torch.autograd.grad(outs, [leaf for each in leaves for leaf in each], douts)
        for method in self.methods:
            del method.out


def calls_of(layers: Layers, ranks: Ranks, device: str, calls: int = 4) -> list[tuple[float, float]]:
    """Seconds of the host for a layer's forward and backward, in each of some passes one after another.

    Hosts begin each pass together. Otherwise the first to finish a backward would wait for the others in its next forward.
    """
    count = len(layers.methods)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY * count)
    times = []
    for _ in range(calls):
        seconds = []
        for step in (layers.forward, layers.backward):
            ranks.all_gather_control(b"begin")
            began = time.perf_counter()
            step()
            seconds.append((time.perf_counter() - began) / count)
        times.append((seconds[0], seconds[1]))
    return times


def _profile(function: Callable, *options: object) -> None:
    """Call a function and print where its time goes."""
    profile = cProfile.Profile()
    profile.runcall(function, *options)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
