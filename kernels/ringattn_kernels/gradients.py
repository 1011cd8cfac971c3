"""The two gradient kernels in plain Triton; `attention` gives their formula and `plain_backward` launches them."""

import triton
import triton.language as tl

from .bands import edge_count, edge_start, live_columns, load_block, load_rows, load_segment
from .score_arguments import NOT_SPECIALIZED
from .score_steps import Steps, add_to_values, exponents, kept_share, load_places, stream_of


@triton.jit
def store_gradient(pointers, gradient, mask, ADD: tl.constexpr):
    """Add a gradient to memory, or store it. Each row has one owner in a launch, so that adding needs no atomics."""
    if ADD:
        gradient += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, gradient.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def key_step(
    dk, dv, k, v, q_desc, dout_desc, q_ptr, dout_ptr, batch, head, pivot_ptr, weight_ptr, delta_ptr, statistics,
    stride_qs, stride_os, start, end, first, last, scale, k_positions, q_place, place_stride, steps,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr, MODIFIED: tl.constexpr, EDGES: tl.constexpr,
    GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Add one block of queries to dk / softmax_scale and dv. Scores are held transposed, so that P^T and dS^T are left operands.

    k_positions: [BLOCK_K, 1]. steps: None if scores are only scaled. GRADIENTS: "both", or the one that changes.
    """
    columns = start + tl.arange(0, BLOCK_Q)
    # [BLOCK_Q]
    if MASKED:
        inside = columns < end
        pivot = tl.load(pivot_ptr + statistics + columns, mask=inside, other=float("inf"))
        if GRADIENTS != "dv":
            delta = tl.load(delta_ptr + statistics + columns, mask=inside, other=0.0)
    else:
        pivot = tl.load(pivot_ptr + statistics + columns)
        if GRADIENTS != "dv":
            delta = tl.load(delta_ptr + statistics + columns)
    # [BLOCK_Q, BLOCK_D]
    q = load_block(q_desc, q_ptr, batch, head, start, stride_qs, end, BLOCK_Q, HEAD_DIM, BLOCK_D, MASKED)
    # [BLOCK_K, BLOCK_Q]
    if PRECISION == "tf32x3":
        # the product of k and q would round its three parts in another order than that of q and k
        scores = tl.trans(tl.dot(q, tl.trans(k), input_precision=PRECISION))
    else:
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    # [BLOCK_Q, BLOCK_DV]
    dout = load_block(dout_desc, dout_ptr, batch, head, start, stride_os, end, BLOCK_Q, V_DIM, BLOCK_DV, MASKED)
    # [BLOCK_K, BLOCK_Q]
    if not MODIFIED:
        if GRADIENTS != "dv":
            dp = tl.dot(v, tl.trans(dout), tl.broadcast_to(-delta[None, :], scores.shape), input_precision=PRECISION)
        p = tl.math.exp2(scores * scale - pivot[None, :])
    else:
        q_positions = (q_place + place_stride * columns)[None, :]
        exponent, steepness = exponents(scores, q_positions, k_positions, scale, steps, EDGES)
        if GRADIENTS != "dv":
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        share = 1.0
        if steps.stream is not None:
            share = kept_share(q_positions, k_positions, steps)
        if GRADIENTS != "dv":
            dp = dp * share - delta[None, :]
        p = tl.math.exp2(exponent - pivot[None, :])
    if MASKED:
        live = (columns[None, :] >= first[:, None]) & (columns[None, :] <= last[:, None])
        p = tl.where(live, p, 0.0)
    if WEIGHTED:
        if MASKED:
            weight = tl.load(weight_ptr + statistics + columns, mask=inside, other=0.0)
        else:
            weight = tl.load(weight_ptr + statistics + columns)
        p = p * weight[None, :]
    if GRADIENTS != "dk":
        if not MODIFIED:
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        else:
            dv = tl.dot((p * share).to(dout.dtype), dout, dv, input_precision=PRECISION)
    if GRADIENTS != "dv":
        if not MODIFIED:
            ds = p * dp
        else:
            ds = p * dp * steepness
        if MASKED:
            # a dead key's row may hold anything, and 0 * nan is nan
            ds = tl.where(live, ds, 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["item_count", "kv_heads", "group", "q_rows", "k_rows", *NOT_SPECIALIZED])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, q_desc, dout_desc, pivot_ptr, weight_ptr, delta_ptr, dk_ptr, dv_ptr, items_ptr, segments_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    item_count, kv_heads, group, q_rows, k_rows, scale, softmax_scale,
    places_ptr, place_stride, cap, slopes_ptr, slopes_stride, edges_ptr, values_ptr, seed_low, seed_high, offset, all_heads, first_head,
    dropped, whole,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, EDGES: tl.constexpr, PIECES: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of key rows of one key/value head, over all query heads of its group; one of them, if GRADIENTS says so."""
    program = tl.program_id(0)
    head_index = program // item_count
    item_ptr = items_ptr + (program % item_count) * 4
    block_begin = tl.load(item_ptr)
    segment_begin = tl.load(item_ptr + 1)
    segment_end = tl.load(item_ptr + 2)
    split = tl.load(item_ptr + 3)
    batch = head_index // kv_heads
    kv_head = head_index % kv_heads
    k_ptr += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    # the partials of a split are stored as further batches
    out_batch = (split * (tl.num_programs(0) // (item_count * kv_heads)) + batch).to(tl.int64)
    dk_ptr += out_batch * stride_dkb + kv_head.to(tl.int64) * stride_dkh
    dv_ptr += out_batch * stride_dvb + kv_head.to(tl.int64) * stride_dvh

    rows = block_begin + tl.arange(0, BLOCK_K)
    row_mask = rows < k_rows
    # [BLOCK_K, BLOCK_D] and [BLOCK_K, BLOCK_DV]
    k = load_rows(k_ptr, block_begin, stride_ks, k_rows, BLOCK_K, HEAD_DIM, BLOCK_D, True)
    v = None
    if GRADIENTS != "dv":
        v = load_rows(v_ptr, block_begin, stride_vs, k_rows, BLOCK_K, V_DIM, BLOCK_DV, True)
    # one number takes the place of a gradient that is not asked for
    dk = tl.zeros([BLOCK_K, BLOCK_D] if GRADIENTS != "dv" else [1, 1], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_DV] if GRADIENTS != "dk" else [1, 1], tl.float32)

    for member in range(group):
        head = kv_head * group + member
        statistics = (batch * kv_heads * group + head).to(tl.int64) * q_rows
        q_head = q_ptr + (batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh)
        dout_head = dout_ptr + (batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh)
        steps = None
        if MODIFIED:
            # None where there is none; a function cannot return it
            slope = tl.load(slopes_ptr + batch * slopes_stride + head) if slopes_ptr is not None else None
            head_values = values_ptr + head * PIECES if values_ptr is not None else None
            stream = stream_of(seed_low, seed_high, offset, batch * all_heads + first_head + head) if seed_low is not None else None
            steps = Steps(cap, slope, edges_ptr, head_values, stream, dropped, whole)
        for segment in range(segment_begin, segment_end):
            begin, full_begin, full_end, end, lo, hi, row_begin, row_end = load_segment(segments_ptr, segment)
            q_place = None
            k_positions = None
            if MODIFIED:
                q_place, k_place = load_places(places_ptr, segment)
                k_positions = (k_place + place_stride * rows)[:, None]
            for start in range(full_begin, full_end, BLOCK_Q):
                dk, dv = key_step(
                    dk, dv, k, v, q_desc, dout_desc, q_head, dout_head, batch, head, pivot_ptr, weight_ptr, delta_ptr, statistics,
                    stride_qs, stride_os, start, end, None, None, scale, k_positions, q_place, place_stride, steps,
                    HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_Q, False, WEIGHTED, PRECISION, MODIFIED, EDGES, GRADIENTS,
                )  # fmt: skip
            first, last = live_columns(rows, end, lo, hi, row_begin, row_end)
            for edge in range(edge_count(begin, full_begin, full_end, end, BLOCK_Q)):
                start = edge_start(edge, begin, full_begin, full_end, BLOCK_Q)
                dk, dv = key_step(
                    dk, dv, k, v, q_desc, dout_desc, q_head, dout_head, batch, head, pivot_ptr, weight_ptr, delta_ptr, statistics,
                    stride_qs, stride_os, start, end, first, last, scale, k_positions, q_place, place_stride, steps,
                    HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_Q, True, WEIGHTED, PRECISION, MODIFIED, EDGES, GRADIENTS,
                )  # fmt: skip

    if GRADIENTS != "dv":
        d_columns = tl.arange(0, BLOCK_D)[None, :]
        dk_ptrs = dk_ptr + (rows.to(tl.int64)[:, None] * stride_dks + d_columns)
        mask = row_mask[:, None] & (d_columns < HEAD_DIM)
        store_gradient(dk_ptrs, dk * softmax_scale, mask, ADD)
    if GRADIENTS != "dk":
        v_columns = tl.arange(0, BLOCK_DV)[None, :]
        dv_ptrs = dv_ptr + (rows.to(tl.int64)[:, None] * stride_dvs + v_columns)
        mask = row_mask[:, None] & (v_columns < V_DIM)
        store_gradient(dv_ptrs, dv, mask, ADD)


@triton.jit
def query_step(
    dq, q, dout, pivot, weight, delta, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs,
    start, end, first, last, scale, q_positions, k_place, place_stride, steps, sums_ptr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr, MODIFIED: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """(dq, dslope) after one block of keys, which adds to dq / softmax_scale. q_positions: [BLOCK_Q, 1]; steps as in `key_step`.

    dslope: rows of what the block adds to minus the gradient of the slope. sums_ptr: the program's sums of the gradients of values.
    """
    # [BLOCK_K, BLOCK_D]
    k = load_block(k_desc, k_ptr, batch, kv_head, start, stride_ks, end, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
    # [BLOCK_Q, BLOCK_K]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    # [BLOCK_K, BLOCK_DV]
    v = load_block(v_desc, v_ptr, batch, kv_head, start, stride_vs, end, BLOCK_K, V_DIM, BLOCK_DV, MASKED)
    # [BLOCK_Q, BLOCK_K]
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    if not MODIFIED:
        p = tl.math.exp2(scores * scale - pivot[:, None])
    else:
        k_positions = (k_place + place_stride * (start + tl.arange(0, BLOCK_K)))[None, :]
        exponent, steepness = exponents(scores, q_positions, k_positions, scale, steps, EDGES)
        p = tl.math.exp2(exponent - pivot[:, None])
        if steps.stream is not None:
            dp *= kept_share(q_positions, k_positions, steps)
    if MASKED:
        columns = start + tl.arange(0, BLOCK_K)
        live = (columns[None, :] >= first[:, None]) & (columns[None, :] <= last[:, None])
        p = tl.where(live, p, 0.0)
    if WEIGHTED:
        # delta is multiplied by the weight already: one fused multiply-add instead of a further multiplication
        ds = p * (dp * weight[:, None] - delta[:, None])
    else:
        ds = p * (dp - delta[:, None])
    if not MODIFIED:
        return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION), 0.0
    else:
        if MASKED:
            # a dead key's row may hold anything, and 0 * nan is nan
            ds = tl.where(live, ds, 0.0)
        dslope = 0.0
        if steps.slope is not None:
            dslope = tl.sum(ds * tl.abs(k_positions - q_positions).to(tl.float32), 1)
        if sums_ptr is not None:
            add_to_values(sums_ptr, ds, q_positions, k_positions, steps, EDGES)
        return tl.dot((ds * steepness).to(k.dtype), k, dq, input_precision=PRECISION), dslope


@triton.jit(do_not_specialize=["item_count", "heads", "group", "q_rows", *NOT_SPECIALIZED])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, k_desc, v_desc, pivot_ptr, weight_ptr, delta_ptr, dq_ptr, items_ptr, segments_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_dqb, stride_dqs, stride_dqh,
    item_count, heads, group, q_rows, scale, softmax_scale,
    places_ptr, place_stride, cap, slopes_ptr, slopes_stride, edges_ptr, values_ptr, seed_low, seed_high, offset, all_heads, first_head,
    dropped, whole, dslopes_ptr, dvalues_ptr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, EDGES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """dq of one block of query rows of one head.

    dslopes_ptr: a number for each program, minus what it finds for the gradient of its head's slope. dvalues_ptr: PIECES for each.
    """
    program = tl.program_id(0)
    head_index = program // item_count
    item_ptr = items_ptr + (program % item_count) * 4
    block_begin = tl.load(item_ptr)
    segment_begin = tl.load(item_ptr + 1)
    segment_end = tl.load(item_ptr + 2)
    split = tl.load(item_ptr + 3)
    batch = head_index // heads
    head = head_index % heads
    kv_head = head // group
    k_ptr += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    dout_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    # the partials of a split are stored as further batches
    out_batch = (split * (tl.num_programs(0) // (item_count * heads)) + batch).to(tl.int64)
    dq_ptr += out_batch * stride_dqb + head.to(tl.int64) * stride_dqh

    rows = block_begin + tl.arange(0, BLOCK_Q)
    row_mask = rows < q_rows
    statistics = head_index.to(tl.int64) * q_rows + rows
    # [BLOCK_Q]
    pivot = tl.load(pivot_ptr + statistics, mask=row_mask, other=float("inf"))
    delta = tl.load(delta_ptr + statistics, mask=row_mask, other=0.0)
    weight = delta
    if WEIGHTED:
        weight = tl.load(weight_ptr + statistics, mask=row_mask, other=0.0)
        delta = weight * delta
    # [BLOCK_Q, BLOCK_D] and [BLOCK_Q, BLOCK_DV]
    q = load_rows(q_ptr, block_begin, stride_qs, q_rows, BLOCK_Q, HEAD_DIM, BLOCK_D, True)
    dout = load_rows(dout_ptr, block_begin, stride_os, q_rows, BLOCK_Q, V_DIM, BLOCK_DV, True)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    steps = None
    sums_ptr = None
    if MODIFIED:
        # None where there is none; a function cannot return it
        slope = tl.load(slopes_ptr + batch * slopes_stride + head) if slopes_ptr is not None else None
        head_values = values_ptr + head * PIECES if values_ptr is not None else None
        stream = stream_of(seed_low, seed_high, offset, batch * all_heads + first_head + head) if seed_low is not None else None
        steps = Steps(cap, slope, edges_ptr, head_values, stream, dropped, whole)
        dslopes = tl.zeros([BLOCK_Q], tl.float32)
        if dvalues_ptr is not None:
            sums_ptr = dvalues_ptr + program.to(tl.int64) * PIECES

    for segment in range(segment_begin, segment_end):
        begin, full_begin, full_end, end, lo, hi, row_begin, row_end = load_segment(segments_ptr, segment)
        k_place = None
        q_positions = None
        if MODIFIED:
            q_place, k_place = load_places(places_ptr, segment)
            q_positions = (q_place + place_stride * rows)[:, None]
        for start in range(full_begin, full_end, BLOCK_K):
            dq, dslope = query_step(
                dq, q, dout, pivot, weight, delta, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs,
                start, end, None, None, scale, q_positions, k_place, place_stride, steps, sums_ptr,
                HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, False, WEIGHTED, PRECISION, MODIFIED, EDGES,
            )  # fmt: skip
            if MODIFIED:
                dslopes += dslope
        first, last = live_columns(rows, end, lo, hi, row_begin, row_end)
        for edge in range(edge_count(begin, full_begin, full_end, end, BLOCK_K)):
            start = edge_start(edge, begin, full_begin, full_end, BLOCK_K)
            dq, dslope = query_step(
                dq, q, dout, pivot, weight, delta, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs,
                start, end, first, last, scale, q_positions, k_place, place_stride, steps, sums_ptr,
                HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, True, WEIGHTED, PRECISION, MODIFIED, EDGES,
            )  # fmt: skip
            if MODIFIED:
                dslopes += dslope

    columns = tl.arange(0, BLOCK_D)[None, :]
    dq_ptrs = dq_ptr + (rows.to(tl.int64)[:, None] * stride_dqs + columns)
    mask = row_mask[:, None] & (columns < HEAD_DIM)
    store_gradient(dq_ptrs, dq * softmax_scale, mask, ADD)
    if dslopes_ptr is not None:
        tl.store(dslopes_ptr + program, tl.sum(dslopes, 0))
