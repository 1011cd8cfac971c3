"""The plan of a layout and a mask: the tiles that each rank computes with each owner's keys, and the K/V rows it needs for them.

A tile is six integers, `(q_begin, q_end, k_begin, k_end, lo, hi)`: rows i of a rank's Q and rows j of an owner's K/V are live where
`lo <= i - j <= hi`. The starts and strides of spans are folded into `lo` and `hi`, so nothing after the plan needs positions to know
what is live. Every live pair lies in exactly one tile.

Where scores depend on positions, tables have two more columns, the places: in a tile, row i of Q has the position
`q_place + stride * i`, and row j of K/V has `k_place + stride * j`, with one stride for the whole plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from ringattn_kernels.table import TileTable

from ..check import BUILD_A_LAYOUT, BUILD_A_MASK, instance, integer
from .layout import Layout
from .mask import Mask
from .region import Table, count_pairs, trim
from .region import common_stride as region_stride
from .rows import Order, Rows, joined
from .span import Span, Spans, common_stride, fold, refine, span_table

# columns of a table of tiles
_KEYS, _BAND, _K_PLACE = slice(2, 4), slice(4, 6), 7  # k_begin and k_end; lo and hi
_TILE = 6  # columns without the places
# gaps of up to so many rows between needed rows move too: leaving them out costs more, since a copy must then gather the needed rows
_GAP = 64


@dataclass(frozen=True, eq=False)
class Plan:
    """All tiles of a layout and a mask, sorted by rank and owner, and the rows of each owner that each rank needs.

    `order[rank]` is the order in which tiles count a rank's local rows; None if it is their own. It differs only if a dilated mask or
    mixed strides make the plan sort rows by residue.
    """

    world_size: int
    lengths: tuple[int, ...]
    order: tuple[Order | None, ...]
    table: Table  # (n, 6)
    starts: np.ndarray  # (world_size * world_size + 1): tiles of (rank, owner) begin at starts[rank * world_size + owner]
    places: Table  # (n, 2)
    stride: int = 1
    placed: bool = False  # whether launches need positions

    def tiles(self, rank: int, owner: int) -> Table:
        """The (n, 6) tiles of a rank's queries with an owner's keys."""
        at = self._pair(rank, owner)
        return self.table[self.starts[at] : self.starts[at + 1]]

    def tiles_of_launch(self, rank: int, owner: int) -> Table:
        """`tiles`, with their places if launches need positions."""
        at = self._pair(rank, owner)
        part = slice(self.starts[at], self.starts[at + 1])
        return np.concatenate([self.table[part], self.places[part]], axis=1) if self.placed else self.table[part]

    def needs(self, rank: int, owner: int) -> Rows:
        """The rows of an owner's K/V that a rank's queries see, and small gaps between them."""
        return self._needs[self._pair(rank, owner)]

    @cached_property
    def _needs(self) -> list[Rows]:
        # one call for all (rank, owner) pairs: `base` moves their rows too far apart to be joined across pairs
        apart = max(self.lengths) + _GAP + 1
        pairs = len(self.starts) - 1
        base = apart * np.repeat(np.arange(pairs), np.diff(self.starts))
        ranges = joined(self.table[:, _KEYS] + base[:, None], _GAP)
        cuts = np.searchsorted(ranges[:, 0], apart * np.arange(pairs + 1))
        return [Rows(ranges[a:b] - apart * pair) for pair, (a, b) in enumerate(pairwise(cuts.tolist()))]

    def pairs_of(self, rank: int, owner: int) -> int:
        """Live pairs of a rank's queries with an owner's keys."""
        return self._pairs[self._pair(rank, owner)]

    def _pair(self, rank: int, owner: int) -> int:
        """The number of (rank, owner). Raises ValueError if one of them is no rank."""
        n = self.world_size
        if not (type(rank) is type(owner) is int and 0 <= rank < n and 0 <= owner < n):
            rank, owner = integer("rank", rank, most=n - 1), integer("owner", owner, most=n - 1)
        return rank * n + owner

    @cached_property
    def _pairs(self) -> list[int]:
        return self.pairs().ravel().tolist()

    def pairs(self) -> np.ndarray:
        """Live pairs of each (rank, owner): (world_size, world_size) int64."""
        total = np.concatenate([[0], np.cumsum(count_pairs(*self.table.T))])[self.starts]
        return np.diff(total).reshape(self.world_size, self.world_size)


def make_plan(layout: Layout, mask: Mask) -> Plan:
    """The plan of a layout and a mask. Raises ValueError if the mask does not fit the layout's sequence."""
    instance("layout", layout, Layout, BUILD_A_LAYOUT)
    instance("mask", mask, Mask, BUILD_A_MASK)
    return _plan(layout.spans, layout.spans, mask, layout.seq_len)


def make_local_plan(
    q_positions: torch.Tensor, k_positions: torch.Tensor, mask: Mask, seq_len: int, placed: bool = False
) -> tuple[TileTable, Order | None, Order | None]:
    """Tiles of one device's queries and keys, and the order in which tiles count the rows of each (None: as given)."""
    (queries, q_rows), (keys, k_rows) = spans_of(q_positions), spans_of(k_positions)
    plan = replace(_plan((queries,), (keys,), mask, seq_len), placed=placed)
    q_order, k_order = (_then(rows, order) for rows, order in zip((q_rows, k_rows), plan.order))
    tiles = make_tiles(plan.tiles_of_launch(0, 0), len(q_positions), len(k_positions), plan.stride)
    return tiles, q_order, k_order


def _then(rows: np.ndarray | None, order: Order | None) -> Order | None:
    """Two permutations of rows, one after the other, as one; None changes nothing."""
    if rows is None:
        return order
    return Order(rows if order is None else rows[order.rows])


def _plan(query_shards: Sequence[Spans], key_shards: Sequence[Spans], mask: Mask, seq_len: int) -> Plan:
    regions = mask.regions(seq_len)
    stride = common_stride(*query_shards, *key_shards, at_least=region_stride(regions))
    fine_queries = [refine(spans, stride) for spans in query_shards]
    same = query_shards is key_shards
    fine_keys = fine_queries if same else [refine(spans, stride) for spans in key_shards]
    queries, rank_of = span_table([spans for spans, _ in fine_queries])
    keys, owner_of = span_table([spans for spans, _ in fine_keys])
    tiles, q_of, k_of, places = fold(queries, keys, regions, stride)
    pair = rank_of[q_of] * len(key_shards) + owner_of[k_of]
    pairs = len(query_shards) * len(key_shards)
    # the smallest integer type, which numpy sorts fastest: by counting
    by_pair = np.argsort(pair.astype(np.min_scalar_type(pairs)), kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(pair, minlength=pairs))])
    fine = fine_queries if same else fine_queries + fine_keys
    order = tuple(None if rows is None else Order(rows) for _, rows in fine)
    lengths = tuple(sum(span.length for span in spans) for spans in key_shards)
    return Plan(len(key_shards), lengths, order, tiles[by_pair], starts, places[by_pair], stride)


def make_tiles(table: Table, q_rows: int, k_rows: int, stride: int = 1) -> TileTable:
    """The tiles of one launch over `q_rows` of Q and `k_rows` of a K/V buffer, in as few rows as can be. stride: of the places, if any."""
    table = merge_full(table)
    return TileTable(table[:, :_TILE], q_rows, k_rows, table[:, _TILE:] if table.shape[1] > _TILE else None, stride)


def live_pairs(tiles: TileTable, keys: int | None = None) -> int:
    """The number of live pairs; with `keys`, those of the first so many keys."""
    q_begin, q_end, k_begin, k_end, lo, hi = tiles.tiles.T
    return int(count_pairs(q_begin, q_end, k_begin, k_end if keys is None else np.minimum(k_end, keys), lo, hi).sum())


def of_keys(tiles: TileTable, begin: int, end: int) -> TileTable:
    """The part of the tiles that lies in rows [begin, end) of the buffer, over these rows."""
    q_begin, q_end, k_begin, k_end, lo, hi = tiles.tiles.T
    k_begin, k_end = (np.clip(x, begin, end) - begin for x in (k_begin, k_end))
    *table, live = trim(q_begin, q_end, k_begin, k_end, lo + begin, hi + begin)
    if tiles.places is not None:
        table += [tiles.places[:, 0], tiles.places[:, 1] + tiles.stride * begin]
    return make_tiles(np.stack(table, axis=1)[live], tiles.q_rows, end - begin, tiles.stride)


def move_keys(tiles: Table, rows: Rows, base: int, stride: int = 1) -> Table:
    """Tiles over an owner's rows, as tiles over a buffer that holds `rows` of that owner one after the other from row `base` on.

    stride: of the places, if there are any.
    """
    if not len(tiles):
        return tiles
    k_begin = tiles[:, _KEYS][:, 0]
    shift = base + rows.rank_of(k_begin) - k_begin
    out = tiles.copy()
    out[:, _KEYS] += shift[:, None]
    out[:, _BAND] -= shift[:, None]
    if tiles.shape[1] > _TILE:
        out[:, _K_PLACE] -= stride * shift
    return out


def is_full(tiles: Table) -> np.ndarray:
    """Which tiles are wholly live."""
    q_begin, q_end, k_begin, k_end, lo, hi = tiles.T[:_TILE]
    return (lo <= q_begin - k_end + 1) & (hi >= q_end - 1 - k_begin)


def merge_full(tiles: Table) -> Table:
    """Join wholly live neighbours, first along the keys and then along the queries: fewer rows, the same pairs, at the same places."""
    full = is_full(tiles)
    boxes = np.delete(tiles[full], _BAND, axis=1)
    for axis in (2, 0):
        boxes = _join(boxes, axis)
    q_begin, q_end, k_begin, k_end, *places = boxes.T
    joined = np.stack([q_begin, q_end, k_begin, k_end, q_begin - k_end + 1, q_end - 1 - k_begin, *places], axis=1)
    return np.concatenate([tiles[~full], joined])


def _join(boxes: Table, axis: int) -> Table:
    """Join boxes (q_begin, q_end, k_begin, k_end, ...) that touch along one axis (0 queries, 2 keys) and agree in all else."""
    if len(boxes) < 2:
        return boxes
    same = [2 - axis, 3 - axis, *range(4, boxes.shape[1])]
    boxes = boxes[np.lexsort((boxes[:, axis], *boxes.T[same[::-1]]))]
    apart = (boxes[1:, axis] != boxes[:-1, axis + 1]) | (boxes[1:, same] != boxes[:-1, same]).any(axis=1)
    first = np.flatnonzero(np.concatenate([[True], apart]))
    last = np.append(first[1:], len(boxes)) - 1
    out = boxes[first].copy()
    out[:, axis + 1] = boxes[last, axis + 1]
    return out


def spans_of(positions: torch.Tensor) -> tuple[Spans, np.ndarray | None]:
    """Positions as spans, sorted if that makes fewer spans, and the given row of each sorted position (None: not sorted)."""
    given = positions.detach().cpu().numpy().astype(np.int64)
    spans = _runs(given)
    if (given[1:] < given[:-1]).any():
        rows = np.argsort(given, kind="stable")
        ascending = _runs(given[rows])
        if len(ascending) < len(spans):
            return ascending, rows
    return spans, None


def _runs(p: np.ndarray) -> Spans:
    """Positions as spans of one stride, the most common step between neighbours."""
    if not len(p):
        return ()
    steps = np.diff(p)
    ahead = steps[steps > 0]
    stride = int(np.bincount(ahead).argmax()) if len(ahead) and ahead.max() < 1 << 20 else 1
    edges = np.concatenate([[0], np.flatnonzero(steps != stride) + 1, [len(p)]])
    return tuple(Span(int(p[a]), int(b - a), stride if b - a > 1 else 1) for a, b in pairwise(edges))
