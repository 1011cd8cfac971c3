"""The kernels of attention to keys in pages, in plain Triton; `paged` launches them.

A **tile** is BLOCK_K keys of a page. A **segment** is all tiles of one sequence that a block of query rows of one K/V head sees; at least
one tile, which may hold nothing live. The rows of a block are those of all query heads of the K/V head and of all query tokens: each key is
loaded once for all of them. The tiles of all segments, one segment after another, are dealt to the programs in equal runs. A program leaves
a partial for each segment of its run, and `merge_pages_kernel` merges a row's partials in the order of the programs (the formula is in
`splits`). Both kernels find their work from the sequences' lengths on the device, in a grid of fixed size: a CUDA graph of them holds for
growing sequences.

AHEAD: the kernel is launched while the one before it runs (programmatic dependent launch), and waits for its end. `paged_kernel` lets the
next kernel start only once it has waited itself. So all that it reads is there when the merge starts, which may look for its work before
it waits. Nothing but the partials, which only the merge reads, is written in between.

Shapes: as in `paged`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .page_table import NO_WINDOW
from .score_steps import Steps, exponents
from .units import to_base2, to_natural

_NO_WINDOW = tl.constexpr(NO_WINDOW)


@triton.jit
def tiles_of(length, first, ranks, tokens, window, PAGE: tl.constexpr, BLOCK_K: tl.constexpr):
    """(first column with a live key, number of tiles from there on, at least those of a page) of sequences of these lengths."""
    end = tl.cdiv(tl.maximum(tl.cdiv(length, PAGE) - first, 0), ranks)
    begin = tl.cdiv(tl.maximum(tl.maximum(length - tokens - window, 0) // PAGE - first, 0), ranks)
    return begin, tl.maximum(end - begin, 1) * (PAGE // BLOCK_K)


@triton.jit
def all_tiles(
    lengths_ptr, first_ptr, sequences, ranks, tokens, window, PAGE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr
):
    """[BLOCK_B]: the tiles of a segment of each sequence."""
    index = tl.arange(0, BLOCK_B)
    # past the caches of a multiprocessor, which may hold what was there before the kernel before
    length = tl.load(lengths_ptr + index, mask=index < sequences, other=0, cache_modifier=".cg").to(tl.int32)
    first = tl.load(first_ptr + index, mask=index < sequences, other=0, cache_modifier=".cg").to(tl.int32)
    return tl.where(index < sequences, tiles_of(length, first, ranks, tokens, window, PAGE, BLOCK_K)[1], 0)


@triton.jit
def segment_of(tile, tiles, each):
    """(number of the segment that holds a tile, first tile of this segment), where a sequence has `each` segments of `tiles` tiles."""
    # [BLOCK_B]: the tile behind the last one of each sequence
    ends = tl.cumsum(tiles, 0) * each
    passed = ends <= tile
    sequence = tl.sum(passed.to(tl.int32), 0)
    before = tl.max(tl.where(passed, ends, 0), 0)
    # a tile past the last one is in no sequence
    own = tl.maximum(tl.sum(tl.where(passed | (ends - tiles * each > tile), 0, tiles), 0), 1)
    number = (tile - before) // own
    return sequence * each + number, before + number * own


@triton.jit
def attend_tile(acc, row_max, row_sum, q, k, v, keys, last, window, scale, steps, MODIFIED: tl.constexpr, PRECISION: tl.constexpr):
    """(acc, row_max, row_sum) after a tile, by a step of the online softmax.

    keys: [1, BLOCK_K], their rows. last: [BLOCK_Q, 1], that of the last key that a query row sees; it sees `window` ones before it, too.
    """
    # [BLOCK_Q, BLOCK_K]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MODIFIED:
        scores, _ = exponents(scores, last, keys, scale, steps, 1)
    else:
        scores = scores * scale
    scores = tl.where((keys >= last - window) & (keys <= last), scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # a row with no live key yet has row_max = -inf: avoid inf - inf
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores - pivot[:, None])
    alpha = tl.math.exp2(row_max - pivot)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit(do_not_specialize=["sequences", "window", "slots", "width", "slopes_stride"])
def paged_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, slopes_ptr, pages_ptr, lengths_ptr, first_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    sequences, tokens, row_blocks, window, slots, width, ranks, slopes_stride, scale, cap,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, PAGE: tl.constexpr, BLOCK_B: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, PRECISION: tl.constexpr, MODIFIED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The partials of one run of tiles; see the module. The partial of a segment has the slot `program + segment`: no two have the same.

    Partials are in base-2 units.
    """
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    each = KV_HEADS * row_blocks
    PER: tl.constexpr = PAGE // BLOCK_K
    tiles = all_tiles(lengths_ptr, first_ptr, sequences, ranks, tokens, window, PAGE, BLOCK_K, BLOCK_B)
    total = tl.sum(tiles, 0) * each
    share = tl.cdiv(total, PROGRAMS)
    run_begin = program * share
    run_end = tl.minimum(run_begin + share, total)
    segment, start = segment_of(run_begin, tiles, each)
    # the first tile that is not done yet
    todo = run_begin

    index = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)
    dims = tl.arange(0, BLOCK_DV)
    keys = tl.arange(0, BLOCK_K)
    # a page's rows of a head are contiguous: distances within a tile are numbers that the compiler knows
    rows_k = keys[:, None] * HEAD_DIM + columns[None, :]
    rows_v = keys[:, None] * V_DIM + dims[None, :]
    while todo < run_end:
        sequence = segment // each
        number = segment % each
        kv_head = number // row_blocks
        # queries are asked for first, because the loop waits for them
        # [BLOCK_Q]: row r is the token r // GROUP and the head r % GROUP of those of the K/V head
        rows = number % row_blocks * BLOCK_Q + index
        token = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        row_mask = token < tokens
        # the last key that a row sees, counted from the sequence's end; [BLOCK_Q, 1]
        reach = tl.where(row_mask, token - tokens, -_NO_WINDOW)[:, None]
        # [BLOCK_Q, BLOCK_D]
        offsets = sequence.to(tl.int64) * stride_qb + token.to(tl.int64) * stride_qs + head.to(tl.int64) * stride_qh
        q = tl.load(q_ptr + offsets[:, None] + columns[None, :], mask=row_mask[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
        length = tl.load(lengths_ptr + sequence).to(tl.int32)
        first_page = tl.load(first_ptr + sequence).to(tl.int32)
        column, count = tiles_of(length, first_page, ranks, tokens, window, PAGE, BLOCK_K)
        begin = todo - start
        end = tl.minimum(run_end - start, count)
        # a sequence without a live key may have no such column; its page is not read
        pages = pages_ptr + sequence.to(tl.int64) * width + tl.minimum(column, width - 1)
        following = tl.load(pages + begin // PER)
        row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
        slope = None
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + sequence.to(tl.int64) * slopes_stride + head, mask=row_mask, other=0.0)[:, None]
        steps = Steps(cap, slope, None, None, None, None, None)
        k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
        v_head = v_ptr + kv_head.to(tl.int64) * stride_vh

        for tile in range(begin, end):
            # the number of the next page is loaded a step ahead, so that the loads of its keys can be queued early
            page = following.to(tl.int64)
            following = tl.load(pages + tl.minimum(tile + 1, end - 1) // PER)
            at = tile % PER * BLOCK_K
            # in rows of the page; what lies past the sequence's end is not read: it may hold anything
            rest = length - (first_page + (column + tile // PER) * ranks) * PAGE
            inside = (keys < rest - at)[:, None]
            k_mask, v_mask = inside, inside
            if HEAD_DIM != BLOCK_D:
                k_mask = inside & (columns < HEAD_DIM)[None, :]
            if V_DIM != BLOCK_DV:
                v_mask = inside & (dims < V_DIM)[None, :]
            # [BLOCK_K, BLOCK_D] and [BLOCK_K, BLOCK_DV]
            k = tl.load(k_head + (page * stride_kb + at * HEAD_DIM) + rows_k, mask=k_mask, other=0.0)
            v = tl.load(v_head + (page * stride_vb + at * V_DIM) + rows_v, mask=v_mask, other=0.0)
            acc, row_max, row_sum = attend_tile(
                acc, row_max, row_sum, q, k, v, keys[None, :], rest - at + reach, window, scale, steps, MODIFIED, PRECISION
            )

        out = acc * tl.where(row_sum > 0, 1.0 / row_sum, 0.0)[:, None]
        slot = (program + segment).to(tl.int64) * BLOCK_Q + index
        outs = tl.cast(slots, tl.int64) * BLOCK_Q * V_DIM
        tl.store(partial_ptr + slot[:, None] * V_DIM + dims[None, :], out, mask=row_mask[:, None] & (dims < V_DIM)[None, :])
        tl.store(partial_ptr + outs + slot, row_max, mask=row_mask)
        tl.store(partial_ptr + outs + tl.cast(slots, tl.int64) * BLOCK_Q + slot, row_sum, mask=row_mask)
        start += count
        todo = start
        segment += 1


@triton.jit
def merge_row(
    outs_ptr, maxima_ptr, sums_ptr, outs_step, step, count, sink_ptr, out_ptr, row_max_ptr, row_sum_ptr,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, TOGETHER: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Merge `count` partials of a row, and a sink if there is one, in a fixed order; see `splits` for the formula.

    NATURAL: the partials' statistics are in natural units, not in those of base 2.
    """
    dims = tl.arange(0, BLOCK_DV)
    if sink_ptr is not None:
        sink, rest = to_base2(tl.load(sink_ptr + tl.arange(0, 1)))
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for begin in range(0, count, TOGETHER):
        # [TOGETHER]
        index = begin + tl.arange(0, TOGETHER)
        there = index < count
        # [TOGETHER, BLOCK_DV]
        offsets = index.to(tl.int64)[:, None] * outs_step + dims[None, :]
        outs = tl.load(outs_ptr + offsets, mask=there[:, None] & (dims < V_DIM)[None, :], other=0.0)
        maxima = tl.load(maxima_ptr + index.to(tl.int64) * step, mask=there, other=float("-inf"))
        sums = tl.load(sums_ptr + index.to(tl.int64) * step, mask=there, other=0.0)
        if NATURAL:
            maxima, lost = to_base2(maxima)
            sums *= tl.math.exp2(lost)
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
        new_max = tl.maximum(row_max, sink)
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.math.exp2(row_max - pivot)
        acc *= alpha
        row_sum = row_sum * alpha + tl.math.exp2(sink - pivot + rest)
        row_max = new_max
    acc *= tl.where(row_sum > 0, 1.0 / row_sum, 0.0)
    row_max, row_sum = to_natural(row_max, row_sum)
    tl.store(out_ptr + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < V_DIM)
    tl.store(row_max_ptr + tl.arange(0, 1), row_max)
    tl.store(row_sum_ptr + tl.arange(0, 1), row_sum)


@triton.jit(do_not_specialize=["sequences", "window", "slots"])
def merge_pages_kernel(
    partial_ptr, out_ptr, row_max_ptr, row_sum_ptr, sinks_ptr, lengths_ptr, first_ptr,
    sequences, tokens, row_blocks, window, slots, ranks,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, TOGETHER: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out, row_max and row_sum of one head of one token, from what `paged_kernel` left."""
    if AHEAD:
        gdc_launch_dependents()
    heads = KV_HEADS * GROUP
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads % tokens
    sequence = tl.program_id(0) // heads // tokens
    row = token * GROUP + head % GROUP
    each = KV_HEADS * row_blocks
    number = head // GROUP * row_blocks + row // BLOCK_Q
    tiles = all_tiles(lengths_ptr, first_ptr, sequences, ranks, tokens, window, PAGE, BLOCK_K, BLOCK_B)
    index = tl.arange(0, BLOCK_B)
    ends = tl.cumsum(tiles, 0) * each
    share = tl.cdiv(tl.sum(tiles, 0) * each, PROGRAMS)
    own = tl.sum(tl.where(index == sequence, tiles, 0), 0)
    start = tl.sum(tl.where(index == sequence, ends - tiles * each, 0), 0) + number * own
    # programs whose runs meet the segment
    first = start // share
    count = (start + own - 1) // share - first + 1
    at = (first + sequence * each + number).to(tl.int64) * BLOCK_Q + row % BLOCK_Q
    outs = tl.cast(slots, tl.int64) * BLOCK_Q * V_DIM
    statistics = (sequence.to(tl.int64) * heads + head) * tokens + token
    if AHEAD:
        # the kernel after this one waits for this one alone, so every program waits
        gdc_wait()
    merge_row(
        partial_ptr + at * V_DIM, partial_ptr + outs + at, partial_ptr + outs + tl.cast(slots, tl.int64) * BLOCK_Q + at, BLOCK_Q * V_DIM,
        BLOCK_Q, count, sinks_ptr + head if sinks_ptr is not None else None, out_ptr + tl.program_id(0).to(tl.int64) * V_DIM,
        row_max_ptr + statistics, row_sum_ptr + statistics, V_DIM, BLOCK_DV, TOGETHER, False,
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
        V_DIM, BLOCK_DV, TOGETHER, True,
    )  # fmt: skip
