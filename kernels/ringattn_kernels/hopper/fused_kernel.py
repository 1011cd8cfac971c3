"""Exact attention over a tile table, backward, for Hopper, in one pass of five products.

    P = exp2(scale Q K^T - pivot)        dV += P^T dout
    dS = P * (dout V^T - delta)          dK += softmax_scale dS^T Q      dQ += softmax_scale dS K

A work is 128 key rows of one key/value head, which meet blocks of queries of all heads of its group, as in `key_kernel`. In addition,
dS goes through shared memory for the product with K, and the copy engine adds the result to fp32 sums of dq in global memory
(`dq_sums`), to which any number of launches may add. The same inputs give the same bits of dk and dv. They do so of dq where programs
take turns to add (ORDERED; see `turns`); else dq is the same up to rounding, because which of two programs adds first is not fixed.

A program takes works one after another (`works`). While the warpgroups finish one and write its dk and dv, the first queries of the next
one, and its keys, are on their way.

Shapes: as in `attention.backward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ..score_arguments import NOT_SPECIALIZED
from .barriers import advance, named_barrier
from .blocks import BLOCK, ROWS, drop_dead, mask_scores
from .dq_sums import DQ_PRODUCTS, SUMS, WIDTH, Handover, Staging, add_dq, allocate_staging, hand_over_dq, start_dq
from .fences import hide_uniform, pin_pairs
from .gradient_rows import GradientRows, write_gradients
from .kept_pairs import drop_halves, kept_bits, where_kept
from .language import wait_for_products
from .loads import Inputs, allocate_queries, produce_work
from .ordered_loads import DeviceTurns, load_walk, produce_and_add, walk_back
from .owned_dq import OwnRows, dq_of, leave_dq, take_touch
from .panels import join_columns, matrices, panels, some_rows, split_columns, start_each, start_sum, zeros
from .score_steps import ScoreSteps, load_head, load_places, modified_and_masked, position, with_slope
from .score_sums import SumPointers, add_to_sums, leave_head, no_sums
from .tables import Walk
from .works import NUMBERS, KeyWorks, WorkPlaces, draw, end_work, hand_out_end, hand_out_work, keep_pace, load_key_work, take_work


@gluon.constexpr_function
def is_wide(head_dim, v_dim):
    """Whether 64 rows of dk and dv take more than 128 registers of each of a warpgroup's threads."""
    return head_dim + v_dim > 256


@gluon.constexpr_function
def meets_at_named_barriers(head_dim, v_dim, ordered, capped):
    """Whether the warpgroups exchange dS at the multiprocessor's named barriers: fewer instructions than barriers in shared memory take.

    But they take a register more, which the softcap does not leave, and are slower where programs take turns.
    """
    return not ordered and not (capped and head_dim + v_dim > 192)


@gluon.jit
def weights(s, pivots, scale, edge, segments_ptr, segment, row0, start, dtype: gl.constexpr):
    """P of some columns in 16 bits, as a left operand that stays where it is."""
    L: gl.constexpr = s.type.layout
    p = gl.exp2(s * scale - gl.expand_dims(pivots.load(gl.SliceLayout(0, L)), 0))
    if edge:
        p = mask_scores(p, segments_ptr, segment, row0, start)
    return pin_pairs(gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, L, 2), assert_trivial=True))


@gluon.jit
def score_gradient(p16, dp, edge, ORDERED: gl.constexpr):
    """dS in 16 bits, from P in 16 bits."""
    p = gl.convert_layout(p16, dp.type.layout, assert_trivial=True).to(gl.float32)
    if ORDERED and edge:
        dp = drop_dead(dp, p)
    return (p * dp).to(p16.dtype)


@gluon.jit
def kept_of_step(score, head, place_of_q, place_of_k, start, row0, STEP: gl.constexpr):
    """Which pairs of the keys from row0 on dropout keeps, in the step of queries from `start` on."""
    q_position, k_position = position(score, place_of_q, start), position(score, place_of_k, row0)
    return kept_bits((head.stream_low, head.stream_high), score.dropped, q_position, k_position, STEP)


@gluon.jit
def consume_and_add(
    tiles, staging, barriers, handover, of_works, works, sums, own, gradients, score, score_sums, padded_rows, k_rows, scale,
    softmax_scale, HALF: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr,
    OVERLAP: gl.constexpr, ADD: gl.constexpr, ORDERED: gl.constexpr, OWNED: gl.constexpr, MODIFIED: gl.constexpr,
    QK_COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 key rows, and this warpgroup's part of each step's dq.

    If dk and dv take more than 128 registers of a thread, P is kept in 16 bits, in two halves, and fewer products run at a time.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    WIDE: gl.constexpr = is_wide(HEAD_DIM, V_DIM)
    PARTS: gl.constexpr = 2 if WIDE else 1
    DROPPED: gl.constexpr = MODIFIED and score.dropped is not None
    CAPPED: gl.constexpr = MODIFIED and score.into_cap is not None
    NAMED: gl.constexpr = meets_at_named_barriers(HEAD_DIM, V_DIM, ORDERED, CAPPED)
    SUMMED: gl.constexpr = score_sums.slopes is not None or score_sums.biases is not None
    BUFFERS: gl.constexpr = staging.ds.type.shape[0] // 2
    dtype: gl.constexpr = tiles.q[0].dtype
    # [ROWS, HEAD_DIM] and [ROWS, V_DIM], in panels
    k = matrices(tiles.k, HALF)
    v = matrices(tiles.v, HALF)
    zero = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    whole_share = 1.0
    if DROPPED:
        whole_share = 1.0 / score.kept_share
    stage = 0
    phase = 0
    buffer = 0
    turn = 0
    last_buffer = BUFFERS - 1
    last_turn = 1
    handed = 0  # blocks of dQ, if there are turns
    taken = 0
    mbarrier.wait(of_works.full.index(0), 0)
    work = take_work(of_works, 0)
    while work.steps >= 0:
        walk = Walk(works.segments_ptr, work.first_segment, work.last_segment, work.steps)
        head0 = work.head_index * works.group
        head_row = head0 * padded_rows
        dk = zeros(ROWS, k)
        dv = zeros(ROWS, v)
        row0 = work.block_begin + HALF * ROWS
        whole = work.block_begin + BLOCK <= k_rows
        segment = walk.begin
        if ORDERED:
            segment = gl.maximum(walk.end, 1) - 1
        start, full_begin, full_end, stop = load_walk(walk.segments_ptr, segment, whole, STEP, ORDERED)
        member = 0
        if MODIFIED:
            head = load_head(score, head0)
            place_of_q, place_of_k = load_places(score, segment)
        if SUMMED:
            found = no_sums(score_sums)
        # a work without steps has none; past the end of the sums, the copy engine adds nothing
        last_row = works.heads * works.group * padded_rows
        if OWNED:
            dq_ptr = dq_of(own, work, works.group)
            touch = 0
        mbarrier.wait(barriers.kv_full, taken & 1)
        mbarrier.wait(barriers.q_full.index(stage), phase, pred=walk.steps > 0)
        s = start_sum(k, matrices(tiles.q, stage), zero, False)
        if DROPPED:
            kept = kept_of_step(score, head, place_of_q, place_of_k, start, row0, STEP)
        s = warpgroup_mma_wait(0, deps=[s])
        for n in range(walk.steps):
            # [STEP, HEAD_DIM] and [STEP, V_DIM], in panels
            q = matrices(tiles.q, stage)
            dout = matrices(tiles.dout, stage)
            if OWNED:
                this_touch = take_touch(staging, stage)
            # [ROWS, STEP]
            edge = (start < full_begin) | (start >= full_end)
            if MODIFIED:
                q_position, k_position = position(score, place_of_q, start), position(score, place_of_k, row0)
                s, share = modified_and_masked(
                    s, score, head, q_position, k_position, -1, edge, walk.segments_ptr, segment, row0, start
                )
            if WIDE:
                s_left, s_right = split_columns(s)
                pivots = tiles.pivot.index(stage)
                p_left = weights(s_left, pivots.slice(0, STEP // 2), scale, edge, walk.segments_ptr, segment, row0, start, dtype)
                start_right = start + STEP // 2
                p_right = weights(
                    s_right, pivots.slice(STEP // 2, STEP // 2), scale, edge, walk.segments_ptr, segment, row0, start_right, dtype
                )
            mbarrier.wait(barriers.dout_full.index(stage), phase)
            # the statistics hold -delta
            if DROPPED:
                # of a dropped pair delta stays
                dp = start_sum(v, dout, zero, False)
            else:
                dp = gl.expand_dims(tiles.delta.index(stage).load(COLUMNS), 0).broadcast_to([ROWS, STEP])
                dp = start_sum(matrices(tiles.v, hide_uniform(HALF, k_rows)) if WIDE else v, dout, dp, True)
            if not WIDE:
                p = gl.exp2(s * scale - gl.expand_dims(tiles.pivot.index(stage).load(COLUMNS), 0))
                if not MODIFIED:  # noqa: SIM102, a constant decides before the compiler sees the other condition
                    if edge:
                        p = mask_scores(p, walk.segments_ptr, segment, row0, start)
                p16 = p.to(dtype)
                if DROPPED:
                    p16 = drop_halves(p16, kept)
                p16 = gl.convert_layout(p16, LEFT, assert_trivial=True)
                if CAPPED:
                    p = with_slope(p, share)
            done = stage
            stage, phase = advance(stage, phase, STAGES)
            if WIDE:
                dv_next = start_each(p_left, some_rows(dout, 0, STEP // 2), dv)
                dv_next = start_each(p_right, some_rows(dout, STEP // 2, STEP // 2), dv_next)
                dp = warpgroup_mma_wait(2 * len(dv), deps=[dp])
                p_left = pin_pairs(p_left)
                p_right = pin_pairs(p_right)
                dp_left, dp_right = split_columns(dp)
                ds_left = score_gradient(p_left, dp_left, edge, ORDERED)
                shared_ds = join_columns(ds_left, score_gradient(p_right, dp_right, edge, ORDERED))
            else:
                dv_next = start_each(p16, dout, dv)
                dp = warpgroup_mma_wait(len(dv), deps=[dp])
                p16 = pin_pairs(p16)
                if DROPPED:
                    dp = where_kept(dp, gl.convert_layout(p16, SCORES, assert_trivial=True)) * whole_share
                    dp += gl.expand_dims(tiles.delta.index(done).load(COLUMNS), 0)
                if ORDERED and edge:
                    # without turns there is no time for it: it takes 6 % at head dim 128
                    dp = drop_dead(dp, p)
                ds = p * dp
                shared_ds = ds.to(dtype)
                if SUMMED:
                    found = add_to_sums(found, score_sums, ds, score, head0 + member, q_position, k_position, k_rows)
            ds = gl.convert_layout(shared_ds, LEFT, assert_trivial=True)
            # started first, so that the tensor cores have work while the two warpgroups exchange dS
            dk_next = start_each(ds, q, dk)
            if WIDE:
                mbarrier.wait(handover.ds_empty.index(buffer), turn ^ 1)
            elif NAMED:
                # before dS is stored: then the other warpgroup is done with the dq of three steps before, whose dS lay there
                named_barrier("sync", last_buffer * 2 + 1 - HALF, n)
            staging.ds.index(buffer * 2 + HALF).store(shared_ds)
            fence_async_shared()
            if NAMED:
                named_barrier("arrive", buffer * 2 + HALF)
            else:
                mbarrier.arrive(handover.ds_full.index(buffer), count=1)
            if WIDE:
                products = wait_for_products(0, dv_next + dk_next)
                p_left = pin_pairs(p_left)
                p_right = pin_pairs(p_right)
                ds = pin_pairs(ds)
                mbarrier.arrive(barriers.empty.index(done), count=1)
            # dq of the step before, so that neither warpgroup waits for the other
            if not NAMED:
                mbarrier.wait(handover.ds_full.index(last_buffer), last_turn, pred=n > 0)
            elif WIDE:
                named_barrier("sync", last_buffer * 2 + 1 - HALF, n)
            dq = start_dq(tiles.k, staging.ds, last_buffer, k_rows, HALF, STEP, HEAD_DIM, 0)
            if WIDE:
                dq_rest = start_dq(tiles.k, staging.ds, last_buffer, k_rows, HALF, STEP, HEAD_DIM, 1)
            freed = last_buffer
            this_row = head_row + start
            last_buffer = buffer
            last_turn = turn
            buffer, turn = advance(buffer, turn, BUFFERS)
            if ORDERED:
                member += 1
                if member == works.group:
                    member = 0
                    segment, start, full_begin, full_end, stop = walk_back(
                        walk.segments_ptr, segment, walk.begin, start, full_begin, full_end, stop, whole, STEP
                    )
                if MODIFIED:
                    head = load_head(score, head0 + member)
                    place_of_q, place_of_k = load_places(score, segment)
            else:
                start += STEP
                if start >= stop:
                    segment += 1
                    if segment == walk.end:
                        segment = walk.begin
                        head_row += padded_rows
                        if SUMMED:
                            found = leave_head(found, score_sums, score, head0 + member)
                        member += 1
                    start, full_begin, full_end, stop = load_walk(walk.segments_ptr, segment, whole, STEP, ORDERED)
                    if MODIFIED:
                        head = load_head(score, head0 + member)
                        place_of_q, place_of_k = load_places(score, segment)
            if WIDE:
                dq, dq_rest = warpgroup_mma_wait(0, deps=[dq, dq_rest])
                mbarrier.arrive(handover.ds_empty.index(freed), count=1, pred=n > 0)
            else:
                if OVERLAP > 0:
                    products = wait_for_products(DQ_PRODUCTS, dv_next + dk_next)
                else:
                    products = wait_for_products(0, dv_next + dk_next + (dq,))
                    dq = products[len(products) - 1]
                p16 = pin_pairs(p16)
                ds = pin_pairs(ds)
                mbarrier.arrive(barriers.empty.index(done), count=1)
                if OVERLAP == 1:
                    dq = warpgroup_mma_wait(0, deps=[dq])
            dv = products[: len(dv)]
            dk = products[len(dv) : len(dv) + len(dk)]
            mbarrier.wait(barriers.q_full.index(stage), phase, pred=(n + 1) < walk.steps)
            if WIDE:
                if ORDERED:
                    hand_over_dq(staging.dq, handover, dq, handed + n, HALF, STEP, HEAD_DIM, 0, PARTS)
                    hand_over_dq(staging.dq, handover, dq_rest, handed + n, HALF, STEP, HEAD_DIM, 1, PARTS)
                else:
                    add_dq(sums, staging.dq, dq, last_row, HALF, STEP, HEAD_DIM, 0)
                    add_dq(sums, staging.dq, dq_rest, last_row, HALF, STEP, HEAD_DIM, 1)
            k_next = matrices(tiles.k, hide_uniform(HALF, k_rows)) if STEP == 64 else k
            s_next = start_sum(k_next, matrices(tiles.q, stage), zero, False)
            if not WIDE:
                if OVERLAP == 2:
                    dq = warpgroup_mma_wait(len(k), deps=[dq])
                if ORDERED:
                    hand_over_dq(staging.dq, handover, dq, handed + n, HALF, STEP, HEAD_DIM, 0, PARTS)
                elif OWNED:
                    leave_dq(sums, staging.dq, own, dq_ptr, dq, touch, works.group, HALF, STEP, HEAD_DIM)
                    touch = this_touch
                elif not NAMED or n > 0:
                    # in a basic block of its own: else the compiler moves the sums' address about among the scores' products
                    add_dq(sums, staging.dq, dq, last_row, HALF, STEP, HEAD_DIM, 0)
            last_row = this_row
            if DROPPED:
                # while the product runs, and few registers are in use
                kept = kept_of_step(score, head, place_of_q, place_of_k, start, row0, STEP)
            s = warpgroup_mma_wait(0, deps=[s_next])
        # read again rather than held in registers through the loop; once K may go, the place may get another work
        work = take_work(of_works, taken)
        if NAMED:
            named_barrier("sync", last_buffer * 2 + 1 - HALF, walk.steps)
        else:
            mbarrier.wait(handover.ds_full.index(last_buffer), last_turn, pred=walk.steps > 0)
        for part in gl.static_range(PARTS):
            dq = start_dq(tiles.k, staging.ds, last_buffer, k_rows, HALF, STEP, HEAD_DIM, part)
            dq = warpgroup_mma_wait(0, deps=[dq])
            if part == PARTS - 1:
                mbarrier.arrive(of_works.keys_empty, count=1)
                if WIDE:
                    mbarrier.arrive(handover.ds_empty.index(last_buffer), count=1, pred=walk.steps > 0)
            if ORDERED:
                hand_over_dq(staging.dq, handover, dq, handed + walk.steps, HALF, STEP, HEAD_DIM, part, PARTS)
            elif OWNED:
                dq_ptr = dq_of(own, work, works.group)
                leave_dq(sums, staging.dq, own, dq_ptr, dq, touch, works.group, HALF, STEP, HEAD_DIM)
            else:
                add_dq(sums, staging.dq, dq, last_row, HALF, STEP, HEAD_DIM, part)
        batches = works.heads // works.kv_heads
        dv_factor = whole_share if MODIFIED else 1.0
        room = None if ORDERED else staging.dq.index(HALF)
        write_gradients(
            gradients, room, work, batches, k_rows, dk, dv, softmax_scale, dv_factor, HALF, ADD, not MODIFIED, OWNED, QK_COLUMNS,
            V_COLUMNS,
        )  # fmt: skip
        if SUMMED:
            # of the last head, which leaves with the last step: what came after it is 0
            found = leave_head(found, score_sums, score, work.head_index * works.group + gl.minimum(member, works.group - 1))
        handed += walk.steps + 1
        taken += 1
        mbarrier.wait(of_works.full.index(taken % 2), (taken // 2) & 1)
        work = take_work(of_works, taken)
    if not ORDERED:
        tma.store_wait(0)


@gluon.jit
def produce(
    inputs, sums, tiles, staging, barriers, handover, of_works, works, own, pace, turns, padded_rows,
    STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr, ORDERED: gl.constexpr, OWNED: gl.constexpr,
):  # fmt: skip
    """What the partition without products does."""
    taken = 0
    stage = 0
    phase = 0
    handed = 0
    # a program draws single works, or heads of which it then takes all
    drawn = works.item_count if OWNED else 1
    number = draw(works, taken) * drawn
    while number < works.count * drawn:
        work, item = load_key_work(works, number, STEP)
        walk = Walk(works.segments_ptr, work.first_segment, work.last_segment, work.steps)
        if not ORDERED:
            keep_pace(works, number, pace)
        hand_out_work(of_works, work, taken)
        if ORDERED:
            mbarrier.wait(of_works.keys_empty, (taken & 1) ^ 1)
            stage, phase = produce_and_add(
                inputs, sums, tiles, staging, barriers, handover, walk, turns, work, item, works.group, padded_rows, stage, phase, handed,
                STAGES, STEP, HEAD_DIM, PARTS,
            )  # fmt: skip
            handed += walk.steps + 1
        else:
            stage, phase = produce_work(
                inputs, tiles, barriers, of_works.keys_empty, own, staging.touches, walk, work, works.group, padded_rows, taken, stage,
                phase, STAGES, STEP, OWNED,
            )  # fmt: skip
            end_work(works, pace)
        taken += 1
        # now that all copies for this work are asked for: earlier, a program would hold a work that another could begin
        if OWNED:
            number += 1
            if number % drawn == 0:
                number = draw(works, taken // drawn) * drawn
        else:
            number = draw(works, taken)
    hand_out_end(of_works, taken)


@gluon.jit(
    do_not_specialize=[
        "count", "most", "pace", "item_count", "chunk", "heads", "kv_heads", "group", "padded_rows", "q_rows", "k_rows", *NOT_SPECIALIZED
    ]
)  # fmt: skip
def fused_kernel(
    q_desc, k_desc, v_desc, dout_desc, q_rest, k_rest, v_rest, dout_rest, pivot_desc, delta_desc, sums_desc, sums_rest,
    dk_desc, dv_desc, dk_ptr, dv_ptr, items_ptr, segments_ptr, successors_ptr, counters_ptr, drawn_ptr,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    count, most, item_count, chunk, heads, kv_heads, group, padded_rows, k_rows, scale, softmax_scale,
    into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest, places_ptr, place_stride, seed_low, seed_high, offset,
    all_heads, first_head, dropped, kept_share, slope_sums_ptr, bias_sums_ptr, pace,
    sums_ptr, touches_ptr, dq_ptr, stride_dqb, stride_dqs, stride_dqh, q_rows,
    HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr,
    REGISTERS: gl.constexpr, OVERLAP: gl.constexpr, ORDERED: gl.constexpr, OWNED: gl.constexpr, MODIFIED: gl.constexpr,
    QK_COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr,
):  # fmt: skip
    """dk and dv of the works of one program, each over all query heads of its group, and what it adds to their dq."""
    # buffers of dS: one more than stages, at least three. Room for a step's queries then means room for its dS, or the other warpgroup's
    # dS of the step before does. If that does not fit: as many as stages, and a barrier
    BUFFERS: gl.constexpr = STAGES if is_wide(HEAD_DIM, V_DIM) else STAGES + 1
    PARTS: gl.constexpr = 2 if is_wide(HEAD_DIM, V_DIM) else 1
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STEP], q_desc.dtype)
    inputs = Inputs(
        panels(q_desc, q_rest), panels(k_desc, k_rest), panels(v_desc, v_rest), panels(dout_desc, dout_rest), pivot_desc, delta_desc
    )
    tiles, barriers = allocate_queries(inputs, STAGES, STEP, 2)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS * 2, ROWS, STEP], DS)
    sums = panels(sums_desc, sums_rest)
    staged = barriers.kv_full
    taken = barriers.kv_full
    if ORDERED:
        dq_s = allocate_staging(sums, PARTS)
        staged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(staged, count=2)
        mbarrier.init(taken, count=1)
    else:
        dq_s = gl.allocate_shared_memory(gl.float32, [2, WIDTH * WIDTH // SUMS, SUMS], sums_desc.layout)
    ds_full = barriers.kv_full
    if not meets_at_named_barriers(HEAD_DIM, V_DIM, ORDERED, into_cap is not None):
        ds_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(BUFFERS):
            mbarrier.init(ds_full.index(i), count=2)
    ds_empty = barriers.kv_full
    if BUFFERS == STAGES:
        ds_empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(BUFFERS):
            mbarrier.init(ds_empty.index(i), count=2)
    places = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    touches = places
    if OWNED:
        touches = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    keys_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(keys_empty, count=2)
    fence_async_shared()

    staging, handover, of_works = (
        Staging(ds_s, dq_s, touches),
        Handover(ds_full, ds_empty, staged, taken),
        WorkPlaces(places, full, keys_empty),
    )
    works = KeyWorks(items_ptr, segments_ptr, drawn_ptr, count, most, item_count, chunk, heads, kv_heads, group)
    gradients = GradientRows(
        dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs
    )  # fmt: skip
    turns = DeviceTurns(successors_ptr, counters_ptr)
    score = ScoreSteps(
        into_cap, per_unit, slopes_ptr, slopes_count, biases_ptr, biases_count, nearest, places_ptr, place_stride, seed_low, seed_high,
        offset, all_heads, first_head, dropped, kept_share, heads // kv_heads, kv_heads * group,
    )  # fmt: skip
    score_sums = SumPointers(slope_sums_ptr, bias_sums_ptr)
    own = OwnRows(sums_ptr, touches_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqs, q_rows, padded_rows, softmax_scale)
    gl.warp_specialize(
        [
            (produce, (inputs, sums, tiles, staging, barriers, handover, of_works, works, own, pace, turns, padded_rows,
                       STAGES, STEP, HEAD_DIM, PARTS, ORDERED, OWNED)),
            (consume_and_add, (tiles, staging, barriers, handover, of_works, works, sums, own, gradients, score, score_sums, padded_rows,
                               k_rows, scale, softmax_scale, 0, STAGES, STEP, HEAD_DIM, V_DIM, OVERLAP, ADD, ORDERED, OWNED, MODIFIED,
                               QK_COLUMNS, V_COLUMNS)),
            (consume_and_add, (tiles, staging, barriers, handover, of_works, works, sums, own, gradients, score, score_sums, padded_rows,
                               k_rows, scale, softmax_scale, 1, STAGES, STEP, HEAD_DIM, V_DIM, OVERLAP, ADD, ORDERED, OWNED, MODIFIED,
                               QK_COLUMNS, V_COLUMNS)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
