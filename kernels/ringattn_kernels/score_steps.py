"""Device functions of the plain kernels for what happens to scores and weights; `modifiers` gives the formulas.

Blocks are [rows of q, rows of k], or transposed: `q_positions` and `k_positions` are [rows, 1] and [1, columns], or the other way round.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .modifiers import LEVELS, ROUNDS
from .units import LOG2_E

_ROUNDS = tl.constexpr(ROUNDS)
_LEVELS = tl.constexpr(LEVELS)


class Steps(NamedTuple):
    """What is done to the scores of one head of one batch; each is None if it is not done.

    slope: ALiBi's. edges_ptr: int32, their number a power of 2, the last ones beyond all distances. values_ptr: those of the head.
    stream: two words, see `stream_of`. dropped: of LEVELS numbers, those that drop a pair. whole: 1 / (1 - p).
    """

    cap: tl.tensor
    slope: tl.tensor
    edges_ptr: tl.tensor
    values_ptr: tl.tensor
    stream: tuple
    dropped: tl.tensor
    whole: tl.tensor


@triton.jit
def tanh(x):
    """tanh of fp32, to a few ulps also near 0, where 1 - exp(-2 |x|) would lose digits."""
    size = tl.abs(x)
    decay = tl.math.exp2(size * (-2.0 * LOG2_E))
    square = x * x
    small = x * (1.0 + square * (-0.33333333 + square * (0.13333334 + square * (-0.05396825 + square * 0.02186949))))
    return tl.where(size < 0.25, small, tl.where(x < 0, -1.0, 1.0) * ((1.0 - decay) / (1.0 + decay)))


@triton.jit
def exponents(raw, q_positions, k_positions, scale, steps, EDGES: tl.constexpr):
    """(base-2 exponents, the slope of the softcap) of a block of raw scores. scale: softmax_scale * log2(e)."""
    if steps.cap is not None:
        share = tanh(raw * (scale / (steps.cap * LOG2_E)))
        found = share * (steps.cap * LOG2_E)
        steepness = 1.0 - share * share
    else:
        found = raw * scale
        steepness = 1.0
    if steps.slope is not None:
        found -= tl.abs(k_positions - q_positions).to(tl.float32) * (steps.slope * LOG2_E)
    if steps.values_ptr is not None:
        first, last = pieces(q_positions, k_positions, steps.edges_ptr, EDGES)
        distance = k_positions - q_positions
        bias = tl.zeros(raw.shape, tl.float32) + tl.load(steps.values_ptr + first)
        for piece in range(first + 1, last + 1):
            bias = tl.where(distance >= tl.load(steps.edges_ptr + piece - 1), tl.load(steps.values_ptr + piece), bias)
        found += bias * LOG2_E
    return found, steepness


@triton.jit
def pieces(q_positions, k_positions, edges_ptr, EDGES: tl.constexpr):
    """The pieces of the least and of the greatest distance of a block."""
    edges = tl.load(edges_ptr + tl.arange(0, EDGES))
    nearest = tl.min(tl.ravel(k_positions), 0) - tl.max(tl.ravel(q_positions), 0)
    farthest = tl.max(tl.ravel(k_positions), 0) - tl.min(tl.ravel(q_positions), 0)
    return tl.sum((edges <= nearest).to(tl.int32), 0), tl.sum((edges <= farthest).to(tl.int32), 0)


@triton.jit
def stream_of(seed_low, seed_high, offset, head):
    """The two words of the stream of a head of a batch, among the heads of all ranks. Seed and offset: 32 bits each, as int32."""
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    low, high, _, _ = tl.philox(seed, head, offset, 0, 0, _ROUNDS)
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def kept_share(q_positions, k_positions, steps):
    """What dropout multiplies the weights of a block by: 0 or 1 / (1 - p). See `ringattn.device.philox`, which draws the same."""
    q_groups = ((q_positions >> 4) << 3) | (q_positions & 7)
    k_groups = ((k_positions >> 4) << 2) | ((k_positions >> 1) & 3)
    zero = tl.zeros_like(q_groups + k_groups)
    w0, w1, w2, w3 = tl.philox(0, q_groups + zero, k_groups + zero, steps.stream[0] + zero, steps.stream[1] + zero, _ROUNDS)
    upper, right = ((q_positions >> 3) & 1) == 0, ((k_positions >> 3) & 1) == 1
    word = tl.where(upper, tl.where(right, w1, w0), tl.where(right, w3, w2))
    drawn = (word >> ((k_positions & 1) * 16).to(tl.uint32)) & (_LEVELS - 1)
    return tl.where(drawn >= steps.dropped, steps.whole, 0.0)


@triton.jit
def add_to_values(sums_ptr, ds, q_positions, k_positions, steps, EDGES: tl.constexpr):
    """Add a block's dS to a program's own sums, one for each piece of distances."""
    first, last = pieces(q_positions, k_positions, steps.edges_ptr, EDGES)
    distance = k_positions - q_positions
    for piece in range(first, last + 1):
        above = tl.load(steps.edges_ptr + piece)
        below = tl.load(steps.edges_ptr + tl.maximum(piece - 1, 0))
        inside = (distance < above) & ((distance >= below) | (piece == 0))
        total = tl.sum(tl.ravel(tl.where(inside, ds, 0.0)), 0)
        tl.store(sums_ptr + piece, tl.load(sums_ptr + piece) + total)


@triton.jit
def load_places(places_ptr, segment):
    """(q_place, k_place) of a segment: see `table.TileTable`. Without places nobody uses them."""
    if places_ptr is None:
        return 0, 0
    else:
        return tl.load(places_ptr + segment * 2), tl.load(places_ptr + segment * 2 + 1)
