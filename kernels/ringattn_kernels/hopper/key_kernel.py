"""dK and dV for Hopper, in the backward of two kernels.

    P = exp2(scale Q K^T - pivot)        dV += P^T dout
    dS = P * (dout V^T - delta)          dK += softmax_scale dS^T Q

Scores are modified as in `..modifiers`, but no weights are dropped.
A program owns 128 key rows of one key/value head and meets blocks of queries of all heads of its group. Scores are held transposed, so
that P^T and dS^T are left operands as they are in registers, and dK and dV never leave them. One partition has the copy engine (TMA)
bring blocks of rows to shared memory, and two warpgroups of 64 rows each multiply; while one of them exponentiates, the other keeps the
tensor cores busy.

Shapes: as in `attention.backward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..score_arguments import NOT_SPECIALIZED
from .barriers import advance, let_next_kernel_start
from .blocks import BLOCK, ROWS, Gradients, drop_dead, mask_scores, tile, write_rows
from .fences import pin_pairs
from .loads import Inputs, allocate_queries, produce_queries
from .score_steps import ScoreSteps, load_head, load_places, modified_and_masked, position, with_slope
from .tables import load_item, load_span


@gluon.jit
def consume_queries(
    tiles, barriers, gradients, walk, k_rows, block_begin, scale, softmax_scale, score, head0,
    HALF: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, ADD: gl.constexpr, MODIFIED: gl.constexpr,
    QK_COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 key rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = tiles.q[0].dtype
    # [ROWS, HEAD_DIM]
    k = tile(tiles.k[0], HALF, ROWS, HEAD_DIM)
    v = tile(tiles.v[0], HALF, ROWS, HEAD_DIM)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    zero = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    row0 = block_begin + HALF * ROWS
    whole = block_begin + BLOCK <= k_rows
    segment = walk.begin
    start, full_begin, full_end, end = load_span(walk.segments_ptr, walk.begin, whole, STEP)
    if MODIFIED:
        member = 0
        head = load_head(score, head0)
        place_of_q, place_of_k = load_places(score, segment)
    stage = 0
    phase = 0
    mbarrier.wait(barriers.kv_full, 0)
    mbarrier.wait(barriers.q_full.index(0), 0, pred=walk.steps > 0)
    s = warpgroup_mma(k, tile(tiles.q[0], 0, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    for n in range(walk.steps):
        # [STEP, HEAD_DIM]
        q = tile(tiles.q[0], stage, STEP, HEAD_DIM)
        dout = tile(tiles.dout[0], stage, STEP, HEAD_DIM)
        mbarrier.wait(barriers.dout_full.index(stage), phase)
        # [ROWS, STEP]
        dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        edge = (start < full_begin) | (start >= full_end)
        if MODIFIED:
            q_position, k_position = position(score, place_of_q, start), position(score, place_of_k, row0)
            s, share = modified_and_masked(
                s, score, head, q_position, k_position, -1, edge, walk.segments_ptr, segment, row0, start
            )
        p = gl.exp2(s * scale - gl.expand_dims(tiles.pivot.index(stage).load(COLUMNS), 0))
        if not MODIFIED:  # noqa: SIM102, a constant decides before the compiler sees the other condition
            if edge:
                p = mask_scores(p, walk.segments_ptr, segment, row0, start)
        p16 = gl.convert_layout(p.to(dtype), LEFT, assert_trivial=True)
        if MODIFIED and score.into_cap is not None:
            p = with_slope(p, share)
        done = stage
        this_delta = tiles.delta.index(stage)
        stage, phase = advance(stage, phase, STAGES)
        dv_next = warpgroup_mma(p16, dout, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        p16 = pin_pairs(p16)
        dp -= gl.expand_dims(this_delta.load(COLUMNS), 0)
        if edge:
            dp = drop_dead(dp, p)
        ds = (p * dp).to(dtype)
        ds = gl.convert_layout(ds, LEFT, assert_trivial=True)
        dk_next = warpgroup_mma(ds, q, dk, is_async=True)
        start += STEP
        if start >= end:
            segment += 1
            if segment == walk.end:
                segment = walk.begin
                if MODIFIED:
                    member += 1
                    head = load_head(score, head0 + member)
            start, full_begin, full_end, end = load_span(walk.segments_ptr, segment, whole, STEP)
            if MODIFIED:
                place_of_q, place_of_k = load_places(score, segment)
        # the next scores queue behind dk, so that the tensor cores have work while this warpgroup turns to the next step
        mbarrier.wait(barriers.q_full.index(stage), phase, pred=(n + 1) < walk.steps)
        s_next = warpgroup_mma(k, tile(tiles.q[0], stage, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
        dv, dk = warpgroup_mma_wait(1, deps=[dv_next, dk_next])
        p16 = pin_pairs(p16)
        ds = pin_pairs(ds)
        mbarrier.arrive(barriers.empty.index(done), count=1)
        s = warpgroup_mma_wait(0, deps=[s_next])
    write_rows(gradients.dk_ptr, gradients.dk_stride, dk * softmax_scale, row0, k_rows, ADD, COLUMNS=QK_COLUMNS)
    write_rows(gradients.dv_ptr, gradients.dv_stride, dv, row0, k_rows, ADD, COLUMNS=V_COLUMNS)


@gluon.jit(do_not_specialize=["item_count", "kv_heads", "group", "padded_rows", "k_rows", *NOT_SPECIALIZED])
def key_kernel(
    q_desc, k_desc, v_desc, dout_desc, pivot_desc, delta_desc, dk_ptr, dv_ptr, items_ptr, segments_ptr,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    item_count, kv_heads, group, padded_rows, k_rows, scale, softmax_scale,
    into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest, places_ptr, place_stride, seed_low, seed_high, offset,
    all_heads, first_head, dropped, kept_share,
    HEAD_DIM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr, REGISTERS: gl.constexpr,
    MODIFIED: gl.constexpr, QK_COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr,
):  # fmt: skip
    """dk and dv of one block of key rows of one key/value head, over all query heads of its group."""
    inputs = Inputs((q_desc,), (k_desc,), (v_desc,), (dout_desc,), pivot_desc, delta_desc)
    tiles, barriers = allocate_queries(inputs, STAGES, STEP, 2)
    fence_async_shared()
    let_next_kernel_start()

    head_index = gl.program_id(0) // item_count
    item_ptr = items_ptr + (gl.program_id(0) % item_count) * 4
    block_begin, walk, batch, kv_head, dk_ptr, dv_ptr = load_item(
        item_ptr, item_count, head_index, segments_ptr, dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dvb, stride_dvh, kv_heads, group,
        STEP,
    )  # fmt: skip
    gradients = Gradients(dk_ptr, dv_ptr, stride_dks, stride_dvs)
    score = ScoreSteps(
        into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest, places_ptr, place_stride, seed_low, seed_high,
        offset, all_heads, first_head, dropped, kept_share, gl.num_programs(0) // (item_count * kv_heads), kv_heads * group,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (produce_queries, (inputs, tiles, barriers, walk, batch, kv_head, group, head_index * group, padded_rows, block_begin,
                               STAGES, STEP, 2)),
            (consume_queries, (tiles, barriers, gradients, walk, k_rows, block_begin, scale, softmax_scale, score, head_index * group,
                               0, STAGES, STEP, HEAD_DIM, ADD, MODIFIED, QK_COLUMNS, V_COLUMNS)),
            (consume_queries, (tiles, barriers, gradients, walk, k_rows, block_begin, scale, softmax_scale, score, head_index * group,
                               1, STAGES, STEP, HEAD_DIM, ADD, MODIFIED, QK_COLUMNS, V_COLUMNS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
