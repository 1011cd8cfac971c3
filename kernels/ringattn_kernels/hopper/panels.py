"""Panels: a head dim that is no power of two as two blocks of columns.

Gluon's tensors have powers of two of columns. A head dim of 96 is a main panel of 64 columns and a rest of 32; 192 is 128 and 64; a power
of two is one panel. Products that sum over the head dim go through the panels one after the other; products with one column for each
element of the head dim have one accumulator for each panel. Buffers, tiles and accumulators are tuples with one element for each panel.
The backward has one buffer for each panel. The forward has room for blocks of 128 columns, and takes the panels of 96 columns from them.
"""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .language import async_load, reinterpret


@gluon.constexpr_function
def main_columns(head_dim: int) -> int:
    """Columns of the main panel: the largest power of two within the head dim."""
    return 1 << (head_dim.bit_length() - 1)


# for the host: Triton takes long to call a function that kernels call too
main_columns_of = functools.cache(main_columns)


def has_rest(head_dim: int) -> bool:
    """Whether there is a second panel."""
    return head_dim > main_columns_of(head_dim)


@gluon.jit
def panels(main, rest):
    """The descriptors of both panels, or of the only one."""
    if rest is None:
        return (main,)
    else:
        return (main, rest)


@gluon.jit
def allocate_panels(descs, COUNT: gl.constexpr):
    """Shared memory for COUNT blocks."""
    buffers = ()
    for i in gl.static_range(len(descs)):
        buffers += (allocate_blocks(descs[i], COUNT),)
    return buffers


@gluon.jit
def allocate_blocks(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT blocks of one panel."""
    SHAPE: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [COUNT, 1, SHAPE[1], 1, SHAPE[3]], desc.layout)


@gluon.jit
def load_panels(descs, batch, row, head, full, buffers, index):
    """Have the copy engine load a block, and tell `full`, which expects `panel_bytes`."""
    async_load(descs[0], [batch, row, head, 0], full, buffers[0].index(index))
    if len(descs) == 2:
        async_load(descs[1], [batch, row, head, descs[0].block_type.shape[3]], full, buffers[1].index(index))


@gluon.constexpr_function
def panel_bytes(descs):
    """The bytes of one block."""
    return sum(desc.block_type.nbytes for desc in descs)


@gluon.jit
def matrices(buffers, index):
    """A block of each buffer as a matrix, [rows, columns]."""
    result = ()
    for i in gl.static_range(len(buffers)):
        result += (matrix(buffers[i], index),)
    return result


@gluon.jit
def matrix(buffer, index):
    """One block of a buffer that the copy engine fills in its four dimensions."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=buffer.type.layout.swizzle_byte_width, element_bitwidth=16, rank=2
    )
    return reinterpret(buffer.index(index), buffer.dtype, [buffer.type.shape[2], buffer.type.shape[4]], LAYOUT)


@gluon.jit
def part_panels(x, PANELS: gl.constexpr):
    """All columns of a block as one panel, or the first 64 of 128 and the next 32 as two."""
    if PANELS == 1:
        return (x,)
    else:
        return (x.slice(0, 64, dim=1), x.slice(64, 32, dim=1))


@gluon.jit
def some_rows(panels, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """COUNT rows of each panel."""
    result = ()
    for i in gl.static_range(len(panels)):
        result += (panels[i].slice(FIRST, COUNT, dim=0),)
    return result


@gluon.jit
def zeros(ROWS: gl.constexpr, panels):
    """Accumulators, [ROWS, columns]."""
    result = ()
    for i in gl.static_range(len(panels)):
        result += (zero_block(ROWS, panels[i].type.shape[1]),)
    return result


@gluon.jit
def zero_block(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros in the layout in which one warpgroup accumulates."""
    return gl.zeros([ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def start_sum(left, right, acc, ADD: gl.constexpr):
    """Start left right^T, summed over all columns, added to acc if ADD."""
    for i in gl.static_range(len(left)):
        acc = warpgroup_mma(left[i], right[i].permute((1, 0)), acc, use_acc=ADD or i > 0, is_async=True)
    return acc


@gluon.jit
def start_each(left, right, accumulators):
    """Start left right, a product a panel, added to its accumulator."""
    result = ()
    for i in gl.static_range(len(right)):
        result += (warpgroup_mma(left, right[i], accumulators[i], is_async=True),)
    return result


@gluon.jit
def split_columns(x):
    """The left and the right half of the columns that a warpgroup accumulated."""
    ROWS: gl.constexpr = x.type.shape[0]
    HALF: gl.constexpr = x.type.shape[1] // 2
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, HALF]), [0, 2, 1]))
    return gl.convert_layout(left, L, assert_trivial=True), gl.convert_layout(right, L, assert_trivial=True)


@gluon.jit
def join_columns(left, right):
    """The inverse of `split_columns`."""
    ROWS: gl.constexpr = left.type.shape[0]
    COLUMNS: gl.constexpr = left.type.shape[1] * 2
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    x = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [ROWS, COLUMNS])
    return gl.convert_layout(x, L, assert_trivial=True)
