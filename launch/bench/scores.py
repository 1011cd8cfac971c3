"""Times attention with modified scores beside attention without, on one GPU: forward and backward of each part of `ringattn.score`.

Calls follow one another without a wait, and CUDA events time each. Medians in milliseconds, and ratios to the first row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch

import ringattn as ra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16384, help="(default: %(default)s)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="K/V heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="calls of each (default: %(default)s)")


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    h, d = arguments.heads, arguments.head_dim
    shapes = [(1, arguments.tokens, n, d) for n in (h, arguments.kv_heads, arguments.kv_heads)]
    q, k, v = leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    dout = torch.randn_like(q)
    first: tuple[float, float] | None = None
    for name, score in parts(h).items():
        forward = timed(lambda score=score: ra.ring_attention(q, k, v, score=score), arguments.rounds)
        out = ra.ring_attention(q, k, v, score=score)
        backward = timed(lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True), arguments.rounds)
        first = first or (forward, backward)
        print(
            f"{name:18} forward {forward:7.2f} ms, {forward / first[0]:5.2f}x    backward {backward:7.2f} ms, {backward / first[1]:5.2f}x",
            flush=True,
        )


def parts(h: int) -> dict[str, ra.ScoreMod | None]:
    """What is done to scores, by name; learned parts with their gradients."""
    slopes = ra.alibi_slopes(h).cuda()
    table, sinks = (torch.randn(shape, device="cuda", requires_grad=True) for shape in ((h, 32), (h,)))
    return {
        "none": None,
        "softcap": ra.score(softcap=30.0),
        "alibi": ra.score(alibi=slopes),
        "alibi, learned": ra.score(alibi=slopes.clone().requires_grad_()),
        "relative bias": ra.score(bias=ra.relative_bias(table, ra.t5_buckets(bidirectional=False))),
        "sinks": ra.score(sinks=sinks),
        "dropout": ra.score(dropout=0.1, seed=1),
    }


def timed(call: Callable[[], object], rounds: int) -> float:
    """Milliseconds of a call, the median."""
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in zip(events, events[1:]))
