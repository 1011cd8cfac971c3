"""Layouts: each position is held once, work is even, shards hold the right rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringattn as ra
from ringattn import Layout, Span

MAKERS = {
    "contiguous": ra.contiguous,
    "zigzag": ra.zigzag,
    "striped": ra.striped,
    "balanced": lambda seq_len, world_size: ra.balanced(ra.causal(), seq_len, world_size),
}


def skewed_documents(seq_len, seed=0):
    """A few long documents and many short ones, then padding."""
    lengths, total = [], 0
    generator = np.random.default_rng(seed)
    while True:
        length = int(generator.lognormal(5, 1.5)) + 1
        if total + length > seq_len - 11:
            return ra.documents(lengths)
        lengths.append(length)
        total += length


def assert_exact_cover(layout):
    held = [layout.positions(rank) for rank in range(layout.world_size)]
    assert [len(part) for part in held] == list(layout.lengths)
    assert all(part.dtype == torch.int64 for part in held)
    assert torch.equal(torch.cat(held).sort().values, torch.arange(layout.seq_len))


@pytest.mark.parametrize("name", MAKERS)
@given(seq_len=st.integers(0, 400), world_size=st.integers(1, 12))
def test_every_position_is_held_once(name, seq_len, world_size):
    layout = MAKERS[name](seq_len, world_size)
    assert layout.world_size == world_size
    assert_exact_cover(layout)


@given(st.data(), st.integers(0, 40), st.integers(1, 5))
def test_custom_spans_hold_every_position_once(layout_strategy, data, seq_len, world_size):
    assert_exact_cover(data.draw(layout_strategy(seq_len, world_size)))


@pytest.mark.parametrize(("name", "spread"), [("contiguous", 1), ("striped", 1), ("zigzag", 2)])
@pytest.mark.parametrize("seq_len", [3, 17, 8192, 100_003])
def test_lengths_are_as_even_as_can_be(name, spread, seq_len):
    lengths = MAKERS[name](seq_len, 8).lengths
    assert max(lengths) - min(lengths) <= spread


@pytest.mark.parametrize("name", MAKERS)
def test_more_ranks_than_tokens_leaves_empty_shards(name):
    layout = MAKERS[name](3, 7)
    assert sum(layout.lengths) == 3
    assert layout.lengths.count(0) >= 4
    rank = layout.lengths.index(0)
    assert layout.positions(rank).shape == (0,)
    assert ra.shard(torch.ones(2, 3, 4), layout, rank).shape == (2, 0, 4)


@pytest.mark.parametrize("name", MAKERS)
def test_an_empty_sequence(name):
    layout = MAKERS[name](0, 4)
    assert layout.lengths == (0, 0, 0, 0)
    assert layout.balance(ra.causal()) == 1.0


def test_wrappers_that_rebuild_values_leave_layouts_and_masks_as_they_are():
    """FSDP2 rebuilds dataclasses among the arguments of a module, field by field."""
    from torch.distributed.utils import _apply_to_tensors

    masks = (ra.causal(), ra.documents(lengths=[3, 4]), ra.documents(lengths=[3, 4], kv_lengths=[2, 9], causal=False), ra.prefix(3))
    for value in (ra.zigzag(13, 3), ra.placed(masks[1], 7, 2), *masks, ra.sliding_window(3) | ra.global_tokens(2)):
        assert _apply_to_tensors(lambda x: x, value) == value


def test_a_layout_is_immutable():
    with pytest.raises(AttributeError, match="seq_len cannot be set: a layout is immutable"):
        ra.zigzag(13, 3).seq_len = 5


def test_positions_of_the_named_layouts():
    assert ra.contiguous(10, 4).positions(1).tolist() == [2, 3, 4]
    assert ra.zigzag(16, 2).positions(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert ra.zigzag(16, 2).positions(1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert ra.striped(10, 4).positions(1).tolist() == [1, 5, 9]
    assert Layout(5, ((Span(3, 2),), (Span(0, 2, 2), Span(1, 1)))).positions(1).tolist() == [0, 2, 1]


# shard


@given(st.data(), st.integers(0, 40), st.integers(1, 5), st.integers(0, 2))
def test_shards_are_the_rows_at_the_positions(layout_strategy, data, seq_len, world_size, dim):
    layout = data.draw(layout_strategy(seq_len, world_size))
    shape = [2, 3, 4]
    shape[dim] = seq_len
    x = torch.arange(int(np.prod(shape))).reshape(shape)
    for rank in range(world_size):
        assert torch.equal(ra.shard(x, layout, rank, dim=dim), x.index_select(dim, layout.positions(rank)))
        assert torch.equal(ra.shard(x, layout, rank, dim=dim - 3), ra.shard(x, layout, rank, dim=dim))


def test_shard_is_a_copy_and_its_gradient_goes_back_to_the_rows():
    layout = ra.striped(7, 3)
    x = torch.zeros(2, 7, requires_grad=True)
    ra.shard(x, layout, 1).sum().backward()
    wanted = torch.zeros(2, 7)
    wanted[:, 1::3] = 1
    assert torch.equal(x.grad, wanted)
    y = torch.zeros(4, 2)
    ra.shard(y, ra.contiguous(4, 1), 0, dim=0).add_(1)
    assert not y.any()


# balance


@given(st.data(), st.integers(0, 30), st.integers(1, 6))
def test_work_is_the_count_of_live_pairs(layout_strategy, mask_strategy, data, seq_len, world_size):
    mask, live = data.draw(mask_strategy(seq_len))
    layout = data.draw(layout_strategy(seq_len, world_size))
    wanted = [int(live[layout.positions(rank).numpy()].sum()) for rank in range(world_size)]
    assert layout.work(mask).tolist() == wanted
    assert layout.balance(mask) == pytest.approx(max(wanted) / np.mean(wanted) if sum(wanted) else 1.0)


@pytest.mark.parametrize("seq_len", [8192, 65_537, 100_003])
@pytest.mark.parametrize("name", ["zigzag", "striped", "balanced"])
def test_causal_work_is_within_one_percent_of_even_at_8_ranks(name, seq_len):
    assert MAKERS[name](seq_len, 8).balance(ra.causal()) <= 1.01


@pytest.mark.parametrize(
    ("mask", "bound"),
    [
        pytest.param(ra.causal(), 1.01, id="causal"),
        pytest.param(ra.full(), 1.01, id="full"),
        pytest.param(ra.sliding_window(1000), 1.01, id="window"),
        pytest.param(ra.documents([16_384, 49_152]), 1.01, id="two-documents"),
        pytest.param(skewed_documents(65_536), 1.02, id="skewed-documents"),
        pytest.param(ra.documents([1] * 20_000 + [30_000]), 1.02, id="one-token-documents-and-a-long-one"),
        pytest.param(ra.prefix(20_000), 1.01, id="prefix"),
        pytest.param(ra.documents(lengths=[30_000, 20_000], causal=False), 1.02, id="documents-full"),
    ],
)
def test_balanced_is_even_for_any_mask(mask, bound):
    layout = ra.balanced(mask, 65_536, 8)
    assert layout.balance(mask) <= bound
    # numbers of tokens differ by at most one chunk, which has 16 tokens or more
    assert max(layout.lengths) - min(layout.lengths) <= 65_536 // 8 // 2


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(skewed_documents(65_536), id="skewed-documents"),
        pytest.param(ra.documents([16_384, 16_384, 32_768]), id="three-documents"),
        pytest.param(ra.documents([60_000] + [1] * 500), id="documents-and-padding"),
        pytest.param(ra.global_tokens(3000) | ra.sliding_window(500, 500), id="longformer"),
    ],
)
def test_balanced_beats_zigzag(mask):
    assert ra.balanced(mask, 65_536, 8).balance(mask) < ra.zigzag(65_536, 8).balance(mask)


def test_balanced_makes_the_regions_of_its_mask_once(monkeypatch):
    made = []
    regions = ra.Mask.regions
    monkeypatch.setattr(ra.Mask, "regions", lambda mask, seq_len: made.append(mask) or regions(mask, seq_len))
    ra.balanced(ra.documents(lengths=[70, 10, 47]), 127, 3)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (ra.causal(), "zigzag"),
        (ra.prefix(3), "zigzag"),
        (ra.full(), "contiguous"),
        (ra.sliding_window(8, 8), "contiguous"),
        (ra.sliding_window(8), "contiguous"),
        (ra.dilated_window(4, 2), "contiguous"),
        (ra.sliding_window(None, 3), "balanced"),
        (ra.documents([9, 30]), "balanced"),
        (ra.causal() & ra.sliding_window(8), "contiguous"),
        (ra.causal() & ra.dilated_window(4, 2), "balanced"),
    ],
    ids=repr,
)
def test_default_layout(mask, name):
    layout = ra.default_layout(mask, 128, 4)
    assert layout.name == name
    assert_exact_cover(layout)


# identity


def test_equal_layouts_have_equal_digests():
    assert ra.zigzag(64, 4) == ra.zigzag(64, 4)
    assert hash(ra.zigzag(64, 4)) == hash(ra.zigzag(64, 4))
    # the digest ignores the name: it depends on which rank holds which positions
    assert ra.contiguous(8, 1) == ra.zigzag(8, 1) == Layout(8, ((Span(0, 8),),))
    mask = skewed_documents(4096)
    assert ra.balanced(mask, 4096, 8) == ra.balanced(mask, 4096, 8)


def test_different_layouts_have_different_digests():
    layouts = [make(n, p) for make in (ra.contiguous, ra.zigzag, ra.striped) for n in (64, 65) for p in (4, 5)]
    layouts += [Layout(64, ((Span(32, 32),), (Span(0, 32),))), Layout(64, ((Span(0, 32),), (Span(32, 32),)))]
    layouts += [Layout(64, ((Span(0, 32),), (Span(32, 32),), ()))]
    assert len({layout.digest for layout in layouts}) == len(layouts)


def test_empty_spans_are_dropped():
    assert Layout(4, ((Span(0, 0), Span(0, 4), Span(2, 0)), (Span(9, 0),))).spans == ((Span(0, 4),), ())


REFUSED = {
    "no-ranks": (lambda: Layout(4, ()), "needs at least one rank"),
    "negative-length": (lambda: Layout(-1, ((),)), "seq_len is -1"),
    "too-few": (lambda: Layout(5, ((Span(0, 4),),)), "each of 5 positions exactly once: they hold 4"),
    "too-many": (lambda: Layout(3, ((Span(0, 3),), (Span(1, 1),))), "they hold 4"),
    "twice": (lambda: Layout(4, ((Span(0, 3),), (Span(2, 1),))), "position 2 is held twice"),
    "twice-by-strides": (lambda: Layout(6, ((Span(0, 3, 2),), (Span(1, 2, 2), Span(4, 1)))), "position 4 is held twice"),
    "twice-by-mixed-strides": (lambda: Layout(7, ((Span(0, 3, 3), Span(1, 3, 2)), (Span(6, 1),))), "held twice"),
    "outside": (lambda: Layout(4, ((Span(1, 4),),)), "is not inside the sequence"),
    "outside-by-stride": (lambda: Layout(4, ((Span(0, 4, 2),),)), "is not inside the sequence"),
    "negative-start": (lambda: Layout(4, ((Span(-1, 4),),)), "is not inside the sequence"),
    "negative-span": (lambda: Layout(4, ((Span(0, 5), Span(0, -1)),)), "is not inside the sequence"),
    "stride-0": (lambda: Layout(2, ((Span(0, 2, 0),),)), "is not inside the sequence"),
    "zigzag-length": (lambda: ra.zigzag(-1, 4), "seq_len is -1, but must be at least 0"),
    "zigzag-fraction": (lambda: ra.zigzag(8.0, 4), "seq_len is 8.0, but must be an integer"),
    "contiguous-ranks": (lambda: ra.contiguous(8, 0), "world_size is 0, but must be at least 1"),
    "striped-ranks": (lambda: ra.striped(8, True), "world_size is True, but must be an integer"),
    "balanced-mask": (lambda: ra.balanced("causal", 8, 2), "mask is 'causal', but must be a Mask"),
    "balanced-longer": (lambda: ra.balanced(ra.documents([9]), 8, 2), "needs at least 9 tokens"),
    "positions-rank": (lambda: ra.zigzag(8, 4).positions(4), "rank is 4, but zigzag.* has the ranks 0 to 3"),
    "positions-negative-rank": (lambda: ra.zigzag(8, 4).positions(-1), "rank is -1"),
    "shard-rank": (lambda: ra.shard(torch.ones(1, 8), ra.zigzag(8, 4), 4), "rank is 4"),
    "shard-length": (lambda: ra.shard(torch.ones(1, 9), ra.zigzag(8, 4), 0), "x has 9 tokens in dim 1, but zigzag.* is for 8"),
    "shard-dim": (lambda: ra.shard(torch.ones(8), ra.zigzag(8, 4), 0), "dim is 1, but x has 1 dimensions"),
    "work-mask": (lambda: ra.zigzag(8, 4).work(ra.prefix(9)), "needs at least 9 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name):
    build, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize(
    "make", [ra.sliding_window, lambda n: ra.sliding_window(n, n), lambda n: ra.dilated_window((n // 2, 0), 2)]
)
def test_wide_windows_are_even_by_default(make, world_size):
    """A narrow window keeps neighbouring text together; a window as wide as the sequence is as even as a causal mask."""
    n = 4096
    for window in (100, n // 8, n // 2, n, 10 * n):
        mask = make(window)
        layout = ra.default_layout(mask, n, world_size)
        assert layout.balance(mask) <= 1.25
        assert layout.name == "contiguous" or (window >= n // 2 and ra.contiguous(n, world_size).balance(mask) > 1.25)


# `balanced` counts the work of the finest chunks once; here each layout is made and counted by itself


def plainly_balanced(mask, live, seq_len, world_size):
    """The rule of `balanced`, from a boolean matrix."""
    best, best_balance, chunks = None, float("inf"), 1
    while True:
        n = chunks * world_size
        bounds = [(seq_len * i // n, seq_len * (i + 1) // n) for i in range(n)]
        work = [int(live[a:b].sum()) for a, b in bounds]
        hands = [[] for _ in range(world_size)]
        for chunk in sorted(range(n), key=lambda chunk: -work[chunk]):
            room = [rank for rank in range(world_size) if len(hands[rank]) < chunks]
            min((sum(work[c] for c in hands[rank]), rank, hands[rank]) for rank in room)[2].append(chunk)
        hands = sorted(sorted(hand) for hand in hands)
        of_ranks = np.array([sum(work[c] for c in hand) for hand in hands])
        balance = of_ranks.max() / of_ranks.mean() if of_ranks.any() else 1.0
        if best is None or balance < best_balance - 1e-9:
            best, best_balance = [[position for c in hand for position in range(*bounds[c])] for hand in hands], balance
        chunks *= 2
        if best_balance <= 1.01 or chunks > 64 or chunks * world_size > seq_len:
            return best


@given(st.data(), st.integers(0, 60), st.integers(1, 6))
def test_balanced_is_the_first_even_deal(mask_strategy, data, seq_len, world_size):
    mask, live = data.draw(mask_strategy(seq_len))
    layout = ra.balanced(mask, seq_len, world_size)
    assert [layout.positions(rank).tolist() for rank in range(world_size)] == plainly_balanced(mask, live, seq_len, world_size)
    assert layout.work(mask).tolist() == [int(live[layout.positions(rank)].sum()) for rank in range(world_size)]
    again = Layout(seq_len, layout.spans)
    assert again == layout
    assert again.lengths == layout.lengths
    for spans in layout.spans:
        assert all(a.stop < b.start for a, b in zip(spans, spans[1:]))
