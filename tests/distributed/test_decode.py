"""Decoding over ranks of gloo: every rank's result against dense attention in fp64, and errors that every rank raises."""

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from tests.cuda_graphs import captured
from tests.distributed.dense import from_first
from tests.serving.twin import Twin, random_changes, reference


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.some(3)
def test_random_changes(gloo, world_size):
    for error in gloo.run(world_size, random_changes, 10 + world_size):
        assert error < 1e-12


def questions(group):
    """A prefill whose shards fill the cache, then several answers to it, token by token."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    layout = ra.zigzag(301, size)
    twin = Twin(group, 0, pages=30, page_size=16, heads=(4, 2), dims=(5, 5))
    book = twin.add()
    batch = twin.cache.extend([book], 301)
    for layer in range(2):
        q, k, v = (twin.random(1, 301, h, 5) for h in (4, 2, 2))
        shards = [ra.shard(x, layout, rank) for x in (k, v)]
        out = ra.ring_attention(ra.shard(q, layout, rank), *shards, layout=layout, group=group)
        twin.cache.fill(batch, *shards, layout, layer=layer)
        twin.kept[book][layer] = [k[0], v[0]]
        # the last token's query sees in the cache what it saw in the prefill
        last = ra.decode(q[:, -1:], twin.cache, batch, layer=layer)
        assert torch.allclose(last[:, 0], ra.unshard(out, layout, group)[:, -1], atol=1e-12)
    answers = [twin.fork(book) for _ in range(3)]
    return max(twin.error(answers, 1, twin.grow(answers, 1)) for _ in range(20))


@pytest.mark.parametrize("world_size", [2, pytest.param(5, marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_questions_about_a_prefilled_book(gloo, world_size):
    for error in gloo.run(world_size, questions):
        assert error < 1e-12


def message_of(function):
    with pytest.raises(ValueError) as caught:
        function()
    return type(caught.value).__name__, str(caught.value)


def refused(group, name):
    """The error that this rank raises where rank 1 does something else than the others."""
    rank = dist.get_rank(group)
    odd = rank == 1
    cache = ra.PagedCache(pages=8, kv_heads=1, head_dim=4, page_size=16, max_tokens=100, dtype=torch.float64, group=group)
    sequences = [cache.add(), cache.add()]
    batch = cache.extend(sequences, 3)
    k = torch.zeros(2, 3, 1, 4, dtype=torch.float64)
    cache.append(batch, k, k)
    q = k[:, :2]

    def call():
        if name == "freed twice" and odd:
            cache.free(cache.fork(sequences[0]))
            cache.free(sequences[0])
            cache.free(sequences[0])
        if name == "too long" and odd:
            cache.extend(sequences, 98)
        if name == "foreign" and odd:
            cache.append(batch, k.float(), k)
        if name == "other sequences":
            ra.decode(q[:1], cache, cache.extend(sequences[odd : odd + 1], 1))
        if name == "another order":
            fresh = [cache.extend([x], 1) for x in (reversed(sequences) if odd else sequences)]
            ra.decode(q[:1], cache, fresh[1 if odd else 0])
        if name == "out of pages":
            cache.extend([cache.add() for _ in range(8)], 100)
        if name == "fill":
            layout = ra.contiguous(3, 3)
            rows = k[:, :1]
            cache.fill(cache.extend(sequences, 3), rows, rows[:, :0] if odd else rows, layout)
        options = dict(layer=int(odd and name == "layer"), mask=ra.sliding_window(3 if odd and name == "mask" else 2))
        ra.decode(q.float() if odd and name == "dtype" else q, cache, batch, **options)

    return message_of(call)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("freed twice", "does not live in this cache: it was freed"),
        ("too long", "would have 101 tokens, but the cache holds at most 100"),
        ("foreign", "k has dtype torch.float32, but the cache holds torch.float64"),
        ("other sequences", "ranks disagree on the sequences of the cache or of the batch: 0, 2 / 1 are ranks that agree"),
        ("another order", "ranks disagree on the sequences of the cache"),
        ("dtype", "q has dtype torch.float32, but the cache holds torch.float64"),
        ("mask", "ranks disagree: mask is sliding_window(3, 0)"),
        ("layer", "layer is 1, but must be at most 0"),
        ("fill", "v has shape (2, 0, 1, 4), but must be (2, 1, 1, 4)"),
        ("out of pages", "free pages of 8, but 100 more tokens of 8 sequences need"),
    ],
)
def test_every_rank_raises_the_error_of_one(gloo, name, message):
    kinds, texts = zip(*gloo.run(3, refused, name))
    for rank, text in enumerate(texts):
        assert message in text, (rank, text)
    if name == "out of pages":
        assert set(kinds) == {"OutOfPages"}


def recovered(group):
    """Ranks that refuse together go on together."""
    twin = Twin(group, 0, pages=3, page_size=16)
    first, second = twin.add(), twin.add()
    twin.grow([first], 90)
    with pytest.raises(ra.OutOfPages):
        twin.grow([second], 90)
    twin.free(first)
    twin.grow([second], 90)
    return twin.error([second], 2)


def test_after_an_overflow_the_cache_goes_on(gloo):
    for error in gloo.run(3, recovered):
        assert error < 1e-12


def right(q, kept):
    """What attention of a token gives each sequence, in fp64 and in bf16."""
    for kind in (torch.float64, torch.bfloat16):
        yield torch.stack([reference(x.to(kind), *(y.to(kind) for y in of)) for x, of in zip(q, kept, strict=True)])


def on_gpus(group):
    """A filled cache of bf16 on GPUs, decoded call by call and in replays of a graph; returns the results, and the errors allowed."""
    rank, size, n = dist.get_rank(group), dist.get_world_size(group), 5000
    generator = torch.Generator("cuda").manual_seed(0)

    def random(b, tokens, heads):
        return torch.randn(b, tokens, heads, 128, generator=generator, device="cuda").bfloat16()

    layout = ra.zigzag(n, size)
    cache = ra.PagedCache(pages=200, kv_heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda", group=group)
    book, keys, values = cache.add(), random(1, n, 4), random(1, n, 4)
    cache.fill(cache.extend([book], n), *(ra.shard(x, layout, rank) for x in (keys, values)), layout)
    answers = [book, cache.fork(book)]
    batch = cache.extend(answers, 1)
    q, k, v = random(2, 1, 16), random(2, 1, 4), random(2, 1, 4)

    def step():
        cache.append(batch, k, v)
        return ra.decode(q, cache, batch)

    graph, out = captured(step)
    kept, found = [[keys[0], values[0]] for _ in answers], []
    for number in range(70):
        if number:
            cache.extend(answers, 1, into=batch)
            for x in (q, k, v):
                x.copy_(random(*x.shape[:3]))
        graph.replay()
        kept = [[torch.cat([x, y[i]]) for x, y in zip(pair, (k, v))] for i, pair in enumerate(kept)]
        assert torch.equal(out, ra.decode(q, cache, batch))
        if number % 23 == 0:
            exact, same = from_first(group, right, q, kept)
            assert (out.double() - exact).norm() <= 2 * (same.double() - exact).norm()
            found.append(out.cpu())
    return torch.stack(found)


@pytest.mark.gpu
def test_gpus_and_graphs(nccl, world_size):
    first, *others = nccl.run(world_size, on_gpus, timeout=180)
    assert all(torch.equal(x, first) for x in others)
