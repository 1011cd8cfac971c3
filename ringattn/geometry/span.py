"""Spans are positions with one stride; `fold` intersects them with a mask's regions into the tiles of a plan.

Row i of a span is the position `start + stride * i`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from .region import Table, trim


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


def fold(queries: Table, keys: Table, regions: Table, stride: int) -> tuple[Table, np.ndarray, np.ndarray]:
    """Intersect query spans, key spans and regions into tiles of local rows.

    All spans have one `stride`, a multiple of each region's. Position p = start + stride * i is local row `first_row + i`, so
    `lo <= q - k <= hi` folds to a band in rows: `ceil((lo - start_q + start_k) / stride) <= i - j <= floor(...)`.
    Returns (n, 6) int64 tiles trimmed to their live bounding boxes, and the index of each tile's query span and key span.
    """
    # pairs of a query span and a region that meet
    q_last = queries[:, 0] + stride * (queries[:, 1] - 1)
    g = regions[:, 6]
    meets = (queries[:, None, 0] < regions[:, 1]) & (q_last[:, None] >= regions[:, 0])
    if stride > 1:
        meets &= (queries[:, None, 0] - regions[:, 0]) % g == 0
    q_of, r_of = np.nonzero(meets)
    part = regions[r_of]
    k_min = np.maximum(part[:, 2], np.maximum(queries[q_of, 0], part[:, 0]) - part[:, 5])
    k_max = np.minimum(part[:, 3] - 1, np.minimum(q_last[q_of], part[:, 1] - 1) - part[:, 4])
    # for each such pair, the key spans that it meets
    pieces = list(_pairs_that_meet(k_min, k_max, part, keys, stride))
    index = np.concatenate([piece[0] for piece in pieces]) if pieces else np.empty(0, dtype=np.int64)
    k_of = np.concatenate([piece[1] for piece in pieces]) if pieces else index
    q_start, q_length, q_row = queries[q_of].T
    # one column a pair of query span and region; `take` repeats it for each of the pair's tiles
    i0 = q_row + np.maximum(0, -((q_start - part[:, 0]) // stride))
    i1 = q_row + np.minimum(q_length, -((q_start - part[:, 1]) // stride))
    known = np.stack([q_of, i0, i1, q_row, q_start - part[:, 4], part[:, 5] - q_start, part[:, 2], part[:, 3]])
    q_of, i0, i1, q_row, low, high, k_begin, k_end = known.take(index, axis=1)
    k_start, k_length, k_row = np.ascontiguousarray(keys.T).take(k_of, axis=1)
    j0 = np.maximum(0, -((k_start - k_begin) // stride))
    j1 = np.minimum(k_length, -((k_start - k_end) // stride))
    lo = -((low - k_start) // stride)
    hi = (high + k_start) // stride
    shift = q_row - k_row
    *tiles, live = trim(i0, i1, j0 + k_row, j1 + k_row, lo + shift, hi + shift)
    return np.stack(tiles, axis=1)[live], q_of[live], k_of[live]


def _pairs_that_meet(k_min: Table, k_max: Table, part: Table, keys: Table, stride: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    k_last = keys[:, 0] + stride * (keys[:, 1] - 1)
    step = max(1, (1 << 24) // max(1, len(keys)))
    for first in range(0, len(part), step):
        block = slice(first, first + step)
        meets = (keys[:, 0] <= k_max[block, None]) & (k_last >= k_min[block, None])
        if stride > 1:
            meets &= (keys[:, 0] - part[block, 2, None]) % part[block, 6, None] == 0
        rows, columns = np.nonzero(meets)
        yield rows + first, columns
