"""What the backward pass reads of rows: delta, pivots and weights.

Shapes: out and dout (b, sq, h, dv), row_max, row_sum, delta and pivot (b, h, sq).
"""

import torch
import triton
import triton.language as tl

from . import launches
from .bands import load_rows
from .config import padded
from .launches import strides
from .units import to_base2


def delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """rowsum(dout * out), fp32 (b, h, sq), of out and dout (b, sq, h, dv)."""
    b, sq, h, _ = out.shape
    result = torch.empty(b, h, sq, device=out.device, dtype=torch.float32)
    launch_rows(out, dout, result, sq)
    return result


def launch_rows(
    out: torch.Tensor, dout: torch.Tensor, result: torch.Tensor, padded_rows: int, *, row_max: torch.Tensor | None = None,
    row_sum: torch.Tensor | None = None, drow_sum: torch.Tensor | None = None, pivot: torch.Tensor | None = None,
    negated: torch.Tensor | None = None, sums: torch.Tensor | None = None, head_dim: int = 1,
) -> None:  # fmt: skip
    """Launch `rows_kernel` over out and dout (b, sq, h, dv); result is delta, and padded_rows the number of rows with padding, if any."""
    b, sq, h, dv = out.shape
    assert out.shape == dout.shape and out.stride(3) == dout.stride(3) == 1
    block = 16 if out.device.type == "cpu" else 64
    tensors = (row_max, row_sum, drow_sum, pivot, negated, sums)
    assert all(x is None or x.is_contiguous() for x in tensors)
    names = ("row_max_ptr", "row_sum_ptr", "drow_sum_ptr", "pivot_ptr", "negated_ptr", "sums_ptr")
    moving = dict(out_ptr=out, dout_ptr=dout, delta_ptr=result) | dict(zip(names, tensors))

    def make() -> tuple[int, dict]:
        sizes = dict(heads=h, q_rows=sq, padded_rows=padded_rows, V_DIM=dv, BLOCK_DV=padded(dv), BLOCK_Q=block)
        sizes |= dict(HEAD_DIM=head_dim, BLOCK_D=padded(head_dim))
        return b * h * triton.cdiv(padded_rows, block), moving | strides(o=out, g=dout) | sizes

    if result.numel() > 0:
        launches.launch(rows_kernel, None, (block, head_dim), moving, make, num_warps=4)


@triton.jit(do_not_specialize=["heads", "q_rows", "padded_rows"])
def rows_kernel(
    out_ptr, dout_ptr, delta_ptr, row_max_ptr, row_sum_ptr, drow_sum_ptr, pivot_ptr, negated_ptr, sums_ptr,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, heads, q_rows, padded_rows,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta_i = sum_c out_ic dout_ic - drow_sum_i row_sum_i of one block of rows of one head.

    Where it is asked for: the pivot and -delta in blocks of padded_rows, padded with (inf, 0), and zeros for the sums of dq.
    """
    blocks = tl.cdiv(padded_rows, BLOCK_Q)
    head_index = tl.program_id(0) // blocks
    start = (tl.program_id(0) % blocks) * BLOCK_Q
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    # [BLOCK_Q, BLOCK_DV]
    out = load_rows(out_ptr + batch * stride_ob + head * stride_oh, start, stride_os, q_rows, BLOCK_Q, V_DIM, BLOCK_DV, True)
    dout = load_rows(dout_ptr + batch * stride_gb + head * stride_gh, start, stride_gs, q_rows, BLOCK_Q, V_DIM, BLOCK_DV, True)
    rows = start + tl.arange(0, BLOCK_Q)
    inside = rows < q_rows
    here = head_index.to(tl.int64) * q_rows + rows
    total = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if drow_sum_ptr is not None:
        # d lse = d row_sum * row_sum enters dS = P (dP - delta) as P d lse
        row_sum = tl.load(row_sum_ptr + here, mask=inside, other=0.0)
        total -= tl.load(drow_sum_ptr + here, mask=inside, other=0.0) * row_sum
    tl.store(delta_ptr + here, total, mask=inside)
    if pivot_ptr is not None:
        row_max = tl.load(row_max_ptr + here, mask=inside, other=0.0)
        row_sum = tl.load(row_sum_ptr + here, mask=inside, other=0.0)
        first = head_index.to(tl.int64) * padded_rows + start
        tl.store(pivot_ptr + first + tl.arange(0, BLOCK_Q), weighted_pivot(row_max, row_sum))
        tl.store(negated_ptr + first + tl.arange(0, BLOCK_Q), -total)
        if sums_ptr is not None:
            offsets = tl.arange(0, BLOCK_Q * BLOCK_D)
            mask = offsets < BLOCK_Q * HEAD_DIM
            tl.store(sums_ptr + first * HEAD_DIM + offsets, tl.zeros([BLOCK_Q * BLOCK_D], tl.float32), mask=mask)


@triton.jit
def weighted_pivot(row_max, row_sum):
    """The pivot by which P = exp2(scores * scale - pivot), with row_sum in it; inf for an empty row."""
    pivot, rest = to_base2(row_max)
    empty = row_sum == 0
    # the small numbers first: pivot + rest would be rounded to pivot
    return tl.where(empty, float("inf"), pivot + (rest + tl.math.log2(tl.where(empty, 1.0, row_sum))))


def pivots(row_max: torch.Tensor, row_sum: torch.Tensor, weighted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(pivot, weight), shaped as the statistics, with P = exp2(scores * scale - pivot) * weight; an empty row has pivot inf.

    Not weighted: log2(row_sum) goes into the pivot and the weight is None, which saves a multiplication for each pair and costs
    half an ulp of the pivot. That is below the rounding of P to 16 bits unless logits exceed 1e4.
    """
    assert row_max.is_contiguous()
    assert row_sum.is_contiguous()
    pivot = torch.empty_like(row_max)
    weight = torch.empty_like(row_sum) if weighted else None
    count, block = row_max.numel(), 1024
    moving = dict(row_max_ptr=row_max, row_sum_ptr=row_sum, pivot_ptr=pivot, weight_ptr=weight)

    def make() -> tuple[int, dict]:
        return triton.cdiv(count, block), moving | dict(count=count, BLOCK=block)

    if count > 0:
        launches.launch(pivot_kernel, None, (), moving, make, num_warps=4)
    return pivot, weight


@triton.jit(do_not_specialize=["count"])
def pivot_kernel(row_max_ptr, row_sum_ptr, pivot_ptr, weight_ptr, count, BLOCK: tl.constexpr):
    """(pivot, weight) of the statistics; see `pivots`."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    row_max = tl.load(row_max_ptr + offsets, mask=mask, other=0.0)
    row_sum = tl.load(row_sum_ptr + offsets, mask=mask, other=0.0)
    if weight_ptr is None:
        tl.store(pivot_ptr + offsets, weighted_pivot(row_max, row_sum), mask=mask)
    else:
        pivot, rest = to_base2(row_max)
        empty = row_sum == 0
        tl.store(weight_ptr + offsets, tl.where(empty, 0.0, tl.math.exp2(-rest) / row_sum), mask=mask)
        tl.store(pivot_ptr + offsets, tl.where(empty, float("inf"), pivot), mask=mask)
