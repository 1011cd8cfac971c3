"""dQ of the fused kernel: its parts, their way to the sums in global memory, and from there to dq.

A warpgroup computes half of a step's dQ, in one part or two. The sums are fp32, and lie in the order in which the warpgroup's threads hold
them; `finish_kernel` brings them into the order of dq.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from .fences import hide_uniform
from .language import async_add_shared_to_global
from .panels import main_columns, matrix, zero_block

WIDTH = gl.constexpr(64)  # rows and columns of the part of dq that a warpgroup computes
SUMS = gl.constexpr(256)  # sums of dq in a row of their buffer
DQ_PRODUCTS = gl.constexpr(2)  # that make a part of dq: one for the keys of each warpgroup


class Staging(NamedTuple):
    """What the two warpgroups exchange or leave for the copy engine in shared memory: buffers of dS, and their parts of dQ.

    touches: where programs have whole heads for themselves, of the step of each stage (see `owned_dq.touch_of`).
    """

    ds: gl.tensor
    dq: gl.tensor
    touches: gl.tensor


class Handover(NamedTuple):
    """Barriers: a buffer of dS is full, or empty again; in turns, both parts of dQ are staged, or taken from there."""

    ds_full: gl.tensor
    ds_empty: gl.tensor
    staged: gl.tensor
    taken: gl.tensor


@gluon.constexpr_function
def dq_part(head_dim, step, half, part):
    """(panel of K, first column in it, columns) of one part of a warpgroup's share of dS K.

    The share is half of the rows if a step has 128, else half of the columns of each panel; of panels of 64 and 32 it is one panel.
    """
    main, rest = main_columns(head_dim), head_dim - main_columns(head_dim)
    if step == 128:
        return 0, 0, main
    if main == 64 and rest:
        return half, 0, (main, rest)[half]
    width = (main, rest)[part] // 2
    return part, half * width, width


dq_part_of = functools.cache(dq_part)  # for the host, as `main_columns_of`


@gluon.constexpr_function
def place_of_dq(head_dim, step, half, part):
    """(panel, first row, rows) of the sums of one part of dq, among the sums of its step, which lie panel by panel.

    Sums of 64 rows lie together, and within them the sums of 8 columns. A step of 128 rows has two parts of 64.
    """
    panel, column, columns = dq_part(head_dim, step, half, part)
    first = half * head_dim if step == 128 else column
    return panel, first * WIDTH.value // SUMS.value, columns * WIDTH.value // SUMS.value


@gluon.constexpr_function
def row_of_sums(head_dim):
    """(shift, factor): head_dim / SUMS is factor / 2^shift."""
    even = head_dim & -head_dim
    return (SUMS.value // even).bit_length() - 1, head_dim // even


@gluon.jit
def start_dq(
    k_s, ds_s, buffer, size, HALF: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, PART: gl.constexpr
):  # fmt: skip
    """Start a part of this warpgroup's half of dS K."""
    WHERE: gl.constexpr = dq_part(HEAD_DIM, STEP, HALF, PART)
    dq = zero_block(WIDTH, WHERE[2])
    buffer = hide_uniform(buffer, size)
    for half in gl.static_range(DQ_PRODUCTS):
        ds = ds_s.index(buffer * 2 + half)
        if STEP == 128:
            ds = ds.slice(HALF * WIDTH, WIDTH, dim=1)
        k = matrix(k_s[WHERE[0]], hide_uniform(half, size))
        if k.type.shape[1] > WHERE[2]:
            k = k.slice(WHERE[1], WHERE[2], dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def first_row_of_sums(row, HEAD_DIM: gl.constexpr):
    """row * HEAD_DIM // SUMS, without overflow: row is a multiple of 64."""
    SCALE: gl.constexpr = row_of_sums(HEAD_DIM)
    return (row >> SCALE[0]) * SCALE[1]


@gluon.jit
def in_order_of_sums(dq):
    """dq [64, columns] in rows of SUMS, in the order in which this warpgroup's threads hold it."""
    COLUMNS: gl.constexpr = dq.type.shape[1]
    # warp, half of its rows, row, group of columns, pair, column: a thread's four sums side by side, no two threads in one bank
    x = gl.reshape(dq, [4, 2, 8, COLUMNS // 8, 4, 2])
    return gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [WIDTH * COLUMNS // SUMS, SUMS])


@gluon.jit
def stage_dq(place, dq):
    """Store dq where the copy engine takes it."""
    place.store(in_order_of_sums(dq))
    fence_async_shared()


@gluon.jit
def add_dq(sums, staging, dq, row, HALF: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, PART: gl.constexpr):
    """Have the copy engine add a part of dq to the sums."""
    WHERE: gl.constexpr = dq_part(HEAD_DIM, STEP, HALF, PART)
    PLACE: gl.constexpr = place_of_dq(HEAD_DIM, STEP, HALF, PART)
    tma.store_wait(0)
    place = staging.index(HALF)
    if WHERE[2] < WIDTH:
        place = place.slice(0, PLACE[2], dim=0)
    stage_dq(place, dq)
    coordinates = [first_row_of_sums(row, HEAD_DIM) + PLACE[0] * (main_columns(HEAD_DIM) * WIDTH // SUMS) + PLACE[1], 0]
    if WHERE[2] < WIDTH and len(sums) == 2:
        async_add_shared_to_global(sums[1], coordinates, place)
    else:
        async_add_shared_to_global(sums[0], coordinates, place)


@gluon.jit
def hand_over_dq(
    staging, handover, dq, n, HALF: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """Leave this warpgroup's part of the n-th dq to `produce_and_add`."""
    PLACE: gl.constexpr = place_of_dq(HEAD_DIM, STEP, HALF, PART)
    mbarrier.wait(handover.taken, ((n * PARTS + PART) & 1) ^ 1)
    stage_dq(staging[PLACE[0]].slice(PLACE[1], PLACE[2], dim=0), dq)
    mbarrier.arrive(handover.staged, count=1)


@gluon.jit
def allocate_staging(sums, PARTS: gl.constexpr):
    """Shared memory for both warpgroups' dq of a step, in panels: for all of it, or, if it has two parts, for one part at a time."""
    main = gl.allocate_shared_memory(gl.float32, sums[0].block_type.shape, sums[0].layout)
    if len(sums) == 1:
        return (main,)
    elif PARTS == 2:
        return (main, main.slice(0, sums[1].block_type.shape[0], dim=0))
    else:
        return (main, gl.allocate_shared_memory(gl.float32, sums[1].block_type.shape, sums[1].layout))


@gluon.jit
def add_panels(sums, staging, row, HEAD_DIM: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr):
    """Have the copy engine add what both warpgroups left: all panels, or, if dq has two parts, one panel for each part."""
    first = first_row_of_sums(row, HEAD_DIM)
    for panel in gl.static_range(len(staging)):
        if PARTS == 1 or panel == PART:
            async_add_shared_to_global(sums[panel], [first, 0], staging[panel])
        first += staging[panel].type.shape[0]


@triton.jit(do_not_specialize=["heads", "q_rows", "padded_rows"])
def finish_kernel(
    sums_ptr, dq_ptr, stride_b, stride_s, stride_h, heads, q_rows, padded_rows, softmax_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq of 64 rows of one head, in COLUMNS columns, from its sums, HEAD_DIM a row, which lie in the order of `add_dq`."""
    ROWS: tl.constexpr = 64
    blocks = padded_rows // ROWS
    head_index = tl.program_id(0) // blocks
    offsets = tl.arange(0, ROWS * BLOCK_D)
    sums = tl.load(sums_ptr + tl.program_id(0).to(tl.int64) * (ROWS * HEAD_DIM) + offsets, mask=offsets < ROWS * HEAD_DIM)
    # group of columns, warp, row, pair, half of a warp's rows, column
    sums = tl.reshape(sums, [BLOCK_D // 8, 4, 8, 4, 2, 2])
    # [ROWS, BLOCK_D]
    dq = tl.reshape(tl.permute(sums, [1, 4, 2, 0, 3, 5]), [ROWS, BLOCK_D]) * softmax_scale
    rows = ((tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < q_rows) & (columns < COLUMNS)
    dq_ptr += (head_index // heads).to(tl.int64) * stride_b + (head_index % heads).to(tl.int64) * stride_h
    pointers = dq_ptr + (rows.to(tl.int64) * stride_s + columns)
    if ADD:
        dq += tl.load(pointers, mask=inside)
    tl.store(pointers, dq.to(dq_ptr.dtype.element_ty), mask=inside)
