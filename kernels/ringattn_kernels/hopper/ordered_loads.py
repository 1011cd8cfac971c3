"""What the loading partition of the fused kernel does where items take turns: it loads, and has the copy engine add dQ in turn."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .barriers import advance, look, pass_turn, wait_for_turn
from .dq_sums import add_panels
from .loads import load_keys, load_queries
from .tables import load_span


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


class DeviceTurns(NamedTuple):
    """The successors of items, by segment, and the counters that say whose turn it is."""

    successors_ptr: gl.tensor
    counters_ptr: gl.tensor


@gluon.jit
def produce_and_add(
    inputs, sums, tiles, staging, barriers, handover, walk, turns, work, item, group, padded_rows, stage, phase, handed,
    STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Load what the consumers read for a work, and have the copy engine add their dq to the sums in this item's turn.

    Steps come from the last to the first, and in each step the heads of the group one after another. Under a causal mask all items then
    begin with the same step, and each item follows the one before it at the distance of one addition.
    """
    head0 = work.head_index * group
    load_keys(inputs, tiles, barriers, work.batch, work.kv_head, work.block_begin, 2)
    member = 0
    segment = gl.maximum(walk.end, 1) - 1
    start, full_begin, full_end, stop = load_walk(walk.segments_ptr, segment, True, STEP, True)
    # the same of what is added, STAGES + 1 steps later
    late_member = 0
    late_segment = gl.maximum(walk.end, 1) - 1
    late_start, _, _, late_stop = load_walk(walk.segments_ptr, late_segment, True, STEP, True)
    successor = gl.load(turns.successors_ptr + late_segment)
    row = head0 * padded_rows + late_start
    seen = -1
    for n in range(walk.steps + STAGES + 1):
        counter_ptr = turns.counters_ptr + row // STEP
        if n < walk.steps:
            head = work.kv_head * group + member
            statistics = (head0 + member) * padded_rows
            mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
            # the answer comes while the copies are started
            seen = look(counter_ptr)
            load_queries(inputs, tiles, barriers, stage, work.batch, head, start, statistics)
            stage, phase = advance(stage, phase, STAGES)
            member += 1
            if member == group:
                member = 0
                segment, start, full_begin, full_end, stop = walk_back(
                    walk.segments_ptr, segment, walk.begin, start, full_begin, full_end, stop, True, STEP
                )
        else:
            seen = -1
        if n == STAGES:
            # there is no step before the first
            for part in gl.static_range(PARTS):
                mbarrier.wait(handover.staged, (handed * PARTS + part) & 1)
                mbarrier.arrive(handover.taken, count=1)
        if n > STAGES:
            wait_for_turn(counter_ptr, item, seen)
            for part in gl.static_range(PARTS):
                mbarrier.wait(handover.staged, ((handed + n - STAGES) * PARTS + part) & 1)
                add_panels(sums, staging.dq, row, HEAD_DIM, part, PARTS)
                tma.store_wait(0)
                mbarrier.arrive(handover.taken, count=1)
            pass_turn(counter_ptr, successor)
            late_member += 1
            if late_member == group:
                late_member = 0
                late_start -= STEP
                if (late_start < late_stop) & (late_segment > walk.begin):
                    late_segment -= 1
                    late_start, _, _, late_stop = load_walk(walk.segments_ptr, late_segment, True, STEP, True)
                    successor = gl.load(turns.successors_ptr + late_segment)
            row = (head0 + late_member) * padded_rows + late_start
    return stage, phase
