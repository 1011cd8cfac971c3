"""`ring_attention`, exact attention over a sequence that is sharded over ranks, and `attend`, its local part.

Shapes: b batch, s_local tokens of this rank, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""

from __future__ import annotations

import inspect
from typing import Literal, NoReturn, overload

import torch

from . import check
from .geometry.layout import Layout
from .geometry.mask import Mask, causal
from .geometry.plan import make_local_plan
from .partial import Partial, Stats
from .runtime.agree import refusing
from .runtime.calls import LocalCall, RingCall, compiled_call, keys_of
from .runtime.groups import Group, get_context, group_names
from .runtime.op import UNMODIFIED, Modifying, attention
from .runtime.order import label
from .runtime.rank_attention import RankAttention
from .runtime.ready import learn, replay_of
from .schedule.program import local_program
from .schedule.schedules import Schedule
from .scores import MOST_PLACES, ScoreMod
from .transport import Alone

_DEFAULT_MASK = causal()
_FIRST = 0  # position
_STATS = "pass True to get out and its statistics"


@overload
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = ...,
    kv_layout: Layout | None = ...,
    q_offset: int = ...,
    mask: Mask | None = ...,
    group: Group | None = ...,
    softmax_scale: float | None = ...,
    score: ScoreMod | None = ...,
    schedule: Schedule | None = ...,
    name: str | None = ...,
    return_stats: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = ...,
    kv_layout: Layout | None = ...,
    q_offset: int = ...,
    mask: Mask | None = ...,
    group: Group | None = ...,
    softmax_scale: float | None = ...,
    score: ScoreMod | None = ...,
    schedule: Schedule | None = ...,
    name: str | None = ...,
    return_stats: Literal[True],
) -> tuple[torch.Tensor, Stats]: ...


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | None = None,
    kv_layout: Layout | None = None,
    q_offset: int = _FIRST,
    mask: Mask | None = None,
    group: Group | None = None,
    softmax_scale: float | None = None,
    score: ScoreMod | None = None,
    schedule: Schedule | None = None,
    name: str | None = None,
    return_stats: bool = False,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, Stats]:
    """softmax(softmax_scale * q k^T) v over the whole sequence, of which each rank holds a shard. A differentiable collective.

    Every rank of the group calls it with its own shards and the same options. Source: Ring Attention (Liu et al. 2023), with the
    block-merge formula of `partial.py` and the backward pass of FlashAttention (Dao et al. 2022, algorithm 4).

    Args:
        q: (b, s_local, h, d), bf16, fp16 or fp32, or fp64 on CPU; d up to 512.
        k: (b, sk_local, hk, d) with h % hk == 0 (MHA, GQA, MQA); sk_local is s_local unless there is a kv_layout.
        v: (b, sk_local, hk, d_v), d_v up to 512.
        layout: which rank holds which positions; by default `default_layout` of the mask (zigzag for causal), with the sequence
            length taken from the shards.
        kv_layout: the layout of k and v, if they are other tokens than q: an encoder's states, or all tokens so far of a document
            whose latest chunk q is. `layout` is then that of q, and must be given.
        q_offset: with a kv_layout, the position of q's first token among the keys, for masks and scores: with `causal()`, query i
            sees the keys up to q_offset + i.
        mask: which pairs are live; causal by default.
        group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group (one rank if none is initialised); or a 2-D
            DeviceMesh with the axes "ring" and "heads", or `hybrid(...)`: an all-to-all to heads along one axis, a ring along the other;
            or a transport, `symmetric(...)` or `process_group(...)`.
        softmax_scale: 1/sqrt(d) by default.
        score: what else happens to scores and weights, from `score(...)`: a softcap, ALiBi, a relative bias, sinks, dropout.
        schedule: `ring()`, `gather()`, `waves(width)` or `double_ring(ranks_per_node)`; by default `default_schedule` of the plan. With
            a kv_layout the default may be `pass_q()`, which moves queries, if that moves fewer bytes. The result is the same up to
            rounding.
        name: what this call is called on every rank, such as its layer. Ranks that make calls of equal options in different orders get an
            error if the names differ; without names, if the lines that call differ.
        return_stats: also return `Stats`: row_max, row_sum and lse, (b, h, s_local), fp32 (fp64 for fp64).

    Returns out (b, s_local, h, d_v) in q's dtype; rows with nothing live are 0. Raises ValueError for bad input, and on every
    rank if ranks disagree or one refuses its input; and TypeError for `unknown`, other names, which says what takes their place here.

    After the same call has been made once, all ranks together can capture it in a CUDA graph.

    Without a layout, more than 128 heads of q and k alike, with at most 128 tokens, are logged as a warning, once: they may be
    (b, h, s, d).

    The same call gives the same bits. For the gradient of q on Hopper GPUs, this needs `torch.use_deterministic_algorithms(True)`.

    >>> import torch, ringattn as ra
    >>> q = k = v = torch.randn(1, 16, 2, 8)
    >>> ra.ring_attention(q, k, v, mask=ra.causal()).shape
    torch.Size([1, 16, 2, 8])
    """
    if unknown:
        raise check.unknown("ring_attention", unknown)
    if torch.compiler.is_compiling():
        check.tensors(q, k, v)
        if check.transformed():
            raise ValueError(f"compiled attention is differentiated {check.TRANSFORMED}")
        check.instance("return_stats", return_stats, bool, _STATS)
        scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        digests = [None if x is None else x.digest for x in (layout, mask, schedule, score)]
        keys = None if kv_layout is None else kv_layout.digest
        number = compiled_call(group_names(group), *digests, name=name, kv_layout=keys, q_offset=q_offset)
        results = attention(q, k, v, number, scale, _modifying(q, score))
        return (results[0], Stats(*results[1:])) if return_stats else results[0]
    context = get_context(group)
    mask = _DEFAULT_MASK if mask is None else mask
    kind = score.kind if isinstance(score, ScoreMod) else None
    options = layout, mask, schedule, softmax_scale, kind
    alike = kv_layout is None and q_offset is _FIRST and (score is None or (kind is not None and kind.replayed))
    if alike and (return_stats is True or return_stats is False):
        results = replay_of(context, q, k, v, options, score, name)
        if results is not None:
            return (results[0], Stats(*results[1:])) if return_stats else results[0]
    with refusing(context.ranks):
        check.tensors(q, k, v)
        check.backward_mode(q=q, k=k, v=v)
        check.instance("return_stats", return_stats, bool, _STATS)
        check.instance("mask", mask, Mask, check.BUILD_A_MASK)
        if layout is not None:
            check.instance("layout", layout, Layout, check.BUILD_A_LAYOUT)
        keys = None if kv_layout is None and q_offset is _FIRST else keys_of(layout, kv_layout, q_offset)
        if schedule is not None:
            check.instance("schedule", schedule, Schedule, check.BUILD_A_SCHEDULE)
        if name is not None:
            check.instance("name", name, str, "pass a text, the same on every rank")
        scale = check.softmax_scale(softmax_scale, q.shape[3])
        if score is not None:
            _check_score(score, q)
    call = RingCall(context, layout, mask, schedule, label(name), kind, keys=keys)
    modifying = _modifying(q, score)
    results = attention(q, k, v, call, scale, modifying)
    if alike:
        learn(context, call, q, k, v, options, scale, modifying)
    return (results[0], Stats(*results[1:])) if return_stats else results[0]


_signature = inspect.signature(ring_attention)
# what it takes: the other names are there for the sake of their error
ring_attention.__signature__ = _signature.replace(parameters=list(_signature.parameters.values())[:-1])  # pyrefly: ignore[missing-attribute]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    q_positions: torch.Tensor | None = None,
    k_positions: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    score: ScoreMod | None = None,
) -> Partial:
    """Attention of local queries to local keys: a `Partial` to `merge` with partials of other keys, then `finish`. Differentiable.

    Args:
        q: (b, sq, h, d); k: (b, sk, hk, d); v: (b, sk, hk, d_v), dtypes and sizes as for `ring_attention`.
        mask: which pairs of global positions are live; causal by default.
        q_positions: (sq,) integers, the global position of each query; 0, 1, 2, ... by default.
        k_positions: (sk,) integers, the global position of each key; 0, 1, 2, ... by default.
        softmax_scale: 1/sqrt(d) by default.
        score: what else happens to scores and weights, from `score(...)`. Each partial counts sinks: give them to one call of those that
            you merge. Give all of these calls one seed for dropout.

    Returns out (b, sq, h, d_v), normalised over these keys, and row_max, row_sum (b, h, sq), all fp32 (fp64 for fp64). Nothing is
    communicated. Raises ValueError for bad input.
    """
    mask = _DEFAULT_MASK if mask is None else mask
    check.qkv(q, k, v)
    check.instance("mask", mask, Mask, check.BUILD_A_MASK)
    scale = check.softmax_scale(softmax_scale, q.shape[3])
    queries = check.positions("q_positions", q_positions, q.shape[1], "q")
    keys = check.positions("k_positions", k_positions, k.shape[1], "k")
    if score is not None:
        _check_score(score, q)
    seq_len = max([mask.min_length] + [int(p.max()) + 1 for p in (queries, keys) if len(p)])
    kind = None if score is None else score.kind
    placed = kind is not None and kind.placed
    if placed and seq_len > MOST_PLACES:
        raise ValueError(f"there are positions up to {seq_len - 1}, but scores that depend on positions take at most 2**31")
    tiles, q_order, k_order = make_local_plan(queries, keys, mask, seq_len, placed)
    call = LocalCall(RankAttention(Alone(), local_program(tiles), q_order, k_order), kind)
    return Partial(*attention(q, k, v, call, scale, _modifying(q, score)))


def _check_score(score: ScoreMod, q: torch.Tensor) -> None:
    check.instance("score", score, ScoreMod, check.BUILD_A_SCORE)
    score.check(q)


def _modifying(q: torch.Tensor, score: ScoreMod | None) -> Modifying:
    """The tensors of a score as the operators take them."""
    return UNMODIFIED if score is None else score.tensors(torch.promote_types(q.dtype, torch.float32))
