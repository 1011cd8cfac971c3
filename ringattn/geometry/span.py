"""Spans are positions with one stride; `fold` intersects them with a mask's regions into the tiles of a plan.

Row i of a span is the position `start + stride * i`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from .region import HI, K_START, K_STOP, LO, Q_START, Q_STOP, STRIDE, Table, trim


@dataclass(frozen=True)
class Span:
    """The positions `start, start + stride, ...`, `length` of them."""

    start: int
    length: int
    stride: int = 1

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.stride * (self.length - 1) + 1 if self.length else self.start


Spans = tuple[Span, ...]


def common_stride(*shards: Spans, at_least: int = 1) -> int:
    """The least common multiple of `at_least` and the spans' strides. A span of one token fits any stride."""
    return lcm(at_least, *{span.stride for spans in shards for span in spans if span.length > 1})


def refine(spans: Spans, stride: int) -> tuple[Spans, np.ndarray | None]:
    """The same positions as spans of one stride, and the old local row of each new row (None if the order is unchanged)."""
    if all(span.length == 1 or span.stride == stride for span in spans):
        return tuple(Span(span.start, span.length, stride) for span in spans), None
    out: list[Span] = []
    rows = []
    row = 0
    for span in spans:
        step = stride // span.stride if span.length > 1 else 1
        for first in range(min(step, span.length)):
            out.append(Span(span.start + span.stride * first, len(range(first, span.length, step)), stride))
            rows.append(np.arange(row + first, row + span.length, step))
        row += span.length
    return tuple(out), np.concatenate(rows)


def span_table(shards: Sequence[Spans]) -> tuple[Table, np.ndarray]:
    """Spans of several shards as an (n, 3) table of start, length and first local row, and the shard of each span."""
    rows = []
    shard_of = []
    for index, spans in enumerate(shards):
        row = 0
        for span in spans:
            rows.append((span.start, span.length, row))
            shard_of.append(index)
            row += span.length
    return np.array(rows, dtype=np.int64).reshape(-1, 3), np.array(shard_of, dtype=np.int64)


def fold(queries: Table, keys: Table, regions: Table, stride: int) -> tuple[Table, np.ndarray, np.ndarray, Table]:
    """Intersect query spans, key spans and regions into tiles of local rows.

    All spans have one `stride`, a multiple of each region's. Position p = start + stride * i is local row `first_row + i`, so
    `lo <= q - k <= hi` folds to a band in rows: `ceil((lo - start_q + start_k) / stride) <= i - j <= floor(...)`.
    Returns (n, 6) int64 tiles trimmed to their live bounding boxes, the index of each tile's query span and key span, and (n, 2) places:
    the positions that local row 0 of the queries and of the keys would have in the tile's spans.
    """
    # pairs of a query span and a region that meet
    q_start, q_length, _ = queries.T
    q_last = q_start + stride * (q_length - 1)
    meets = (q_start[:, None] < regions[:, Q_STOP]) & (q_last[:, None] >= regions[:, Q_START])
    if stride > 1:
        meets &= (q_start[:, None] - regions[:, Q_START]) % regions[:, STRIDE] == 0
    q_of, r_of = np.nonzero(meets)
    part = regions[r_of]
    k_min = np.maximum(part[:, K_START], np.maximum(q_start[q_of], part[:, Q_START]) - part[:, HI])
    k_max = np.minimum(part[:, K_STOP] - 1, np.minimum(q_last[q_of], part[:, Q_STOP] - 1) - part[:, LO])
    # for each such pair, the key spans that it meets
    pieces = list(_pairs_that_meet(k_min, k_max, part, keys, stride))
    index = np.concatenate([piece[0] for piece in pieces]) if pieces else np.empty(0, dtype=np.int64)
    k_of = np.concatenate([piece[1] for piece in pieces]) if pieces else index
    q_start, q_length, q_row = queries[q_of].T
    # one column a pair of query span and region; `take` repeats it for each of the pair's tiles
    i0 = q_row + np.maximum(0, -((q_start - part[:, Q_START]) // stride))
    i1 = q_row + np.minimum(q_length, -((q_start - part[:, Q_STOP]) // stride))
    known = np.stack([q_of, i0, i1, q_row, q_start - part[:, LO], part[:, HI] - q_start, part[:, K_START], part[:, K_STOP]])
    q_of, i0, i1, q_row, low, high, k_begin, k_end = known.take(index, axis=1)
    k_start, k_length, k_row = np.ascontiguousarray(keys.T).take(k_of, axis=1)
    j0 = np.maximum(0, -((k_start - k_begin) // stride))
    j1 = np.minimum(k_length, -((k_start - k_end) // stride))
    lo = -((low - k_start) // stride)
    hi = (high + k_start) // stride
    shift = q_row - k_row
    *tiles, live = trim(i0, i1, j0 + k_row, j1 + k_row, lo + shift, hi + shift)
    q_of, k_of = q_of[live], k_of[live]
    places = np.stack([spans[of, 0] - stride * spans[of, 2] for spans, of in ((queries, q_of), (keys, k_of))], axis=1)
    return np.stack(tiles, axis=1)[live], q_of, k_of, places


def _pairs_that_meet(k_min: Table, k_max: Table, part: Table, keys: Table, stride: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    k_start, k_length, _ = keys.T
    k_last = k_start + stride * (k_length - 1)
    step = max(1, (1 << 24) // max(1, len(keys)))
    for first in range(0, len(part), step):
        block = slice(first, first + step)
        meets = (k_start <= k_max[block, None]) & (k_last >= k_min[block, None])
        if stride > 1:
            meets &= (k_start - part[block, K_START, None]) % part[block, STRIDE, None] == 0
        rows, columns = np.nonzero(meets)
        yield rows + first, columns
