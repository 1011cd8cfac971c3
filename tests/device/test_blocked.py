"""The plain-torch computation of tiles: in place, in any number of launches, touching only the rows that tiles name."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.device import blocked
from ringattn.geometry.plan import live_pairs, make_tiles
from ringattn.geometry.region import trim
from ringattn_kernels.modifiers import Bias, Dropout, Modifiers
from ringattn_kernels.table import TileTable
from tests.kernels import dense

pytestmark = pytest.mark.usefixtures("one_thread")

B, H, HK, D, D_V = 2, 4, 2, 5, 3
SCALE = 0.6


def tiles_of(rows, q_rows, k_rows):
    """Tiles from any (q_begin, q_end, k_begin, k_end, lo, hi), trimmed."""
    *columns, live = trim(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)
    return make_tiles(np.stack(columns, axis=1)[live], q_rows, k_rows)


def make_inputs(sq, sk, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, sq, H, D), (B, sk, HK, D), (B, sk, HK, D_V), (B, sq, H, D_V)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def exact(q, k, v, dout, tiles):
    """Dense attention in fp64: out, row_max, row_sum; dq, dk, dv."""
    live = dense.live_pairs(tiles.tiles.tolist(), tiles.q_rows, tiles.k_rows)
    assert live_pairs(tiles) == live.sum()
    *state, dq, dk, dv = astuple(dense.attention(q, k, v, dout, live, SCALE, torch.float64))
    return tuple(state), (dq, dk, dv)


def gradients(q, k, v, dout, tiles, out, row_max, row_sum):
    """dq, dk, dv. dk and dv are added to ones, so that an overwrite would show."""
    dq, dk, dv = blocked.TorchQuerySums(q), *(torch.ones(x.shape, dtype=row_sum.dtype) for x in (k, v))
    queries = blocked.Queries(q, dout, row_max, row_sum, blocked.delta(out, dout))
    blocked.backward(queries, k, v, tiles, softmax_scale=SCALE, dq=dq, dk=dk, dv=dv)
    return dq.finish(row_sum.dtype), dk - 1, dv - 1


def assert_close(got, wanted, tolerance=1e-11):
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@st.composite
def disjoint_tiles(draw, q_rows=12, k_rows=12):
    """Bands of columns, cut into rectangles: disjoint boxes with any band in each."""
    rows = []
    for k_begin, k_end in ((0, 3), (3, 4), (4, 9), (9, k_rows)):
        cut = draw(st.integers(0, q_rows))
        for q_begin, q_end in ((0, cut), (cut, q_rows)):
            if draw(st.booleans()):
                lo = draw(st.integers(-k_rows, q_rows))
                rows.append((q_begin, q_end, k_begin, k_end, lo, lo + draw(st.integers(0, q_rows + k_rows))))
    return tiles_of(rows, q_rows, k_rows)


@settings(max_examples=60)
@given(disjoint_tiles(), st.integers(0, 1000))
def test_tiles_are_dense_attention_over_their_pairs(tiles, seed):
    q, k, v, dout = make_inputs(12, 12, seed=seed)
    wanted_state, wanted = exact(q, k, v, dout, tiles)
    state = blocked.forward(q, k, v, tiles, softmax_scale=SCALE)
    assert_close(state, wanted_state)
    assert_close(gradients(q, k, v, dout, tiles, *state), wanted)
    dead = wanted_state[2] == 0
    assert not state[0].transpose(1, 2)[dead].any()
    assert not state[2][dead].any()


@settings(max_examples=40)
@given(disjoint_tiles(), st.permutations(range(8)), st.integers(0, 8))
def test_launches_on_a_state_add_up(tiles, order, first):
    q, k, v, dout = make_inputs(12, 12)
    table = tiles.tiles[[i for i in order if i < len(tiles)]]
    parts = [make_tiles(table[:first], 12, 12), make_tiles(table[first:], 12, 12)]
    whole = blocked.forward(q, k, v, tiles, softmax_scale=SCALE)
    state = blocked.forward(q, k, v, parts[0], softmax_scale=SCALE, final=False)
    kept = [x.data_ptr() for x in state]
    state = blocked.forward(q, k, v, parts[1], softmax_scale=SCALE, state=state, final=False)
    assert kept == [x.data_ptr() for x in state]
    assert_close(state, whole)
    # a backward launch needs only the merged statistics
    added = [gradients(q, k, v, dout, part, *state) for part in parts]
    assert_close(tuple(a + b for a, b in zip(*added)), gradients(q, k, v, dout, tiles, *whole))


@pytest.mark.parametrize(
    ("sq", "sk"),
    [(1, 1), (256, 512), (257, 513), (255, 511), (600, 1100), (1, 1100), (600, 1)],
    ids=lambda n: str(n),
)
def test_sizes_around_the_blocks(sq, sk):
    q, k, v, dout = make_inputs(sq, sk)
    tiles = tiles_of([(0, sq, 0, sk, sq - sk - sk // 2, sq + sk)], sq, sk)
    wanted_state, wanted = exact(q, k, v, dout, tiles)
    state = blocked.forward(q, k, v, tiles, softmax_scale=SCALE)
    assert_close(state, wanted_state)
    assert_close(gradients(q, k, v, dout, tiles, *state), wanted)


def many_small_tiles(sq, sk, **places):
    """Tiles of a pair or a few, over every other row and column, in a row of blocks."""
    generator = np.random.default_rng(0)
    tiles = [(i, i + 1, j, j + 1, -sk, sq) for i in range(0, sq, 2) for j in range(1, sk, 4) if generator.random() < 0.02]
    tiles += [(1, 15, j, j + 2, 1 - j, 9 - j) for j in range(3, sk - 3, 16)]
    return TileTable(np.array(tiles), sq, sk, **places)


def test_many_small_tiles_share_blocks_that_hold_no_other_rows():
    q, k, v, dout = make_inputs(300, 600)
    tiles = many_small_tiles(300, 600)
    blocks = list(blocked._blocks(tiles, q.device))
    assert len(blocks) == 4 < len(tiles) // 50
    wanted_state, wanted = exact(q, k, v, dout, tiles)
    named = dense.live_pairs(tiles.tiles.tolist(), 300, 600)
    for x, rows in ((q, named.any(1)), (dout, named.any(1)), (k, named.any(0)), (v, named.any(0))):
        x[:, ~rows] = math.nan
    state = blocked.forward(q, k, v, tiles, softmax_scale=SCALE)
    assert_close(state, wanted_state)
    dout = torch.where(dout.isnan(), 0, dout)
    assert_close(gradients(q, k, v, dout, tiles, *state), wanted)


def test_scores_in_shared_blocks_have_the_positions_of_their_rows(monkeypatch):
    q, k, v, dout = make_inputs(300, 600)
    generator = torch.Generator().manual_seed(0)
    slopes, values = (torch.rand(H, n, generator=generator, dtype=torch.float64) for n in (1, 4))
    modifiers = Modifiers(2.0, slopes.view(1, H), Bias((-90, -1, 40), values), Dropout(0.3, 5, 7, H))
    count = len(many_small_tiles(300, 600))
    tiles, results = many_small_tiles(300, 600, places=np.tile([9, 70], (count, 1)), stride=2), []
    for pairs in (blocked._PAIRS, 0):
        monkeypatch.setattr(blocked, "_PAIRS", pairs)
        out, *statistics = blocked.forward(q, k, v, tiles, softmax_scale=SCALE, modifiers=modifiers)
        sums, found = dense.zero_sums(modifiers), [blocked.TorchQuerySums(q), torch.zeros_like(k), torch.zeros_like(v)]
        queries = blocked.Queries(q, dout, *statistics, blocked.delta(out, dout))
        given = dict(zip(("dq", "dk", "dv"), found))
        blocked.backward(queries, k, v, tiles, softmax_scale=SCALE, modifiers=modifiers, sums=sums, **given)
        results.append((out, *statistics, found[0].total, *found[1:], sums.slopes, sums.values))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_rows_that_no_tile_names_are_never_read():
    q, k, v, dout = make_inputs(20, 20)
    tiles = tiles_of([(3, 9, 4, 12, -100, 100)], 20, 20)
    for x, rows in ((q, slice(3, 9)), (dout, slice(3, 9)), (k, slice(4, 12)), (v, slice(4, 12))):
        kept = x[:, rows].clone()
        x.fill_(math.nan)
        x[:, rows] = kept
    out, row_max, row_sum = blocked.forward(q, k, v, tiles, softmax_scale=SCALE)
    assert out.isfinite().all()
    outside = [i for i in range(20) if not 3 <= i < 9]
    assert not out[:, outside].any()
    assert (row_max[:, :, outside] == -math.inf).all()
    dout = torch.where(dout.isnan(), 0, dout)
    for x in gradients(q, k, v, dout, tiles, out, row_max, row_sum):
        assert x.isfinite().all()


def test_no_tiles_give_the_identity():
    q, k, v, dout = make_inputs(4, 6)
    nothing = tiles_of([], 4, 6)
    out, row_max, row_sum = blocked.forward(q, k, v, nothing, softmax_scale=SCALE)
    assert not out.any()
    assert not row_sum.any()
    assert (row_max == -math.inf).all()
    assert all(not x.any() for x in gradients(q, k, v, dout, nothing, out, row_max, row_sum))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_state_is_float64_and_the_final_out_is_rounded_once(dtype):
    q, k, v, dout = make_inputs(8, 8, dtype)
    tiles = tiles_of([(0, 8, 0, 8, 0, 8)], 8, 8)
    state = blocked.forward(q, k, v, tiles, softmax_scale=SCALE, final=False)
    assert {x.dtype for x in state} == {torch.float64}
    (out, *_), _ = exact(q, k, v, dout, tiles)
    assert_close(state[0], out, 1e-6)
    final = blocked.forward(q, k, v, tiles, softmax_scale=SCALE)
    assert [x.dtype for x in final] == [dtype, torch.float32, torch.float32]
    assert torch.equal(final[0], state[0].to(dtype))


def test_views_of_buffers_with_rows_first():
    """K/V and their gradients come as (rows, b, hk, d) buffers, transposed."""
    q, k, v, dout = make_inputs(7, 9)
    tiles = tiles_of([(0, 7, 0, 9, -2, 5)], 7, 9)
    state = blocked.forward(q, k, v, tiles, softmax_scale=SCALE)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v)]
    assert_close(blocked.forward(q, *turned, tiles, softmax_scale=SCALE), state)
    dk, dv = (torch.zeros(9, B, HK, size, dtype=torch.float64) for size in (D, D_V))
    dq = blocked.TorchQuerySums(q)
    queries = blocked.Queries(q, dout, *state[1:], blocked.delta(state[0], dout))
    blocked.backward(queries, *turned, tiles, softmax_scale=SCALE, dq=dq, dk=dk.transpose(0, 1), dv=dv.transpose(0, 1))
    assert_close((dq.finish(q.dtype), dk.transpose(0, 1), dv.transpose(0, 1)), gradients(q, k, v, dout, tiles, *state))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_without_add_dk_and_dv_are_overwritten_and_dq_is_added_to(dtype):
    q, k, v, dout = (x.to(dtype) for x in make_inputs(7, 9))
    tiles = tiles_of([(2, 7, 3, 8, -2, 5)], 7, 9)
    out, row_max, row_sum = blocked.forward(q, k, v, tiles, softmax_scale=SCALE)
    wanted = gradients(q, k, v, dout, tiles, out, row_max, row_sum)
    dq, (dk, dv) = blocked.TorchQuerySums(q), (torch.full_like(x, math.nan) for x in (k, v))
    for _ in range(2):
        arguments = dict(softmax_scale=SCALE, dq=dq, dk=dk, dv=dv, add=False)
        queries = blocked.Queries(q, dout, row_max, row_sum, blocked.delta(out, dout))
        blocked.backward(queries, k, v, tiles, **arguments)
    tolerance = dict(rtol=torch.finfo(dtype).eps, atol=1e-11 if dtype == torch.float64 else 1e-6)
    for x, y in zip((dq.finish(dtype), dk, dv), (2 * wanted[0], *wanted[1:])):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y.to(dtype), **tolerance)


def test_delta_is_the_row_sum_in_float64():
    _, _, _, dout = make_inputs(7, 7, torch.bfloat16)
    out = make_inputs(7, 7, torch.bfloat16, seed=1)[3]
    delta = blocked.delta(out, dout)
    torch.testing.assert_close(delta, (out.double() * dout.double()).sum(-1).transpose(1, 2), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("tiles", [[(0, 300, 0, 300, 0, 300)], [(0, 300, 0, 300, 0, 40)]], ids=["causal", "window"])
def test_what_is_no_number_spreads_no_farther_than_in_dense_attention(tiles, value, name):
    inputs = dict(zip(("q", "k", "v", "dout"), make_inputs(300, 300, torch.float32)))
    inputs[name][:, 150, 0, 2] = value
    q, k, v, dout = inputs.values()
    table = tiles_of(tiles, 300, 300)
    out, row_max, row_sum = blocked.forward(q, k, v, table, softmax_scale=SCALE)
    dq, dk, dv = blocked.TorchQuerySums(q), torch.empty_like(k), torch.empty_like(v)
    queries = blocked.Queries(q, dout, row_max, row_sum, blocked.delta(out, dout))
    blocked.backward(queries, k, v, table, softmax_scale=SCALE, dq=dq, dk=dk, dv=dv, add=False)
    usual = dense.attention(q, k, v, dout, dense.live_pairs(tiles, 300, 300), SCALE, torch.float32)
    for x, y in zip((out, dq.total, dk, dv), (usual.out, usual.dq, usual.dk, usual.dv)):
        assert not (~x.isfinite() & y.isfinite()).any()
