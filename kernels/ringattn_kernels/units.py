"""Units of the softmax statistics.

Kernels work with base-2 exponents; statistics leave them in natural-log units. Rounding row_max from one unit to the other moves
it by up to half an ulp, which at a logit of 2.5e5 is a factor exp(0.008). The factor is kept: row_sum is always relative to
exactly the row_max stored beside it.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def to_base2(row_max):
    """(pivot, rest): row_max in base-2 units, and its rounding error: row_max * log2(e) = pivot + rest. Empty rows (-inf): (-inf, 0)."""
    exact = row_max.to(tl.float64) * LOG2_E
    pivot = exact.to(tl.float32)
    rest = (exact - pivot.to(tl.float64)).to(tl.float32)
    return pivot, tl.where(row_max == float("-inf"), 0.0, rest)


@triton.jit
def to_natural(pivot, row_sum):
    """(row_max, row_sum) in natural-log units, of a sum relative to 2**pivot."""
    row_max = (pivot.to(tl.float64) * LN_2).to(tl.float32)
    rounded, rest = to_base2(row_max)
    # the difference of two close numbers is exact
    shift = tl.where(pivot == float("-inf"), 0.0, (pivot - rounded) - rest)
    return row_max, row_sum * tl.math.exp2(shift)
