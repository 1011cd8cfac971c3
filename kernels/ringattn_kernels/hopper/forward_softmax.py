"""The online softmax of one warpgroup of the Hopper forward: masks, exponentials, and weights packed in pairs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .panels import split_columns
from .tables import HI, LO, ROW_BEGIN, ROW_END
from .threads import FIRST_COLUMN

# a row is rescaled when its maximum is more than LAG base-2 units above its pivot: weights stay within 2^LAG
LAG = gl.constexpr(8.0)

# the pivot of a row with no live pair yet: of -inf, -inf would be subtracted. Every score is at least as great
LOWEST = gl.constexpr(-3.4028234663852886e38)


@gluon.jit
def pack(even, odd, dtype: gl.constexpr):
    """Two fp32 numbers rounded to 16 bits each, in one int32: from step to step they take one register and no permutation."""
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(convert, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def in_place(count, others, own="f"):
    """Constraints of inline assembly that changes `count` registers of a kind and reads `count` of each kind in `others`."""
    return ",".join(["=" + own] * count + [str(i) for i in range(count)] + [kind for kind in others for _ in range(count)])


@gluon.jit
def unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """[rows, columns] of `dtype` from [rows, columns / 2] pairs, as a left operand."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    both = gl.join(even, odd).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(both.to(dtype, bitcast=True), layout, assert_trivial=True)


@gluon.constexpr_function
def mask_assembly(count, up_to):
    """-inf for scores past the last column of their row or, if not `up_to`, up to that column. A thread holds two columns of two rows, then
    again from 8 columns on. A bit says for each column of a row whether it is live; those of one row become predicates seven at a time."""
    lines = ["{ .reg .pred p; .reg .b32 t, n, live<2>;", FIRST_COLUMN]
    for row in range(2):
        # how many of the thread's columns there are until the last: of those at 0, 8, 16 and so on, and of those one further
        lines.append(
            f"sub.s32 live{row}, ${2 * count + 2 * row}, t; add.s32 n, live{row}, 7; shr.s32 n, n, 3; add.s32 live{row}, live{row}, 8;"
        )
        lines.append(f"shr.s32 live{row}, live{row}, 3; add.s32 live{row}, live{row}, n; max.s32 live{row}, live{row}, 0;")
        lines.append(f"shl.b32 live{row}, 1, live{row}; sub.s32 live{row}, {f'live{row}, 1' if up_to else f'0, live{row}'};")
    for i in sorted(range(count), key=lambda i: i // 2 % 2):
        row, bit = i // 2 % 2, 1 << (i % 2 + i // 4 * 2)
        lines.append(f"and.b32 t, live{row}, {bit:#x}; setp.ne.u32 p, t, 0; selp.f32 ${i}, ${i}, 0fFF800000, p;")
    return " ".join([*lines, "}"])


@gluon.jit
def mask_columns(scores, last, UP_TO: gl.constexpr):
    """-inf for scores past column `last` [rows] or, if not UP_TO, up to it."""
    COUNT: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    ASM: gl.constexpr = mask_assembly(COUNT, UP_TO)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "r")
    last = gl.expand_dims(last, 1).broadcast_to(scores.shape)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [scores, last], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def mask_edge(scores, start, end, segments_ptr, segment, first_row):
    """-inf for pairs of an edge block that are not live."""
    ROWS: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    ptr = segments_ptr + segment * 8
    # rows and columns relative to the block's first ones
    shift = first_row - start
    begin, stop = shift - gl.load(ptr + HI), shift - gl.load(ptr + LO)
    row_begin, row_end = gl.load(ptr + ROW_BEGIN) - first_row, gl.load(ptr + ROW_END) - first_row
    stop_all = end - 1 - start
    rows = gl.arange(0, scores.shape[0], ROWS)
    # an edge of the query block need not be one of this warpgroup's rows
    if (gl.minimum(stop, stop_all) < scores.shape[1] - 1) | (row_begin > 0) | (row_end < scores.shape[0]):
        last = gl.minimum(rows + stop, stop_all)
        last = gl.where((rows >= row_begin) & (rows < row_end), last, -1)
        scores = mask_columns(scores, last, True)
    if begin + scores.shape[0] > 1:
        scores = mask_columns(scores, rows + (begin - 1), False)
    return scores


@gluon.jit
def as_column(x, layout: gl.constexpr):
    """[rows] as [rows, 1] of a matrix in `layout`, whose rows the same threads hold."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def softmax_step(scores, pivot, row_sum, row_max, scale, dtype: gl.constexpr):
    """(p as packed pairs, alpha, pivot, row_sum, row_max) after a block of raw scores.

    pivot and row_max are in base-2 units: scores * scale is the exponent. The pivot follows the maximum only once the maximum is LAG
    above it, so that alpha is 1 in nearly all steps. row_sum [rows, 4], relative to the pivot, holds the sum of each of the four threads
    that share a row.
    """
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    block_max = gl.max(scores, axis=1) * scale
    row_max = gl.maximum(row_max, block_max)
    new_pivot = gl.where(block_max > pivot + LAG, block_max, pivot)
    p = gl.exp2(scores * scale - gl.expand_dims(new_pivot, 1))
    alpha = gl.exp2(pivot - new_pivot)
    even, odd = gl.split(p.reshape([ROWS, COLUMNS // 2, 2]))
    part = gl.convert_layout(
        gl.sum((even + odd).reshape([ROWS, COLUMNS // 8, 4]), axis=1), row_sum.type.layout, assert_trivial=True
    )
    SUMS: gl.constexpr = row_sum.type.layout
    row_sum = row_sum * as_column(alpha, SUMS) + part
    return pack(even, odd, dtype), alpha, new_pivot, row_sum, row_max


@gluon.jit
def softmax_step_ahead(scores, pivot, row_sum, row_max, scale, dtype: gl.constexpr):
    """As `softmax_step`, and the same bits, but exponentials do not wait for the maximum, which takes a chain of instructions as long.

    The pivot moves in few steps. So the left half of the columns is computed with the pivot that there is, and once more if it has moved.
    What both do is written twice: in a shared function, the compiler would order the other one's instructions anew.
    """
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    SUMS: gl.constexpr = row_sum.type.layout
    left, right = split_columns(scores)
    even, odd = weights(left, pivot, scale)
    left_sums, left_pairs = even + odd, pack(even, odd, dtype)
    block_max = maxima(scores) * scale
    row_max = gl.maximum(row_max, block_max)
    new_pivot = gl.where(block_max > pivot + LAG, block_max, pivot)
    alpha = gl.exp2(pivot - new_pivot)
    left_pairs, left_sums = renew(left_pairs, left_sums, left, pivot, new_pivot, scale, dtype)
    even, odd = weights(right, new_pivot, scale)
    right_sums, right_pairs = even + odd, pack(even, odd, dtype)
    # in the layout that `softmax_step` gives them
    like, _ = gl.split(scores.reshape([ROWS, COLUMNS // 2, 2]))
    PAIRS: gl.constexpr = like.type.layout
    pairs = side_by_side(left_pairs, right_pairs, PAIRS)
    sums = side_by_side(left_sums, right_sums, PAIRS)
    part = gl.convert_layout(gl.sum(sums.reshape([ROWS, COLUMNS // 8, 4]), axis=1), SUMS, assert_trivial=True)
    row_sum = row_sum * as_column(alpha, SUMS) + part
    return pairs, alpha, new_pivot, row_sum, row_max


@gluon.jit
def weights(scores, pivot, scale):
    """2^(scores * scale - pivot [rows]), those of even and those of odd columns."""
    ROWS: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    p = gl.exp2(scores * scale - gl.expand_dims(gl.convert_layout(pivot, ROWS, assert_trivial=True), 1))
    return gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))


@gluon.jit
def maxima(scores):
    """The maximum of each row, of pairs of pairs first: the chain is a quarter as long."""
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    even, odd = gl.split(scores.reshape([ROWS, COLUMNS // 2, 2]))
    # four threads share a row, each with every fourth pair
    even, odd = gl.split(gl.maximum(even, odd).reshape([ROWS, COLUMNS // 16, 2, 4]).permute((0, 1, 3, 2)))
    found = gl.max(gl.maximum(even, odd).reshape([ROWS, COLUMNS // 4]), axis=1)
    return gl.convert_layout(found, gl.SliceLayout(1, scores.type.layout), assert_trivial=True)


@gluon.jit
def side_by_side(left, right, LAYOUT: gl.constexpr):
    """The columns of both."""
    both = gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def renewal_assembly(count, dtype):
    """Weights of `count` pairs of scores, packed, and their sums, once more, in warps where a pivot has moved. A thread has pairs of two
    rows by turns. Operands: pairs and sums, twice, then scores of even and of odd columns, pivots before and now, and the scale."""
    convert = "cvt.rn.bf16x2.f32" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32"
    pair, total, _, _, even, odd, before, now, scale = ([f"${kind * count + i}" for i in range(count)] for kind in range(9))
    lines = ["{ .reg .pred p; .reg .f32 a, b, n<2>;"]
    lines.append(f"setp.neu.f32 p, {before[0]}, {now[0]}; setp.neu.or.f32 p, {before[1]}, {now[1]}, p;")
    lines.append(f"vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; neg.f32 n0, {now[0]}; neg.f32 n1, {now[1]};")
    for i in range(count):
        lines.append(f"fma.rn.f32 a, {even[i]}, {scale[i]}, n{i % 2}; fma.rn.f32 b, {odd[i]}, {scale[i]}, n{i % 2};")
        lines.append(f"ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; {convert} {pair[i]}, b, a; add.f32 {total[i]}, a, b;")
    return " ".join([*lines, "DONE: }"])


@gluon.constexpr_function
def renewal_constraints(count):
    """Of those operands: pairs and sums are given in the registers that they leave in."""
    return ",".join(["=r"] * count + ["=f"] * count + [str(i) for i in range(2 * count)] + ["f"] * (5 * count))


@gluon.jit
def renew(pairs, sums, scores, before, now, scale, dtype: gl.constexpr):
    """Weights as packed pairs, and the sums of pairs, of raw scores, found by the pivots [rows] before: by those of now."""
    PAIRS: gl.constexpr = pairs.type.layout
    COUNT: gl.constexpr = pairs.shape[0] * pairs.shape[1] // 128
    ASM: gl.constexpr = renewal_assembly(COUNT, dtype)
    CONSTRAINTS: gl.constexpr = renewal_constraints(COUNT)
    even, odd = gl.split(scores.reshape([pairs.shape[0], pairs.shape[1], 2]))
    before, now = as_column(before, PAIRS).broadcast_to(pairs.shape), as_column(now, PAIRS).broadcast_to(pairs.shape)
    given = [pairs, sums, even, odd, before, now, gl.full(pairs.shape, scale, gl.float32, PAIRS)]
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, given, dtype=(gl.int32, gl.float32), is_pure=False, pack=COUNT)


@gluon.constexpr_function
def rescale_assembly(count):
    """Multiply `count` registers by as many factors, in warps where one of these is not 1. A thread holds two columns of a row, two of
    another, and so on: only the factors 0 and 2 differ."""
    rows = f"setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return "{ .reg .pred p; " + rows + " vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; " + products + " DONE: }"


@gluon.jit
def rescale(acc, alpha):
    """acc * alpha [rows]; warps whose rows all have alpha 1 skip it."""
    OUT: gl.constexpr = acc.type.layout
    COUNT: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    ASM: gl.constexpr = rescale_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "f")
    alpha = as_column(alpha, OUT).broadcast_to(acc.shape)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, alpha], dtype=gl.float32, is_pure=False, pack=COUNT)


@gluon.jit
def scaled(acc, factors):
    """acc * factors [rows]."""
    OUT: gl.constexpr = acc.type.layout
    return acc * as_column(factors, OUT)


@gluon.jit
def divided(acc, total, dtype: gl.constexpr):
    """acc / total [rows] in dtype, 0 where total is 0."""
    OUT: gl.constexpr = acc.type.layout
    # selected, not multiplied by 0: values of pairs that are not live may be anything. A sum that is NaN stays NaN
    return gl.where(as_column(total, OUT) == 0, 0.0, scaled(acc, 1.0 / total)).to(dtype)
