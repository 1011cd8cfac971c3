"""Sums and casts of a pair of tensors, such as dk and dv, in one launch: a ring's small steps between its large ones."""

import torch
import triton
import triton.language as tl

from . import launches

Pair = tuple[torch.Tensor, torch.Tensor]

_BLOCK = 2048


def add_pair(totals: Pair, more: Pair) -> None:
    """Add to each of two contiguous tensors of one dtype another one of the same shape and dtype, in place."""
    assert all(x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous() and y.is_contiguous() for x, y in zip(totals, more))
    _launch(totals, more, totals)


def rounded_pair(pair: Pair, dtype: torch.dtype) -> Pair:
    """Two tensors of one dtype in another one, with their strides, which leave no gaps."""
    results = torch.empty_like(pair[0], dtype=dtype), torch.empty_like(pair[1], dtype=dtype)
    assert all(x.stride() == y.stride() for x, y in zip(pair, results))
    _launch(pair, (None, None), results)
    return results


def _launch(first: Pair, second: tuple[torch.Tensor | None, torch.Tensor | None], results: Pair) -> None:
    counts = [x.numel() for x in results]
    block = 64 if results[0].device.type == "cpu" else _BLOCK
    programs = [triton.cdiv(count, block) for count in counts]
    names = ("x1_ptr", "x2_ptr", "y1_ptr", "y2_ptr", "sum1_ptr", "sum2_ptr")
    moving = dict(zip(names, (*first, *second, *results)))

    def make() -> tuple[int, dict]:
        return sum(programs), moving | dict(programs=programs[0], count1=counts[0], count2=counts[1], BLOCK=block)

    if sum(programs) > 0:
        launches.launch(pair_kernel, None, (), moving, make, num_warps=8)


@triton.jit
def pair_kernel(
    x1_ptr, x2_ptr, y1_ptr, y2_ptr, sum1_ptr, sum2_ptr, programs, count1, count2, BLOCK: tl.constexpr
):  # fmt: skip
    """sum = x + y, or x where there is no y, in the sum's dtype: BLOCK numbers of the first pair, or behind its programs of the second."""
    if tl.program_id(0) < programs:
        _add_block(x1_ptr, y1_ptr, sum1_ptr, tl.program_id(0), count1, BLOCK)
    else:
        _add_block(x2_ptr, y2_ptr, sum2_ptr, tl.program_id(0) - programs, count2, BLOCK)


@triton.jit
def _add_block(x_ptr, y_ptr, sum_ptr, block, count, BLOCK: tl.constexpr):
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    total = tl.load(x_ptr + offsets, mask=mask)
    if y_ptr is not None:
        total += tl.load(y_ptr + offsets, mask=mask)
    tl.store(sum_ptr + offsets, total.to(sum_ptr.dtype.element_ty), mask=mask)
