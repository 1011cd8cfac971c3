"""Attention to keys in pages, in plain torch, for devices without Triton kernels and for fp64; see `ringattn_kernels.paged`.

It goes through the pages of a sequence in pieces, and merges their partials by the block-merge formula. As in `blocked`, scores and
statistics are fp64.

Shapes: b sequences, t query tokens of each, h query heads, hk K/V heads, g = h / hk, d and d_v head dims.
"""

from __future__ import annotations

import torch

from ringattn_kernels.modifiers import Modifiers
from ringattn_kernels.page_table import PageTable

from ..partial import Partial, merge
from . import blocked

_TOGETHER = 1 << 14  # keys of a piece
_EXACT = torch.float64


def attend_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: PageTable,
    *,
    softmax_scale: float,
    window: int | None = None,
    modifiers: Modifiers | None = None,
    sinks: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
) -> blocked.State:
    """Attention of q (b, t, h, d), the last t tokens of each sequence, to what a rank holds of the tokens up to each of them.

    k: (pages, hk, page_size, d). v: (pages, hk, page_size, d_v). window: how many tokens before itself a query sees; None: all.
    packed: (b * t * h * (d_v + 2),), fp32 (fp64 for fp64), where out, row_max and row_sum are left in its dtype. Without it, sinks (h,)
    are counted, and out is in q's dtype.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    places = zip(table.lengths.tolist(), table.first.tolist(), table.pages.tolist(), strict=True)
    rows = []
    for i, (length, first, pages) in enumerate(places):
        own = None if modifiers is None or modifiers.slopes is None else modifiers.slopes[min(i, len(modifiers.slopes) - 1)]
        cap = None if modifiers is None else modifiers.softcap
        rows.append(_row(q[i : i + 1], k, v, (length, first, pages, table.ranks), softmax_scale, window, cap, own))
    out, row_max, row_sum = (torch.cat(x) for x in zip(*((part.out, part.row_max, part.row_sum) for part in rows)))
    if packed is not None:
        state = blocked.settled((out, row_max, row_sum), dtype, dtype)
        packed.copy_(torch.cat([x.flatten() for x in state]))
        return state
    if sinks is not None:
        out, row_max, row_sum = blocked.with_sinks(out, row_max, row_sum, sinks.to(_EXACT))
    return blocked.settled((out, row_max, row_sum), q.dtype, dtype)


def merge_packed(packed: torch.Tensor, q: torch.Tensor, d_v: int, sinks: torch.Tensor | None = None) -> blocked.State:
    """All ranks' partials, packed (ranks, b * t * h * (d_v + 2)), merged in the order of ranks; out is in q's dtype."""
    b, t, h, _ = q.shape
    total = None
    for rank in packed.to(_EXACT):
        out, row_max, row_sum = rank.split([b * t * h * d_v, b * t * h, b * t * h])
        part = Partial(out.view(b, t, h, d_v), row_max.view(b, h, t), row_sum.view(b, h, t))
        total = part if total is None else merge(total, part)
    assert total is not None
    state = total.out, total.row_max, total.row_sum
    if sinks is not None:
        state = blocked.with_sinks(*state, sinks.to(_EXACT))
    return blocked.settled(state, q.dtype, packed.dtype)


def _row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    place: tuple[int, int, list[int], int],
    softmax_scale: float,
    window: int | None,
    cap: float | None,
    slopes: torch.Tensor | None,
) -> Partial:
    """The partial of one sequence, q (1, t, h, d), in fp64. place: its length, first page and pages, and the number of ranks."""
    length, first, pages, ranks = place
    _, t, h, _ = q.shape
    _, hk, page_size, d_v = v.shape
    positions = torch.arange(length - t, length, device=q.device)
    lowest = 0 if window is None else max(0, length - t - window)
    begin, end = (max(0, -((first - page) // ranks)) for page in (lowest // page_size, -(-length // page_size)))
    empty = (q.new_full((1, h, t), x, dtype=_EXACT) for x in (float("-inf"), 0.0))
    total = Partial(q.new_zeros(1, t, h, d_v, dtype=_EXACT), *empty)
    queries = q[0].to(_EXACT).unflatten(1, (hk, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # (hk, g * t, d)
    step = max(1, _TOGETHER // page_size)
    for column in range(begin, end, step):
        columns = torch.arange(column, min(column + step, end), device=q.device)
        here = torch.tensor(pages[column : column + len(columns)], device=q.device)
        at = (
            (first + columns * ranks)[:, None] * page_size + torch.arange(page_size, device=q.device)
        ).flatten()  # positions of keys
        live = at <= positions[:, None]
        if window is not None:
            live &= at >= positions[:, None] - window
        keys, values = (x[here].transpose(0, 1).flatten(1, 2).to(_EXACT) for x in (k, v))  # (hk, n, d)
        scores = (queries @ keys.transpose(1, 2) * softmax_scale).unflatten(1, (-1, t)).flatten(0, 1)  # (h, t, n)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if slopes is not None:
            scores -= slopes.to(_EXACT)[:, None, None] * (at - positions[:, None]).abs()
        scores = scores.masked_fill_(~live, float("-inf"))
        row_max = scores.amax(-1)
        # a row with nothing live has row_max = -inf: avoid inf - inf
        weights = (scores - row_max.masked_fill(row_max == float("-inf"), 0.0)[..., None]).exp_()
        row_sum = weights.sum(-1)  # (h, t)
        # what lies past the end of a sequence may hold anything, and 0 * nan is nan
        values = values.masked_fill(~live.any(0)[:, None], 0.0)
        out = (weights.unflatten(0, (hk, -1)).flatten(1, 2) @ values).unflatten(1, (-1, t)).flatten(0, 1)  # (h, t, d_v)
        out = (out / row_sum.masked_fill(row_sum == 0, 1.0)[..., None]).transpose(0, 1)
        total = merge(total, Partial(out[None], row_max[None], row_sum[None]))
    return total
