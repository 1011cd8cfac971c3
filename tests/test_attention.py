"""Ring attention against the dense oracle, on each rank by itself. Ranks are threads, so every world size runs in one process."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.runtime.context import _kept
from ringattn.schedule.instructions import Zero
from ringattn.schedule.program import compile_program
from ringattn.transport import run_ranks
from tests.allocation import Peak
from tests.fuzz import strided

SCHEDULES = {"ring": ra.ring(), "gather": ra.gather(), "waves": ra.waves(2), "double-ring": ra.double_ring(), "default": None}
RANKS_PER_NODE = {4: 2, 6: 3, 8: 4}
NAMES = ("out", "lse", "dq", "dk", "dv")


pytestmark = pytest.mark.usefixtures("one_thread")


class Shape(NamedTuple):
    b: int = 1
    h: int = 2
    hk: int = 1
    d: int = 8
    d_v: int = 8


SMALL = Shape()


def make_inputs(seq_len, shape=SMALL, dtype=torch.float64, seed=0):
    """q, k, v and dout of a whole sequence."""
    b, h, hk, d, d_v = shape
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, seq_len, h, d), (b, seq_len, hk, d), (b, seq_len, hk, d_v), (b, seq_len, h, d_v)
    return [torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for size in shapes]


def dense(q, k, v, dout, mask, dlse=None, **options):
    """The oracle's out, lse, dq, dk, dv of the whole sequence."""
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    out, stats = ra.reference.attention(*tensors, mask=mask, return_stats=True, **options)
    outputs, gradients = ((out,), (dout,)) if dlse is None else ((out, stats.lse), (dout, dlse))
    return out.detach(), stats.lse.detach(), *torch.autograd.grad(outputs, tensors, gradients)


def ring(q, k, v, dout, mask, layout, schedule=None, dlse=None, **options):
    """Each rank's out, lse, dq, dk, dv."""

    def work(transport):
        mine = [ra.shard(x.detach(), layout, transport.rank) for x in (q, k, v, dout)]
        tensors = [x.requires_grad_() for x in mine[:3]]
        out, stats = ra.ring_attention(
            *tensors, layout=layout, mask=mask, group=transport, schedule=schedule, return_stats=True, **options
        )
        outputs, gradients = (out,), (mine[3],)
        if dlse is not None:
            outputs, gradients = (out, stats.lse), (mine[3], ra.shard(dlse, layout, transport.rank, dim=2))
        return out.detach(), stats.lse.detach(), *torch.autograd.grad(outputs, tensors, gradients)

    return run_ranks(layout.world_size, work, RANKS_PER_NODE.get(layout.world_size))


def shards_of(whole, layout, rank):
    """A rank's part of out, lse, dq, dk, dv."""
    return [ra.shard(x, layout, rank, dim=2 if name == "lse" else 1) for name, x in zip(NAMES, whole)]


def assert_every_rank(ranks, whole, layout, tolerance=1e-10):
    for rank, got in enumerate(ranks):
        for name, x, wanted in zip(NAMES, got, shards_of(whole, layout, rank)):
            assert x.shape == wanted.shape, (rank, name)
            torch.testing.assert_close(
                x, wanted, rtol=0, atol=tolerance, msg=lambda text, rank=rank, name=name: f"{name} on rank {rank}: {text}"
            )


# the matrix: every pair of values of two columns meets in some row


def custom_layout(seq_len, world_size):
    """Uneven shards of mixed strides, out of order; the last rank has nothing."""
    half, holders = seq_len // 2, max(1, world_size - 1)
    pieces = [ra.Span(half + i, len(range(half + i, seq_len, 3)), 3) for i in range(3) if half + i < seq_len]
    pieces += [ra.Span(i, len(range(i, half, 2)), 2) for i in range(2) if i < half]
    cut = [
        part
        for p in pieces
        for part in (
            ra.Span(p.start, p.length // 3, p.stride),
            ra.Span(p.start + p.stride * (p.length // 3), p.length - p.length // 3, p.stride),
        )
    ]
    shards = [tuple(cut[rank::holders]) for rank in range(holders)] + [()] * (world_size - holders)
    return ra.Layout(seq_len, tuple(shards))


def random_blocks(seq_len):
    size = max(16, seq_len // 10)
    n = -(-seq_len // size)
    return ra.block_sparse(np.random.default_rng(n).random((n, n)) < 0.3, size)


MASKS = {
    "causal": lambda n: ra.causal(),
    "full": lambda n: ra.full(),
    "window": lambda n: ra.sliding_window(33, 7),
    "window-causal": lambda n: ra.sliding_window(20),
    "documents": lambda n: ra.documents(lengths=[n // 3, 0, min(n, 1), n // 5, n - n // 3 - min(n, 1) - n // 5]),
    "documents-window-and-padding": lambda n: ra.documents(lengths=[n // 4, n // 2], causal=False, window=(9, 4)),
    "prefix": lambda n: ra.prefix(n // 3),
    "longformer": lambda n: ra.global_tokens([p for p in (0, 5, 90) if p < n]) | ra.sliding_window(6, 6),
    "dilated": lambda n: ra.dilated_window((5, 2), 3),
    "block-sparse": random_blocks,
    "bigbird-causal": lambda n: ra.bigbird(n, max(8, n // 10), global_blocks=1, random_blocks=2) & ra.causal(),
    "nothing": lambda n: ra.documents([0]),
}
LAYOUTS = {
    "contiguous": lambda mask, n, p: ra.contiguous(n, p),
    "zigzag": lambda mask, n, p: ra.zigzag(n, p),
    "striped": lambda mask, n, p: ra.striped(n, p),
    "balanced": ra.balanced,
    "custom": lambda mask, n, p: custom_layout(n, p),
}
COLUMNS = {
    "world_size": [1, 2, 3, 4, 5, 6, 7, 8],
    "layout": list(LAYOUTS),
    "mask": list(MASKS),
    "schedule": list(SCHEDULES),
    "seq_len": [0, 1, 2, 17, 97, 127, 129, 257, 1025],
    "shape": [Shape(), Shape(b=2, h=2, hk=2, d=5, d_v=3), Shape(h=4, hk=2, d=1, d_v=12), Shape(h=3, hk=1, d=17, d_v=1)],
}


def pairwise(columns, seed=0):
    """Rows in which every two values of different columns meet: greedy, the best of some random rows each time."""
    generator = np.random.default_rng(seed)
    sizes = [len(values) for values in columns.values()]
    pairs = list(itertools.combinations(range(len(sizes)), 2))
    missing = {(a, i, b, j) for a, b in pairs for i in range(sizes[a]) for j in range(sizes[b])}
    rows = []
    while missing:
        a, i, b, j = min(missing)
        best: tuple[set, list] = (set(), [])
        for _ in range(40):
            row = [int(generator.integers(size)) for size in sizes]
            row[a], row[b] = i, j
            met = {(a, row[a], b, row[b]) for a, b in pairs} & missing
            best = max(best, (met, row), key=lambda candidate: len(candidate[0]))
        missing -= best[0]
        rows.append([values[at] for values, at in zip(columns.values(), best[1])])
    return rows


ROWS = pairwise(COLUMNS)


def test_the_matrix_holds_every_pair():
    columns = list(COLUMNS.values())
    for a, b in itertools.combinations(range(len(columns)), 2):
        assert {(str(row[a]), str(row[b])) for row in ROWS} == {(str(x), str(y)) for x in columns[a] for y in columns[b]}


@pytest.mark.parametrize(
    ("world_size", "layout", "mask", "schedule", "seq_len", "shape"),
    ROWS,
    ids=["-".join(map(str, row[:5])) + "-" + "x".join(map(str, row[5])) for row in ROWS],
)
@pytest.mark.some(40)
def test_every_rank_is_exact(world_size, layout, mask, schedule, seq_len, shape):
    live = MASKS[mask](seq_len)
    q, k, v, dout = make_inputs(seq_len, shape)
    spread = LAYOUTS[layout](live, seq_len, world_size)
    got = ring(q, k, v, dout, live, spread, SCHEDULES[schedule])
    assert_every_rank(got, dense(q, k, v, dout, live), spread)


def test_the_oracle_is_the_textbook_formula():
    """Computes one number at a time, for two masks and grouped heads."""
    q, k, v, _ = make_inputs(9, Shape(b=2, h=4, hk=2, d=3, d_v=2))
    for mask in (ra.causal(), ra.documents([4, 3])):
        live = mask.dense(9)
        out, stats = ra.reference.attention(q, k, v, mask=mask, softmax_scale=0.7, return_stats=True)
        for i, s, h in itertools.product(range(2), range(9), range(4)):
            scores = {j: 0.7 * float(q[i, s, h] @ k[i, j, h // 2]) for j in range(9) if live[s, j]}
            total = sum(math.exp(score) for score in scores.values())
            wanted = sum((math.exp(scores[j]) / total * v[i, j, h // 2] for j in scores), torch.zeros(2, dtype=torch.float64))
            torch.testing.assert_close(out[i, s, h], wanted, rtol=1e-13, atol=1e-13)
            assert float(stats.lse[i, h, s]) == pytest.approx(math.log(total) if scores else -math.inf, abs=1e-13)


# statistics

SOME_WORLDS = pytest.mark.parametrize("world_size", [1, 3, 8])


@SOME_WORLDS
@pytest.mark.parametrize("mask", [ra.causal(), ra.documents([30, 50]), ra.dilated_window(3, 2)], ids=repr)
def test_stats_are_those_of_the_oracle(mask, world_size):
    q, k, v, _ = make_inputs(97)
    layout = ra.zigzag(97, world_size)
    wanted = ra.reference.attention(q, k, v, mask=mask, return_stats=True)[1]

    def work(transport):
        mine = [ra.shard(x, layout, transport.rank) for x in (q, k, v)]
        return ra.ring_attention(*mine, layout=layout, mask=mask, group=transport, return_stats=True)[1]

    for rank, stats in enumerate(run_ranks(world_size, work)):
        for name in ("row_max", "row_sum", "lse"):
            x, y = getattr(stats, name), ra.shard(getattr(wanted, name), layout, rank, dim=2)
            assert x.dtype == torch.float64
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@SOME_WORLDS
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", [ra.causal(), ra.dilated_window((5, 2), 3)], ids=repr)
@pytest.mark.some(10)
def test_gradients_flow_through_lse(mask, schedule, world_size):
    q, k, v, dout = make_inputs(61)
    dlse = torch.randn(1, 2, 61, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layout = ra.zigzag(61, world_size)
    got = ring(q, k, v, dout, mask, layout, SCHEDULES[schedule], dlse=dlse)
    assert_every_rank(got, dense(q, k, v, dout, mask, dlse=dlse), layout)


def test_gradients_of_lse_alone():
    q, k, v, _ = make_inputs(31)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(ra.ring_attention(*tensors, return_stats=True)[1].lse.sum(), tensors)
    wanted = torch.autograd.grad(ra.reference.attention(*tensors, return_stats=True)[1].lse.sum(), tensors[:2])
    torch.testing.assert_close(got[:2], wanted, rtol=0, atol=1e-12)
    assert not got[2].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_stats_are_float32_and_lse_is_the_logsumexp(dtype):
    q, k, v, _ = make_inputs(300, Shape(d=64), dtype)
    _, stats = ra.ring_attention(q, k, v, return_stats=True)
    assert stats.row_max.dtype == stats.row_sum.dtype == stats.lse.dtype == torch.float32
    wanted = ra.reference.attention(q.double(), k.double(), v.double(), return_stats=True)[1].lse
    torch.testing.assert_close(stats.lse.double(), wanted, rtol=0, atol=1e-5)


# gradients

GRADCHECK_MASKS = [ra.causal(), ra.sliding_window(1, 1), ra.documents([2]), ra.dilated_window(1, 2)]


@pytest.mark.parametrize("mask", GRADCHECK_MASKS, ids=repr)
def test_gradcheck(mask):
    tensors = [x.requires_grad_() for x in make_inputs(4, Shape(h=2, hk=1, d=2, d_v=3))[:3]]
    torch.autograd.gradcheck(lambda q, k, v: ra.ring_attention(q, k, v, mask=mask, softmax_scale=0.9), tensors)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.some(2)
def test_dout_on_one_rank_only(schedule):
    q, k, v, dout = make_inputs(97)
    layout = ra.zigzag(97, 5)
    for rank in range(5):
        alone = torch.zeros_like(dout)
        alone[:, layout.positions(rank)] = dout[:, layout.positions(rank)]
        got = ring(q, k, v, alone, ra.causal(), layout, SCHEDULES[schedule])
        assert_every_rank(got, dense(q, k, v, alone, ra.causal()), layout)
        assert all(not dq.any() for other, (_, _, dq, _, _) in enumerate(got) if other != rank)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.some(2)
def test_values_on_one_rank_only(schedule):
    q, k, v, dout = make_inputs(97)
    layout = ra.striped(97, 4)
    for rank in range(4):
        alone = torch.zeros_like(v)
        alone[:, layout.positions(rank)] = v[:, layout.positions(rank)]
        got = ring(q, k, alone, dout, ra.full(), layout, SCHEDULES[schedule])
        assert_every_rank(got, dense(q, k, alone, dout, ra.full()), layout)
        assert all(out.any() for out, *_ in got)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_gradients_of_one_input_only(wanted):
    q, k, v, dout = make_inputs(33)
    gradients = dict(zip("qkv", dense(q, k, v, dout, ra.causal())[2:]))
    layout = ra.zigzag(33, 3)

    def work(transport):
        mine = {name: ra.shard(x, layout, transport.rank) for name, x in zip("qkv", (q, k, v))}
        mine[wanted].requires_grad_()
        out = ra.ring_attention(**mine, layout=layout, group=transport)
        return torch.autograd.grad(out, mine[wanted], ra.shard(dout, layout, transport.rank))[0]

    for rank, got in enumerate(run_ranks(3, work)):
        torch.testing.assert_close(got, ra.shard(gradients[wanted], layout, rank), rtol=0, atol=1e-10)


def test_two_backward_passes_add_up():
    q, k, v, dout = make_inputs(33)
    q.requires_grad_()
    out = ra.ring_attention(q, k, v)
    out.backward(dout, retain_graph=True)
    once = q.grad.clone()
    out.backward(dout)
    assert torch.equal(q.grad, 2 * once)


@pytest.fixture
def empty_is_nan():
    """Deterministic mode fills new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(2).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        (ra.zigzag(64, 4), ra.causal()),
        (custom_layout(61, 4), ra.full()),
        # keys that no query sees, and keys that only other ranks' queries see
        (ra.contiguous(64, 4), ra.documents([20, 30], causal=False) & ra.sliding_window(9, 7)),
        (ra.contiguous(64, 4), ra.prefix(5)),
    ],
    ids=["causal", "full", "padding", "prefix"],
)
@pytest.mark.some(8)
def test_no_gradient_reads_memory_that_was_not_written(layout, mask, schedule, empty_is_nan):
    inputs = make_inputs(layout.seq_len)
    assert_every_rank(ring(*inputs, mask, layout, SCHEDULES[schedule]), dense(*inputs, mask), layout)


def test_sums_that_others_add_to_before_the_last_launch_begin_at_zero(empty_is_nan):
    layout = ra.zigzag(64, 8)
    program = compile_program(ra.waves(1), ra.make_plan(layout, ra.full()), 0)
    assert any(isinstance(x, Zero) for x in program.backward.instructions)
    inputs = make_inputs(64)
    assert_every_rank(ring(*inputs, ra.full(), layout, ra.waves(1)), dense(*inputs, ra.full()), layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_nothing(dtype):
    q, k, v, dout = make_inputs(65, dtype=dtype)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, stats = ra.ring_attention(*tensors, return_stats=True)
            part = ra.merge(ra.attend(*tensors), ra.attend(*tensors, mask=ra.full()))
            results.append((out, stats.lse, part.out, part.row_sum, *torch.autograd.grad(out, tensors, dout)))
    for plain, cast in zip(*results):
        assert plain.dtype == cast.dtype
        assert torch.equal(plain, cast)


# known values


@SOME_WORLDS
def test_uniform_weights_average_the_values(world_size):
    q, k, v, _ = make_inputs(65)
    layout = ra.zigzag(65, world_size)
    means = v.cumsum(1) / torch.arange(1, 66).reshape(-1, 1, 1)
    for rank, (out, lse, *_) in enumerate(ring(0 * q, k, v, q, ra.causal(), layout)):
        torch.testing.assert_close(out, ra.shard(means, layout, rank).expand_as(out), rtol=0, atol=1e-13)
        torch.testing.assert_close(lse, (layout.positions(rank) + 1.0).double().log().expand_as(lse), rtol=0, atol=1e-13)


@SOME_WORLDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.some(4)
def test_one_hot_weights_pick_a_value(world_size, dtype):
    """Each query points at one key, whose score is 200 above all others."""
    seq_len = 32
    v = make_inputs(seq_len, dtype=dtype)[2]
    target = torch.randint(seq_len, (seq_len,), generator=torch.Generator().manual_seed(0))
    k = torch.eye(seq_len, dtype=dtype).reshape(1, seq_len, 1, seq_len)
    q = k[:, target]
    layout = ra.zigzag(seq_len, world_size)
    dout = make_inputs(seq_len, Shape(h=1), dtype)[3]
    counts = torch.zeros_like(dout, dtype=torch.float64).index_add_(1, target, dout.double()).to(dtype)
    for rank, (out, _, dq, dk, dv) in enumerate(ring(q, k, v, dout, ra.full(), layout, softmax_scale=200.0)):
        assert torch.equal(out, v[:, target[layout.positions(rank)]])
        torch.testing.assert_close(dv, ra.shard(counts, layout, rank))
        # dP - delta is 0 up to the rounding of two sums of 8 products, which the scale makes 200 times larger
        bound = 1e-12 if dtype == torch.float64 else 1e-3
        assert max(float(x.abs().amax()) for x in (dq, dk)) < bound


@SOME_WORLDS
@pytest.mark.parametrize("mask", [ra.causal(), ra.sliding_window(9, 3)], ids=repr)
@pytest.mark.some(3)
def test_a_constant_value_comes_out(mask, world_size):
    q, k, v, dout = make_inputs(65)
    layout = ra.striped(65, world_size)
    for out, _, dq, dk, _ in ring(q, k, torch.full_like(v, 3.5), dout, mask, layout):
        torch.testing.assert_close(out, torch.full_like(out, 3.5), rtol=0, atol=1e-13)
        # scores do not change the output, so their gradients are 0
        assert max(float(x.abs().amax()) for x in (dq, dk)) < 1e-12


@pytest.mark.parametrize("largest", [1e2, 1e3, 1e4, 2.5e5])
@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.some(4)
def test_large_logits(largest, schedule):
    q, k, v, dout = make_inputs(97)
    scale = largest / float(torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]).abs().max())
    layout = ra.zigzag(97, 5)
    got = ring(q, k, v, dout, ra.causal(), layout, SCHEDULES[schedule], softmax_scale=scale)
    # a score of 2.5e5 is rounded by 3e-11, which exp turns into a relative error of the weights
    assert_every_rank(
        got, dense(q, k, v, dout, ra.causal(), softmax_scale=scale), layout, tolerance=1e-15 * largest * scale + 1e-10
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_logits_are_finite_in_low_precision(dtype):
    q, k, v, dout = make_inputs(97, dtype=dtype)
    for scale in (1e2, -1e2, 2e4, -2e4):
        for out, lse, *gradients in ring(q, k, v, dout, ra.causal(), ra.zigzag(97, 3), softmax_scale=scale):
            assert out.isfinite().all()
            assert lse.isfinite().all()
            assert out.abs().max() <= v.abs().max()
            assert all(not x.isnan().any() for x in gradients)


@pytest.mark.parametrize("deviation", [1e2, 1e3, 1e4, 1e5, 3e5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.some(6)
def test_saturated_logits_are_as_exact_as_in_dense_attention(dtype, deviation):
    """Nearly all weights are 0 or 1. Errors are at most 2x (out) and 3x (gradients) those of dense attention in the same dtype."""
    q, k, v, dout = make_inputs(257, Shape(h=4, d=16, d_v=16))
    q, k, v, dout = (x.to(dtype) for x in (q * math.sqrt(deviation), k * math.sqrt(deviation), v, dout))
    exact = dense(*(x.double() for x in (q, k, v, dout)), ra.causal())
    plain = dense(q, k, v, dout, ra.causal())
    layout = ra.zigzag(257, 3)
    got = ring(q, k, v, dout, ra.causal(), layout)
    for at, name in enumerate(NAMES):
        wanted = [shards_of(exact, layout, rank)[at] for rank in range(3)]
        usual = largest_error([plain[at]], [exact[at]])
        # dense attention in fp16 overflows from 1e4 on
        allowed = (2 if name == "out" else 3) * (usual if math.isfinite(usual) else 0.1 * math.sqrt(deviation))
        # scores in fp64, and their gradients where dense attention has exactly 0
        floor = 1e-15 * deviation * (1 if name in ("out", "lse") else math.sqrt(deviation))
        assert largest_error([part[at] for part in got], wanted) <= allowed + floor, name


@SOME_WORLDS
@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_see_nothing_are_zero(world_size, schedule, dtype):
    """Padding, and queries whose blocks are all dead, give exact zeros and no NaN."""
    q, k, v, dout = make_inputs(80, dtype=dtype)
    mask = ra.documents([20, 11, 0, 9])
    layout = ra.zigzag(80, world_size)
    for rank, (out, lse, dq, dk, dv) in enumerate(ring(q, k, v, dout, mask, layout, SCHEDULES[schedule])):
        dead = layout.positions(rank) >= 40
        for x in (out, dq, dk, dv):
            assert not x[:, dead].any()
            assert x[:, ~dead].abs().amax(-1).all() or x is dq
        assert (lse[:, :, dead] == -math.inf).all()
        assert lse[:, :, ~dead].isfinite().all()


@pytest.mark.parametrize("layout", [ra.contiguous(70, 4), ra.zigzag(70, 4), ra.striped(70, 4), custom_layout(70, 4)], ids=repr)
@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float16, marks=pytest.mark.thorough)])
@pytest.mark.some(3)
def test_a_token_changes_nothing_before_it(layout, schedule, dtype):
    q, k, v, dout = make_inputs(70, dtype=dtype)
    before = ring(q, k, v, dout, ra.causal(), layout, SCHEDULES[schedule])
    for token in (1, 35, 69):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, token] = 100 * x[:, token] + 7
        after = ring(*changed, dout, ra.causal(), layout, SCHEDULES[schedule])
        for rank in range(4):
            earlier = layout.positions(rank) < token
            assert torch.equal(before[rank][0][:, earlier], after[rank][0][:, earlier])
            assert torch.equal(before[rank][1][:, :, earlier], after[rank][1][:, :, earlier])
            same = layout.positions(rank) == token
            assert not torch.equal(before[rank][0][:, same], after[rank][0][:, same]) or not same.any()


# low precision


def largest_error(got, wanted):
    return max((float((x.double() - y).abs().max()) for x, y in zip(got, wanted) if x.numel()), default=0.0)


def mean_error(got, wanted):
    """Root of the mean square over all ranks."""
    errors = torch.cat([(x.double() - y).flatten() for x, y in zip(got, wanted)])
    return float(errors.square().mean().sqrt())


@pytest.mark.parametrize("mask", [ra.causal(), ra.sliding_window(60, 20), ra.documents([100, 1, 156])], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.some(2)
def test_errors_are_those_of_dense_attention_and_do_not_grow_with_ranks(dtype, mask):
    """Errors are against float64 on the same rounded inputs. On each rank they are at most 2x (out) and 3x (gradients) those of dense
    attention in the same dtype; on 2 to 8 ranks at most 1.25x those of one rank.

    In 16 bits an error is also that of the worst element. In float32 that one depends on the order of a few sums.
    """
    q, k, v, dout = make_inputs(257, Shape(h=2, hk=1, d=32, d_v=32), dtype)
    exact = dense(*(x.double() for x in (q, k, v, dout)), mask)
    plain = dense(q, k, v, dout, mask)
    errors = {}
    for world_size in range(1, 9):
        layout = ra.zigzag(257, world_size)
        got = ring(q, k, v, dout, mask, layout, SCHEDULES["gather" if world_size in (3, 4, 7) else "ring"])
        wanted = [shards_of(exact, layout, rank) for rank in range(world_size)]
        usual = [shards_of(plain, layout, rank) for rank in range(world_size)]
        for at, name in enumerate(NAMES):
            if name != "lse":
                kinds = [mean_error] if dtype == torch.float32 else [mean_error, largest_error]
                for rank, kind in itertools.product(range(world_size), kinds):
                    allowed = (2 if name == "out" else 3) * kind([usual[rank][at]], [wanted[rank][at]])
                    assert kind([got[rank][at]], [wanted[rank][at]]) <= allowed, (name, rank, world_size)
            pair = [part[at] for part in got], [part[at] for part in wanted]
            errors[name, world_size] = (mean_error(*pair), largest_error(*pair))
    for name, world_size in itertools.product(NAMES, range(2, 9)):
        (mean, largest), (mean_of_many, largest_of_many) = errors[name, 1], errors[name, world_size]
        assert mean_of_many <= 1.25 * mean, (name, world_size)
        assert largest_of_many <= 1.25 * largest or torch.float32 in (dtype, got[0][NAMES.index(name)].dtype), (name, world_size)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_pass_through_a_rank_that_computes_none_of_them(schedule):
    """Rank 1 sees only itself; gradients of rank 2 for rank 0 pass through rank 1, in fp32."""
    mask = ra.block_sparse([[1, 0, 0], [0, 1, 0], [1, 0, 1]], 5)
    inputs = make_inputs(15, dtype=torch.bfloat16)
    layout = ra.contiguous(15, 3)
    exact = dense(*(x.double() for x in inputs), mask)
    assert_every_rank([[x.double() for x in got] for got in ring(*inputs, mask, layout, SCHEDULES[schedule])], exact, layout, 0.05)


# memory


def peak_of(seq_len):
    q, k, v, dout = make_inputs(seq_len, Shape(h=1, d=16, d_v=16), torch.float32)
    with Peak() as peak:
        q.requires_grad_()
        ra.ring_attention(q, k, v).backward(dout)
    return peak


def test_memory_grows_with_tokens_and_not_with_their_square():
    peak_of(64)
    small, large = peak_of(2048), peak_of(8192)
    # the largest tensor is a block of scores; all else grows with tokens
    assert large.largest <= 256 * 512
    assert large.peak <= 4.4 * small.peak
    assert large.peak < 8192 * 8192


# attend


@pytest.mark.parametrize("mask", [ra.causal(), ra.sliding_window(9, 4), ra.dilated_window(4, 3)], ids=repr)
def test_merged_parts_of_unordered_positions_are_ring_attention(mask):
    seq_len = 53
    q, k, v, dout = make_inputs(seq_len)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randperm(seq_len, generator=generator)
    parts = torch.randperm(seq_len, generator=generator).split([20, 1, 0, 32])
    tensors = [x.requires_grad_() for x in (q, k, v)]
    merged = None
    for keys in parts:
        part = ra.attend(q[:, queries], k[:, keys], v[:, keys], mask=mask, q_positions=queries, k_positions=keys)
        merged = part if merged is None else ra.merge(merged, part)
    got = ra.finish(merged), merged.stats.lse, *torch.autograd.grad(ra.finish(merged), tensors, dout[:, queries])
    out, lse, *gradients = dense(q, k, v, dout, mask)
    for x, y in zip(got, (out[:, queries], lse[:, :, queries], *gradients)):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def test_attend_with_repeated_positions_sees_each_row():
    q, k, v, _ = make_inputs(4)
    positions = torch.tensor([2, 0, 2, 1])
    out = ra.finish(ra.attend(q, k, v, q_positions=positions))
    whole = ra.finish(ra.attend(q, k, v, q_positions=torch.tensor([2, 2, 2, 2])))
    torch.testing.assert_close(out[:, [0, 2]], whole[:, [0, 2]], rtol=0, atol=1e-14)


def test_attend_of_other_positions_and_lengths():
    """The queries of a late chunk attend to all keys before them, as in decoding."""
    q, k, v, dout = make_inputs(64)
    out = ra.finish(ra.attend(q[:, 50:], k, v, q_positions=torch.arange(50, 64)))
    torch.testing.assert_close(out, dense(q, k, v, dout, ra.causal())[0][:, 50:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attend_keeps_its_partial_in_float32(dtype):
    q, k, v, _ = make_inputs(16, dtype=dtype)
    part = ra.attend(q, k, v)
    assert {x.dtype for x in (part.out, part.row_max, part.row_sum)} == {torch.float32}
    assert ra.finish(part, dtype).dtype == dtype


def test_attend_to_no_keys_is_the_identity():
    q, k, v, _ = make_inputs(5)
    part = ra.attend(q, k[:, :0], v[:, :0])
    assert not part.out.any()
    assert (part.row_max == -math.inf).all()
    assert not part.row_sum.any()


# unshard


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("make_layout", [ra.zigzag, ra.striped, custom_layout], ids=["zigzag", "striped", "custom"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unshard_is_the_inverse_of_shard_and_its_gradient_the_adjoint(make_layout, world_size, dim):
    layout = make_layout(19, world_size)
    x = torch.randn(19, 19, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(world_size, 19, 19, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def work(transport):
        mine = ra.shard(x, layout, transport.rank, dim=dim).requires_grad_()
        whole = ra.unshard(mine, layout, transport, dim=dim)
        assert torch.equal(whole, x)
        return torch.autograd.grad(whole, mine, weights[transport.rank])[0]

    for rank, got in enumerate(run_ranks(world_size, work)):
        torch.testing.assert_close(got, ra.shard(weights.sum(0), layout, rank, dim=dim), rtol=0, atol=1e-12)


def test_unshard_has_second_derivatives():
    """Each of the two ranks has half of the sum of cubes of the whole as its loss."""
    layout = ra.zigzag(7, 2)
    x = torch.arange(1.0, 8.0, dtype=torch.float64)[None]

    def work(transport):
        mine = ra.shard(x, layout, transport.rank).requires_grad_()
        loss = (ra.unshard(mine, layout, transport) ** 3).sum() / 2
        (once,) = torch.autograd.grad(loss, mine, create_graph=True)
        return mine.detach(), once.detach(), torch.autograd.grad(once.sum(), mine)[0]

    for mine, once, twice in run_ranks(2, work):
        torch.testing.assert_close(once, 3 * mine**2)
        torch.testing.assert_close(twice, 6 * mine)


def test_unshard_keeps_the_dtype_and_takes_strided_shards():
    layout = ra.zigzag(11, 3)
    x = torch.arange(11 * 6).reshape(11, 6).to(torch.bfloat16)

    def work(transport):
        mine = ra.shard(x, layout, transport.rank, dim=0).t().contiguous().t()
        return ra.unshard(mine, layout, transport, dim=0)

    assert all(torch.equal(whole, x) and whole.dtype == x.dtype for whole in run_ranks(3, work))


# shapes and strides


@pytest.mark.parametrize(("h", "hk"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_grouped_heads_are_repeated_heads(h, hk):
    q, k, v, dout = make_inputs(40, Shape(b=2, h=h, hk=hk))
    layout = ra.zigzag(40, 3)
    repeated = [x.repeat_interleave(h // hk, dim=2) for x in (k, v)]
    grouped, whole = ring(q, k, v, dout, ra.causal(), layout), ring(q, *repeated, dout, ra.causal(), layout)
    for a, b in zip(grouped, whole):
        for name, x, y in zip(NAMES, a, b):
            summed = y.unflatten(2, (hk, h // hk)).sum(3) if name in ("dk", "dv") else y
            torch.testing.assert_close(x, summed, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("d", "d_v"), [(1, 1), (3, 7), (192, 128), (24, 256), (255, 33), (512, 300)])
def test_any_head_dim(d, d_v):
    q, k, v, dout = make_inputs(20, Shape(d=d, d_v=d_v))
    layout = ra.zigzag(20, 2)
    assert_every_rank(ring(q, k, v, dout, ra.causal(), layout), dense(q, k, v, dout, ra.causal()), layout)


def test_sequences_of_a_batch_do_not_mix():
    q, k, v, dout = make_inputs(31, Shape(b=3))
    layout = ra.zigzag(31, 3)
    together = ring(q, k, v, dout, ra.causal(), layout)
    for i in range(3):
        alone = ring(*(x[i : i + 1] for x in (q, k, v, dout)), ra.causal(), layout)
        for a, b in zip(together, alone):
            for x, y in zip(a, b):
                torch.testing.assert_close(x[i : i + 1], y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["heads-first", "last-dim", "slice", "every-other"])
@pytest.mark.parametrize("schedule", ["ring", "gather"])
def test_inputs_of_any_strides(kind, schedule):
    tensors = make_inputs(40, Shape(b=2, h=4, hk=2))
    layout = ra.zigzag(40, 3)

    def work(transport):
        q, k, v, dout = (strided(ra.shard(x, layout, transport.rank), kind) for x in tensors)
        for x in (q, k, v):
            x.requires_grad_()
        out, stats = ra.ring_attention(q, k, v, layout=layout, group=transport, schedule=SCHEDULES[schedule], return_stats=True)
        return out.detach(), stats.lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    assert_every_rank(run_ranks(3, work), dense(*tensors, ra.causal()), layout)


def test_a_gradient_of_stride_zero():
    q, k, v, dout = make_inputs(33)
    q.requires_grad_()
    ra.ring_attention(q, k, v).sum().backward()
    torch.testing.assert_close(q.grad, dense(q, k, v, torch.ones_like(dout), ra.causal())[2], rtol=0, atol=1e-10)


def test_inputs_are_left_alone():
    tensors = make_inputs(33)
    copies = [x.clone() for x in tensors]
    ring(*tensors, ra.causal(), ra.zigzag(33, 3))
    assert all(torch.equal(x, y) for x, y in zip(tensors, copies))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_outputs_have_the_inputs_dtype(dtype):
    for out, _, dq, dk, dv in ring(*make_inputs(9, dtype=dtype), ra.causal(), ra.zigzag(9, 2)):
        assert {x.dtype for x in (out, dq, dk, dv)} == {dtype}


# defaults


@SOME_WORLDS
@pytest.mark.parametrize("mask", [None, ra.full(), ra.documents([30, 20]), ra.sliding_window(8, 2)], ids=repr)
def test_the_default_layout_and_schedule(mask, world_size):
    q, k, v, dout = make_inputs(64)
    meant = ra.causal() if mask is None else mask
    layout = ra.default_layout(meant, 64, world_size)

    def work(transport):
        mine = [ra.shard(x, layout, transport.rank) for x in (q, k, v)]
        return ra.ring_attention(*mine, mask=mask, group=transport)

    wanted = dense(q, k, v, dout, meant)[0]
    for rank, out in enumerate(run_ranks(world_size, work)):
        torch.testing.assert_close(out, ra.shard(wanted, layout, rank), rtol=0, atol=1e-12)


def test_a_plan_that_another_thread_evicts_is_made_again():
    plans = OrderedDict()

    class Key:
        def __hash__(self):
            # empties the cache at each look-up, as if another thread had just filled it
            plans.clear()
            return 0

    key = Key()
    assert [_kept(plans, key, lambda made=made: made) for made in (1, 2)] == [1, 2]


def test_no_group_is_one_rank():
    q, k, v, dout = make_inputs(64)
    wanted = dense(q, k, v, dout, ra.causal(), softmax_scale=0.3)[0]
    torch.testing.assert_close(ra.ring_attention(q, k, v, softmax_scale=0.3), wanted, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert not ra.ring_attention(q.requires_grad_(), k, v).requires_grad


@pytest.mark.parametrize("scale", [0.0, -0.5, 2, np.float32(0.25)], ids=repr)
def test_any_finite_scale(scale):
    q, k, v, dout = make_inputs(40)
    layout = ra.zigzag(40, 3)
    got = ring(q, k, v, dout, ra.causal(), layout, softmax_scale=scale)
    assert_every_rank(got, dense(q, k, v, dout, ra.causal(), softmax_scale=float(scale)), layout)
