"""Masks: which (query, key) pairs of global positions are live.

Every mask is a set of disjoint regions (see `region.py`); nothing after the plan knows which mask it was. Masks combine with
`|` (live in either) and `&` (live in both). What is cached for a mask goes by its digest, so masks that live in bands, within documents
or without, combine to the mask that one would build at once.

Sources: causal and full attention (Vaswani et al. 2017); sliding, dilated and global attention (Longformer, Beltagy et al. 2020,
section 3.1); window + global + random blocks (BigBird, Zaheer et al. 2020, section 2); block-sparse FlashAttention (Dao et al.
2022, section 3.3); prefix-LM (Raffel et al. 2020, section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from .. import check
from ..check import MAX_POSITION, integer, integers
from ..digest import Digested, constant
from . import region
from .picture import Shards, draw
from .region import HI, K_START, K_STOP, LO, Q_START, Q_STOP, STRIDE, Region, Table

Window = int | tuple[int | None, int | None]


class Load(Enum):
    """How the number of keys that a query sees depends on its position. `default_layout` chooses a layout by it."""

    EVEN = "all queries see equally many keys, except near the ends of the sequence"
    GROWING = "later queries see more keys, and never fewer"
    UNEVEN = "neither, or unknown"


class Mask(Digested):
    """A set of live (query, key) pairs of global positions. Immutable; combine masks with `a | b` and `a & b`.

    A new mask is a frozen dataclass with `_table`. The defaults of `load`, `reach` and `scales` hold for every mask; override them to
    promise more.
    """

    @property
    def min_length(self) -> int:
        """The shortest sequence, in tokens, that the mask fits."""
        return 0

    @property
    def max_length(self) -> int | None:
        """The longest sequence, in tokens, that the mask fits; None if there is no limit."""
        return None

    @property
    def load(self) -> Load:
        """Which `Load` describes the mask at every sequence length; chooses its default layout."""
        return Load.UNEVEN

    @property
    def reach(self) -> int | None:
        """The largest distance between the first and the last key that one query sees; None if it has no limit, or is unknown."""
        return None

    @property
    def scales(self) -> bool:
        """Whether predictions of long sequences may be extrapolated from shorter ones.

        True promises: with a `reach`, a query away from the ends sees equally many keys at any sequence length; without one, the mean
        number of keys a query sees is linear in the length.
        """
        return False

    @property
    def _sides(self) -> tuple[int | None, int | None] | None:
        """How many keys a query sees to the left and to the right (None: all), in its document or the sequence; None if not so."""
        return None

    def _table(self, seq_len: int) -> Table:
        raise NotImplementedError

    def regions(self, seq_len: int) -> Table:
        """The live pairs of a sequence as disjoint regions, an (n, 7) int64 table with the fields of `Region`; not to be changed.

        Raises ValueError if the mask does not fit `seq_len` tokens.
        """
        seq_len = self.check_length(seq_len)
        length, found = self.__dict__.get("_latest", (None, None))
        if found is None or length != seq_len:
            found = self._clipped(seq_len)
            found.setflags(write=False)
            # a layout and a plan ask for one length
            object.__setattr__(self, "_latest", (seq_len, found))
        return found

    def _clipped(self, seq_len: int) -> Table:
        """The regions inside the sequence, each the bounding box of its live pairs."""
        return region.clip(self._table(seq_len), seq_len)

    def check_length(self, seq_len: int) -> int:
        """`seq_len` as an int. Raises ValueError if the mask does not fit a sequence of so many tokens."""
        seq_len = integer("seq_len", seq_len, most=MAX_POSITION)
        if seq_len < self.min_length:
            raise ValueError(f"mask {self!r} needs at least {self.min_length} tokens and is longer than the sequence of {seq_len}")
        if self.max_length is not None and seq_len > self.max_length:
            raise ValueError(f"mask {self!r} covers at most {self.max_length} tokens, but the sequence has {seq_len}")
        return seq_len

    def dense(self, seq_len: int) -> torch.Tensor:
        """The mask as a (seq_len, seq_len) bool tensor, row = query, column = key, True = live."""
        regions = self.regions(seq_len)
        out = torch.zeros(seq_len, seq_len, dtype=torch.bool)
        for q_start, q_stop, k_start, k_stop, lo, hi, stride in regions.tolist():
            q = torch.arange(q_start, q_stop, stride)
            k = torch.arange(k_start, k_stop, stride)
            distance = q[:, None] - k[None]
            out[q_start:q_stop:stride, k_start:k_stop:stride] |= (lo <= distance) & (distance <= hi)
        return out

    def picture(self, path: str | None = None, *, seq_len: int = 64, layout: Shards | None = None) -> Any:
        """Draw the mask, and save it at `path`, such as mask.png. With a layout, colours show which rank computes each pair.

        Returns the matplotlib figure. Needs matplotlib.
        """
        return draw(self, seq_len, layout=layout, path=path)

    def __or__(self, other: Mask) -> Mask:
        return self if self == _mask(other) else Union(self, other)

    def __and__(self, other: Mask) -> Mask:
        return _both(self, _mask(other))

    def _key(self) -> bytes:
        parts = [type(self).__name__]
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            parts.append(value.digest if isinstance(value, Mask) else repr(value))
        return "\n".join(parts).encode()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.digest == other.digest


@dataclass(frozen=True, eq=False)
class Full(Mask):
    @property
    def load(self) -> Load:
        return Load.EVEN

    @property
    def scales(self) -> bool:
        return True

    @property
    def _sides(self) -> tuple[None, None]:
        return None, None

    def _table(self, seq_len: int) -> Table:
        return region.table([Region(0, seq_len, 0, seq_len, -seq_len, seq_len)])

    def __repr__(self) -> str:
        return "full()"


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    @property
    def load(self) -> Load:
        return Load.GROWING

    @property
    def scales(self) -> bool:
        return True

    @property
    def _sides(self) -> tuple[None, int]:
        return None, 0

    def _table(self, seq_len: int) -> Table:
        return region.table([Region(0, seq_len, 0, seq_len, 0, seq_len)])

    def __repr__(self) -> str:
        return "causal()"


@dataclass(frozen=True, eq=False)
class SlidingWindow(Mask):
    left: int | None
    right: int | None

    @property
    def load(self) -> Load:
        return Load.UNEVEN if self.reach is None else Load.EVEN

    @property
    def reach(self) -> int | None:
        return None if self.left is None or self.right is None else self.left + self.right

    @property
    def scales(self) -> bool:
        return self.reach is not None

    @property
    def _sides(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    def _table(self, seq_len: int) -> Table:
        lo, hi = _band(self.left, self.right, seq_len)
        return region.table([Region(0, seq_len, 0, seq_len, lo, hi)])

    def __repr__(self) -> str:
        return f"sliding_window({self.left}, {self.right})"


@dataclass(frozen=True, eq=False)
class DilatedWindow(Mask):
    left: int
    right: int
    dilation: int

    @property
    def load(self) -> Load:
        return Load.EVEN

    @property
    def reach(self) -> int:
        return (self.left + self.right) * self.dilation

    def _table(self, seq_len: int) -> Table:
        lo, hi = _band(self.left * self.dilation, self.right * self.dilation, seq_len)
        stride = min(self.dilation, seq_len)  # from the length on, a query sees itself alone
        return region.table([Region(r, seq_len, r, seq_len, lo, hi, stride) for r in range(stride)])

    def __repr__(self) -> str:
        return f"dilated_window(({self.left}, {self.right}), {self.dilation})"


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    cu_seqlens: tuple[int, ...]
    causal: bool
    left: int | None
    right: int | None  # None if causal

    @property
    def min_length(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def _sides(self) -> tuple[int | None, int | None]:
        return self.left, 0 if self.causal else self.right

    @cached_property
    def _bounds(self) -> np.ndarray:
        return np.array(self.cu_seqlens, dtype=np.int64)

    def _key(self) -> bytes:
        return repr((type(self).__name__, self.causal, self.left, self.right)).encode() + self._bounds.tobytes()

    @classmethod
    def _of(cls, bounds: np.ndarray, left: int | None, right: int | None) -> Documents:
        """From checked bounds, which are not to be changed, and how many keys a query sees on each side."""
        found = object.__new__(cls)
        sides = dict(causal=right == 0, left=left, right=right or None)
        found.__dict__.update(cu_seqlens=tuple(bounds.tolist()), _bounds=bounds, **sides)
        found.__post_init__()
        return found

    def _table(self, seq_len: int) -> Table:
        start, stop = self._bounds[:-1], self._bounds[1:]
        lo, hi = _band(self.left, self.right, seq_len)
        if self.causal:
            lo = max(lo, 0)
        length = stop - start
        out = np.empty((STRIDE + 1, len(start)), dtype=np.int64)
        out[Q_START] = out[K_START] = start
        out[Q_STOP] = out[K_STOP] = stop
        # the band within the document
        np.maximum(1 - length, lo, out=out[LO])
        np.minimum(length - 1, hi, out=out[HI])
        out[STRIDE] = 1
        live = length > 0
        return out.T if live.all() else out.T[live]

    def _clipped(self, seq_len: int) -> Table:
        # the mask's shortest sequence holds all documents, and each has its diagonal: the boxes are tight
        return self._table(seq_len)

    def __repr__(self) -> str:
        window = "" if self.left is None and self.right is None else f", window={self._sides}"
        many = f"{len(self.cu_seqlens) - 1} documents, {self.cu_seqlens[-1]} tokens"
        return f"documents(<{many}>, causal={self.causal}{window})"


@dataclass(frozen=True, eq=False)
class CrossDocuments(Mask):
    """Documents whose queries and keys differ in number: the last query of each has the position of its last key."""

    cu_seqlens: tuple[int, ...]
    kv_cu_seqlens: tuple[int, ...]
    causal: bool
    left: int | None
    right: int | None

    @property
    def min_length(self) -> int:
        return max(self.cu_seqlens[-1], self.kv_cu_seqlens[-1])

    def _table(self, seq_len: int) -> Table:
        (start, stop), (k_start, k_stop) = (
            (bounds[:-1], bounds[1:]) for bounds in (np.array(x, dtype=np.int64) for x in (self.cu_seqlens, self.kv_cu_seqlens))
        )
        lo, hi = _band(self.left, self.right, seq_len)
        shift = stop - k_stop
        out = np.stack(
            [start, stop, k_start, k_stop, shift + (max(lo, 0) if self.causal else lo), shift + hi, 0 * start + 1], axis=1
        )
        return out[(start < stop) & (k_start < k_stop)]

    def __repr__(self) -> str:
        window = "" if self.left is None and self.right is None else f", window=({self.left}, {self.right})"
        many = f"{len(self.cu_seqlens) - 1} documents, {self.cu_seqlens[-1]} queries, {self.kv_cu_seqlens[-1]} keys"
        return f"documents(<{many}>, causal={self.causal}{window})"


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    n: int

    @property
    def load(self) -> Load:
        return Load.GROWING

    @property
    def min_length(self) -> int:
        return self.n

    def _table(self, seq_len: int) -> Table:
        n = self.n
        return region.table([Region(0, n, 0, n, -n, n), Region(n, seq_len, 0, seq_len, 0, seq_len)])

    def __repr__(self) -> str:
        return f"prefix({self.n})"


@dataclass(frozen=True, eq=False)
class GlobalTokens(Mask):
    runs: tuple[tuple[int, int], ...]  # ranges [start, stop) of global positions, ascending

    @property
    def min_length(self) -> int:
        return self.runs[-1][1] if self.runs else 0

    def _table(self, seq_len: int) -> Table:
        runs = np.array(self.runs, dtype=np.int64).reshape(-1, 2)
        between = np.concatenate([[0], runs.ravel(), [seq_len]]).reshape(-1, 2)
        queries = np.concatenate([runs, np.repeat(between, len(runs), axis=0)])
        keys = np.concatenate([np.tile([0, seq_len], (len(runs), 1)), np.tile(runs, (len(between), 1))])
        return _wholly_live(np.concatenate([queries, keys], axis=1), seq_len)

    def __repr__(self) -> str:
        if self.runs in ((), ((0, self.min_length),)):
            return f"global_tokens({self.min_length})"
        return f"global_tokens(<{sum(stop - start for start, stop in self.runs)} positions in {len(self.runs)} runs>)"


@dataclass(frozen=True, eq=False)
class BlockSparse(Mask):
    packed: bytes  # np.packbits of the block mask, row-major
    shape: tuple[int, int]
    block_size: int

    @property
    def min_length(self) -> int:
        return (self.shape[0] - 1) * self.block_size + 1 if self.shape[0] else 0

    @property
    def max_length(self) -> int:
        return self.shape[0] * self.block_size

    def _table(self, seq_len: int) -> Table:
        count = self.shape[0] * self.shape[1]
        blocks = np.unpackbits(np.frombuffer(self.packed, dtype=np.uint8), count=count).reshape(self.shape)
        return _wholly_live(_rectangles(blocks) * self.block_size, seq_len)

    def __repr__(self) -> str:
        return f"block_sparse(<{self.shape[0]} x {self.shape[1]} blocks>, {self.block_size})"


@dataclass(frozen=True, eq=False)
class _Pair(Mask):
    a: Mask
    b: Mask

    @property
    def min_length(self) -> int:
        return max(self.a.min_length, self.b.min_length)

    @property
    def max_length(self) -> int | None:
        limits = [mask.max_length for mask in (self.a, self.b) if mask.max_length is not None]
        return min(limits, default=None)


@dataclass(frozen=True, eq=False)
class Union(_Pair):
    def _table(self, seq_len: int) -> Table:
        return region.union(self.a.regions(seq_len), self.b.regions(seq_len))

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"


@dataclass(frozen=True, eq=False)
class Intersection(_Pair):
    def _table(self, seq_len: int) -> Table:
        return region.intersect(self.a.regions(seq_len), self.b.regions(seq_len))

    def __repr__(self) -> str:
        return f"({self.a!r} & {self.b!r})"


@constant
def full() -> Mask:
    """Every query sees every key."""
    return _windowed(None, None)


@constant
def causal() -> Mask:
    """A query sees the keys at its own position and before: `k <= q`."""
    return _windowed(None, 0)


@constant
def sliding_window(left: int | None, right: int | None = 0) -> Mask:
    """A query at q sees the keys q - left, ..., q + right; None on a side means no limit on that side.

    Raises ValueError for a negative or non-integer side.
    """
    return _windowed(_side("left", left), _side("right", right))


@constant
def dilated_window(window: int | tuple[int, int], dilation: int) -> Mask:
    """A query sees every `dilation`-th key of a window: the keys q - n * dilation for -right <= n <= left.

    `window` is `(left, right)`, or one integer for both sides; it counts keys, so each side spans `window * dilation` positions.
    Raises ValueError for a negative window or a dilation below 1.
    """
    left, right = check.window("window", window)
    return DilatedWindow(integer("window", left), integer("window", right), integer("dilation", dilation, least=1))


@constant
def documents(
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    *,
    lengths: Sequence[int] | torch.Tensor | None = None,
    kv_lengths: Sequence[int] | torch.Tensor | None = None,
) -> Mask:
    """Packed documents: a query sees only keys of its own document.

    Args:
        cu_seqlens: cumulative lengths `[0, n1, n1 + n2, ...]`, or plain lengths `[n1, n2, ...]`; a list that starts with 0 is taken as
            cumulative. Documents may be empty.
        causal: whether a query sees only keys at or before its own position.
        window: `(left, right)`, how many keys on each side a query sees besides itself, or one integer for both; None means no limit.
        lengths: the documents' lengths, instead of `cu_seqlens`; here the first may be 0.
        kv_lengths: how many keys each document has, if these are others than its queries (`ring_attention` with a `kv_layout`). Then the
            last query of a document is at the position of its last key for `causal` and `window`, as in chunks of a longer document.

    Positions after the last document (padding) see no key, and no query sees them.
    Raises ValueError for bounds that are empty, negative, decreasing or not integers.

    >>> import ringattn as ra
    >>> ra.documents(lengths=[2, 1]).dense(3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    if (cu_seqlens is None) == (lengths is None):
        raise ValueError("documents takes either cu_seqlens or lengths, and got " + ("neither" if lengths is None else "both"))
    name = "lengths" if cu_seqlens is None else "cu_seqlens"
    bounds = _bounds(name, lengths if cu_seqlens is None else cu_seqlens, cumulative=lengths is None)
    left, right = (_side("window", side) for side in check.window("window", window))
    causal = check.flag("causal", causal)
    if kv_lengths is None:
        return Documents._of(bounds, left, 0 if causal else right)
    kv_bounds = _bounds("kv_lengths", kv_lengths, cumulative=False)
    if len(kv_bounds) != len(bounds):
        raise ValueError(
            f"kv_lengths has {len(kv_bounds) - 1} documents and {name} has {len(bounds) - 1}: each document needs both, of any length"
        )
    return CrossDocuments(tuple(bounds.tolist()), tuple(kv_bounds.tolist()), causal, left, right)


@constant
def prefix(n: int) -> Mask:
    """Prefix-LM: causal, and the first `n` positions also see each other in both directions. Raises ValueError for n < 0."""
    return Prefix(integer("n", n, most=MAX_POSITION))


@constant
def global_tokens(n_or_positions: int | Iterable[int] | torch.Tensor) -> Mask:
    """Longformer's global tokens: the first n, or the given positions, see every key, and every query sees them.

    Combine them with a window: `global_tokens(4) | sliding_window(512, 512)`; for a decoder, `(...) & causal()`.
    Raises ValueError for negative or non-integer positions.

    >>> import ringattn as ra
    >>> ((ra.global_tokens(1) | ra.sliding_window(1)) & ra.causal()).dense(4).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 0, 1, 1]], dtype=torch.int32)
    """
    if isinstance(n_or_positions, (int, np.integer)) and not isinstance(n_or_positions, bool):
        n = integer("n_or_positions", n_or_positions, most=MAX_POSITION)
        return GlobalTokens(((0, n),) if n else ())
    listed: Any = n_or_positions
    if not isinstance(listed, (torch.Tensor, np.ndarray)):
        listed = check.listed("n_or_positions", listed, "a number of tokens or a list of positions")
    positions = np.unique(integers("n_or_positions", listed))
    if len(positions) and positions[0] < 0:
        raise ValueError(f"n_or_positions has the negative position {positions[0]}: positions start at 0")
    if len(positions) and positions[-1] >= MAX_POSITION:
        raise ValueError(f"n_or_positions has the position {positions[-1]}, but positions must be less than 2**48")
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1) if len(positions) else []
    return GlobalTokens(tuple((int(run[0]), int(run[-1]) + 1) for run in runs))


@constant
def block_sparse(block_mask: torch.Tensor | np.ndarray | Sequence[Sequence[bool]], block_size: int) -> Mask:
    """Live blocks: the pair (q, k) is live where `block_mask[q // block_size, k // block_size]`.

    `block_mask` is a square bool matrix (or one of 0 and 1) that covers the sequence, which may end within the last block.
    Raises ValueError for another shape or dtype, or a block_size below 1.
    """
    given = check.as_array("block_mask", block_mask, "a square matrix (query blocks, key blocks)")
    if given.ndim != 2 or given.shape[0] != given.shape[1]:
        raise ValueError(f"block_mask has shape {given.shape}, but must be a square matrix (query blocks, key blocks)")
    if given.dtype != np.bool_ and not (np.issubdtype(given.dtype, np.integer) and np.isin(given, (0, 1)).all()):
        raise ValueError(f"block_mask has dtype {given.dtype}, but must be bool, or integers of 0 and 1")
    size = integer("block_size", block_size, least=1, most=MAX_POSITION)
    return BlockSparse(np.packbits(given.astype(bool)).tobytes(), (given.shape[0], given.shape[1]), size)


@constant
def bigbird(
    seq_len: int,
    block_size: int = 64,
    *,
    window_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    seed: int = 0,
) -> Mask:
    """BigBird: each query block sees a window of blocks around it, the first global blocks, and some blocks drawn at random.

    `window_blocks` is odd: it counts the block itself and both sides. The first `global_blocks` blocks also see everything. Each other
    block sees `random_blocks` more, drawn from those it does not see yet; the same seed draws the same blocks on every rank.
    Raises ValueError for an even window, negative counts or a block_size below 1.
    """
    size = integer("block_size", block_size, least=1, most=MAX_POSITION)
    n = -(-integer("seq_len", seq_len, most=check.MAX_TOKENS) // size)
    if integer("window_blocks", window_blocks) % 2 == 0:
        raise ValueError(f"window_blocks is {window_blocks}, but must be odd: the block itself, and equally many on each side")
    index = np.arange(n)
    live = abs(index[:, None] - index) <= window_blocks // 2
    live[:, : integer("global_blocks", global_blocks)] = True
    live[:global_blocks] = True
    integer("random_blocks", random_blocks)
    generator = np.random.default_rng(integer("seed", seed))
    for row in live[global_blocks:]:
        dead = np.flatnonzero(~row)
        row[generator.choice(dead, size=min(random_blocks, len(dead)), replace=False)] = True
    return block_sparse(live, size)


def _bounds(name: str, given: Any, cumulative: bool) -> np.ndarray:
    """Where documents begin, and where the last one ends. cumulative: numbers that start with 0 are these already."""
    values = integers(name, given)
    if not len(values):
        raise ValueError(f"{name} is empty: documents needs at least one length")
    if not cumulative or values[0] != 0:
        if (values < 0).any():
            raise ValueError(f"{name} has the negative length {values.min()}: a document has 0 or more tokens")
        if (total := sum(values.tolist())) > MAX_POSITION:
            raise ValueError(f"{name} adds up to {total} tokens, but documents hold at most {MAX_POSITION}")
        values = np.concatenate([[0], np.cumsum(values)])
    decreases = values[1:] < values[:-1]
    if decreases.any():
        at = int(decreases.argmax())
        raise ValueError(f"cu_seqlens decreases from {values[at]} to {values[at + 1]} at index {at + 1}: it must be non-decreasing")
    if values[-1] > MAX_POSITION:
        raise ValueError(f"cu_seqlens ends with {values[-1]}, but documents hold at most {MAX_POSITION} tokens")
    return values


def _wholly_live(rectangles: Table, seq_len: int) -> Table:
    """Regions whose pairs are all live, from rectangles (q_start, q_stop, k_start, k_stop)."""
    return np.concatenate([rectangles, np.tile([-seq_len, seq_len, 1], (len(rectangles), 1))], axis=1)


def _rectangles(blocks: np.ndarray) -> Table:
    """The ones of a 0/1 matrix as disjoint rectangles (row_start, row_stop, column_start, column_stop)."""
    edges = np.diff(np.pad(blocks.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    row, start = np.nonzero(edges == 1)
    stop = np.nonzero(edges == -1)[1]
    # equal runs of neighbouring rows become one rectangle
    order = np.lexsort((row, stop, start))
    row, start, stop = row[order], start[order], stop[order]
    fresh = np.ones(len(row), dtype=bool)
    fresh[1:] = (np.diff(row) != 1) | (np.diff(start) != 0) | (np.diff(stop) != 0)
    first = np.flatnonzero(fresh)
    last = np.append(first, len(row))[1:] - 1
    return np.stack([row[first], row[last] + 1, start[first], stop[first]], axis=1).astype(np.int64)


def _band(left: int | None, right: int | None, seq_len: int) -> tuple[int, int]:
    """`lo, hi` of a window, cut to the sequence length: a side may be too large for the int64 of tables."""
    return -(seq_len if right is None else min(right, seq_len)), (seq_len if left is None else min(left, seq_len))


@lru_cache(64)
def _windowed(left: int | None, right: int | None) -> Mask:
    """The mask of a band over the whole sequence. Callers may ask for the same one in each call."""
    if left is not None or right:
        return SlidingWindow(left, right)
    return Full() if right is None else Causal()


def _both(a: Mask, b: Mask) -> Mask:
    """Live in both: one band, if both are bands of the sequence or of the same documents."""
    if a == b:
        return a
    packed = [mask for mask in (a, b) if isinstance(mask, Documents)]
    if a._sides is None or b._sides is None or (len(packed) == 2 and packed[0].cu_seqlens != packed[1].cu_seqlens):
        return Intersection(a, b)
    left, right = (min((side for side in sides if side is not None), default=None) for sides in zip(a._sides, b._sides))
    return Documents._of(packed[0]._bounds, left, right) if packed else _windowed(left, right)


def _mask(value: object) -> Mask:
    if not isinstance(value, Mask):
        raise ValueError(
            f"masks combine with masks only, but got a {type(value).__name__}: build one with ringattn's mask functions"
        )
    return value


def _side(name: str, value: int | None) -> int | None:
    return None if value is None else integer(name, value)
