"""`Rows`, sets of local rows, say what moves between ranks; `Order`, a permutation, says how a plan sorts a rank's rows."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from ringattn_kernels.table import on_device

from .region import Table
from .span import spread


class Rows:
    """A set of local rows as disjoint ascending ranges: an (n, 2) table of [begin, end)."""

    def __init__(self, ranges: Table) -> None:
        """Takes any ranges; joins those that overlap or touch."""
        self.ranges = joined(ranges)

    @classmethod
    def disjoint(cls, ranges: Table, count: int | None = None) -> Rows:
        """From ranges that ascend and neither overlap nor touch, with `count` rows in all, if that is known."""
        rows = cls.__new__(cls)
        rows.ranges = ranges
        if count is not None:
            rows.__dict__["_count"] = count
        return rows

    @classmethod
    def span(cls, begin: int, end: int) -> Rows:
        """The rows [begin, end)."""
        rows = cls.__new__(cls)
        rows.__dict__.update(only=(begin, end) if begin < end else None, _count=max(0, end - begin))
        return rows

    @cached_property
    def ranges(self) -> Table:
        """An (n, 2) table of [begin, end). It is made at its first use, because most sets of one range are only counted and sliced."""
        return np.array([self.only] if self.only else [], dtype=np.int64).reshape(-1, 2)

    @cached_property
    def _index(self) -> dict[torch.device, torch.Tensor]:
        return {}

    @property
    def _begins(self) -> Table:
        return self.ranges[:, 0]

    @cached_property
    def _sizes(self) -> Table:
        return self.ranges[:, 1] - self.ranges[:, 0]

    @cached_property
    def _count(self) -> int:
        return int(self._sizes.sum())

    @cached_property
    def only(self) -> tuple[int, int] | None:
        """(begin, end) if the rows are one range."""
        return tuple(self.ranges[0].tolist()) if len(self.ranges) == 1 else None

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and np.array_equal(self.ranges, other.ranges)

    def __hash__(self) -> int:
        return hash(self.ranges.tobytes())

    def __or__(self, other: Rows) -> Rows:
        return Rows(np.concatenate([self.ranges, other.ranges]))

    def __sub__(self, other: Rows) -> Rows:
        marks = np.concatenate([self.ranges.ravel(), other.ranges.ravel()])
        edges = np.unique(marks)
        cells = np.stack([edges[:-1], edges[1:]], axis=1) if len(edges) else self.ranges
        return Rows(cells[self.contains(cells[:, 0]) & ~other.contains(cells[:, 0])])

    def contains(self, rows: np.ndarray) -> np.ndarray:
        """Which of `rows` are in the set."""
        at = np.searchsorted(self._begins, rows, side="right") - 1
        return (at >= 0) & (rows < self.ranges[np.maximum(at, 0), 1]) if len(self.ranges) else np.zeros(len(rows), bool)

    def rank_of(self, rows: np.ndarray) -> np.ndarray:
        """The index of each of `rows` in the ascending set, which must hold them all."""
        before = np.concatenate([[0], np.cumsum(self._sizes)[:-1]])
        at = np.searchsorted(self._begins, rows, side="right") - 1
        return before[at] + rows - self._begins[at]

    def within(self, outer: Rows) -> Rows:
        """This set as rows of a buffer that holds the rows of `outer`, a superset, one after the other."""
        if self is outer:
            return Rows.span(0, len(self))
        if outer.only is not None:
            first = outer.only[0]
            return self if first == 0 else Rows.disjoint(self.ranges - first)
        begin = outer.rank_of(self._begins)
        return Rows(np.stack([begin, begin + self._sizes], axis=1))

    def cut(self, parts: int) -> list[Rows]:
        """Split these rows, in order, into at most `parts` sets of about equal size, none of them empty."""
        if parts == 1:
            return [self] if len(self) else []
        sizes = self._sizes
        before = np.cumsum(sizes) - sizes
        bounds = len(self) * np.arange(parts + 1) // parts
        pieces = [
            self.ranges[:, :1] + np.clip(np.stack([a - before, b - before], axis=1), 0, sizes[:, None]) for a, b in pairwise(bounds)
        ]
        return [rows for rows in map(Rows, pieces) if len(rows)]

    def index(self, device: torch.device) -> torch.Tensor:
        """The rows as an int64 tensor, made once for each device."""
        if device not in self._index:
            (self._index[device],) = on_device((spread(*self.ranges.T)[1],), device)
        return self._index[device]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """These rows of x along dim 0: x itself if they are all its rows, a view if they are one range, else a copy."""
        if self.only is None:
            return x.index_select(0, self.index(x.device))
        begin, end = self.only
        return x if end - begin == x.shape[0] else x[begin:end]

    def add_to(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """x[these rows] += values, in place."""
        if self.only is None:
            index = self.index(x.device)
            x[index] = x.index_select(0, index).add_(values)
        else:
            begin, end = self.only
            x[begin:end].add_(values)

    def __repr__(self) -> str:
        return f"Rows({self.ranges.tolist()})"


class Order:
    """A permutation of a rank's rows: row i in the plan's order is row `rows[i]` in the caller's order."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._index: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def sort(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """x, which has the caller's order along `dim`, in the plan's order."""
        return x.index_select(dim, self.indices(x.device)[0])

    def restore(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """x, which has the plan's order along `dim`, in the caller's order."""
        return x.index_select(dim, self.indices(x.device)[1])

    def indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The permutation and its inverse, made once for each device."""
        if device not in self._index:
            there, back = on_device((self.rows, np.argsort(self.rows)), device)
            self._index[device] = there, back
        return self._index[device]


def joined(ranges: Table, gap: int = 0) -> Table:
    """Sort ranges [begin, end), drop the empty ones, and join those that overlap or lie at most `gap` rows apart."""
    begin, end = ranges.T
    some = begin < end
    if not some.all():
        ranges = ranges[some]
        begin, end = ranges.T
    if len(ranges) < 2:
        return ranges
    if (begin[1:] < begin[:-1]).any():
        ascending = begin.argsort(kind="stable")
        begin, end = begin[ascending], end[ascending]
    reach = np.maximum.accumulate(end)
    apart = begin[1:] > reach[:-1] + gap
    # a range begins at the first row and after each gap, and ends before each gap and at the last row
    first = apart.nonzero()[0]
    found = np.empty((2, len(first) + 1), dtype=np.int64)
    found[0, 0], found[1, -1] = begin[0], reach[-1]
    found[1, :-1] = reach[first]
    found[0, 1:] = begin[first + 1]
    return found.T
