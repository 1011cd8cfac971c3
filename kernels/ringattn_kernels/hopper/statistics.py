"""The softmax statistics as the Hopper backward reads them: in base-2 units and whole blocks, with the turns' counters."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import launches
from ..queries import Statistics
from ..statistics import weighted_pivot

BLOCK = 128  # rows


class PaddedStatistics(NamedTuple):
    """pivot and delta (or -delta) of all query rows, fp32 (b * h, rows in whole blocks); padding is (inf, 0)."""

    pivot: torch.Tensor
    delta: torch.Tensor


@triton.jit(do_not_specialize=["q_rows", "padded_rows"])
def prepare_kernel(
    row_max_ptr, row_sum_ptr, delta_ptr, pivot_ptr, padded_delta_ptr, first_ptr, counters_ptr, q_rows, padded_rows,
    ROWS: tl.constexpr, SIGN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """pivot, as `weighted_pivot`, and SIGN * delta of ROWS rows of one head, padded to whole blocks with (inf, 0).

    If items take turns, it also writes the first item of each step of these rows to its counter.
    """
    blocks = padded_rows // ROWS
    head_index = (tl.program_id(0) // blocks).to(tl.int64)
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    inside = rows < q_rows
    row_max = tl.load(row_max_ptr + head_index * q_rows + rows, mask=inside, other=0.0)
    row_sum = tl.load(row_sum_ptr + head_index * q_rows + rows, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + head_index * q_rows + rows, mask=inside, other=0.0)
    tl.store(pivot_ptr + head_index * padded_rows + rows, weighted_pivot(row_max, row_sum))
    tl.store(padded_delta_ptr + head_index * padded_rows + rows, delta * SIGN)
    if counters_ptr is not None:
        COUNT: tl.constexpr = ROWS // STEP
        counters = tl.arange(0, COUNT)
        first = tl.load(first_ptr + (tl.program_id(0) % blocks) * COUNT + counters)
        tl.store(counters_ptr + tl.program_id(0) * COUNT + counters, first)


def prepare(
    statistics: Statistics, sign: int = 1, step: int = BLOCK, first: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> PaddedStatistics:  # fmt: skip
    """pivot and sign * delta of whole blocks. Sets the counters of steps too, if there are any; see `prepare_kernel`."""
    row_max, row_sum, delta = statistics
    assert row_max.is_contiguous() and row_sum.is_contiguous() and delta.is_contiguous()
    b, h, q_rows = row_max.shape
    padded_rows = whole_blocks(q_rows)
    pivot, padded_delta = torch.empty(2, b * h, padded_rows, device=row_max.device, dtype=torch.float32).unbind()
    moving = dict(
        row_max_ptr=row_max,
        row_sum_ptr=row_sum,
        delta_ptr=delta,
        pivot_ptr=pivot,
        padded_delta_ptr=padded_delta,
        first_ptr=first,
        counters_ptr=counters,
    )

    def make() -> tuple[int, dict]:
        sizes = dict(q_rows=q_rows, padded_rows=padded_rows, ROWS=BLOCK, SIGN=sign, STEP=step)
        return b * h * padded_rows // BLOCK, moving | sizes

    launches.launch(prepare_kernel, None, (sign, step), moving, make, num_warps=4)
    return PaddedStatistics(pivot, padded_delta)


def whole_blocks(rows: int) -> int:
    """The number of rows, rounded up to whole blocks."""
    return -(-rows // BLOCK) * BLOCK
