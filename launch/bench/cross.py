"""Times cross-attention between sharded queries and sharded keys: ours by schedule, and gathering all keys and values for one dense call.

Queries and keys are sharded evenly; every query sees every key, as a decoder's tokens see an encoder's states. Methods take turns, forward
and backward, in one run; a time is that of the slowest rank, the median over the rounds. Methods:

    default, ring, gather, pass_q    `ring_attention` with that schedule, over copy engines where ranks have GPUs
    gather+cuDNN                     NCCL's all-gather of K and V, cuDNN's attention, and a reduce-scatter of dK and dV in their dtype
                                     (on a CPU: gloo, and torch's own attention)

The results of all methods are compared. `--device cpu` needs toy sizes.
"""

from __future__ import annotations

import argparse
import random
import re
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringattn as ra

from .ring_measure import once, rest
from .shared.cases import Tensors
from .shared.methods import Method, count_sent, schedule
from .shared.peers import Contestant
from .shared.ranks import add_ranks, group_of, slowest, start_ranks
from .shared.timing import spread

_PEER = "gather+cuDNN"
_METHODS = ("default", "ring", "gather", "pass_q", _PEER)
_LARGEST_ERROR = 2e-2  # of the norm, in bf16

# later versions of torch have other names for the same
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cases = ["65536x4096", "4096x262144"]
    parser.add_argument("--cases", nargs="+", default=cases, help="queries x keys, of all ranks together (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=_METHODS, default=list(_METHODS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=8, help="after two that warm up (default: %(default)s)")
    add_ranks(parser)


def main(arguments: argparse.Namespace) -> None:
    for case in arguments.cases:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", case):
            raise SystemExit(f"bench cross: {case!r} is no case: give queries x keys, such as 65536x4096")
    if min(arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.rounds) < 1 or arguments.heads % arguments.kv_heads:
        raise SystemExit("bench cross: sizes and rounds must be at least 1, and kv_heads must divide heads")
    start_ranks(run_rank, arguments)


def run_rank(arguments: argparse.Namespace) -> None:
    """One rank; the first one prints."""
    ranks, first = group_of(dist.get_world_size(), arguments), dist.get_rank() == 0
    if first:
        print(f"heads {arguments.heads}:{arguments.kv_heads} of {arguments.head_dim}, {ranks.size} ranks; TFLOP/s a GPU")
        ratio = f"of {_PEER}: forward, both" if _PEER in arguments.methods else f"of {arguments.methods[0]}: forward, both"
        print(f"{'case':>16} {'method':>13} {'forward ms':>11} {'both ms':>9} {'TFLOP/s':>9} {'sent MB':>8}   {ratio}", flush=True)
    for case in arguments.cases:
        queries, keys = map(int, case.split("x"))
        if queries % ranks.size or keys % ranks.size:
            raise SystemExit(f"bench cross: case {case} does not divide among {ranks.size} ranks, as {_PEER} needs")
        methods = make_methods(queries, keys, ranks, arguments)
        compare(methods, arguments.device)
        rows = measured(methods, arguments)
        base = rows.get(_PEER) or next(iter(rows.values()))
        flop = 4 * queries * keys * arguments.heads * arguments.head_dim / ranks.size
        for name, (forward, both, sent) in rows.items() if first else ():
            rates = f"{base[0] / forward:6.2f} {base[1] / both:6.2f}"
            moved = f"{sent / 1e6:8.1f}" if sent else f"{'-':>8}"
            print(
                f"{case:>16} {name:>13} {1e3 * forward:>11.3f} {1e3 * both:>9.3f} {3.5 * flop / both / 1e12:>9.4g} {moved}   {rates}",
                flush=True,
            )
        del methods


def make_methods(queries: int, keys: int, ranks, arguments: argparse.Namespace) -> dict[str, Method]:
    """By name, all on the same random shards."""
    layout, kv_layout = (ra.contiguous(n, ranks.size) for n in (queries, keys))
    transport = ranks.transports.get("symmetric", ranks.transports[""])
    on_gpu, d = arguments.device == "cuda", arguments.head_dim
    torch.manual_seed(dist.get_rank())
    sizes = (queries, arguments.heads), (keys, arguments.kv_heads), (keys, arguments.kv_heads), (queries, arguments.heads)
    options = dict(device=arguments.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    inputs = [torch.randn(1, n // ranks.size, h, d, **options) for n, h in sizes]

    def contestant(name: str) -> Contestant:
        if name == _PEER:
            return Contestant(layout, lambda leaves: gathered(leaves, ranks.group))
        chosen = ra.pass_q() if name == "pass_q" else schedule(name)
        call = dict(layout=layout, kv_layout=kv_layout, mask=ra.full(), schedule=chosen, group=transport)
        return Contestant(layout, lambda leaves: ra.ring_attention(*leaves, **call), transport=transport)

    return {name: Method(contestant(name), tuple(x.detach() for x in inputs)) for name in arguments.methods}


def gathered(leaves: Tensors, group: dist.ProcessGroup) -> torch.Tensor:
    """What one would write with torch alone."""
    q, k, v = leaves
    k, v = (_AllGather.apply(x, group) for x in (k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*heads_first, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


class _AllGather(torch.autograd.Function):
    """(1, s_local, h, d) of each rank to (1, s, h, d)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = x.new_empty(group.size() * x.shape[1], *x.shape[2:])
        _ALL_GATHER(whole, x[0].contiguous(), group=group)
        return whole[None]

    @staticmethod
    def backward(ctx, dx: torch.Tensor):
        whole = dx[0].contiguous()
        own = whole.new_empty(len(whole) // ctx.group.size(), *whole.shape[1:])
        _REDUCE_SCATTER(own, whole, group=ctx.group)
        return own[None], None


def compare(methods: dict[str, Method], device: str) -> None:
    """Stop unless all methods compute the same on every rank."""
    (first, wanted), *others = [(name, method.results()) for name, method in methods.items()]
    for name, found in others:
        errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, wanted, strict=True)]
        error = max(slowest(errors, device))
        if not error < _LARGEST_ERROR:
            raise SystemExit(f"bench cross: {name} does not compute what {first} does: the relative difference is {error:.2g}")


def measured(methods: dict[str, Method], arguments: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """By name: seconds of a forward pass, of both, and the bytes that a rank sends; of the slowest rank."""
    sent = {}
    for name, method in methods.items():
        with count_sent(method) as messages:
            method.results()
        sent[name] = sum(messages)
    times, order, shuffler = {name: [] for name in methods}, list(methods), random.Random(0)
    for _ in range(arguments.rounds + 1):
        shuffler.shuffle(order)
        for name in order:
            rest(arguments.device)
            times[name].append(slowest(once(methods[name], arguments.device)[:2], arguments.device))
    found = {}
    for name, (_, *rounds) in times.items():
        forward, both = (spread(list(column)).median for column in zip(*rounds))
        found[name] = forward, both, slowest([sent[name]], arguments.device)[0]
    return found
