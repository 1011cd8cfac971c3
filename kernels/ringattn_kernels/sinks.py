"""Sinks: one more score a row, for each head, which has no value (Xiao et al. 2023; GPT-OSS).

    row_max = max(row_max', sink)      row_sum = row_sum' exp(row_max' - row_max) + exp(sink - row_max)

of statistics row_max' and row_sum' without it. The launch that leaves a row's final output counts its sink; `with_sinks` counts sinks in
an output that is there already.

Shapes: out (b, sq, h, dv), row_max, row_sum and delta (b, h, sq), sinks (h,).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from . import launches
from .config import padded
from .units import LOG2_E

if TYPE_CHECKING:
    from .splits import State


@triton.jit
def with_sink(row_max, row_sum, sink):
    """(row_max, row_sum, alpha) of rows that count a sink too, in units of base 2; alpha takes other sums to the new row_max."""
    top = tl.maximum(row_max, sink)
    # a row with neither a live pair nor a sink has -inf: avoid inf - inf
    pivot = tl.where(top == float("-inf"), 0.0, top)
    alpha = tl.math.exp2(row_max - pivot)
    return top, tl.where(row_sum == 0, 0.0, row_sum * alpha) + tl.math.exp2(sink - pivot), alpha


def with_sinks(out: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor, sinks: torch.Tensor) -> State:
    """out, row_max and row_sum of a softmax with one more score a row, which has no value. out changes in place.

    out: (b, sq, h, dv), contiguous. sinks: (h,), fp32, one for each head.
    """
    b, sq, h, dv = out.shape
    assert out.is_contiguous() and row_max.is_contiguous() and row_sum.is_contiguous()
    assert sinks.shape == (h,) and sinks.dtype == torch.float32 and sinks.is_contiguous()
    block = 16 if out.device.type == "cpu" else 64
    # not in place: several threads of a program read the statistics of a row, at different times
    total_max, total = torch.empty_like(row_max), torch.empty_like(row_sum)
    moving = dict(out_ptr=out, row_max_ptr=row_max, row_sum_ptr=row_sum, total_max_ptr=total_max, total_ptr=total, sinks_ptr=sinks)

    def make() -> tuple[int, dict]:
        sizes = dict(heads=h, q_rows=sq, V_DIM=dv, BLOCK_DV=padded(dv), BLOCK_Q=block)
        return b * h * triton.cdiv(sq, block), moving | sizes

    if out.numel() > 0:
        launches.launch(sinks_kernel, None, (block,), moving, make, num_warps=4)
    return out, total_max, total


@triton.jit(do_not_specialize=["heads", "q_rows"])
def sinks_kernel(
    out_ptr, row_max_ptr, row_sum_ptr, total_max_ptr, total_ptr, sinks_ptr, heads, q_rows,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head; see `with_sinks`. Programs side by side have the heads of the same rows, which lie together."""
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads
    blocks = tl.cdiv(q_rows, BLOCK_Q)
    batch = (block // blocks).to(tl.int64)
    rows = block % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_mask = rows < q_rows
    statistics = (batch * heads + head) * q_rows + rows
    row_max = tl.load(row_max_ptr + statistics, mask=row_mask, other=0.0)
    row_sum = tl.load(row_sum_ptr + statistics, mask=row_mask, other=0.0)
    sink = tl.load(sinks_ptr + head)
    total_max = tl.maximum(row_max, sink)
    # a row with neither a live pair nor a sink has -inf: avoid inf - inf
    pivot = tl.where(total_max == float("-inf"), 0.0, total_max)
    before = row_sum * tl.math.exp2((row_max - pivot) * LOG2_E)
    total = before + tl.math.exp2((sink - pivot) * LOG2_E)
    tl.store(total_max_ptr + statistics, total_max, mask=row_mask)
    tl.store(total_ptr + statistics, total, mask=row_mask)
    # [BLOCK_Q, BLOCK_DV]
    columns = tl.arange(0, BLOCK_DV)
    pointers = out_ptr + ((batch * q_rows + rows) * heads + head)[:, None] * V_DIM + columns[None, :]
    mask = row_mask[:, None] & (columns < V_DIM)[None, :]
    out = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    share = tl.where(total > 0, before / total, 0.0)
    tl.store(pointers, (out * share[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def sinks_gradient(row_max: torch.Tensor, row_sum: torch.Tensor, delta: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks (h,), from statistics that count them: a sink's dP is 0, so that its dS is -P delta."""
    b, h, sq = row_max.shape
    assert row_max.is_contiguous() and row_sum.is_contiguous() and delta.is_contiguous()
    assert sinks.shape == (h,) and sinks.dtype == torch.float32 and sinks.is_contiguous()
    dsinks = torch.empty_like(sinks)
    block = 16 if row_max.device.type == "cpu" else 1024
    moving = dict(row_max_ptr=row_max, row_sum_ptr=row_sum, delta_ptr=delta, sinks_ptr=sinks, dsinks_ptr=dsinks)

    def make() -> tuple[int, dict]:
        return h, moving | dict(batches=b, heads=h, q_rows=sq, BLOCK=block)

    launches.launch(sinks_gradient_kernel, None, (block,), moving, make, num_warps=8)
    return dsinks


@triton.jit(do_not_specialize=["batches", "heads", "q_rows"])
def sinks_gradient_kernel(row_max_ptr, row_sum_ptr, delta_ptr, sinks_ptr, dsinks_ptr, batches, heads, q_rows, BLOCK: tl.constexpr):
    """The gradient of one head's sink: one program goes over all of the head's rows, so that sums have a fixed order."""
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head)
    total = tl.zeros([BLOCK], tl.float32)
    first = head.to(tl.int64) * q_rows
    for _ in range(batches):
        for start in range(0, q_rows, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            inside = rows < q_rows
            row_max = tl.load(row_max_ptr + first + rows, mask=inside, other=0.0)
            row_sum = tl.load(row_sum_ptr + first + rows, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + first + rows, mask=inside, other=0.0)
            # a row with neither a live pair nor a sink has -inf: avoid inf - inf and 0 / 0
            empty = row_sum == 0
            weight = tl.math.exp2((sink - tl.where(empty, 0.0, row_max)) * LOG2_E) / tl.where(empty, 1.0, row_sum)
            total += tl.where(empty, 0.0, weight * delta)
        first += heads.to(tl.int64) * q_rows
    tl.store(dsinks_ptr + head, -tl.sum(total, 0))
