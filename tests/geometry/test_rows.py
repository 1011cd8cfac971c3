"""`Rows` behave like sets; `Order.restore` undoes `Order.sort`."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.geometry.rows import Order, Rows
from tests.allocation import Peak

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


def rows_and_set(ranges):
    return Rows(np.array(ranges, dtype=np.int64).reshape(-1, 2)), {row for begin, end in ranges for row in range(begin, end)}


def listed(rows):
    return rows.index(torch.device("cpu")).tolist()


@given(ROWS, ROWS)
def test_rows_are_sets(a, b):
    (rows_a, set_a), (rows_b, set_b) = rows_and_set(a), rows_and_set(b)
    for rows, wanted in ((rows_a, set_a), (rows_a | rows_b, set_a | set_b), (rows_a - rows_b, set_a - set_b)):
        assert listed(rows) == sorted(wanted)
        assert len(rows) == len(wanted)
        # ascending, with a gap between ranges
        assert (rows.ranges[1:, 0] > rows.ranges[:-1, 1]).all()
    assert (rows_a == rows_b) == (set_a == set_b)
    if set_a == set_b:
        assert hash(rows_a) == hash(rows_b)
    everywhere = np.arange(-2, 45)
    assert rows_a.contains(everywhere).tolist() == [row in set_a for row in everywhere.tolist()]


@given(ROWS, ROWS)
def test_rows_within_rows(a, b):
    inner, outer = rows_and_set(a)[0], rows_and_set(a)[0] | rows_and_set(b)[0]
    place = {row: at for at, row in enumerate(listed(outer))}
    assert listed(inner.within(outer)) == [place[row] for row in listed(inner)]
    members = np.array(listed(outer), dtype=np.int64)
    if len(members):
        assert outer.rank_of(members).tolist() == list(range(len(members)))


@given(ROWS)
def test_taking_and_adding_rows(ranges):
    rows, members = rows_and_set(ranges)
    x = torch.arange(120).reshape(40, 3)
    assert torch.equal(rows.take(x), x[sorted(members)])
    total = x.clone()
    rows.add_to(total, 1000 * torch.ones(len(rows), 3, dtype=torch.int64))
    wanted = x.clone()
    wanted[sorted(members)] += 1000
    assert torch.equal(total, wanted)


def test_one_range_is_taken_as_a_view():
    x = torch.zeros(10, 3)
    Rows.span(2, 5).take(x).fill_(1)
    assert x.sum() == 9


@given(ROWS, st.integers(1, 9))
def test_rows_are_cut_in_order_and_about_equal(ranges, parts):
    rows, _ = rows_and_set(ranges)
    pieces = rows.cut(parts)
    assert [row for piece in pieces for row in listed(piece)] == listed(rows)
    assert len(pieces) == min(parts, len(rows))
    assert not pieces or max(map(len, pieces)) - min(map(len, pieces)) <= 1


@given(st.permutations(range(7)))
def test_an_order_is_undone(rows):
    order, x = Order(np.array(rows)), torch.arange(14).reshape(2, 7)
    assert order.sort(x, dim=1)[0].tolist() == rows
    assert torch.equal(order.restore(order.sort(x, dim=1), dim=1), x)


def test_adding_scattered_rows_makes_one_copy():
    rows, x, values = Rows(np.array([[0, 100], [200, 300]])), torch.ones(400, 64), torch.full((200, 64), 2.0)
    rows.index(x.device)
    with Peak(x, values) as peak:
        rows.add_to(x, values)
    assert x.sum(1).unique_consecutive(return_counts=True)[1].tolist() == [100, 100, 100, 100]
    assert peak.peak == 200 * 64 * 4
