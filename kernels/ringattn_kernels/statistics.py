"""What the backward pass reads of each query row, made from the output and the softmax statistics: delta, pivots and weights.

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
    b, sq, h, dv = out.shape
    result = torch.empty(b, h, sq, device=out.device, dtype=torch.float32)
    assert out.shape == dout.shape and out.stride(3) == dout.stride(3) == 1
    block = 16 if out.device.type == "cpu" else 64
    moving = dict(out_ptr=out, dout_ptr=dout, delta_ptr=result)

    def make() -> tuple[int, dict]:
        sizes = dict(heads=h, q_rows=sq, V_DIM=dv, BLOCK_DV=padded(dv), BLOCK_Q=block)
        return b * h * triton.cdiv(sq, block), moving | strides(o=out, g=dout) | sizes

    if result.numel() > 0:
        launches.launch(delta_kernel, None, (block,), moving, make, num_warps=4)
    return result


@triton.jit(do_not_specialize=["heads", "q_rows"])
def delta_kernel(
    out_ptr, dout_ptr, delta_ptr, stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, heads, q_rows,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """delta_i = sum_c out_ic dout_ic of one block of rows of one head."""
    blocks = tl.cdiv(q_rows, BLOCK_Q)
    head_index = tl.program_id(0) // blocks
    start = (tl.program_id(0) % blocks) * BLOCK_Q
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    # [BLOCK_Q, BLOCK_DV]
    out = load_rows(out_ptr + batch * stride_ob + head * stride_oh, start, stride_os, q_rows, BLOCK_Q, V_DIM, BLOCK_DV, True)
    dout = load_rows(dout_ptr + batch * stride_gb + head * stride_gh, start, stride_gs, q_rows, BLOCK_Q, V_DIM, BLOCK_DV, True)
    rows = start + tl.arange(0, BLOCK_Q)
    total = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + head_index.to(tl.int64) * q_rows + rows, total, mask=rows < q_rows)


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
    if count > 0:
        pivot_kernel[(triton.cdiv(count, block),)](row_max, row_sum, pivot, weight, count, BLOCK=block)
    return pivot, weight


@triton.jit
def pivot_kernel(row_max_ptr, row_sum_ptr, pivot_ptr, weight_ptr, count, BLOCK: tl.constexpr):
    """(pivot, weight) of the statistics; see `pivots`."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    row_max = tl.load(row_max_ptr + offsets, mask=mask, other=0.0)
    row_sum = tl.load(row_sum_ptr + offsets, mask=mask, other=0.0)
    pivot, rest = to_base2(row_max)
    empty = row_sum == 0
    if weight_ptr is None:
        pivot += rest + tl.math.log2(tl.where(empty, 1.0, row_sum))
    else:
        weight = tl.where(empty, 0.0, tl.math.exp2(-rest) / row_sum)
        tl.store(weight_ptr + offsets, weight, mask=mask)
    tl.store(pivot_ptr + offsets, tl.where(empty, float("inf"), pivot), mask=mask)
