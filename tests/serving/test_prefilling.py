"""`prefill`: chunks against dense attention over the whole sequences, on every rank; what it refuses, and what moves."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.serving.pages import CachedSequence
from ringattn.serving.prefilling import alike_pages, page_layout
from ringattn.transport import run_ranks
from tests.serving.twin import Twin, reference

SCORES = {
    "none": lambda: None,
    "softcap": lambda: ra.score(softcap=1.5),
    "sinks": lambda: ra.score(sinks=torch.linspace(-2, 2, 4)),
    "alibi": lambda: ra.score(alibi=ra.alibi_slopes(4)),
    "slopes of each sequence": lambda: ra.score(alibi=torch.linspace(0.1, 0.9, 12).view(3, 4)),
    "bias": lambda: ra.score(bias=ra.relative_bias(torch.linspace(-1, 1, 12).view(4, 3), ra.buckets([-9, 0]))),
}


def one_score(score, row):
    """The score of one sequence of a batch."""
    return score if score is None or score.alibi is None or score.alibi.dim() == 1 else ra.score(alibi=score.alibi[row])


def prefill(twin, sequences, layout, score=None, **options):
    """The greatest difference of `prefill`, over all layers, from dense attention, with each token once."""
    batch, worst = twin.cache.extend(sequences, layout.seq_len), 0.0
    for layer in range(twin.layers):
        q, new = (
            twin.random(len(sequences), layout.seq_len, twin.heads[0], twin.dims[0]),
            twin.fresh(len(sequences), layout.seq_len),
        )
        for i, sequence in enumerate(sequences):
            twin.kept[sequence][layer] = [torch.cat([x, y[i]]) for x, y in zip(twin.kept[sequence][layer], new)]
        shards = [ra.shard(x, layout, twin.rank) for x in (q, *new)]
        out = ra.prefill(*shards, twin.cache, batch, layout, layer=layer, score=score, **options)
        dense = {name: value for name, value in options.items() if name != "schedule"}
        wanted = [reference(q[i], *twin.kept[x][layer], score=one_score(score, i), **dense) for i, x in enumerate(sequences)]
        off = (out - ra.shard(torch.stack(wanted), layout, twin.rank)).abs()
        worst = max(worst, float(off.max()) if off.numel() else 0.0)
    return worst


def chunks(group, seed, score="none", window=None):
    """Chunks of several lengths and layouts of three sequences, between other changes of the cache; the greatest error, decode's too."""
    draw = np.random.default_rng(seed)
    twin = Twin(group, seed, pages=40, page_size=16)
    sequences = [twin.add() for _ in range(3)]
    twin.grow(sequences[1:2], 37)
    twin.grow(sequences[2:], 130)
    mask, worst = (None if window is None else ra.sliding_window(window)), 0.0
    for n in (31, 1, 48, 2):
        layout = (ra.contiguous, ra.zigzag, ra.striped)[draw.integers(3)](n, twin.size)
        schedule = (None, ra.pass_q(), ra.ring(), ra.gather())[draw.integers(4)]
        some = sequences if score == "slopes of each sequence" else [x for x in sequences if draw.random() < 0.7] or sequences[:1]
        worst = max(worst, prefill(twin, some, layout, SCORES[score](), mask=mask, schedule=schedule))
        if window is not None:
            for sequence in sequences:
                twin.cache.evict(sequence, max(0, sequence.length - window))
    last = min(16, *(x.length for x in sequences))
    return max(worst, twin.error(sequences, min(2, last), mask=mask))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.some(1)
def test_chunks_over_gloo(gloo, world_size):
    assert max(gloo.run(world_size, chunks, world_size)) < 1e-12
    assert max(gloo.run(world_size, chunks, 3, "none", 20)) < 1e-12


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.some(2)
def test_scores(score, one_thread):
    assert max(run_ranks(3, lambda group: chunks(group, 4, score))) < 1e-12


def moved(group, cached, tokens):
    """What moves in a chunk after so many tokens."""
    twin = Twin(group, 0, pages=400, page_size=16, layers=1)
    sequences = [twin.add()]
    twin.grow(sequences, cached)
    batch = twin.cache.extend(sequences, tokens)
    layout = ra.zigzag(tokens, twin.size)
    shards = [ra.shard(torch.zeros(1, tokens, h, d, dtype=torch.float64), layout, twin.rank) for h, d in ((4, 5), (2, 5), (2, 3))]
    ra.prefill(*shards, twin.cache, batch, layout)
    (chunk,) = next(value for key, value in batch.plans.items() if "prefill" in key)
    return chunk.work.program.queries_move


def test_queries_move_where_pages_are_more_bytes(one_thread):
    # a row of keys is 16 numbers, one of queries and its partial 40
    assert run_ranks(3, lambda group: moved(group, 0, 60)) == [False] * 3
    assert run_ranks(3, lambda group: moved(group, 600, 30)) == [True] * 3


def live_pairs(layout, mask, kv_layout, q_offset):
    """By rank and owner: which of a rank's queries see which of an owner's rows."""
    plan = ra.make_plan(layout, mask, kv_layout, q_offset)
    found = []
    for rank in range(layout.world_size):
        for owner in range(layout.world_size):
            live = np.zeros((layout.lengths[rank], kv_layout.lengths[owner]), dtype=int)
            for q_begin, q_end, k_begin, k_end, lo, hi in plan.tiles(rank, owner).tolist():
                apart = np.arange(q_begin, q_end)[:, None] - np.arange(k_begin, k_end)
                live[q_begin:q_end, k_begin:k_end] += (lo <= apart) & (apart <= hi)
            found.append(live)
    return found


def test_pages_that_are_seen_alike_trade_positions():
    draw, spans = np.random.default_rng(5), []
    for _ in range(60):
        size, ranks, evicted = int(draw.integers(1, 6)), int(draw.integers(1, 5)), int(draw.integers(0, 4))
        length, home = evicted * size + int(draw.integers(1, 90)), int(draw.integers(ranks))
        tokens = int(draw.integers(1, min(30, length - evicted * size) + 1))
        window = (None, int(draw.integers(0, 80)))[draw.integers(2)]
        mask = ra.causal() if window is None else ra.sliding_window(window)
        sequence, layout = CachedSequence(0, length, home, evicted=evicted), ra.zigzag(tokens, ranks)
        exact = page_layout(sequence, size, ranks)
        layouts = exact, page_layout(sequence, size, ranks, alike_pages(sequence, size, tokens, window))
        wanted, found = (live_pairs(layout, mask, x, x.seq_len - tokens) for x in layouts)
        assert all(map(np.array_equal, wanted, found))
        spans.append([sum(map(len, x.spans)) for x in layouts])
    before, after = np.sum(spans, axis=0)
    assert after < 0.7 * before


def test_a_plan_grows_with_its_chunk_and_not_with_the_cache():
    sizes = []
    for cached in (1 << 14, 1 << 20):
        sequence = CachedSequence(0, cached + 4096)
        layout = page_layout(sequence, 64, 8, alike_pages(sequence, 64, 4096, None))
        sizes.append(sum(map(len, layout.spans)))
    assert sizes == [8 + 4096 // 64] * 2


def message_of(function):
    with pytest.raises(ValueError) as caught:
        function()
    return str(caught.value)


ODD = {
    "mask": (dict(mask=ra.full()), r"mask is full\(\), but prefill takes causal\(\) and sliding_window\(left\)"),
    "evicted": (dict(mask=ra.sliding_window(30)), r"sees the token .* but the tokens before 16 are evicted"),
    "dropout": (dict(score=ra.score(dropout=0.1)), r"prefill takes no dropout"),
    "schedule": (dict(schedule=ra.waves(memory=1000)), r"schedule is waves\(memory=1000\), but prefill takes waves by their width"),
    "layout": (dict(layout=ra.contiguous(6, 2)), r"layout is contiguous.* on rank 1, but zigzag.* on rank 0|layout is zigzag"),
    "a layout of others": (dict(layout=ra.contiguous(6, 3)), r"is for 3 ranks, but the cache has 2"),
    "length": (dict(layout=ra.zigzag(7, 2)), r"is of 7 tokens, but the batch has 6 new ones"),
    "heads": (dict(heads=3), r"q has 3 heads, but must have a multiple of the cache's 2 key/value heads"),
    "dtype": (dict(dtype=torch.float32), r"q has dtype torch.float32, but the cache holds torch.float64"),
    "gradients": (dict(grad=True), r"requires gradients, but prefill has no backward pass"),
    "window": (
        dict(mask=ra.sliding_window(3)),
        r"mask is sliding_window\(5, 0\) .* on rank 0, but sliding_window\(3, 0\) .* on rank 1",
    ),
    "layer": (dict(layer=2), r"layer is 2, but must be at most 1"),
}


def refused(group, name):
    rank = dist.get_rank(group)
    twin = Twin(group, 0, pages=8, page_size=16)
    sequence = twin.add()
    twin.grow([sequence], 24)
    twin.cache.evict(sequence, 17)
    batch = twin.cache.extend([sequence], 6)
    options = dict(heads=4, dtype=torch.float64, grad=False, layout=ra.zigzag(6, 2), mask=ra.sliding_window(5))
    options |= ODD[name][0] if rank == 1 else {}
    q = torch.zeros(1, 3, options.pop("heads"), 5, dtype=options.pop("dtype"), requires_grad=options.pop("grad"))
    k, v = (torch.zeros(1, 3, 2, d, dtype=torch.float64) for d in (5, 3))
    return message_of(lambda: ra.prefill(q, k, v, twin.cache, batch, **options))


@pytest.mark.parametrize("name", ODD)
def test_errors_are_raised_on_every_rank(gloo, name):
    for message in gloo.run(2, refused, name):
        assert re.search(ODD[name][1], message), message


def test_a_rank_with_other_sequences_is_an_error(gloo):
    for message in gloo.run(3, another_history):
        assert "ranks disagree on the sequences of the cache or of the batch" in message


def another_history(group):
    twin = Twin(group, 0, pages=8, page_size=16)
    sequence = twin.add()
    if dist.get_rank(group) == 2:
        twin.add()
    batch, layout = twin.cache.extend([sequence], 6), ra.zigzag(6, 3)
    q, k, v = (torch.zeros(1, 2, h, d, dtype=torch.float64) for h, d in ((4, 5), (2, 5), (2, 3)))
    return message_of(lambda: ra.prefill(q, k, v, twin.cache, batch, layout))


def on_gpus(group):
    """The greatest error of chunks in bf16, as a share of what dense attention in bf16 is off by."""
    rank, size, worst = dist.get_rank(group), dist.get_world_size(group), 0.0
    generator = torch.Generator("cuda").manual_seed(0)
    cache = ra.PagedCache(pages=300, kv_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda", group=group)
    sequences, kept = [cache.add(), cache.add()], [torch.empty(2, 2, 0, 2, 128, device="cuda", dtype=torch.bfloat16)]
    for n, schedule in ((3000, None), (1, None), (700, ra.pass_q()), (64, ra.ring()), (500, ra.gather())):
        layout = ra.zigzag(n, size)
        q, k, v = (torch.randn(2, n, h, 128, generator=generator, device="cuda").bfloat16() for h in (8, 2, 2))
        kept.append(torch.stack([k, v]))
        shards = [ra.shard(x, layout, rank) for x in (q, k, v)]
        out = ra.prefill(*shards, cache, cache.extend(sequences, n), layout, schedule=schedule)
        keys, values = torch.cat(kept, 2)
        exact, same = (
            torch.stack([reference(q[i].to(kind), keys[i].to(kind), values[i].to(kind)) for i in range(2)]).double()
            for kind in (torch.float64, torch.bfloat16)
        )
        off = (out - ra.shard(exact, layout, rank)).abs()
        worst = max(worst, float(off.max() / (same - exact).abs().max()) if off.numel() else 0.0)
    return worst


@pytest.mark.gpu
def test_gpus(nccl, world_size):
    assert max(nccl.run(world_size, on_gpus, timeout=180)) < 2
