"""Placement of documents: an exact cover, even work and tokens, and fewer rows that move than in other even layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.geometry.placement import _Task
from tests.geometry.test_layout import assert_exact_cover
from tests.strategies import examples

TOLERANCE = 0.03


def moved(layout, mask):
    """Rows of K/V that all ranks need and do not hold, by the mask's definition."""
    live = mask.dense(layout.seq_len).numpy()
    held = [layout.positions(rank).numpy() for rank in range(layout.world_size)]
    return sum(int(live[rows].any(axis=0).sum() - live[rows].any(axis=0)[rows].sum()) for rows in held)


def rows_of_plan(layout, mask):
    """The same by the plan, with small gaps."""
    plan, n = ra.make_plan(layout, mask), layout.world_size
    return sum(len(plan.needs(rank, owner)) for rank in range(n) for owner in range(n) if owner != rank)


def counted(layout, mask):
    """The same by `_Task`, which takes no time."""
    rank, start, *_ = layout.table.T
    first = start.argsort()
    task = _Task(mask.regions(layout.seq_len), layout.seq_len, layout.world_size, TOLERANCE)
    cuts = np.unique([*start, layout.seq_len, *mask.cu_seqlens])
    holder = rank[first][start[first].searchsorted(cuts[:-1], side="right") - 1]
    return task.cost(task._sorted(holder, cuts[:-1], cuts[1:])).moved


def bound(lengths, world_size):
    """The lower bound of `placed` for causal documents."""
    tokens, work = ((1 + TOLERANCE) * sum(x) / world_size for x in (lengths, [n * (n + 1) / 2 for n in lengths]))
    total = 0.0
    for n in lengths:
        left = [max(n - j * tokens, max(0, n * (n + 1) - 2 * j * work) ** 0.5 - 1) for j in range(1, world_size)]
        total += sum(x for x in left if x > 0)
    return total


def lognormal(mean, total, seed, sigma=1.0):
    generator = np.random.default_rng(seed)
    lengths = []
    while sum(lengths) < total:
        length = int(generator.lognormal(np.log(mean) - sigma**2 / 2, sigma))
        lengths.append(min(max(1, length), total - sum(lengths)))
    return lengths


def is_even(layout, mask, longest, rows=2):
    """Whether tokens and work are within the tolerance, but for two tokens and so many rows of the longest document."""
    work = layout.work(mask)
    fits = max(layout.lengths) <= (1 + TOLERANCE) * np.mean(layout.lengths) + 2
    return fits and work.max() <= (1 + TOLERANCE) * work.mean() + rows * longest


ODD = {
    "one giant": [5000],
    "giant and one-token documents": [3000] + [1] * 2000,
    "one-token documents": [1] * 777,
    "empty documents": [0, 300, 0, 0, 500, 0, 41],
    "primes": [2, 3, 5, 7, 11, 13, 1009, 2003, 97, 89, 83],
    "equal": [128] * 24,
    "fewer than ranks": [70, 60],
    "two giants": [4001, 3999, 5, 5],
    "ascending": list(range(1, 90)),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("lengths", ODD.values(), ids=ODD)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_odd_lengths(lengths, causal, world_size):
    mask = ra.documents(lengths=lengths, causal=causal)
    layout = ra.placed(mask, sum(lengths), world_size)
    assert_exact_cover(layout)
    assert ra.Layout(layout.seq_len, layout.spans) == layout
    assert is_even(layout, mask, max(lengths))


@settings(max_examples=examples(150))
@given(
    st.lists(st.one_of(st.integers(0, 6), st.integers(0, 90), st.integers(90, 700)), min_size=1, max_size=40),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 50),
    st.one_of(st.none(), st.integers(0, 60), st.tuples(st.integers(0, 60), st.integers(0, 60))),
)
def test_every_position_once_with_even_work_and_tokens(lengths, world_size, causal, padding, window):
    mask = ra.documents(lengths=lengths, causal=causal, window=window)
    n = sum(lengths) + padding
    layout = ra.placed(mask, n, world_size)
    assert_exact_cover(layout)
    assert layout.world_size == world_size
    assert is_even(layout, mask, max(lengths), rows=2 if causal or window is None else 3)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 6), st.booleans(), st.integers(0, 9))
def test_no_even_layout_moves_less(lengths, world_size, causal, padding):
    mask = ra.documents(lengths=lengths, causal=causal)
    n = sum(lengths) + padding
    found = moved(ra.placed(mask, n, world_size), mask)
    for other in (ra.contiguous(n, world_size), ra.zigzag(n, world_size), ra.balanced(mask, n, world_size)):
        if is_even(other, mask, max(lengths)) and (min(other.lengths) or n < world_size):
            assert found <= moved(other, mask)


@pytest.mark.parametrize(
    ("lengths", "world_size", "make"),
    [
        pytest.param([885, 528, 554, 732, 510, 340, 346, 201], 2, lambda mask, n, p: ra.zigzag(n, p), id="zigzag"),
        pytest.param([1984, 1468, 160, 2383, 132, 17], 3, ra.balanced, id="balanced"),
    ],
)
def test_an_even_layout_that_moves_least_is_taken(lengths, world_size, make):
    mask, n = ra.documents(lengths=lengths), sum(lengths)
    other, layout = make(mask, n, world_size), ra.placed(mask, n, world_size)
    assert other.balance(mask) <= 1 + TOLERANCE
    assert moved(layout, mask) <= moved(other, mask)
    assert is_even(layout, mask, max(lengths))


def test_no_even_layout_moves_less_in_log_normal_mixes():
    """Also with more documents than those with which `placed` tries `balanced`."""
    for seed in range(120):
        world_size, mean = (2, 3, 4, 8)[seed % 4], (64, 512, 2048)[seed % 3]
        n = 2048 * world_size
        mask = ra.documents(lengths=(lengths := lognormal(mean, n, seed, sigma=(0.3, 1, 2)[seed // 3 % 3])))
        layout = ra.placed(mask, n, world_size)
        for other in (ra.contiguous(n, world_size), ra.zigzag(n, world_size), ra.balanced(mask, n, world_size)):
            if is_even(other, mask, max(lengths)):
                assert counted(layout, mask) <= counted(other, mask)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 12), st.booleans(), st.integers(0, 4))
def test_each_rank_has_a_token_if_there_are_enough(lengths, world_size, causal, padding):
    n = sum(lengths) + padding
    layout = ra.placed(ra.documents(lengths=lengths, causal=causal), n, world_size)
    assert min(layout.lengths) > 0 or n < world_size


@settings(max_examples=examples(100))
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 9),
    st.one_of(st.none(), st.tuples(st.integers(0, 30), st.integers(0, 30))),
    st.data(),
)
def test_counted_rows_are_those_of_the_definition(lengths, world_size, causal, padding, window, data):
    """For any chunks: what `_Task` counts decides between layouts."""
    mask = ra.documents(lengths=lengths, causal=causal, window=window)
    n = sum(lengths) + padding
    regions = mask.regions(n)
    task = _Task(regions, n, world_size, TOLERANCE)
    ranks = np.array(data.draw(st.lists(st.integers(0, world_size - 1), min_size=1, max_size=12)))
    (pieces,) = task.chunks(ranks, np.inf)
    spans = [tuple(ra.Span(a, b - a) for r, a, b in pieces.T.tolist() if r == rank) for rank in range(world_size)]
    over, _, rows, _ = task.cost(pieces)
    assert rows == moved(ra.Layout(n, tuple(spans)), mask)
    assert task.chunks(ranks, over) and not (over and task.chunks(ranks, over * (1 - 1e-9)))


MIXES = [(mean, tokens, ranks) for mean in (2048, 16384) for tokens in (8192, 32768) for ranks in (2, 8, 64)]


@pytest.mark.parametrize(("mean", "tokens", "ranks"), MIXES)
def test_log_normal_lengths(mean, tokens, ranks):
    """Even, near the lower bound, and less than `balanced` moves: on more than two ranks at most 0.7 of it."""
    total = tokens * ranks
    found = lowest = others = 0.0
    for seed in range(3):
        lengths = lognormal(mean, total, seed)
        mask = ra.documents(lengths=lengths)
        layout = ra.placed(mask, total, ranks)
        assert layout.balance(mask) <= 1 + TOLERANCE + 1e-3
        assert max(layout.lengths) <= (1 + TOLERANCE) * tokens + 2
        other = ra.balanced(mask, total, ranks)
        rows = [rows_of_plan(each, mask) for each in (layout, other)]
        assert rows[0] <= rows[1]
        found, others, lowest = found + rows[0], others + rows[1], lowest + bound(lengths, ranks)
    assert lowest <= found
    # no placement meets the bounds of all documents at once
    assert found <= 1.8 * lowest + 0.2 * 3 * total
    assert ranks == 2 or found <= 0.7 * others


@pytest.mark.parametrize(("seed", "ranks"), [(28, 29), (30, 33)])
def test_short_shards_keep_the_tolerance_where_rows_allow_it(seed, ranks):
    """A row of the longest document is about 1 % of the work of these shards of 520 tokens."""
    lengths = np.random.default_rng(seed).lognormal(3.4, 1, 327).astype(int).clip(1).tolist()
    mask = ra.documents(lengths=lengths)
    assert ra.placed(mask, sum(lengths), ranks).balance(mask) <= 1 + TOLERANCE


def test_short_documents_stay_whole():
    """1,000 documents on 8 ranks: nothing moves, though work and tokens are even."""
    lengths = lognormal(500, 500_000, seed=0, sigma=0.8)
    mask = ra.documents(lengths=lengths)
    layout = ra.placed(mask, 500_000, 8)
    assert rows_of_plan(layout, mask) == 0
    assert layout.balance(mask) <= 1 + TOLERANCE


def test_a_larger_tolerance_moves_less():
    lengths = lognormal(2048, 65_536, seed=1)
    mask = ra.documents(lengths=lengths)
    rows = [rows_of_plan(ra.placed(mask, 65_536, 8, tolerance), mask) for tolerance in (0.0, 0.03, 0.3, 8.0)]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > rows[-1] == 0


@pytest.mark.parametrize(
    "mask",
    [ra.global_tokens(3) | ra.sliding_window(4), ra.prefix(20), ra.dilated_window(4, 2), ra.documents([30, 20]) | ra.prefix(9)],
    ids=repr,
)
def test_other_masks_are_balanced(mask):
    assert ra.placed(mask, 60, 3) == ra.balanced(mask, 60, 3)


@pytest.mark.parametrize(
    "mask", [ra.causal(), ra.full(), ra.sliding_window(30), ra.documents([100, 60]) & ra.sliding_window(20)], ids=repr
)
def test_one_document_and_combinations(mask):
    layout = ra.placed(mask, 200, 3)
    assert_exact_cover(layout)
    assert is_even(layout, mask, 200)


def test_equal_on_all_ranks():
    lengths = lognormal(300, 20_000, seed=3)
    first, second = (ra.placed(ra.documents(lengths=lengths), 20_000, 8) for _ in range(2))
    assert first.spans == second.spans


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("causal", 8, 2), "mask is 'causal', but must be a Mask"),
        ((ra.documents([9]), 8, 2), "needs at least 9 tokens"),
        ((ra.documents([9]), 9, 0), "world_size is 0, but must be at least 1"),
        ((ra.documents([9]), 9, 2, -0.1), "tolerance is -0.1, but must be at least 0"),
    ],
)
def test_refusal(arguments, message):
    with pytest.raises(ValueError, match=message):
        ra.placed(*arguments)
