"""The online softmax of the Hopper forward if a softcap of FAR_CAP or more is all that changes scores: tanh after the maximum, not before.

tanh grows with its argument, so that the maximum of raw scores gives that of capped ones. It also says which polynomial of the square is
exact enough: one of three coefficients up to 0.45 of the cap, one of five up to 0.9, and exp beyond. Scores below 0 need no check if the
maximum of their row is at least 0. The highest coefficients are positive, so that far below 0 both polynomials stay below tanh; and there a
weight is at most exp(-0.42 FAR_CAP), 3e-6, of the greatest one. A polynomial's last product is the one that an exponent needs anyway.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..modifiers import Modifiers
from ..units import LOG2_E
from .forward_softmax import LAG, as_column, in_place, pack
from .score_steps import hexadecimal

# the least softcap for which a weight of a score below -0.45 caps may be as inexact as the polynomials make it
FAR_CAP = 30.0
# tanh(x) / x as polynomials of x * x: up to 0.45 to 1.3e-5 of itself, and up to 0.9 to 3e-6
_NEAR, _MIDDLE = gl.constexpr(0.45), gl.constexpr(0.9)
_NEAR_TANH = (0.99998766, -0.33222708, 0.11835346)
_MIDDLE_TANH = (0.9999972, -0.33315635, 0.13151304, -0.047156926, 0.010508686)
# exp(-2 x) as a power of 2
_EXPONENT = -2 * LOG2_E.value


def caps_late(modifiers: Modifiers | None) -> bool:
    """Whether scores are capped in the softmax, and not before: if nothing else is done to them."""
    if modifiers is None or modifiers.softcap is None:
        return False
    return modifiers.softcap >= FAR_CAP and modifiers.slopes is None and modifiers.bias is None


@gluon.constexpr_function
def exponents_assembly(count):
    """What `count` registers are as exponents: scale * tanh(factor * x) less the row's pivot, for -inf -inf. A warp takes the way of its
    farthest row.

    From $count on: the rows, as far as they differ: pivots; ways (0 near, 1 middle, 2 far). For all: factor, scale.
    """
    pivot, way, factor, scale = (f"${n * count}" for n in range(2, 6))
    lines = ["{ .reg .pred p; .reg .b32 way; .reg .f32 u<4>, y<4>, c<5>, a, m<2>;"]
    lines.append(f"max.s32 way, {way}, ${3 * count + 2}; neg.f32 m0, {pivot}; neg.f32 m1, ${2 * count + 2};")
    lines.append("setp.gt.s32 p, way, 0; vote.sync.any.pred p, p, 0xffffffff;")
    lines.append(f"mul.f32 a, {factor}, {factor}; @p bra MIDDLE;")
    lines.extend(_polynomial(count, _NEAR_TANH, factor, scale))
    lines.append("bra DONE; MIDDLE: setp.gt.s32 p, way, 1; vote.sync.any.pred p, p, 0xffffffff; @p bra FAR;")
    lines.extend(_polynomial(count, _MIDDLE_TANH, factor, scale))
    lines.append("bra DONE; FAR:")
    for i in range(count):
        # (1 - e) / (1 + e) with e = exp(-2 |x|)
        lines.append(f"mul.f32 u1, ${i}, {factor}; abs.f32 y0, u1; mul.f32 y0, y0, {hexadecimal(_EXPONENT)};")
        lines.append("ex2.approx.ftz.f32 y0, y0; sub.f32 u0, 0f3F800000, y0; add.f32 y0, y0, 0f3F800000;")
        lines.append("rcp.approx.ftz.f32 y0, y0; mul.f32 y0, y0, u0; copysign.f32 y0, u1, y0;")
        lines.append(f"setp.eq.f32 p, ${i}, 0fFF800000; fma.rn.f32 y0, y0, {scale}, m{i // 2 % 2}; selp.f32 ${i}, ${i}, y0, p;")
    return " ".join([*lines, "DONE: }"])


@gluon.constexpr_function
def _polynomial(count, coefficients, factor, scale):
    """Four registers at a time, so that no instruction waits for the one before it; the coefficients take factor and scale."""
    lines = [f"mul.f32 y0, {factor}, {scale}; mul.f32 c0, y0, {hexadecimal(coefficients[0])};"]
    for i, coefficient in enumerate(coefficients[1:], 1):
        lines.append(f"mul.f32 y0, y0, a; mul.f32 c{i}, y0, {hexadecimal(coefficient)};")
    last = len(coefficients) - 1
    for first in range(0, count, 4):
        four = [(i, first + i) for i in range(4)]
        lines.extend(f"mul.f32 u{i}, ${at}, ${at};" for i, at in four)
        lines.extend(f"fma.rn.f32 y{i}, u{i}, c{last}, c{last - 1};" for i, _ in four)
        for c in reversed(range(last - 1)):
            lines.extend(f"fma.rn.f32 y{i}, y{i}, u{i}, c{c};" for i, _ in four)
        lines.extend(f"fma.rn.f32 ${at}, ${at}, y{i}, m{at // 2 % 2};" for i, at in four)
    return lines


@gluon.jit
def capped_exponents(scores, pivot, way, scale, into_cap):
    """scale * tanh(into_cap * scores) - pivot, of rows whose `way` says how."""
    COUNT: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    ASM: gl.constexpr = exponents_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "frff")
    L: gl.constexpr = scores.type.layout
    pivots = gl.expand_dims(pivot, 1).broadcast_to(scores.shape)
    ways = gl.expand_dims(way, 1).broadcast_to(scores.shape)
    factor = gl.full(scores.shape, into_cap, gl.float32, L)
    scales = gl.full(scores.shape, scale, gl.float32, L)
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [scores, pivots, ways, factor, scales], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def tanh(x):
    """Of a few numbers; -inf stays -inf."""
    decay = gl.exp2(gl.abs(x) * (-2.0 * LOG2_E))
    size = (1.0 - decay) / (1.0 + decay)
    return gl.where(x == float("-inf"), x, gl.where(x < 0, -size, size))


@gluon.jit
def capped_softmax_step(scores, pivot, row_sum, row_max, scale, into_cap, dtype: gl.constexpr):
    """`softmax_step` after a softcap: scale * tanh(into_cap * scores) is the exponent, and pivot and row_max are such exponents."""
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    SUMS: gl.constexpr = row_sum.type.layout
    farthest = gl.max(scores, axis=1) * into_cap
    block_max = tanh(farthest) * scale
    row_max = gl.maximum(row_max, block_max)
    new_pivot = gl.where(block_max > pivot + LAG, block_max, pivot)
    way = gl.where(farthest > _MIDDLE, 2, gl.where(farthest > _NEAR, 1, 0))
    way = gl.where((row_max < 0) & (row_max != float("-inf")), 2, way)
    p = gl.exp2(capped_exponents(scores, new_pivot, way, scale, into_cap))
    alpha = gl.exp2(pivot - new_pivot)
    even, odd = gl.split(p.reshape([ROWS, COLUMNS // 2, 2]))
    part = gl.convert_layout(gl.sum((even + odd).reshape([ROWS, COLUMNS // 8, 4]), axis=1), SUMS, assert_trivial=True)
    row_sum = row_sum * as_column(alpha, SUMS) + part
    return pack(even, odd, dtype), alpha, new_pivot, row_sum, row_max
