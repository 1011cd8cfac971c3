"""dQ for Hopper, in the backward of two kernels.

    P = exp2(scale Q K^T - pivot)        dS = P * (dout V^T - delta)        dQ += softmax_scale dS K

Scores are modified as in `..modifiers`, but no weights are dropped.
A program owns 128 query rows of one head and meets blocks of keys; dS is the left operand of dQ from registers. One partition has the
copy engine (TMA) bring blocks of rows to shared memory, and two warpgroups of 64 rows each multiply; while one of them exponentiates, the
other keeps the tensor cores busy.

Shapes: as in `attention.backward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..score_arguments import NOT_SPECIALIZED
from .barriers import advance, wait_for_kernel_before
from .blocks import ROWS, mask_scores, tile, write_rows
from .fences import hide, pin_pairs
from .language import async_load
from .score_steps import ScoreSteps, load_head, load_places, modified_and_masked, position, with_slope
from .tables import END, FIRST_SEGMENT, LAST_SEGMENT, count_steps, load_span


@gluon.jit
def stage_of_v(stage, phase, n, STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """The block of V of step n and the phase of its barriers: as for K if V has as many blocks, else the only block."""
    if V_STAGES == STAGES:
        return stage, phase
    else:
        return 0, n & 1


@gluon.jit
def produce_keys(
    q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty,
    segments_ptr, segment_begin, segment_end, batch, head, kv_head, block_begin,
    STAGES: gl.constexpr, V_STAGES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Load Q and dout once, then K and V block by block."""
    mbarrier.expect(q_full, 2 * (q_desc.block_type.nbytes + dout_desc.block_type.nbytes))
    for half in gl.static_range(2):
        async_load(q_desc, [batch, block_begin + half * ROWS, head, 0], q_full, q_s.index(half))
        async_load(dout_desc, [batch, block_begin + half * ROWS, head, 0], q_full, dout_s.index(half))
    n = 0
    stage = 0
    phase = 0
    for segment in range(segment_begin, segment_end):
        begin = gl.load(segments_ptr + segment * 8)
        end = gl.load(segments_ptr + segment * 8 + END)
        for start in range(begin, end, STEP):
            full = k_full.index(stage)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(full, k_desc.block_type.nbytes)
            async_load(k_desc, [batch, start, kv_head, 0], full, k_s.index(stage))
            v_stage, v_phase = stage_of_v(stage, phase, n, STAGES, V_STAGES)
            full = v_full.index(v_stage)
            mbarrier.wait(v_empty.index(v_stage), v_phase ^ 1)
            mbarrier.expect(full, v_desc.block_type.nbytes)
            async_load(v_desc, [batch, start, kv_head, 0], full, v_s.index(v_stage))
            n += 1
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def consume_keys(
    q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty, pivot_ptr, delta_ptr, dq_ptr, stride_dqs,
    segments_ptr, segment_begin, segment_end, steps, q_rows, block_begin, scale, softmax_scale, score, head_index,
    HALF: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, ADD: gl.constexpr,
    MODIFIED: gl.constexpr, QK_COLUMNS: gl.constexpr,
):  # fmt: skip
    """dq of 64 query rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dtype: gl.constexpr = q_s.dtype
    row0 = block_begin + HALF * ROWS
    # pivot and delta are padded to whole blocks: (inf, 0)
    rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    pivot = gl.load(pivot_ptr + rows)
    delta = gl.load(delta_ptr + rows)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    zero = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    segment = segment_begin
    start, full_begin, full_end, end = load_span(segments_ptr, segment_begin, True, 1)
    if MODIFIED:
        head = load_head(score, head_index)
        place_of_q, place_of_k = load_places(score, segment)
    stage = 0
    phase = 0
    mbarrier.wait(q_full, 0)
    for n in range(steps):
        # [ROWS, HEAD_DIM]
        half = hide(HALF) if HEAD_DIM > 128 else HALF
        q = tile(q_s, half, ROWS, HEAD_DIM)
        dout = tile(dout_s, half, ROWS, HEAD_DIM)
        # [STEP, HEAD_DIM]
        v_stage, v_phase = stage_of_v(stage, phase, n, STAGES, V_STAGES)
        k = tile(k_s, stage, STEP, HEAD_DIM)
        v = tile(v_s, v_stage, STEP, HEAD_DIM)
        # [ROWS, STEP]
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        dp = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        edge = (start < full_begin) | (start >= full_end)
        if MODIFIED:
            q_position, k_position = position(score, place_of_q, row0), position(score, place_of_k, start)
            s, share = modified_and_masked(s, score, head, q_position, k_position, 1, edge, segments_ptr, segment, row0, start)
        p = gl.exp2(s * scale - gl.expand_dims(pivot, 1))
        if not MODIFIED:  # noqa: SIM102, a constant decides before the compiler sees the other condition
            if edge:
                p = mask_scores(p, segments_ptr, segment, row0, start)
        if MODIFIED and score.into_cap is not None:
            p = with_slope(p, share)
        done = stage
        stage, phase = advance(stage, phase, STAGES)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        ds = (p * (dp - gl.expand_dims(delta, 1))).to(dtype)
        ds = gl.convert_layout(ds, gl.DotOperandLayout(0, WIDE, 2), assert_trivial=True)
        dq_next = warpgroup_mma(ds, k, dq, is_async=True)
        start += STEP
        if start >= end:
            segment += 1
            if segment == segment_end:
                segment = segment_begin
            start, full_begin, full_end, end = load_span(segments_ptr, segment, True, 1)
            if MODIFIED:
                place_of_q, place_of_k = load_places(score, segment)
        dq = warpgroup_mma_wait(0, deps=[dq_next])
        ds = pin_pairs(ds)
        mbarrier.arrive(k_empty.index(done), count=1)
    write_rows(dq_ptr, stride_dqs, dq * softmax_scale, row0, q_rows, ADD, COLUMNS=QK_COLUMNS)


@gluon.jit(do_not_specialize=["item_count", "heads", "group", "padded_rows", "q_rows", *NOT_SPECIALIZED])
def query_kernel(
    q_desc, k_desc, v_desc, dout_desc, pivot_ptr, delta_ptr, dq_ptr, items_ptr, segments_ptr, stride_dqb, stride_dqs, stride_dqh,
    item_count, heads, group, padded_rows, q_rows, scale, softmax_scale,
    into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest, places_ptr, place_stride, seed_low, seed_high, offset,
    all_heads, first_head, dropped, kept_share,
    HEAD_DIM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, ADD: gl.constexpr,
    REGISTERS: gl.constexpr, MODIFIED: gl.constexpr, QK_COLUMNS: gl.constexpr,
):  # fmt: skip
    """dq of one block of query rows of one head."""
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, ROWS, 1, HEAD_DIM], q_desc.layout)
    dout_s = gl.allocate_shared_memory(dtype, [2, 1, ROWS, 1, HEAD_DIM], dout_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, STEP, 1, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [V_STAGES, 1, STEP, 1, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        if i < V_STAGES:
            mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        if i < V_STAGES:
            mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()

    head_index = gl.program_id(0) // item_count
    item_ptr = items_ptr + (gl.program_id(0) % item_count) * 4
    block_begin = gl.load(item_ptr)
    segment_begin = gl.load(item_ptr + FIRST_SEGMENT)
    segment_end = gl.load(item_ptr + LAST_SEGMENT)
    batch = head_index // heads
    head = head_index % heads
    dq_ptr += batch.to(gl.int64) * stride_dqb + head.to(gl.int64) * stride_dqh
    pivot_ptr += head_index.to(gl.int64) * padded_rows
    delta_ptr += head_index.to(gl.int64) * padded_rows
    steps = count_steps(segments_ptr, segment_begin, segment_end, STEP, 1)
    segment_begin = gl.where(steps > 0, segment_begin, 0)
    segment_end = gl.where(steps > 0, segment_end, 0)
    score = ScoreSteps(
        into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest, places_ptr, place_stride, seed_low, seed_high,
        offset, all_heads, first_head, dropped, kept_share, gl.num_programs(0) // (item_count * heads), heads,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (produce_keys, (q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty,
                            segments_ptr, segment_begin, segment_end, batch, head, head // group, block_begin, STAGES, V_STAGES, STEP)),
            (consume_keys, (q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty, pivot_ptr, delta_ptr, dq_ptr, stride_dqs,
                            segments_ptr, segment_begin, segment_end, steps, q_rows, block_begin, scale, softmax_scale,
                            score, head_index, 0, STAGES, V_STAGES, STEP, HEAD_DIM, ADD, MODIFIED, QK_COLUMNS)),
            (consume_keys, (q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty, pivot_ptr, delta_ptr, dq_ptr, stride_dqs,
                            segments_ptr, segment_begin, segment_end, steps, q_rows, block_begin, scale, softmax_scale,
                            score, head_index, 1, STAGES, V_STAGES, STEP, HEAD_DIM, ADD, MODIFIED, QK_COLUMNS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
    wait_for_kernel_before()
