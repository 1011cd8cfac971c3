"""Rows that a forward pass of several launches goes on with, and rows that are done with its first launch.

A launch that others follow leaves a state in fp32. The next one reads it, and the last one writes out in its final dtype. Rows that no
later launch touches, such as those of documents that lie whole on a rank, need none of that: the first launch leaves them in their final
dtype, in a launch of their own, and the last one leaves them alone.

What it saves: with 64 heads of 128, a state takes 32 KiB a row, which is written once and read once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

# Hopper kernels take blocks of 128 or 192 rows: parts of whole blocks of either end at multiples of this
_WHOLE = 384
# bytes of a state that are worth a launch of their own: 20 microseconds of an H200's memory, for writing and reading them
_WORTH = 32 << 20


class RowPart(NamedTuple):
    """The rows in these ranges [begin, end), or all others. The ranges ascend, lie apart, and hold whole blocks."""

    ranges: tuple[tuple[int, int], ...]
    inside: bool = True

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Which blocks, by their first rows, are in this part."""
        edges = np.array(self.ranges, dtype=np.int64).ravel()
        return edges.searchsorted(rows, side="right") % 2 == self.inside

    @property
    def others(self) -> RowPart:
        """All other rows."""
        return RowPart(self.ranges, not self.inside)


class ContinuedRows(NamedTuple):
    """The rows that launches after the first go on with, and where rows leave that are done."""

    part: RowPart
    out: torch.Tensor  # (b, sq, h, dv), in q's dtype


def continued_part(later: np.ndarray, q: Any, v: Any) -> RowPart | None:
    """The rows that go on, if the others are worth a launch. later: (n, 2) ranges of rows that later launches touch. q, v: of shapes."""
    b, sq, h, _ = q.shape
    row_bytes = 4 * b * h * v.shape[3]  # of a state
    if sq * row_bytes < _WORTH:
        return None
    count = -(-sq // _WHOLE) + 1
    begins, ends = (np.bincount(x, minlength=count) for x in (later[:, 0] // _WHOLE, (later[:, 1] + (_WHOLE - 1)) // _WHOLE))
    goes_on = np.zeros(count + 1, dtype=bool)
    goes_on[1:] = (begins - ends).cumsum() > 0
    edges = np.minimum(np.flatnonzero(goes_on[1:] != goes_on[:-1]) * _WHOLE, sq).reshape(-1, 2)
    done = sq - int((edges[:, 1] - edges[:, 0]).sum())
    return RowPart(tuple(map(tuple, edges.tolist()))) if done * row_bytes >= _WORTH else None
