"""`Rows`, sets of local rows, say what moves between ranks; `Order`, a permutation, says how a plan sorts a rank's rows."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from .region import Table


class Rows:
    """A set of local rows as disjoint ascending ranges: an (n, 2) table of [begin, end)."""

    def __init__(self, ranges: Table) -> None:
        """Takes any ranges; joins those that overlap or touch."""
        self.ranges = joined(ranges)
        self._index: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def span(cls, begin: int, end: int) -> Rows:
        return cls(np.array([[begin, end]], dtype=np.int64))

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
    def _only(self) -> tuple[int, int] | None:
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
            listed = np.concatenate([np.arange(begin, end) for begin, end in self.ranges]) if len(self.ranges) else np.empty(0, int)
            self._index[device] = torch.from_numpy(listed).to(device)
        return self._index[device]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """These rows of x along dim 0: x itself if they are all its rows, a view if they are one range, else a copy."""
        if self._only is None:
            return x.index_select(0, self.index(x.device))
        begin, end = self._only
        return x if end - begin == x.shape[0] else x[begin:end]

    def add_to(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """x[these rows] += values, in place."""
        if self._only is None:
            index = self.index(x.device)
            x[index] = x.index_select(0, index).add_(values)
        else:
            self.take(x).add_(values)

    def __repr__(self) -> str:
        return f"Rows({self.ranges.tolist()})"


class Order:
    """A permutation of a rank's rows: row i in the plan's order is row `rows[i]` in the caller's order."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._index: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def sort(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """x, which has the caller's order along `dim`, in the plan's order."""
        return x.index_select(dim, self._indices(x.device)[0])

    def restore(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """x, which has the plan's order along `dim`, in the caller's order."""
        return x.index_select(dim, self._indices(x.device)[1])

    def _indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._index:
            there, back = torch.from_numpy(self.rows), torch.from_numpy(np.argsort(self.rows))
            self._index[device] = there.to(device), back.to(device)
        return self._index[device]


def joined(ranges: Table, gap: int = 0) -> Table:
    """Sort ranges [begin, end), drop the empty ones, and join those that overlap or lie at most `gap` rows apart."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    if len(ranges) < 2:
        return ranges
    begin, end = ranges.T
    if (begin[1:] < begin[:-1]).any():
        ascending = np.argsort(begin, kind="stable")
        begin, end = begin[ascending], end[ascending]
    reach = np.maximum.accumulate(end)
    apart = begin[1:] > reach[:-1] + gap
    first = np.flatnonzero(np.concatenate([[True], apart]))
    last = np.flatnonzero(np.concatenate([apart, [True]]))
    return np.stack([begin[first], reach[last]], axis=1)
