"""Device helpers that the plain kernels share: loads of row blocks, segments and the mask of an edge block."""

import triton
import triton.language as tl


@triton.jit
def load_rows(ptr, start, stride, end, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Rows [start, start + ROWS) of a matrix with contiguous columns; zero past column DIM and, if MASKED, from row `end` on."""
    columns = tl.arange(0, BLOCK_DIM)
    if MASKED:
        # addresses are computed at each step: edge blocks are rare, and hoisted addresses would take registers in the full blocks' loop
        rows = start + tl.arange(0, ROWS)
        pointers = ptr + (rows.to(tl.int64)[:, None] * stride + columns[None, :])
        inside = rows[:, None] < end
    else:
        # only the scalar base moves from step to step
        rows = tl.arange(0, ROWS)
        pointers = ptr + tl.cast(start, tl.int64) * stride + (rows.to(tl.int64)[:, None] * stride + columns[None, :])
    if MASKED and DIM != BLOCK_DIM:
        return tl.load(pointers, mask=inside & (columns[None, :] < DIM), other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=inside, other=0.0)
    elif DIM != BLOCK_DIM:
        return tl.load(pointers, mask=columns[None, :] < DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_block(
    desc, ptr, batch, head, start, stride, end,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`load_rows`, by the copy engine if there is a descriptor (b, rows, heads, DIM) and no row to leave out."""
    if MASKED or desc is None:
        return load_rows(ptr, start, stride, end, ROWS, DIM, BLOCK_DIM, MASKED)
    else:
        return desc.load([batch, start, head, 0]).reshape([ROWS, BLOCK_DIM])


@triton.jit
def load_segment(segments_ptr, segment):
    """(begin, full_begin, full_end, end, lo, hi, row_begin, row_end): see `table.BlockTable`."""
    ptr = segments_ptr + tl.cast(segment, tl.int64) * 8
    return (
        tl.load(ptr),
        tl.load(ptr + 1),
        tl.load(ptr + 2),
        tl.load(ptr + 3),
        tl.load(ptr + 4),
        tl.load(ptr + 5),
        tl.load(ptr + 6),
        tl.load(ptr + 7),
    )


@triton.jit
def live_columns(rows, end, lo, hi, row_begin, row_end):
    """First and last live column of each row; an empty interval for rows outside of the segment."""
    first = rows - hi
    last = tl.minimum(rows - lo, end - 1)
    last = tl.where((rows >= row_begin) & (rows < row_end), last, -1)
    return first, last


@triton.jit
def edge_start(step, begin, full_begin, full_end, STEP: tl.constexpr):
    """Start of edge block `step`: those left of the full blocks come first, then those right of them."""
    start = begin + step * STEP
    return tl.where(start >= full_begin, start + (full_end - full_begin), start)


@triton.jit
def edge_count(begin, full_begin, full_end, end, STEP: tl.constexpr):
    """Number of edge blocks of a segment."""
    return tl.cdiv(end - full_end, STEP) + (full_begin - begin) // STEP
