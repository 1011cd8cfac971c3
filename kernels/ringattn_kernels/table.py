"""Tile tables: which (query, key) pairs one launch computes, as integers.

A tile (q_begin, q_end, k_begin, k_end, lo, hi) says that rows i in [q_begin, q_end) of q and rows j in [k_begin, k_end) of the
key/value buffer attend to each other where lo <= i - j <= hi. The tiles of a table are disjoint.

Each kernel walks one axis in blocks of rows, one program a block (queries for the forward and dq, keys for dk and dv), and steps along the
other. `TileTable` cuts the tiles at the block boundaries on the host, so that a program reads a short list of segments and never
looks at a pair of blocks without a live pair in it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch

from .native import integers, numbers, plans, tables
from .recorder import aside

# columns of a block table's items
ROW, FIRST_SEGMENT, LAST_SEGMENT, SPLIT = range(4)
# columns of its segments
BEGIN, FULL_BEGIN, FULL_END, END, LO, HI, ROW_BEGIN, ROW_END = range(8)
# a column of tiles
BEGIN_OF_KEYS = 2
# arrays that are copied together begin at multiples of so many numbers, aligned as separate ones are
_MISSING = object()
_APART = 128
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}
# added to the ends of queries, keys and band of a tile: a band holds its end
_LAST_IN_BAND = np.array([0, 0, 1])


@dataclass(frozen=True)
class BlockTable:
    """The work of one launch for one (batch, head).

    items    (n, 4) int32: first row of the block, begin and end of its segments, split; longest work first, blocks with none last.
             Where blocks are split, an item is one split of a block, and those with no segment are left out.
    segments (m, 8) int32: begin, full_begin, full_end, end, lo, hi, row_begin, row_end. The other axis is stepped through from
             `begin` to `end`; steps in [full_begin, full_end) are live for every row of the block and need no mask; in the others row r and
             column c are live where row_begin <= r < row_end, c < end and lo <= r - c <= hi.
    touched  how many items have a segment; they come first.
    places   (m, 2) int32, of each segment's tile, if the table has any.
    """

    items: torch.Tensor
    segments: torch.Tensor
    touched: int
    places: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.items.shape[0]


class TileTable:
    """The tiles of one launch: an (n, 6) table over `q_rows` rows of Q and `k_rows` rows of a K/V buffer. Immutable.

    tiles: (n, 6) int64, (q_begin, q_end, k_begin, k_end, lo, hi), disjoint. Tiles without a live pair are left out, so that a table has
    live pairs exactly if `len(table) > 0`.
    places: (n, 2) int64, where global positions matter: in a tile, row i of q has the position places[0] + stride * i, and row j of the
    key/value buffer has places[1] + stride * j.

    The block tables that kernels read are built once for each (device, block size, step) and kept here, so that a steady-state call
    builds and uploads nothing.
    """

    __slots__ = ("_counted", "_derived", "_uncounted", "k_rows", "places", "q_rows", "stride", "tiles")

    def __init__(self, tiles: np.ndarray, q_rows: int, k_rows: int, places: np.ndarray | None = None, stride: int = 1):
        assert q_rows >= 0 and k_rows >= 0 and q_rows + k_rows < 2**30, f"rows {q_rows}, {k_rows}: row arithmetic is int32"
        tiles, live = settle(np.asarray(tiles, dtype=np.int64).reshape(-1, 6), int(q_rows), int(k_rows))
        if places is not None:
            places = np.array(places, dtype=np.int64).reshape(-1, 2)
            places = places if live is None else places[live]
        tiles.setflags(write=False)
        self.tiles, self.q_rows, self.k_rows = tiles, int(q_rows), int(k_rows)
        self.places, self.stride = places, int(stride)
        self._derived: dict[tuple, Any] = {}
        # of nbytes, and of what is kept all that is not counted there yet
        self._counted, self._uncounted = 0, [self.tiles, self.places]

    def __len__(self) -> int:
        """The number of tiles."""
        return len(self.tiles)

    def query_blocks(self, block: int, step: int, device: torch.device, splits: int = 1) -> BlockTable:
        """Blocks of `block` query rows, stepping through keys by `step`. splits: of the longest block (see `split`)."""
        return self._blocks("q", block, step, device, splits)

    def key_blocks(self, block: int, step: int, device: torch.device, splits: int = 1) -> BlockTable:
        """Blocks of `block` key rows, stepping through queries by `step`: the same cut of the transposed tiles."""
        return self._blocks("k", block, step, device, splits)

    def aligned(self, to: int) -> bool:
        """Whether all tiles have rows next to each other, at positions and with keys from multiples of `to` on."""

        def build() -> bool:
            assert self.places is not None
            return self.stride == 1 and not (self.places % to).any() and not (self.tiles[:, BEGIN_OF_KEYS] % to).any()

        return self.derived(("aligned", to), build)

    def cut(self, axis: str, block: int, step: int, align: int = 1, splits: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Items and segments (see `BlockTable`) along the rows of q ("q") or of k ("k"). Places are further columns of the segments.

        align: steps begin at multiples of it, as tiles do. splits: of the longest item (see `split`).
        """

        def build() -> tuple[np.ndarray, np.ndarray]:
            native, keys = tables(), axis == "k"
            rows, width = self.k_rows if keys else self.q_rows, ROW_END + 1 + (0 if self.places is None else self.places.shape[1])
            if splits > 1:
                whole = self.cut(axis, block, step, align)
                if native is None:
                    return split(*whole, step, splits)
                return integers(native.split(*whole, step, splits), SPLIT + 1, width)
            if native is not None:
                return integers(native.cut(self.tiles, self.places, keys, rows, block, step, align), SPLIT + 1, width)
            places = () if self.places is None else self.places.T
            q_begin, q_end, k_begin, k_end, lo, hi = self.tiles.T
            columns = (k_begin, k_end, q_begin, q_end, -hi, -lo) if keys else self.tiles.T
            return cut(np.array([*columns, *places]).T, rows, block, step, align)

        return self.derived(("cut", axis, block, step, align, splits), build)

    def parts_of(self, segments: np.ndarray) -> tuple[np.ndarray, ...]:
        """Segments without their places, and these if there are any."""
        return (segments,) if self.places is None else (segments[:, : ROW_END + 1], segments[:, ROW_END + 1 :])

    def derived(self, key: tuple, build: Callable[[], Any]) -> Any:
        """`build()`, called at the first call with `key` and kept: whatever else a kernel derives from this table."""
        found = self._derived.get(key, _MISSING)
        if found is _MISSING:
            self._derived[key] = found = build()
            self._uncounted.append(found)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles and of all arrays and tensors that are kept with them."""
        while self._uncounted:
            self._counted += _nbytes(self._uncounted.pop())
        return self._counted

    def _blocks(self, axis: str, block: int, step: int, device: torch.device, splits: int) -> BlockTable:
        def build() -> BlockTable:
            items, segments = self.cut(axis, block, step, splits=splits)
            touched = touched_in(items)
            there, segments, *places = on_device((items, *self.parts_of(segments)), device)
            return BlockTable(there, segments, touched, *places)

        return self.derived(("blocks", axis, block, step, device, splits), build)

    def __repr__(self) -> str:
        return f"TileTable({len(self.tiles)} tiles, {self.q_rows} x {self.k_rows} rows)"


def settle(tiles: np.ndarray, q_rows: int, k_rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """A copy of the tiles that have a live pair, with bands within the rows, and which those are (None: all)."""
    native = plans()
    if native is not None:
        settled, kept = native.settle(tiles, q_rows, k_rows)
        return numbers(settled, 6), None if kept is None else np.frombuffer(kept, dtype=bool)
    tiles = tiles.copy()
    if not len(tiles):
        return tiles, None
    q_begin, q_end, k_begin, k_end, lo, hi = tiles.T
    least, most = tiles.min(axis=0).tolist(), tiles.max(axis=0).tolist()
    inside = least[0] >= 0 and most[1] <= q_rows and least[2] >= 0 and most[3] <= k_rows
    assert inside, f"a tile leaves the {q_rows} query rows or the {k_rows} key rows"
    assert (tiles[:, ::2] < tiles[:, 1::2] + _LAST_IN_BAND).all(), "a tile or its band is empty"
    live = (lo < q_end - k_begin) & (hi > q_begin - k_end)
    some_die = not live.all()
    if some_die:
        tiles = tiles[live]
    # every difference of rows lies within, and the kernels' row - lo must not overflow
    if least[LO] < -k_rows or most[LO] > q_rows or least[HI] < -k_rows or most[HI] > q_rows:
        tiles[:, LO:] = np.minimum(np.maximum(tiles[:, LO:], -k_rows), q_rows)
    return tiles, live if some_die else None


def touched_in(items: np.ndarray) -> int:
    """How many items have a segment."""
    return int(np.count_nonzero(items[:, FIRST_SEGMENT] < items[:, LAST_SEGMENT]))


def _nbytes(kept: Any) -> int:
    what = _what(type(kept))
    if what == _OTHER:
        return 0
    if what == _ARRAY:
        return kept.nbytes
    return sum([_nbytes(x) for x in (kept if what == _TUPLE else vars(kept).values())])


_ARRAY, _TUPLE, _FIELDS, _OTHER = range(4)


# asked for each number that is kept with a table, for each new batch
@functools.cache
def _what(kind: type) -> int:
    if issubclass(kind, (np.ndarray, torch.Tensor)):
        return _ARRAY
    return _TUPLE if issubclass(kind, tuple) else _FIELDS if is_dataclass(kind) else _OTHER


def on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays of one dtype on a device. A GPU gets all of them in one copy on its current stream, for which the host does not wait."""
    with aside:
        return _copied(arrays, device)


def _copied(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return [torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in arrays]
    begins, end = [], 0
    for x in arrays:
        begins.append(end)
        end += -(-x.size // _APART) * _APART
    packed = torch.empty(end, dtype=_DTYPES[arrays[0].dtype], pin_memory=True)
    numbers, strides = packed.numpy(), []
    for x, begin in zip(arrays, begins):
        part = numbers[begin : begin + x.size].reshape(x.shape)
        part[...] = x
        strides.append([stride // part.itemsize for stride in part.strides])
    there = packed.to(device, non_blocking=True)
    return [there.as_strided(x.shape, *place) for x, *place in zip(arrays, strides, begins)]


def kind(x: torch.Tensor) -> tuple:
    """Everything about a tensor that a launch may depend on, except its address."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0


def cut(tiles: np.ndarray, rows: int, block: int, step: int, align: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Items and segments (see `BlockTable`) of `tiles`, whose first axis of `rows` rows is cut into blocks of `block`.

    Further columns of the tiles become further columns of their segments. align: as in `TileTable.cut`.
    """
    begin, end = tiles.T[:2]
    # one column for each (tile, block that the tile meets), by block
    first = begin // block
    count = (end - 1) // block - first + 1
    tile = np.arange(len(tiles)).repeat(count)
    owner = np.arange(len(tile)) + (first - count.cumsum() + count)[tile]
    if (owner[1:] < owner[:-1]).any():
        # the smallest integer type, which numpy sorts fastest: by counting
        order = owner.astype(np.min_scalar_type(rows // block + 1)).argsort(kind="stable")
        tile, owner = tile[order], owner[order]
    # `take` copies all columns of a tile at once
    begin, end, other_begin, other_end, lo, hi, *more = tiles.T.take(tile, axis=1)
    block_begin = owner * block
    block_end = np.minimum(block_begin + block, rows)
    row_begin, row_end = np.maximum(begin, block_begin), np.minimum(end, block_end)

    # columns live for some row: the band's steps overlap, so that this is one interval
    live_begin = np.maximum(other_begin, row_begin - hi)
    if align > 1:
        live_begin = live_begin // align * align
    live_end = np.minimum(other_end, row_end - lo)
    # columns live for every row of the block, in whole steps from live_begin
    before = np.maximum(block_end - 1 - hi - live_begin, 0)
    until = np.minimum(live_end, block_begin - lo + 1) - live_begin
    if step > 1:
        before, until = -(-before // step) * step, until // step * step
    some = (until > before) & (row_end - row_begin == block_end - block_begin)

    columns = [live_begin, live_begin + before * some, live_begin + until * some, live_end, lo, hi, row_begin, row_end, *more]
    segments = np.array(columns, dtype=np.int32).T
    live = live_begin < live_end
    if not live.all():
        segments, owner = segments[live], owner[live]
    segments = np.ascontiguousarray(segments)

    blocks = -(-rows // block)
    bounds = owner.searchsorted(np.arange(blocks + 1))
    work = np.bincount(owner, weights=_steps(segments, step), minlength=blocks)
    items = np.zeros((blocks, 4), dtype=np.int32)
    items.T[:3] = np.arange(blocks) * block, bounds[:-1], bounds[1:]
    return items[(-work).argsort(kind="stable")], segments


def split(items: np.ndarray, segments: np.ndarray, step: int, splits: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the longest item into `splits` items, and the others into items no longer than those. 1 changes nothing.

    An item is split between steps, as evenly as can be; its splits are numbered in the order of its steps. Items without a step are
    left out.
    """
    if splits == 1:
        return items, segments
    items = items[items[:, FIRST_SEGMENT] < items[:, LAST_SEGMENT]]
    # all steps in a row: where a segment begins in it, an item, and a split
    segment_begin = steps_before(segments, step)
    begin, length = segment_begin[items[:, FIRST_SEGMENT]], steps_of(items, segments, step)
    count = -(-length // -(-length.max(initial=1) // splits))
    item = np.repeat(np.arange(len(items)), count)
    number = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
    split_begin, split_end = (begin[item] + length[item] * n // count[item] for n in (number, number + 1))

    # pieces of segments, which begin where a segment does or a split
    piece_begin = np.union1d(segment_begin[:-1], split_begin)
    piece_end = np.append(piece_begin[1:], segment_begin[-1:])[: len(piece_begin)]
    segment = np.searchsorted(segment_begin, piece_begin, side="right") - 1
    pieces = segments[segment]
    pieces[:, BEGIN] += (piece_begin - segment_begin[segment]) * step
    pieces[:, END] = np.minimum(pieces[:, END], pieces[:, BEGIN] + (piece_end - piece_begin) * step)
    for column in (FULL_BEGIN, FULL_END):
        pieces[:, column] = np.clip(pieces[:, column], pieces[:, BEGIN], pieces[:, END])
    items = np.stack([items[item, ROW], *(np.searchsorted(piece_begin, x) for x in (split_begin, split_end)), number], axis=1)
    items = items[np.argsort(split_begin - split_end, kind="stable")]
    return np.ascontiguousarray(items, dtype=np.int32), np.ascontiguousarray(pieces, dtype=np.int32)


def steps_of(items: np.ndarray, segments: np.ndarray, step: int) -> np.ndarray:
    """The number of steps of each item."""
    before = steps_before(segments, step).take(items[:, FIRST_SEGMENT : LAST_SEGMENT + 1])
    return before[:, 1] - before[:, 0]


def steps_before(segments: np.ndarray, step: int) -> np.ndarray:
    """The number of steps before each segment, and at the end the number of all steps."""
    found = np.zeros(len(segments) + 1, dtype=np.int64)
    _steps(segments, step).cumsum(out=found[1:])
    return found


def _steps(segments: np.ndarray, step: int) -> np.ndarray:
    """The number of steps of each segment."""
    rows = segments[:, END] - segments[:, BEGIN]
    return rows if step == 1 else (rows + (step - 1)) // step
