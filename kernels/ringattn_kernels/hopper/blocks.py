"""Device helpers that all Hopper backward kernels share: sizes, the mask of an edge block, and the store of a gradient."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .language import reinterpret
from .tables import END, HI, LO, ROW_BEGIN, ROW_END
from .threads import wide_rows

ROWS = gl.constexpr(64)  # of a warpgroup
BLOCK = gl.constexpr(128)  # of a program


class Gradients(NamedTuple):
    """Where a program writes dk and dv, and the strides of their rows."""

    dk_ptr: gl.tensor
    dv_ptr: gl.tensor
    dk_stride: gl.tensor
    dv_stride: gl.tensor


@gluon.jit
def mask_scores(p, segments_ptr, segment, row0, start, OTHER: gl.constexpr = 0.0):
    """p with OTHER outside of the segment. The first row of p is row0, and its first column is start."""
    L: gl.constexpr = p.type.layout
    ptr = segments_ptr + segment * 8
    begin = gl.load(ptr)
    end = gl.load(ptr + END)
    lo = gl.load(ptr + LO)
    hi = gl.load(ptr + HI)
    row_begin = gl.load(ptr + ROW_BEGIN)
    row_end = gl.load(ptr + ROW_END)
    rows = row0 + gl.arange(0, p.type.shape[0], gl.SliceLayout(1, L))
    columns = gl.expand_dims(start + gl.arange(0, p.type.shape[1], gl.SliceLayout(0, L)), 0)
    first = gl.maximum(rows - hi, begin)
    last = gl.minimum(rows - lo, end - 1)
    last = gl.where((rows >= row_begin) & (rows < row_end), last, -1)
    live = (columns >= gl.expand_dims(first, 1)) & (columns <= gl.expand_dims(last, 1))
    return gl.where(live, p, OTHER)


@gluon.jit
def drop_dead(dp, p):
    """dp with zeros where p is 0: in a pair that is not live dp may be NaN, and 0 * NaN would reach a key that no such query sees."""
    return gl.where(p == 0.0, 0.0, dp)


@gluon.jit
def tile(buffer, index, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """One [ROWS, COLUMNS] block of a buffer that the copy engine fills in its four dimensions."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], buffer.dtype)
    return reinterpret(buffer.index(index), buffer.dtype, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def write_rows(
    ptr, stride, value, row0, row_count, ADD: gl.constexpr, WIDE: gl.constexpr = True, STREAM: gl.constexpr = False,
    COLUMNS: gl.constexpr = 256,
):  # fmt: skip
    """Add a block of rows to a matrix with contiguous columns, or store it. WIDE: in 16 bits, 16 bytes at a time, which takes registers.

    STREAM: they leave the L2 before what else is there. COLUMNS: of the matrix, which may have fewer than the block.
    """
    value = value.to(ptr.dtype.element_ty)
    if WIDE and value.dtype.primitive_bitwidth == 16 and value.type.shape[1] <= 128:
        # 4 bytes side by side, as a product leaves them, are half of the least that memory moves
        value = wide_rows(value)
    L: gl.constexpr = value.type.layout
    rows = row0 + gl.arange(0, value.type.shape[0], gl.SliceLayout(1, L))
    columns = gl.arange(0, value.type.shape[1], gl.SliceLayout(0, L))
    pointers = ptr + (gl.expand_dims(rows, 1).to(gl.int64) * stride + gl.expand_dims(columns, 0))
    inside = gl.expand_dims(rows < row_count, 1)
    if value.type.shape[1] > COLUMNS:
        inside &= gl.expand_dims(columns < COLUMNS, 0)
    if ADD:
        value += gl.load(pointers, mask=inside, other=0.0)
    gl.store(pointers, value, mask=inside, cache_modifier=".cs" if STREAM else "")
