"""Spans are positions with one stride; `fold` intersects them with a mask's regions into the tiles of a plan.

Row i of a span is the position `start + stride * i`. Of n spans, a `SpanTable` holds the same as arrays (n,).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np

from ringattn_kernels.native import numbers, plans

from .region import HI, K_START, K_STOP, LO, Q_START, Q_STOP, STRIDE, Table, trim


class Span(NamedTuple):
    """The positions `start, start + stride, ...`, `length` of them."""

    start: int
    length: int
    stride: int = 1

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.stride * (self.length - 1) + 1 if self.length else self.start


Spans = tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class SpanTable:
    """Spans of one stride, shard after shard, none of them empty.

    start, length: of each span. row: its first local row. shard: of each span, ascending. bounds: shard s has the spans
    [bounds[s], bounds[s + 1]).
    """

    stride: int
    start: np.ndarray
    length: np.ndarray
    row: np.ndarray
    shard: np.ndarray
    bounds: np.ndarray

    @classmethod
    def make(cls, rows: Table, shards: int, stride: int) -> SpanTable:
        """From rows (shard, start, length) of an (n, 3) table, in the order of local rows."""
        shard, start, length = rows.T
        ends = np.concatenate([[0], length.cumsum()])
        bounds = shard.searchsorted(np.arange(shards + 1))
        return cls(stride, start, length, ends[:-1] - ends[bounds][shard], shard, bounds)

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def last(self) -> np.ndarray:
        """The last position of each span."""
        return self.start + self.stride * (self.length - 1)

    @cached_property
    def ascending(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The order of the spans by position, and then their starts and last positions; None if spans lie within one another."""
        order = self.start.argsort(kind="stable")
        start, last = self.start[order], self.last[order]
        return None if (last[:-1] >= start[1:]).any() else (order, start, last)


def spans_to_table(shards: Sequence[Spans]) -> Table:
    """Spans as an (n, 4) table of shard, start, length and stride."""
    return np.array([(shard, *span) for shard, spans in enumerate(shards) for span in spans], dtype=np.int64).reshape(-1, 4)


def common_stride(*tables: Table, at_least: int = 1) -> int:
    """The least common multiple of `at_least` and the strides in tables of `spans_to_table`. A span of one token fits any stride."""
    strided = (table for table in tables if table[:, 3].max(initial=1) > 1)
    return lcm(at_least, *(int(stride) for table in strided for stride in set(table[table[:, 2] > 1, 3].tolist())))


def refine(table: Table, shards: int, stride: int) -> tuple[SpanTable, tuple[np.ndarray | None, ...]]:
    """The same positions (a table of `spans_to_table`) as spans of one stride.

    And of each shard the old local row of each new row; None if the order is unchanged.
    """
    coarse = (table[:, 2] > 1) & (table[:, 3] != stride)
    if not coarse.any():
        return SpanTable.make(table[:, :3], shards, stride), (None,) * shards
    found: list[tuple[int, int, int]] = []
    orders: list[np.ndarray | None] = []
    for shard in range(shards):
        own = table[table[:, 0] == shard, 1:].tolist()
        fine, order = _refined([Span(*span) for span in own], stride)
        found += [(shard, start, length) for start, length in fine]
        orders.append(order)
    return SpanTable.make(np.array(found, dtype=np.int64).reshape(-1, 3), shards, stride), tuple(orders)


def _refined(spans: Sequence[Span], stride: int) -> tuple[list[tuple[int, int]], np.ndarray | None]:
    """(start, length) of the spans of one stride, and the old row of each new row."""
    if all(span.length == 1 or span.stride == stride for span in spans):
        return [(span.start, span.length) for span in spans], None
    out: list[tuple[int, int]] = []
    rows = []
    row = 0
    for span in spans:
        step = stride // span.stride if span.length > 1 else 1
        for first in range(min(step, span.length)):
            out.append((span.start + span.stride * first, len(range(first, span.length, step))))
            rows.append(np.arange(row + first, row + span.length, step))
        row += span.length
    return out, np.concatenate(rows)


@dataclass(frozen=True, eq=False)
class Sights:
    """Pairs of a query span and a region that meet, by query span, then by region: their indices, and the keys that the queries see.

    These keys are among [k_min, k_max], the region's stride apart. With stride 1 they are all of these; none, if k_max < k_min.
    """

    query: np.ndarray
    region: np.ndarray
    k_min: np.ndarray
    k_max: np.ndarray

    def part(self, begin: int, end: int) -> Sights:
        """Those of the query spans [begin, end)."""
        a, b = self.query.searchsorted((begin, end)).tolist()  # pyrefly: ignore[not-iterable]
        return Sights(self.query[a:b], self.region[a:b], self.k_min[a:b], self.k_max[a:b])


def look(queries: SpanTable, regions: Table) -> Sights:
    """Which regions each query span meets. The spans' stride is a multiple of each region's."""
    if queries.stride == 1 and queries.ascending is not None:
        order, start, last = queries.ascending
        native = plans()
        if native is not None:
            return Sights(*map(numbers, native.look(order, start, last, queries.start, queries.last, regions)))
        r_of, at = spread(last.searchsorted(regions[:, Q_START]), start.searchsorted(regions[:, Q_STOP]))
        q_of = order[at]
        if len(q_of) > 1 and not (q_of[1:] >= q_of[:-1]).all():
            by_query = q_of.argsort(kind="stable")
            q_of, r_of = q_of[by_query], r_of[by_query]
    else:
        meets = (queries.start[:, None] < regions[:, Q_STOP]) & (queries.last[:, None] >= regions[:, Q_START])
        if queries.stride > 1:
            meets &= (queries.start[:, None] - regions[:, Q_START]) % regions[:, STRIDE] == 0
        q_of, r_of = meets.nonzero()
    q_start, q_stop, k_start, k_stop, lo, hi, _ = regions.T.take(r_of, axis=1)
    k_min = np.maximum(k_start, np.maximum(queries.start[q_of], q_start) - hi)
    k_max = np.minimum(k_stop - 1, np.minimum(queries.last[q_of], q_stop - 1) - lo)
    return Sights(q_of, r_of, k_min, k_max)


def spread(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All (i, x) with begin[i] <= x < end[i], in order."""
    count = np.maximum(end - begin, 0)
    index = np.arange(len(count)).repeat(count)
    return index, np.arange(len(index)) + (begin - count.cumsum() + count)[index]


def fold(queries: SpanTable, keys: SpanTable, regions: Table, sights: Sights) -> tuple[Table, np.ndarray, np.ndarray]:
    """Intersect query spans, key spans and regions into tiles of local rows.

    All spans have one stride, a multiple of each region's. Position p = start + stride * i is local row `row + i`, so
    `lo <= q - k <= hi` folds to a band in rows: `ceil((lo - start_q + start_k) / stride) <= i - j <= floor(...)`.
    Returns (n, 6) int64 tiles trimmed to their live bounding boxes, and the index of each tile's query span and key span.
    """
    stride = queries.stride
    part = regions.T.take(sights.region, axis=1)
    # for each pair of query span and region, the key spans that it meets
    index, k_of = _keys_in_sight(sights, part, keys)
    q_start, q_length, q_row = (x[sights.query] for x in (queries.start, queries.length, queries.row))
    # one column a pair of query span and region; `take` repeats it for each of the pair's tiles
    i0 = q_row + np.maximum(0, _ceil(part[Q_START] - q_start, stride))
    i1 = q_row + np.minimum(q_length, _ceil(part[Q_STOP] - q_start, stride))
    known = np.array([sights.query, i0, i1, q_row, q_start - part[LO], part[HI] - q_start, part[K_START], part[K_STOP]])
    q_of, i0, i1, q_row, low, high, k_begin, k_end = known.take(index, axis=1)
    k_start, k_length, k_row = (x[k_of] for x in (keys.start, keys.length, keys.row))
    j0 = np.maximum(0, _ceil(k_begin - k_start, stride))
    j1 = np.minimum(k_length, _ceil(k_end - k_start, stride))
    shift = q_row - k_row
    lo = _ceil(k_start - low, stride) + shift
    hi = (high + k_start if stride == 1 else (high + k_start) // stride) + shift
    *tiles, live = trim(i0, i1, j0 + k_row, j1 + k_row, lo, hi)
    if live.all():
        return np.array(tiles).T, q_of, k_of
    return np.array(tiles).T[live], q_of[live], k_of[live]


def _ceil(x: np.ndarray, stride: int) -> np.ndarray:
    """x / stride, rounded up."""
    return x if stride == 1 else -(-x // stride)


def _keys_in_sight(sights: Sights, part: Table, keys: SpanTable) -> tuple[np.ndarray, np.ndarray]:
    """(index of a sight, key span that it meets), by sight, then by key span. part: the columns of the sights' regions."""
    if keys.stride == 1 and keys.ascending is not None:
        order, start, last = keys.ascending
        index, at = spread(last.searchsorted(sights.k_min), start.searchsorted(sights.k_max, side="right"))
        k_of = order[at]
        number = index * len(keys) + k_of
        number.sort()
        return np.divmod(number, max(1, len(keys)))
    pieces = list(_pairs_that_meet(sights, part, keys))
    if not pieces:
        return sights.query[:0], sights.query[:0]
    rows, columns = zip(*pieces)
    return np.concatenate(rows), np.concatenate(columns)


def _pairs_that_meet(sights: Sights, part: Table, keys: SpanTable) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """As `_keys_in_sight`, for keys of any stride: compares all with all, some sights at a time."""
    step = max(1, (1 << 24) // max(1, len(keys)))
    for first in range(0, len(sights.query), step):
        block = slice(first, first + step)
        meets = (keys.start <= sights.k_max[block, None]) & (keys.last >= sights.k_min[block, None])
        if keys.stride > 1:
            meets &= (keys.start - part[K_START, block, None]) % part[STRIDE, block, None] == 0
        rows, columns = meets.nonzero()
        yield rows + first, columns
