"""The forward in plain Triton: one program owns a block of query rows of one head and walks its segments.

    out = sum_j exp(s_ij - row_max_i) v_j / row_sum_i,   s_ij = softmax_scale * q_i . k_j

by the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).

Shapes: q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), out (b, sq, h, dv), row_max and row_sum (b, h, sq).
"""

import triton
import triton.language as tl

from . import launches
from .bands import edge_count, edge_start, live_columns, load_block, load_rows, load_segment
from .config import BlockConfig, architecture, described, descriptor, padded, precision
from .modifiers import Modifiers
from .score_arguments import NOT_SPECIALIZED, facts_of, moving_score_arguments, score_arguments
from .score_steps import Steps, exponents, kept_share, load_places, stream_of
from .sinks import with_sink
from .table import TileTable
from .units import LOG2_E, to_base2, to_natural


def launch(
    q,
    k,
    v,
    table: TileTable,
    out,
    row_max,
    row_sum,
    softmax_scale: float,
    state,
    touched_only: bool,
    splits: int,
    config: BlockConfig,
    modifiers: Modifiers | None = None,
    sinks=None,
) -> None:
    """Launch the kernel over tensors that `attention.forward` made."""
    arch = architecture(q.device)
    moving = _moving(q, k, v, out, row_max, row_sum, softmax_scale, state, modifiers, sinks) | described(arch, k_desc=k, v_desc=v)

    def make() -> tuple[int, dict]:
        blocks = table.query_blocks(config.block, config.step, q.device, splits)
        count = blocks.touched if touched_only else len(blocks)
        return q.shape[0] * q.shape[2] * count, forward_arguments(
            q, k, v, table, out, row_max, row_sum, blocks, count, softmax_scale, state, config, arch, modifiers, sinks
        )

    facts = state is None, touched_only, splits, config, softmax_scale <= 0, *facts_of(modifiers)
    launches.launch(forward_kernel, table, facts, moving, make, **config.options)


def _moving(q, k, v, out, row_max, row_sum, softmax_scale: float, state, modifiers: Modifiers | None, sinks) -> dict:
    """Of `forward_arguments`, those that may differ between launches of a kind, but for descriptors."""
    rows = launches.results(out, row_max, row_sum, state, sinks)
    return dict(q_ptr=q, k_ptr=k, v_ptr=v, scale=softmax_scale * LOG2_E.value) | rows | moving_score_arguments(modifiers)


def forward_arguments(
    q,
    k,
    v,
    table,
    out,
    row_max,
    row_sum,
    blocks,
    count,
    softmax_scale,
    state,
    config: BlockConfig,
    arch: str,
    modifiers: Modifiers | None = None,
    sinks=None,
) -> dict:
    """Keyword arguments of one launch of `forward_kernel`."""
    _, sq, h, d = q.shape
    hk, dv = v.shape[2:]
    assert q.dtype == k.dtype == v.dtype and q.stride(3) == k.stride(3) == v.stride(3) == 1
    assert (sq, k.shape[1], v.shape[1]) == (table.q_rows, table.k_rows, table.k_rows) and h % hk == 0 and k.shape[2:] == (hk, d)
    return _moving(q, k, v, out, row_max, row_sum, softmax_scale, state, modifiers, sinks) | dict(
        k_desc=descriptor(k, config.step // config.parts, arch),
        v_desc=descriptor(v, config.step // config.parts, arch),
        items_ptr=blocks.items,
        segments_ptr=blocks.segments,
        **launches.strides(q=q, k=k, v=v),
        item_count=count,
        heads=h,
        group=h // hk,
        q_rows=sq,
        HEAD_DIM=d,
        V_DIM=dv,
        BLOCK_D=padded(d),
        BLOCK_DV=padded(dv),
        BLOCK_Q=config.block,
        BLOCK_K=config.step // config.parts,
        PARTS=config.parts,
        HAS_STATE=state is not None,
        # the maximum of raw products is that of the scores only if the scale is positive
        SCALE_FIRST=softmax_scale <= 0,
        PRECISION=precision(q.dtype, arch, max(d, dv)),
        **score_arguments(modifiers, blocks, table, q.device),
    )


@triton.jit
def softmax_step(scores, row_max, row_sum, start, first, last, scale, MASKED: tl.constexpr, SCALE_FIRST: tl.constexpr):
    """(p, alpha, row_max, row_sum) after one block of raw scores. row_max is in base-2 units: scores * scale is the exponent."""
    if SCALE_FIRST:
        scores = scores * scale
        factor = 1.0
    else:
        factor = scale
    if MASKED:
        columns = start + tl.arange(0, scores.shape[1])
        live = (columns[None, :] >= first[:, None]) & (columns[None, :] <= last[:, None])
        scores = tl.where(live, scores, float("-inf"))
    # [BLOCK_Q]
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    pivot = new_max
    if MASKED:
        # a row with no live pair yet has row_max = -inf: avoid inf - inf
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    # [BLOCK_Q, BLOCK_K]: one fused multiply-add and one exp2 for each pair
    p = tl.math.exp2(scores * factor - pivot[:, None])
    alpha = tl.math.exp2(row_max - pivot)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit
def attend_block(
    acc, row_max, row_sum, q, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs, start, end, first, last,
    scale, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr, SCALE_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over BLOCK_K keys."""
    # [BLOCK_K, BLOCK_D]
    k = load_block(k_desc, k_ptr, batch, kv_head, start, stride_ks, end, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
    # [BLOCK_Q, BLOCK_K]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, start, first, last, scale, MASKED, SCALE_FIRST)
    # [BLOCK_K, BLOCK_DV]
    v = load_block(v_desc, v_ptr, batch, kv_head, start, stride_vs, end, BLOCK_K, V_DIM, BLOCK_DV, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def attend_modified(
    acc, row_max, row_sum, q, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs, start, end, first, last,
    scale, q_positions, k_place, place_stride, steps, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """`attend_block` with modified scores. q_positions: [BLOCK_Q, 1]."""
    # [BLOCK_K, BLOCK_D]
    k = load_block(k_desc, k_ptr, batch, kv_head, start, stride_ks, end, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
    k_positions = (k_place + place_stride * (start + tl.arange(0, BLOCK_K)))[None, :]
    # [BLOCK_Q, BLOCK_K]
    raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores, _ = exponents(raw, q_positions, k_positions, scale, steps, EDGES)
    p, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, start, first, last, 1.0, MASKED, False)
    if steps.stream is not None:
        p *= kept_share(q_positions, k_positions, steps)
    # [BLOCK_K, BLOCK_DV]
    v = load_block(v_desc, v_ptr, batch, kv_head, start, stride_vs, end, BLOCK_K, V_DIM, BLOCK_DV, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def attend_pair(
    acc, row_max, row_sum, q, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs, start, end, first, last,
    scale, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr, SCALE_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two steps over BLOCK_K keys each, whose matrix products run while the other's softmax is computed."""
    # [BLOCK_K, BLOCK_D]
    k0 = load_block(k_desc, k_ptr, batch, kv_head, start, stride_ks, end, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
    k1 = load_block(k_desc, k_ptr, batch, kv_head, start + BLOCK_K, stride_ks, end, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
    # [BLOCK_K, BLOCK_DV]
    v0 = load_block(v_desc, v_ptr, batch, kv_head, start, stride_vs, end, BLOCK_K, V_DIM, BLOCK_DV, MASKED)
    v1 = load_block(v_desc, v_ptr, batch, kv_head, start + BLOCK_K, stride_vs, end, BLOCK_K, V_DIM, BLOCK_DV, MASKED)
    # [BLOCK_Q, BLOCK_K]
    scores0 = tl.dot(q, tl.trans(k0), input_precision=PRECISION)
    scores1 = tl.dot(q, tl.trans(k1), input_precision=PRECISION)
    p, alpha, row_max, row_sum = softmax_step(scores0, row_max, row_sum, start, first, last, scale, MASKED, SCALE_FIRST)
    acc = tl.dot(p.to(v0.dtype), v0, acc * alpha[:, None], input_precision=PRECISION)
    start += BLOCK_K
    p, alpha, row_max, row_sum = softmax_step(scores1, row_max, row_sum, start, first, last, scale, MASKED, SCALE_FIRST)
    acc = tl.dot(p.to(v1.dtype), v1, acc * alpha[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["item_count", "heads", "group", "q_rows", *NOT_SPECIALIZED])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, state_ptr, row_max_ptr, row_sum_ptr, sinks_ptr, items_ptr, segments_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    item_count, heads, group, q_rows, scale,
    places_ptr, place_stride, cap, slopes_ptr, slopes_stride, edges_ptr, values_ptr, seed_low, seed_high, offset, all_heads, first_head,
    dropped, whole,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, HAS_STATE: tl.constexpr,
    SCALE_FIRST: tl.constexpr, PRECISION: tl.constexpr, MODIFIED: tl.constexpr, EDGES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """out, row_max, row_sum of one block of query rows of one head; see the module's formula."""
    # all blocks of a head follow one another, so that its keys and values stay in the L2
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

    rows = block_begin + tl.arange(0, BLOCK_Q)
    row_mask = rows < q_rows
    # [BLOCK_Q, BLOCK_DV]: out and the state are contiguous, and partials of splits are those of further batches
    out_batch = (split * (tl.num_programs(0) // (item_count * heads)) + batch).to(tl.int64)
    statistics = (out_batch * heads + head) * q_rows + rows
    columns = tl.arange(0, BLOCK_DV)
    out_offsets = ((out_batch * q_rows + rows) * heads + head)[:, None] * V_DIM + columns[None, :]
    out_mask = row_mask[:, None] & (columns < V_DIM)[None, :]

    # [BLOCK_Q, BLOCK_D]
    q = load_rows(q_ptr, block_begin, stride_qs, q_rows, BLOCK_Q, HEAD_DIM, BLOCK_D, True)
    if HAS_STATE:
        row_max, rest = to_base2(tl.load(row_max_ptr + statistics, mask=row_mask, other=float("-inf")))
        row_sum = tl.load(row_sum_ptr + statistics, mask=row_mask, other=0.0) * tl.math.exp2(rest)
        acc = tl.load(state_ptr + out_offsets, mask=out_mask, other=0.0) * row_sum[:, None]
    else:
        row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)

    if MODIFIED:
        # None where there is none; a function cannot return it
        slope = tl.load(slopes_ptr + batch * slopes_stride + head) if slopes_ptr is not None else None
        head_values = values_ptr + head * PIECES if values_ptr is not None else None
        stream = stream_of(seed_low, seed_high, offset, batch * all_heads + first_head + head) if seed_low is not None else None
        steps = Steps(cap, slope, edges_ptr, head_values, stream, dropped, whole)
    for segment in range(segment_begin, segment_end):
        begin, full_begin, full_end, end, lo, hi, row_begin, row_end = load_segment(segments_ptr, segment)
        if MODIFIED:
            q_place, k_place = load_places(places_ptr, segment)
            q_positions = (q_place + place_stride * rows)[:, None]
        for start in range(full_begin, full_end, BLOCK_K * PARTS):
            if MODIFIED:
                for part in range(PARTS):
                    acc, row_max, row_sum = attend_modified(
                        acc, row_max, row_sum, q, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs,
                        start + part * BLOCK_K, end, None, None, scale, q_positions, k_place, place_stride, steps, HEAD_DIM, V_DIM,
                        BLOCK_D, BLOCK_DV, BLOCK_K, False, PRECISION, EDGES,
                    )  # fmt: skip
            elif PARTS == 2:
                acc, row_max, row_sum = attend_pair(
                    acc, row_max, row_sum, q, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs, start, end, None,
                    None, scale, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, False, SCALE_FIRST, PRECISION,
                )  # fmt: skip
            else:
                acc, row_max, row_sum = attend_block(
                    acc, row_max, row_sum, q, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs, start, end, None,
                    None, scale, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, False, SCALE_FIRST, PRECISION,
                )  # fmt: skip
        first, last = live_columns(rows, end, lo, hi, row_begin, row_end)
        for edge in range(edge_count(begin, full_begin, full_end, end, BLOCK_K)):
            start = edge_start(edge, begin, full_begin, full_end, BLOCK_K)
            if MODIFIED:
                acc, row_max, row_sum = attend_modified(
                    acc, row_max, row_sum, q, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs, start, end, first,
                    last, scale, q_positions, k_place, place_stride, steps, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, True,
                    PRECISION, EDGES,
                )  # fmt: skip
            else:
                acc, row_max, row_sum = attend_block(
                    acc, row_max, row_sum, q, k_desc, v_desc, k_ptr, v_ptr, batch, kv_head, stride_ks, stride_vs, start, end, first,
                    last, scale, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, True, SCALE_FIRST, PRECISION,
                )  # fmt: skip

    if sinks_ptr is not None:
        row_max, row_sum, alpha = with_sink(row_max, row_sum, tl.load(sinks_ptr + head) * LOG2_E)
        acc *= alpha[:, None]
    out = acc * tl.where(row_sum > 0, 1.0 / row_sum, 0.0)[:, None]
    row_max, row_sum = to_natural(row_max, row_sum)
    tl.store(row_max_ptr + statistics, row_max, mask=row_mask)
    tl.store(row_sum_ptr + statistics, row_sum, mask=row_mask)
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=out_mask)
