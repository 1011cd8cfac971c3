"""dq of the heads that a program has for itself: from the steps' parts through sums to dq. `touches` says what each step does.

The sums lie as those of `dq_sums`, and are those of the heads that programs have at work.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from . import touches
from .barriers import wait_until_stored
from .blocks import write_rows
from .dq_sums import SUMS, WIDTH, dq_part, first_row_of_sums, in_order_of_sums, place_of_dq, stage_dq
from .language import async_add_shared_to_global, async_store
from .panels import main_columns
from .works import take

STEP_BIT, FIRST, LAST = (gl.constexpr(x) for x in (touches.STEP, touches.FIRST, touches.LAST))
BEHIND, NEAR, LATE = (gl.constexpr(x) for x in (touches.BEHIND, touches.NEAR, touches.LATE))


class OwnRows(NamedTuple):
    """The sums of each program's heads, the numbers of `touches`, and dq with the strides of its batches, heads and rows."""

    sums_ptr: gl.tensor
    touches_ptr: gl.tensor
    dq_ptr: gl.tensor
    dq_batch: gl.tensor
    dq_head: gl.tensor
    dq_stride: gl.tensor
    q_rows: gl.tensor
    padded_rows: gl.tensor
    softmax_scale: gl.tensor


@gluon.jit
def dq_of(own, work, group):
    """Where dq of the first query head of a work begins."""
    return own.dq_ptr + (work.batch.to(gl.int64) * own.dq_batch + (work.kv_head * group).to(gl.int64) * own.dq_head)


@gluon.jit
def touch_of(own, segment, member, start, STEP: gl.constexpr):
    """A step of a query head of the group: its number, and the first row of its sums, a multiple of 64, in one. 0 is no step."""
    number = gl.load(own.touches_ptr + gl.load(own.touches_ptr + segment) + start // STEP)
    return member * own.padded_rows + start + number


@gluon.jit
def take_touch(staging, stage):
    """The `touch_of` that came with the queries of a stage."""
    return take(staging.touches, stage)


@gluon.jit
def leave_dq(
    sums, staging, own, dq_ptr, dq, touch, group, HALF: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Have a part of a step's dq stored where its block's sums lie, or added to them, or write their total to dq (see `dq_of`)."""
    WHERE: gl.constexpr = dq_part(HEAD_DIM, STEP, HALF, 0)
    PLACE: gl.constexpr = place_of_dq(HEAD_DIM, STEP, HALF, 0)
    PANEL: gl.constexpr = 1 if WHERE[2] < WIDTH and len(sums) == 2 else 0
    number = touch % WIDTH
    row = touch - number
    sums_row = first_row_of_sums(gl.program_id(0) * group * own.padded_rows + row, HEAD_DIM)
    sums_row += PLACE[0] * (main_columns(HEAD_DIM) * WIDTH // SUMS) + PLACE[1]
    if number >= NEAR:
        wait_until_stored(0)
    elif number >= BEHIND:
        wait_until_stored(LATE)
    if number & LAST:
        total = total_of_dq(own.sums_ptr + sums_row * SUMS, dq, (number & FIRST) == 0) * own.softmax_scale
        member = row // own.padded_rows
        first = row - member * own.padded_rows + (HALF * WIDTH if STEP == 128 else 0)
        dq_ptr += member.to(gl.int64) * own.dq_head + (WHERE[0] * main_columns(HEAD_DIM) + WHERE[1])
        write_rows(dq_ptr, own.dq_stride, total, first, own.q_rows, False, STREAM=True)
    elif number & STEP_BIT:
        place = staging.index(HALF)
        if WHERE[2] < WIDTH:
            place = place.slice(0, PLACE[2], dim=0)
        tma.store_wait(0)
        stage_dq(place, dq)
        if number & FIRST:
            async_store(sums[PANEL], [sums_row, 0], place)
        else:
            async_add_shared_to_global(sums[PANEL], [sums_row, 0], place)


@gluon.jit
def total_of_dq(sums_ptr, dq, some):
    """dq and, if there are some, the sums at sums_ptr."""
    COLUMNS: gl.constexpr = dq.type.shape[1]
    x = in_order_of_sums(dq)
    L: gl.constexpr = x.type.layout
    offsets = gl.expand_dims(gl.arange(0, x.type.shape[0], gl.SliceLayout(1, L)) * SUMS, 1)
    offsets += gl.expand_dims(gl.arange(0, SUMS, gl.SliceLayout(0, L)), 0)
    # past the L1, which does not know what the copy engine wrote
    x += gl.load(sums_ptr + offsets, mask=some, other=0.0, cache_modifier=".cg")
    x = gl.permute(gl.reshape(x, [COLUMNS // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.convert_layout(gl.reshape(x, [WIDTH, COLUMNS]), dq.type.layout, assert_trivial=True)
