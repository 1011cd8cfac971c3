"""Regions: a mask as disjoint bands in rectangles of global positions, and their algebra.

A table is an int64 array of shape (n, 7), one region a row: `q_start, q_stop, k_start, k_stop, lo, hi, stride`.
The pair (q, k) is live in it where

    q_start <= q < q_stop,   k_start <= k < k_stop,   lo <= q - k <= hi,
    q = q_start (mod stride),   k = k_start (mod stride).

`stride` is 1 except in dilated masks. The regions of one table are pairwise disjoint, so the counts of their live pairs add up,
and every pair is computed once.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import lcm
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ringattn_kernels.native import numbers, plans

Table: TypeAlias = NDArray[Any]  # int64

# columns of a table
Q_START, Q_STOP, K_START, K_STOP, LO, HI, STRIDE = range(7)
_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Region:
    """One row of a table: live where `lo <= q - k <= hi` in the rectangle, on every `stride`-th position."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int
    stride: int = 1


def table(regions: list[Region]) -> Table:
    """The regions as rows of an (n, 7) int64 array."""
    return np.array([astuple(region) for region in regions], dtype=np.int64).reshape(-1, STRIDE + 1)


def tighten(regions: Table) -> Table:
    """Shrink each rectangle to the bounding box of its live pairs, clamp its band to the box, drop empty rectangles."""
    q_start, q_stop, k_start, k_stop, lo, hi, stride = regions.T
    if common_stride(regions) == 1:
        *box, live = trim(q_start, q_stop, k_start, k_stop, lo, hi)
    else:
        # counts of positions in units of the stride, and the band between their indices
        n_q = -((q_start - q_stop) // stride)
        n_k = -((k_start - k_stop) // stride)
        offset = q_start - k_start
        low, high = -((offset - lo) // stride), (hi - offset) // stride
        q_first, q_end, k_first, k_end, low, high, live = trim(0 * n_q, n_q, 0 * n_k, n_k, low, high)
        rows = q_start + stride * q_first, q_start + stride * (q_end - 1) + 1
        columns = k_start + stride * k_first, k_start + stride * (k_end - 1) + 1
        box = [*rows, *columns, offset + stride * low, offset + stride * high]
    found = np.array([*box, stride]).T
    return found if live.all() else found[live]


def trim(q_begin: Table, q_end: Table, k_begin: Table, k_end: Table, lo: Table, hi: Table) -> tuple[Table, ...]:
    """Shrink each box to the bounding box of its pairs (i, j) with `lo <= i - j <= hi`, elementwise.

    Returns (q_begin, q_end, k_begin, k_end, lo, hi, live): the band is clamped to the values of i - j in the box, and `live` says
    which boxes hold such a pair.
    """
    q0 = np.maximum(q_begin, k_begin + lo)
    q1 = np.minimum(q_end, k_end + hi)
    k0 = np.maximum(k_begin, q_begin - hi)
    k1 = np.minimum(k_end, q_end - lo)
    low = np.maximum(lo, q0 - (k1 - 1))
    high = np.minimum(hi, (q1 - 1) - k0)
    live = (q0 < q1) & (k0 < k1) & (low <= high)
    return q0, q1, k0, k1, low, high, live


def clip(regions: Table, seq_len: int) -> Table:
    """The regions inside a sequence of `seq_len` positions."""
    out = regions.copy()
    for column in (Q_STOP, K_STOP):
        np.minimum(out[:, column], seq_len, out=out[:, column])
    return tighten(out)


def common_stride(*tables: Table) -> int:
    """The least common multiple of the strides of all regions in the tables."""
    strides = (t[:, STRIDE] for t in tables)
    return lcm(1, *(int(s) for found in strides if found.max(initial=1) > 1 for s in np.unique(found)))


def intersect(a: Table, b: Table) -> Table:
    """The pairs that are live in both tables."""
    stride = common_stride(a, b)
    a, b = _lift(a, stride), _lift(b, stride)
    pieces = []
    step = max(1, _PAIRS_AT_ONCE // max(1, len(b)))
    for first in range(0, len(a), step):
        part = a[first : first + step]
        i, j = np.nonzero(_overlap(part[:, None], b[None]))
        pieces.append(_meet(part[i], b[j]))
    return tighten(np.concatenate(pieces)) if pieces else a


def subtract(a: Table, b: Table) -> Table:
    """The pairs that are live in `a` and not in `b`, as disjoint regions."""
    stride = common_stride(a, b)
    rest, b = _lift(a, stride), _lift(b, stride)
    for region in b:
        hit = _overlap(rest, region)
        if hit.any():
            rest = np.concatenate([rest[~hit], _without(rest[hit], region)])
    return rest


def union(a: Table, b: Table) -> Table:
    """The pairs that are live in either table, as disjoint regions."""
    if len(a) < len(b):
        a, b = b, a
    return np.concatenate([subtract(a, b), b])


def count(regions: Table) -> NDArray[np.int64]:
    """Live pairs of each region."""
    q_start, q_stop, k_start, k_stop, lo, hi, stride = regions.T
    n_q = -((q_start - q_stop) // stride)
    n_k = -((k_start - k_stop) // stride)
    offset = q_start - k_start
    zero = np.zeros_like(n_q)
    return count_pairs(zero, n_q, zero, n_k, -((offset - lo) // stride), (hi - offset) // stride)


def count_pairs(q_begin: Table, q_end: Table, k_begin: Table, k_end: Table, lo: Table, hi: Table) -> Table:
    """The number of pairs (i, j) in each box with `lo <= i - j <= hi`, in closed form."""
    # the sum over i of clip(i - low + 1 - k_begin, 0, k_end - k_begin) counts the keys j <= i - low: a difference of two sums of max(0, x)
    # over x < n, which are n (n - 1) / 2. Here n is (2, 2, 2, ...): without and with the clip at k_end - k_begin, by low, by end of i
    keys = k_end - k_begin
    below = k_begin - 1
    n = np.empty((2, 2, 2, *np.shape(keys)), dtype=np.int64)
    n[0, 0] = q_end - below, q_begin - below
    np.subtract(n[0, 0], hi + 1, out=n[0, 1])
    n[0, 0] -= lo
    np.subtract(n[0], np.maximum(keys, 0), out=n[1])
    np.maximum(n, 0, out=n)
    n *= n - 1
    clipped = n[0] - n[1]
    by_end = clipped[0] - clipped[1]
    pairs = (by_end[0] - by_end[1]) >> 1
    some = (q_begin < q_end) & (keys > 0) & (lo <= hi)
    return pairs if some.all() else np.where(some, pairs, 0)


def pairs_of(tiles: Table) -> Table:
    """The live pairs of each tile (q_begin, q_end, k_begin, k_end, lo, hi)."""
    native = plans()
    return count_pairs(*tiles.T) if native is None else numbers(native.count(tiles))


def _lift(regions: Table, stride: int) -> Table:
    """The same pairs as regions that all have `stride`, which is a multiple of each region's own."""
    pieces = []
    for own in np.unique(regions[:, STRIDE]):
        part = regions[regions[:, STRIDE] == own]
        steps = own * np.arange(stride // own)
        q_shift, k_shift = (x.ravel() for x in np.meshgrid(steps, steps, indexing="ij"))
        out = np.repeat(part, len(q_shift), axis=0)
        out[:, Q_START] += np.tile(q_shift, len(part))
        out[:, K_START] += np.tile(k_shift, len(part))
        out[:, STRIDE] = stride
        pieces.append(tighten(out) if stride != own else out)
    return np.concatenate(pieces) if pieces else regions


def _overlap(a: Table, b: Table) -> NDArray[np.bool_]:
    """Whether regions of one stride may share a pair: their boxes and bands overlap, their residues are equal. Broadcasts."""
    stride = b[..., STRIDE]
    return (
        (a[..., Q_START] < b[..., Q_STOP])
        & (b[..., Q_START] < a[..., Q_STOP])
        & (a[..., K_START] < b[..., K_STOP])
        & (b[..., K_START] < a[..., K_STOP])
        & (a[..., LO] <= b[..., HI])
        & (b[..., LO] <= a[..., HI])
        & ((a[..., Q_START] - b[..., Q_START]) % stride == 0)
        & ((a[..., K_START] - b[..., K_START]) % stride == 0)
    )


def _meet(a: Table, b: Table) -> Table:
    """Intersection, row by row, of regions of one stride and residue."""
    starts = np.maximum(a, b)
    stops = np.minimum(a, b)
    return np.stack(
        [starts[:, Q_START], stops[:, Q_STOP], starts[:, K_START], stops[:, K_STOP], starts[:, LO], stops[:, HI], a[:, STRIDE]],
        axis=1,
    )


def _without(a: Table, region: Table) -> Table:
    """`a` without one region: the rows before and after it, the columns left and right of it, the bands below and above its band."""
    common = _meet(a, np.broadcast_to(region, a.shape))

    def cut(base: Table, field: int, value: Table | np.int64) -> Table:
        out = base.copy()
        out[:, field] = value
        return out

    def realigned(base: Table, field: int, value: Table) -> Table:
        # the first position >= value that has the region's residue
        return cut(base, field, value + (base[:, field] - value) % base[:, STRIDE])

    inner = a.copy()
    inner[:, Q_START:K_START] = common[:, Q_START:K_START]
    core = inner.copy()
    core[:, Q_START:LO] = common[:, Q_START:LO]
    return tighten(
        np.concatenate(
            [
                cut(a, Q_STOP, common[:, Q_START]),
                realigned(a, Q_START, common[:, Q_STOP]),
                cut(inner, K_STOP, common[:, K_START]),
                realigned(inner, K_START, common[:, K_STOP]),
                cut(core, HI, common[:, LO] - 1),
                cut(core, LO, common[:, HI] + 1),
            ]
        )
    )
