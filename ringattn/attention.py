"""`ring_attention`, exact attention over a sequence that is sharded over ranks, and `attend`, its local part.

Shapes: b batch, s_local tokens of this rank, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from . import check, local, passes
from .agree import agree, refuse
from .context import Context, Group, get_context
from .layout import Layout
from .mask import Mask, causal
from .partial import Partial, Stats
from .plan import Order, make_local_plan
from .schedule import RowBytes, Schedule
from .score import Score
from .steps import Steps, local_steps
from .transport import Alone, Ranks, Transport
from .ulysses import HybridAttention, HybridRun


@overload
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = ...,
    mask: Mask | None = ...,
    group: Group | None = ...,
    softmax_scale: float | None = ...,
    schedule: Schedule | None = ...,
    return_stats: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = ...,
    mask: Mask | None = ...,
    group: Group | None = ...,
    softmax_scale: float | None = ...,
    schedule: Schedule | None = ...,
    return_stats: Literal[True],
) -> tuple[torch.Tensor, Stats]: ...


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    mask: Mask | None = None,
    group: Group | None = None,
    softmax_scale: float | None = None,
    schedule: Schedule | None = None,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, Stats]:
    """softmax(softmax_scale * q k^T) v over the whole sequence, of which each rank holds a shard; a collective, differentiable.

    Every rank of the group calls it with its own shards and the same options. Source: Ring Attention (Liu et al. 2023), with the
    block-merge formula of `partial.py` and the backward pass of FlashAttention (Dao et al. 2022, algorithm 4).

    Args:
        q: (b, s_local, h, d), bf16, fp16 or fp32, or fp64 on CPU; d up to 256.
        k: (b, s_local, hk, d) with h % hk == 0 (MHA, GQA, MQA).
        v: (b, s_local, hk, d_v), d_v up to 256.
        layout: who holds which positions; by default `default_layout` of the mask (zigzag for causal), with the sequence length
            taken from the shards.
        mask: which pairs are live; causal by default.
        group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group (with none initialised: one rank); or a 2-D
            DeviceMesh with the axes "ring" and "heads", or `hybrid(...)`: an all-to-all to heads along one axis, a ring along the other.
        softmax_scale: 1/sqrt(d) by default.
        schedule: `ring()`, `gather()`, `waves(width)` or `double_ring(ranks_per_node)`; by default `default_schedule` of the plan. The
            result is the same up to rounding.
        return_stats: also return `Stats`: row_max, row_sum and lse, (b, h, s_local), fp32 (fp64 for fp64).

    Returns out (b, s_local, h, d_v) in q's dtype; rows with nothing live are 0. Raises ValueError for bad input, and on every
    rank if ranks disagree or one refuses its input.

    >>> import torch, ringattn as ra
    >>> q = k = v = torch.randn(1, 16, 2, 8)
    >>> ra.ring_attention(q, k, v, mask=ra.causal()).shape
    torch.Size([1, 16, 2, 8])
    """
    mask = causal() if mask is None else mask
    context = get_context(group)
    ranks = context.ranks
    try:
        check.qkv(q, k, v)
        check.same_tokens(q, k)
        check.instance("mask", mask, Mask, "build one with causal(), documents(...) and the like")
        if layout is not None:
            _check_layout(layout, mask, ranks, q.shape[1])
        if schedule is not None:
            check.instance("schedule", schedule, Schedule, "build one with ring(), waves(width) and the like")
        if not isinstance(return_stats, bool):
            raise ValueError(f"return_stats is {return_stats!r}, but must be a bool")
        scale = check.softmax_scale(softmax_scale, q.shape[3])
        if context.hybrid is not None:
            context.hybrid.check_heads(q.shape[2])
        ranks.check_device(q.device)
    except ValueError as error:
        if ranks.size > 1:
            refuse(ranks, error)
        raise
    tokens = (q.shape[1],)
    if ranks.size > 1:
        facts = _facts(q, k, v, layout, mask, schedule, scale) | {"ranks per node": ranks.ranks_per_node}
        if context.hybrid is not None:
            facts |= context.hybrid.facts | {"return_stats": return_stats}
        tokens = agree(ranks, facts, q.shape[1])
        ranks.connect(q.device)
    if layout is None:
        layout = _default_layout(context, mask, tokens)
    kv_heads = k.shape[2] if context.hybrid is None else context.hybrid.kv_heads(q.shape[2], k.shape[2])
    route = context.route(layout, mask, schedule, RowBytes.of(k, v, kv_heads))
    q, k, v = (_in_order(x, route.order) for x in (q, k, v))
    if route.exchange is None:
        state = _Attention.apply(q, k, v, _Run(context.transport, route.steps, Score(scale), final=True))
    else:
        state = HybridAttention.apply(
            q, k, v, HybridRun(route.exchange, context.transport, route.steps, Score(scale), return_stats)
        )
    if not return_stats:
        return _restored(state[0], route.order, dim=1)
    part = _as_given(Partial(*state), route.order)
    return part.out, part.stats


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    q_positions: torch.Tensor | None = None,
    k_positions: torch.Tensor | None = None,
    softmax_scale: float | None = None,
) -> Partial:
    """Attention of local queries to local keys: a `Partial`, to `merge` with partials of other keys and `finish`. Differentiable.

    Args:
        q: (b, sq, h, d); k: (b, sk, hk, d); v: (b, sk, hk, d_v), dtypes and sizes as for `ring_attention`.
        mask: which pairs of global positions are live; causal by default.
        q_positions: (sq,) integers, the global position of each query; 0, 1, 2, ... by default.
        k_positions: (sk,) integers, likewise of each key.
        softmax_scale: 1/sqrt(d) by default.

    Returns out (b, sq, h, d_v), normalised over these keys, and row_max, row_sum (b, h, sq), all fp32 (fp64 for fp64). Communicates
    nothing. Raises ValueError for bad input.
    """
    mask = causal() if mask is None else mask
    check.qkv(q, k, v)
    check.instance("mask", mask, Mask, "build one with causal(), documents(...) and the like")
    scale = check.softmax_scale(softmax_scale, q.shape[3])
    queries = check.positions("q_positions", q_positions, q.shape[1], "q")
    keys = check.positions("k_positions", k_positions, k.shape[1], "k")
    seq_len = max([mask.min_length] + [int(p.max()) + 1 for p in (queries, keys) if len(p)])
    tiles, q_order, k_order = make_local_plan(queries, keys, mask, seq_len)
    run = _Run(Alone(), local_steps(tiles), Score(scale), final=False)
    out, row_max, row_sum = _Attention.apply(_in_order(q, q_order), _in_order(k, k_order), _in_order(v, k_order), run)
    return _as_given(Partial(out, row_max, row_sum), q_order)


@dataclass(frozen=True, eq=False)
class _Run:
    """What autograd carries besides tensors."""

    transport: Transport
    steps: Steps
    score: Score
    final: bool


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: _Run) -> local.State:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        # autocast would round the states and gradients between hops
        with torch.autocast(q.device.type, enabled=False):
            out, row_max, row_sum = passes.forward(run.transport, run.steps, run.score, q, k, v, final=run.final)
        ctx.save_for_backward(q, k, v, out, row_max, row_sum)
        ctx.run = run
        ctx.mark_non_differentiable(row_max)
        ctx.set_materialize_grads(False)
        return out, row_max, row_sum

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        dout, _, drow_sum = grads
        if torch.is_grad_enabled():
            raise ValueError("ring attention has no second derivative: call backward without create_graph=True")
        q, k, v, out, row_max, row_sum = ctx.saved_tensors
        run: _Run = ctx.run
        if dout is None:
            dout = torch.zeros_like(out)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        delta = local.delta(out, dout)
        if drow_sum is not None:
            # d lse = d row_sum * row_sum enters dS = P (dP - delta) as P d lse
            delta = delta - drow_sum * row_sum
        with torch.autocast(q.device.type, enabled=False):
            return *passes.backward(run.transport, run.steps, run.score, q, k, v, dout, row_max, row_sum, delta), None


def _check_layout(layout: Any, mask: Mask, ranks: Ranks, tokens: int) -> None:
    check.instance("layout", layout, Layout, "build one with zigzag(seq_len, world_size) and the like")
    if layout.world_size != ranks.size:
        raise ValueError(
            f"layout {layout!r} is for {layout.world_size} ranks, but the group has {ranks.size}: build it for the group"
        )
    held = layout.lengths[ranks.rank]
    if held != tokens:
        raise ValueError(
            f"q has {tokens} tokens, but rank {ranks.rank} of layout {layout!r} holds {held}: "
            "shard q, k and v with shard(x, layout, rank), or build the layout for this sequence length"
        )
    mask.check_length(layout.seq_len)


def _default_layout(context: Context, mask: Mask, tokens: tuple[int, ...]) -> Layout:
    layout = context.default_layout(mask, sum(tokens))
    if layout.lengths != tokens:
        odd = next(rank for rank, (held, got) in enumerate(zip(layout.lengths, tokens, strict=True)) if held != got)
        raise ValueError(
            f"q has {tokens[odd]} tokens on rank {odd}, but the default layout of {mask!r}, {layout!r}, "
            f"holds {layout.lengths[odd]} there: pass the layout that the shards were made with"
        )
    return layout


def _facts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout | None, mask: Mask, schedule: Schedule | None, scale: float
) -> dict[str, object]:
    """What must be equal on all ranks, under the names a user knows."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return {
        "function": "ring_attention",
        "batch size": q.shape[0],
        "number of query heads": q.shape[2],
        "number of key/value heads": k.shape[2],
        "head_dim": q.shape[3],
        "v's head_dim": v.shape[3],
        "dtype": q.dtype,
        "device": q.device.type,
        "softmax_scale": scale,
        "schedule": schedule,
        "requires_grad": needs_grad,
        "mask": f"{mask!r} ({mask.digest[:8]})",
        "layout": "the default" if layout is None else f"{layout!r} ({layout.digest[:8]})",
    }


def _in_order(x: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Rows in the order in which the plan counts them."""
    return x if order is None else order.sort(x, dim=1)


def _as_given(part: Partial, order: Order | None) -> Partial:
    """Rows back in the order they came in."""
    return Partial(_restored(part.out, order, 1), _restored(part.row_max, order, 2), _restored(part.row_sum, order, 2))


def _restored(x: torch.Tensor, order: Order | None, dim: int) -> torch.Tensor:
    return x if order is None else order.restore(x, dim)
