"""The check of random problems: it passes what only rounds as the kernels do, and finds what is wrong in them."""

import math

import numpy as np
import pytest
import torch

from tests.kernels import dense, fuzz

CPU = fuzz.Scope("cpu", fuzz.GPU.longest, fuzz.GPU.head_dims)
SHORT = fuzz.Scope("cpu", 120, fuzz.GPU.head_dims)
# scales of 0.5, 1 or -1 / sqrt(d), and live pairs
ORDINARY = [1, 6, 9, 11, 13, 14, 19, 21, 33, 36]


def rounded(p: fuzz.Problem, softmax_scale: float | None = None, without: tuple[slice, slice] | None = None) -> dense.Result:
    """Attention in plain torch with the kernels' precision: products of 16 bits, sums in fp32.

    without: rows and columns of pairs to leave out.
    """
    scale = p.softmax_scale if softmax_scale is None else softmax_scale
    live = dense.live_pairs(np.concatenate(p.parts), p.q.shape[1], p.k.shape[1])
    if without is not None:
        live[without] = False
    dtype, hk = p.q.dtype, p.k.shape[2]
    # [b, h, rows, dim]
    q, dout = (x.float().transpose(1, 2) for x in (p.q, p.dout))
    k, v = (x.float().repeat_interleave(p.q.shape[2] // hk, 2).transpose(1, 2) for x in (p.k, p.v))
    # [b, h, sq, sk]
    scores = (q @ k.mT * scale).masked_fill(~live, -math.inf)
    row_max = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - row_max.masked_fill(row_max == -math.inf, 0.0))
    row_sum = weights.sum(-1, keepdim=True)
    out = (weights.to(dtype).float() @ v / row_sum.masked_fill(row_sum == 0, 1.0)).to(dtype)
    delta = (out.float() * dout).sum(-1, keepdim=True)
    weights = weights / row_sum.masked_fill(row_sum == 0, 1.0)
    ds = (weights * (dout @ v.mT - delta)).to(dtype).float()
    dk, dv = (x.unflatten(1, (hk, -1)).sum(2).transpose(1, 2) for x in (ds.mT @ q * scale, weights.to(dtype).float().mT @ dout))
    stored = dtype if len(p.parts) == 1 else torch.float32
    statistics = row_max[..., 0], row_sum[..., 0]
    return dense.Result(out.transpose(1, 2), *statistics, (ds @ k * scale).transpose(1, 2).to(dtype), dk.to(stored), dv.to(stored))


# one live key in nearly every row; terms of scores that cancel; products too large for fp16; equal weights of equal rows of dout
@pytest.mark.parametrize("seed", [25, 72, 31, 482, 315, 416])
def test_what_only_rounds_passes(seed):
    p = fuzz.problem(seed, CPU)
    found = fuzz.ratios(p, rounded(p))
    assert all(ratio < 0.7 for ratio in found.values()), found


def test_what_all_weights_lose_alike_passes():
    p = fuzz.problem(80, CPU)
    got = rounded(p)
    for x in (got.out, got.dq, got.dk, got.dv):
        x *= 1 + 3e-7
    found = fuzz.ratios(p, got)
    assert all(ratio < 0.9 for ratio in found.values()), found


@pytest.mark.parametrize("seed", ORDINARY)
def test_a_scale_three_percent_off_is_found(seed):
    """In every result; one percent would be what dense attention in bfloat16 loses."""
    p = fuzz.problem(seed, SHORT)
    found = fuzz.ratios(p, rounded(p, softmax_scale=1.03 * p.softmax_scale))
    assert all(ratio > 1 for ratio in found.values()), found


@pytest.mark.parametrize("seed", ORDINARY)
def test_a_block_left_out_is_found(seed):
    p = fuzz.problem(seed, SHORT)
    i, j = dense.live_pairs(np.concatenate(p.parts), p.q.shape[1], p.k.shape[1]).nonzero()[seed].tolist()
    found = fuzz.ratios(p, rounded(p, without=(slice(i, i + 64), slice(j, j + 64))))
    assert all(found[name] > 1 for name in ("row_sum", "out", "dq", "dk", "dv")), found


@pytest.mark.parametrize("name", ["row_max", "row_sum", "out", "dq", "dk", "dv"])
@pytest.mark.parametrize("seed", ORDINARY)
@pytest.mark.some(20)
def test_one_wrong_row_is_found(seed, name):
    p = fuzz.problem(seed, SHORT)
    got = rounded(p)
    live = dense.live_pairs(np.concatenate(p.parts), p.q.shape[1], p.k.shape[1])
    row = int(live.any(0 if name in ("dk", "dv") else 1).nonzero()[0])
    x = getattr(got, name)
    if x.ndim == 3:
        x[..., row] *= 1.01
    else:
        x[:, row] = x[:, row - 1] + 0.1
    over = [n for n, ratio in fuzz.ratios(p, got).items() if ratio > 1]
    assert over == [name]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_found(value):
    p = fuzz.problem(1, SHORT)
    for name in ("row_max", "row_sum", "out", "dq", "dk", "dv"):
        got = rounded(p)
        getattr(got, name)[0, 0, 0] = value
        assert not fuzz.ratios(p, got)[name] <= 1


def test_all_problems_that_fail_are_named(monkeypatch):
    monkeypatch.setattr(fuzz, "run", lambda p: rounded(p, softmax_scale=1.01 * p.softmax_scale))
    # the scale of seed 3 is 0
    with pytest.raises(AssertionError, match=r"seed 1: row_max [^\n]*\nseed 6: row_max [^\n]*$"):
        fuzz.check([1, 3, 6], SHORT)
