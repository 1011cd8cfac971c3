"""Partial attention results, and the block-merge formula.

A partial is attention over some of the keys. For partials 1 and 2 of the same queries over disjoint keys, with m = row_max and
l = row_sum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Rabe and Staats 2021, section 2):

    m   = max(m1, m2)
    l   = l1 exp(m1 - m) + l2 exp(m2 - m)
    out = (l1 exp(m1 - m) out1 + l2 exp(m2 - m) out2) / l

Shapes: b batch, s query tokens, h query heads, d_v value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import check


@dataclass(frozen=True)
class Stats:
    """The softmax's statistics of every query row: (b, h, s), fp32 (fp64 for fp64 input).

    `row_max` is the greatest live score after scaling, in natural-log units, and -inf for a row with nothing live; `row_sum` is
    the sum of exp(score - row_max), and 0 for such a row. Together they give `lse`. Gradients flow through `row_sum` and
    `lse`; `row_max` is a constant to autograd.
    """

    row_max: torch.Tensor
    row_sum: torch.Tensor

    @property
    def lse(self) -> torch.Tensor:
        """log of the sum of exp(score): (b, h, s); -inf for a row with nothing live."""
        # a row with row_sum = 0 has lse = -inf from row_max; log(1) keeps its gradient finite
        empty = self.row_sum == 0
        return self.row_max + torch.where(empty, 1, self.row_sum).log()


@dataclass(frozen=True)
class Partial:
    """Attention over some keys: out (b, s, h, d_v) normalised by row_sum, and row_max, row_sum (b, h, s); fp32 or fp64.

    A row with nothing live is (0, -inf, 0), the identity of `merge`.
    """

    out: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor

    @property
    def stats(self) -> Stats:
        """The statistics alone."""
        return Stats(self.row_max, self.row_sum)

    @property
    def lse(self) -> torch.Tensor:
        """log of the sum of exp(score) over these keys: (b, h, s); -inf for a row with nothing live."""
        return self.stats.lse


def merge(a: Partial, b: Partial) -> Partial:
    """The partial over the keys of both: the block-merge formula. Differentiable, commutative and associative up to rounding.

    Raises ValueError if the shapes, dtypes or devices differ.

    >>> import torch, ringattn as ra
    >>> q = k = v = torch.randn(1, 16, 2, 8)
    >>> near, far = torch.arange(8, 16), torch.arange(8)
    >>> parts = [ra.attend(q, k[:, keys], v[:, keys], k_positions=keys) for keys in (near, far)]
    >>> torch.allclose(ra.finish(ra.merge(*parts)), ra.reference.attention(q, k, v), atol=1e-5)
    True
    """
    for name, part in (("a", a), ("b", b)):
        _check(name, part)
    if a.out.shape != b.out.shape or a.row_max.shape != b.row_max.shape:
        raise ValueError(
            f"partials of {tuple(a.out.shape)} and {tuple(b.out.shape)} do not merge: both must be of the same queries and heads"
        )
    if a.out.dtype != b.out.dtype:
        raise ValueError(f"partials of dtypes {a.out.dtype} and {b.out.dtype} do not merge: compute both from inputs of one dtype")
    if a.out.device != b.out.device:
        raise ValueError(f"partials on {a.out.device} and {b.out.device} do not merge: move both to one device")
    row_max = torch.maximum(a.row_max, b.row_max).detach()
    # for rows with nothing live in either partial, a finite pivot avoids inf - inf
    pivot = torch.where(row_max == float("-inf"), 0.0, row_max)
    weight_a = a.row_sum * (a.row_max.detach() - pivot).exp()
    weight_b = b.row_sum * (b.row_max.detach() - pivot).exp()
    row_sum = weight_a + weight_b  # (b, h, s)
    scale = 1 / torch.where(row_sum > 0, row_sum, 1)
    out = _per_row(weight_a * scale) * a.out + _per_row(weight_b * scale) * b.out
    return Partial(out, row_max, row_sum)


def finish(
    part: Partial, dtype: torch.dtype | None = None, *, return_stats: bool = False
) -> torch.Tensor | tuple[torch.Tensor, Stats]:
    """The attention output of a partial that has seen all its keys: (b, s, h, d_v) in `dtype`, by default the partial's own.

    With `return_stats` also its `Stats`. Rows with nothing live are 0. Raises ValueError if `part` is not a `Partial`, or `dtype` is not a
    dtype of floating point.
    """
    _check("part", part)
    if dtype is not None:
        check.instance("dtype", dtype, torch.dtype, "pass torch.bfloat16 and the like")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}, but must be of floating point: pass torch.bfloat16 and the like")
    out = part.out if dtype is None else part.out.to(dtype)
    return (out, part.stats) if return_stats else out


def _check(name: str, part: Any) -> None:
    check.instance(name, part, Partial, "make one with attend(...)")
    for field in ("out", "row_max", "row_sum"):
        check.instance(f"{name}.{field}", getattr(part, field), torch.Tensor, "make one with attend(...)")


def _per_row(x: torch.Tensor) -> torch.Tensor:
    """(b, h, s) -> (b, s, h, 1)."""
    return x.transpose(1, 2).unsqueeze(-1)
