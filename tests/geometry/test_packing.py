"""Filling ranks with parts of documents: what parts count, and shares that are met to a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.geometry.packing import DocumentPart, Pool, fill_ranks


def pool_of(lengths):
    rows = np.array(sorted(lengths))
    return Pool(np.array([rows.cumsum() - rows, rows, 0 * rows, rows]), rows * (rows + 1) // 2, (rows + 1) / 2)


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
    pool = pool_of(lengths)
    shards = [[pool.part(number) for number in shard] for shard in fill_ranks(pool, ranks, 0, 0, whole)]
    rows = [sum(part.rows for part in shard) for shard in shards]
    work = [sum(part.head(part.rows) for part in shard) for shard in shards]
    assert len(shards) == ranks
    assert sum(rows) == sum(lengths)
    assert sum(work) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(rows) <= np.mean(rows) + 2
    assert max(work) <= np.mean(work) + 2 * max(lengths)


def test_a_pool_keeps_its_columns():
    pool = pool_of([5, 9, 2])
    assert pool.sums(3, np.inf) == ([0, 2, 7, 16], [0, 3, 18, 63])
    (number,), rows, work = pool.take(2, 3)
    assert (pool.part(number).end, rows, work) == (9, 9, 45)
    assert (pool.all_rows, pool.all_work) == (7, 18)
    pool.put(pool.part(number), 0, 4)
    assert pool.rows == [2, 4, 5]
    assert pool.work == [3, 10, 15]
    assert pool.bounds(pool.parts, reverse=False).tolist() == [[0, 7, 2], [2, 11, 7]]
    assert pool.bounds(pool.parts, reverse=True).tolist() == [[0, 12, 2], [2, 16, 7]]
    assert pool.sums(3, np.inf) == ([0, 2, 6, 11], [0, 3, 13, 28])


def test_sums_of_the_first_parts_end_beyond_the_limit():
    pool = pool_of(range(1, 101))
    rows, work = pool.sums(100, 10)
    assert rows[:5] == [0, 1, 3, 6, 10] and rows[-1] > 10 and len(rows) == len(work) < 100
    assert len(pool.sums(100, 5049)[0]) == len(pool.sums(100, np.inf)[1]) == 101


@pytest.mark.parametrize(("work", "rows", "wanted"), [(15, 5, True), (12, 3, True), (13, 3, False), (25, 9, True), (26, 9, False)])
def test_most_work_of_so_many_rows(work, rows, wanted):
    """The tail of 3 rows of 5 has 3 + 4 + 5 pairs; behind it comes the tail of 4 rows."""
    assert pool_of([2, 4, 5]).has(work, rows) is wanted


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.data())
def test_most_work_after_parts_were_taken_and_put(lengths, data):
    """What is kept of sums of the last parts holds, whichever parts go and come."""
    pool = pool_of(lengths)
    for _ in range(12):
        rows = data.draw(st.integers(0, pool.all_rows + 1))
        # from the end on, the latest rows of each part
        most, left = 0, rows
        for number in reversed(pool.parts):
            part = pool.part(number)
            most, left = most + part.tail(min(left, part.rows)), max(0, left - part.rows)
        assert pool.has(most, rows) and not pool.has(most + 1, rows)
        if not pool.parts:
            break
        at = data.draw(st.sampled_from([len(pool.parts) - 1, data.draw(st.integers(0, len(pool.parts) - 1))]))
        if data.draw(st.booleans()):
            (number,), _, _ = pool.take_one(at)
            part = pool.part(number)
            pool.put(part, part.begin, data.draw(st.integers(part.begin, part.end)))
        else:
            pool.take(data.draw(st.integers(0, at)), at + 1)
