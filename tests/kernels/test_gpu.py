"""The kernels on a GPU: accuracy against dense attention in fp64, beside dense PyTorch in the inputs' dtype, and bitwise repeatability."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ringattn_kernels as rk
from ringattn.partial import Partial, merge
from ringattn_kernels import launches
from ringattn_kernels.config import architecture
from ringattn_kernels.dispatch import Kernels
from tests.kernels import dense, fuzz

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]

TABLES = {
    "causal": lambda s: dense.causal(s),
    "full": lambda s: dense.full(s, s),
    "window": lambda s: dense.window(s, s // 5, 3),
    "documents": lambda s: dense.documents(1, s // 3, 2, 1, 1, s - s // 3 - 5),
    "random": lambda s: dense.random_tiles(np.random.default_rng(s), s, s),
}
CASES = [
    # sequence, query heads, key/value heads, d, dv
    (512, 4, 4, 128, 128),
    (1025, 4, 1, 64, 64),
    (777, 4, 2, 192, 128),
    (901, 6, 2, 96, 96),
    (511, 2, 2, 256, 256),
    (129, 2, 1, 40, 96),
    (1, 2, 2, 16, 16),
]
WIDE = [(511, 4, 1, 512, 512), (333, 2, 2, 384, 320)]


def inputs(s, h, hk, d, dv, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (2, s, h, d), (2, s, hk, d), (2, s, hk, dv), (2, s, h, dv)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype) for shape in shapes]


def run(q, k, v, dout, tables, softmax_scale, **options) -> dense.Result:
    """Forward and backward with one launch for each table; options are the backward's."""
    state = None
    for n, table in enumerate(tables):
        final = n == len(tables) - 1
        state = rk.forward(q, k, v, table, softmax_scale=softmax_scale, state=state, final=final)
    out, row_max, row_sum = state
    queries = rk.Queries(q, dout, row_max, row_sum, rk.delta(out, dout))
    sums = rk.QuerySums(q, softmax_scale)
    dk, dv = (torch.full(x.shape, float("nan"), device="cuda") for x in (k, v))
    for n, table in enumerate(tables):
        outputs = dict(dq=sums, dk=dk, dv=dv, add=n > 0)
        rk.backward(queries, k, v, table, softmax_scale=softmax_scale, **outputs, **options)
    return dense.Result(out, row_max, row_sum, sums.finish(torch.float32), dk, dv)


def error(x, exact) -> float:
    return float((x.double() - exact).norm())


@pytest.mark.parametrize("mask", TABLES)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES + WIDE for dtype in (torch.bfloat16, torch.float16)]
    + [(case, torch.float32) for case in CASES if case[3] <= 64],
    ids=str,
)
def test_error_is_within_the_contract(case, mask, dtype):
    s, _, _, d, _ = case
    if s == 1 and mask == "documents":
        tiles = dense.documents(1)
    else:
        tiles = TABLES[mask](s)
    live = dense.live_pairs(tiles, s, s).cuda()
    q, k, v, dout = inputs(*case, dtype)
    whole = np.array(tiles).reshape(-1, 6)
    exact = dense.attention(q, k, v, dout, live, d**-0.5, torch.float64)
    same = dense.attention(q, k, v, dout, live, d**-0.5, dtype)
    for tables in ([whole], [whole[::2], whole[1::2]]):
        got = run(q, k, v, dout, [rk.TileTable(t, s, s) for t in tables], d**-0.5)
        torch.testing.assert_close(got.row_max.double(), exact.row_max, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.row_sum.double(), exact.row_sum, rtol=1e-5, atol=1e-6)
        floor = 1e-6 * float(exact.out.norm())
        assert error(got.out, exact.out) <= 2 * error(same.out, exact.out) + floor
        for name in ("dq", "dk", "dv"):
            x, y, z = getattr(got, name), getattr(same, name), getattr(exact, name)
            assert error(x, z) <= 3 * error(y, z) + 1e-6 * float(exact.dv.norm()), name
            assert x.isfinite().all()


@pytest.mark.parametrize("kernels", [None, Kernels.PLAIN], ids=["chosen", "plain"])
@pytest.mark.parametrize("case", CASES[:6] + WIDE[:1], ids=str)
def test_splits_are_as_exact_as_whole_blocks_and_give_the_same_bits(case, kernels):
    s, _, _, d, _ = case
    q, k, v, dout = inputs(*case, torch.bfloat16)
    tiles = np.array(dense.random_tiles(np.random.default_rng(s), s, s))
    exact = dense.attention(q, k, v, dout, dense.live_pairs(tiles, s, s).cuda(), d**-0.5, torch.float64)
    tables = [rk.TileTable(t, s, s) for t in (tiles[::2], tiles[1::2])]
    errors, state = [], None
    for splits in (1, 2, 5, 5):
        before, state = state, None
        for n, table in enumerate(tables):
            options = dict(state=state, final=n == 1, kernels=kernels, splits=splits)
            state = rk.forward(q, k, v, table, softmax_scale=d**-0.5, **options)
        errors.append(error(state[0], exact.out))
        torch.testing.assert_close(state[1].double(), exact.row_max, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[2].double(), exact.row_sum, rtol=1e-5, atol=1e-6)
    assert max(errors) <= 1.05 * errors[0]
    assert all(torch.equal(a, b) for a, b in zip(before, state))


@pytest.mark.parametrize(
    ("case", "kernels"),
    [(case, Kernels.PLAIN) for case in CASES[:5] + WIDE[:1]] + [(case, Kernels.HOPPER_FUSED) for case in CASES[:3]],
    ids=str,
)
def test_gradients_of_splits_are_as_exact_as_those_of_whole_blocks(case, kernels):
    if kernels == Kernels.HOPPER_FUSED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    s, _, _, d, _ = case
    q, k, v, dout = inputs(*case, torch.bfloat16)
    tiles = np.array(dense.random_tiles(np.random.default_rng(s), s, s))
    exact = dense.attention(q, k, v, dout, dense.live_pairs(tiles, s, s).cuda(), d**-0.5, torch.float64)
    tables = [rk.TileTable(t, s, s) for t in (tiles[::2], tiles[1::2])]
    whole, *split = (
        run(q, k, v, dout, tables, d**-0.5, kernels=kernels, deterministic=False, splits=splits) for splits in (1, 2, 5, 5)
    )
    for name in ("dq", "dk", "dv"):
        bound = 1.05 * error(getattr(whole, name), getattr(exact, name))
        assert max(error(getattr(result, name), getattr(exact, name)) for result in split) <= bound, name
    assert torch.equal(split[1].dk, split[2].dk) and torch.equal(split[1].dv, split[2].dv)


@pytest.mark.parametrize("case", CASES[:5] + WIDE[:1], ids=str)
def test_repeated_runs_give_the_same_bits(case):
    s, _, _, d, _ = case
    q, k, v, dout = inputs(*case, torch.bfloat16)
    tables = [rk.TileTable(np.array([(0, s, a, b, 0, s)]), s, s) for a, b in ((0, s // 2), (s // 2, s))]
    first = run(q, k, v, dout, tables, d**-0.5, deterministic=True)
    for _ in range(5):
        again = run(q, k, v, dout, tables, d**-0.5, deterministic=True)
        for name in ("out", "row_max", "row_sum", "dq", "dk", "dv"):
            assert torch.equal(getattr(first, name), getattr(again, name)), name


@pytest.mark.parametrize("kernels", [None, Kernels.PLAIN], ids=["chosen", "plain"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("name", "value"), [("q", "nan"), ("q", "inf"), ("k", "nan"), ("v", "nan")])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_what_is_no_number_makes_none_of_the_rows_that_see_it(case, name, value, splits, kernels):
    s, _, _, d, _ = case
    place, cut = 200, 300
    tables = [rk.TileTable(np.array([tile]), s, s) for tile in ((0, s, 0, cut, 0, s), (0, s, cut, s, 0, s))]

    def run(q, k, v) -> torch.Tensor:
        state = None
        for n, table in enumerate(tables):
            options = dict(state=state, final=n == 1, splits=splits, kernels=kernels)
            state = rk.forward(q, k, v, table, softmax_scale=d**-0.5, **options)
        return state[0]

    q, k, v, _ = inputs(*case, torch.bfloat16)
    clean = run(q, k, v)
    {"q": q, "k": k, "v": v}[name][:, place, :, 3] = float(value)
    got = run(q, k, v)
    seen_by = slice(place, place + 1 if name == "q" else None)
    # one column of a value is no number
    assert (got[:, seen_by, :, 3] if name == "v" else got[:, seen_by]).isnan().all()
    if name != "v":
        others = torch.ones(s, dtype=torch.bool)
        others[seen_by] = False
        assert torch.equal(got[:, others], clean[:, others])


@pytest.mark.parametrize("kernels", list(Kernels), ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_what_is_no_number_spreads_no_farther_than_in_dense_attention(mask, kernels):
    """But for the one-pass kernels in no fixed order, which let what is no number in dout reach the gradients of keys of one block."""
    s, place, scale = 300, 150, 64**-0.5
    tiles = TABLES[mask](s)
    live = dense.live_pairs(tiles, s, s).cuda()
    table = rk.TileTable(np.array(tiles), s, s)
    for name, value in itertools.product(("q", "k", "v", "dout"), ("nan", "inf")):
        given = dict(zip(("q", "k", "v", "dout"), inputs(s, 4, 2, 64, 64, torch.bfloat16)))
        given[name][:, place, 0, 3] = float(value)
        got = run(*given.values(), [table], scale, kernels=kernels, deterministic=False)
        usual = dense.attention(*given.values(), live, scale, torch.bfloat16)
        for result in ("out", "dq", "dk", "dv"):
            farther = ~getattr(got, result).isfinite() & getattr(usual, result).isfinite()
            if (result, kernels) == ("dk", Kernels.HOPPER_FUSED):
                # a step of its queries, and the blocks of keys that it meets
                met = live[place // 128 * 128 :][:128].any(0)
                blocks = torch.nn.functional.pad(met, (0, -s % 128)).unflatten(0, (-1, 128)).any(1).repeat_interleave(128)[:s]
                farther = farther[:, ~blocks]
            assert not farther.any(), (name, value, result)


@pytest.mark.parametrize("deviation", [1e2, 1e3, 1e4, 1e5, 3e5])
@pytest.mark.parametrize(
    ("dtype", "d"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 128)], ids=str
)
def test_saturated_logits_are_as_exact_as_in_dense_attention(dtype, d, deviation):
    """Nearly all weights are 0 or 1. Dense attention in fp16 overflows from 1e4 on: there results are checked against fp64 alone."""
    s = 515
    q, k, v, dout = inputs(s, 4, 2, d, d, torch.float32)
    q, k, v, dout = (x.to(dtype) for x in (q * deviation**0.5, k * deviation**0.5, v, dout))
    whole = np.array(dense.causal(s)).reshape(-1, 6)
    halves = np.array([(0, s, 0, 200, 0, s), (0, s, 200, s, 0, s)])
    for parts, turn, deterministic in itertools.product(([whole], [halves[:1], halves[1:]]), range(2), (False, True)):
        p = fuzz.Problem(q, k, v, dout, parts, d**-0.5, deterministic, turn=turn)
        got = fuzz.run(p)
        if dtype == torch.float16 and deviation >= 1e4:
            exact = dense.attention(q, k, v, dout, dense.live_pairs(whole, s, s).cuda(), d**-0.5, torch.float64)
            assert error(got.out, exact.out) <= 0.01 * exact.out.norm() and error(got.dv, exact.dv) <= 0.03 * exact.dv.norm()
            assert got.dq.isfinite().all() and got.dk.isfinite().all()
        else:
            found = fuzz.ratios(p, got)
            assert all(ratio <= 1 for ratio in found.values()), (len(parts), turn, deterministic, found)


@pytest.mark.parametrize("logit", [1e2, 2.5e5])
def test_equal_huge_logits_average_exactly_over_launches(logit):
    s, d = 300, 64
    q, k, v, dout = inputs(s, 2, 2, d, d, torch.float32)
    q.fill_(1.0)
    k.fill_(logit / d)
    tables = [rk.TileTable(np.array([(0, s, a, b, -s, s)]), s, s) for a, b in ((0, 100), (100, 101), (101, 300))]
    out = run(q, k, v, dout, tables, 1.0).out
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-5)


def test_keys_as_transposed_views_beyond_two_to_the_31_elements():
    s, b, hk, d = 70_000, 2, 128, 128
    buffer = torch.empty(s, b, hk, d, device="cuda", dtype=torch.bfloat16)
    assert buffer.numel() > 2**31
    rows = torch.randn(64, b, hk, d, device="cuda", dtype=torch.bfloat16)
    buffer[-64:] = rows
    k = buffer.transpose(0, 1)
    q, dout = (torch.randn(b, 64, hk, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = run_last_rows(q, k, dout, s)
    near = rows.transpose(0, 1).contiguous()
    expected = run_last_rows(q, near, dout, 64)
    for x, y in zip(out, expected):
        assert torch.equal(x, y)


def run_last_rows(q, k, dout, rows):
    """Attention of 64 queries to the last 64 of `rows` keys, which are the values too."""
    table = rk.TileTable(np.array([(0, 64, rows - 64, rows, -rows, 64 - rows + 64)]), 64, rows)
    out, row_max, row_sum = rk.forward(q, k, k, table, softmax_scale=0.1)
    dq = torch.zeros(q.shape, device="cuda")
    dk, dv = (torch.zeros(rows, *q.shape[:1], *q.shape[2:], device="cuda").transpose(0, 1) for _ in range(2))
    # the fused kernel's order of sums depends on where in its block a key is
    outputs = dict(dq=dq, dk=dk, dv=dv, deterministic=True)
    queries = rk.Queries(q, dout, row_max, row_sum, rk.delta(out, dout))
    rk.backward(queries, k, k, table, softmax_scale=0.1, **outputs)
    return out, dq, dk[:, -64:].clone(), dv[:, -64:].clone()


@pytest.mark.parametrize("d", [24, 64, 128])
def test_partials_of_the_same_rows_are_merged(d):
    """As launches leave them, and, in the second step, as messages bring them; one row has nothing live."""
    parts = []
    for _ in range(3):
        out, row_max = torch.randn(2, 301, 6, d, device="cuda"), 9 * torch.randn(2, 6, 301, device="cuda")
        row_sum = 1 + torch.rand(2, 6, 301, device="cuda")
        out[:, 7], row_max[:, :, 7], row_sum[:, :, 7] = 0.0, -torch.inf, 0.0
        parts.append(Partial(out, row_max, row_sum))
    wanted = Partial(*(x.double() for x in vars(parts[0]).values()))
    for part in parts[1:]:
        wanted = merge(wanted, Partial(*(x.double() for x in vars(part).values())))
    first, second, third = ((x.out.transpose(0, 1), x.row_max.permute(2, 0, 1), x.row_sum.permute(2, 0, 1)) for x in parts)
    totals = tuple(x.contiguous() for x in first)
    rk.merge_rows(totals, second)
    rk.merge_rows(totals, tuple(x.contiguous() for x in third))
    expected = wanted.out.transpose(0, 1), wanted.row_max.permute(2, 0, 1), wanted.row_sum.permute(2, 0, 1)
    for x, y in zip(totals, expected):
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=2e-6)


def test_the_instructions_are_those_of_the_architecture(monkeypatch):
    compiled_for, kernels = launches.compiled_for, []

    def noted(*given):
        found = compiled_for(*given)
        kernels.append(found.kernel.asm["ptx"])
        return found

    monkeypatch.setattr(launches, "compiled_for", noted)
    table = rk.TileTable(np.array(dense.causal(512)), 512, 512)
    q, k, v, _ = inputs(512, 4, 2, 128, 128, torch.bfloat16)
    rk.forward(q, k, v, table, softmax_scale=0.1, kernels=Kernels.PLAIN, splits=1)
    (ptx,) = kernels
    assert ("wgmma" in ptx) == (architecture(q.device) == "sm_90")


@pytest.mark.skipif("TRITON_OVERRIDE_ARCH" in os.environ, reason="the architecture is chosen already")
def test_the_instructions_of_an_a100_are_as_exact():
    """Tests of this file in a process for which the GPU is an A100: it runs these instructions, too."""
    names = "instructions_are or (contract and bfloat16-causal and not 512)"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", __file__, "-k", names]
    done = subprocess.run(
        command,
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"TRITON_OVERRIDE_ARCH": "sm80"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "8 passed" in done.stdout.splitlines()[-1]
