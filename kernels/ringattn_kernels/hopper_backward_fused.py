"""Exact attention over a tile table, backward, for Hopper, in one pass of five products.

    P = exp2(scale Q K^T - pivot)        dV += P^T dout
    dS = P * (dout V^T - delta)          dK += softmax_scale dS^T Q      dQ += softmax_scale dS K

A program owns 128 key rows of one key/value head and meets blocks of queries of all heads of its group, as in
`hopper_backward.key_kernel`. Besides, dS goes through shared memory for the product with K, and the copy engine adds the result to
sums of dq in global memory, in fp32, to which any number of launches may add. `finish` scales the sums and adds them to dq, or writes it.
dk and dv are the same bits from the same inputs. So is dq where programs take turns to add (`turns`), ORDERED; else it is up to
rounding, for which of two programs adds first is not fixed.

Shapes: as in `backward`.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import hopper_backward, launches
from .config import padded
from .gluon_words import async_add_shared_to_global, plain_layout, wait_for_products
from .hopper_backward import (
    BLOCK,
    ROWS,
    Launch,
    advance,
    allocate_queries,
    key_arguments,
    load_item,
    load_keys,
    load_queries,
    load_span,
    mask_scores,
    opaque,
    produce_queries,
    side_by_side,
    whole_blocks,
    write_rows,
)
from .hopper_panels import (
    has_rest,
    join_columns,
    main_columns,
    matrix,
    panels,
    rest_descriptor,
    some_rows,
    split_columns,
    start_each,
    start_sum,
    tiles,
    zero_block,
    zeros,
)
from .inputs import Inputs, Statistics
from .table import TileTable
from .turns import Turns, key_turns, look, pass_turn, wait_for_turn
from .units import LOG2_E

Prepared = tuple[torch.Tensor, torch.Tensor]  # pivot and -delta, (b * h, sq in whole blocks)

WIDTH = gl.constexpr(64)  # rows and columns of the part of dq that a warpgroup computes
SUMS = gl.constexpr(256)  # sums of dq in a row of their buffer


@gluon.jit
def anew(x, size):
    """x, an integer, in a way that keeps the compiler from knowing it before it is used: of addresses that follow from it, it would keep
    dozens over a loop, and spill them. size >= 0 is an argument of the kernel, so that they follow in uniform registers.
    """
    return x + gl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def dq_part(head_dim, step, half, part):
    """(panel of K, first column in it, columns) of a part of what a warpgroup computes of dS K.

    It has half of the rows if a step has 128, else half of the columns of each panel; or, of 64 and 32, one panel.
    """
    main, rest = main_columns(head_dim), head_dim - main_columns(head_dim)
    if step == 128:
        return 0, 0, main
    if main == 64:
        return half, 0, (main, rest)[half]
    width = (main, rest)[part] // 2
    return part, half * width, width


@gluon.constexpr_function
def place_of_dq(head_dim, step, half, part):
    """(panel, first row, rows) of the sums that a part of dq has among those of its step, panel by panel.

    Sums of 64 rows come together, and of these those of 8 columns; a step of 128 rows has two parts of 64.
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
    """A part of this warpgroup's half of dS K."""
    WHERE: gl.constexpr = dq_part(HEAD_DIM, STEP, HALF, PART)
    dq = zero_block(WIDTH, WHERE[2])
    if STEP == 64:
        buffer = anew(buffer, size)
    for half in gl.static_range(2):
        ds = ds_s.index(buffer * 2 + half)
        if STEP == 128:
            ds = ds.slice(HALF * WIDTH, WIDTH, dim=1)
        k = matrix(k_s[WHERE[0]], anew(half, size) if STEP == 64 else half)
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
def stage_dq(place, dq):
    """Leave dq where the copy engine takes it from, in the order in which this warpgroup's threads hold it."""
    COLUMNS: gl.constexpr = dq.type.shape[1]
    # warp, half of its rows, row, group of columns, pair, column: a thread's four sums side by side, no two threads in one bank
    x = gl.reshape(dq, [4, 2, 8, COLUMNS // 8, 4, 2])
    x = gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [WIDTH * COLUMNS // SUMS, SUMS])
    place.store(x)
    fence_async_shared()


@gluon.jit
def add_dq(
    sums_desc, sums_rest, staging, dq, row, HALF: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, PART: gl.constexpr
):
    """Have the copy engine add a part of dq to the sums."""
    WHERE: gl.constexpr = dq_part(HEAD_DIM, STEP, HALF, PART)
    PLACE: gl.constexpr = place_of_dq(HEAD_DIM, STEP, HALF, PART)
    tma.store_wait(0)
    place = staging.index(HALF)
    if WHERE[2] < WIDTH:
        place = place.slice(0, PLACE[2], dim=0)
    stage_dq(place, dq)
    coordinates = [first_row_of_sums(row, HEAD_DIM) + PLACE[0] * (main_columns(HEAD_DIM) * WIDTH // SUMS) + PLACE[1], 0]
    if WHERE[2] < WIDTH:
        async_add_shared_to_global(sums_rest, coordinates, place)
    else:
        async_add_shared_to_global(sums_desc, coordinates, place)


@gluon.jit
def hand_over_dq(
    staging, staged, taken, dq, n, HALF: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """Leave this warpgroup's part of the n-th dq to `produce_and_add`."""
    PLACE: gl.constexpr = place_of_dq(HEAD_DIM, STEP, HALF, PART)
    mbarrier.wait(taken, ((n * PARTS + PART) & 1) ^ 1)
    stage_dq(staging[PLACE[0]].slice(PLACE[1], PLACE[2], dim=0), dq)
    mbarrier.arrive(staged, count=1)


@gluon.jit
def allocate_staging(sums_descs, PARTS: gl.constexpr):
    """Shared memory for both warpgroups' dq of a step, in panels: for all of it, or, of two parts, for one at a time."""
    main = gl.allocate_shared_memory(gl.float32, sums_descs[0].block_type.shape, sums_descs[0].layout)
    if len(sums_descs) == 1:
        return (main,)
    elif PARTS == 2:
        return (main, main.slice(0, sums_descs[1].block_type.shape[0], dim=0))
    else:
        return (main, gl.allocate_shared_memory(gl.float32, sums_descs[1].block_type.shape, sums_descs[1].layout))


@gluon.jit
def add_panels(sums_descs, staging, row, HEAD_DIM: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr):
    """Have the copy engine add what both warpgroups left: all panels, or, of two parts, one each."""
    first = first_row_of_sums(row, HEAD_DIM)
    for panel in gl.static_range(len(staging)):
        if PARTS == 1 or panel == PART:
            async_add_shared_to_global(sums_descs[panel], [first, 0], staging[panel])
        first += staging[panel].type.shape[0]


@gluon.jit
def load_walk(segments_ptr, segment, whole, STEP: gl.constexpr, ORDERED: gl.constexpr):
    """(start, full_begin, full_end, stop): as `load_span`, or, ORDERED, from the last step down to the one at stop."""
    begin, full_begin, full_end, end = load_span(segments_ptr, segment, whole, STEP)
    if ORDERED:
        return (end - 1) // STEP * STEP, full_begin, full_end, begin
    else:
        return begin, full_begin, full_end, end


@gluon.jit
def walk_back(segments_ptr, segment, segment_begin, start, full_begin, full_end, stop, whole, STEP: gl.constexpr):
    """The step before this one, (segment, start, full_begin, full_end, stop), which may be the last of the segment before."""
    start -= STEP
    if (start < stop) & (segment > segment_begin):
        segment -= 1
        start, full_begin, full_end, stop = load_walk(segments_ptr, segment, whole, STEP, True)
    return segment, start, full_begin, full_end, stop


@gluon.jit
def produce_and_add(
    q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, sums_descs, q_s, k_s, v_s, dout_s, pivot_s, delta_s, staging,
    kv_full, q_full, dout_full, empty, staged, taken, segments_ptr, successors_ptr, counters_ptr, item, segment_begin, segment_end, steps,
    batch, kv_head, group, head0, padded_rows, block_begin,
    STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Bring what the consumers read, as `produce_queries`, and have the copy engine add their dq to the sums when it is this item's turn.

    Steps come from the last to the first, in each of them the heads of the group: under a causal mask all items then begin with the same
    one, and each follows the one before at the distance of an addition.
    """
    load_keys(k_descs, v_descs, k_s, v_s, kv_full, batch, kv_head, block_begin, 2)
    stage = 0
    phase = 0
    member = 0
    segment = gl.maximum(segment_end, 1) - 1
    start, full_begin, full_end, stop = load_walk(segments_ptr, segment, True, STEP, True)
    # the same of what is added, STAGES + 1 steps later
    late_member = 0
    late_segment = gl.maximum(segment_end, 1) - 1
    late_start, _, _, late_stop = load_walk(segments_ptr, late_segment, True, STEP, True)
    successor = gl.load(successors_ptr + late_segment)
    row = head0 * padded_rows + late_start
    seen = -1
    for n in range(steps + STAGES + 1):
        counter_ptr = counters_ptr + row // STEP
        if n < steps:
            head = kv_head * group + member
            statistics = (head0 + member) * padded_rows
            mbarrier.wait(empty.index(stage), phase ^ 1)
            # the answer comes while the copies are started
            seen = look(counter_ptr)
            load_queries(q_descs, pivot_desc, q_s, pivot_s, q_full, stage, batch, head, start, statistics)
            load_queries(dout_descs, delta_desc, dout_s, delta_s, dout_full, stage, batch, head, start, statistics)
            stage, phase = advance(stage, phase, STAGES)
            member += 1
            if member == group:
                member = 0
                segment, start, full_begin, full_end, stop = walk_back(
                    segments_ptr, segment, segment_begin, start, full_begin, full_end, stop, True, STEP
                )
        else:
            seen = -1
        if n == STAGES:
            # there is no step before the first
            for part in gl.static_range(PARTS):
                mbarrier.wait(staged, part)
                mbarrier.arrive(taken, count=1)
        if n > STAGES:
            wait_for_turn(counter_ptr, item, seen)
            for part in gl.static_range(PARTS):
                mbarrier.wait(staged, ((n - STAGES) * PARTS + part) & 1)
                add_panels(sums_descs, staging, row, HEAD_DIM, part, PARTS)
                tma.store_wait(0)
                mbarrier.arrive(taken, count=1)
            pass_turn(counter_ptr, successor)
            late_member += 1
            if late_member == group:
                late_member = 0
                late_start -= STEP
                if (late_start < late_stop) & (late_segment > segment_begin):
                    late_segment -= 1
                    late_start, _, _, late_stop = load_walk(segments_ptr, late_segment, True, STEP, True)
                    successor = gl.load(successors_ptr + late_segment)
            row = (head0 + late_member) * padded_rows + late_start


@gluon.jit
def weights(s, pivots, scale, edge, segments_ptr, segment, row0, start, dtype: gl.constexpr):
    """P of some columns in 16 bits, as a left operand that stays where it is."""
    L: gl.constexpr = s.type.layout
    p = gl.exp2(s * scale - gl.expand_dims(pivots.load(gl.SliceLayout(0, L)), 0))
    if edge:
        p = mask_scores(p, segments_ptr, segment, row0, start)
    return opaque(gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, L, 2), assert_trivial=True))


@gluon.jit
def score_gradient(p16, dp):
    """dS in 16 bits of P in 16 bits."""
    return (gl.convert_layout(p16, dp.type.layout, assert_trivial=True).to(gl.float32) * dp).to(p16.dtype)


@gluon.jit
def consume_and_add(
    q_s, k_s, v_s, dout_s, pivot_s, delta_s, ds_s, staging, kv_full, q_full, dout_full, empty, ds_full, ds_empty, staged, taken,
    sums_desc, sums_rest, dk_ptr, dv_ptr, stride_dks, stride_dvs, segments_ptr, segment_begin, segment_end, steps,
    group, head_row, last_row, padded_rows, k_rows, block_begin, scale, softmax_scale,
    HALF: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, ADD: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 key rows, and this warpgroup's part of each step's dq.

    Where dk and dv take more than 128 registers of a thread, P is kept in 16 bits, comes in two halves, and less runs at a time.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    WIDE: gl.constexpr = is_wide(HEAD_DIM, V_DIM)
    PARTS: gl.constexpr = 2 if WIDE else 1
    BUFFERS: gl.constexpr = ds_s.type.shape[0] // 2
    dtype: gl.constexpr = q_s[0].dtype
    # [ROWS, HEAD_DIM] and [ROWS, V_DIM], in panels
    k = tiles(k_s, HALF)
    v = tiles(v_s, HALF)
    dk = zeros(ROWS, k)
    dv = zeros(ROWS, v)
    zero = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    row0 = block_begin + HALF * ROWS
    whole = block_begin + BLOCK <= k_rows
    segment = segment_begin
    if ORDERED:
        segment = gl.maximum(segment_end, 1) - 1
    start, full_begin, full_end, stop = load_walk(segments_ptr, segment, whole, STEP, ORDERED)
    member = 0
    stage = 0
    phase = 0
    buffer = 0
    turn = 0
    # there is no step before the first: what that adds is past the end of the sums, and the copy engine leaves it out
    last_buffer = BUFFERS - 1
    last_turn = 1
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(q_full.index(0), 0, pred=steps > 0)
    s = start_sum(k, tiles(q_s, 0), zero, False)
    s = warpgroup_mma_wait(0, deps=[s])
    for n in range(steps):
        # [STEP, HEAD_DIM] and [STEP, V_DIM], in panels
        q = tiles(q_s, stage)
        dout = tiles(dout_s, stage)
        # [ROWS, STEP]
        if WIDE:
            edge = (start < full_begin) | (start >= full_end)
            s_left, s_right = split_columns(s)
            pivots = pivot_s.index(stage)
            p_left = weights(s_left, pivots.slice(0, STEP // 2), scale, edge, segments_ptr, segment, row0, start, dtype)
            start_right = start + STEP // 2
            p_right = weights(
                s_right, pivots.slice(STEP // 2, STEP // 2), scale, edge, segments_ptr, segment, row0, start_right, dtype
            )
        mbarrier.wait(dout_full.index(stage), phase)
        # what comes as delta is -delta
        dp = gl.expand_dims(delta_s.index(stage).load(COLUMNS), 0).broadcast_to([ROWS, STEP])
        dp = start_sum(tiles(v_s, anew(HALF, k_rows)) if WIDE else v, dout, dp, True)
        if not WIDE:
            p = gl.exp2(s * scale - gl.expand_dims(pivot_s.index(stage).load(COLUMNS), 0))
            if (start < full_begin) | (start >= full_end):
                p = mask_scores(p, segments_ptr, segment, row0, start)
            p16 = gl.convert_layout(p.to(dtype), LEFT, assert_trivial=True)
        done = stage
        stage, phase = advance(stage, phase, STAGES)
        if WIDE:
            dv_next = start_each(p_left, some_rows(dout, 0, STEP // 2), dv)
            dv_next = start_each(p_right, some_rows(dout, STEP // 2, STEP // 2), dv_next)
            dp = warpgroup_mma_wait(2 * len(dv), deps=[dp])
            p_left = opaque(p_left)
            p_right = opaque(p_right)
            dp_left, dp_right = split_columns(dp)
            shared_ds = join_columns(score_gradient(p_left, dp_left), score_gradient(p_right, dp_right))
        else:
            dv_next = start_each(p16, dout, dv)
            dp = warpgroup_mma_wait(len(dv), deps=[dp])
            p16 = opaque(p16)
            shared_ds = (p * dp).to(dtype)
        ds = gl.convert_layout(shared_ds, LEFT, assert_trivial=True)
        # started first, so that the tensor cores have work while the two warpgroups exchange dS
        dk_next = start_each(ds, q, dk)
        if WIDE:
            mbarrier.wait(ds_empty.index(buffer), turn ^ 1)
        ds_s.index(buffer * 2 + HALF).store(shared_ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(buffer), count=1)
        if WIDE:
            gradients = wait_for_products(0, dv_next + dk_next)
            p_left = opaque(p_left)
            p_right = opaque(p_right)
            ds = opaque(ds)
            mbarrier.arrive(empty.index(done), count=1)
        # dq of the step before, so that neither warpgroup waits for the other
        mbarrier.wait(ds_full.index(last_buffer), last_turn, pred=n > 0)
        dq = start_dq(k_s, ds_s, last_buffer, k_rows, HALF, STEP, HEAD_DIM, 0)
        if WIDE:
            dq_rest = start_dq(k_s, ds_s, last_buffer, k_rows, HALF, STEP, HEAD_DIM, 1)
        freed = last_buffer
        this_row = head_row + start
        last_buffer = buffer
        last_turn = turn
        buffer, turn = advance(buffer, turn, BUFFERS)
        if ORDERED:
            member += 1
            if member == group:
                member = 0
                segment, start, full_begin, full_end, stop = walk_back(
                    segments_ptr, segment, segment_begin, start, full_begin, full_end, stop, whole, STEP
                )
        else:
            start += STEP
            if start >= stop:
                segment += 1
                if segment == segment_end:
                    segment = segment_begin
                    head_row += padded_rows
                start, full_begin, full_end, stop = load_walk(segments_ptr, segment, whole, STEP, ORDERED)
        if WIDE:
            dq, dq_rest = warpgroup_mma_wait(0, deps=[dq, dq_rest])
            mbarrier.arrive(ds_empty.index(freed), count=1, pred=n > 0)
        else:
            gradients = wait_for_products(0, dv_next + dk_next + (dq,))
            dq = gradients[len(gradients) - 1]
            p16 = opaque(p16)
            ds = opaque(ds)
            mbarrier.arrive(empty.index(done), count=1)
        dv = gradients[: len(dv)]
        dk = gradients[len(dv) : len(dv) + len(dk)]
        mbarrier.wait(q_full.index(stage), phase, pred=(n + 1) < steps)
        if WIDE:
            if ORDERED:
                hand_over_dq(staging, staged, taken, dq, n, HALF, STEP, HEAD_DIM, 0, PARTS)
                hand_over_dq(staging, staged, taken, dq_rest, n, HALF, STEP, HEAD_DIM, 1, PARTS)
            else:
                add_dq(sums_desc, sums_rest, staging, dq, last_row, HALF, STEP, HEAD_DIM, 0)
                add_dq(sums_desc, sums_rest, staging, dq_rest, last_row, HALF, STEP, HEAD_DIM, 1)
        k_next = tiles(k_s, anew(HALF, k_rows)) if STEP == 64 else k
        s_next = start_sum(k_next, tiles(q_s, stage), zero, False)
        if not WIDE:
            if ORDERED:
                hand_over_dq(staging, staged, taken, dq, n, HALF, STEP, HEAD_DIM, 0, PARTS)
            else:
                add_dq(sums_desc, sums_rest, staging, dq, last_row, HALF, STEP, HEAD_DIM, 0)
        last_row = this_row
        s = warpgroup_mma_wait(0, deps=[s_next])
    mbarrier.wait(ds_full.index(last_buffer), last_turn, pred=steps > 0)
    for part in gl.static_range(PARTS):
        dq = start_dq(k_s, ds_s, last_buffer, k_rows, HALF, STEP, HEAD_DIM, part)
        dq = warpgroup_mma_wait(0, deps=[dq])
        if ORDERED:
            hand_over_dq(staging, staged, taken, dq, steps, HALF, STEP, HEAD_DIM, part, PARTS)
        else:
            add_dq(sums_desc, sums_rest, staging, dq, last_row, HALF, STEP, HEAD_DIM, part)
    write_panels(dk_ptr, stride_dks, dk, softmax_scale, row0, k_rows, ADD)
    write_panels(dv_ptr, stride_dvs, dv, 1.0, row0, k_rows, ADD)
    if not ORDERED:
        tma.store_wait(0)


@gluon.jit
def write_panels(ptr, stride, values, factor, row0, row_count, ADD: gl.constexpr):
    """`write_rows` of all panels, times a factor."""
    for i in gl.static_range(len(values)):
        write_rows(ptr, stride, values[i] * factor, row0, row_count, ADD)
        ptr += values[i].type.shape[1]


@gluon.constexpr_function
def is_wide(head_dim, v_dim):
    """Whether 64 rows of dk and dv take more than 128 registers of each of a warpgroup's threads."""
    return head_dim + v_dim > 256


@gluon.jit
def produce(
    q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, sums_descs, q_s, k_s, v_s, dout_s, pivot_s, delta_s, staging,
    kv_full, q_full, dout_full, empty, staged, taken, segments_ptr, successors_ptr, counters_ptr, item, segment_begin, segment_end, steps,
    batch, kv_head, group, head0, padded_rows, block_begin,
    STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """What the partition without products does."""
    if ORDERED:
        produce_and_add(
            q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, sums_descs, q_s, k_s, v_s, dout_s, pivot_s, delta_s, staging,
            kv_full, q_full, dout_full, empty, staged, taken, segments_ptr, successors_ptr, counters_ptr, item, segment_begin,
            segment_end, steps, batch, kv_head, group, head0, padded_rows, block_begin, STAGES, STEP, HEAD_DIM, PARTS,
        )  # fmt: skip
    else:
        produce_queries(
            q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, q_s, k_s, v_s, dout_s, pivot_s, delta_s,
            kv_full, q_full, dout_full, empty, segments_ptr, segment_begin, segment_end, batch, kv_head, group, head0, padded_rows,
            block_begin, STAGES, STEP, 2,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["item_count", "chunk", "heads", "kv_heads", "group", "padded_rows", "k_rows"])
def fused_kernel(
    q_desc, k_desc, v_desc, dout_desc, q_rest, k_rest, v_rest, dout_rest, pivot_desc, delta_desc, sums_desc, sums_rest,
    dk_ptr, dv_ptr, items_ptr, segments_ptr, successors_ptr, counters_ptr,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    item_count, chunk, heads, kv_heads, group, padded_rows, k_rows, scale, softmax_scale,
    HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr,
    REGISTERS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """dk and dv of one block of key rows of one key/value head over all query heads of its group, and what it adds to their dq."""
    # buffers of dS: one more than stages, so that room for the queries of a step means room for its dS; or, where that does not fit, as
    # many, and a barrier
    BUFFERS: gl.constexpr = STAGES if is_wide(HEAD_DIM, V_DIM) else STAGES + 1
    PARTS: gl.constexpr = 2 if is_wide(HEAD_DIM, V_DIM) else 1
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STEP], q_desc.dtype)
    q_descs, k_descs = panels(q_desc, q_rest), panels(k_desc, k_rest)
    v_descs, dout_descs = panels(v_desc, v_rest), panels(dout_desc, dout_rest)
    q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty = allocate_queries(
        q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, STAGES, STEP, 2
    )
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS * 2, ROWS, STEP], DS)
    sums_descs = panels(sums_desc, sums_rest)
    staged = kv_full
    taken = kv_full
    if ORDERED:
        staging = allocate_staging(sums_descs, PARTS)
        staged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(staged, count=2)
        mbarrier.init(taken, count=1)
    else:
        staging = gl.allocate_shared_memory(gl.float32, [2, WIDTH * WIDTH // SUMS, SUMS], sums_desc.layout)
    ds_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ds_full.index(i), count=2)
    ds_empty = ds_full
    if BUFFERS == STAGES:
        ds_empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(BUFFERS):
            mbarrier.init(ds_empty.index(i), count=2)
    fence_async_shared()

    program = gl.program_id(0)
    if ORDERED:
        # drawn, as nothing says that programs start in the order of their ids
        program = gl.atomic_add(counters_ptr + heads * group * (padded_rows // STEP), 1, sem="relaxed")
    item, head_index = side_by_side(program, item_count, chunk, heads)
    item_ptr = items_ptr + item * 4
    block_begin, segment_begin, segment_end, steps, batch, kv_head, dk_ptr, dv_ptr = load_item(
        item_ptr, item_count, head_index, segments_ptr, dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dvb, stride_dvh, kv_heads, group,
        STEP,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (produce, (q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, sums_descs, q_s, k_s, v_s, dout_s, pivot_s, delta_s,
                       staging, kv_full, q_full, dout_full, empty, staged, taken, segments_ptr, successors_ptr, counters_ptr, item,
                       segment_begin, segment_end, steps, batch, kv_head, group, head_index * group, padded_rows, block_begin,
                       STAGES, STEP, HEAD_DIM, PARTS, ORDERED)),
            (consume_and_add, (q_s, k_s, v_s, dout_s, pivot_s, delta_s, ds_s, staging, kv_full, q_full, dout_full, empty, ds_full, ds_empty,
                       staged, taken, sums_desc, sums_rest, dk_ptr, dv_ptr, stride_dks, stride_dvs, segments_ptr, segment_begin,
                       segment_end, steps, group, head_index * group * padded_rows, heads * group * padded_rows, padded_rows, k_rows,
                       block_begin, scale, softmax_scale, 0, STAGES, STEP, HEAD_DIM, V_DIM, ADD, ORDERED)),
            (consume_and_add, (q_s, k_s, v_s, dout_s, pivot_s, delta_s, ds_s, staging, kv_full, q_full, dout_full, empty, ds_full, ds_empty,
                       staged, taken, sums_desc, sums_rest, dk_ptr, dv_ptr, stride_dks, stride_dvs, segments_ptr, segment_begin,
                       segment_end, steps, group, head_index * group * padded_rows, heads * group * padded_rows, padded_rows, k_rows,
                       block_begin, scale, softmax_scale, 1, STAGES, STEP, HEAD_DIM, V_DIM, ADD, ORDERED)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "q_rows", "padded_rows"])
def finish_kernel(
    sums_ptr, dq_ptr, stride_b, stride_s, stride_h, heads, q_rows, padded_rows, softmax_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq of 64 rows of one head from its sums, whose order is that of `add_dq`."""
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
    inside = (rows < q_rows) & (columns < HEAD_DIM)
    dq_ptr += (head_index // heads).to(tl.int64) * stride_b + (head_index % heads).to(tl.int64) * stride_h
    pointers = dq_ptr + (rows.to(tl.int64) * stride_s + columns)
    if ADD:
        dq += tl.load(pointers, mask=inside)
    tl.store(pointers, dq.to(dq_ptr.dtype.element_ty), mask=inside)


# by head dim; measured on an H200
LAUNCHES = {64: Launch(128, 2), 96: Launch(64, 3), 128: Launch(64, 2), 192: Launch(64, 2)}
# of q and k, and of v
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128))
# programs at least of which the heads that run side by side have; measured on an H200
SIDE_BY_SIDE = 256
# the same by head dim where items take turns
ORDERED_SIDE_BY_SIDE = {64: 1024, 96: 512, 128: 512, 192: 512}
# head dims of which long heads run one by one: of two the L2 does not hold the queries, dout and sums that running programs meet
ONE_BY_ONE = (128, 192)


def block_and_step(head_dim: int) -> tuple[int, int]:
    """Key rows of a program, and query rows of its steps."""
    return BLOCK.value, LAUNCHES[head_dim].step


def has_items_for_turns(k: torch.Tensor, table: TileTable) -> bool:
    """Whether items are so many that to add dq in turns is fastest: the few of one head would wait for one another."""
    return k.shape[0] * k.shape[2] * table.key_blocks(BLOCK.value, 1, k.device).touched >= SIDE_BY_SIDE


def zero_sums(q: torch.Tensor) -> torch.Tensor:
    """For launches with q to add dq to: fp32 (b * h, sq in whole blocks, d), each 64 x 64 part in the order of `add_dq`."""
    b, q_rows, h, d = q.shape
    return torch.zeros(b * h, whole_blocks(q_rows), d, device=q.device, dtype=torch.float32)


def finish(sums: torch.Tensor, dq: torch.Tensor, softmax_scale: float, add: bool) -> None:
    """Scale the sums, and add them to dq (b, sq, h, d), in fp32, or overwrite it, in any dtype."""
    b, q_rows, h, d = dq.shape
    assert sums.shape == (b * h, whole_blocks(q_rows), d) and dq.stride(3) == 1
    assert not add or dq.dtype == torch.float32
    moving = dict(sums_ptr=sums, dq_ptr=dq, softmax_scale=softmax_scale)

    def make() -> tuple[int, dict]:
        strides = dict(zip(("stride_b", "stride_s", "stride_h"), dq.stride()))
        sizes = dict(heads=h, q_rows=q_rows, padded_rows=sums.shape[1], HEAD_DIM=d, BLOCK_D=padded(d))
        return sums.shape[0] * sums.shape[1] // ROWS.value, moving | strides | sizes | dict(ADD=add)

    launches.launch(finish_kernel, None, (add,), moving, make, num_warps=4)


def sums_descriptor(sums: torch.Tensor, columns: int) -> TensorDescriptor:
    """For the copy engine to add so many columns of 64 rows of dq."""
    shape, block = [sums.numel() // SUMS.value, SUMS.value], [WIDTH.value * columns // SUMS.value, SUMS.value]
    return TensorDescriptor(sums, shape, [SUMS.value, 1], block, plain_layout(2))


def prepare(statistics: Statistics) -> Prepared:
    """What all launches with the same queries read of the statistics: see `hopper_backward.prepare`."""
    return hopper_backward.prepare(statistics, -1)


def backward(
    inputs: Inputs, *, prepared: Prepared | None, sums: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, add: bool, ordered: bool
) -> None:  # fmt: skip
    """As `ringattn_kernels.backward`, of inputs in whose way there is no `hopper_backward.obstacle`, but dq is added to `sums`.

    prepared: what `prepare` has made of the statistics, if it has.
    ordered: whether in a fixed order, so that the same inputs give the same bits.
    """
    b, q_rows, h, d = inputs.q.shape
    turns, counters = None, None
    if ordered:
        step = LAUNCHES[d].step
        turns = key_turns(inputs.table, BLOCK.value, step, sums.device)
        # and the number that the next program draws
        counters = torch.empty(b * h * (whole_blocks(q_rows) // step) + 1, device=sums.device, dtype=torch.int32)
        prepared = hopper_backward.prepare(inputs.statistics, -1, step, turns.first, counters)
    pivot, minus_delta = prepared or prepare(inputs.statistics)
    moving = dict(
        q_desc=inputs.q,
        k_desc=inputs.k,
        v_desc=inputs.v,
        dout_desc=inputs.dout,
        pivot_desc=pivot,
        delta_desc=minus_delta,
        sums_desc=sums,
        dk_ptr=dk,
        dv_ptr=dv,
        counters_ptr=counters,
        scale=inputs.softmax_scale * LOG2_E.value,
        softmax_scale=inputs.softmax_scale,
    )
    # second panels, where there are
    if has_rest(d):
        moving |= dict(q_rest=inputs.q, k_rest=inputs.k, sums_rest=sums)
    if has_rest(inputs.v.shape[3]):
        moving |= dict(v_rest=inputs.v, dout_rest=inputs.dout)

    def make() -> tuple[int, dict]:
        return fused_arguments(inputs, pivot, minus_delta, sums, dk, dv, add, turns, counters)

    launches.launch(fused_kernel, inputs.table, (add, ordered), moving, make, num_warps=4)


def fused_arguments(
    inputs: Inputs, pivot, minus_delta, sums, dk, dv, add: bool, turns: Turns | None = None, counters=None
) -> tuple[int, dict]:
    """How many programs of `fused_kernel`, and its arguments: those of `key_kernel`, the sums, and how heads run side by side."""
    b, q_rows, h, d = inputs.q.shape
    assert sums.shape == (b * h, whole_blocks(q_rows), d) and sums.is_contiguous()
    grid, arguments = key_arguments(inputs, pivot, minus_delta, dk, dv, add, LAUNCHES)
    if turns is not None:
        arguments |= dict(items_ptr=turns.items, segments_ptr=turns.segments)
    items = SIDE_BY_SIDE if turns is None else ORDERED_SIDE_BY_SIDE[d]
    step, rows, main = LAUNCHES[d].step, ROWS.value, main_columns(d)
    return grid, arguments | dict(
        q_rest=rest_descriptor(inputs.q, step),
        k_rest=rest_descriptor(inputs.k, rows),
        v_rest=rest_descriptor(inputs.v, rows),
        dout_rest=rest_descriptor(inputs.dout, step),
        sums_desc=sums_descriptor(sums, WIDTH.value if turns is None else main * step // WIDTH.value),
        sums_rest=sums_descriptor(sums, 32 if turns is None else d - main) if d > main else None,
        V_DIM=inputs.v.shape[3],
        chunk=max(1 if turns is None and d in ONE_BY_ONE else 2, items // arguments["item_count"]),
        heads=b * inputs.k.shape[2],
        successors_ptr=None if turns is None else turns.successors,
        counters_ptr=counters,
        ORDERED=turns is not None,
    )
