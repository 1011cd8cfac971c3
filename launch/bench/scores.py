"""Times attention with modified scores beside attention without, on one GPU: forward and backward of each part of `ringattn.score`.

Calls follow one another without a wait, and CUDA events time each. Medians in milliseconds, and ratios to the first row. `--peers` times
torch's own beside them: FlexAttention's softcap and ALiBi, and the dropout of scaled_dot_product_attention (FlashAttention-2).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch

import ringattn as ra

from .shared.cases import parse_mask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16384, help="(default: %(default)s)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="K/V heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--mask", default="causal", help="causal, full, window:TOKENS or documents:NUMBER (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", help="some of the parts only, by name (default: all)")
    parser.add_argument("--peers", action="store_true", help="also time torch's FlexAttention and scaled_dot_product_attention")
    parser.add_argument("--rounds", type=int, default=10, help="calls of each (default: %(default)s)")


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    h, d = arguments.heads, arguments.head_dim
    shapes = [(1, arguments.tokens, n, d) for n in (h, arguments.kv_heads, arguments.kv_heads)]
    q, k, v = leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    dout = torch.randn_like(q)
    mask = parse_mask(arguments.mask, arguments.tokens)
    if arguments.peers and arguments.mask != "causal":
        raise ValueError(f"--peers are timed with a causal mask only, but --mask is {arguments.mask!r}")
    calls = {
        name: lambda score=score: ra.ring_attention(q, k, v, mask=mask, score=score) for name, score in parts(h, "cuda").items()
    }
    if arguments.peers:
        calls |= peers(q, k, v)
    first: tuple[float, float] | None = None
    for name, call in calls.items():
        if arguments.parts is not None and name not in arguments.parts:
            continue
        forward = timed(call, arguments.rounds)
        out = call()
        backward = timed(lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True), arguments.rounds)
        first = first or (forward, backward)
        print(
            f"{name:24} forward {forward:7.2f} ms, {forward / first[0]:5.2f}x    backward {backward:7.2f} ms, {backward / first[1]:5.2f}x",
            flush=True,
        )


def peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """torch's own attention with modified scores, causal; by name. Their heads come before their rows."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    s, h = q.shape[1:3]
    slopes, flex = ra.alibi_slopes(h).cuda(), torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, s, s, device="cuda")
    mods = {
        "FlexAttention": None,
        "FlexAttention, softcap": lambda score, b, h, i, j: 30.0 * torch.tanh(score / 30.0),
        "FlexAttention, alibi": lambda score, b, h, i, j: score - slopes[h] * (i - j),
    }

    def heads_first() -> list[torch.Tensor]:
        return [x.transpose(1, 2) for x in (q, k, v)]

    found = {
        name: lambda mod=mod: flex(*heads_first(), score_mod=mod, block_mask=mask, enable_gqa=True).transpose(1, 2)
        for name, mod in mods.items()
    }
    for dropout in (0.0, 0.1):
        found[f"torch's FlashAttention-2{', dropout' if dropout else ''}"] = lambda dropout=dropout: (
            torch.nn.functional.scaled_dot_product_attention(
                *heads_first(), is_causal=True, dropout_p=dropout, enable_gqa=True
            ).transpose(1, 2)
        )
    return found


def parts(h: int, device: str) -> dict[str, ra.ScoreMod | None]:
    """What is done to scores, by name; learned parts with their gradients."""
    slopes = ra.alibi_slopes(h).to(device)
    table, sinks = (torch.randn(shape, device=device, requires_grad=True) for shape in ((h, 32), (h,)))
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
