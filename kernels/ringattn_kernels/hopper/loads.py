"""What the loading partition of the Hopper kernels for dk and dv does: K and V once, then Q, dout and their statistics block by block."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .barriers import advance
from .blocks import ROWS
from .language import async_load
from .owned_dq import touch_of
from .panels import allocate_panels, load_panels, panel_bytes
from .tables import END
from .works import hand_out


class Inputs(NamedTuple):
    """The descriptors of what a program loads; q, k, v and dout are tuples, with one descriptor for each panel."""

    q: tuple
    k: tuple
    v: tuple
    dout: tuple
    pivot: gl.tensor
    delta: gl.tensor


class LoadedTiles(NamedTuple):
    """What a program loads to shared memory: STAGES blocks of Q, dout, pivot and delta, and its blocks of K and V."""

    q: tuple
    k: tuple
    v: tuple
    dout: tuple
    pivot: gl.tensor
    delta: gl.tensor


class Barriers(NamedTuple):
    """Say that K and V are there, that Q or dout of a stage are there, and that a stage is free again."""

    kv_full: gl.tensor
    q_full: gl.tensor
    dout_full: gl.tensor
    empty: gl.tensor


@gluon.jit
def allocate_queries(inputs, STAGES: gl.constexpr, STEP: gl.constexpr, PARTS: gl.constexpr):
    """Shared memory for what `produce_queries` loads, with its barriers initialised. A fence has to follow."""
    q_s = allocate_panels(inputs.q, STAGES)
    dout_s = allocate_panels(inputs.dout, STAGES)
    k_s = allocate_panels(inputs.k, PARTS)
    v_s = allocate_panels(inputs.v, PARTS)
    pivot_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], inputs.pivot.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], inputs.delta.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return LoadedTiles(q_s, k_s, v_s, dout_s, pivot_s, delta_s), Barriers(kv_full, q_full, dout_full, empty)


@gluon.jit
def load_keys(inputs, tiles, barriers, batch, kv_head, block_begin, PARTS: gl.constexpr):
    """Have the copy engine load PARTS blocks of K and of V."""
    mbarrier.expect(barriers.kv_full, PARTS * (panel_bytes(inputs.k) + panel_bytes(inputs.v)))
    for half in gl.static_range(PARTS):
        row = block_begin + half * ROWS
        load_panels(inputs.k, batch, row, kv_head, barriers.kv_full, tiles.k, half)
        load_panels(inputs.v, batch, row, kv_head, barriers.kv_full, tiles.v, half)


@gluon.jit
def load_block(descs, row_desc, blocks, rows, full, stage, batch, head, start, statistics):
    """Have the copy engine load a block of Q and its pivots, or of dout and its deltas, into a stage."""
    full = full.index(stage)
    mbarrier.expect(full, panel_bytes(descs) + row_desc.block_type.nbytes)
    load_panels(descs, batch, start, head, full, blocks, stage)
    async_load(row_desc, [statistics + start], full, rows.index(stage))


@gluon.jit
def load_queries(inputs, tiles, barriers, stage, batch, head, start, statistics):
    """Have the copy engine load a block of Q, dout, pivot and delta into a stage."""
    load_block(inputs.q, inputs.pivot, tiles.q, tiles.pivot, barriers.q_full, stage, batch, head, start, statistics)
    load_block(inputs.dout, inputs.delta, tiles.dout, tiles.delta, barriers.dout_full, stage, batch, head, start, statistics)


@gluon.jit
def produce_queries(
    inputs, tiles, barriers, walk, batch, kv_head, group, head0, padded_rows, block_begin,
    STAGES: gl.constexpr, STEP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Load PARTS blocks of K and of V once, then Q, dout, pivot and delta block by block."""
    load_keys(inputs, tiles, barriers, batch, kv_head, block_begin, PARTS)
    stage = 0
    phase = 0
    for member in range(group):
        head = kv_head * group + member
        statistics = (head0 + member) * padded_rows
        for segment in range(walk.begin, walk.end):
            begin = gl.load(walk.segments_ptr + segment * 8) // STEP * STEP
            end = gl.load(walk.segments_ptr + segment * 8 + END)
            for start in range(begin, end, STEP):
                mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
                load_queries(inputs, tiles, barriers, stage, batch, head, start, statistics)
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def produce_work(
    inputs, tiles, barriers, keys_empty, own, touches, walk, work, group, padded_rows, taken, stage, phase,
    STAGES: gl.constexpr, STEP: gl.constexpr, OWNED: gl.constexpr,
):  # fmt: skip
    """As `produce_queries`, for a work that follows others: its two blocks of K and of V come when there is room for them.

    taken: how many works came before. OWNED: with each block of queries comes how its step touches sums (see `owned_dq.touch_of`). Returns
    the stage and the phase that come next.
    """
    head = work.kv_head * group
    statistics = work.head_index * group * padded_rows
    segment = walk.begin
    start = gl.load(walk.segments_ptr + segment * 8) // STEP * STEP
    end = gl.load(walk.segments_ptr + segment * 8 + END)
    for n in range(gl.maximum(walk.steps, 1)):
        if n < walk.steps:
            if OWNED:
                touch = touch_of(own, segment, head - work.kv_head * group, start, STEP)
            mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
            if OWNED:
                hand_out(touches, stage, touch)
            load_queries(inputs, tiles, barriers, stage, work.batch, head, start, statistics)
            stage, phase = advance(stage, phase, STAGES)
            start += STEP
            if start >= end:
                segment += 1
                if segment == walk.end:
                    segment = walk.begin
                    head += 1
                    statistics += padded_rows
                start = gl.load(walk.segments_ptr + segment * 8) // STEP * STEP
                end = gl.load(walk.segments_ptr + segment * 8 + END)
        if n == 0:
            mbarrier.wait(keys_empty, (taken & 1) ^ 1)
            load_keys(inputs, tiles, barriers, work.batch, work.kv_head, work.block_begin, 2)
    return stage, phase
