"""Device functions of the Hopper kernels for what happens to scores; `modifiers` gives the formulas and `kept_pairs` drops weights.

Scores come and leave in units of their own: `scale` times a score that leaves is the exponent, to base 2. Blocks are [queries, keys], or
transposed. DIRECTION is 1 where columns are keys, and -1 where they are queries.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..score_steps import stream_of
from ..units import LOG2_E
from .blocks import mask_scores
from .forward_softmax import in_place
from .threads import FIRST_COLUMN

# tanh(x) / x as a polynomial of x * x up to 1 / 2, to 7e-6 of itself: a hundredth of the error of rounding a weight to 16 bits
_TANH = (0.9999928, -0.33286613, 0.12847962, -0.03702936)
_NEAR = 0.70710678
# exp(-2 x) as a power of 2
_EXPONENT = -2 * LOG2_E.value


class ScoreSteps(NamedTuple):
    """What is done to scores and weights; each is None if it is not done.

    into_cap: softmax_scale / softcap. slopes_ptr: ALiBi's, slopes_count of them, (b or 1, h). biases_ptr: (h, biases_count), of the
    distances from nearest on. Both are times per_unit in the units of scores. places_ptr and place_stride: of `table.TileTable`. From
    seed_low on: of dropout, see `kept_pairs`; kept_share: 1 - p. batches and heads: of q.
    """

    into_cap: gl.tensor
    per_unit: gl.tensor
    slopes_ptr: gl.tensor
    slopes_count: gl.tensor
    biases_ptr: gl.tensor
    biases_count: gl.tensor
    nearest: gl.tensor
    places_ptr: gl.tensor
    place_stride: gl.tensor
    seed_low: gl.tensor
    seed_high: gl.tensor
    offset: gl.tensor
    all_heads: gl.tensor
    first_head: gl.tensor
    dropped: gl.tensor
    kept_share: gl.tensor
    batches: gl.tensor
    heads: gl.tensor


class HeadSteps(NamedTuple):
    """Of one head of a batch: its slope, its biases, and the two words of its stream; 0 where nobody uses it."""

    slope: gl.tensor
    biases_ptr: gl.tensor
    stream_low: gl.tensor
    stream_high: gl.tensor


@gluon.jit
def load_head(score, head_index):
    """The `HeadSteps` of (split * b + batch) * h + head."""
    slope = 0
    biases_ptr = 0
    low = 0
    high = 0
    index = head_index % (score.batches * score.heads)
    if score.slopes_ptr is not None:
        slope = gl.load(score.slopes_ptr + index % score.slopes_count) * score.per_unit
    if score.biases_ptr is not None:
        biases_ptr = score.biases_ptr + index % score.heads * score.biases_count
    if score.dropped is not None:
        head = index // score.heads * score.all_heads + score.first_head + index % score.heads
        low, high = stream_of(score.seed_low, score.seed_high, score.offset, head)
    return HeadSteps(slope, biases_ptr, low, high)


@gluon.jit
def load_places(score, segment):
    """The positions of row 0 of q and of k in a segment; without places nobody uses them."""
    if score.places_ptr is None:
        return 0, 0
    else:
        return gl.load(score.places_ptr + segment * 2), gl.load(score.places_ptr + segment * 2 + 1)


@gluon.jit
def position(score, place, row):
    """That of a row, from the place of row 0."""
    if score.places_ptr is None:
        return 0
    else:
        return place + score.place_stride * row


@gluon.constexpr_function
def softcap_assembly(count):
    """tanh of `count` registers times a factor, by the polynomial; by exp in warps where some product is beyond it.

    Four at a time, so that no instruction waits for the one before it.
    """
    factor = f"${2 * count}"
    lines = ["{ .reg .pred p; .reg .f32 m<4>, u<4>, y<4>, c<4>, a;"]
    lines.extend(f"abs.f32 m{i}, ${i};" for i in range(4))
    lines.extend(f"abs.f32 u{i % 4}, ${i}; max.f32 m{i % 4}, m{i % 4}, u{i % 4};" for i in range(4, count))
    lines.append("max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2; mul.f32 m0, m0, " + factor + ";")
    lines.append(f"setp.gt.f32 p, m0, {hexadecimal(_NEAR)}; vote.sync.any.pred p, p, 0xffffffff; @p bra FAR;")
    # a polynomial of the register itself: the coefficients take the factors
    lines.append(f"mul.f32 a, {factor}, {factor}; mul.f32 c0, {factor}, {hexadecimal(_TANH[0])}; mov.f32 y0, {factor};")
    lines.extend(f"mul.f32 y0, y0, a; mul.f32 c{i}, y0, {hexadecimal(_TANH[i])};" for i in range(1, 4))
    for first in range(0, count, 4):
        four = [(i, first + i) for i in range(4)]
        lines.extend(f"mul.f32 u{i}, ${at}, ${at};" for i, at in four)
        lines.extend(f"fma.rn.f32 y{i}, u{i}, c3, c2;" for i, _ in four)
        for c in (1, 0):
            lines.extend(f"fma.rn.f32 y{i}, y{i}, u{i}, c{c};" for i, _ in four)
        lines.extend(f"mul.f32 ${at}, ${at}, y{i};" for i, at in four)
    lines.append("bra DONE; FAR:")
    for i in range(count):
        # (1 - e) / (1 + e) with e = exp(-2 |x|)
        lines.append(f"mul.f32 ${i}, ${i}, {factor}; abs.f32 y0, ${i}; mul.f32 y0, y0, {hexadecimal(_EXPONENT)};")
        lines.append("ex2.approx.ftz.f32 y0, y0; sub.f32 u0, 0f3F800000, y0; add.f32 y0, y0, 0f3F800000;")
        lines.append(f"rcp.approx.ftz.f32 y0, y0; mul.f32 y0, y0, u0; copysign.f32 ${i}, ${i}, y0;")
    return " ".join([*lines, "DONE: }"])


@gluon.constexpr_function
def alibi_assembly(count):
    """Registers less slope * |distance|, as one thread holds them: two columns of two rows, then again from 8 columns on."""
    base, step, slope = 2 * count, 3 * count, 4 * count
    lines = ["{ .reg .f32 d, f, b<2>; .reg .b32 t;", FIRST_COLUMN, "cvt.rn.f32.u32 f, t;"]
    lines.extend(f"fma.rn.f32 b{row}, ${step}, f, ${base + 2 * row};" for row in range(2))
    for i in range(count):
        row, column = i // 2 % 2, i % 2 + i // 4 * 8
        lines.append(f"fma.rn.f32 d, ${step}, {hexadecimal(column)}, b{row}; abs.f32 d, d; fma.rn.f32 ${i}, d, ${slope}, ${i};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def bias_assembly(count):
    """Registers plus what memory holds for their distances, in the order of `alibi_assembly`. One after another: all numbers at once would
    take as many registers."""
    base, step, last, unit, pointer = (n * count for n in range(2, 7))
    lines = ["{ .reg .b32 n, t, b<2>; .reg .b64 at; .reg .f32 x;", FIRST_COLUMN]
    lines.extend(f"mad.lo.s32 b{row}, ${step}, t, ${base + 2 * row};" for row in range(2))
    for i in range(count):
        row, column = i // 2 % 2, i % 2 + i // 4 * 8
        lines.append(f"mad.lo.s32 n, ${step}, {column}, b{row}; max.s32 n, n, 0; min.s32 n, n, ${last};")
        lines.append(f"mad.wide.s32 at, n, 4, ${pointer}; ld.global.nc.f32 x, [at]; fma.rn.f32 ${i}, x, ${unit}, ${i};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def hexadecimal(number):
    """An fp32 constant of PTX."""
    import struct

    return "0f" + struct.pack(">f", number).hex().upper()


@gluon.jit
def capped(scores, into_cap):
    """tanh(scores * into_cap): the score in units of the cap."""
    COUNT: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    ASM: gl.constexpr = softcap_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "f")
    factor = gl.full(scores.shape, into_cap, gl.float32, scores.type.layout)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [scores, factor], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def modified_and_masked(
    scores, score, head, q_position, k_position, DIRECTION: gl.constexpr, edge, segments_ptr, segment, row0, start
):  # fmt: skip
    """As `modified`, with scores of -inf outside of the segment if `edge` says that the block has some there; see `mask_scores`."""
    scores, share = modified(scores, score, head, q_position, k_position, DIRECTION)
    if edge:
        # here rather than in P, so that P, its 16 bits and its product with the softcap's slope take turns in registers
        scores = mask_scores(scores, segments_ptr, segment, row0, start, float("-inf"))
    if score.slopes_ptr is None and score.biases_ptr is None:
        share = scores  # the same registers
    return scores, share


@gluon.jit
def with_slope(p, share):
    """P times the softcap's slope, as dS has it; share: of the cap, what the score has. Of a pair that is not live that may be anything."""
    return gl.where(p == 0.0, 0.0, p * (1.0 - share * share))


@gluon.jit
def sloped(scores, slope, away, stride, DIRECTION: gl.constexpr):
    """scores - slope * |distance|. away: the distance of the block's first pair. stride: between the positions of two rows."""
    COUNT: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    ASM: gl.constexpr = alibi_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "fff")
    L: gl.constexpr = scores.type.layout
    rows = gl.arange(0, scores.shape[0], gl.SliceLayout(1, L))
    base = (away - DIRECTION * stride * rows).to(gl.float32)
    base = gl.expand_dims(base, 1).broadcast_to(scores.shape)
    step = gl.full(scores.shape, (DIRECTION * stride).to(gl.float32), gl.float32, L)
    slope = gl.full(scores.shape, -slope, gl.float32, L)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [scores, base, step, slope], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def biased(scores, biases_ptr, away, count, per_unit, stride, DIRECTION: gl.constexpr):
    """scores + the bias of the distance. away: the distance of the block's first pair, as an index of biases."""
    COUNT: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    ASM: gl.constexpr = bias_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "rrrfl")
    L: gl.constexpr = scores.type.layout
    base = away - DIRECTION * stride * gl.arange(0, scores.shape[0], gl.SliceLayout(1, L))
    base = gl.expand_dims(base, 1).broadcast_to(scores.shape)
    step = gl.full(scores.shape, DIRECTION * stride, gl.int32, L)
    last = gl.full(scores.shape, count - 1, gl.int32, L)
    unit = gl.full(scores.shape, per_unit, gl.float32, L)
    pointers = gl.full(scores.shape, biases_ptr.to(gl.int64), gl.int64, L)
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [scores, base, step, last, unit, pointers], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def far_bias(head, score, least, most):
    """(whether a block lies beyond the distances whose biases differ, the bias that all its pairs then have)."""
    left = most <= score.nearest
    far = left | (least >= score.nearest + score.biases_count - 1)
    place = gl.where(left, 0, score.biases_count - 1)
    return far, gl.load(head.biases_ptr + place, mask=far, other=0.0) * score.per_unit


@gluon.jit
def modified(scores, score, head, q_position, k_position, DIRECTION: gl.constexpr):
    """(scores of a block after a softcap, ALiBi and a bias, scores after the softcap). Positions: of the block's first query and key."""
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    stride = score.place_stride
    if score.into_cap is not None:
        scores = capped(scores, score.into_cap)
    share = scores
    away = k_position - q_position
    if score.slopes_ptr is not None:
        scores = sloped(scores, head.slope, away, stride, DIRECTION)
    if score.biases_ptr is not None:
        least = away - (ROWS - 1 if DIRECTION == 1 else COLUMNS - 1) * stride
        most = away + (COLUMNS - 1 if DIRECTION == 1 else ROWS - 1) * stride
        far, bias = far_bias(head, score, least, most)
        if far:
            scores += bias
        else:
            scores = biased(scores, head.biases_ptr, away - score.nearest, score.biases_count, score.per_unit, stride, DIRECTION)
    return scores, share
