"""Segments: the runs of consecutive positions of one document that one rank holds, and which ranks need to hear of which.

A state, or the halo of a convolution, passes from segment to segment in order of position. A layout may give a rank several segments,
of any lengths. Segments of one document are a chain.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch

from .. import check
from ..geometry.layout import Layout
from ..geometry.mask import Causal, Documents, Mask


@dataclass(frozen=True)
class Segment:
    """The positions [start, stop) of a document, held by one rank in its rows [row, row + stop - start) by position.

    first, last: whether the document begins, or ends, with it.
    """

    rank: int
    start: int
    stop: int
    row: int
    document: int
    first: bool
    last: bool

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self))

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Segments:
    """All segments of a layout in order of position, so that a chain is a range of them.

    documents: how many; those of no tokens have no segment. spans: of each rank, the local rows of each of its spans, by position.
    """

    every: tuple[Segment, ...]
    documents: int
    spans: tuple[tuple[slice, ...], ...]

    @cached_property
    def _ends(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The index of a rank's first and last segment in each chain: by (document, rank)."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for index, segment in enumerate(self.every):
            key = segment.document, segment.rank
            found[key] = found.get(key, (index,))[0], index
        return found

    @cached_property
    def chains(self) -> tuple[range, ...]:
        """The indices of each document's segments, for documents that have any."""
        firsts = [index for index, segment in enumerate(self.every) if segment.first]
        return tuple(range(*ends) for ends in zip(firsts, [*firsts[1:], len(self.every)]))

    @cached_property
    def held(self) -> frozenset[int]:
        """The documents that have tokens."""
        return frozenset(segment.document for segment in self.every)

    def of(self, rank: int) -> OwnSegments:
        """The segments of one rank."""
        return OwnSegments(self, rank)

    def own(self, rank: int) -> list[int]:
        """The indices of a rank's segments."""
        return self._own.get(rank, [])

    def heard_by_later(self, sender: int, receiver: int) -> list[int]:
        """The sender's segments that a segment of the receiver follows in their chain."""
        return [index for index in self._linked.get(sender, ()) if self._last(index, receiver) > index]

    def heard_by_earlier(self, sender: int, receiver: int) -> list[int]:
        """The sender's segments that follow a segment of the receiver in their chain."""
        return [index for index in self._linked.get(sender, ()) if self._first(index, receiver) < index]

    def is_linked(self, rank: int) -> bool:
        """Whether a rank holds a part of a document that other segments hold, too."""
        return bool(self._linked.get(rank))

    def documents_of(self, rank: int) -> list[int]:
        """The documents of which a rank holds tokens."""
        return sorted({self.every[index].document for index in self.own(rank)})

    @cached_property
    def _own(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index, segment in enumerate(self.every):
            found.setdefault(segment.rank, []).append(index)
        return found

    @cached_property
    def _linked(self) -> dict[int, list[int]]:
        """Of each rank, the segments that are not their whole document."""
        alone = {index for index, segment in enumerate(self.every) if segment.first and segment.last}
        return {rank: [index for index in own if index not in alone] for rank, own in self._own.items()}

    def _last(self, index: int, rank: int) -> int:
        return self._ends.get((self.every[index].document, rank), (-1, -1))[1]

    def _first(self, index: int, rank: int) -> int:
        return self._ends.get((self.every[index].document, rank), (len(self.every),))[0]


class OwnSegments:
    """The segments of one rank, by index: `first`, those that begin a document, and `following`, those that follow others.

    Rows are those of dim 1, in the order of their positions.
    """

    def __init__(self, segments: Segments, rank: int) -> None:
        self._every: Sequence[Segment] = segments.every
        self._spans = segments.spans[rank]
        own = segments.own(rank)
        self.first = [index for index in own if self._every[index].first]
        self.following = [index for index in own if not self._every[index].first]

    def cut(self, rows: Mapping[int, int]) -> tuple[OwnSegments, OwnSegments]:
        """The same with segments of fewer rows, by index: with their first so many rows, and with their others."""
        heads, tails = copy.copy(self), copy.copy(self)
        heads._every, tails._every = list(self._every), list(self._every)
        for index, count in rows.items():
            whole = self._every[index]
            heads._every[index] = replace(whole, stop=whole.start + count)
            tails._every[index] = replace(whole, start=whole.start + count, row=whole.row + count)
        return heads, tails

    def by_position(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's rows as they come, in the order of their positions."""
        return _joined(x, self._spans)

    def as_held(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        ends = list(accumulate(rows.stop - rows.start for rows in self._spans))
        sources = (slice(begin, end) for begin, end in zip([0, *ends], ends))
        held = sorted(zip((rows.start for rows in self._spans), sources), key=lambda pair: pair[0])
        return _joined(x, [rows for _, rows in held])

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """The tokens of some segments."""
        return [len(self._every[index]) for index in indices]

    def documents(self, indices: Sequence[int]) -> list[int]:
        """The documents of some segments."""
        return [self._every[index].document for index in indices]

    def rows(self, indices: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """The rows of some segments, one after the other."""
        return _joined(x, [self._every[index].rows for index in indices]) if indices else x[:, :0]

    def parts(self, indices: Sequence[int], rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """The inverse: rows of some segments, of each by itself."""
        return dict(zip(indices, rows.split(self.lengths(indices), dim=1)))

    def split(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        """The rows of each of the rank's segments."""
        return {index: x[:, self._every[index].rows] for index in (*self.first, *self.following)}

    def whole(self, parts: Mapping[int, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """All rows as the rank holds them, from those of all of its segments, and 0 after the last document.

        like: (b, s, ...), with as many rows.
        """
        found = [parts[index] for index in sorted(parts)]
        rest = like.shape[1] - sum(part.shape[1] for part in found)
        shape = (found[0] if found else like).shape
        if rest or not found:
            found.append(like.new_zeros(shape[0], rest, *shape[2:], dtype=found[0].dtype if found else like.dtype))
        return self.as_held(torch.cat(found, dim=1) if len(found) > 1 else found[0])


def check_mask(mask: Mask) -> None:
    """Raise ValueError unless the mask is causal, or of causal documents."""
    check.instance("mask", mask, Mask, check.BUILD_A_MASK)
    if isinstance(mask, Causal) or (isinstance(mask, Documents) and mask.causal and mask.left is None and mask.right is None):
        return
    raise ValueError(
        f"mask is {mask!r}, but a recurrence sees all that came before: pass causal(), or documents(...) without a window"
    )


def check_spans(layout: Layout) -> None:
    """Raise ValueError if spans of a layout are not consecutive positions."""
    _, _, length, stride = layout.table.T
    strided = ((length > 1) & (stride > 1)).nonzero()[0]
    if len(strided):
        raise ValueError(
            f"layout {layout!r} gives rank {layout.table[strided[0], 0]} positions {stride[strided[0]]} apart, but a state passes "
            "between runs of consecutive tokens: take contiguous, zigzag or balanced for all layers of the model"
        )


def bounds_of(mask: Mask, seq_len: int) -> tuple[int, ...]:
    """The cumulative lengths of a mask's documents: one document, if it is causal."""
    return mask.cu_seqlens if isinstance(mask, Documents) else (0, seq_len)


@lru_cache(64)
def make_segments(layout: Layout, mask: Mask) -> Segments:
    """The segments of a layout under `causal()` or `documents(...)`, both of which have been checked."""
    rank, start, length, _ = layout.table.T
    held = length.cumsum() - length - np.concatenate([[0], np.cumsum(layout.lengths)])[rank]  # the first row of each span
    order = start.argsort(kind="stable")
    rank, start, length, held = (x[order] for x in (rank, start, length, held))
    bounds = np.array(bounds_of(mask, layout.seq_len), dtype=np.int64)
    spans, row = [], np.zeros_like(start)
    for one in range(layout.world_size):
        mine = rank == one
        row[mine] = length[mine].cumsum() - length[mine]
        spans.append(tuple(slice(a, a + n) for a, n in zip(held[mine].tolist(), length[mine].tolist())))
    # a neighbour of the same rank is one segment with it; a document that begins or ends cuts
    fresh = np.ones(len(rank), dtype=bool)
    fresh[1:] = rank[1:] != rank[:-1]
    edges = np.unique(np.concatenate([start[fresh], bounds[bounds <= layout.seq_len], [layout.seq_len]]))
    edges = edges[edges <= bounds[-1]]
    begin, end = edges[:-1], edges[1:]
    span = start.searchsorted(begin, side="right") - 1
    document = bounds.searchsorted(begin, side="right") - 1
    columns = (
        rank[span],
        begin,
        end,
        row[span] + begin - start[span],
        document,
        begin == bounds[document],
        end == bounds[document + 1],
    )
    found = tuple(Segment(*fields) for fields in zip(*(column.tolist() for column in columns)))
    return Segments(found, len(bounds) - 1, tuple(spans))


def _joined(x: torch.Tensor, rows: Sequence[slice]) -> torch.Tensor:
    """Slices of dim 1, one after the other: a view, if they lie so."""
    if all(before.stop == after.start for before, after in pairwise(rows)):
        return x[:, rows[0].start : rows[-1].stop] if rows else x
    return torch.cat([x[:, part] for part in rows], dim=1)
