"""Filling ranks with parts of documents: what parts count, and shares that are met to a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.geometry.packing import DocumentPart, Pool, fill_ranks


def pool_of(lengths):
    parts = [DocumentPart(0, n, 0, n, 0, n) for n in sorted(lengths)]
    return Pool(parts, [part.rows for part in parts], [part.head(part.rows) for part in parts])


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 50), st.data())
def test_work_of_parts(length, left, right, data):
    lo, hi = -min(right, length - 1), min(left, length - 1)
    i, j = np.indices((length, length))
    live = ((lo <= i - j) & (i - j <= hi)).sum(axis=1)
    begin = data.draw(st.integers(0, length))
    end = data.draw(st.integers(begin, length))
    part, rows = DocumentPart(7, length, lo, hi, begin, end), data.draw(st.integers(0, end - begin))
    assert part.head(rows) == live[begin : begin + rows].sum()
    assert part.tail(rows) == live[end - rows : end].sum()


@pytest.mark.parametrize("whole", [True, False], ids=["whole-first", "exact"])
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30), ranks=st.integers(1, 8))
def test_shares_without_slack(whole, lengths, ranks):
    """Every row once; no rank has more than the mean, but for rounding to rows."""
    shards = fill_ranks(pool_of(lengths), ranks, 0, 0, whole)
    rows = [sum(part.rows for part in shard) for shard in shards]
    work = [sum(part.head(part.rows) for part in shard) for shard in shards]
    assert len(shards) == ranks
    assert sum(rows) == sum(lengths)
    assert sum(work) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(rows) <= np.mean(rows) + 2
    assert max(work) <= np.mean(work) + 2 * max(lengths)


def test_a_pool_keeps_its_columns():
    pool = pool_of([5, 9, 2])
    (part,), rows, work = pool.take(2, 3)
    assert (part.end, rows, work) == (9, 9, 45)
    assert (pool.all_rows, pool.all_work) == (7, 18)
    pool.put(part.cut(0, 4))
    assert pool.rows == [2, 4, 5]
    assert pool.work == [3, 10, 15]
    assert pool.first(2) == ([2, 6, 11], [3, 13, 28])


@pytest.mark.parametrize(("work", "rows", "wanted"), [(15, 5, True), (12, 3, True), (13, 3, False), (25, 9, True), (26, 9, False)])
def test_most_work_of_so_many_rows(work, rows, wanted):
    """The tail of 3 rows of 5 has 3 + 4 + 5 pairs; behind it comes the tail of 4 rows."""
    assert pool_of([2, 4, 5]).has(work, rows) is wanted
