"""Runs a set of tiles on this device: the Triton kernels on a GPU, plain torch elsewhere. The one place that chooses."""

from __future__ import annotations

import torch

from . import blocked
from .plan import Tiles
from .score import Score

State = blocked.State


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, score: Score, *, state: State | None, final: bool
) -> State:
    """Attention of q over the tiles' pairs, on top of `state`: (out, row_max, row_sum). See `blocked.forward`."""
    if q.is_cuda and q.numel():
        import ringattn_kernels

        return ringattn_kernels.forward(q, k, v, tiles.kernel_table, softmax_scale=score.softmax_scale, state=state, final=final)
    return blocked.forward(q, k, v, tiles, softmax_scale=score.softmax_scale, state=state, final=final)


def delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """rowsum(dout * out): (b, h, s), in the statistics' dtype."""
    if out.is_cuda and out.numel():
        import ringattn_kernels

        return ringattn_kernels.delta(out, dout)
    return blocked.delta(out, dout)


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    delta: torch.Tensor,
    tiles: Tiles,
    score: Score,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of the tiles' pairs alone, in `dtype`: `write_gradients` to new tensors."""
    dq, dk, dv = (torch.empty_like(x, dtype=dtype) for x in (q, k, v))
    write_gradients(q, k, v, dout, row_max, row_sum, delta, tiles, score, dq, dk, dv)
    return dq, dk, dv


def write_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    delta: torch.Tensor,
    tiles: Tiles,
    score: Score,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Overwrites all of dq, dk and dv, of any dtype, with the gradients of the tiles' pairs, summed in fp32 (fp64)."""
    if len(tiles) and q.is_cuda:
        import ringattn_kernels

        table, scale = tiles.kernel_table, score.softmax_scale
        ringattn_kernels.backward(
            q, k, v, dout, row_max, row_sum, delta, table, softmax_scale=scale, dq=dq, dk=dk, dv=dv, add=False
        )
        return
    outputs = dq, dk, dv
    if dq.dtype == row_sum.dtype:
        for x in outputs:
            x.zero_()
        add_gradients(q, k, v, dout, row_max, row_sum, delta, tiles, score, dq=dq, dk=dk, dv=dv)
        return
    sums = tuple(torch.zeros_like(x, dtype=row_sum.dtype) for x in outputs)
    add_gradients(q, k, v, dout, row_max, row_sum, delta, tiles, score, dq=sums[0], dk=sums[1], dv=sums[2])
    for x, total in zip(outputs, sums, strict=True):
        x.copy_(total)


def add_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    delta: torch.Tensor,
    tiles: Tiles,
    score: Score,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Adds the gradients of the tiles' pairs to dq, dk and dv, in place. See `blocked.backward`."""
    if not len(tiles):
        return
    scale = score.softmax_scale
    if q.is_cuda:
        import ringattn_kernels

        table = tiles.kernel_table
        ringattn_kernels.backward(q, k, v, dout, row_max, row_sum, delta, table, softmax_scale=scale, dq=dq, dk=dk, dv=dv)
    else:
        blocked.backward(q, k, v, dout, row_max, row_sum, delta, tiles, softmax_scale=scale, dq=dq, dk=dk, dv=dv)
