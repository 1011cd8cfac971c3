"""dk and dv of a work of the fused kernel: from the registers of a warpgroup to global memory.

In 16 bits, where a single launch finds them, the copy engine stores them, from shared memory (`fused.stores_by_copy` decides). Otherwise
threads store their pieces of rows, or add them to what is there.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .blocks import ROWS, write_rows
from .language import async_store, barrier, reinterpret
from .panels import matrix


class GradientRows(NamedTuple):
    """dk and dv, and the strides of their batches, heads and rows. Descriptors are there where the copy engine stores them."""

    dk_desc: gl.tensor
    dv_desc: gl.tensor
    dk_ptr: gl.tensor
    dv_ptr: gl.tensor
    dk_batch: gl.tensor
    dk_head: gl.tensor
    dk_stride: gl.tensor
    dv_batch: gl.tensor
    dv_head: gl.tensor
    dv_stride: gl.tensor


@gluon.jit
def write_gradients(
    gradients, room, work, batches, k_rows, dk, dv, dk_factor, dv_factor, HALF: gl.constexpr, ADD: gl.constexpr, WIDE: gl.constexpr,
    STREAM: gl.constexpr, COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Write this warpgroup's rows of dk and dv (panels), times a factor each. The partials of a split are stored as further batches.

    room: 16 KB of shared memory from which the copy engine stores. COLUMNS and V_COLUMNS: of dk and dv in global memory, which may have
    fewer. WIDE and STREAM: as in `write_rows`.
    """
    batch = work.split * batches + work.batch
    row = work.block_begin + HALF * ROWS
    if gradients.dk_desc is not None:
        store_rows(gradients.dv_desc, room, dv[0], dv_factor, batch, row, work.kv_head)
        store_rows(gradients.dk_desc, room, dk[0], dk_factor, batch, row, work.kv_head)
    else:
        place, head = batch.to(gl.int64), work.kv_head.to(gl.int64)
        dk_ptr = gradients.dk_ptr + (place * gradients.dk_batch + head * gradients.dk_head)
        dv_ptr = gradients.dv_ptr + (place * gradients.dv_batch + head * gradients.dv_head)
        write_panels(dk_ptr, gradients.dk_stride, dk, dk_factor, row, k_rows, ADD, WIDE, STREAM, COLUMNS)
        write_panels(dv_ptr, gradients.dv_stride, dv, dv_factor, row, k_rows, ADD, WIDE, STREAM, V_COLUMNS)


@gluon.jit
def store_rows(desc, room, values, factor, batch, row, head):
    """Have the copy engine store rows of a head, times a factor, once it has read what was in the room before."""
    COLUMNS: gl.constexpr = values.type.shape[1]
    tma.store_wait(0)
    blocks = reinterpret(room, desc.dtype, [128 // COLUMNS, 1, ROWS, 1, COLUMNS], desc.layout)
    matrix(blocks, 0).store((values * factor).to(desc.dtype))
    fence_async_shared()
    barrier()
    async_store(desc, [batch, row, head, 0], blocks.index(0))


@gluon.jit
def write_panels(
    ptr, stride, values, factor, row0, row_count, ADD: gl.constexpr, WIDE: gl.constexpr, STREAM: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """`write_rows` of all panels, times a factor."""
    MAIN: gl.constexpr = values[0].type.shape[1]
    write_rows(ptr, stride, values[0] * factor, row0, row_count, ADD, WIDE, STREAM, COLUMNS)
    if len(values) == 2 and COLUMNS > MAIN:
        write_rows(ptr + MAIN, stride, values[1] * factor, row0, row_count, ADD, WIDE, STREAM, COLUMNS - MAIN)
