"""The plan of layouts and a mask: the tiles that each rank computes with each owner's keys, and the K/V rows it needs for them.

A tile is six integers, `(q_begin, q_end, k_begin, k_end, lo, hi)`: rows i of a rank's Q and rows j of an owner's K/V are live where
`lo <= i - j <= hi`. The starts and strides of spans are folded into `lo` and `hi`, so nothing after the plan needs positions to know
what is live. Every live pair lies in exactly one tile.

Where scores depend on positions, tables have two more columns, the places: in a tile, row i of Q has the position
`q_place + stride * i`, and row j of K/V has `k_place + stride * j`, with one stride for the whole plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch

from ringattn_kernels.native import numbers, plans
from ringattn_kernels.table import TileTable

from ..check import BUILD_A_LAYOUT, BUILD_A_MASK, MAX_TOKENS, instance, integer
from .layout import Layout
from .mask import Mask
from .region import K_STOP, Q_STOP, Table, count_pairs, pairs_of, tighten, trim
from .region import common_stride as region_stride
from .rows import Order, Rows, joined
from .span import Sights, Span, Spans, SpanTable, common_stride, fold, look, refine, spans_to_table, spread

# columns of a table of tiles
_KEYS, _BAND, _K_PLACE = slice(2, 4), slice(4, 6), 7  # k_begin and k_end; lo and hi
_TILE = 6  # columns without the places
# gaps of up to so many rows between needed rows move too: leaving them out costs more, since a copy must then gather the needed rows
_GAP = 64
# numbers of keys whose pairs are counted together
_AT_ONCE = 32


@dataclass(frozen=True, eq=False)
class Plan:
    """All tiles of a layout and a mask, and the rows of each owner that each rank needs.

    Tiles are made when they are asked for, those of a rank together: a rank computes with its own, and must know of the others only which
    rows they need. `q_lengths` and `lengths` are the rows of Q, and of K/V, of each rank. `order[rank]` and `k_order[rank]` are the
    orders in which tiles count them; None if it is their own. They differ only if a dilated mask or mixed strides make the plan sort rows
    by residue. `placed` says whether launches need positions.
    """

    world_size: int
    q_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    order: tuple[Order | None, ...]
    k_order: tuple[Order | None, ...]
    queries: SpanTable
    keys: SpanTable
    regions: Table
    placed: bool = False

    @property
    def stride(self) -> int:
        """Of the positions of neighbouring rows."""
        return self.queries.stride

    def tiles(self, rank: int, owner: int) -> Table:
        """The (n, 6) tiles of a rank's queries with an owner's keys."""
        self._pair(rank, owner)
        found = self._of(rank)
        return found.table[found.part(rank, owner)]

    def tiles_of_launch(self, rank: int, owner: int) -> Table:
        """`tiles`, with their places if launches need positions."""
        self._pair(rank, owner)
        found = self._of(rank)
        part = found.part(rank, owner)
        if not self.placed:
            return found.table[part]
        spans = (self.queries, found.query[part]), (self.keys, found.key[part])
        # the positions that local row 0 of the queries and of the keys would have in the tile's spans
        places = [table.start[of] - self.stride * table.row[of] for table, of in spans]
        return np.concatenate([found.table[part].T, places]).T

    def needs(self, rank: int, owner: int) -> Rows:
        """The rows of an owner's K/V that a rank's queries see, and small gaps between them."""
        at = self._pair(rank, owner)
        found = self._rows.get(at)
        if found is None:
            ranges, cuts = self._needs
            found = self._rows[at] = Rows.disjoint(ranges[cuts[at] : cuts[at + 1]], self._counts[rank][owner])
        return found

    @cached_property
    def needed(self) -> np.ndarray:
        """How many rows of each owner's K/V each rank needs: (world_size, world_size) int64, [rank, owner]."""
        ranges, cuts = self._needs
        before = np.zeros(len(ranges) + 1, dtype=np.int64)
        (ranges[:, 1] - ranges[:, 0]).cumsum(out=before[1:])
        before = before[cuts]
        return (before[1:] - before[:-1]).reshape(self.world_size, self.world_size)

    @cached_property
    def _counts(self) -> list[list[int]]:
        return self.needed.tolist()

    @cached_property
    def transposed(self) -> Plan:
        """The same pairs with queries and keys in each other's place: which rows of Q each owner of keys needs."""
        q_start, q_stop, k_start, k_stop, lo, hi, stride = self.regions.T
        regions = np.stack([k_start, k_stop, q_start, q_stop, -hi, -lo, stride], axis=1)
        lengths, order = (self.lengths, self.q_lengths), (self.k_order, self.order)
        return Plan(self.world_size, *lengths, *order, self.keys, self.queries, regions, self.placed)

    def needed_by_owner(self, rank: int) -> list[int]:
        """How many rows of each owner's K/V a rank needs."""
        self._pair(rank, 0)
        return self._counts[rank]

    def pairs_of(self, rank: int, owner: int) -> int:
        """Live pairs of a rank's queries with an owner's keys."""
        self._pair(rank, owner)
        return self.pairs_by_owner(rank)[owner]

    def pairs_by_owner(self, rank: int) -> list[int]:
        """Live pairs of a rank's queries with each owner's keys."""
        self._pair(rank, 0)
        found = self._of(rank)
        return found.pairs[rank - found.first]

    def pairs(self) -> np.ndarray:
        """Live pairs of each (rank, owner): (world_size, world_size) int64."""
        return np.array(self._all.pairs, dtype=np.int64).reshape(self.world_size, self.world_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that have been made so far."""
        made = [
            self.queries,
            *(() if self.keys is self.queries else (self.keys,)),
            *(self.__dict__.get(name) for name in ("_sights", "_all")),
            *self._of_rank.values(),
        ]
        arrays = [value for one in made if one is not None for value in vars(one).values()]
        other = self.__dict__.get("transposed")
        return (0 if other is None else other.nbytes) + sum(
            x.nbytes for x in [self.regions, *arrays, *self.__dict__.get("_needs", ())] if isinstance(x, np.ndarray)
        )

    def _pair(self, rank: int, owner: int) -> int:
        """The number of (rank, owner). Raises ValueError if one of them is no rank."""
        n = self.world_size
        if not (type(rank) is type(owner) is int and 0 <= rank < n and 0 <= owner < n):
            rank, owner = integer("rank", rank, most=n - 1), integer("owner", owner, most=n - 1)
        return rank * n + owner

    def _of(self, rank: int) -> _Tiles:
        """Tiles among which are those of a rank."""
        found = self.__dict__.get("_all") or self._of_rank.get(rank)
        if found is None:
            found = self._of_rank[rank] = self._make_tiles(rank, rank + 1)
        return found

    @cached_property
    def _all(self) -> _Tiles:
        return self._make_tiles(0, self.world_size)

    @cached_property
    def _of_rank(self) -> dict[int, _Tiles]:
        return {}

    @cached_property
    def _rows(self) -> dict[int, Rows]:
        return {}

    @cached_property
    def _sights(self) -> Sights:
        return look(self.queries, self.regions)

    @property
    def _native(self) -> ModuleType | None:
        """`plans.c`, if it is compiled and knows such spans."""
        return plans() if self.stride == 1 and self.keys.ascending is not None else None

    def _seen_by(self, sights: Sights) -> tuple[np.ndarray, ...]:
        """What `plans.c` is told of sights and of the spans of keys, which are in ascending order."""
        assert self.keys.ascending is not None
        return sights.k_min, sights.k_max, *self.keys.ascending, self.keys.row, self.keys.shard

    def _make_tiles(self, first: int, end: int) -> _Tiles:
        """The tiles of the ranks [first, end)."""
        sights = self._sights
        if end - first < self.world_size:
            sights = sights.part(*self.queries.bounds[[first, end]].tolist())
        n, native, q, k = self.world_size, self._native, self.queries, self.keys
        pairs = (end - first) * n
        if native is not None:
            spans = k.start, k.length, q.start, q.length, q.row, q.shard
            tiles, *of_tiles = native.fold(*self._seen_by(sights), sights.query, sights.region, *spans, self.regions, first, n)
            query, key, pair = map(numbers, of_tiles)
            return _Tiles(first, n, numbers(tiles, _TILE), query, key, pair.searchsorted(np.arange(pairs + 1)))
        table, query, key = fold(q, k, self.regions, sights)
        pair = (q.shard[query] - first) * n + k.shard[key]
        # the smallest integer type, which numpy sorts fastest: by counting
        by_pair = pair.astype(np.min_scalar_type(pairs)).argsort(kind="stable")
        starts = np.concatenate([[0], np.bincount(pair, minlength=pairs).cumsum()])
        return _Tiles(first, n, table[by_pair], query[by_pair], key[by_pair], starts)

    @cached_property
    def _needs(self) -> tuple[Table, list[int]]:
        """The rows that each (rank, owner) pair needs as an (n, 2) table of ranges, and where those of each pair begin in it."""
        native, sights = self._native, self._sights
        if native is not None:
            ranks = self.queries.shard[sights.query]
            ranges, cuts = native.needs(*self._seen_by(sights), ranks, self.world_size, _GAP)
            return numbers(ranges, 2), numbers(cuts).tolist()
        pair, begin, end = self._seen_rows()
        # all pairs at once: `base` moves their rows too far apart to be joined across pairs
        pairs = self.world_size**2
        apart = max(self.lengths) + _GAP + 1
        base = apart * pair
        ranges = joined(np.array([begin + base, end + base]).T, _GAP)
        cuts = ranges[:, 0].searchsorted(apart * np.arange(pairs + 1))
        return ranges - (ranges[:, :1] // apart) * apart, cuts.tolist()  # pyrefly: ignore[bad-return]

    def _seen_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(number of a pair, begin, end) of ranges of an owner's rows that a rank sees."""
        n, keys = self.world_size, self.keys
        if self.stride > 1 or keys.ascending is None:
            rank_of, owner_of = self.queries.shard[self._all.query], keys.shard[self._all.key]
            return rank_of * n + owner_of, *self._all.table.T[_KEYS]
        # runs of positions that each rank sees, far apart from those of other ranks
        sights = self._sights
        order, start, last = keys.ascending
        apart = int(last[-1]) + 2 if len(last) else 2
        base = apart * self.queries.shard[sights.query]
        runs = joined(np.array([sights.k_min + base, sights.k_max + 1 + base]).T)
        rank, begin = np.divmod(runs[:, 0], apart)
        end = runs[:, 1] - rank * apart
        run, at = spread(last.searchsorted(begin), start.searchsorted(end))
        key, rank = order[at], rank[run]
        shift = keys.row[key] - start[at]
        rows_begin, rows_end = np.maximum(begin[run], start[at]) + shift, np.minimum(end[run], last[at] + 1) + shift
        return rank * n + keys.shard[key], rows_begin, rows_end


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tiles of the ranks from `first` on, sorted by rank and owner; those of the i-th pair begin at starts[i].

    query, key: the span of each tile's queries, and of its keys.
    """

    first: int
    owners: int
    table: Table  # (n, 6)
    query: np.ndarray
    key: np.ndarray
    starts: np.ndarray

    def part(self, rank: int, owner: int) -> slice:
        """Where the tiles of a rank and an owner are."""
        at = (rank - self.first) * self.owners + owner
        return slice(self.starts[at], self.starts[at + 1])

    @cached_property
    def pairs(self) -> list[list[int]]:
        """Live pairs by rank and owner."""
        total = np.zeros(len(self.table) + 1, dtype=np.int64)
        pairs_of(self.table).cumsum(out=total[1:])
        total = total[self.starts]
        return (total[1:] - total[:-1]).reshape(-1, self.owners).tolist()


def make_plan(layout: Layout, mask: Mask, kv_layout: Layout | None = None, q_offset: int = 0) -> Plan:
    """The plan of a layout and a mask. Raises ValueError if the mask does not fit the sequence.

    kv_layout, q_offset: of keys that have a layout of their own, and the position of the first query among them, as for
    `ring_attention`.

    >>> import ringattn as ra
    >>> ra.make_plan(ra.contiguous(4, 2), ra.causal(), kv_layout=ra.contiguous(10, 2), q_offset=6).pairs().tolist()
    [[10, 5], [10, 9]]
    """
    instance("layout", layout, Layout, BUILD_A_LAYOUT)
    instance("mask", mask, Mask, BUILD_A_MASK)
    if kv_layout is None:
        check_q_offset_alone(q_offset)
        return make_placed_plan(layout, mask, placed=False)
    return make_cross_plan(layout, mask, Keys(kv_layout, q_offset), placed=False)


def make_placed_plan(layout: Layout, mask: Mask, placed: bool) -> Plan:
    """A plan whose launches need positions, if they are `placed`."""
    regions = mask.regions(layout.seq_len)
    stride = common_stride(layout.table, at_least=region_stride(regions))
    spans, found = refine(layout.table, layout.world_size, stride)
    lengths, order = layout.lengths, tuple(map(_order, found))
    return Plan(layout.world_size, lengths, lengths, order, order, spans, spans, regions, placed)


@dataclass(frozen=True)
class Keys:
    """Keys that have a layout of their own, and the position of the first query among them. Raises ValueError if they are none."""

    layout: Layout
    q_offset: int = 0

    def __post_init__(self) -> None:
        instance("kv_layout", self.layout, Layout, BUILD_A_LAYOUT)
        object.__setattr__(self, "q_offset", integer("q_offset", self.q_offset, most=MAX_TOKENS))

    @property
    def digest(self) -> str:
        return f"{self.layout.digest} {self.q_offset}"

    def seq_len(self, q_layout: Layout) -> int:
        """The length of a sequence that holds all keys, and all queries of a layout, for masks."""
        return max(self.q_offset + q_layout.seq_len, self.layout.seq_len)

    def check(self, q_layout: Layout, mask: Mask) -> None:
        """Raise ValueError if the layout of the queries, or the mask, does not fit."""
        if q_layout.world_size != self.layout.world_size:
            raise ValueError(
                f"kv_layout {self.layout!r} is for {self.layout.world_size} ranks, but layout {q_layout!r} is for "
                f"{q_layout.world_size}: build both for the group"
            )
        if self.q_offset + q_layout.seq_len > MAX_TOKENS:
            raise ValueError(
                f"q_offset is {self.q_offset} and q has {q_layout.seq_len} tokens, but positions must be less than {MAX_TOKENS}"
            )
        mask.check_length(self.seq_len(q_layout))


def check_q_offset_alone(q_offset: object) -> None:
    """Raise ValueError for a q_offset without keys of their own layout, unless it is 0."""
    if integer("q_offset", q_offset, most=MAX_TOKENS):
        raise ValueError(
            f"q_offset is {q_offset}, but without kv_layout a rank's q, k and v hold the same positions: pass kv_layout too"
        )


def make_cross_plan(layout: Layout, mask: Mask, keys: Keys, placed: bool) -> Plan:
    """The plan of queries with a layout, and of keys with their own."""
    keys.check(layout, mask)
    regions = mask.regions(keys.seq_len(layout)).copy()
    for column, stop in ((Q_STOP, keys.q_offset + layout.seq_len), (K_STOP, keys.layout.seq_len)):
        regions[:, column] = np.minimum(regions[:, column], stop)
    regions = tighten(regions)
    tables = layout.table.copy(), keys.layout.table
    tables[0][:, 1] += keys.q_offset
    stride = common_stride(*tables, at_least=region_stride(regions))
    (q_spans, q_order), (k_spans, k_order) = (refine(table, layout.world_size, stride) for table in tables)
    lengths = layout.lengths, keys.layout.lengths
    orders = tuple(map(_order, q_order)), tuple(map(_order, k_order))
    return Plan(layout.world_size, *lengths, *orders, q_spans, k_spans, regions, placed)


def make_local_plan(
    q_positions: torch.Tensor, k_positions: torch.Tensor, mask: Mask, seq_len: int, placed: bool = False
) -> tuple[TileTable, Order | None, Order | None]:
    """Tiles of one device's queries and keys, and the order in which tiles count the rows of each (None: as given)."""
    (queries, q_rows), (keys, k_rows) = spans_of(q_positions), spans_of(k_positions)
    tables = [spans_to_table([spans]) for spans in (queries, keys)]
    regions = mask.regions(seq_len)
    stride = common_stride(*tables, at_least=region_stride(regions))
    (q_spans, (q_order,)), (k_spans, (k_order,)) = (refine(table, 1, stride) for table in tables)
    q_length, k_length = len(q_positions), len(k_positions)
    plan = Plan(1, (q_length,), (k_length,), (None,), (None,), q_spans, k_spans, regions, placed)
    tiles = make_tiles(plan.tiles_of_launch(0, 0), q_length, k_length, stride)
    return tiles, _then(q_rows, _order(q_order)), _then(k_rows, _order(k_order))


def _order(rows: np.ndarray | None) -> Order | None:
    return None if rows is None else Order(rows)


def _then(rows: np.ndarray | None, order: Order | None) -> Order | None:
    """Two permutations of rows, one after the other, as one; None changes nothing."""
    if rows is None:
        return order
    return Order(rows if order is None else rows[order.rows])


def transpose(tiles: TileTable) -> TileTable:
    """The same pairs with queries and keys in each other's place."""
    q_begin, q_end, k_begin, k_end, lo, hi = tiles.tiles.T
    places = None if tiles.places is None else tiles.places[:, ::-1]
    return TileTable(np.stack([k_begin, k_end, q_begin, q_end, -hi, -lo], axis=1), tiles.k_rows, tiles.q_rows, places, tiles.stride)


def make_tiles(table: Table, q_rows: int, k_rows: int, stride: int = 1) -> TileTable:
    """The tiles of one launch over `q_rows` of Q and `k_rows` of a K/V buffer, in as few rows as can be. stride: of the places, if any."""
    table = merge_full(table)
    return TileTable(table[:, :_TILE], q_rows, k_rows, table[:, _TILE:] if table.shape[1] > _TILE else None, stride)


def live_pairs(tiles: TileTable) -> int:
    """The number of live pairs."""
    return int(pairs_of(tiles.tiles).sum())


def half_of_pairs(tiles: TileTable, block: int) -> int:
    """How many of the first keys have half of the live pairs, down to a multiple of `block`; 0 if the keys cannot be divided."""
    native = plans()
    if native is not None:
        return native.half(tiles.tiles, block, tiles.k_rows)
    columns = tiles.tiles.T
    k_begin, k_end = columns[_KEYS]
    pairs = count_pairs(*columns)
    total = int(pairs.sum())
    if not total:
        return 0
    # more keys than `low` have half of the pairs, and `high` have: all of a tile's pairs count from its last key on, none before its first
    by_begin, by_end = k_begin.argsort(), k_end.argsort()
    low = int(k_begin[by_begin[(2 * pairs[by_begin].cumsum()).searchsorted(total)]])
    high = int(k_end[by_end[(2 * pairs[by_end].cumsum()).searchsorted(total)]])
    missing = total - 2 * int(pairs[k_end <= low].sum())
    columns = columns[:, (k_end > low) & (k_begin < high)]
    while high - low > 1 and not (low + 1) // block == high // block > 0:
        step = -(-(high - low) // _AT_ONCE)
        if high - low <= block:
            counts = np.arange(low + step, high, step)
        else:
            counts = (np.arange(low + max(step, block), high, max(step, block)) + 1) // block * block - 1
        at = int((2 * _pairs_of_first(columns, counts)).searchsorted(missing))
        low = low if at == 0 else int(counts[at - 1])
        high = high if at == len(counts) else int(counts[at])
    half = high - high % block if high > block else high
    return half if half < tiles.k_rows else 0


def _pairs_of_first(columns: Table, counts: np.ndarray) -> np.ndarray:
    """The live pairs of the first so many keys, for several numbers of keys."""
    q_begin, q_end, k_begin, k_end, lo, hi = columns.repeat(len(counts), axis=1)
    k_end = np.minimum(k_end, np.tile(counts, columns.shape[1]))
    return count_pairs(q_begin, q_end, k_begin, k_end, lo, hi).reshape(-1, len(counts)).sum(axis=0)


def of_keys(tiles: TileTable, begin: int, end: int) -> TileTable:
    """The part of the tiles that lies in rows [begin, end) of the buffer, over these rows."""
    found, live = _parts_of(tiles.tiles, begin, end)
    if tiles.places is not None:
        places = tiles.places if live is None else tiles.places[live]
        found = np.concatenate([found, places + np.array([0, tiles.stride * begin])], axis=1)
    return make_tiles(found, tiles.q_rows, end - begin, tiles.stride)


def _parts_of(tiles: Table, begin: int, end: int) -> tuple[Table, np.ndarray | None]:
    """The parts in rows [begin, end) of keys, over these rows, of the tiles that have one, and which these are (None: all)."""
    native = plans()
    if native is not None:
        found, kept = native.part(tiles, begin, end)
        return numbers(found, _TILE), None if kept is None else np.frombuffer(kept, dtype=bool)
    q_begin, q_end, k_begin, k_end, lo, hi = tiles.T
    k_begin, k_end = (np.minimum(np.maximum(x, begin), end) - begin for x in (k_begin, k_end))
    *table, live = trim(q_begin, q_end, k_begin, k_end, lo + begin, hi + begin)
    found = np.array(table).T
    return (found, None) if live.all() else (found[live], live)


def move_keys(tiles: Table, rows: Rows, base: int, stride: int = 1, apart: np.ndarray | int = 0) -> Table:
    """Tiles over an owner's rows, as tiles over a buffer that holds `rows` of that owner one after the other from row `base` on.

    stride: of the places, if there are any. apart: how far each tile's rows were moved in `rows`, which then hold several owners'.
    """
    if not len(tiles):
        return tiles
    native = plans()
    if native is not None:
        apart = apart if isinstance(apart, np.ndarray) else np.full(len(tiles), apart)
        return numbers(native.move(tiles, apart, rows.ranges, base, stride), tiles.shape[1])
    k_begin = tiles[:, _KEYS][:, 0]
    shift = base + rows.rank_of(k_begin + apart) - k_begin
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
    native = plans()
    if native is not None:
        joined_tiles = native.join(tiles)
        return tiles if joined_tiles is None else numbers(joined_tiles, tiles.shape[1])
    full = is_full(tiles)
    if not full.any():
        return tiles
    boxes = tiles.T[:, full]
    for axis in (2, 0):
        boxes = _join(boxes, axis)
    boxes[_BAND.start] = boxes[0] - boxes[3] + 1
    boxes[_BAND.start + 1] = boxes[1] - 1 - boxes[2]
    return np.concatenate([tiles.T[:, ~full], boxes], axis=1).T


def _join(boxes: Table, axis: int) -> Table:
    """Join boxes that touch along one axis (0 queries, 2 keys) and agree in all else but their bands. A column is a box."""
    if boxes.shape[1] < 2:
        return boxes
    same = [2 - axis, 3 - axis, *range(_TILE, len(boxes))]
    boxes = boxes.take(np.lexsort([boxes[axis], *boxes[same[::-1]]]), axis=1)
    joins = boxes[axis, 1:] == boxes[axis + 1, :-1]
    for other in same:
        joins &= boxes[other, 1:] == boxes[other, :-1]
    if not joins.any():
        return boxes
    # a joined box begins with its first box and ends with its last one
    first, last = np.ones((2, boxes.shape[1]), dtype=bool)
    first[1:] = last[:-1] = ~joins
    out = boxes[:, first]
    out[axis + 1] = boxes[axis + 1, last]
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
