"""The algebra of regions, compared with boolean matrices that are filled pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.geometry import region
from ringattn.geometry.region import Region

SIZE = 14


def pairs(table: np.ndarray, size: int = SIZE) -> np.ndarray:
    """How many regions hold each pair: (size, size), by the definition."""
    q, k = np.indices((size, size))
    total = np.zeros((size, size), dtype=int)
    for q_start, q_stop, k_start, k_stop, lo, hi, stride in table:
        inside = (q_start <= q) & (q < q_stop) & (k_start <= k) & (k < k_stop) & (lo <= q - k) & (q - k <= hi)
        total += inside & ((q - q_start) % stride == 0) & ((k - k_start) % stride == 0)
    return total


@st.composite
def regions(draw):
    """Any region of a small square, possibly empty."""
    edges = [draw(st.integers(0, SIZE)) for _ in range(4)]
    lo = draw(st.integers(-SIZE, SIZE))
    return Region(*edges, lo, lo + draw(st.integers(-2, 2 * SIZE)), draw(st.integers(1, 4)))


@st.composite
def tables(draw):
    """Disjoint regions: those of a list that overlap none of the regions kept before them."""
    kept: list[Region] = []
    taken = np.zeros((SIZE, SIZE), dtype=int)
    for candidate in draw(st.lists(regions(), max_size=6)):
        mine = pairs(region.table([candidate]))
        if not (mine & taken).any():
            kept.append(candidate)
            taken |= mine
    return region.tighten(region.table(kept))


@given(st.lists(regions(), max_size=6))
def test_tighten_keeps_the_pairs_and_gives_bounding_boxes(listed):
    table = region.table(listed)
    tight = region.tighten(table)
    assert np.array_equal(pairs(tight), pairs(table))
    for row in tight:
        q, k = np.nonzero(pairs(row[None]))
        assert row[:4].tolist() == [q.min(), q.max() + 1, k.min(), k.max() + 1]
        assert row[4:6].tolist() == [(q - k).min(), (q - k).max()]


@given(st.lists(regions(), max_size=6))
def test_count_of_each_region(listed):
    table = region.table(listed)
    assert region.count(table).tolist() == [pairs(row[None]).sum() for row in table]


@given(tables(), tables())
def test_intersection(a, b):
    assert np.array_equal(pairs(region.intersect(a, b)), pairs(a) & pairs(b))


@given(tables(), tables())
def test_difference(a, b):
    assert np.array_equal(pairs(region.subtract(a, b)), pairs(a) & (1 - pairs(b)))


@given(tables(), tables())
def test_union_holds_every_pair_once(a, b):
    assert np.array_equal(pairs(region.union(a, b)), pairs(a) | pairs(b))


@given(tables(), tables(), tables())
def test_count_of_combinations(a, b, c):
    both = region.intersect(region.union(a, b), c)
    assert region.count(both).sum() == ((pairs(a) | pairs(b)) & pairs(c)).sum()


@given(tables(), st.integers(0, SIZE))
def test_clip(a, seq_len):
    q, k = np.indices((SIZE, SIZE))
    assert np.array_equal(pairs(region.clip(a, seq_len)), pairs(a) * ((q < seq_len) & (k < seq_len)))


@given(
    st.tuples(
        st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9), st.integers(-20, 20), st.integers(-20, 20)
    )
)
def test_count_pairs_of_any_box(box):
    q_begin, q_end, k_begin, k_end, lo, hi = box
    wanted = sum(lo <= i - j <= hi for i in range(q_begin, q_end) for j in range(k_begin, k_end))
    assert region.count_pairs(*np.array([box], dtype=np.int64).T).tolist() == [wanted]


@pytest.mark.parametrize("n", [1, 2, 1_048_576, 2**30 + 1])
def test_count_of_a_long_causal_sequence(n):
    assert region.count(region.table([Region(0, n, 0, n, 0, n)])).tolist() == [n * (n + 1) // 2]


def test_empty_tables():
    nothing = region.table([])
    everything = region.table([Region(0, 3, 0, 3, -3, 3)])
    assert nothing.shape == (0, region.STRIDE + 1)
    for combine in (region.union, region.intersect, region.subtract):
        assert len(combine(nothing, nothing)) == 0
    assert pairs(region.union(nothing, everything), 3).all()
    assert len(region.intersect(nothing, everything)) == 0
    assert len(region.subtract(everything, everything)) == 0
