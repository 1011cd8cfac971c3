"""`PagedCache`: what decode sees after any changes, what pages hold and waste, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import ringattn as ra
from ringattn.transport import run_ranks
from tests.serving.twin import Twin, random_changes
from tests.strategies import examples


class Changes(RuleBasedStateMachine):
    """One rank, few pages, any changes in any order."""

    def __init__(self):
        super().__init__()
        self.twin = Twin(None, 0, pages=9, page_size=16, layers=1, max_tokens=1000)
        self.twin.grow([self.twin.add()], 20)

    def some(self, data):
        return data.draw(st.lists(st.sampled_from(list(self.twin.kept)), min_size=1, max_size=3, unique=True))

    def one(self, data):
        return data.draw(st.sampled_from(list(self.twin.kept)))

    def several(self):
        return len(self.twin.kept) > 1

    @rule()
    def add(self):
        self.twin.add()

    @rule(data=st.data(), tokens=st.integers(0, 40), sharded=st.booleans())
    def grow(self, data, tokens, sharded):
        sequences, free = self.some(data), self.twin.cache.free_pages
        lengths = [x.length for x in sequences]
        try:
            self.twin.grow(sequences, tokens, ra.contiguous(tokens, 1) if sharded else None)
        except ra.OutOfPages:
            # nothing has changed
            assert self.twin.cache.free_pages == free and [x.length for x in sequences] == lengths
            assert sum(-(-(n + tokens) // 16) + 1 for n in lengths) > free[0]

    @rule(data=st.data())
    def fork(self, data):
        free = self.twin.cache.free_pages
        self.twin.fork(self.one(data))
        assert self.twin.cache.free_pages == free

    @precondition(several)
    @rule(data=st.data())
    def free(self, data):
        self.twin.free(self.one(data))

    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.one(data)
        self.twin.truncate(sequence, data.draw(st.integers(sequence.evicted * 16, sequence.length)))

    @rule(data=st.data())
    def evict(self, data):
        sequence = self.one(data)
        self.twin.cache.evict(sequence, data.draw(st.integers(0, sequence.length)))

    @rule(data=st.data())
    def decode(self, data):
        sequences = [x for x in self.some(data) if x.length > x.evicted * 16]
        if sequences:
            seen = min(x.length - x.evicted * 16 for x in sequences)
            tokens = data.draw(st.integers(1, min(16, seen)))
            mask = ra.sliding_window(seen - tokens) if any(x.evicted for x in sequences) else None
            assert self.twin.error(sequences, tokens, mask=mask) < 1e-12

    @invariant()
    def pages_are_neither_lost_nor_held_twice(self):
        held = {page for x in self.twin.kept for page in x.pages if page >= 0}
        assert self.twin.cache.free_pages == (9 - len(held),)


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.parametrize(("world_size", "seed"), [(2, 0), (3, 1), (4, 2), (5, 3), (3, 4)])
@pytest.mark.some(3)
def test_random_changes_over_ranks(world_size, seed, one_thread):
    assert max(run_ranks(world_size, lambda group: random_changes(group, seed))) < 1e-12


def test_prefixes_are_shared_until_one_adds_to_them():
    twin = Twin(None, 0, pages=8, page_size=16)
    first = twin.add()
    twin.grow([first], 40)  # three pages, the last one not full
    others = [twin.fork(first) for _ in range(3)]
    assert twin.cache.free_pages == (5,)
    twin.grow(others, 1)
    # each fork has a copy of the last page
    assert twin.cache.free_pages == (2,)
    twin.grow([first], 1)  # which the first sequence now has to itself
    assert twin.cache.free_pages == (2,)
    assert twin.error([first, *others], 3) < 1e-12
    twin.free(first)
    assert twin.error(others, 1) < 1e-12
    for other in others:
        twin.free(other)
    assert twin.cache.free_pages == (8,)


def test_one_of_two_that_share_a_page_keeps_it():
    twin = Twin(None, 0, pages=4, page_size=16)
    first = twin.add()
    twin.grow([first], 24)
    both = [first, twin.fork(first)]
    twin.grow(both, 2)
    assert twin.cache.free_pages == (1,)
    assert twin.error(both, 2) < 1e-12
    for sequence in both:
        twin.free(sequence)
    assert twin.cache.free_pages == (4,)


def test_rows_move_once_to_the_rank_that_keeps_them(one_thread):
    """Bytes counted by the transport: each rank sends the rows that others keep, and nothing else."""

    def work(group):
        layout = ra.zigzag(200, 4)
        twin = Twin(group, 0, pages=8, page_size=16, layers=1)
        sequence = twin.add()
        twin.grow([sequence], 200, layout)
        others = sum((p // 16) % 4 != group.rank for p in layout.positions(group.rank).tolist())
        return group.bytes_sent, others * 2 * (5 + 3) * 8, twin.error([sequence], 2)

    for sent, expected, error in run_ranks(4, work):
        assert sent == expected and error < 1e-12


def test_sequences_are_balanced_however_long_they_grow(one_thread):
    def work(group):
        cache = ra.PagedCache(pages=90, kv_heads=1, head_dim=1, page_size=16, group=group)
        for length in (1, 17, 300, 33, 2, 1000, 64, 5, 16):
            cache.extend([cache.add()], length)
        return cache.free_pages

    (free, *others) = run_ranks(3, work)
    assert others == [free, free]
    assert max(free) - min(free) <= 2


def lengths_like_requests(count):
    """Prompts and answers of random lengths, from a hundred tokens to ten thousand."""
    return (100 * 100 ** torch.rand(count, generator=torch.Generator().manual_seed(0))).int().tolist()


def test_waste_is_below_four_percent():
    """Of the slots of held pages, on all ranks: counted for 200 sequences whose lengths are as often below 1000 tokens as above."""
    cache = ra.PagedCache(pages=12000, kv_heads=1, head_dim=1)
    lengths = lengths_like_requests(200)
    for length in lengths:
        cache.extend([cache.add()], length)
    held = 12000 - cache.free_pages[0]
    assert held == sum(-(-length // 64) for length in lengths)
    assert cache.waste == pytest.approx(1 - sum(lengths) / (held * 64))
    assert 0.01 < cache.waste < 0.04


def test_waste_counts_a_shared_page_once():
    cache = ra.PagedCache(pages=9, kv_heads=1, head_dim=1, page_size=16)
    assert cache.waste == 0.0
    first = cache.add()
    cache.extend([first], 24)
    assert cache.waste == 0.25
    cache.extend([cache.fork(first)], 8)  # pages of 16 and 8 tokens, and a copy with 16
    assert cache.waste == pytest.approx(8 / 48)


def test_evicted_pages_serve_other_sequences():
    twin = Twin(None, 0, pages=4, page_size=16)
    first = twin.add()
    twin.grow([first], 60)
    twin.cache.evict(first, 50)
    assert twin.cache.free_pages == (3,)
    second = twin.add()
    twin.grow([second], 40)
    assert twin.error([first, second], 2, mask=ra.sliding_window(10)) < 1e-12
    with pytest.raises(ValueError, match=r"sees the token 47 of .*tokens before 48 are evicted"):
        twin.error([first, second], 2, mask=ra.sliding_window(11))
    with pytest.raises(ValueError, match="length is 47, but must be from 48 to 60"):
        twin.cache.truncate(first, 47)


def test_a_batch_is_overwritten_in_place():
    twin = Twin(None, 0, pages=30, page_size=16)
    sequences = [twin.add() for _ in range(3)]
    twin.grow(sequences[:1], 40)
    twin.grow(sequences[1:], 7)
    batch = twin.grow(sequences, 1)
    addresses = [x.data_ptr() for x in (batch.state, batch.table.pages)]
    for step in range(40):
        if step == 10:
            twin.fork(sequences[1])  # its last page must be copied
        if step == 20:
            twin.truncate(sequences[0], 5)
        assert twin.grow(sequences, 1, into=batch) is batch
        assert twin.error(sequences, 1, batch) < 1e-12
    assert addresses == [x.data_ptr() for x in (batch.state, batch.table.pages)]


def test_a_batch_is_filled_again_in_place(one_thread):
    """The rows of the second filling lie elsewhere."""

    def work(group):
        twin, layout = Twin(group, 0, pages=10, page_size=16), ra.striped(37, 3)
        sequences = [twin.add(), twin.add()]
        twin.grow(sequences[:1], 5)
        batch = twin.grow(sequences, 37, layout)
        twin.grow(sequences, 37, layout, into=batch)
        return twin.error(sequences, 2, batch)

    assert max(run_ranks(3, work)) < 1e-12


def cache_of(**changes):
    return ra.PagedCache(**(dict(pages=4, kv_heads=2, head_dim=8, page_size=16) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(pages=0), "pages is 0, but must be at least 1"),
        (dict(page_size=48), "page_size is 48, but must be a power of two"),
        (dict(page_size=8), "page_size is 8, but must be at least 16"),
        (dict(head_dim=600), "head_dim is 600, but must be at most 512"),
        (dict(kv_heads=True), "kv_heads is True, but must be an integer"),
        (dict(layers="2"), "layers is '2', but must be an integer"),
        (dict(dtype=torch.int8), "dtype is torch.int8, but must be bfloat16"),
        (dict(dtype="bf16"), "dtype is 'bf16', but must be a dtype"),
        (dict(device="gpu"), "device is 'gpu', but must be a torch.device"),
        (dict(device="meta"), "device is meta, but a cache lies on cpu or cuda"),
        (dict(device="cuda", dtype=torch.float64), r"dtype is torch.float64, but must be .* \(on CPU\) float64"),
        (dict(max_tokens=1 << 30), "max_tokens is 1073741824, but must be at most"),
        (dict(group=3), "group is a int"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_caches(changes, message):
    with pytest.raises(ValueError, match=message):
        cache_of(**changes)


def test_bad_changes():
    cache, other = cache_of(), cache_of()
    sequence, foreign, freed = cache.add(), other.add(), cache.add()
    cache.free(freed)
    for change in (
        cache.free,
        cache.fork,
        lambda x: cache.extend([x], 1),
        lambda x: cache.truncate(x, 0),
        lambda x: cache.evict(x, 0),
    ):
        with pytest.raises(ValueError, match="does not live in this cache: it was freed, or is of another cache"):
            change(freed)
        with pytest.raises(ValueError, match="does not live in this cache"):
            change(foreign)
        with pytest.raises(ValueError, match="sequences holds a int, but must hold what add"):
            change(1)
    for sequences in ([], [sequence, sequence], 3):
        with pytest.raises(ValueError, match=r"sequences (holds|is)"):
            cache.extend(sequences, 1)
    with pytest.raises(ValueError, match="tokens is -1, but must be at least 0"):
        cache.extend([sequence], -1)
    for tokens, pages in ((65, 5), (1 << 80, 1 << 76)):
        needed = f"rank 0 has 4 free pages of 4, but {tokens} more tokens of 1 sequences need {pages} there"
        with pytest.raises(ra.OutOfPages, match=needed):
            cache.extend([sequence], tokens)
    short = cache_of(max_tokens=40)
    with pytest.raises(ValueError, match="would have 41 tokens, but the cache holds at most 40 of a sequence"):
        short.extend([short.add()], 41)
    with pytest.raises(ValueError, match="before is 1, but must be from 0 to 0"):
        cache.evict(sequence, 1)
    assert sequence.length == 0 and cache.free_pages == (4,)


def test_bad_batches():
    cache, other = cache_of(), cache_of()
    one, two = cache.add(), cache.add()
    batch, k = cache.extend([one], 3), torch.zeros(1, 3, 2, 8)
    with pytest.raises(ValueError, match="batch is of another cache"):
        other.append(batch, k, k)
    for into in (other.extend([other.add()], 3), cache.extend([two], 3)):
        with pytest.raises(ValueError, match="into is a batch of 3 tokens of other sequences or another cache"):
            cache.extend([one], 3, into=into)
    with pytest.raises(ValueError, match=r"k has shape \(1, 2, 2, 8\), but must be \(1, 3, 2, 8\)"):
        cache.append(batch, k[:, :2], k)
    with pytest.raises(ValueError, match=r"v has dtype torch.float16, but the cache holds torch.float32"):
        cache.append(batch, k, k.half())
    with pytest.raises(ValueError, match="k is on meta, but the cache is on cpu"):
        cache.append(batch, k.to("meta"), k)
    with pytest.raises(ValueError, match="layer is 1, but must be at most 0"):
        cache.append(batch, k, k, layer=1)
    with pytest.raises(ValueError, match=r"layout zigzag.* is of 4 tokens, but the batch has 3 new ones"):
        cache.fill(batch, k, k, ra.zigzag(4, 1))
    with pytest.raises(ValueError, match=r"layout zigzag.* is for 2 ranks, but the cache has 1"):
        cache.fill(batch, k, k, ra.zigzag(3, 2))
    for change in (cache.fork, lambda x: cache.truncate(x, 2), lambda x: cache.extend([x], 1), cache.free):
        batch = cache.extend([one], 1)
        change(one)
        with pytest.raises(ValueError, match=r"has changed since this batch was made|does not live in this cache"):
            cache.append(batch, k[:, :1], k[:, :1])


def test_a_rank_without_pages_is_named_on_every_rank(one_thread):
    def work(group):
        cache = ra.PagedCache(pages=2, kv_heads=1, head_dim=1, page_size=16, max_tokens=1000, group=group)
        first = cache.add()
        cache.extend([first], 33)
        with pytest.raises(ra.OutOfPages, match="rank 0 has 1 free pages of 2, but 80 more tokens of 1 sequences need 2 there"):
            cache.extend([first], 80)
        assert first.length == 33
        cache.extend([first], 63)
        return cache.free_pages

    assert run_ranks(3, work) == [(0, 0, 0)] * 3
