"""The block-merge formula: its laws, its values against a dense softmax, and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra

pytestmark = pytest.mark.usefixtures("one_thread")

B, S, H, HK, D, D_V = 2, 5, 4, 2, 3, 6
EMPTY = ra.Partial(
    torch.zeros(B, S, H, D_V, dtype=torch.float64),
    torch.full((B, H, S), -math.inf, dtype=torch.float64),
    torch.zeros(B, H, S, dtype=torch.float64),
)


def random_partial(seed, scale=1.0):
    """A partial with some empty rows."""
    generator = torch.Generator().manual_seed(seed)
    out, row_max, row_sum = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((B, S, H, D_V), (B, H, S), (B, H, S))
    )
    empty = torch.rand(B, H, S, generator=generator) < 0.3
    return ra.Partial(
        out.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0),
        (scale * row_max).masked_fill(empty, -math.inf),
        (1 + row_sum.abs()).masked_fill(empty, 0),
    )


def assert_same(a, b, tolerance=0.0):
    for x, y in zip((a.out, a.row_max, a.row_sum), (b.out, b.row_max, b.row_sum)):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def inputs(sk, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, S, H, D), (B, sk, HK, D), (B, sk, HK, D_V)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def dense(q, k, v, live, scale):
    """softmax(scale * q k^T) v and its log-sum-exp by the textbook formula; rows with nothing live are 0."""
    k, v = (x.repeat_interleave(H // HK, dim=2) for x in (k, v))
    scores = (scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(~live, -math.inf)
    weights = torch.softmax(scores, dim=-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), torch.logsumexp(scores, dim=-1)


# laws

SEEDS = st.integers(0, 1000)
SCALES = st.sampled_from([0.0, 1.0, 100.0, 1e6])


@settings(max_examples=30)
@given(SEEDS)
def test_the_empty_partial_is_the_identity(seed):
    a = random_partial(seed)
    assert_same(ra.merge(a, EMPTY), a, 1e-15)
    assert_same(ra.merge(EMPTY, a), a, 1e-15)


def test_empty_with_empty_is_empty():
    assert_same(ra.merge(EMPTY, EMPTY), EMPTY)


@settings(max_examples=30)
@given(SEEDS, SEEDS, SCALES)
def test_merging_is_commutative(first, second, scale):
    a, b = random_partial(first, scale), random_partial(second, scale)
    assert_same(ra.merge(a, b), ra.merge(b, a))


@settings(max_examples=30)
@given(SEEDS, SEEDS, SEEDS, SCALES)
def test_merging_is_associative(first, second, third, scale):
    a, b, c = (random_partial(seed, scale) for seed in (first, second, third))
    assert_same(ra.merge(ra.merge(a, b), c), ra.merge(a, ra.merge(b, c)), 1e-12)


@settings(max_examples=10)
@given(SEEDS, SEEDS)
def test_the_formula(first, second):
    a, b = random_partial(first), random_partial(second)
    merged = ra.merge(a, b)
    for i in range(B):
        for h in range(H):
            for s in range(S):
                m1, m2, l1, l2 = (float(x[i, h, s]) for x in (a.row_max, b.row_max, a.row_sum, b.row_sum))
                m = max(m1, m2)
                if m == -math.inf:
                    assert (merged.row_max[i, h, s], merged.row_sum[i, h, s]) == (-math.inf, 0)
                    assert not merged.out[i, s, h].any()
                    continue
                w1, w2 = l1 * math.exp(m1 - m), l2 * math.exp(m2 - m)
                assert merged.row_max[i, h, s] == m
                assert float(merged.row_sum[i, h, s]) == pytest.approx(w1 + w2, rel=1e-14)
                wanted = (w1 * a.out[i, s, h] + w2 * b.out[i, s, h]) / (w1 + w2)
                torch.testing.assert_close(merged.out[i, s, h], wanted, rtol=1e-13, atol=1e-13)


# against a dense softmax


@settings(max_examples=30)
@given(st.data(), st.sampled_from([1.0, 1e2, 1e4, 2.5e5]))
def test_partials_of_any_split_merge_into_dense_attention(data, largest):
    seq_len = 12
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=seq_len, max_size=seq_len)))
    queries = torch.tensor(data.draw(st.lists(st.integers(0, seq_len - 1), min_size=S, max_size=S)))
    q, k, v = inputs(seq_len, seed=data.draw(SEEDS))
    scale = largest / float(torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(H // HK, 2)).abs().max())
    mask = ra.sliding_window(4, 1)
    merged = EMPTY
    for part in range(4):
        at = owner == part
        keys = torch.arange(seq_len)[at]
        merged = ra.merge(
            merged,
            ra.attend(q, k[:, at], v[:, at], mask=mask, q_positions=queries, k_positions=keys, softmax_scale=scale),
        )
    distance = queries[:, None] - torch.arange(seq_len)
    out, lse = dense(q, k, v, (distance <= 4) & (distance >= -1), scale)
    # a score of 2.5e5 is rounded by 3e-11, which exp turns into a relative error
    tolerance = 1e-13 * max(10.0, largest)
    torch.testing.assert_close(ra.finish(merged), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(merged.stats.lse, lse, rtol=1e-12, atol=1e-12)


def test_a_partial_that_sees_nothing_changes_nothing():
    q, k, v = inputs(S)
    seen = ra.attend(q, k, v, mask=ra.causal())
    later = torch.arange(100, 100 + S)
    unseen = ra.attend(q, k, v, mask=ra.causal(), q_positions=torch.arange(S), k_positions=later)
    assert_same(unseen, EMPTY)
    assert_same(ra.merge(seen, unseen), seen, 1e-15)


def test_logits_too_far_apart_for_exp_underflow_to_zero_weight():
    q, k, v = (torch.ones(1, 1, 1, 1, dtype=torch.float64) for _ in range(3))
    low, high = ra.attend(q, -2.5e5 * k, v, mask=ra.full()), ra.attend(q, 2.5e5 * k, 3 * v, mask=ra.full())
    for merged in (ra.merge(low, high), ra.merge(high, low)):
        assert float(merged.out) == 3
        assert float(merged.row_sum) == 1
        assert float(merged.stats.lse) == 2.5e5


# finish and stats


def test_finish():
    part = random_partial(0)
    assert ra.finish(part) is part.out
    out, stats = ra.finish(part, torch.bfloat16, return_stats=True)
    assert out.dtype == torch.bfloat16
    assert stats.row_max is part.row_max
    assert stats.row_sum is part.row_sum
    assert torch.equal(stats.lse, part.row_max + part.row_sum.log())


def test_lse_of_a_row_whose_sum_is_nan_is_nan():
    assert ra.Stats(torch.tensor([0.5]), torch.tensor([math.nan])).lse.isnan().all()


def test_lse_of_an_empty_row_is_minus_infinity_with_a_finite_gradient():
    row_sum = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    lse = ra.Stats(torch.tensor([-math.inf, 1.0], dtype=torch.float64), row_sum).lse
    assert lse.tolist() == [-math.inf, 1 + math.log(2)]
    lse[1].backward()
    assert row_sum.grad.tolist() == [0.0, 0.5]


# gradients


def halves(q, k, v, mask):
    """Attention of q to all keys, from its partials over the even and the odd ones."""
    parts = [ra.attend(q, k[:, i::2], v[:, i::2], mask=mask, k_positions=torch.arange(i, k.shape[1], 2)) for i in (0, 1)]
    return ra.merge(*parts)


def small_inputs():
    """Four tokens, two query heads on one key head: few, since gradcheck runs once for each element."""
    return [x[:1, :4, :heads].requires_grad_() for x, heads in zip(inputs(4), (2, 1, 1))]


MASKS = {"full": ra.full(), "causal": ra.causal(), "some-rows-empty": ra.documents([2]), "window": ra.sliding_window(1)}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.some(2)
def test_gradcheck_of_attend_merge_finish(name):
    tensors = small_inputs()
    torch.autograd.gradcheck(lambda q, k, v: ra.finish(halves(q, k, v, MASKS[name])), tensors)


@pytest.mark.parametrize("name", ["full", "causal"])
def test_gradcheck_of_lse(name):
    tensors = small_inputs()
    torch.autograd.gradcheck(lambda q, k, v: halves(q, k, v, MASKS[name]).stats.lse, tensors)
    torch.autograd.gradcheck(lambda q, k, v: ra.attend(q, k, v, mask=MASKS[name]).stats.lse, tensors)


def test_gradients_of_the_merge_are_those_of_the_whole():
    tensors = [x.requires_grad_() for x in inputs(S)]
    dout = torch.randn(B, S, H, D_V, dtype=torch.float64)
    wanted = torch.autograd.grad(ra.finish(ra.attend(*tensors)), tensors, dout)
    got = torch.autograd.grad(ra.finish(halves(*tensors, ra.causal())), tensors, dout)
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_gradients_of_rows_that_see_nothing_are_zero():
    q, k, v = (x.requires_grad_() for x in inputs(S))
    nothing = ra.documents([0])
    grads = torch.autograd.grad(ra.finish(halves(q, k, v, nothing)).sum(), (q, k, v))
    assert all(not grad.any() for grad in grads)


# refusals


def partial(b=1, s=2, h=3, d_v=4, dtype=torch.float32):
    return ra.Partial(torch.zeros(b, s, h, d_v, dtype=dtype), torch.zeros(b, h, s, dtype=dtype), torch.zeros(b, h, s, dtype=dtype))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (partial(b=2), "do not merge: both must be of the same queries and heads"),
        (partial(s=3), r"\(1, 2, 3, 4\) and \(1, 3, 3, 4\) do not merge"),
        (partial(h=1), "do not merge"),
        (partial(d_v=1), "do not merge"),
        (partial(dtype=torch.float64), "dtypes torch.float32 and torch.float64 do not merge"),
    ],
    ids=["batch", "tokens", "heads", "head-dim", "dtype"],
)
def test_partials_that_do_not_match_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        ra.merge(partial(), other)
