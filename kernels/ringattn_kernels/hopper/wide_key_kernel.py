"""dK and dV for Hopper and head dim 256; `query_kernel` computes dQ.

    P = exp2(scale Q K^T - pivot)        dV += P^T dout
    dS = P * (dout V^T - delta)          dK += softmax_scale dS^T Q

dK and dV of 64 key rows take 128 registers a thread of a warpgroup each, so that a warpgroup can hold one of them. A program owns 64 key
rows of one key/value head and meets blocks of queries of all heads of its group, as in `key_kernel`; but one warpgroup computes P and dV,
the other dS and dK, and P goes from the first to the second through shared memory.

Shapes: as in `attention.backward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..score_arguments import NOT_SPECIALIZED
from .barriers import advance, let_next_kernel_start
from .blocks import ROWS, drop_dead, mask_scores, tile, write_rows
from .fences import pin_pairs
from .language import barrier
from .loads import Inputs, allocate_queries, produce_queries
from .score_steps import ScoreSteps, load_head, load_places, modified_and_masked, position, with_slope
from .tables import load_item, load_span, side_by_side

BUFFERS = gl.constexpr(2)  # buffers of P


@gluon.jit
def consume_values(
    tiles, p_s, barriers, p_full, p_empty, dv_ptr, stride_dvs, walk, k_rows, block_begin, scale, score, head0,
    STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, ADD: gl.constexpr, MODIFIED: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """dv of 64 key rows, and for `consume_scores` P, times the softcap's slope if there is one."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dtype: gl.constexpr = tiles.q[0].dtype
    # [ROWS, HEAD_DIM]
    k = tile(tiles.k[0], 0, ROWS, HEAD_DIM)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    zero = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    whole = block_begin + ROWS <= k_rows
    segment = walk.begin
    start, full_begin, full_end, end = load_span(walk.segments_ptr, walk.begin, whole, STEP)
    if MODIFIED:
        member = 0
        head = load_head(score, head0)
        place_of_q, place_of_k = load_places(score, segment)
    stage = 0
    phase = 0
    buffer = 0
    turn = 0
    mbarrier.wait(barriers.kv_full, 0)
    mbarrier.wait(barriers.q_full.index(0), 0, pred=walk.steps > 0)
    s = warpgroup_mma(k, tile(tiles.q[0], 0, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    for n in range(walk.steps):
        # [ROWS, STEP]
        edge = (start < full_begin) | (start >= full_end)
        if MODIFIED:
            q_position, k_position = position(score, place_of_q, start), position(score, place_of_k, block_begin)
            s, share = modified_and_masked(
                s, score, head, q_position, k_position, -1, edge, walk.segments_ptr, segment, block_begin, start
            )
        p = gl.exp2(s * scale - gl.expand_dims(tiles.pivot.index(stage).load(gl.SliceLayout(0, SCORES)), 0))
        if not MODIFIED:  # noqa: SIM102, a constant decides before the compiler sees the other condition
            if edge:
                p = mask_scores(p, walk.segments_ptr, segment, block_begin, start)
        p16 = p.to(dtype)
        shared_p = p16
        if MODIFIED and score.into_cap is not None:
            shared_p = with_slope(p, share).to(dtype)
        p16 = gl.convert_layout(p16, gl.DotOperandLayout(0, WIDE, 2), assert_trivial=True)
        # started first, so that the tensor cores have work while P is handed over
        mbarrier.wait(barriers.dout_full.index(stage), phase)
        dv_next = warpgroup_mma(p16, tile(tiles.dout[0], stage, STEP, HEAD_DIM), dv, is_async=True)
        mbarrier.wait(p_empty.index(buffer), turn ^ 1)
        p_s.index(buffer).store(shared_p)
        barrier()
        mbarrier.arrive(p_full.index(buffer), count=1)
        buffer, turn = advance(buffer, turn, BUFFERS)
        done = stage
        stage, phase = advance(stage, phase, STAGES)
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
        mbarrier.wait(barriers.q_full.index(stage), phase, pred=(n + 1) < walk.steps)
        s_next = warpgroup_mma(k, tile(tiles.q[0], stage, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv_next])
        p16 = pin_pairs(p16)
        mbarrier.arrive(barriers.empty.index(done), count=1)
        s = warpgroup_mma_wait(0, deps=[s_next])
    write_rows(dv_ptr, stride_dvs, dv, block_begin, k_rows, ADD, COLUMNS=COLUMNS)


@gluon.jit
def consume_scores(
    tiles, p_s, barriers, p_full, p_empty, dk_ptr, stride_dks, steps, k_rows, block_begin, softmax_scale,
    STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, ADD: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """dk of 64 key rows, with P of `consume_values`."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dtype: gl.constexpr = tiles.q[0].dtype
    # [ROWS, HEAD_DIM]
    v = tile(tiles.v[0], 0, ROWS, HEAD_DIM)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    zero = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    stage = 0
    phase = 0
    buffer = 0
    turn = 0
    mbarrier.wait(barriers.kv_full, 0)
    mbarrier.wait(barriers.dout_full.index(0), 0, pred=steps > 0)
    dp = warpgroup_mma(v, tile(tiles.dout[0], 0, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(0, deps=[dp])
    for n in range(steps):
        # [ROWS, STEP]
        dp -= gl.expand_dims(tiles.delta.index(stage).load(gl.SliceLayout(0, SCORES)), 0)
        mbarrier.wait(p_full.index(buffer), turn)
        p = p_s.index(buffer).load(SCORES).to(gl.float32)
        ds = gl.convert_layout((p * drop_dead(dp, p)).to(dtype), gl.DotOperandLayout(0, WIDE, 2), assert_trivial=True)
        mbarrier.wait(barriers.q_full.index(stage), phase)
        dk_next = warpgroup_mma(ds, tile(tiles.q[0], stage, STEP, HEAD_DIM), dk, is_async=True)
        barrier()
        mbarrier.arrive(p_empty.index(buffer), count=1)
        buffer, turn = advance(buffer, turn, BUFFERS)
        done = stage
        stage, phase = advance(stage, phase, STAGES)
        mbarrier.wait(barriers.dout_full.index(stage), phase, pred=(n + 1) < steps)
        dp_next = warpgroup_mma(v, tile(tiles.dout[0], stage, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(1, deps=[dk_next])
        ds = pin_pairs(ds)
        mbarrier.arrive(barriers.empty.index(done), count=1)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
    write_rows(dk_ptr, stride_dks, dk * softmax_scale, block_begin, k_rows, ADD, COLUMNS=COLUMNS)


@gluon.jit(do_not_specialize=["item_count", "chunk", "heads", "kv_heads", "group", "padded_rows", "k_rows", *NOT_SPECIALIZED])
def wide_key_kernel(
    q_desc, k_desc, v_desc, dout_desc, pivot_desc, delta_desc, dk_ptr, dv_ptr, items_ptr, segments_ptr,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    item_count, chunk, heads, kv_heads, group, padded_rows, k_rows, scale, softmax_scale,
    into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest, places_ptr, place_stride, seed_low, seed_high, offset,
    all_heads, first_head, dropped, kept_share,
    HEAD_DIM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr, REGISTERS: gl.constexpr,
    MODIFIED: gl.constexpr, QK_COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 key rows of one key/value head, over all query heads of its group."""
    dtype: gl.constexpr = q_desc.dtype
    inputs = Inputs((q_desc,), (k_desc,), (v_desc,), (dout_desc,), pivot_desc, delta_desc)
    tiles, barriers = allocate_queries(inputs, STAGES, STEP, 1)
    p_s = gl.allocate_shared_memory(dtype, [BUFFERS, ROWS, STEP], gl.NVMMASharedLayout.get_default_for([ROWS, STEP], dtype))
    p_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=1)
    fence_async_shared()
    let_next_kernel_start()

    item, head_index = side_by_side(gl.program_id(0), item_count, chunk, heads)
    item_ptr = items_ptr + item * 4
    block_begin, walk, batch, kv_head, dk_ptr, dv_ptr = load_item(
        item_ptr, item_count, head_index, segments_ptr, dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dvb, stride_dvh, kv_heads, group,
        STEP,
    )  # fmt: skip
    score = ScoreSteps(
        into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest, places_ptr, place_stride, seed_low, seed_high,
        offset, all_heads, first_head, dropped, kept_share, heads // kv_heads, kv_heads * group,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (produce_queries, (inputs, tiles, barriers, walk, batch, kv_head, group, head_index * group, padded_rows, block_begin,
                               STAGES, STEP, 1)),
            (consume_values, (tiles, p_s, barriers, p_full, p_empty, dv_ptr, stride_dvs, walk, k_rows, block_begin, scale,
                              score, head_index * group, STAGES, STEP, HEAD_DIM, ADD, MODIFIED, V_COLUMNS)),
            (consume_scores, (tiles, p_s, barriers, p_full, p_empty, dk_ptr, stride_dks, walk.steps, k_rows, block_begin, softmax_scale,
                              STAGES, STEP, HEAD_DIM, ADD, QK_COLUMNS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
