"""The short causal convolution of a rank's own rows, by fla's kernel or in plain torch, and of the rows that see a halo.

Shapes: b batch, s rows of a segment, c channels; weight (c, width), bias (c,).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .kernels import HALF, bounds_of_rows
from .segments import OwnSegments

_MODULE, _NAME = "fla.modules.causal_conv1d", "causal_conv1d"
_WIDEST = 8  # fla's kernel is unrolled over a weight's taps


def of_segments(own: OwnSegments, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """The convolution of each segment by itself, by index, as if there were zeros before it. Differentiable.

    In fp32 or wider, or in the dtype of rows where fla's kernel computes it, which sums in fp32. rows: all of the rank, by position.
    """
    indices = sorted((*own.first, *own.following))
    if not indices:
        return {}
    chosen, lengths = own.rows(indices, rows), own.lengths(indices)
    run = _function(rows, weight)
    if run is None:
        parts = [F.pad(part, (0, 0, weight.shape[1] - 1, 0)) for part in chosen.split(lengths, dim=1)]
        out = taps(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], weight, bias)
        found = out.split([length + weight.shape[1] - 1 for length in lengths[:-1]] + [lengths[-1]], dim=1)
        return {index: part[:, :length] for index, part, length in zip(indices, found, lengths)}
    flat, bounds = chosen, None
    if len(lengths) > 1:
        # one row of tokens, the segments of each row of the batch after those of the row before
        flat, bounds = chosen.flatten(0, 1)[None], bounds_of_rows(tuple(lengths) * len(chosen), rows.device)
    out, _ = run(flat, weight.float(), None if bias is None else bias.float(), cu_seqlens=bounds)
    return own.parts(indices, out.reshape(chosen.shape))


def taps(padded: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The convolution of rows after the first width - 1, in fp32 or wider: (b, rows + width - 1, c) to (b, rows, c)."""
    dtype, width = compute_dtype(padded), weight.shape[1]
    padded, weight = padded.to(dtype), weight.to(dtype)
    rows = padded.shape[-2] - width + 1
    out = padded.narrow(-2, 0, rows) * weight[:, 0]
    for tap in range(1, width):
        out = out + padded.narrow(-2, tap, rows) * weight[:, tap]
    return out if bias is None else out + bias.to(dtype)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Of sums."""
    return torch.promote_types(x.dtype, torch.float32)


def _function(rows: torch.Tensor, weight: torch.Tensor) -> Callable[..., Any] | None:
    """fla's function, where it can compute the convolution."""
    return _fla() if rows.is_cuda and rows.dtype in HALF and weight.shape[1] <= _WIDEST else None


@functools.cache
def _fla() -> Callable[..., Any] | None:
    """fla's function, where fla can be imported."""
    try:
        return getattr(importlib.import_module(_MODULE), _NAME, None)
    except ImportError:
        return None
