"""Sums, casts and rows of a pair of tensors, such as dk and dv, in one launch: a ring's small steps between its large ones.

A single tensor is a pair of halves.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import launches

Pair = tuple[torch.Tensor, torch.Tensor]
# contiguous tensors, and after how many numbers of the two that they are added to they begin, in the order of memory
More = tuple[Pair, tuple[int, int]]

_BLOCK = 2048
_ALIGNED = 16  # numbers
_AT_ONCE = 3  # pairs that one launch adds


def add_pair(totals: Pair, more: Pair) -> None:
    """Add to each of two contiguous tensors of one dtype another one of the same shape and dtype, in place."""
    assert all(x.shape == y.shape and x.is_contiguous() for x, y in zip(totals, more))
    _launch(totals, [(more, (0, 0))], totals)


def rounded_pair(pair: Pair, dtype: torch.dtype, more: Sequence[More] = ()) -> Pair:
    """Two tensors of one dtype in another one, with their strides, which leave no gaps.

    more: pairs of the first dtype, added before one after another; if they are more than one launch takes, to the pair itself.
    """
    while len(more) > _AT_ONCE:
        _launch(pair, more[:_AT_ONCE], pair)
        more = more[_AT_ONCE:]
    results = torch.empty_like(pair[0], dtype=dtype), torch.empty_like(pair[1], dtype=dtype)
    assert all(x.stride() == y.stride() for x, y in zip(pair, results))
    _launch(pair, more, results)
    return results


def zero(*tensors: torch.Tensor) -> None:
    """Set at most two tensors of one dtype, whose strides leave no gaps, to zero."""
    if tensors:
        first, second = _halves(tensors[0]) if len(tensors) == 1 else tensors
        _launch((None, None), (), (first, second))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor, whose strides leave no gaps, in another dtype, with its strides; itself if that is its own."""
    if x.dtype == dtype or x.device.type == "cpu":
        return x.to(dtype)  # Triton's interpreter would take long
    result = torch.empty_like(x, dtype=dtype)
    _launch(_halves(x), (), _halves(result))
    return result


def _halves(x: torch.Tensor) -> Pair:
    """The numbers of a tensor in the order of memory, in two parts; both begin at aligned addresses if the tensor does."""
    numbers = x.as_strided((x.numel(),), (1,))
    half = len(numbers) // 2 // _ALIGNED * _ALIGNED
    return numbers[:half], numbers[half:]


def take_rows(pair: Pair, index: torch.Tensor | None = None) -> Pair:
    """Rows of two tensors (rows, b, heads, d) of any strides, contiguous: all, or those in `index` (n,) int64."""
    n = pair[0].shape[0] if index is None else len(index)
    results = tuple([x.new_empty((n, *x.shape[1:])) for x in pair])
    _launch_rows(pair, (results[0], results[1]), index, add=False)
    return results[0], results[1]


def add_rows(totals: Pair, more: Pair, index: torch.Tensor) -> None:
    """totals[index] += more, in place: contiguous tensors (rows, b, heads, d), no row twice in `index` (n,) int64."""
    assert all(x.is_contiguous() and x.dtype == y.dtype for x, y in zip(totals, more))
    _launch_rows(more, totals, index, add=True)


def _launch_rows(pair: Pair, results: Pair, index: torch.Tensor | None, *, add: bool) -> None:
    rows, b = (pair if add else results)[0].shape[:2]
    widths = [x.shape[2] * x.shape[3] for x in pair]
    assert all(x.stride(3) == 1 for x in pair)
    names = ("x1_ptr", "x2_ptr", "out1_ptr", "out2_ptr", "index_ptr")
    moving = dict(zip(names, (*pair, *results, index)))

    def make() -> tuple[tuple[int, int, int], dict]:
        strides = {f"stride_{axis}{number}": x.stride(dim) for number, x in enumerate(pair, 1) for dim, axis in enumerate("sbh")}
        sizes = dict(width1=widths[0], width2=widths[1], DIM1=pair[0].shape[3], DIM2=pair[1].shape[3])
        return (rows, b, 2), moving | strides | sizes | dict(ADD=add, BLOCK=_BLOCK // 2)

    if rows * b > 0:
        launches.launch(row_kernel, None, (add,), moving, make, num_warps=4)


def _launch(first: tuple[torch.Tensor | None, torch.Tensor | None], more: Sequence[More], results: Pair) -> None:
    assert all(x.is_contiguous() and x.dtype == y.dtype for pair, _ in more for x, y in zip(pair, first) if y is not None)
    counts = [x.numel() for x in results]
    block = 64 if results[0].device.type == "cpu" else _BLOCK
    programs = [triton.cdiv(count, block) for count in counts]
    moving = dict(zip(("x1_ptr", "x2_ptr", "sum1_ptr", "sum2_ptr"), (*first, *results)))
    bounds = {}
    for number, name in enumerate("abc"):
        pair, begins = more[number] if number < len(more) else ((None, None), (0, 0))
        for which, x, begin in zip((1, 2), pair, begins):
            moving[f"{name}{which}_ptr"] = x
            bounds |= {f"{name}{which}_begin": begin, f"{name}{which}_end": begin + (0 if x is None else x.numel())}

    def make() -> tuple[int, dict]:
        return sum(programs), moving | bounds | dict(programs=programs[0], count1=counts[0], count2=counts[1], BLOCK=block)

    if sum(programs) > 0:
        launches.launch(pair_kernel, None, tuple(bounds.values()), moving, make, num_warps=8)


@triton.jit(do_not_specialize=["programs"])
def pair_kernel(
    x1_ptr, x2_ptr, a1_ptr, a2_ptr, b1_ptr, b2_ptr, c1_ptr, c2_ptr, sum1_ptr, sum2_ptr, a1_begin, a1_end, a2_begin, a2_end,
    b1_begin, b1_end, b2_begin, b2_end, c1_begin, c1_end, c2_begin, c2_end, programs, count1, count2, BLOCK: tl.constexpr,
):  # fmt: skip
    """sum = x + a + b + c in the sum's dtype, where any may be missing. Numbers [begin, end) of the sum are those that a, b or c has.

    A program has BLOCK numbers of the first of each pair, or, behind its programs, of the second.
    """
    if tl.program_id(0) < programs:
        block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = _added(_number(x1_ptr, block, count1), a1_ptr, block, a1_begin, a1_end)
        total = _added(_added(total, b1_ptr, block, b1_begin, b1_end), c1_ptr, block, c1_begin, c1_end)
        tl.store(sum1_ptr + block, total.to(sum1_ptr.dtype.element_ty), mask=block < count1)
    else:
        block = (tl.program_id(0) - programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = _added(_number(x2_ptr, block, count2), a2_ptr, block, a2_begin, a2_end)
        total = _added(_added(total, b2_ptr, block, b2_begin, b2_end), c2_ptr, block, c2_begin, c2_end)
        tl.store(sum2_ptr + block, total.to(sum2_ptr.dtype.element_ty), mask=block < count2)


@triton.jit
def _number(x_ptr, block, count):
    if x_ptr is not None:
        return tl.load(x_ptr + block, mask=block < count)
    return tl.zeros(block.shape, tl.float32)


@triton.jit
def _added(total, more_ptr, block, begin, end):
    if more_ptr is not None:
        inside = (block >= begin) & (block < end)
        total = tl.where(inside, total + tl.load(more_ptr + (block - begin), mask=inside, other=0), total)
    return total


@triton.jit
def row_kernel(
    x1_ptr, x2_ptr, out1_ptr, out2_ptr, index_ptr, stride_s1, stride_b1, stride_h1, stride_s2, stride_b2, stride_h2, width1, width2,
    DIM1: tl.constexpr, DIM2: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of one batch of the first or second tensor: out[i] = x[index[i]], or with ADD out[index[i]] += x[i].

    Without an index, index[i] is i.
    """
    row = tl.program_id(0).to(tl.int64)
    chosen = row
    if index_ptr is not None:
        chosen = tl.load(index_ptr + row)
    source, target = chosen, row
    if ADD:
        source, target = row, chosen
    batch = tl.program_id(1).to(tl.int64)
    target = target * tl.num_programs(1) + batch
    if tl.program_id(2) == 0:
        _move_row(x1_ptr + source * stride_s1 + batch * stride_b1, stride_h1, out1_ptr + target * width1, width1, DIM1, ADD, BLOCK)
    else:
        _move_row(x2_ptr + source * stride_s2 + batch * stride_b2, stride_h2, out2_ptr + target * width2, width2, DIM2, ADD, BLOCK)


@triton.jit
def _move_row(x_ptr, stride_h, out_ptr, width, DIM: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < width
        x = tl.load(x_ptr + (columns // DIM).to(tl.int64) * stride_h + columns % DIM, mask=mask)
        if ADD:
            x += tl.load(out_ptr + columns, mask=mask)
        tl.store(out_ptr + columns, x, mask=mask)
