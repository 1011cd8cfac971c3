"""Reads of block tables and of works on the device: which rows a program has, and which columns each step."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import table
from . import work_queue

# columns of segments and items
BEGIN, FULL_BEGIN, FULL_END, END = (gl.constexpr(column) for column in (table.BEGIN, table.FULL_BEGIN, table.FULL_END, table.END))
LO, HI, ROW_BEGIN, ROW_END = (gl.constexpr(column) for column in (table.LO, table.HI, table.ROW_BEGIN, table.ROW_END))
FIRST_SEGMENT, LAST_SEGMENT, SPLIT = (gl.constexpr(column) for column in (table.FIRST_SEGMENT, table.LAST_SEGMENT, table.SPLIT))
# columns of works
WORK_COLUMNS, BEFORE, AFTER = (gl.constexpr(x) for x in (work_queue.WORK_COLUMNS, work_queue.BEFORE, work_queue.AFTER))
IDLE_BITS = gl.constexpr(work_queue.IDLE_BITS)


@gluon.jit
def load_segment(segments_ptr, segment):
    """(begin, full_begin, full_end, end): see `table.BlockTable`."""
    ptr = segments_ptr + segment * 8
    return gl.load(ptr), gl.load(ptr + FULL_BEGIN), gl.load(ptr + FULL_END), gl.load(ptr + END)


@gluon.jit
def idle_of(found, WARPGROUP: gl.constexpr):
    """How many of a work's steps BEFORE or AFTER the others are idle for a warpgroup, as it has no live pair there."""
    return (found >> (IDLE_BITS * WARPGROUP)) & ((1 << IDLE_BITS) - 1)


@gluon.jit
def load_span(segments_ptr, segment, whole, ALIGN: gl.constexpr):
    """(start, full_begin, full_end, end) of a segment, in steps from multiples of ALIGN; those in [full_begin, full_end) need no mask."""
    ptr = segments_ptr + segment * 8
    start = gl.load(ptr) // ALIGN * ALIGN
    full_begin = gl.cdiv(gl.load(ptr + FULL_BEGIN), ALIGN) * ALIGN
    full_end = gl.load(ptr + FULL_END) // ALIGN * ALIGN
    return start, full_begin, gl.where(whole, full_end, 0), gl.load(ptr + END)


@gluon.jit
def count_steps(segments_ptr, segment_begin, segment_end, STEP: gl.constexpr, ALIGN: gl.constexpr):
    """The number of blocks of the segments."""
    steps = 0
    for segment in range(segment_begin, segment_end):
        start = gl.load(segments_ptr + segment * 8) // ALIGN * ALIGN
        steps += gl.cdiv(gl.load(segments_ptr + segment * 8 + END) - start, STEP)
    return steps


@gluon.jit
def side_by_side(program, item_count, chunk, heads):
    """(item, head) of the program with this number. Programs go through `chunk` heads side by side, their longest blocks first."""
    rest = program % (item_count * chunk)
    head_index = program // (item_count * chunk) * chunk
    here = gl.minimum(chunk, heads - head_index)
    head_index += rest % here
    return rest // here, head_index


class Walk(NamedTuple):
    """The segments [begin, end) that a program walks, and how many steps these have in all heads together."""

    segments_ptr: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    steps: gl.tensor


@gluon.jit
def load_item(
    item_ptr, item_count, head_index, segments_ptr, dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dvb, stride_dvh, kv_heads, group,
    STEP: gl.constexpr,
):  # fmt: skip
    """A program's block of key rows, walk, batch and key/value head, and where dk and dv of these begin."""
    block_begin = gl.load(item_ptr)
    segment_begin = gl.load(item_ptr + FIRST_SEGMENT)
    segment_end = gl.load(item_ptr + LAST_SEGMENT)
    batch = head_index // kv_heads
    kv_head = head_index % kv_heads
    # the partials of a split are stored as further batches
    batches = gl.num_programs(0) // (item_count * kv_heads)
    place = (gl.load(item_ptr + SPLIT) * batches + batch).to(gl.int64)
    dk_ptr += place * stride_dkb + kv_head.to(gl.int64) * stride_dkh
    dv_ptr += place * stride_dvb + kv_head.to(gl.int64) * stride_dvh
    steps = count_steps(segments_ptr, segment_begin, segment_end, STEP, STEP) * group
    # a block without a segment is written as zeros: it reads any one segment, and has no step
    segment_begin = gl.where(steps > 0, segment_begin, 0)
    segment_end = gl.where(steps > 0, segment_end, 0)
    return block_begin, Walk(segments_ptr, segment_begin, segment_end, steps), batch, kv_head, dk_ptr, dv_ptr
