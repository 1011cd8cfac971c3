"""Exact attention over a tile table, forward, for Hopper (sm_90) in Gluon: the formula of `attention`, on asynchronous units.

In a program one partition has the copy engine (TMA) bring Q, K and V to shared memory, and two or three warpgroups compute 64 query rows
each. A warpgroup starts the scores of the next block of keys and the weighted values of the block before, waits for both, and computes a
softmax while the tensor cores work for other warpgroups. Three warpgroups may have no registers for both products: each then starts the
scores once the values are done, and the two others keep the tensor cores busy. Programs stay on their multiprocessor and take works (a
query block of one head each) off a queue; Q, K and V keep coming across the ends of segments and of works. A warpgroup lets blocks of
keys go by in which none of its rows has a live pair, at the start or the end of a work.

Shapes: q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), out (b, sq, h, dv), row_max and row_sum (b, h, sq).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ..score_arguments import NOT_SPECIALIZED
from ..sinks import with_sink
from ..units import LOG2_E, to_base2, to_natural
from .barriers import named_barrier
from .fences import hide_uniform, pin
from .forward_output import copy_out, load_state, store_out
from .forward_softcap import capped_softmax_step
from .forward_softmax import LOWEST, as_column, divided, mask_edge, rescale, scaled, softmax_step, softmax_step_ahead, unpack
from .kept_pairs import drop_drawn
from .language import async_load, barrier, reinterpret, wait_for_products
from .panels import part_panels, split_columns, start_each, start_sum, zero_block, zeros
from .score_steps import ScoreSteps, load_head, load_places, modified, position
from .tables import AFTER, BEFORE, WORK_COLUMNS, idle_of, load_segment
from .threads import THREADS_OF_ROWS
from .works import hand_out_all, take

# so many steps before its copies begin a program draws a work: earlier, it would hold one that another could begin; later, it would wait
# for its numbers
DRAWN_AHEAD = gl.constexpr(3)

# numbers of so many works are in shared memory at a time
WORK_PLACES = gl.constexpr(3)


class Blocks(NamedTuple):
    """Shared memory: blocks of Q, K and V, as the copy engine fills them or as matrices, the numbers of works, and half of the columns of
    each warpgroup's rows of out, if they have a place of their own."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    work: gl.tensor
    out: gl.tensor


class ForwardBarriers(NamedTuple):
    """Which blocks are full, and which are empty again. kv_empty of a block: its K has been read, and V of the block before it."""

    q_full: gl.tensor
    q_empty: gl.tensor
    k_full: gl.tensor
    v_full: gl.tensor
    kv_empty: gl.tensor


class Result(NamedTuple):
    """Where the kernel writes out and the statistics, and where it reads a state, and sinks (h,), if they are counted.

    out_desc: of out, where the copy engine stores it.
    """

    out_desc: gl.tensor
    out_ptr: gl.tensor
    state_ptr: gl.tensor
    row_max_ptr: gl.tensor
    row_sum_ptr: gl.tensor
    sinks_ptr: gl.tensor


class DeviceWorkQueue(NamedTuple):
    """A `WorkQueue` on the device, and how many works it has."""

    works_ptr: gl.tensor
    segments_ptr: gl.tensor
    work_count: gl.tensor


class RowWork(NamedTuple):
    """A work's numbers, as in `WorkQueue`. There is no more work where steps are 0."""

    head_index: gl.tensor
    block_begin: gl.tensor
    segment: gl.tensor
    steps: gl.tensor
    before: gl.tensor
    after: gl.tensor


@gluon.jit
def stage_of(block, STAGES: gl.constexpr):
    """Which place in shared memory a block of keys takes. Without signs, powers of two need one instruction."""
    return (gl.to_tensor(block).to(gl.uint32) % STAGES).to(gl.int32)


@gluon.jit
def phase_of(block, STAGES: gl.constexpr):
    """The phase of its barriers."""
    return (gl.to_tensor(block).to(gl.uint32) // STAGES & 1).to(gl.int32)


@gluon.jit
def draw(queue, counter_ptr):
    """(the number of the next work, the work)."""
    number = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    more = number < queue.work_count
    ptr = queue.works_ptr + number * WORK_COLUMNS
    work = ()
    for i in gl.static_range(WORK_COLUMNS):
        # without a work there are no steps to wait for, nor idle ones
        work += (gl.load(ptr + i, mask=more, other=0),)
    return number, RowWork(work[0], work[1], work[2], work[3], work[BEFORE], work[AFTER])


@gluon.jit
def hand_out_queries(
    q_desc, blocks, barriers, work, taken, batches, heads,
    CHUNKS: gl.constexpr, WARPGROUPS: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Give the warpgroups their next work and have its Q copied, or tell them that there is none."""
    ROWS: gl.constexpr = q_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = q_desc.block_type.shape[3]
    batch, head = work.head_index // heads % batches, work.head_index % heads
    for i in gl.static_range(WARPGROUPS):
        mbarrier.wait(barriers.q_empty.index(taken % Q_STAGES * WARPGROUPS + i), ((taken // Q_STAGES) & 1) ^ 1)
    hand_out_all(blocks.work, taken % WORK_PLACES * WORK_COLUMNS, work, WORK_COLUMNS)
    for i in gl.static_range(WARPGROUPS):
        place = taken % Q_STAGES * WARPGROUPS + i
        if work.steps > 0:
            mbarrier.expect(barriers.q_full.index(place), CHUNKS * q_desc.block_type.nbytes)
            for c in gl.static_range(CHUNKS):
                corner = [batch, work.block_begin + i * ROWS, head, c * COLUMNS]
                async_load(q_desc, corner, barriers.q_full.index(place), blocks.q.index(place * CHUNKS + c))
        else:
            mbarrier.arrive(barriers.q_full.index(place), count=1)


@gluon.jit
def load_keys(
    k_desc, blocks, barriers, block, batch, start, kv_head, CHUNKS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Ask for a block of K. Its room has been empty since the V of the block before was asked for."""
    COLUMNS: gl.constexpr = k_desc.block_type.shape[3]
    stage = stage_of(block, STAGES)
    mbarrier.expect(barriers.k_full.index(stage), CHUNKS * k_desc.block_type.nbytes)
    for c in gl.static_range(CHUNKS):
        corner = [batch, start, kv_head, c * COLUMNS]
        async_load(k_desc, corner, barriers.k_full.index(stage), blocks.k.index(stage * CHUNKS + c))


@gluon.jit
def load_first_keys(
    k_desc, blocks, barriers, queue, work, block, batches, heads, group, CHUNKS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """If there is a work, ask for its first block of K."""
    if work.steps > 0:
        batch, kv_head = work.head_index // heads % batches, work.head_index % heads // group
        start = gl.load(queue.segments_ptr + work.segment * 8)
        load_keys(k_desc, blocks, barriers, block, batch, start, kv_head, CHUNKS, STAGES)


@gluon.jit
def load_copies(
    q_desc, k_desc, v_desc, blocks, barriers, queue, counter_ptr, batches, heads, group,
    CHUNKS: gl.constexpr, WARPGROUPS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The partition that takes works and asks the copy engine for Q once a work and for K and V once a step, as soon as there is room."""
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[1]
    # a work's first keys come before there is room for its queries, where that comes late; three warpgroups lost by it
    KEYS_FIRST: gl.constexpr = Q_STAGES == 1 and not TURNS
    block = 0
    taken = 0
    number, work = draw(queue, counter_ptr)
    if KEYS_FIRST:
        load_first_keys(k_desc, blocks, barriers, queue, work, block, batches, heads, group, CHUNKS, STAGES)
    hand_out_queries(q_desc, blocks, barriers, work, taken, batches, heads, CHUNKS, WARPGROUPS, Q_STAGES)
    while work.steps > 0:
        batch, kv_head = work.head_index // heads % batches, work.head_index % heads // group
        segment, steps = work.segment, work.steps
        left = steps
        while left > 0:
            start, _, _, end = load_segment(queue.segments_ptr, segment)
            left_after = left - gl.minimum(left, gl.cdiv(end - start, BLOCK_K))
            while left > left_after:
                if (left < steps) | (not KEYS_FIRST):
                    load_keys(k_desc, blocks, barriers, block, batch, start, kv_head, CHUNKS, STAGES)
                if left == gl.minimum(steps, DRAWN_AHEAD):
                    number, work = draw(queue, counter_ptr)
                if Q_STAGES > 1 and left == 1:
                    hand_out_queries(q_desc, blocks, barriers, work, taken + 1, batches, heads, CHUNKS, WARPGROUPS, Q_STAGES)
                stage = stage_of(block, STAGES)
                mbarrier.wait(barriers.kv_empty.index(stage_of(block + 1, STAGES)), phase_of(block + 1, STAGES) ^ 1)
                mbarrier.expect(barriers.v_full.index(stage), v_desc.block_type.nbytes)
                async_load(v_desc, [batch, start, kv_head, 0], barriers.v_full.index(stage), blocks.v.index(stage))
                start += BLOCK_K
                block += 1
                left -= 1
            segment += 1
        taken += 1
        if KEYS_FIRST:
            load_first_keys(k_desc, blocks, barriers, queue, work, block, batches, heads, group, CHUNKS, STAGES)
        if Q_STAGES == 1:
            # the place of Q is empty only when these steps are nearly done
            hand_out_queries(q_desc, blocks, barriers, work, taken, batches, heads, CHUNKS, WARPGROUPS, Q_STAGES)
    # each program draws one number too many; whoever draws the last one sets the counter back for the next launch
    if number == queue.work_count + gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)


@gluon.jit
def take_turn(INDEX: gl.constexpr, NEXT: gl.constexpr):
    """Wait for the warpgroup before, and let the next one go on."""
    named_barrier("sync", INDEX)
    named_barrier("arrive", NEXT)


@gluon.jit
def pass_by(
    barriers, block, count, WARPGROUP: gl.constexpr, NEXT: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, TAKEN: gl.constexpr
):  # fmt: skip
    """Let `count` blocks of keys after `block` go by, in which no row of this warpgroup has a live pair. Returns the last of them.

    TAKEN: so many of their turns have been taken.
    """
    for i in range(count):
        if TURNS and i >= TAKEN:
            take_turn(WARPGROUP, NEXT)
        block += 1
        stage = stage_of(block, STAGES)
        # room that is not full yet may still belong to a warpgroup that is behind
        mbarrier.wait(barriers.k_full.index(stage), phase_of(block, STAGES))
        mbarrier.wait(barriers.v_full.index(stage), phase_of(block, STAGES))
        mbarrier.arrive(barriers.kv_empty.index(stage), count=1)
    return block


@gluon.jit
def kept_queries(q, KEPT: gl.constexpr, SCORES: gl.constexpr):
    """The first KEPT columns of a block of queries in registers: as left operands they read no shared memory. A part, or none."""
    parts = ()
    if KEPT > 0:
        parts += (q.slice(0, KEPT, dim=1).load(gl.DotOperandLayout(0, SCORES, 2)),)
    return parts


@gluon.jit
def later_columns(x, FIRST: gl.constexpr):
    """The columns of a block from FIRST on, in parts of FIRST columns, twice as many, and so on."""
    parts = ()
    for i in gl.static_range((x.type.shape[1] // FIRST).bit_length() - 1):
        parts += (x.slice(FIRST << i, FIRST << i, dim=1),)
    return parts


@gluon.jit
def scores_product(
    q_smem, q_place, q_kept, k_smem, k_full, s, block, more, CHUNKS: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Start the raw scores of a block of keys, once the block is there."""
    stage = stage_of(block, STAGES)
    mbarrier.wait(k_full.index(stage), phase_of(block, STAGES), pred=more)
    if len(q_kept) == 0:
        for chunk in gl.static_range(CHUNKS):
            k = part_panels(k_smem.index(stage * CHUNKS + chunk), PANELS)
            s = start_sum(part_panels(q_smem.index(q_place * CHUNKS + chunk), PANELS), k, s, chunk > 0)
    else:
        KEPT: gl.constexpr = q_kept[0].type.shape[1]
        q, k = q_smem.index(q_place), k_smem.index(stage)
        s = start_sum(q_kept, (k.slice(0, KEPT, dim=1),), s, False)
        s = start_sum(later_columns(q, KEPT), later_columns(k, KEPT), s, True)
    return s


@gluon.jit
def start_values(pairs, v_smem, v_full, acc, block, STAGES: gl.constexpr):
    """Start the weighted values of a block, added to each panel's accumulator, once they are there."""
    P: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    stage = stage_of(block, STAGES)
    mbarrier.wait(v_full.index(stage), phase_of(block, STAGES))
    return start_each(unpack(pairs, v_smem.dtype, P), part_panels(v_smem.index(stage), len(acc)), acc)


@gluon.jit
def take_rows(blocks, taken, WARPGROUP: gl.constexpr):
    """The work that was handed out, with the idle steps of this warpgroup."""
    p, first = blocks.work, taken % WORK_PLACES * WORK_COLUMNS
    before, after = idle_of(take(p, first + BEFORE), WARPGROUP), idle_of(take(p, first + AFTER), WARPGROUP)
    return RowWork(take(p, first), take(p, first + 1), take(p, first + 2), take(p, first + 3), before, after)


@gluon.jit
def start_work(
    blocks, barriers, scores, block, taken, WARPGROUP: gl.constexpr, NEXT: gl.constexpr, WARPGROUPS: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, CHUNKS: gl.constexpr, PANELS: gl.constexpr, KEPT: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Take a work once its queries are there, let blocks after `block` go by, and start the scores of the next one, if there is a work.

    Returns the work, the block, the place of its queries, those that are kept in registers, and the product, in place of `scores`.
    """
    q_place = taken % Q_STAGES * WARPGROUPS + WARPGROUP
    mbarrier.wait(barriers.q_full.index(q_place), (taken // Q_STAGES) & 1)
    work = take_rows(blocks, taken, WARPGROUP)
    block = pass_by(barriers, block, work.before, WARPGROUP, NEXT, TURNS, STAGES, 0) + 1
    SCORES: gl.constexpr = scores.type.layout
    q_kept = kept_queries(blocks.q.index(q_place), KEPT, SCORES)
    s = scores_product(blocks.q, q_place, q_kept, blocks.k, barriers.k_full, scores, block, work.steps > 0, CHUNKS, PANELS, STAGES)
    return work, block, q_place, q_kept, s


@gluon.jit
def attend_rows(
    blocks, barriers, result, queue, score, heads, q_rows, scale, WARPGROUP: gl.constexpr, CHUNKS: gl.constexpr, WARPGROUPS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, V_DIM: gl.constexpr, HAS_STATE: gl.constexpr, TURNS: gl.constexpr,
    PAIRED: gl.constexpr, PANELS: gl.constexpr, KEPT: gl.constexpr, AHEAD: gl.constexpr, MODIFIED: gl.constexpr, LATE_CAP: gl.constexpr,
):  # fmt: skip
    """The partition of one warpgroup: out, row_max and row_sum of its 64 rows of each query block."""
    ROWS: gl.constexpr = blocks.q.shape[1]
    BLOCK_K: gl.constexpr = blocks.k.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    NEXT: gl.constexpr = (WARPGROUP + 1) % WARPGROUPS
    # out leaves by the copy engine: through the place of its queries or, if that is the only one, in halves through a place of its own
    STAGED: gl.constexpr = result.out_desc is not None
    IN_PLACE: gl.constexpr = STAGED and Q_STAGES > 1
    # whether the next work's scores begin before this one is written out. Not where its queries come only meanwhile; but three warpgroups,
    # which take turns, would spill
    EARLY: gl.constexpr = Q_STAGES > 1 or TURNS
    dtype: gl.constexpr = blocks.v.dtype
    DROPPED: gl.constexpr = MODIFIED and score.dropped is not None
    # one of the two changes scores before masks, the other in the softmax
    CHANGED: gl.constexpr = MODIFIED and not LATE_CAP
    if TURNS and WARPGROUP == WARPGROUPS - 1:
        named_barrier("arrive", NEXT)
    taken = 0
    no_scores = zero_block(ROWS, BLOCK_K)
    work, block, q_place, q_kept, s = start_work(
        blocks, barriers, no_scores, gl.to_tensor(-1), taken, WARPGROUP, NEXT, WARPGROUPS, Q_STAGES, STAGES, CHUNKS, PANELS, KEPT, TURNS
    )  # fmt: skip
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(barriers.kv_empty.index(stage_of(block, STAGES)), count=1)
    # at the top of the loop the scores of the first block of a work are there in which these rows have a live pair
    while work.steps > 0:
        head_index, segment = work.head_index, work.segment
        first_row = work.block_begin + WARPGROUP * ROWS
        if HAS_STATE:
            # [ROWS]
            rows = first_row + gl.arange(0, ROWS, SCORE_ROWS)
            statistics = head_index.to(gl.int64) * q_rows + rows
            row_max, rest = to_base2(gl.load(result.row_max_ptr + statistics, mask=rows < q_rows, other=float("-inf")))
            old_sum = gl.load(result.row_sum_ptr + statistics, mask=rows < q_rows, other=0.0) * gl.exp2(rest)
            # [ROWS, 4]: a column for each of the four threads that share a row of scores
            thread = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, THREADS_OF_ROWS)), 0)
            row_sum = gl.where(thread == 0, as_column(old_sum, THREADS_OF_ROWS), 0.0)
            if DROPPED:
                # what a weight that is kept is divided by, is divided by at the end
                old_sum *= score.kept_share
        else:
            row_max = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
            row_sum = gl.zeros([ROWS, 4], gl.float32, THREADS_OF_ROWS)
        pivot = gl.maximum(row_max, LOWEST)
        # [ROWS, columns] for each panel
        acc = zeros(ROWS, part_panels(blocks.v.index(0), PANELS))
        if HAS_STATE:
            state = ()
            for panel in gl.static_range(PANELS):
                state += (load_state(result.state_ptr, acc[panel], old_sum, first_row, head_index, heads, q_rows, V_DIM, panel),)
            acc = state

        start, full_begin, full_end, end = load_segment(queue.segments_ptr, segment)
        for _step in range(work.before):
            start += BLOCK_K
            if start >= end:
                segment += 1
                start, full_begin, full_end, end = load_segment(queue.segments_ptr, segment)
        if MODIFIED:
            head = load_head(score, head_index)
            place_of_q, place_of_k = load_places(score, segment)
            q_position = position(score, place_of_q, first_row)
            k_position = position(score, place_of_k, start)
            if CHANGED:
                s, _ = modified(s, score, head, q_position, k_position, 1)
        if (start < full_begin) | (start >= full_end):
            s = mask_edge(s, start, end, queue.segments_ptr, segment, first_row)
        if LATE_CAP:
            pairs, alpha, pivot, row_sum, row_max = capped_softmax_step(s, pivot, row_sum, row_max, scale, score.into_cap, dtype)
        else:
            pairs, alpha, pivot, row_sum, row_max = softmax_step(s, pivot, row_sum, row_max, scale, dtype)
        if DROPPED:
            pairs = drop_drawn(pairs, (head.stream_low, head.stream_high), score.dropped, q_position, k_position)
        if HAS_STATE:
            # pinned: LLVM would merge this product with the one in the loop, and move it between the loop's matrix products
            acc = [pin(scaled(x, alpha)) for x in acc]
        # read again rather than held in registers until here, and below through the loop
        work = take_rows(blocks, taken, WARPGROUP)
        left = work.steps - work.before - work.after - 1
        start += BLOCK_K
        while left > 0:
            if start >= end:
                segment += 1
                start, full_begin, full_end, end = load_segment(queue.segments_ptr, segment)
                if MODIFIED:
                    place_of_q, place_of_k = load_places(score, segment)
                    q_position = position(score, place_of_q, first_row)
            # all steps of the segment; but with a state or modified scores, a loop in a loop would spill
            left_after = left - (1 if HAS_STATE or MODIFIED else gl.minimum(left, gl.cdiv(end - start, BLOCK_K)))
            while left > left_after:
                left -= 1
                if MODIFIED:
                    k_position = position(score, place_of_k, start)
                # the values of `block` are due, and the scores of `block + 1`
                if TURNS:
                    named_barrier("sync", WARPGROUP)
                if PAIRED:
                    s_token = scores_product(
                        blocks.q, q_place, q_kept, blocks.k, barriers.k_full, s, block + 1, True, CHUNKS, PANELS, STAGES
                    )
                acc_token = start_values(pairs, blocks.v, barriers.v_full, acc, block, STAGES)
                if TURNS:
                    named_barrier("arrive", NEXT)
                if PAIRED:
                    # all products except those of the values, one for each panel
                    s = warpgroup_mma_wait(PANELS, deps=[s_token])
                else:
                    acc = wait_for_products(0, acc_token)
                    pairs = pin(pairs)
                    s_token = scores_product(
                        blocks.q, q_place, q_kept, blocks.k, barriers.k_full, no_scores, block + 1, True, CHUNKS, PANELS, STAGES
                    )
                    s = warpgroup_mma_wait(0, deps=[s_token])
                if CHANGED:
                    s, _ = modified(s, score, head, q_position, k_position, 1)
                if (start < full_begin) | (start >= full_end):
                    # hidden: the segment's address would be held in registers through the loop
                    s = mask_edge(s, start, end, queue.segments_ptr, hide_uniform(segment, q_rows), first_row)
                block += 1
                if PAIRED:
                    acc = wait_for_products(0, acc_token)
                    pairs = pin(pairs)
                mbarrier.arrive(barriers.kv_empty.index(stage_of(block, STAGES)), count=1)
                if LATE_CAP:
                    pairs, alpha, pivot, row_sum, row_max = capped_softmax_step(
                        s, pivot, row_sum, row_max, scale, score.into_cap, dtype
                    )
                elif AHEAD and not MODIFIED:
                    pairs, alpha, pivot, row_sum, row_max = softmax_step_ahead(s, pivot, row_sum, row_max, scale, dtype)
                else:
                    pairs, alpha, pivot, row_sum, row_max = softmax_step(s, pivot, row_sum, row_max, scale, dtype)
                if DROPPED:
                    pairs = drop_drawn(pairs, (head.stream_low, head.stream_high), score.dropped, q_position, k_position)
                acc = [rescale(x, alpha) for x in acc]
                start += BLOCK_K
        # once Q may go, the place may get another work
        work = take_rows(blocks, taken, WARPGROUP)
        head_index, first_row = work.head_index, work.block_begin + WARPGROUP * ROWS
        if not IN_PLACE:
            mbarrier.arrive(barriers.q_empty.index(q_place), count=1)
        acc_token = start_values(pairs, blocks.v, barriers.v_full, acc, block, STAGES)
        if TURNS and work.after > 0:
            take_turn(WARPGROUP, NEXT)
        acc = wait_for_products(0, acc_token)
        pairs = pin(pairs)
        block = pass_by(barriers, block, work.after, WARPGROUP, NEXT, TURNS, STAGES, 1)

        # after the last work nobody uses the scores of the next one
        taken += 1
        q_stored = q_place
        next_scores = s if PAIRED else no_scores
        if EARLY:
            work, block, q_place, q_kept, s_token = start_work(
                blocks, barriers, next_scores, block, taken, WARPGROUP, NEXT, WARPGROUPS, Q_STAGES, STAGES, CHUNKS, PANELS, KEPT, TURNS
            )  # fmt: skip
            # this wait is over, and ends a basic block: the compiler would start the last products behind the instructions that follow
            mbarrier.wait(barriers.q_full.index(q_place), (taken // Q_STAGES) & 1)
        total = gl.convert_layout(gl.sum(row_sum, axis=1), SCORE_ROWS, assert_trivial=True)
        divisor = total
        sink = 0.0
        if result.sinks_ptr is not None:
            sink = gl.load(result.sinks_ptr + head_index % heads) * LOG2_E
            # a row without a live pair stays 0
            divisor = gl.where(total == 0, 0.0, total + gl.exp2(sink - pivot))
        if DROPPED:
            divisor *= score.kept_share
        out = [divided(x, divisor, result.out_ptr.dtype.element_ty) for x in acc]
        if IN_PLACE:
            # the place of the work before is empty once the copy engine has read it
            tma.store_wait(0)
            mbarrier.arrive(
                barriers.q_empty.index((taken + Q_STAGES - 2) % Q_STAGES * WARPGROUPS + WARPGROUP), count=1, pred=taken > 1
            )
            copy_out(result.out_desc, blocks.q.index(q_stored), out, first_row, head_index, heads, 0)
        elif STAGED:
            halves = split_columns(out[0])
            for half in gl.static_range(2):
                # until the copy engine has read the half before
                tma.store_wait(0)
                barrier()
                # hidden: what follows from it would be kept in registers until the next work
                hidden = hide_uniform(head_index, q_rows)
                copy_out(result.out_desc, blocks.out.index(WARPGROUP), (halves[half],), first_row, hidden, heads, half)
        else:
            for panel in gl.static_range(PANELS):
                store_out(result.out_ptr, out[panel], first_row, head_index, heads, q_rows, V_DIM, panel)
        total = gl.where(total == 0, 0.0, total * gl.exp2(pivot - row_max))
        if result.sinks_ptr is not None:
            row_max, total, _ = with_sink(row_max, total, sink)
        row_max, total = to_natural(row_max, total)
        rows = first_row + gl.arange(0, ROWS, SCORE_ROWS)
        statistics = head_index.to(gl.int64) * q_rows + rows
        gl.store(result.row_max_ptr + statistics, row_max, mask=rows < q_rows)
        gl.store(result.row_sum_ptr + statistics, total, mask=rows < q_rows)
        if not EARLY:
            work, block, q_place, q_kept, s_token = start_work(
                blocks, barriers, next_scores, block, taken, WARPGROUP, NEXT, WARPGROUPS, Q_STAGES, STAGES, CHUNKS, PANELS, KEPT, TURNS
            )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s_token])
        # the last values of this work, and the next one's first keys
        mbarrier.arrive(barriers.kv_empty.index(stage_of(block, STAGES)), count=1)
    if STAGED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["work_count", "batches", "heads", "group", "q_rows", *NOT_SPECIALIZED])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, state_ptr, row_max_ptr, row_sum_ptr, sinks_ptr, works_ptr, segments_ptr, counter_ptr,
    work_count, batches, heads, group, q_rows, scale, into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest,
    places_ptr, place_stride, seed_low, seed_high, offset, all_heads, first_head, dropped, kept_share,
    CHUNKS: gl.constexpr, PANELS: gl.constexpr, WARPGROUPS: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, V_DIM: gl.constexpr, HAS_STATE: gl.constexpr, TURNS: gl.constexpr, PAIRED: gl.constexpr, KEPT: gl.constexpr,
    AHEAD: gl.constexpr, REGISTERS: gl.constexpr, MODIFIED: gl.constexpr, LATE_CAP: gl.constexpr,
):  # fmt: skip
    """out, row_max, row_sum of the works of one program; see the module."""
    gl.static_assert(KEPT == 0 or (CHUNKS == 1 and PANELS == 1), "columns are kept of a single block")
    dtype: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES * WARPGROUPS * CHUNKS, 1, ROWS, 1, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, 1, BLOCK_K, 1, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_K, 1, BLOCK_DV], v_desc.layout)
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_D], dtype)
    V: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=v_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    # the same bytes, as matrices
    q_matrices = reinterpret(q_smem, dtype, [Q_STAGES * WARPGROUPS * CHUNKS, ROWS, BLOCK_D], Q)
    k_matrices = reinterpret(k_smem, dtype, [STAGES * CHUNKS, BLOCK_K, BLOCK_D], K)
    v_matrices = reinterpret(v_smem, dtype, [STAGES, BLOCK_K, BLOCK_DV], V)
    # the numbers of works whose Q is here
    work_smem = gl.allocate_shared_memory(gl.int32, [WORK_PLACES * WORK_COLUMNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    out_smem = None
    if out_desc is not None and Q_STAGES == 1:
        out_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, ROWS, 1, BLOCK_DV // 2], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * WARPGROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * WARPGROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # for each block: its K has been read, and the V of the block before it
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES * WARPGROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    blocks = Blocks(q_smem, k_smem, v_smem, work_smem, out_smem)
    matrices = Blocks(q_matrices, k_matrices, v_matrices, work_smem, out_smem)
    barriers = ForwardBarriers(q_full, q_empty, k_full, v_full, kv_empty)
    result = Result(out_desc, out_ptr, state_ptr, row_max_ptr, row_sum_ptr, sinks_ptr)
    queue = DeviceWorkQueue(works_ptr, segments_ptr, work_count)
    score = ScoreSteps(
        into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest, places_ptr, place_stride, seed_low, seed_high,
        offset, all_heads, first_head, dropped, kept_share, batches, heads,
    )  # fmt: skip
    # constants must stay in the calls' own tuples: a name for a tuple would turn them into run-time values
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (load_copies, (q_desc, k_desc, v_desc, blocks, barriers, queue, counter_ptr, batches, heads, group,
                           CHUNKS, WARPGROUPS, Q_STAGES, STAGES, TURNS)),
            (attend_rows, (matrices, barriers, result, queue, score, heads, q_rows, scale, 0, CHUNKS, WARPGROUPS, Q_STAGES, STAGES, V_DIM,
                           HAS_STATE, TURNS, PAIRED, PANELS, KEPT, AHEAD, MODIFIED, LATE_CAP)),
            (attend_rows, (matrices, barriers, result, queue, score, heads, q_rows, scale, 1, CHUNKS, WARPGROUPS, Q_STAGES, STAGES, V_DIM,
                           HAS_STATE, TURNS, PAIRED, PANELS, KEPT, AHEAD, MODIFIED, LATE_CAP)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (load_copies, (q_desc, k_desc, v_desc, blocks, barriers, queue, counter_ptr, batches, heads, group,
                           CHUNKS, WARPGROUPS, Q_STAGES, STAGES, TURNS)),
            (attend_rows, (matrices, barriers, result, queue, score, heads, q_rows, scale, 0, CHUNKS, WARPGROUPS, Q_STAGES, STAGES, V_DIM,
                           HAS_STATE, TURNS, PAIRED, PANELS, KEPT, AHEAD, MODIFIED, LATE_CAP)),
            (attend_rows, (matrices, barriers, result, queue, score, heads, q_rows, scale, 1, CHUNKS, WARPGROUPS, Q_STAGES, STAGES, V_DIM,
                           HAS_STATE, TURNS, PAIRED, PANELS, KEPT, AHEAD, MODIFIED, LATE_CAP)),
            (attend_rows, (matrices, barriers, result, queue, score, heads, q_rows, scale, 2, CHUNKS, WARPGROUPS, Q_STAGES, STAGES, V_DIM,
                           HAS_STATE, TURNS, PAIRED, PANELS, KEPT, AHEAD, MODIFIED, LATE_CAP)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
