"""The kernels of attention to keys in pages, in plain Triton; `paged` launches them.

A **tile** is BLOCK_K keys of a page. A **segment** is all tiles of one sequence that a block of query rows of one K/V head sees. The rows
of a block are those of all query heads of the K/V head and of all query tokens: each key is loaded once for all of them. The tiles of all
segments, one segment after another, are dealt to the programs in equal runs. A program leaves a partial for each segment of its run, and
`merge_pages_kernel` merges a row's partials in the order of the programs (the formula is in `splits`). Both kernels find their work from
the sequences' lengths on the device, in a grid of fixed size: a CUDA graph of them holds for growing sequences.

Shapes: as in `paged`.
"""

import triton
import triton.language as tl

from .bands import edge_count, edge_start
from .plain_forward import attend_block, attend_modified
from .score_steps import Steps
from .units import to_base2, to_natural

COUNTS = ("sequences", "tokens", "group", "kv_heads", "row_blocks", "window", "slots", "ranks")  # arguments of both kernels


@triton.jit
def tiles_of(length, first, ranks, tokens, window, PAGE: tl.constexpr, BLOCK_K: tl.constexpr):
    """(first column with a live key, number of tiles from there on) of sequences of these lengths."""
    end = tl.cdiv(tl.maximum(tl.cdiv(length, PAGE) - first, 0), ranks)
    begin = tl.cdiv(tl.maximum(tl.maximum(length - tokens - window, 0) // PAGE - first, 0), ranks)
    return begin, tl.maximum(end - begin, 0) * (PAGE // BLOCK_K)


@triton.jit
def all_tiles(
    lengths_ptr, first_ptr, sequences, ranks, tokens, window, PAGE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr
):
    """[BLOCK_B]: the tiles of a segment of each sequence."""
    index = tl.arange(0, BLOCK_B)
    length = tl.load(lengths_ptr + index, mask=index < sequences, other=0).to(tl.int32)
    first = tl.load(first_ptr + index, mask=index < sequences, other=0).to(tl.int32)
    return tiles_of(length, first, ranks, tokens, window, PAGE, BLOCK_K)[1]


@triton.jit
def segment_of(tile, tiles, each):
    """(number of the segment that holds a tile, first tile of this segment), where a sequence has `each` segments of `tiles` tiles."""
    index = tl.arange(0, tiles.shape[0])
    sequence = tl.sum((tl.cumsum(tiles, 0) * each <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(index < sequence, tiles, 0), 0) * each
    # a tile past the last one is in no sequence
    own = tl.maximum(tl.sum(tl.where(index == sequence, tiles, 0), 0), 1)
    number = (tile - before) // own
    return sequence * each + number, before + number * own


@triton.jit(
    do_not_specialize=[
        "sequences",
        "tokens",
        "group",
        "kv_heads",
        "row_blocks",
        "window",
        "slots",
        "width",
        "ranks",
        "slopes_stride",
    ]
)
def paged_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, partial_ptr, slopes_ptr, pages_ptr, lengths_ptr, first_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    sequences, tokens, group, kv_heads, row_blocks, window, slots, width, ranks, slopes_stride, scale, cap,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, PAGE: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, MODIFIED: tl.constexpr,
):  # fmt: skip
    """The partials of one run of tiles; see the module. The partial of a segment has the slot `program + segment`: no two have the same."""
    program = tl.program_id(0)
    each = kv_heads * row_blocks
    tiles = all_tiles(lengths_ptr, first_ptr, sequences, ranks, tokens, window, PAGE, BLOCK_K, BLOCK_B)
    total = tl.sum(tiles, 0) * each
    share = tl.cdiv(total, tl.num_programs(0))
    run_begin = program * share
    run_end = tl.minimum(run_begin + share, total)
    segment_begin, start = segment_of(run_begin, tiles, each)
    segment_end = tl.where(run_begin < run_end, segment_of(run_end - 1, tiles, each)[0] + 1, segment_begin)

    for segment in range(segment_begin, segment_end):
        sequence = segment // each
        kv_head = segment % each // row_blocks
        length = tl.load(lengths_ptr + sequence).to(tl.int32)
        first_page = tl.load(first_ptr + sequence).to(tl.int32)
        column, count = tiles_of(length, first_page, ranks, tokens, window, PAGE, BLOCK_K)
        begin = tl.maximum(run_begin - start, 0)
        end = tl.minimum(run_end - start, count)
        start += count
        # [BLOCK_Q]: row r is the token r // group and the head r % group of those of the K/V head
        rows = segment % row_blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
        token = rows // group
        head = kv_head * group + rows % group
        row_mask = token < tokens
        position = length - tokens + token
        # [BLOCK_Q, BLOCK_D]
        columns = tl.arange(0, BLOCK_D)
        offsets = sequence.to(tl.int64) * stride_qb + token.to(tl.int64) * stride_qs + head.to(tl.int64) * stride_qh
        q = tl.load(q_ptr + offsets[:, None] + columns[None, :], mask=row_mask[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
        if MODIFIED:
            slope = None
            if slopes_ptr is not None:
                slope = tl.load(slopes_ptr + sequence.to(tl.int64) * slopes_stride + head, mask=row_mask, other=0.0)[:, None]
            steps = Steps(cap, slope, None, None, None, None, None)
        row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)

        # tiles that all rows see whole: those of pages that end at or before the first query, and begin in the last query's window
        seen = tl.cdiv(tl.maximum((length - tokens + 1) // PAGE - first_page, 0), ranks) - column
        hidden = tl.cdiv(tl.maximum(tl.cdiv(tl.maximum(length - 1 - window, 0), PAGE) - first_page, 0), ranks) - column
        full_begin = tl.minimum(tl.maximum(hidden * (PAGE // BLOCK_K), begin), end)
        full_end = tl.maximum(tl.minimum(seen * (PAGE // BLOCK_K), end), full_begin)
        pages = pages_ptr + sequence.to(tl.int64) * width + column
        # the number of the next page is loaded a step ahead, so that the loads of its keys can be queued early
        following = tl.load(pages + full_begin // (PAGE // BLOCK_K), mask=full_begin < full_end, other=0)
        for tile in range(full_begin, full_end):
            page = following
            following = tl.load(pages + tl.minimum(tile + 1, full_end - 1) // (PAGE // BLOCK_K))
            at = tile % (PAGE // BLOCK_K) * BLOCK_K
            k_page = k_ptr + page.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
            v_page = v_ptr + page.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
            if MODIFIED:
                place = (first_page + (column + tile // (PAGE // BLOCK_K)) * ranks) * PAGE
                acc, row_max, row_sum = attend_modified(
                    acc, row_max, row_sum, q, k_desc, v_desc, k_page, v_page, page, kv_head, stride_ks, stride_vs, at, PAGE, None, None,
                    scale, position[:, None], place, 1, steps, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, False, PRECISION, 1,
                )  # fmt: skip
            else:
                acc, row_max, row_sum = attend_block(
                    acc, row_max, row_sum, q, k_desc, v_desc, k_page, v_page, page, kv_head, stride_ks, stride_vs, at, PAGE, None, None,
                    scale, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, False, True, PRECISION,
                )  # fmt: skip
        for edge in range(edge_count(begin, full_begin, full_end, end, 1)):
            tile = edge_start(edge, begin, full_begin, full_end, 1)
            page = tl.load(pages + tile // (PAGE // BLOCK_K))
            at = tile % (PAGE // BLOCK_K) * BLOCK_K
            k_page = k_ptr + page.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
            v_page = v_ptr + page.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
            # in rows of the page; what lies past the sequence's end is not read: it may hold anything
            place = (first_page + (column + tile // (PAGE // BLOCK_K)) * ranks) * PAGE
            first = position - window - place
            last = tl.where(row_mask, position - place, -1)
            if MODIFIED:
                acc, row_max, row_sum = attend_modified(
                    acc, row_max, row_sum, q, k_desc, v_desc, k_page, v_page, page, kv_head, stride_ks, stride_vs, at, length - place,
                    first, last, scale, position[:, None], place, 1, steps, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, True, PRECISION,
                    1,
                )  # fmt: skip
            else:
                acc, row_max, row_sum = attend_block(
                    acc, row_max, row_sum, q, k_desc, v_desc, k_page, v_page, page, kv_head, stride_ks, stride_vs, at, length - place,
                    first, last, scale, HEAD_DIM, V_DIM, BLOCK_D, BLOCK_DV, BLOCK_K, True, True, PRECISION,
                )  # fmt: skip

        out = acc * tl.where(row_sum > 0, 1.0 / row_sum, 0.0)[:, None]
        row_max, row_sum = to_natural(row_max, row_sum)
        index = (program + segment).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        outs = tl.cast(slots, tl.int64) * BLOCK_Q * V_DIM
        dims = tl.arange(0, BLOCK_DV)
        tl.store(partial_ptr + index[:, None] * V_DIM + dims[None, :], out, mask=row_mask[:, None] & (dims < V_DIM)[None, :])
        tl.store(partial_ptr + outs + index, row_max, mask=row_mask)
        tl.store(partial_ptr + outs + tl.cast(slots, tl.int64) * BLOCK_Q + index, row_sum, mask=row_mask)


@triton.jit
def merge_row(
    outs_ptr, maxima_ptr, sums_ptr, outs_step, step, count, sink_ptr, out_ptr, row_max_ptr, row_sum_ptr,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Merge `count` partials of a row, and a sink if there is one, in a fixed order; see `splits` for the formula."""
    dims = tl.arange(0, BLOCK_DV)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for begin in range(0, count, TOGETHER):
        # [TOGETHER]
        index = begin + tl.arange(0, TOGETHER)
        there = index < count
        maxima, lost = to_base2(tl.load(maxima_ptr + index.to(tl.int64) * step, mask=there, other=float("-inf")))
        sums = tl.load(sums_ptr + index.to(tl.int64) * step, mask=there, other=0.0) * tl.math.exp2(lost)
        # [TOGETHER, BLOCK_DV]
        offsets = index.to(tl.int64)[:, None] * outs_step + dims[None, :]
        outs = tl.load(outs_ptr + offsets, mask=there[:, None] & (dims < V_DIM)[None, :], other=0.0)
        # [1]
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        # a row with nothing live yet has row_max = -inf: avoid inf - inf
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.math.exp2(row_max - pivot)
        weights = sums * tl.math.exp2(maxima - pivot)
        acc = acc * alpha + tl.sum(outs * weights[:, None], 0)
        row_sum = row_sum * alpha + tl.sum(weights, 0)
        row_max = new_max
    if sink_ptr is not None:
        sink, lost = to_base2(tl.load(sink_ptr + tl.arange(0, 1)))
        new_max = tl.maximum(row_max, sink)
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.math.exp2(row_max - pivot)
        acc *= alpha
        row_sum = row_sum * alpha + tl.math.exp2(sink - pivot + lost)
        row_max = new_max
    acc *= tl.where(row_sum > 0, 1.0 / row_sum, 0.0)
    row_max, row_sum = to_natural(row_max, row_sum)
    tl.store(out_ptr + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < V_DIM)
    tl.store(row_max_ptr + tl.arange(0, 1), row_max)
    tl.store(row_sum_ptr + tl.arange(0, 1), row_sum)


@triton.jit(do_not_specialize=[*COUNTS, "programs"])
def merge_pages_kernel(
    partial_ptr, out_ptr, row_max_ptr, row_sum_ptr, sinks_ptr, lengths_ptr, first_ptr,
    sequences, tokens, group, kv_heads, row_blocks, window, slots, ranks, programs,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """out, row_max and row_sum of one head of one token, from what `paged_kernel` left."""
    heads = kv_heads * group
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads % tokens
    sequence = tl.program_id(0) // heads // tokens
    row = token * group + head % group
    each = kv_heads * row_blocks
    number = head // group * row_blocks + row // BLOCK_Q
    tiles = all_tiles(lengths_ptr, first_ptr, sequences, ranks, tokens, window, PAGE, BLOCK_K, BLOCK_B)
    index = tl.arange(0, BLOCK_B)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0) * each, programs), 1)
    own = tl.sum(tl.where(index == sequence, tiles, 0), 0)
    start = tl.sum(tl.where(index < sequence, tiles, 0), 0) * each + number * own
    # programs whose runs meet the segment
    first = start // share
    count = tl.where(own > 0, (start + own - 1) // share - first + 1, 0)
    at = (first + sequence * each + number).to(tl.int64) * BLOCK_Q + row % BLOCK_Q
    outs = tl.cast(slots, tl.int64) * BLOCK_Q * V_DIM
    statistics = (sequence.to(tl.int64) * heads + head) * tokens + token
    merge_row(
        partial_ptr + at * V_DIM, partial_ptr + outs + at, partial_ptr + outs + tl.cast(slots, tl.int64) * BLOCK_Q + at, BLOCK_Q * V_DIM,
        BLOCK_Q, count, sinks_ptr + head if sinks_ptr is not None else None, out_ptr + tl.program_id(0).to(tl.int64) * V_DIM,
        row_max_ptr + statistics, row_sum_ptr + statistics, V_DIM, BLOCK_DV, TOGETHER,
    )  # fmt: skip


@triton.jit(do_not_specialize=["ranks", "tokens", "heads"])
def merge_ranks_kernel(
    packed_ptr, out_ptr, row_max_ptr, row_sum_ptr, sinks_ptr, ranks, tokens, heads,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """out, row_max and row_sum of one head of one token, from the partials of all ranks."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads % tokens
    count = tl.num_programs(0).to(tl.int64)
    statistics = (row // heads // tokens * heads + head) * tokens + token
    maxima = packed_ptr + count * V_DIM + statistics
    merge_row(
        packed_ptr + row * V_DIM, maxima, maxima + count, count * (V_DIM + 2), count * (V_DIM + 2), ranks,
        sinks_ptr + head if sinks_ptr is not None else None, out_ptr + row * V_DIM, row_max_ptr + statistics, row_sum_ptr + statistics,
        V_DIM, BLOCK_DV, TOGETHER,
    )  # fmt: skip
