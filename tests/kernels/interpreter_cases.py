"""The kernels on CPU tensors through Triton's interpreter, against dense attention in fp64.

`test_interpreter.py` runs this file in a process of its own: TRITON_INTERPRET decides at import what `triton.jit` means.
"""

import numpy as np
import pytest
import torch

import ringattn_kernels as rk
from ringattn.device import blocked, local
from ringattn.geometry.rows import Rows
from ringattn.partial import Partial, merge
from ringattn_kernels import distances, splits
from ringattn_kernels.hopper.fused import finish
from ringattn_kernels.modifiers import Bias, Dropout, Modifiers
from tests.kernels import dense, fuzz

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}


def inputs(b, sq, sk, h, hk, d, dv, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv), (b, sq, h, dv)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(q, k, v, dout, tables, softmax_scale) -> dense.Result:
    """Forward and backward with one launch for each table, over buffers full of NaN where they must be overwritten."""
    state = None
    for n, table in enumerate(tables):
        final = n == len(tables) - 1
        state = rk.forward(q, k, v, table, softmax_scale=softmax_scale, state=state, final=final)
    out, row_max, row_sum = state
    delta = rk.delta(out, dout)
    assert out.dtype == q.dtype
    assert row_max.dtype == row_sum.dtype == delta.dtype == torch.float32
    gradients = {"dq": torch.zeros(q.shape), "dk": transposed(k).zero_(), "dv": transposed(v).zero_()}
    queries = rk.Queries(q, dout, row_max, row_sum, delta)
    for table in tables:
        rk.backward(queries, k, v, table, softmax_scale=softmax_scale, **gradients)
    if len(tables) > 1:
        dq, dk, dv = run_with_sums(queries, k, v, tables, softmax_scale)
        for name, x in dict(dq=dq, dk=dk, dv=dv).items():
            assert torch.equal(x, gradients[name]), name
    else:
        fresh = {name: torch.full_like(x, float("nan")) for name, x in zip(("dq", "dk", "dv"), (q, k, v))}
        rk.backward(queries, k, v, tables[0], softmax_scale=softmax_scale, **fresh, add=False)
        for name, x in fresh.items():
            assert torch.equal(x, gradients[name].to(q.dtype)), name
    return dense.Result(out, row_max, row_sum, **gradients)


def run_with_sums(queries, k, v, tables, softmax_scale):
    """Gradients of launches that add to one dq, and each write dk and dv of their own over NaN."""
    sums = rk.QuerySums(queries.q, softmax_scale)
    fresh = [(transposed(k), transposed(v)) for _ in tables]
    for table, (dk, dv) in zip(tables, fresh):
        rk.backward(queries, k, v, table, softmax_scale=softmax_scale, dq=sums, dk=dk, dv=dv, add=False)
    return sums.finish(torch.float32), *map(sum, zip(*fresh))


def transposed(x):
    """An fp32 view shaped as x (b, s, h, d) of a buffer (s, b, h, d)."""
    return torch.full((x.shape[1], x.shape[0], *x.shape[2:]), float("nan")).transpose(0, 1)


def compare(q, k, v, dout, tiles, softmax_scale, parts=1):
    sq, sk = q.shape[1], k.shape[1]
    tiles = np.array(tiles, dtype=np.int64).reshape(-1, 6)
    live = dense.live_pairs(tiles, sq, sk)
    exact = dense.attention(q, k, v, dout, live, softmax_scale, torch.float64)
    got = run(q, k, v, dout, [rk.TileTable(tiles[n::parts], sq, sk) for n in range(parts)], softmax_scale)
    # scores are fp32: the exponential turns half an ulp of the largest into a relative error
    largest = exact.row_max[exact.row_max.isfinite()].abs().max() if live.any() else 0.0
    tolerance = max(TOLERANCE[q.dtype], 2 * torch.finfo(torch.float32).eps * float(largest))
    for name in ("out", "row_max", "row_sum", "dq", "dk", "dv"):
        x, y = getattr(got, name).double(), getattr(exact, name)
        finite = y[y.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(scale, 1.0), msg=lambda m, n=name: f"{n}: {m}")
    empty = ~live.any(1)
    assert (got.out[:, empty] == 0).all()
    assert (got.row_max[..., empty] == float("-inf")).all()
    assert (got.row_sum[..., empty] == 0).all()
    assert (got.dq[:, empty] == 0).all()
    for x in (got.dk, got.dv):
        assert (x[:, ~live.any(0)] == 0).all()


@pytest.mark.parametrize("n", [1, 17, 129, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 63, 97, 127))])
def test_causal_at_odd_lengths(n):
    compare(*inputs(1, n, n, 1, 1, 16, 16), dense.causal(n), 0.25)


@pytest.mark.parametrize(
    "tiles",
    [dense.full(97, 63), dense.window(97, 20, 3), dense.documents(1, 30, 1, 1, 64), []],
    ids=["full", "window", "documents", "nothing"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.some(3)
def test_masks(tiles, dtype):
    sk = 63 if len(tiles) == 1 and tiles[0][3] == 63 else 97
    compare(*inputs(1, 97, sk, 2, 1, 16, 16, dtype), tiles, 0.25)


@pytest.mark.parametrize(
    ("seed", "parts"), [(1, 2), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((0, 1), (2, 3), (3, 1), (4, 2)))]
)
def test_random_tiles_in_one_launch_or_several(seed, parts):
    generator = np.random.default_rng(seed)
    sq, sk = generator.integers(1, 140, 2)
    tiles = dense.random_tiles(generator, sq, sk)
    compare(*inputs(1, sq, sk, 1, 1, 16, 16, seed=seed), tiles, 0.3, parts)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3))])
def test_random_problems_as_on_a_gpu(seed):
    fuzz.check([seed], fuzz.INTERPRETER)


@pytest.mark.parametrize(("heads", "expected"), [(1, [4]), (4, [])])
def test_a_chip_that_few_blocks_do_not_fill_has_them_in_splits(heads, expected, monkeypatch):
    counts = []
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(splits, "merge_arguments", lambda *a, whole=splits.merge_arguments: counts.append(a[0].most) or whole(*a))
    q, k, v, dout = inputs(1, 10, 700, heads, 1, 16, 16)
    out, *_ = rk.forward(q, k, v, rk.TileTable(np.array(dense.full(10, 700)), 10, 700), softmax_scale=0.25)
    exact = dense.attention(q, k, v, dout, torch.ones(10, 700, dtype=torch.bool), 0.25, torch.float64)
    torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=TOLERANCE[torch.float32])
    assert counts == expected


@pytest.mark.parametrize("final", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_splits_merge_into_the_state_that_whole_blocks_would_leave(final):
    """In launches from and to a state, with blocks that no tile touches and splits without a live pair for some rows."""
    q, k, v, _ = inputs(1, 150, 300, 2, 1, 16, 24)
    tables = [rk.TileTable(np.array([tile]), 150, 300) for tile in ((0, 70, 0, 300, -200, -40), (66, 70, 0, 300, -300, 300))]
    results = []
    for count in (1, 3):
        state = None
        for n, table in enumerate(tables):
            state = rk.forward(q, k, v, table, softmax_scale=0.3, state=state, final=final and n == 1, splits=count)
        results.append(state)
    for whole, merged in zip(*results):
        torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-6)
    out, row_max, row_sum = results[1]
    assert (out[:, 70:] == 0).all() and (row_max[..., 70:] == float("-inf")).all() and (row_sum[..., 70:] == 0).all()


@pytest.mark.parametrize(
    ("add", "d"), [(True, 16), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((False, 16), (True, 260), (False, 260)))]
)
def test_the_gradients_of_splits_add_up_to_those_of_whole_blocks(add, d):
    """Where blocks without a pair are overwritten, or left as they are."""
    q, k, v, dout = inputs(2, 200, 130, 2, 1, d, 24, torch.float16)
    q /= d**0.5 / 4
    table = rk.TileTable(np.array([(0, 130, 0, 70, -40, 130)]), 200, 130)
    out, row_max, row_sum = rk.forward(q, k, v, table, softmax_scale=0.3)
    results = []
    for count in (1, 3):
        kind = dict(dtype=torch.float32 if add else torch.float16)
        dq, dk, dv = (torch.full_like(x, 0.25 if add else float("nan"), **kind) for x in (q, k, v))
        arguments = (rk.Queries(q, dout, row_max, row_sum, rk.delta(out, dout)), k, v, table)
        rk.backward(*arguments, softmax_scale=0.3, dq=dq, dk=dk, dv=dv, add=add, splits=count)
        results.append((dq, dk, dv))
    for whole, summed in zip(*results):
        torch.testing.assert_close(summed, whole, rtol=1e-5 if add else 2**-10, atol=1e-5)
        assert (summed[:, 130:] == (0.25 if add else 0.0)).all()


@pytest.mark.parametrize("logit", [1e2, 2.5e5, -2.5e5])
def test_equal_huge_logits_average_exactly_over_splits(logit):
    q, k, v, _ = inputs(1, 10, 100, 1, 1, 16, 16)
    q.fill_(1.0)
    k.fill_(logit / 16)
    table = rk.TileTable(np.array(dense.full(10, 100)), 10, 100)
    out, row_max, row_sum = rk.forward(q, k, v, table, softmax_scale=0.37, splits=3)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=0, atol=3e-7)
    torch.testing.assert_close(row_sum.log() + row_max, torch.full_like(row_max, logit * 0.37) + np.log(100))


@pytest.mark.parametrize("d", [16, pytest.param(264, marks=pytest.mark.thorough)])
def test_modified_scores(d):
    """Over two launches whose tiles lie at places of their own, with a stride between positions; against the blocks of plain torch."""
    b, s, h, hk = 2, 40, 2, 1
    q, k, v, dout = inputs(b, s, s, h, hk, d, d)
    generator = torch.Generator().manual_seed(1)
    slopes, values = torch.rand(b, h, generator=generator), torch.randn(h, 5, generator=generator)
    edges = (-30, -3, 0, 9)
    dropout = Dropout(0.3, 5 << 40 | 3 << 31 | 7, 1 << 31 | 3, heads=9, first_head=2)
    modifiers, exact_modifiers = (
        Modifiers(1.5, slopes.to(dtype), Bias(edges, values.to(dtype)), dropout) for dtype in (torch.float32, torch.float64)
    )
    # queries at 100, 103, ...; keys at 40, 43, ... and, from row 33 on, at 1, 4, ...
    places = [[100, 40], [100, 1 - 3 * 33]]
    tables = [
        rk.TileTable(np.array([tile]), s, s, np.array([place]), 3)
        for tile, place in zip(((0, s, 0, 33, -20, s), (5, s, 33, s, -s, 20)), places)
    ]
    state = None
    for n, table in enumerate(tables):
        state = rk.forward(q, k, v, table, softmax_scale=0.25, modifiers=modifiers, state=state, final=n == 1)
    out, row_max, row_sum = state
    sums = dense.zero_sums(modifiers)
    gradients = {name: torch.zeros(x.shape) for name, x in zip(("dq", "dk", "dv"), (q, k, v))}
    queries = rk.Queries(q, dout, row_max, row_sum, rk.delta(out, dout))
    with fuzz.memory_of_nan():
        for table in tables:
            rk.backward(queries, k, v, table, softmax_scale=0.25, **gradients, modifiers=modifiers, sums=sums)

    wide = [x.double() for x in (q, k, v, dout)]
    state = None
    for n, table in enumerate(tables):
        state = blocked.forward(*wide[:3], table, softmax_scale=0.25, modifiers=exact_modifiers, state=state, final=n == 1)
    exact_sums, dq = dense.zero_sums(exact_modifiers), blocked.TorchQuerySums(wide[0])
    dk, dv = torch.zeros_like(wide[1]), torch.zeros_like(wide[2])
    exact_queries = rk.Queries(wide[0], wide[3], *state[1:], blocked.delta(state[0], wide[3]))
    for table in tables:
        blocked.backward(
            exact_queries, *wide[1:3], table, softmax_scale=0.25, dq=dq, dk=dk, dv=dv, modifiers=exact_modifiers, sums=exact_sums
        )
    found = [out, row_max, row_sum, *gradients.values(), sums.slopes, sums.values]
    wanted = [*state, dq.total, dk, dv, exact_sums.slopes, exact_sums.values]
    for x, y in zip(found, wanted):
        # exponents of 100 are rounded by 1e-5, and the gradient of a slope is multiplied by distances
        torch.testing.assert_close(x.double(), y, rtol=0, atol=5e-5 * max(1.0, float(y.abs().max())))


@pytest.mark.parametrize("last", [1 << 20, 1 << 31])
def test_slopes_times_distances_are_exact_at_far_positions(last):
    """Slopes times positions in fp32 would be off by 0.01 and more."""
    b, sq, sk, h, d = 1, 30, 70, 2, 16
    q, k, v, dout = inputs(b, sq, sk, h, 1, d, d)
    table = rk.TileTable(np.array([(0, sq, 0, sk, -sk, sq)]), sq, sk, np.array([[last - sq, last - sk]]), 1)
    modifiers, exact_modifiers = (
        Modifiers(slopes=torch.tensor([[0.7, 0.07]]).to(dtype)) for dtype in (torch.float32, torch.float64)
    )
    state = rk.forward(q, k, v, table, softmax_scale=0.25, modifiers=modifiers)
    sums, gradients = dense.zero_sums(modifiers), [torch.zeros(x.shape) for x in (q, k, v)]
    queries = rk.Queries(q, dout, *state[1:], rk.delta(state[0], dout))
    rk.backward(
        queries, k, v, table, softmax_scale=0.25, modifiers=modifiers, sums=sums, **dict(zip(("dq", "dk", "dv"), gradients))
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v, exact_modifiers.slopes[0])]
    distance = (torch.arange(sk) - sk - (torch.arange(sq)[:, None] - sq)).abs()
    scores = torch.einsum("bqhd,bkd->bhqk", leaves[0], leaves[1][:, :, 0]) * 0.25 - leaves[3][:, None, None] * distance
    out = torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), leaves[2][:, :, 0])
    wanted = out.detach(), *torch.autograd.grad(out, leaves, dout.double())
    for x, y in zip((state[0], *gradients, sums.slopes[0]), wanted):
        assert (x.double() - y).norm() <= 3e-6 * y.norm()


def test_sinks():
    """Of rows with and without a live pair, and of heads with and without a sink."""
    generator = torch.Generator().manual_seed(0)
    out, row_max = torch.randn(2, 21, 3, 24, generator=generator), 9 * torch.randn(2, 3, 21, generator=generator)
    row_sum, sinks = 1 + torch.rand(2, 3, 21, generator=generator), torch.tensor([-1.0, 20.0, -torch.inf])
    row_max[:, :, 4], row_sum[:, :, 4], out[:, 4] = -torch.inf, 0.0, 0.0
    wanted = blocked.with_sinks(*(x.double() for x in (out, row_max, row_sum, sinks)))
    for x, y in zip(rk.with_sinks(out, row_max, row_sum, sinks), wanted):
        torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=1e-6)
    # a row that sees nothing but a sink, and one that does not see that either
    assert wanted[1][0, 1, 4] == 20 and wanted[2][0, 1, 4] == 1 and wanted[2][0, 2, 4] == 0
    statistics, delta = [x.float() for x in wanted[1:]], torch.randn(2, 3, 21, generator=generator)
    exact = local.sinks_gradient(*wanted[1:], delta.double(), sinks.double())
    assert exact[1] != 0 == exact[2]
    torch.testing.assert_close(rk.sinks_gradient(*statistics, delta, sinks).double(), exact, rtol=1e-6, atol=1e-6)


def test_numbers_of_pieces_are_spread_to_distances_and_added_up_again():
    """Of pieces that hold no distance here, one, and more than a block."""
    generator = torch.Generator().manual_seed(0)
    values, pieces = torch.randn(3, 5, generator=generator), torch.tensor([0, *[1] * 40, *[3] * 17], dtype=torch.int32)
    found = distances.spread(values, pieces)
    assert torch.equal(found, values[:, pieces.long()])
    totals, firsts = values.clone(), torch.tensor([0, 1, 41, 41, 58, 58], dtype=torch.int32)
    distances.add_to_pieces(totals, found, firsts)
    torch.testing.assert_close(totals, values * torch.tensor([2, 41, 1, 18, 1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batches", [1, 4])
def test_the_gradient_of_slopes_is_summed_over_the_batches_that_share_them(batches):
    slopes, found = torch.randn(batches, 21), torch.randn(4, 21, 18)
    of_each = found.sum(2)
    wanted = slopes - (of_each if batches == 4 else of_each.sum(0, keepdim=True))
    distances.subtract_distances(slopes, found)
    torch.testing.assert_close(slopes, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("parts", "n"), [(1, 1), (5, 3), (2, 16), (19, 33)])
def test_what_programs_found_is_added_up(parts, n):
    totals, found = torch.randn(3, n), torch.randn(2, 3, parts, n)
    wanted = totals + found.sum((0, 2))
    distances.add_sums(totals, found)
    torch.testing.assert_close(totals, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("launches", "count"), [(2, 1), (1, 3), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((1, 1), (2, 3)))]
)
def test_rows_that_leave_count_their_sink_once(launches, count):
    """Of whole blocks and of splits, with a state or without; rows from 70 on have no live pair."""
    q, k, v, _ = inputs(2, 150, 300, 3, 1, 16, 24)
    sinks = torch.tensor([-1.0, 30.0, -torch.inf])
    tiles = np.array([(0, 70, 0, 300, -200, -40), (66, 70, 0, 300, -300, 300)])
    tables = [rk.TileTable(tiles[n::launches], 150, 300) for n in range(launches)]
    state = None
    for n, table in enumerate(tables):
        options = dict(state=state, final=n == launches - 1, splits=count)
        state = rk.forward(q, k, v, table, softmax_scale=0.3, sinks=sinks, **options)
    whole = rk.TileTable(tiles, 150, 300)
    wanted = blocked.forward(q.double(), k.double(), v.double(), whole, softmax_scale=0.3, sinks=sinks)
    for x, y in zip(state, wanted):
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=2e-6)
    out, row_max, row_sum = state
    assert not out[:, 70:].any()
    torch.testing.assert_close(row_max[:, :, 70:], sinks[:, None].expand(2, 3, 80))
    torch.testing.assert_close(row_sum[:, :, 70:], torch.tensor([1.0, 1.0, 0.0])[:, None].expand(2, 3, 80))


@pytest.mark.parametrize("counts", [(300, 64), (1, 65), (0, 130)])
def test_pairs_are_added_and_rounded_in_one_launch(counts):
    generator = torch.Generator().manual_seed(0)
    totals, more = (tuple(torch.randn(n, 2, generator=generator) for n in counts) for _ in range(2))
    wanted = [x + y for x, y in zip(totals, more)]
    rk.add_pair(totals, more)
    assert all(map(torch.equal, totals, wanted))
    turned = tuple(x.t() for x in totals)
    rounded = rk.rounded_pair(turned, torch.float16)
    assert all(torch.equal(x, y.half()) and x.stride() == y.stride() for x, y in zip(rounded, turned))
    rk.zero(*turned)
    assert not any(x.any() for x in totals)
    rk.zero(more[0].t())
    assert not more[0].any()


@pytest.mark.parametrize("arrivals", range(5))
@pytest.mark.some(2)
def test_pairs_that_have_come_are_added_in_turn_as_their_sum_is_rounded(arrivals):
    """Each to numbers of its own, of which some blocks hold none, some all, and some a part."""
    generator = torch.Generator().manual_seed(arrivals)
    counts = 300, 130
    totals = tuple(torch.randn(n, generator=generator) for n in counts)
    spans = [((0, 0), (300, 130)), ((70, 64), (200, 66)), ((1, 129), (64, 1)), ((299, 0), (1, 2)), ((128, 3), (64, 0))][:arrivals]
    more = [(tuple(1e3 * torch.randn(n, generator=generator) for n in sizes), begins) for begins, sizes in spans]
    wanted = [x.clone() for x in totals]
    for pair, begins in more:
        for total, x, begin in zip(wanted, pair, begins):
            total[begin : begin + len(x)] += x
    found = rk.rounded_pair(totals, torch.float16, more)
    assert all(torch.equal(x, y.half()) for x, y in zip(found, wanted))


class OnGpu(torch.Tensor):
    """A tensor of a CPU that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("scattered", [None, 0, 1])
@pytest.mark.parametrize("spans", [1, 3, 5])
@pytest.mark.some(4)
def test_sums_that_came_home_are_added_to_their_rows_and_rounded(spans, scattered, monkeypatch):
    """In one launch behind the last rows that are scattered, which are added alone."""
    generator = torch.Generator().manual_seed(spans)
    rows = [Rows.span(i, i + 3) for i in range(spans)]
    if scattered is not None:
        rows.insert(scattered, Rows(np.array([[0, 1], [4, 6]])))
    totals, *more = (tuple(torch.randn(n, 1, 2, d, generator=generator) for d in (4, 3)) for n in (10, *map(len, rows)))
    wanted = [x.clone() for x in totals]
    for pair, where in zip(more, rows):
        for total, x in zip(wanted, pair):
            where.add_to(total, x)
    alone, rounded_pair = [], rk.rounded_pair

    def plain(pair):
        return tuple(x.as_subclass(torch.Tensor) for x in pair)

    def add(totals, pair, where):
        alone.append(where)
        for total, x in zip(plain(totals), pair):
            where.add_to(total, x)

    monkeypatch.setattr(local, "add", add)
    monkeypatch.setattr(rk, "rounded_pair", lambda totals, dtype, more=(): rounded_pair(plain(totals), dtype, more))
    found = local.rounded_sums(tuple(x.as_subclass(OnGpu) for x in totals), list(zip(more, rows)), torch.float16)
    assert all(torch.equal(x, y.half()) for x, y in zip(found, wanted))
    assert alone == rows[: 0 if scattered is None else scattered + 1]


@pytest.mark.parametrize("rows", [7, 0])
def test_scattered_rows_of_a_pair_are_taken_and_added_to_in_one_launch(rows):
    generator = torch.Generator().manual_seed(0)
    # batch first in memory, and heads apart
    k, v = (torch.randn(2, 11, 5, d, generator=generator)[:, :, 1:4].transpose(0, 1) for d in (24, 8))
    index = torch.randperm(11, generator=generator)[:rows]
    taken = rk.take_rows((k, v), index)
    assert all(x.is_contiguous() and torch.equal(x, y[index]) for x, y in zip(taken, (k, v)))
    whole = rk.take_rows((k, v))
    assert all(x.is_contiguous() and torch.equal(x, y) for x, y in zip(whole, (k, v)))
    rk.add_rows(whole, taken, index)
    for x, y in zip(whole, (k, v)):
        wanted = y.contiguous()
        wanted[index] += y[index]
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("rows_first", [False, True], ids=["as launches leave them", "as messages come"])
def test_partials_of_the_same_rows_are_merged(rows_first):
    generator = torch.Generator().manual_seed(0)

    def partial(empty):
        out = torch.randn(2, 21, 3, 24, generator=generator)
        row_max, row_sum = 9 * torch.randn(2, 3, 21, generator=generator), 1 + torch.rand(2, 3, 21, generator=generator)
        # two of them have the greatest logits that fp32 tells apart
        row_max[0, 0, :2] += 2.5e5
        out[:, empty], row_max[:, :, empty], row_sum[:, :, empty] = 0.0, -torch.inf, 0.0
        return out, row_max, row_sum

    totals, more = partial([4, 5]), partial([5, 20])
    wanted = merge(*(Partial(*(x.double() for x in part)) for part in (totals, more)))
    totals, more = ((out.transpose(0, 1), *(x.permute(2, 0, 1) for x in stats)) for out, *stats in (totals, more))
    totals = tuple(x.contiguous() for x in totals)
    rk.merge_rows(totals, tuple(x.contiguous() for x in more) if rows_first else more)
    for x, y in zip(totals, (wanted.out.transpose(0, 1), *(z.permute(2, 0, 1) for z in (wanted.row_max, wanted.row_sum)))):
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("drow_sum", [None, "each its own", "one for all"])
def test_what_a_backward_pass_reads_of_its_rows(drow_sum):
    """The gradient of a sum of row_sum is one number, which autograd gives as a view of many."""
    generator = torch.Generator().manual_seed(0)
    q, out, dout = (torch.randn(2, 63, 3, 16, generator=generator) for _ in range(3))
    row_max, row_sum = torch.randn(2, 3, 63, generator=generator), torch.rand(2, 3, 63, generator=generator)
    given = {
        None: None,
        "each its own": torch.randn(2, 3, 63, generator=generator),
        "one for all": torch.tensor(0.5).expand(2, 3, 63),
    }
    queries = rk.ready_queries(q, out, dout, row_max, row_sum, given[drow_sum])
    expected = (out * dout).sum(-1).transpose(1, 2) - (0.0 if drow_sum is None else given[drow_sum] * row_sum)
    torch.testing.assert_close(queries.delta, expected, atol=3e-6, rtol=0)


def test_launches_of_random_tables_as_on_a_gpu():
    fuzz.launch_many(range(2), fuzz.INTERPRETER, seconds=60)


@pytest.mark.parametrize(
    "head_dims", [(1, 1), (8, 3), (17, 40), (96, 64), (192, 128), (256, 256), (512, 512), (300, 257), (64, 512)], ids=str
)
@pytest.mark.some(4)
def test_head_dims(head_dims):
    compare(*inputs(1, 33, 33, 1, 1, *head_dims), dense.causal(33), head_dims[0] ** -0.5)


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_wide_heads_in_16_bits(parts):
    compare(*inputs(1, 40, 40, 2, 1, 512, 320, torch.float16), dense.documents(13, 1, 26), 512**-0.5, parts)


@pytest.mark.parametrize(("h", "hk"), [(2, 2), (3, 1), pytest.param(4, 2, marks=pytest.mark.thorough)])
def test_head_groups_and_batches(h, hk):
    compare(*inputs(2, 20, 31, h, hk, 16, 16), dense.full(20, 31), 0.25)


def test_keys_and_values_as_views_of_another_order():
    q, k, v, dout = inputs(2, 40, 40, 2, 2, 16, 16)
    k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    compare(q, k, v, dout, dense.causal(40), 0.25)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.5, 30.0])
def test_any_scale(softmax_scale):
    compare(*inputs(1, 40, 40, 1, 1, 16, 16), dense.causal(40), softmax_scale)


@pytest.mark.parametrize("logit", [2.5e5, *(pytest.param(logit, marks=pytest.mark.thorough) for logit in (0.0, 1e2, -1e2, -2.5e5))])
def test_equal_huge_logits_average_exactly_over_launches(logit):
    q, k, v, dout = inputs(1, 10, 100, 1, 1, 16, 16)
    q.fill_(1.0)
    k.fill_(logit / 16)
    tables = [rk.TileTable(np.array([(0, 10, a, b, -100, 10)]), 10, 100) for a, b in ((0, 33), (33, 34), (34, 100))]
    got = run(q, k, v, dout, tables, 0.37)
    mean = v.mean(1, keepdim=True).expand_as(got.out)
    torch.testing.assert_close(got.out, mean, rtol=0, atol=3e-7)
    # dv = P^T dout with P = 1/100 in every place
    torch.testing.assert_close(got.dv, (dout.sum(1, keepdim=True) / 100).expand_as(v), rtol=0, atol=3e-7)


@pytest.mark.parametrize("size", [1e2, 2.5e5])
def test_one_huge_logit_takes_all(size):
    q, k, v, dout = inputs(1, 7, 50, 1, 1, 16, 16)
    q.fill_(1.0)
    k.fill_(-size / 16)
    k[:, 20] = size / 16
    tables = [rk.TileTable(np.array([(0, 7, a, b, -50, 7)]), 7, 50) for a, b in ((0, 15), (15, 30), (30, 50))]
    got = run(q, k, v, dout, tables, 1.0)
    torch.testing.assert_close(got.out, v[:, 20:21].expand_as(got.out), rtol=0, atol=1e-7)
    torch.testing.assert_close(got.row_max, torch.full_like(got.row_max, size))
    for x in (got.dq, got.dk):
        torch.testing.assert_close(x, torch.zeros_like(x), rtol=0, atol=1e-2)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_state_leaves_untouched_rows_as_they_were(splits):
    q, k, v, _ = inputs(1, 150, 40, 1, 1, 16, 16)
    state = rk.forward(q, k, v, rk.TileTable(np.array(dense.full(150, 20)), 150, 40), softmax_scale=0.3, final=False)
    before = [x.clone() for x in state]
    table = rk.TileTable(np.array([(0, 10, 0, 40, -40, 10)]), 150, 40)
    out, row_max, row_sum = rk.forward(q, k, v, table, softmax_scale=0.3, state=state, final=False, splits=splits)
    # the same tensors, in place; rows of other blocks bit for bit
    assert all(x is y for x, y in zip((out, row_max, row_sum), state))
    assert torch.equal(out[:, 64:], before[0][:, 64:])
    assert torch.equal(row_max[..., 64:], before[1][..., 64:])
    assert torch.equal(row_sum[..., 64:], before[2][..., 64:])
    assert not torch.equal(out[:, :10], before[0][:, :10])


def test_garbage_outside_of_the_tiles_is_never_read():
    q, k, v, dout = inputs(1, 70, 90, 1, 1, 16, 16)
    tiles = [(5, 60, 20, 75, -30, 20)]
    live = dense.live_pairs(tiles, 70, 90)
    clean = run(q, k, v, dout, [rk.TileTable(np.array(tiles), 70, 90)], 0.3)
    k[:, ~live.any(0)] = float("nan")
    v[:, ~live.any(0)] = float("inf")
    dirty = run(q, k, v, dout, [rk.TileTable(np.array(tiles), 70, 90)], 0.3)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name


def test_empty_inputs():
    for sq, sk in ((0, 5), (5, 0), (0, 0)):
        compare(*inputs(1, sq, sk, 1, 1, 16, 16), [], 0.3)


def in_register_order(dq):
    """Sums in the order of `hopper.dq_sums.add_dq`: 64 x 64 parts, in which a lane's four numbers are side by side."""
    parts = dq.unflatten(1, (-1, 64)).unflatten(3, (-1, 64)).transpose(2, 3).reshape(-1, 64, 64)
    order = torch.empty(64, 64, dtype=torch.long)
    for row, column in np.ndindex(64, 64):
        warp, half, lane_row = row // 16, row // 8 % 2, row % 8
        group, pair, odd = column // 8, column // 2 % 4, column % 2
        register = group * 4 + half * 2 + odd
        thread = warp * 32 + lane_row * 4 + pair
        order[row, column] = register // 4 * 512 + thread * 4 + register % 4
    sums = torch.empty(len(parts), 4096)
    sums[:, order.flatten()] = parts.flatten(1)
    return sums.view(dq.shape)


@pytest.mark.parametrize(("d", "columns"), [(64, 64), (128, 128), (128, 104)])
@pytest.mark.parametrize("add", [True, False])
def test_the_sums_of_the_fused_kernel_come_back_in_the_order_of_rows(d, columns, add):
    """Of a head dim that is computed as a larger one, some columns."""
    b, h, q_rows, padded_rows = 2, 3, 150, 256
    expected = torch.randn(b, h, padded_rows, d, generator=torch.Generator().manual_seed(0))
    # d = 128: 64 rows are two parts, by columns; d = 64: one
    sums = in_register_order(expected.reshape(b * h, padded_rows, d))
    wide = torch.full((q_rows, b, h, d), 0.5).transpose(0, 1)
    dq = wide[..., :columns]
    finish(sums, dq, 0.25, add)
    expected = expected[:, :, :q_rows, :columns].transpose(1, 2) * 0.25
    assert (wide[..., columns:] == 0.5).all()
    assert torch.equal(dq, expected + 0.5 if add else expected)


@pytest.mark.parametrize("plain", ["before", "after", "never"])
@pytest.mark.parametrize(("d", "q_rows"), [(64, 1), (128, 129), pytest.param(64, 128, marks=pytest.mark.thorough)])
@pytest.mark.some(3)
def test_sums_of_different_kernels_are_one_dq(d, q_rows, plain):
    q, k, v, dout = inputs(2, q_rows, 2, 2, 1, d, d, torch.float16)
    expected = torch.randn(2, 2, -(-q_rows // 128) * 128, d, generator=torch.Generator().manual_seed(0))
    sums = rk.QuerySums(q, 0.25)
    other = torch.zeros(q.shape)

    def add_plain():
        table = rk.TileTable(np.array(dense.full(q_rows, 2)), q_rows, 2)
        out, row_max, row_sum = rk.forward(q, k, v, table, softmax_scale=0.25)
        queries = rk.Queries(q, dout, row_max, row_sum, rk.delta(out, dout))
        for dq in (sums, other):
            dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
            rk.backward(queries, k, v, table, softmax_scale=0.25, dq=dq, dk=dk, dv=dv)

    if plain == "before":
        add_plain()
    sums.permuted(d).add_(in_register_order(expected.flatten(0, 1)))
    if plain == "after":
        add_plain()
    sums.permuted(d).add_(in_register_order(expected.flatten(0, 1)))
    dq = sums.finish(torch.float16)
    wanted = expected[:, :, :q_rows].transpose(1, 2) * 0.5 + other
    assert dq.dtype == torch.float16
    torch.testing.assert_close(dq, wanted.half(), rtol=2**-10, atol=1e-6)


def test_sums_of_nothing_are_zeros():
    q, *_ = inputs(1, 5, 5, 1, 1, 16, 16, torch.float16)
    dq = rk.QuerySums(q, 0.25).finish(torch.float16)
    assert dq.dtype == torch.float16
    assert torch.equal(dq, torch.zeros_like(q))


def test_rows_of_one_launch_are_written_in_their_last_dtype():
    q, k, v, dout = inputs(1, 40, 40, 1, 1, 16, 16, torch.float16)
    table = rk.TileTable(np.array(dense.causal(30)), 40, 40)
    out, row_max, row_sum = rk.forward(q, k, v, table, softmax_scale=0.25)
    arguments = (rk.Queries(q, dout, row_max, row_sum, rk.delta(out, dout)), k, v, table)
    sums, dk, dv = rk.QuerySums(q, 0.25, torch.float16), transposed(k), transposed(v)
    rk.backward(*arguments, softmax_scale=0.25, dq=sums, dk=dk, dv=dv, add=False)
    rows, _ = sums.rows()
    dq = sums.finish(torch.float16)
    assert dq.data_ptr() == rows.data_ptr()
    wanted = torch.zeros(q.shape)
    rk.backward(*arguments, softmax_scale=0.25, dq=wanted, dk=dk, dv=dv)
    assert torch.equal(dq, wanted.half())
