"""`decode`: masks and scores against dense attention, on one rank and several; what it refuses."""

from __future__ import annotations

import pytest
import torch

import ringattn as ra
from ringattn.transport import run_ranks
from tests.serving.twin import Twin, reference

MASKS = {
    "causal": None,
    "window": ra.sliding_window(37),
    "itself": ra.sliding_window(0),
    "all": ra.sliding_window(None),
    "long window": ra.sliding_window(10**30),
}
SCORES = {
    "none": lambda: None,
    "softcap": lambda: ra.score(softcap=0.5),
    "alibi": lambda: ra.score(alibi=ra.alibi_slopes(6)),
    "sinks": lambda: ra.score(sinks=torch.linspace(-3, 3, 6)),
    "all": lambda: ra.score(softcap=2.0, alibi=ra.alibi_slopes(6), sinks=torch.linspace(-3, 3, 6)),
}


def filled(group, lengths, page_size=16, **options):
    """A twin whose sequences have some lengths."""
    twin = Twin(group, 0, pages=40, page_size=page_size, heads=(6, 2), **options)
    sequences = []
    for length in lengths:
        sequences.append(twin.add())
        twin.grow(sequences[-1:], length)
    return twin, sequences


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.some(12)
def test_masks_and_scores(world_size, mask, score, one_thread):
    options = dict(mask=MASKS[mask], score=SCORES[score]())

    def work(group):
        twin, sequences = filled(group, (70, 16, 17, 333), layers=1)
        return max(twin.error(sequences, tokens, **options) for tokens in (1, 2, 16))

    assert max(run_ranks(world_size, work)) < 1e-12


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.some(1)
def test_sizes_of_pages_and_a_scale(page_size, one_thread):
    def work(group):
        twin, sequences = filled(group, (1, 129, 255, 64), page_size)
        return twin.error(sequences, 1, softmax_scale=-0.3)

    assert max(run_ranks(2, work)) < 1e-12


def test_slopes_of_each_sequence(one_thread):
    slopes = torch.rand(3, 6, dtype=torch.float64)

    def work(group):
        twin, sequences = filled(group, (50, 3, 90), layers=1)
        q = twin.random(3, 2, 6, 5)
        out = ra.decode(q, twin.cache, twin.cache.extend(sequences, 0), score=ra.score(alibi=slopes))
        expected = [reference(q[i], *twin.kept[x][0], score=ra.score(alibi=slopes[i])) for i, x in enumerate(sequences)]
        return float((out - torch.stack(expected)).abs().max())

    assert max(run_ranks(3, work)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.some(1)
def test_error_is_within_the_contract(dtype, one_thread):
    """At most twice that of dense attention in the same dtype, on every rank."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 32, generator=generator).to(dtype) for n, h in ((3, 4), (600, 2), (600, 2)))
    exact = torch.stack([reference(*(x[i].double() for x in (q, k, v))) for i in range(2)])
    same = torch.stack([reference(q[i], k[i], v[i]) for i in range(2)])

    def work(group):
        cache = ra.PagedCache(pages=20, kv_heads=2, head_dim=32, dtype=dtype, group=group)
        batch = cache.extend([cache.add(), cache.add()], 600)
        cache.append(batch, k, v)
        out = ra.decode(q, cache, batch)
        assert out.dtype == dtype
        return out

    allowed = float((same.double() - exact).norm())
    for world_size in (1, 4):
        outs = run_ranks(world_size, work)
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert float((outs[0].double() - exact).norm()) <= 2 * allowed


def test_what_no_query_sees_may_be_no_number():
    """A page that was given up with NaN in it serves another sequence."""
    twin = Twin(None, 0, pages=3, page_size=16, layers=1)
    first = twin.add()
    batch = twin.cache.extend([first], 48)
    k, v = twin.fresh(1, 48)
    twin.cache.append(batch, k * float("nan"), v * float("inf"))
    twin.cache.free(first)
    sequence = twin.add()
    twin.grow([sequence], 37)
    assert twin.error([sequence], 3) < 1e-12
    assert twin.error([sequence], 1, mask=ra.sliding_window(2)) < 1e-12


def test_rejected_tokens_are_taken_back():
    """Speculative decoding: four tokens are checked at once, one of them is kept, and others come."""
    twin, (sequence,) = filled(None, (62,))
    batch = twin.grow([sequence], 4)
    assert twin.error([sequence], 4, batch) < 1e-12
    twin.truncate(sequence, 63)
    twin.grow([sequence], 4, into=batch)
    assert sequence.length == 67
    assert twin.error([sequence], 4, batch) < 1e-12


def bad_call(**changes):
    cache = ra.PagedCache(pages=4, kv_heads=2, head_dim=8, page_size=16)
    found = dict(q=torch.zeros(1, 2, 4, 8), cache=cache, batch=cache.extend([cache.add()], 20)) | changes
    return ra.decode(found.pop("q"), found.pop("cache"), found.pop("batch"), **found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(cache=3), "cache is 3, but must be a PagedCache"),
        (dict(batch=3), "batch is 3, but must be a CacheBatch: make one with extend"),
        (dict(q=3), "q is a int, but must be a torch.Tensor"),
        (dict(q=torch.zeros(1, 2, 8)), "q has 3 dimensions"),
        (dict(q=torch.zeros(2, 2, 4, 8)), r"q has shape \(2, 2, 4, 8\), but must be \(1, 2, 4, 8\) for this batch"),
        (dict(q=torch.zeros(1, 2, 3, 8)), "q has 3 heads, but must have a multiple of the cache's 2 key/value heads"),
        (dict(q=torch.zeros(1, 2, 0, 8)), "q has 0 heads"),
        (dict(q=torch.zeros(1, 17, 4, 8)), "q has 17 tokens, but must have from 1 to 16"),
        (dict(q=torch.zeros(1, 0, 4, 8)), "q has 0 tokens, but must have from 1 to 16"),
        (dict(q=torch.zeros(1, 2, 4, 8).half()), "q has dtype torch.float16, but the cache holds torch.float32"),
        (dict(q=torch.zeros(1, 2, 4, 8, device="meta")), "q is on meta, but the cache is on cpu"),
        (dict(q=torch.zeros(1, 2, 4, 8, requires_grad=True)), "decode has no backward pass"),
        (dict(layer=1), "layer is 1, but must be at most 0"),
        (dict(mask=ra.full()), r"mask is full\(\), but decode takes causal\(\) and sliding_window\(left\)"),
        (dict(mask=ra.sliding_window(3, 1)), "mask is sliding_window"),
        (dict(mask=ra.documents(lengths=[8])), "mask is documents"),
        (dict(mask=torch.ones(2, 2)), "mask is a tensor of shape"),
        (dict(softmax_scale=float("nan")), "softmax_scale is nan, but must be finite"),
        (dict(score=ra.score(dropout=0.1)), r"score is score\(dropout=0.1\), but decode takes a softcap, alibi and sinks"),
        (dict(score=ra.score(bias=ra.relative_bias(torch.zeros(4, 2), ra.buckets([0])))), "score is score.bias of"),
        (dict(score=ra.score(sinks=torch.zeros(3))), r"sinks has shape \(3,\), but must be \(4,\)"),
        (dict(score=30.0), "score is 30.0, but must be a ScoreMod"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_calls(changes, message):
    with pytest.raises(ValueError, match=message):
        bad_call(**changes)


def test_more_queries_than_tokens():
    twin, sequences = filled(None, (30, 2))
    with pytest.raises(
        ValueError, match=r"q has 3 tokens, but must have .* as many as each sequence: CachedSequence.number=2, length=2"
    ):
        twin.error(sequences, 3)


def test_gradients_are_refused_but_not_weights_that_have_them():
    with torch.no_grad():
        assert not bad_call(q=torch.zeros(1, 2, 4, 8, requires_grad=True)).requires_grad
