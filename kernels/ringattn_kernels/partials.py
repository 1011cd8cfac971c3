"""Partials of the same rows merged in place, as they come back to the rank of their queries: the block-merge formula in one launch.

Shapes: n rows, b batch, h query heads, dv value head dim: rows first, as messages between ranks are.
"""

import torch
import triton
import triton.language as tl

from . import launches
from .config import padded
from .splits import State
from .units import LOG2_E


def merge_rows(totals: State, more: State) -> None:
    """Merge partials into those of other keys, in place: out (n, b, h, dv), normalised by row_sum; row_max and row_sum (n, b, h); fp32.

    totals: contiguous. more: with any strides but that of out's last dimension, and one order of both statistics. Rows with nothing live
    are (0, -inf, 0).
    """
    out, row_max, _ = totals
    more_out, more_max, more_sum = more
    n, b, h, dv = out.shape
    assert more_out.shape == out.shape and row_max.shape == more_max.shape == more_sum.shape == out.shape[:3]
    assert all(x.dtype == torch.float32 for x in (*totals, *more)) and all(x.is_contiguous() for x in totals)
    assert more_out.stride(3) == 1 and more_max.stride() == more_sum.stride()
    block = 16 if out.device.type == "cpu" else 32
    names = ("out_ptr", "row_max_ptr", "row_sum_ptr", "more_ptr", "more_max_ptr", "more_sum_ptr")
    moving = dict(zip(names, (*totals, *more)))

    def make() -> tuple[int, dict]:
        steps = dict(zip(("stride_on", "stride_ob", "stride_oh"), more_out.stride()))
        steps |= dict(zip(("stride_sn", "stride_sb", "stride_sh"), more_max.stride()))
        sizes = dict(count=n * b * h, batches=b, heads=h, V_DIM=dv, BLOCK_DV=padded(dv), BLOCK=block)
        return triton.cdiv(n * b * h, block), moving | steps | sizes

    if row_max.numel() > 0:
        launches.launch(merge_rows_kernel, None, (block,), moving, make, num_warps=4)


@triton.jit(do_not_specialize=["count", "batches", "heads"])
def merge_rows_kernel(
    out_ptr, row_max_ptr, row_sum_ptr, more_ptr, more_max_ptr, more_sum_ptr,
    stride_on, stride_ob, stride_oh, stride_sn, stride_sb, stride_sh, count, batches, heads,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of single heads: m = max(m1, m2), w_i = l_i exp(m_i - m), l = w1 + w2, out = (w1 out1 + w2 out2) / l."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    head = rows % heads
    batch = rows // heads % batches
    row = rows // heads // batches
    statistics = row * stride_sn + batch * stride_sb + head * stride_sh
    row_max = tl.load(row_max_ptr + rows, mask=inside, other=float("-inf"))
    row_sum = tl.load(row_sum_ptr + rows, mask=inside, other=0.0)
    more_max = tl.load(more_max_ptr + statistics, mask=inside, other=float("-inf"))
    more_sum = tl.load(more_sum_ptr + statistics, mask=inside, other=0.0)
    total_max = tl.maximum(row_max, more_max)
    # a row with no live pair has -inf: avoid inf - inf
    pivot = tl.where(total_max == float("-inf"), 0.0, total_max)
    weight = row_sum * tl.math.exp2((row_max - pivot) * LOG2_E)
    more_weight = more_sum * tl.math.exp2((more_max - pivot) * LOG2_E)
    total = weight + more_weight
    scale = tl.where(total > 0, 1.0 / total, 0.0)
    # [BLOCK, BLOCK_DV]
    columns = tl.arange(0, BLOCK_DV)
    mask = inside[:, None] & (columns < V_DIM)[None, :]
    pointers = out_ptr + rows[:, None] * V_DIM + columns[None, :]
    out = tl.load(pointers, mask=mask, other=0.0)
    there = row * stride_on + batch * stride_ob + head * stride_oh
    more = tl.load(more_ptr + there[:, None] + columns[None, :], mask=mask, other=0.0)
    tl.store(pointers, out * (weight * scale)[:, None] + more * (more_weight * scale)[:, None], mask=mask)
    # several threads of a program have read the statistics of a row
    tl.debug_barrier()
    tl.store(row_max_ptr + rows, total_max, mask=inside)
    tl.store(row_sum_ptr + rows, total, mask=inside)
