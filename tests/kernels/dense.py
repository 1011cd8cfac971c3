"""Dense attention over a tile table: what the kernel tests compare with.

Shapes: q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), dout (b, sq, h, dv).
"""

from dataclasses import dataclass

import numpy as np
import torch

from ringattn_kernels.modifiers import Modifiers, ModifierSums


@dataclass
class Result:
    """Everything a forward and a backward pass return."""

    out: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def live_pairs(tiles, q_rows: int, k_rows: int) -> torch.Tensor:
    """(q_rows, k_rows) bool; asserts that no pair lies in two tiles."""
    i, j = np.arange(q_rows)[:, None], np.arange(k_rows)[None]
    count = np.zeros((q_rows, k_rows), dtype=np.int64)
    for q_begin, q_end, k_begin, k_end, lo, hi in tiles:
        count += (i >= q_begin) & (i < q_end) & (j >= k_begin) & (j < k_end) & (i - j >= lo) & (i - j <= hi)
    assert count.max(initial=0) <= 1, "tiles overlap"
    return torch.from_numpy(count > 0)


def attention(q, k, v, dout, live, softmax_scale: float, dtype: torch.dtype) -> Result:
    """Dense attention and its gradients computed in `dtype`; statistics are fp64. Memory grows with sq * sk."""
    statistics = attention(q, k, v, dout, live, softmax_scale, torch.float64) if dtype != torch.float64 else None
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    # [b, h, sq, sk]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * softmax_scale
    scores = scores.masked_fill(~live, float("-inf"))
    empty = ~live.any(1)[:, None]
    p = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    out = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(group, 2))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
    if statistics is not None:
        return Result(out.detach(), statistics.row_max, statistics.row_sum, dq, dk, dv)
    scores = scores.detach()
    row_max = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf"))
    pivot = row_max.masked_fill(row_max == float("-inf"), 0.0)
    return Result(out.detach(), row_max, torch.exp(scores - pivot[..., None]).sum(-1), dq, dk, dv)


def causal(n: int):
    return [(0, n, 0, n, 0, n)]


def later(n: int):
    """Each query and the keys from its own on."""
    return [(0, n, 0, n, -n, 0)]


def full(sq: int, sk: int):
    return [(0, sq, 0, sk, -sk, sq)]


def window(n: int, left: int, right: int = 0):
    return [(0, n, 0, n, -right, left)]


def documents(*lengths: int):
    """Causal inside each document; documents follow one another."""
    bounds = np.cumsum([0, *lengths])
    return [(a, b, a, b, 0, b - a) for a, b in zip(bounds[:-1], bounds[1:]) if a < b]


def random_tiles(generator: np.random.Generator, sq: int, sk: int):
    """Disjoint rectangles with bands, trimmed to what is live, that leave some rows and columns empty."""
    rows = np.unique(generator.integers(0, sq + 1, 5))
    columns = np.unique(generator.integers(0, sk + 1, 5))
    tiles = []
    for a, b in zip(rows[:-1], rows[1:]):
        for c, d in zip(columns[:-1], columns[1:]):
            lo, hi = np.sort(generator.integers(a - d, b - c + 1, 2))
            i, j = np.nonzero(live_pairs([(a, b, c, d, lo, hi)], sq, sk).numpy())
            if len(i) and generator.random() < 0.7:
                tiles.append((i.min(), i.max() + 1, j.min(), j.max() + 1, lo, hi))
    return tiles


def zero_sums(modifiers: Modifiers) -> ModifierSums:
    """Zeros for the gradients of all slopes and values that there are."""
    sums = ModifierSums.empty(modifiers)
    for x in sums.tensors:
        x.zero_()
    return sums
