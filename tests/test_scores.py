"""Modified scores against dense attention that builds the whole matrix: softcap, ALiBi, relative bias, sinks and dropout."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.device.philox import kept, philox
from ringattn.transport import run_ranks
from ringattn_kernels.modifiers import Dropout
from tests.cuda_graphs import captured
from tests.strategies import examples, layouts, masks

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = dict(rtol=0, atol=1e-10)
PARTS = ("softcap", "alibi", "bias", "sinks", "dropout")
HALF, REST = slice(0, 11), slice(11, 20)
SCHEDULES = (None, ra.ring(), ra.gather(), ra.waves(2), ra.double_ring())


def leaf(x):
    return x.detach().clone().requires_grad_()


def tensors(s, h=4, hk=2, d=4, b=2, seed=0):
    """q, k, v, dout and dlse of a whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, s, h, d), (b, s, hk, d), (b, s, hk, d), (b, s, h, d), (b, h, s)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def parameters(h=4, b=2, buckets=None, seed=1):
    """Slopes, a table of biases and sinks."""
    generator = torch.Generator().manual_seed(seed)
    buckets = ra.t5_buckets(8, 12, bidirectional=True) if buckets is None else buckets
    shapes = (b, h), (h, buckets.count), (h,)
    return buckets, [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def make_score(parts, buckets, slopes, table, sinks):
    chosen = dict(
        softcap=1.5, alibi=slopes, bias=ra.relative_bias(table, buckets), sinks=sinks, dropout=0.3, seed=5 << 40 | 3, offset=7
    )
    keep = {*parts, "seed", "offset"}
    return ra.score(**{name: value for name, value in chosen.items() if name in keep})


def dense(q, k, v, dout, dlse, mask, parts, buckets, slopes, table, sinks):
    """out, lse, and the gradients of q, k, v, slopes, table and sinks, written down as the definitions say."""
    leaves = [leaf(x) for x in (q, k, v, slopes, table, sinks)]
    q, k, v, slopes, table, sinks = leaves
    (b, s, h, d), group = q.shape, q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d)
    query, key = torch.arange(s)[:, None], torch.arange(s)
    if "softcap" in parts:
        scores = 1.5 * torch.tanh(scores / 1.5)
    if "alibi" in parts:
        scores = scores - slopes[:, :, None, None] * (query - key).abs()
    if "bias" in parts:
        of = [[bucket_of(buckets, j - i) for j in range(s)] for i in range(s)]
        scores = scores + table[:, torch.tensor(of, dtype=torch.int64).view(s, s)]
    live = mask.dense(s)
    scores = scores.masked_fill(~live, float("-inf"))
    if "sinks" in parts:
        scores = torch.cat([scores, sinks.view(1, h, 1, 1).expand(b, h, s, 1)], dim=-1)
    seen = ~scores.isneginf().all(-1) if scores.shape[-1] else torch.zeros(b, h, s, dtype=torch.bool)
    safe = scores.masked_fill(~seen[..., None], 0.0)
    lse = safe.logsumexp(-1).masked_fill(~seen, float("-inf"))
    weights = (safe.softmax(-1) * seen[..., None])[..., :s]
    if "dropout" in parts:
        drawn = kept(Dropout(0.3, 5 << 40 | 3, 7, h), b, h, np.arange(s), np.arange(s))
        weights = weights * torch.from_numpy(drawn) / 0.7
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    total = (out * dout).sum() + (lse.masked_fill(~seen, 0.0) * dlse).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return out, lse, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads))


def bucket_of(buckets, distance):
    """The bucket of a distance: how many edges are at most as large says the piece."""
    return buckets.of_piece[sum(edge <= distance for edge in buckets.edges)]


def ring_of_ranks(transport, whole, score_parts, layout, mask, schedule, group=None):
    """A rank's out, lse and gradients."""
    q, k, v, dout, dlse, parts, buckets, *params = (*whole, *score_parts)
    rank = transport.rank if group is None else group.rank
    mine = [leaf(ra.shard(x, layout, rank)) for x in (q, k, v)]
    leaves = [leaf(x) for x in params]
    out, stats = ra.ring_attention(
        *mine,
        layout=layout,
        mask=mask,
        schedule=schedule,
        group=transport if group is None else group,
        score=make_score(parts, buckets, *leaves),
        return_stats=True,
    )
    lse = stats.lse
    total = (out * ra.shard(dout, layout, rank)).sum()
    total = total + (lse.masked_fill(lse.isinf(), 0.0) * ra.shard(dlse, layout, rank, dim=2)).sum()
    grads = torch.autograd.grad(total, [*mine, *leaves], allow_unused=True)
    return out.detach(), lse.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip([*mine, *leaves], grads))


def assert_exact(found, wanted, layout):
    """Each rank's rows, and the sum over ranks of the gradients of parameters."""
    for rank, got in enumerate(found):
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, wanted):
            y = ra.shard(y, layout, rank, dim=2 if name == "lse" else 1)
            torch.testing.assert_close(x, y, **EXACT, msg=lambda text, rank=rank, name=name: f"{name} on rank {rank}: {text}")
    for name, x, y in zip(("dslopes", "dtable", "dsinks"), (sum(x) for x in zip(*(got[5:] for got in found))), wanted[5:]):
        torch.testing.assert_close(x, y, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@st.composite
def cases(draw):
    s, size = draw(st.integers(0, 40)), draw(st.sampled_from([1, 2, 3, 5]))
    mask, _ = draw(masks(s))
    edges = sorted(draw(st.sets(st.integers(-45, 45), max_size=5)))
    parts = draw(st.sets(st.sampled_from(PARTS), min_size=1))
    return s, draw(layouts(s, size)), mask, ra.buckets(edges), parts, draw(st.sampled_from(SCHEDULES))


@given(cases())
@settings(max_examples=examples(60))
def test_any_score_is_exact_under_any_mask_layout_and_schedule(case):
    s, layout, mask, buckets, parts, schedule = case
    whole = tensors(s)
    buckets, params = parameters(buckets=buckets)
    wanted = dense(*whole, mask, parts, buckets, *params)
    score_parts = parts, buckets, *params
    found = run_ranks(
        layout.world_size,
        lambda t: ring_of_ranks(t, whole, score_parts, layout, mask, schedule),
        1 if schedule == SCHEDULES[-1] else None,
    )
    assert_exact(found, wanted, layout)


@pytest.mark.thorough
@pytest.mark.parametrize("s", [1300])
def test_blocks_of_a_long_sequence_fit_together(s):
    """Several blocks of queries and keys a tile."""
    whole, (buckets, params) = tensors(s, b=1), parameters(b=1, buckets=ra.buckets([-700, -500, -3, 0]))
    layout = ra.zigzag(s, 3)
    found = run_ranks(3, lambda t: ring_of_ranks(t, whole, (PARTS, buckets, *params), layout, ra.causal(), None))
    assert_exact(found, dense(*whole, ra.causal(), PARTS, buckets, *params), layout)


def over_gloo(group, mesh_shape=None):
    """A rank's results over a process group or a grid of ranks."""
    s = 37
    whole, (buckets, params) = tensors(s), parameters(h=8 if mesh_shape else 4)
    if mesh_shape:
        whole = tensors(s, h=8, hk=4)
    layout = ra.zigzag(s, group.size())
    where = ra.hybrid(init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ring", "heads"))) if mesh_shape else None
    return ring_of_ranks(
        ra.process_group(group), whole, (PARTS, buckets, *params), layout, ra.sliding_window(20, 3), None, group=where
    )


@pytest.mark.parametrize("mesh_shape", [None, (4, 2), (1, 8)])
@pytest.mark.some(1)
def test_process_groups_and_grids(gloo, mesh_shape):
    found = gloo.run(8 if mesh_shape else 3, over_gloo, mesh_shape)
    whole, (buckets, params) = tensors(37), parameters(h=8 if mesh_shape else 4)
    if mesh_shape:
        whole = tensors(37, h=8, hk=4)
    assert_exact(found, dense(*whole, ra.sliding_window(20, 3), PARTS, buckets, *params), ra.zigzag(37, len(found)))


@pytest.mark.parametrize("parts", [("softcap",), ("alibi", "sinks"), ("bias",), PARTS], ids=str)
def test_the_oracle(parts):
    whole, (buckets, params) = tensors(23), parameters()
    wanted = dense(*whole, ra.causal(), parts, buckets, *params)
    leaves = [leaf(x) for x in (*whole[:3], *params)]
    score = make_score(parts, buckets, *leaves[3:])
    out, stats = ra.reference.attention(*leaves[:3], score=score, return_stats=True)
    grads = torch.autograd.grad([out, stats.lse], leaves, [whole[3], whole[4]], allow_unused=True)
    for x, y in zip((out, stats.lse, *grads), wanted):
        torch.testing.assert_close(torch.zeros_like(y) if x is None else x, y, **EXACT)


def test_partials_of_keys_merge(monkeypatch):
    """With positions in any order, and sinks in one of the calls."""
    s = 29
    whole, (buckets, params) = tensors(s), parameters()
    wanted = dense(*whole, ra.causal(), PARTS, buckets, *params)
    order, leaves = torch.randperm(s), [leaf(x) for x in params]
    q, k, v = (x[:, order] for x in whole[:3])
    parts = []
    for n, keys in enumerate(torch.arange(s).chunk(3)):
        score = make_score(PARTS if n == 1 else set(PARTS) - {"sinks"}, buckets, *leaves)
        parts.append(ra.attend(q, k[:, keys], v[:, keys], q_positions=order, k_positions=order[keys], score=score))
    out, stats = ra.finish(ra.merge(ra.merge(*parts[:2]), parts[2]), return_stats=True)
    torch.testing.assert_close(out, wanted[0][:, order], **EXACT)
    torch.testing.assert_close(stats.lse, wanted[1][:, :, order], **EXACT)
    grads = torch.autograd.grad([out, stats.lse], leaves, [whole[3][:, order], whole[4][:, :, order]])
    for x, y in zip(grads, wanted[5:]):
        torch.testing.assert_close(x, y, **EXACT)


def test_gradcheck():
    (q, k, v, *_), (buckets, params) = tensors(5, h=2, hk=1, d=2, b=1), parameters(h=2, b=1)
    leaves = [leaf(x) for x in (q, k, v, *params)]
    assert torch.autograd.gradcheck(lambda q, k, v, *p: ra.ring_attention(q, k, v, score=make_score(PARTS, buckets, *p)), leaves)


# which pairs are dropped


def test_philox_gives_the_published_numbers():
    """The known answers of Random123 for a counter and a key of zeros and of ones."""
    zeros, ones = (np.zeros(1, np.int64),) * 4, (np.full(1, 0xFFFFFFFF),) * 4

    def numbers(counter, seed, rounds):
        return [int(x[0]) for x in philox(counter, seed, rounds)]

    assert numbers(zeros, 0, 7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert numbers(zeros, 0, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert numbers(ones, (1 << 64) - 1, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_pairs_is_p(p):
    live = kept(Dropout(p, 11, 0, 3), 2, 3, np.arange(1000), np.arange(700))
    assert abs((~live).mean() - p) < 4 * math.sqrt(p * (1 - p) / live.size)
    # heads, batches, rows and columns differ
    assert len({row.tobytes() for row in live.reshape(-1, 700)}) > (5900 if p > 0.001 else 100)


def test_other_seeds_and_offsets_drop_other_pairs():
    drawn = [kept(Dropout(0.5, seed, offset, 1), 1, 1, *[np.arange(64)] * 2) for seed in (1, 1 << 33, 1 << 62) for offset in (0, 9)]
    for one, other in itertools.combinations(drawn, 2):
        assert 0.4 < (one == other).mean() < 0.6


def test_a_pair_is_kept_or_dropped_wherever_it_is():
    whole = kept(Dropout(0.3, 3, 1, 5), 2, 5, np.arange(100), np.arange(90))
    q, k = np.random.default_rng(0).permutation(100)[:33], np.random.default_rng(1).permutation(90)[:41]
    assert np.array_equal(kept(Dropout(0.3, 3, 1, 5, 2), 2, 3, q, k), whole[:, 2:][:, :, q][..., k])


def test_a_seed_comes_from_torchs_generator():
    q, k, v, *_ = tensors(30)

    def draw():
        return ra.ring_attention(q, k, v, score=ra.score(dropout=0.5))

    torch.manual_seed(0)
    first, second = draw(), draw()
    torch.manual_seed(0)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)


def checkpointed(group):
    """A rank's gradients with and without activation checkpointing, of a seed from torch's generator."""
    whole, layout = tensors(20), ra.zigzag(20, group.size())
    found = []
    for again in (False, True):
        torch.manual_seed(3)
        mine = [leaf(ra.shard(x, layout, group.rank())) for x in whole[:3]]

        def attend(q, k, v):
            return ra.ring_attention(q, k, v, layout=layout, group=group, score=ra.score(dropout=0.4))

        out = torch.utils.checkpoint.checkpoint(attend, *mine, use_reentrant=False) if again else attend(*mine)
        found.append([out, *torch.autograd.grad(out.square().sum(), mine)])
    return all(torch.equal(x, y) for x, y in zip(*found))


def test_checkpointing_draws_the_same_again(gloo):
    assert all(gloo.run(2, checkpointed))


def test_a_table_is_learned_after_a_call_in_inference_mode():
    """What a call keeps for later ones must serve their backward pass."""
    buckets = ra.buckets([-77, 3])
    table = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    q, k, v, *_ = tensors(20)
    with torch.inference_mode():
        ra.ring_attention(q, k, v, score=ra.score(bias=ra.relative_bias(table, buckets)))
    ra.ring_attention(q, k, v, score=ra.score(bias=ra.relative_bias(table, buckets))).sum().backward()
    assert table.grad is not None


# T5's buckets and ALiBi's slopes


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("count", "max_distance"), [(32, 128), (8, 12), (64, 1000)])
def test_buckets_are_those_of_transformers(bidirectional, count, max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-3 * max_distance, 3 * max_distance)
    wanted = t5.T5Attention._relative_position_bucket(distance, bidirectional, count, max_distance)
    buckets = ra.t5_buckets(count, max_distance, bidirectional=bidirectional)
    assert [bucket_of(buckets, x) for x in distance.tolist()] == wanted.tolist()
    assert buckets.count == count


@pytest.mark.parametrize("h", [1, 2, 3, 6, 8, 12, 40, 71])
def test_slopes_are_those_of_transformers(h):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    wanted = bloom.build_alibi_tensor(torch.ones(1, 2), h, torch.float32)[:, 0, 1]
    torch.testing.assert_close(ra.alibi_slopes(h), wanted, rtol=1e-6, atol=0)


# what is refused

Q = torch.zeros(2, 6, 4, 8)
BUCKETS = ra.t5_buckets(bidirectional=False)
BIAS = ra.relative_bias(torch.zeros(4, 32), BUCKETS)
BAD_SCORES = {
    "softcap": (dict(softcap=0.0), "softcap is 0.0, but must be more than 0"),
    "negative softcap": (dict(softcap=-1.0), "softcap is -1.0, but must be more than 0"),
    "NaN softcap": (dict(softcap=math.nan), "softcap is nan, but must be finite"),
    "infinite softcap": (dict(softcap=math.inf), "softcap is inf, but must be finite"),
    "softcap is no number": (dict(softcap="30"), "softcap is '30', but must be a Python number"),
    "p": (dict(dropout=1.0), "dropout is 1.0, but must be less than 1"),
    "p of more than 1": (dict(dropout=1.5), "dropout is 1.5, but must be less than 1"),
    "NaN p": (dict(dropout=math.nan), "dropout is nan, but must be finite"),
    "p as a tensor": (dict(dropout=torch.tensor(0.1)), r"dropout is a tensor of shape \(\), but must be a Python number"),
    "negative p": (dict(dropout=-0.1), "dropout is -0.1, but must be at least 0.0"),
    "seed": (dict(dropout=0.1, seed=-1), "seed is -1, but must be at least 0"),
    "offset": (dict(dropout=0.1, offset=1 << 32), "offset is 4294967296, but must be at most 4294967295"),
    "dense bias": (dict(bias=torch.zeros(4, 6, 6)), "ringattn takes no dense bias"),
    "bias is a table": (dict(bias=torch.zeros(4, 32)), r"bias is a tensor of shape \(4, 32\), but must be a RelativeBias"),
    "slopes are numbers": (dict(alibi=[0.5, 0.25]), "alibi is a list, but must be a torch.Tensor"),
    "slopes of 3 dimensions": (dict(alibi=torch.zeros(1, 4, 1)), r"shape \(1, 4, 1\), but must hold .* in 1 or 2 dimensions"),
    "integer slopes": (dict(alibi=torch.arange(4)), "alibi has dtype torch.int64"),
    "sinks of 2 dimensions": (dict(sinks=torch.zeros(1, 4)), r"sinks has dtype torch.float32 and shape \(1, 4\)"),
}
BAD_CALLS = {
    "slopes": (dict(alibi=torch.zeros(3)), r"alibi has shape \(3,\), but must be \(4,\) or \(2, 4\)"),
    "slopes of a batch": (dict(alibi=torch.zeros(4, 2)), r"alibi has shape \(4, 2\), but must be \(4,\) or \(2, 4\)"),
    "sinks": (dict(sinks=torch.zeros(2)), r"sinks has shape \(2,\), but must be \(4,\)"),
    "table": (dict(bias=ra.relative_bias(torch.zeros(8, 32), BUCKETS)), "the table of bias has 8 heads, but q has 4"),
}


@pytest.mark.parametrize("case", BAD_SCORES)
def test_bad_scores_are_refused(case):
    arguments, message = BAD_SCORES[case]
    with pytest.raises(ValueError, match=message):
        ra.score(**arguments)


@pytest.mark.parametrize("other", ["alibi", dict(softcap=1.0), torch.zeros(4), BIAS], ids=lambda x: type(x).__name__)
def test_what_is_no_score_is_refused_on_every_rank(other):
    def work(transport):
        q = torch.zeros(2, 3, 4, 8)
        with pytest.raises(ValueError, match=r"(?s)score is .*, but must be a ScoreMod: build one with score\(softcap=...\)"):
            ra.ring_attention(q, q, q, group=transport, score=other if transport.rank else None)

    run_ranks(2, work)
    for function in (ra.attend, ra.reference.attention):
        with pytest.raises(ValueError, match="but must be a ScoreMod"):
            function(Q, Q, Q, score=other)
    with pytest.raises(ValueError, match="but must be a ScoreMod"):
        ra.replace_attention(torch.nn.Identity(), score=other)


@pytest.mark.parametrize("case", BAD_CALLS)
def test_what_does_not_fit_q_is_refused_on_every_rank(case):
    arguments, message = BAD_CALLS[case]

    def work(transport):
        q = torch.zeros(2, 3, 4, 8)
        score = ra.score(**arguments) if transport.rank else None
        with pytest.raises(ValueError, match=message):
            ra.ring_attention(q, q, q, group=transport, score=score)

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("mine", "yours", "name"),
    [
        (None, dict(sinks=torch.zeros(4)), "score"),
        (dict(softcap=1.0), dict(softcap=2.0), "score"),
        (dict(bias=BIAS), dict(bias=ra.relative_bias(torch.zeros(4, 32), ra.buckets(range(31)))), "score"),
        (dict(dropout=0.1, seed=1), dict(dropout=0.1, seed=2), "seed and offset of dropout"),
        (dict(dropout=0.1, seed=1), dict(dropout=0.1, seed=1, offset=1), "seed and offset of dropout"),
    ],
    ids=["sinks on one rank", "softcap", "buckets", "seed", "offset"],
)
def test_ranks_that_disagree_are_told(mine, yours, name):
    def work(transport):
        options = yours if transport.rank == 2 else mine
        q = torch.zeros(2, 3, 4, 8)
        with pytest.raises(ValueError, match=rf"{name}.*rank 2") as caught:
            ra.ring_attention(q, q, q, group=transport, score=None if options is None else ra.score(**options))
        return str(caught.value)

    assert len(set(run_ranks(3, work))) == 1


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (ra.buckets, ([3, 1],), "must ascend"),
        (ra.buckets, (list(range(1024)),), "may have at most 1023"),
        (ra.buckets, ([1 << 50],), "positions are less than"),
        (ra.relative_bias, (torch.zeros(4, 31), BUCKETS), "a column for each of the 32 buckets"),
        (ra.relative_bias, (torch.zeros(4, 32), 32), "must be a Buckets"),
        (ra.alibi_slopes, (0,), "h is 0, but must be at least 1"),
    ],
)
def test_bad_parts_are_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_positions_beyond_32_bits_are_refused():
    q = torch.zeros(1, 1, 2, 8)
    far = torch.tensor([1 << 31])
    with pytest.raises(ValueError, match=r"take at most 2\*\*31"):
        ra.attend(q, q, q, q_positions=far, k_positions=far, score=ra.score(alibi=torch.zeros(2)))
    assert ra.attend(q, q, q, q_positions=far, k_positions=far, score=ra.score(softcap=1.0)).out.shape == q.shape


# positions of queries and keys, and what slopes are multiplied by so that many keys have weight
FAR = {
    "at 2^20": ((1 << 20) - 61 + torch.arange(61), (1 << 20) - 200 + torch.arange(200), 1.0),
    "at 2^31": ((1 << 31) - 61 + torch.arange(61), (1 << 31) - 200 + torch.arange(200), 1.0),
    "every ninth": ((1 << 20) + 9 * torch.arange(-61, 0), (1 << 20) + 9 * torch.arange(-200, 0), 0.1),
    "2^20 apart": ((1 << 20) - 61 + torch.arange(61), torch.arange(200) * 5231, 1e-5),
}


def with_distances(q, k, v, dout, slopes, distances):
    """out and the gradients of q, k, v and slopes, in fp64. distances: (queries, keys), or (h, queries, keys) with the slopes in them."""
    leaves = [leaf(x.double()) for x in (q, k, v, slopes)]
    scores = torch.einsum("bqhd,bkhd->bhqk", *leaves[:2]) / math.sqrt(q.shape[3])
    scores = scores - (leaves[3][:, None, None] * distances if distances.dim() == 2 else distances)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), leaves[2])
    return out, *(x for x in torch.autograd.grad(out, leaves, dout.double(), allow_unused=True) if x is not None)


def farthest(found, wanted):
    """The largest relative difference of results."""
    return max(float((x.detach().double().cpu() - y).norm() / y.norm()) for x, y in zip(found, map(torch.detach, wanted)))


@pytest.mark.parametrize(
    ("dtype", "device", "bound"),
    [
        (torch.float64, "cpu", 1e-11),
        (torch.float32, "cpu", 2e-6),
        pytest.param(torch.float32, "cuda", 2e-5, marks=pytest.mark.gpu),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", FAR)
def test_slopes_times_distances_are_exact_at_far_positions(case, dtype, device, bound):
    """A result in which positions, or slopes times positions, are rounded is at least 50 times as far from fp64 as the bound."""
    at_q, at_k, scale = FAR[case]
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 61, 3, 8), (1, 200, 3, 8), (1, 200, 3, 8), (1, 61, 3, 8)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    slopes = scale * torch.tensor([0.7, 0.3, 0.07])
    exact = with_distances(q, k, v, dout, slopes, (at_k - at_q[:, None]).abs().double())
    mine = [leaf(x.to(device)) for x in (q, k, v, slopes.to(dtype))]
    part = ra.attend(*mine[:3], mask=ra.full(), q_positions=at_q, k_positions=at_k, score=ra.score(alibi=mine[3]))
    found = part.out, *torch.autograd.grad(part.out, mine, dout.to(device, part.out.dtype))
    assert farthest(found, exact) <= bound

    in_half = (at_k.bfloat16() - at_q.bfloat16()[:, None]).abs().double()
    products = [slopes[:, None, None] * x.float() for x in (at_k, at_q[:, None])]
    rounded = {"positions": in_half, "products": (products[0] - products[1]).abs().double()}
    if case == "2^20 apart":
        del rounded["products"]  # their error is 1e-6 here
    for name, distances in rounded.items():
        assert farthest(with_distances(q, k, v, dout, slopes, distances), exact) > 50 * bound, name


def test_compiled_calls_have_modified_scores():
    whole, (buckets, params) = tensors(23), parameters()
    leaves = [leaf(x) for x in (*whole[:3], *params)]
    score = make_score(PARTS, buckets, *leaves[3:])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q, k, v):
        return ra.ring_attention(q, k, v, score=score)

    out = attend(*leaves[:3])
    wanted = ra.ring_attention(*leaves[:3], score=score)
    assert torch.equal(out, wanted)
    for x, y in zip(torch.autograd.grad(out, leaves, whole[3]), torch.autograd.grad(wanted, leaves, whole[3])):
        torch.testing.assert_close(x, y, **EXACT)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_calls_drop_what_eager_calls_drop(checkpointed):
    """With a seed from torch's generator: the same pairs in a call, in its backward pass and where a checkpoint computes it again."""
    whole = tensors(20)

    def attend(q, k, v):
        return ra.ring_attention(q, k, v, score=ra.score(softcap=1.5, dropout=0.4))

    def twice(q, k, v):
        once = functools.partial(torch.utils.checkpoint.checkpoint, attend, use_reentrant=False) if checkpointed else attend
        return once(q, k, once(q, k, v)[:, :, :2])

    torch.compiler.reset()
    found = []
    for run in (twice, torch.compile(twice, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        for _ in range(2):
            leaves = [leaf(x) for x in whole[:3]]
            out = run(*leaves)
            found.append([out, *torch.autograd.grad(out, leaves, whole[3])])
    torch.compiler.reset()
    for eager, compiled in zip(found[:2], found[2:]):
        for x, y in zip(eager, compiled):
            torch.testing.assert_close(x, y, **EXACT)
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "layers"])
def test_local_attention_draws_the_same_again(how):
    """`attend` in a checkpointed function, and ring attention in checkpointed layers, whose attention runs once."""
    whole = tensors(20)

    def attend(q, k, v):
        parts = [ra.attend(q, k[:, n], v[:, n], k_positions=torch.arange(20)[n], score=ra.score(dropout=0.4)) for n in (HALF, REST)]
        return ra.finish(ra.merge(*parts))

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return ra.ring_attention(q, k, v, score=ra.score(dropout=0.4))

    found = []
    for again in (False, True):
        torch.manual_seed(3)
        leaves = [leaf(x) for x in whole[:3]]
        run = Layer() if how == "layers" else attend
        if again and how == "layers":
            ra.checkpoint_layers([run])
        elif again:
            run = functools.partial(torch.utils.checkpoint.checkpoint, attend, use_reentrant=how == "reentrant")
        out = run(*leaves)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*found))


# on GPUs


def on_a_gpu(attention, whole, params, parts, buckets, dtype, softmax_scale):
    """out, lse and gradients of attention on a GPU in a dtype, in fp64."""
    leaves = [leaf(x.cuda().to(dtype)) for x in whole[:3]] + [leaf(x.cuda().float()) for x in params]
    score = make_score(parts, buckets, *leaves[3:])
    out, stats = attention(*leaves[:3], score=score, softmax_scale=softmax_scale, return_stats=True)
    total = (out.float() * whole[3].cuda().float()).sum() + (stats.lse.float() * whole[4].cuda().float()).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros(1).double() if x is None else x.detach().double().cpu() for x in (out, stats.lse, *grads)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("parts", "sign"),
    [*[((part,), 1) for part in PARTS], (PARTS, 1), (("softcap",), -1), (("alibi",), -1), (PARTS, -1), (("bias",), 0)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_errors_on_a_gpu_are_those_of_dense_attention(parts, sign, dtype):
    """sign: of softmax_scale, as dense attention has it in q."""
    whole = [x.to(dtype).double() for x in tensors(700, d=64)]
    buckets, params = parameters(buckets=ra.t5_buckets(32, 128, bidirectional=False))
    params = [x.float().double().abs() for x in params]
    exact = [*dense(sign * whole[0], *whole[1:], ra.causal(), parts, buckets, *params)]
    exact[2] = sign * exact[2]
    ours, theirs = (
        on_a_gpu(attention, whole, params, parts, buckets, dtype, sign * 0.125)
        for attention in (ra.ring_attention, ra.reference.attention)
    )
    names = ("out", "lse", "dq", "dk", "dv", "dslopes", "dtable", "dsinks")
    for name, x, y, wanted in zip(names, ours, theirs, exact):
        limit = (2 if name in ("out", "lse") else 3) * (y - wanted).norm() + 1e-6 * wanted.norm()
        assert (x - wanted).norm() <= limit, (
            name,
            float((x - wanted).norm() / wanted.norm()),
            float((y - wanted).norm() / wanted.norm()),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("first", [0, 5, 1 << 20])
def test_a_gpu_drops_the_same_pairs(dtype, first):
    """Each value is a unit vector, so that the output shows which weights there are; and so does the gradient of the values."""
    s, h = 200, 3
    q, k = (torch.zeros(2, s, h, 16, device="cuda", dtype=dtype) for _ in range(2))
    v = torch.eye(s, device="cuda", dtype=dtype)[None, :, None].repeat(2, 1, h, 1).requires_grad_()
    positions = torch.arange(first, first + s)
    part = ra.attend(
        q, k, v, mask=ra.full(), q_positions=positions, k_positions=positions, score=ra.score(dropout=0.4, seed=9 << 50, offset=3)
    )
    wanted = torch.from_numpy(kept(Dropout(0.4, 9 << 50, 3, h), 2, h, positions.numpy(), positions.numpy()))
    assert torch.equal(part.out.transpose(1, 2).cpu() != 0, wanted)
    dv = torch.autograd.grad(part.out, v, torch.eye(s, device="cuda")[None, :, None].expand(2, s, h, s))[0]
    assert torch.equal(dv.permute(0, 2, 3, 1).cpu() != 0, wanted)


class Step:
    """Both passes of a call whose inputs change in place, checkpointed or not; `seed` and `offset` are those of dropout."""

    def __init__(self, parts, dtype, checkpointed):
        self.parts, self.checkpointed = parts, checkpointed
        whole, (self.buckets, params) = tensors(333, d=64), parameters()
        *leaves, self.dout = (x.cuda().to(dtype) for x in whole[:4])
        self.leaves, self.params = [leaf(x) for x in leaves], [leaf(x.float().cuda()) for x in params]
        self.seed, self.offset = 5 << 40 | 3, 7

    def attend(self, q, k, v, *params):
        score = replace(make_score(self.parts, self.buckets, *params), seed=self.seed, offset=self.offset)
        return ra.ring_attention(q, k, v, score=score)

    def __call__(self):
        run = self.attend
        if self.checkpointed:
            # states of generators cannot be read in a capture
            options = dict(use_reentrant=False, preserve_rng_state=False, context_fn=CONTEXTS[self.checkpointed])
            run = functools.partial(torch.utils.checkpoint.checkpoint, run, **options)
        out = run(*self.leaves, *self.params)
        learned = [x for x, part in zip(self.params, ("alibi", "bias", "sinks")) if part in self.parts]
        return [out.detach(), *torch.autograd.grad(out, [*self.leaves, *learned], self.dout)]

    def change(self, number):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for x in (*self.leaves, self.dout):
                x.copy_(torch.randn(x.shape, generator=generator))


@pytest.fixture
def same_bits():
    """dq and the gradients of slopes and tables are sums in no fixed order without it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CONTEXTS = {"checkpointed": torch.utils.checkpoint.noop_context_fn, "attention runs once": ra.checkpoint_contexts}
IN_GRAPHS = [(("dropout",), torch.bfloat16), (("alibi", "bias", "dropout"), torch.bfloat16), (PARTS, torch.float32)]


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "dtype"), IN_GRAPHS, ids=str)
@pytest.mark.parametrize("checkpointed", [None, *CONTEXTS])
def test_a_graph_draws_what_eager_calls_draw(parts, dtype, checkpointed, same_bits):
    """Each replay draws with the seed and the offset of the capture, whatever the inputs are by then."""
    step = Step(parts, dtype, checkpointed)
    eager = Step(parts, dtype, None)
    graphs = {}
    for offset in (7, 8):
        step.offset = offset
        graphs[offset] = captured(step)
    step.offset = 9  # a replay runs no Python
    for number in range(3):
        found = {}
        for offset, (graph, results) in graphs.items():
            for x in (step, eager):
                x.change(number)
            eager.offset = offset
            wanted = eager()
            for _ in range(2):
                graph.replay()
                assert all(map(torch.equal, results, wanted))
            found[offset] = results[0].clone()
        assert not torch.equal(found[7], found[8])


@pytest.mark.gpu
def test_a_graph_without_a_seed_keeps_that_of_the_capture(same_bits):
    step = Step(("dropout",), torch.bfloat16, None)
    step.seed = None
    torch.manual_seed(4)
    graph, results = captured(step)
    state = torch.get_rng_state()
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed.append([x.clone() for x in results])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    *_, wanted = (step() for _ in range(4))  # three calls before the capture
    assert all(torch.equal(x, y) for found in replayed for x, y in zip(found, wanted, strict=True))
    assert not torch.equal(step()[0], wanted[0])


def ring_on_gpus(group):
    """The largest relative error of a rank's results in fp32, and of the sums of the gradients of parameters."""
    s = 777
    whole, (buckets, params) = tensors(s, d=64), parameters()
    layout = ra.zigzag(s, group.size())
    mine = [leaf(ra.shard(x, layout, group.rank()).float().cuda()) for x in whole[:3]]
    leaves = [leaf(x.float().cuda()) for x in params]
    out, stats = ra.ring_attention(*mine, layout=layout, score=make_score(PARTS, buckets, *leaves), group=group, return_stats=True)
    upstream = (
        ra.shard(whole[3], layout, group.rank()).float().cuda(),
        ra.shard(whole[4], layout, group.rank(), dim=2).float().cuda(),
    )
    grads = torch.autograd.grad([out, stats.lse], [*mine, *leaves], upstream)
    for x in grads[3:]:
        torch.distributed.all_reduce(x, group=group)
    exact = dense(*whole, ra.causal(), PARTS, buckets, *params)
    here = [ra.shard(x, layout, group.rank(), dim=2 if n == 1 else 1) for n, x in enumerate(exact[:5])] + list(exact[5:])
    return max(float((x.detach().double().cpu() - y).norm() / y.norm()) for x, y in zip((out, stats.lse, *grads), here))


@pytest.mark.gpu
def test_a_ring_of_gpus(nccl):
    assert max(nccl.run(2, ring_on_gpus)) < 2e-5
