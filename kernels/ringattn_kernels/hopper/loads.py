"""What the loading partition of the Hopper kernels for dk and dv does: K and V once, then Q, dout and their statistics block by block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .barriers import advance
from .blocks import ROWS
from .language import async_load
from .panels import allocate_panels, load_panels, panel_bytes


@gluon.jit
def allocate_queries(
    q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, STAGES: gl.constexpr, STEP: gl.constexpr, PARTS: gl.constexpr
):
    """Shared memory for what `produce_queries` brings, and the barriers, which a fence has to follow."""
    q_s = allocate_panels(q_descs, STAGES)
    dout_s = allocate_panels(dout_descs, STAGES)
    k_s = allocate_panels(k_descs, PARTS)
    v_s = allocate_panels(v_descs, PARTS)
    pivot_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], pivot_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty


@gluon.jit
def load_keys(k_descs, v_descs, k_s, v_s, kv_full, batch, kv_head, block_begin, PARTS: gl.constexpr):
    """Have the copy engine bring PARTS blocks of K and of V."""
    mbarrier.expect(kv_full, PARTS * (panel_bytes(k_descs) + panel_bytes(v_descs)))
    for half in gl.static_range(PARTS):
        load_panels(k_descs, batch, block_begin + half * ROWS, kv_head, kv_full, k_s, half)
        load_panels(v_descs, batch, block_begin + half * ROWS, kv_head, kv_full, v_s, half)


@gluon.jit
def load_queries(descs, row_desc, tiles_s, rows_s, full, stage, batch, head, start, statistics):
    """Have the copy engine bring a block of Q and its pivots, or of dout and its deltas, to a stage."""
    full = full.index(stage)
    mbarrier.expect(full, panel_bytes(descs) + row_desc.block_type.nbytes)
    load_panels(descs, batch, start, head, full, tiles_s, stage)
    async_load(row_desc, [statistics + start], full, rows_s.index(stage))


@gluon.jit
def produce_queries(
    q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc,
    q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty,
    segments_ptr, segment_begin, segment_end, batch, kv_head, group, head0, padded_rows, block_begin,
    STAGES: gl.constexpr, STEP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Bring PARTS blocks of K and of V once, then Q, dout, pivot and delta block by block."""
    load_keys(k_descs, v_descs, k_s, v_s, kv_full, batch, kv_head, block_begin, PARTS)
    stage = 0
    phase = 0
    for member in range(group):
        head = kv_head * group + member
        statistics = (head0 + member) * padded_rows
        for segment in range(segment_begin, segment_end):
            begin = gl.load(segments_ptr + segment * 8) // STEP * STEP
            end = gl.load(segments_ptr + segment * 8 + 3)
            for start in range(begin, end, STEP):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                load_queries(q_descs, pivot_desc, q_s, pivot_s, q_full, stage, batch, head, start, statistics)
                load_queries(dout_descs, delta_desc, dout_s, delta_s, dout_full, stage, batch, head, start, statistics)
                stage, phase = advance(stage, phase, STAGES)
