"""Dense attention in any dtype with any mask, written as simply as possible: the oracle of all tests.

Shapes: b batch, s tokens of q, sk of k, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""

from __future__ import annotations

import numpy as np
import torch

from . import check
from .device.philox import kept
from .geometry.mask import Mask, causal
from .partial import Stats
from .scores import ScoreMod


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    q_offset: int | None = None,
    softmax_scale: float | None = None,
    score: ScoreMod | None = None,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, Stats]:
    """softmax(softmax_scale * q k^T) v over the live pairs of one whole sequence, materialising (b, h, s, sk) scores.

    Args:
        q: (b, s, h, d), of any floating-point dtype.
        k: (b, sk, hk, d) with h % hk == 0, in q's dtype.
        v: (b, sk, hk, d_v), in q's dtype.
        mask: causal by default, like `ring_attention`.
        q_offset: the position of the first query among the keys, which may then be more or fewer than the queries. By default q, k and v
            hold the same positions.
        softmax_scale: 1/sqrt(d) by default.
        score: what else happens to scores and weights, as for `ring_attention`.
        return_stats: also return `Stats` (b, h, s) in the inputs' dtype (fp32 for bf16 and fp16).

    Scores, weights and products are rounded to the inputs' dtype wherever PyTorch would round them; the softmax itself runs in
    fp32 or wider. Rows with nothing live are 0. Returns (b, s, h, d_v). Differentiable. Raises ValueError for bad input.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.dense_tensor(name, x)
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(
                f"{name} has dtype {x.dtype} and shape {tuple(x.shape)}, but must hold floating-point numbers, in the shape "
                "(batch, tokens, heads, head_dim)"
            )
    check.fit(q, k, v)
    if q_offset is None:
        check.same_tokens(q, k)
    begin = 0 if q_offset is None else check.integer("q_offset", q_offset, most=check.MAX_TOKENS)
    groups = q.shape[2] // k.shape[2]
    if not q.shape[3]:
        raise ValueError("q has head_dim 0, but it must be at least 1")
    scale = check.softmax_scale(softmax_scale, q.shape[3])
    mask = causal() if mask is None else mask
    check.instance("mask", mask, Mask, check.BUILD_A_MASK)
    if score is not None:
        check.instance("score", score, ScoreMod, check.BUILD_A_SCORE)
        score.check(q)
    end = begin + q.shape[1]
    live = mask.dense(max(end, k.shape[1]))[begin:end, : k.shape[1]].to(q.device)
    keys = k.repeat_interleave(groups, dim=2)
    values = v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    if score is not None:
        scores = _modified(scores, score, begin)
    scores = scores.masked_fill(~live, float("-inf")).to(torch.promote_types(q.dtype, torch.float32))
    if score is not None and score.sinks is not None:
        sinks = score.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    row_max = (
        scores.amax(-1, keepdim=True).detach() if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    )
    # a row with nothing live has row_max = -inf: avoid inf - inf
    weights = (scores - row_max.masked_fill(row_max == float("-inf"), 0)).exp()
    row_sum = weights.sum(-1, keepdim=True)
    weights = (weights / row_sum.masked_fill(row_sum == 0, 1))[..., : k.shape[1]].to(q.dtype)
    if score is not None and score.dropout:
        weights = weights * kept_pairs(score, weights.shape, begin).to(weights.device) / (1 - score.dropout)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return (out, Stats(row_max[..., 0], row_sum[..., 0])) if return_stats else out


def _modified(scores: torch.Tensor, score: ScoreMod, q_offset: int) -> torch.Tensor:
    """Scores (b, h, s, sk) with the softcap, ALiBi and relative bias."""
    s, sk = scores.shape[-2:]
    if score.softcap is not None:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    position = torch.arange(q_offset, q_offset + s, device=scores.device)
    distance = torch.arange(sk, device=scores.device) - position[:, None]  # of the key from the query
    if score.alibi is not None:
        slopes = score.alibi.to(scores.dtype)[..., None, None]
        scores = scores - slopes * distance.abs()
    if score.bias is not None:
        buckets = score.bias.buckets
        edges, of_piece = (torch.tensor(x, dtype=torch.int64, device=scores.device) for x in (buckets.edges, buckets.of_piece))
        bucket = of_piece[torch.searchsorted(edges, distance, right=True)]  # (s, sk)
        scores = scores + score.bias.table.to(scores.dtype)[:, bucket]
    return scores


def kept_pairs(score: ScoreMod, shape: torch.Size, q_offset: int = 0) -> torch.Tensor:
    """Which pairs (b, h, s, sk) the dropout of a score keeps."""
    *_, drawn = score.tensors(torch.float64)
    b, h, s, sk = shape
    modifiers = score.kind.modifiers(None, None, drawn, h)
    assert modifiers is not None and modifiers.dropout is not None
    return torch.from_numpy(kept(modifiers.dropout, b, h, np.arange(q_offset, q_offset + s), np.arange(sk)))
