"""Times one layer with a state, forward and backward, on one GPU and on all: Qwen3-Next's gated delta rule (gdn), and Mamba-2.

A layer is whole: projections, a short convolution, the recurrence, a gated norm. `--tokens` are of each GPU, so that all ranks together
have a sequence as many times as long, in a contiguous layout. Methods take turns in one run; a time is that of the slowest rank, the median
of the rounds. Methods:

    ours     ringattn: fla's kernels where fla is installed, else plain torch
    torch    ringattn with plain torch on each rank
    fla      flash-linear-attention, called in one process without ringattn, by the functions that have a backward pass there; one GPU only

Columns: milliseconds; thousands of tokens a second and GPU; MB that a rank sends, as counted, forward and backward; GiB of a GPU beyond
inputs and weights; and the rate's ratio to that of the same method (of fla, on one GPU) on one GPU. What one GPU's memory does not hold is
left out.

First, each layer runs over all ranks on `--check` tokens a rank in fp32 with plain torch, and as `ours` runs it, and once in one process in
fp32: the relative differences of out, the gradient of x, and those of all weights. `--small` takes layers for CPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.transport import Alone, Transport

from .linear_layers import LAYERS, FlaAlone, Sharded, StatefulLayer, TokenPath, make_layer
from .ring_measure import once, rest
from .shared.cases import Tensors
from .shared.methods import Method, count_sent
from .shared.peers import Contestant
from .shared.ranks import RankGroup, add_ranks, group_of, slowest, start_ranks
from .shared.timing import spread

_METHODS = ("ours", "torch", "fla")
_LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 4e-2}  # of the norm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1 << 16, 1 << 18, 1 << 20], help="of each GPU (default: %(default)s)"
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="(default: all)")
    parser.add_argument("--methods", nargs="+", choices=_METHODS, help="(default: ours, and fla where it is installed)")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up (default: %(default)s)")
    parser.add_argument("--check", type=int, default=4096, help="tokens a rank of the comparison (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="layers of a few channels")
    add_ranks(parser)


def main(arguments: argparse.Namespace) -> None:
    if min(*arguments.tokens, arguments.rounds, arguments.check) < 1:
        raise SystemExit("bench linear: tokens, rounds and check must be at least 1")
    has_fla = importlib.util.find_spec("fla") is not None and arguments.device == "cuda"
    if arguments.methods is None:
        arguments.methods = ["ours", "fla"] if has_fla else ["ours"]
    if "fla" in arguments.methods and not has_fla:
        raise SystemExit("bench linear: method fla needs flash-linear-attention (pip install fla-core) and a GPU")
    start_ranks(run_rank, arguments)


def run_rank(arguments: argparse.Namespace) -> None:
    """One rank; the first one prints."""
    whole = group_of(dist.get_world_size(), arguments)
    groups = [whole] if whole.size == 1 else [group_of(1, arguments), whole]
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    for name in arguments.layers:
        for label, errors in compare(name, whole, arguments):
            worst = "  ".join(f"{what} {error:.1e}" for what, error in zip(("out", "dx", "weights"), errors))
            say(f"{name}, {whole.size} ranks, {label}: relative to one process in fp32: {worst}", flush=True)
    say(f"{'layer':>7} {'GPUs':>4} {'tokens a GPU':>12} {'method':>6} {'forward ms':>11} {'both ms':>10} {'ktok/s':>9} ", end="")
    say(f"{'sent MB':>8} {'GiB':>6}   of one GPU", flush=True)
    for name in arguments.layers:
        for tokens in arguments.tokens:
            rows = measured(name, tokens, groups, arguments)
            for (size, method), row in rows.items():
                base = rows.get((1, "fla" if size == 1 else method))
                ratio = "" if base is None else f"{base.both / row.both:6.2f}"
                say(
                    f"{name:>7} {size:>4} {tokens:>12,} {method:>6} {1e3 * row.forward:>11.3f} {1e3 * row.both:>10.3f} "
                    f"{tokens / row.both / 1e3:>9.4g} {row.sent / 1e6:>8.2f} {row.memory / 2**30:>6.2f}   {ratio}",
                    flush=True,
                )


@dataclass
class Row:
    """Of the slowest rank: seconds of a forward pass and of both, the bytes it sends, and the most bytes it holds beyond inputs."""

    forward: float
    both: float
    sent: float
    memory: float


class LayerMethod(Method):
    """A layer with one way of mixing, on random tokens of this rank."""

    def __init__(
        self, name: str, mixing: TokenPath, tokens: int, layout: ra.Layout, transport: object, arguments: argparse.Namespace
    ):
        dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
        layer = make_layer(name, arguments.device, dtype, small=arguments.small)
        x, dout = (torch.randn(1, tokens, layer.out.out_features, device=arguments.device, dtype=dtype) for _ in range(2))
        contestant = Contestant(layout, lambda leaves: layer.mix(leaves[0], mixing), transport=transport)
        super().__init__(contestant, (x, *layer.parameters(), dout))


def make_methods(name: str, tokens: int, ranks: RankGroup, arguments: argparse.Namespace) -> Iterator[tuple[str, Method]]:
    """By name, of a rank that takes part."""
    layout, transport = ra.contiguous(tokens * ranks.size, ranks.size), transport_of(ranks)
    for method in arguments.methods:
        if method == "fla" and ranks.size > 1:
            continue
        ours = Sharded(layout, transport, ra.torch_kernels() if method == "torch" else None)
        mixing = FlaAlone() if method == "fla" else ours
        yield method, LayerMethod(name, mixing, tokens, layout, None if method == "fla" else transport, arguments)


def measured(name: str, tokens: int, groups: list[RankGroup], arguments: argparse.Namespace) -> dict[tuple[int, str], Row]:
    """By number of GPUs and method."""
    device, found, names = arguments.device, {}, list(arguments.methods)
    for ranks in groups:
        methods = dict(make_methods(name, tokens, ranks, arguments)) if ranks.takes_part else {}
        names = [method for method in names if method != "fla" or ranks.size == 1]
        sent, memory = {}, {}
        for method in list(names):
            sent[method], memory[method], fits = first_turn(methods.get(method), ranks.size, device)
            if not fits:
                names.remove(method)
                methods.pop(method, None)
                if dist.get_rank() == 0:
                    print(f"{name:>7} {ranks.size:>4} {tokens:>12,} {method:>6}   out of memory", flush=True)
        times, order, shuffler = {method: [] for method in names}, list(names), random.Random(0)
        for _ in range(arguments.rounds):
            shuffler.shuffle(order)
            for method in order:
                rest(device)
                seconds = once(methods[method], device)[:2] if methods else (0.0, 0.0)
                times[method].append(slowest(seconds, device))
        for method in names:
            forward, both = (spread(list(column)).median for column in zip(*times[method]))
            found[ranks.size, method] = Row(forward, both, *slowest([sent[method], memory[method]], device))
        del methods
    return found


def first_turn(method: Method | None, size: int, device: str) -> tuple[float, float, bool]:
    """The bytes that this rank sends in a step, the most that it holds, and whether one GPU's memory was enough; of `size` ranks.

    Zeros for a rank that takes no part.
    """
    sent, memory, failed = 0.0, 0.0, 0.0
    if method is not None:
        try:
            sent, memory = _first_turn(method, device)
        except torch.OutOfMemoryError:
            if size > 1:  # other ranks wait for this one
                raise
            failed = 1.0
    return sent, memory, not slowest([failed], device)[0]


def _first_turn(method: Method, device: str) -> tuple[float, float]:
    method.results()  # compiles kernels
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with count_sent(method) as messages:
        method.forward()
        method.backward()
    return sum(messages), torch.cuda.max_memory_allocated() - before if device == "cuda" else 0


def compare(name: str, ranks: RankGroup, arguments: argparse.Namespace) -> Iterator[tuple[str, list[float]]]:
    """What was run, and the relative differences of out, dx and the weights' gradients, the greatest of all ranks.

    Stops the program if one is too large.
    """
    device, rank, tokens = arguments.device, dist.get_rank(), arguments.check * ranks.size
    layout, alone = ra.contiguous(tokens, ranks.size), ra.contiguous(tokens, 1)
    draw = torch.Generator(device).manual_seed(1)
    layer = make_layer(name, device, torch.float32, small=arguments.small)
    x, dout = (torch.randn(1, tokens, layer.out.out_features, device=device, generator=draw) for _ in range(2))
    wanted = step(layer, x, dout, Sharded(alone, Alone(), ra.torch_kernels()))
    wanted = [*(ra.shard(each, layout, rank) for each in wanted[:2]), *wanted[2:]]
    options = [("plain torch in fp32", torch.float32, ra.torch_kernels())]
    if device == "cuda":
        options.append(("ours in bf16", torch.bfloat16, None))
    for label, dtype, kernels in options:
        layer = make_layer(name, device, dtype, small=arguments.small)
        shards = (ra.shard(each, layout, rank).to(dtype) for each in (x, dout))
        out, dx, *weights = step(layer, *shards, Sharded(layout, transport_of(ranks), kernels))
        for gradient in weights:
            dist.all_reduce(gradient)
        pairs = zip((out, dx, *weights), wanted, strict=True)
        out_error, dx_error, *rest_ = slowest([relative(found, other) for found, other in pairs], device)
        errors = [out_error, dx_error, max(rest_)]
        if not max(errors) < _LARGEST_ERROR[dtype]:
            raise SystemExit(f"bench linear: {name} on {ranks.size} ranks ({label}) differs from one process: {errors}")
        yield label, errors


def step(layer: StatefulLayer, x: torch.Tensor, dout: torch.Tensor, mixing: TokenPath) -> Tensors:
    """out, and the gradients of x and of all weights."""
    leaves = (x.detach().requires_grad_(), *layer.parameters())
    out = layer.mix(leaves[0], mixing)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def transport_of(ranks: RankGroup) -> Transport:
    """Copy engines where ranks have GPUs, as groups have by default."""
    return ranks.transports.get("symmetric", ranks.transports[""])


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of a difference, relative to the other's."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-300))
