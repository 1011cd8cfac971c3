"""What the Hopper kernels' inline assembly does to scores and weights, run on the CPU: it needs neither a compiler nor a GPU."""

import numpy as np
import pytest
from triton.experimental.gluon import language as gl

from ringattn.device.philox import kept, philox
from ringattn_kernels.hopper import forward_softcap, forward_softmax, kept_pairs, score_steps, score_sums
from ringattn_kernels.modifiers import Dropout
from tests.kernels import ptx

# the rows and columns of the numbers that a thread of a warpgroup holds of a product [64, columns]
LANE, WARP = ptx.THREADS % 32, ptx.THREADS // 32


def rows(i):
    return 16 * WARP + LANE // 4 + i // 2 % 2 * 8


def columns(i):
    return 2 * (LANE % 4) + i % 2 + i // 4 * 8


def held(x):
    """The numbers of each register, of x (64, columns)."""
    return [x[rows(i), columns(i)] for i in range(x.shape[1] // 2)]


def everywhere(number, dtype=np.uint64):
    return np.full(128, number, dtype)


PLACE_OF_Q, PLACE_OF_K = 48, 1 << 20


def drawn(p, rows_count, count, transposed):
    """(the words of a stream, the numbers that drop, which pairs of a block of 64 rows are kept by each register)."""
    dropout, head = Dropout(p, (5 << 40) + 3, 7, 9), 11
    low, high, *_ = (int(x) for x in philox(tuple(np.array(x) for x in (head, dropout.offset, 0, 0)), dropout.seed))
    shape = (rows_count, count) if not transposed else (count, rows_count)
    wanted = kept(dropout, 2, 9, PLACE_OF_Q + np.arange(shape[0]), PLACE_OF_K + np.arange(shape[1])).reshape(18, *shape)[head]
    return (low, high), dropout.dropped, held(wanted.T if transposed else wanted)


def pairs_of(wanted):
    """Registers of two neighbours of a row, those of 2 i and 2 i + 1 of a product: all bits of what is kept."""
    low, high = ([x.astype(np.uint64) * np.uint64(0xFFFF) for x in wanted[half::2]] for half in range(2))
    return [x | y << np.uint64(16) for x, y in zip(low, high)]


@pytest.mark.parametrize("count", [128, 64])
@pytest.mark.parametrize("p", [0.3, 0.96])
def test_queries_keep_the_pairs_that_the_cpu_keeps(count, p):
    stream, dropped, wanted = drawn(p, 64, count, False)
    number = count // 4
    groups = (PLACE_OF_Q >> 1) + ((rows(0) >> 4 << 3) | (rows(0) & 7))
    operands = [everywhere(0xFFFFFFFF)] * 2 * number + [groups.astype(np.uint64)] * number
    operands += [everywhere(x) for x in (PLACE_OF_K >> 2, *stream, dropped) for _ in range(number)]
    found = ptx.run(kept_pairs.drop_assembly(number), operands)
    for got, exact in zip(found, pairs_of(wanted)):
        assert np.array_equal(got, exact)


@pytest.mark.parametrize("count", [64, 128])
@pytest.mark.parametrize("p", [0.3, 0.96])
def test_keys_keep_the_pairs_that_the_cpu_keeps(count, p):
    stream, dropped, wanted = drawn(p, 64, count, True)
    groups = (PLACE_OF_K >> 2) + ((rows(0) >> 4 << 2) | (rows(0) >> 1 & 3))
    operands = [everywhere(0)] * 2 + [groups.astype(np.uint64)] * 2
    operands += [everywhere(x) for x in (PLACE_OF_Q >> 1, *stream, dropped) for _ in range(2)]
    found = ptx.run(kept_pairs.draw_assembly(count), operands)[:2]
    number = count // 2
    # as pairs of 16 bits
    pairs = ptx.run(
        kept_pairs.pairs_assembly(number // 2, (number // 2, number // 2 + 1)), [everywhere(0xFFFFFFFF)] * (number // 2) + found
    )
    for got, exact in zip(pairs, pairs_of(wanted)):
        assert np.array_equal(got, exact)


def test_gradients_are_zeros_where_weights_are():
    generator = np.random.default_rng(0)
    x, weights = generator.standard_normal((64, 64)).astype(np.float32), generator.random((64, 64)).astype(np.float16)
    # what bf16 holds is no number, or less than the least normal one, as fp16
    weights[generator.random((64, 64)) < 0.5] = 0.0
    weights[0, :4] = np.array([1, 0x8000, 0x7FFF, 0xFC01], np.uint16).view(np.float16)
    halves = [y.view(np.uint16).astype(np.uint64) for y in held(weights)]
    operands = held(x) * 2 + [low | high << np.uint64(16) for low, high in zip(halves[::2], halves[1::2])]
    for got, exact in zip(ptx.run(kept_pairs.values_assembly(32), operands), held(np.where(weights != 0, x, 0.0))):
        assert np.array_equal(got, exact.astype(np.float32))


@pytest.mark.parametrize("largest", [0.7, 0.8, 30.0, 1e30])
def test_a_softcap_is_tanh(largest):
    x = np.random.default_rng(0).uniform(-largest, largest, (64, 128)).astype(np.float32)
    x[0, :4] = 0.0, -0.0, largest, -largest
    factor = np.float32(0.5)
    found = ptx.run(
        score_steps.softcap_assembly(64),
        [*held(x / factor), everywhere(factor, np.float32)] + [everywhere(factor, np.float32)] * 64,
    )
    wanted = np.tanh(x.astype(np.float64))
    for got, exact in zip(found, held(wanted)):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("way", "largest"), [(0, 0.45), (1, 0.9), (2, 30.0)])
def test_a_late_softcap_gives_exponents(way, largest):
    x = np.random.default_rng(0).uniform(-largest, largest, (64, 64)).astype(np.float32)
    x[0, :4], x[5, 7] = (0.0, -0.0, largest, -largest), -np.inf
    pivot = np.linspace(-3, 9, 64).astype(np.float32)[:, None] + np.zeros_like(x)
    factor, scale = np.float32(0.25), np.float32(43.0)
    ways = np.full(x.shape, way, np.uint64)
    ways[::3] = 0  # the farthest row of a warp says how
    operands = [*held(x / factor) * 2, *held(pivot), *held(ways)]
    operands += [everywhere(factor, np.float32)] * 32 + [everywhere(scale, np.float32)] * 32
    found = ptx.run(forward_softcap.exponents_assembly(32), operands)
    wanted = np.where(np.isinf(x), -np.inf, scale * np.tanh(x.astype(np.float64)) - pivot)
    for got, exact in zip(found, held(wanted)):
        np.testing.assert_allclose(ptx.floats(got), exact, rtol=1e-6, atol=3e-4)


@pytest.mark.parametrize("way", [0, 1])
def test_far_below_a_maximum_of_0_weights_of_a_late_softcap_vanish(way):
    x = np.linspace(-30, -0.42, 64 * 64).reshape(64, 64).astype(np.float32)
    scale = np.float32(forward_softcap.FAR_CAP * 1.442695)
    operands = [*held(x) * 2, *held(np.zeros_like(x)), *held(np.full(x.shape, way, np.uint64))]
    operands += [everywhere(1.0, np.float32)] * 32 + [everywhere(scale, np.float32)] * 32
    found = ptx.run(forward_softcap.exponents_assembly(32), operands)
    for got, exact in zip(found, held(scale * np.tanh(x.astype(np.float64)))):
        off = np.abs(np.exp2(ptx.floats(got).astype(np.float64)) - np.exp2(exact))
        # of a million keys, beside a single one at the maximum: less than what the rounding of weights to 16 bits may add
        assert (off * 2**20 / (1 + np.exp2(exact) * 2**20)).max() < 2e-3


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("away", [-1000, -20, 7, 1 << 20])
def test_alibi_is_the_distance_times_the_slope(away, stride, direction):
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    row, column = np.indices(x.shape)
    slope = np.float32(0.3)
    operands = held(x) * 2  # what is changed counts twice
    operands += held((away - direction * stride * row).astype(np.float32))
    operands += [everywhere(direction * stride, np.float32)] * 32 + [everywhere(-slope, np.float32)] * 32
    found = ptx.run(score_steps.alibi_assembly(32), operands)
    wanted = x - np.float64(slope) * np.abs(away + direction * stride * (column - row))
    for got, exact in zip(found, held(wanted)):
        np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("away", [-1000, -20, 7, 1000])
def test_a_bias_is_that_of_the_distance(away, direction):
    generator = np.random.default_rng(0)
    x, biases = generator.standard_normal((64, 64)).astype(np.float32), generator.standard_normal(90).astype(np.float32)
    row, column = np.indices(x.shape)
    operands = held(x) * 2 + held((away - direction * row).astype(np.uint64))
    operands += [everywhere(direction % 2**32)] * 32 + [everywhere(len(biases) - 1)] * 32 + [everywhere(2.0, np.float32)] * 32
    memory = np.concatenate([np.full(8, np.nan, np.float32), biases])
    found = ptx.run(score_steps.bias_assembly(32), operands + [everywhere(8 * 4)] * 32, memory)
    wanted = x + 2.0 * biases[(away + direction * (column - row)).clip(0, len(biases) - 1)]
    for got, exact in zip(found, held(wanted)):
        np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-6)


def threads(rows_of_columns):
    """Two registers for each of some columns of threads, for their two rows."""
    return [x[rows(2 * half), LANE % 4] for x in rows_of_columns for half in range(2)]


def block(x):
    """x (64, columns) as `score_sums.columns_of_threads` gives it."""
    parts = x.reshape(64, -1, 4, 2)
    return threads([parts[:, i // 2, :, i % 2] for i in range(x.shape[1] // 4)])


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("away", [-1000, 7])
def test_the_gradient_of_a_slope_is_the_sum_over_distances(away, stride):
    generator = np.random.default_rng(0)
    x, before = (generator.standard_normal(shape).astype(np.float32) for shape in ((64, 128), (64, 4)))
    key, query = np.indices(x.shape)
    starts = np.repeat((away + stride * np.arange(64))[:, None], 4, 1).astype(np.float32)
    operands = threads([before]) * 2 + threads([starts, np.full((64, 4), -stride, np.float32)]) + block(x)
    found = ptx.run(score_sums.distances_assembly(32), operands)[:2]
    sums = (x * np.abs(away + stride * (key - query)).astype(np.float64)).reshape(64, 16, 4, 2).sum((1, 3))
    for got, exact in zip(found, threads([before + sums])):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("count", [1, 2, 90])
@pytest.mark.parametrize("away", [-1000, -20, 7, 1000])
def test_the_gradient_of_a_bias_is_the_sum_over_its_pairs(away, count):
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    key, query = np.indices(x.shape)
    starts = np.repeat((away + np.arange(64))[:, None], 4, 1).astype(np.uint64)
    operands = [everywhere(0.0, np.float32)] * 8 + threads([starts])
    operands += [everywhere(number) for number in (-1 % 2**32, count - 1, 8 * 4) for _ in range(2)] + block(x)
    memory = np.full(8 + count + 8, np.nan, np.float32)
    memory[8 : 8 + count] = 0
    found = ptx.run(score_sums.scatter_assembly(16), operands, memory)[:4]
    wanted = np.zeros(count)
    np.add.at(wanted, (away + key - query).clip(0, count - 1), x.astype(np.float64))
    sums = memory[8 : 8 + count].astype(np.float64)
    sums[0] += sum(x.sum(dtype=np.float64) for x in found[:2])
    sums[-1] += sum(x.sum(dtype=np.float64) for x in found[2:])
    np.testing.assert_allclose(sums, wanted, rtol=1e-4, atol=1e-3)
    assert np.isnan(memory[:8]).all() and np.isnan(memory[8 + count :]).all()


@pytest.mark.parametrize("up_to", [True, False], ids=["past the last column", "up to it"])
@pytest.mark.parametrize("width", [64, 128])
def test_scores_are_masked_by_a_column_of_their_row(width, up_to):
    random = np.random.default_rng(0)
    scores = random.standard_normal((64, width)).astype(np.float32)
    ends = [np.full(64, x) for x in (-(1 << 30), -9, -8, -7, -1, width - 1, width, 1 << 30)]
    for last in [*ends, *random.integers(-20, width + 20, (20, 64))]:
        live = (np.arange(width) <= last[:, None]) == up_to
        count = width // 2
        operands = [*held(scores)] * 2 + [(last[rows(i)] % (1 << 32)).astype(np.uint64) for i in range(count)]
        for got, exact in zip(
            ptx.run(forward_softmax.mask_assembly(count, up_to), operands), held(np.where(live, scores, -np.inf))
        ):
            assert np.array_equal(got, exact)


@pytest.mark.parametrize("dtype", ["bf16x2", "f16x2"])
@pytest.mark.parametrize("moved", [False, True], ids=["pivots stay", "a row of each warp moves"])
def test_weights_are_renewed_where_a_pivot_has_moved(moved, dtype):
    count, scale = 16, np.float32(0.18)
    random = np.random.default_rng(0)
    even, odd = (40 * random.standard_normal((2, count, 128))).astype(np.float32)
    before = random.uniform(10, 20, (2, 128)).astype(np.float32)
    now = before.copy()
    if moved:
        # a row is of four threads, the first or the second of theirs
        for row in range(2):
            now[row, (row == WARP % 2) & (LANE // 4 == 3)] += 30
    # before, these hold what does not come from the scores
    old = [everywhere(7 + i) for i in range(count)], [everywhere(i, np.float32) for i in range(count)]
    pivots = [[x[i % 2] for i in range(count)] for x in (before, now)]
    operands = [*old[0], *old[1], *old[0], *old[1], *even, *odd, *pivots[0], *pivots[1], *[everywhere(scale, np.float32)] * count]
    assembly = forward_softmax.renewal_assembly(count, gl.bfloat16 if dtype == "bf16x2" else gl.float16)
    found = ptx.run(assembly, operands)
    weights = [
        [np.exp2((x[i].astype(np.float64) * scale - now[i % 2]).astype(np.float32)) for i in range(count)] for x in (even, odd)
    ]
    pairs = [ptx.rounded(x, dtype) | ptx.rounded(y, dtype) << np.uint64(16) for x, y in zip(*weights)]
    sums = [x + y for x, y in zip(*weights)]
    for got, exact in zip(found, [*pairs, *sums] if moved else [*old[0], *old[1]]):
        assert np.array_equal(got, exact)
    constraints = str(forward_softmax.renewal_constraints(count)).split(",")
    assert len(constraints) == len(operands)
    assert constraints[2 * count : 4 * count] == [str(i) for i in range(2 * count)], "what changes is given, too"
