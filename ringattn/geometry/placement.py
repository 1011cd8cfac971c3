"""Placement of packed documents: short ones stay whole on a rank, long ones are spread over as few ranks as carry their work.

`packing.py` fills the ranks; here are the documents of a mask, what a placement costs, and its layout.

Sources: moved rows against even work (DCP, Jiang et al. 2025); documents sharded one by one (WLB-LLM, Wang et al. 2025); head and
tail of one sequence (Llama 3, Dubey et al. 2024, section 3.3.2).
"""

from __future__ import annotations

from itertools import chain
from math import ceil
from typing import NamedTuple

import numpy as np

from ..check import BUILD_A_MASK, MAX_RANKS, MAX_TOKENS, instance, integer, number
from ..digest import constant
from .layout import Layout, balanced, balanced_ranks, layout_of_pieces
from .mask import Mask
from .packing import Pool, fill_ranks
from .region import HI, LO, Q_START, Q_STOP, Table

# documents with which `balanced` is tried: it cuts most of them, and moved less with up to 56 of them in random mixes
_FEW = 100


@constant
def placed(mask: Mask, seq_len: int, world_size: int, tolerance: float = 0.03) -> Layout:
    """Packed documents on ranks, with even work, even numbers of tokens, and few rows of K/V that move.

    mask: `documents(...)`, also within a window, or combined with `&`: every region of it is a square on the diagonal. For all
        other masks this is `balanced`.
    tolerance: by how much the work of the busiest rank, and the tokens of the longest shard, may exceed the mean of all ranks.

    Work, the live pairs, is the time of attention. Tokens are the time of all other layers, and memory. Documents stay whole where the
    tolerance allows it, so a larger one moves less. Beyond the tolerance, a rank has at most two tokens, or the work of two rows of the
    longest document (three with a window to both sides). If contiguous chunks, zigzag or, with up to 100 documents, `balanced` keep these
    limits and move less, they are taken. Positions of no document (padding) are dealt evenly. With the default tolerance each rank has a
    token, if there are as many tokens as ranks.

    Lower bound of what moves: let no rank have more than T tokens and W live pairs. Of a causal document of L tokens, j ranks hold at most
    j T tokens and j W pairs. So of the ranks that hold it, in the order of their last rows, the last but j ends at row
    f(j) = max(L - j T, sqrt(L^2 - 2 j W)) or later. It needs all rows before that one, and the ranks hold L rows together. So at least
    f(1) + f(2) + ... rows move, as long as these are positive.

    Raises ValueError if the mask does not fit the length, if there are no ranks, and for a tolerance that is negative or not finite.

    >>> import ringattn as ra
    >>> mask = ra.documents(lengths=[700, 100, 100, 124])
    >>> layout = ra.placed(mask, 1024, 4)
    >>> layout.lengths, round(layout.balance(mask), 2)
    ((256, 256, 256, 256), 1.01)
    """
    instance("mask", mask, Mask, BUILD_A_MASK)
    tolerance = number("tolerance", tolerance, least=0)
    seq_len, world_size = integer("seq_len", seq_len, most=MAX_TOKENS), integer("world_size", world_size, least=1, most=MAX_RANKS)
    regions = mask.regions(seq_len)
    if (regions[1:, Q_START] < regions[:-1, Q_START]).any():
        regions = regions[regions[:, Q_START].argsort(kind="stable")]
    if not _are_documents(regions):
        return balanced(mask, seq_len, world_size)
    task = _Task(regions, seq_len, world_size, tolerance)
    found = [task.place(task.most_work, whole=True)]
    costs = [task.cost(found[0])]
    if costs[0].exceeds:
        # rows are coarse beside the work of a short shard: what keeps the tolerance itself goes first
        found += [task.place(task.even_work, whole=True), task.place(task.most_work, whole=False)]
        costs += map(task.cost, found[1:])
        best = [i for i, cost in enumerate(costs) if not (cost.exceeds or cost.idle)] or range(len(costs))
        found, costs = [found[i] for i in best], [costs[i] for i in best]
    if min(costs) > _Cost(0, False, 0):
        ranks = np.arange(world_size)
        of_chunks = [ranks, np.concatenate([ranks, ranks[::-1]])]
        if len(regions) <= _FEW:
            of_chunks.append(balanced_ranks(regions, seq_len, world_size))
        for ranks_of in of_chunks:
            for pieces in task.chunks(ranks_of, min(costs).over):
                found.append(pieces)
                costs.append(task.cost(pieces))
    rank, start, stop = found[costs.index(min(costs))]
    return layout_of_pieces(rank, start, stop, world_size, seq_len, "placed")


def _are_documents(regions: Table) -> bool:
    """Whether each region, in order of its queries, is a square on the diagonal, apart from the others, with the diagonal live."""
    q_start, q_stop, k_start, k_stop, lo, hi, stride = regions.T
    square = (q_start == k_start) & (q_stop == k_stop) & (lo <= 0) & (hi >= 0) & (stride == 1)
    return bool(square.all() and (q_start[1:] >= q_stop[:-1]).all())


class _Cost(NamedTuple):
    """What is wrong with a placement, the worst first."""

    over: float  # by how much the limits of work and tokens are exceeded, but for two rows
    idle: bool  # whether a rank has no token, though there is one for each
    moved: int  # rows of K/V
    exceeds: bool = False  # whether the limits are exceeded at all


class _Task:
    """Documents for the ranks, and what a placement costs.

    A placement is a (3, n) array of rank, start and stop of pieces within documents, in the order of ranks and then of positions.
    """

    def __init__(self, regions: Table, seq_len: int, world_size: int, tolerance: float) -> None:
        self.documents = regions.T[[Q_START, Q_STOP, LO, HI]]
        self.start, self.stop, self.lo, self.hi = self.documents
        self.rows = self.stop - self.start
        self.longest, held = int(self.rows.max(initial=0)), int(self.rows.sum())
        # whether a query sees later keys, and whether one does not see all earlier keys
        self.sees_later, self.sees_few = bool(self.lo.any()), bool((self.hi + 1 < self.rows).any())
        self.work = self._pairs_before(self.rows, self.rows, self.lo, self.hi)
        self.seq_len, self.world_size, self.padding = seq_len, world_size, seq_len - held
        self.most_rows = max(ceil(seq_len / world_size), int(min(seq_len, (1 + tolerance) * seq_len / world_size)))
        self.even_work = int(self.work.sum()) / world_size
        self.most_work = (1 + tolerance) * self.even_work

    def place(self, most_work: float, whole: bool) -> np.ndarray:
        """A placement of the documents, with the padding dealt evenly. A rank takes at most so much work, as far as rows allow it.

        whole: ranks take whole documents first.
        """
        density = self.work / self.rows
        order = density.argsort(kind="stable")
        # packing takes later rows for those with more work: where earlier ones have more, it gets each document in reverse
        reverse = self.sees_later and self.hi.sum() < -self.lo.sum()
        lo, hi = (-self.hi, -self.lo) if reverse else (self.lo, self.hi)
        documents = np.array([self.start, self.rows, lo, hi]).take(order, axis=1)
        pool = Pool(documents, self.work[order], density[order])
        most_rows = self.most_rows - (self.padding + self.world_size - 1) // self.world_size
        shards = fill_ranks(pool, self.world_size, most_rows, most_work, whole)
        start, stop = pool.bounds(list(chain.from_iterable(shards)), reverse)
        rank = np.arange(self.world_size).repeat(list(map(len, shards)))
        if self.padding:
            rank, start, stop = np.concatenate([[rank, start, stop], self._dealt_padding()], axis=1)
        return self._sorted(rank, start, stop)

    def chunks(self, ranks: np.ndarray, most: float) -> list[np.ndarray]:
        """The placement of equal chunks of the sequence, which go to these ranks, if it exceeds the limits by at most so much."""
        edges = self.seq_len * np.arange(len(ranks) + 1) // len(ranks)
        document = np.maximum(self.start.searchsorted(edges, side="right") - 1, 0)
        start, stop, lo, hi = self.documents.take(document, axis=1)
        before = self._pairs_before(np.maximum(np.minimum(edges, stop) - start, 0), stop - start, lo, hi)
        before += (self.work.cumsum() - self.work)[document]
        tokens, work = (np.bincount(ranks, x[1:] - x[:-1]).max() for x in (edges, before))
        if self._over(tokens, work) > most:
            return []
        cuts = _distinct(edges, self.start, self.stop)
        return [self._sorted(ranks[edges.searchsorted(cuts[:-1], side="right") - 1], cuts[:-1], cuts[1:])]

    def cost(self, pieces: np.ndarray) -> _Cost:
        """What is wrong with a placement."""
        rank, start, stop = pieces
        document = self.start.searchsorted(start, side="right") - 1
        tokens = np.bincount(rank, stop - start, self.world_size)
        # with more tokens than these, a rank is left without only if the tolerance is as large as that
        idle = self.world_size <= self.seq_len < 2 * self.world_size and not tokens.all()
        if self.padding:
            document = np.maximum(document, 0)
            live = start < self.stop[document] if len(self.start) else np.zeros(len(start), dtype=bool)
            (rank, start, stop), document = pieces[:, live], document[live]
        first, end, lo, hi = self.documents.take(document, axis=1)
        pairs = self._pairs_before(np.array([stop, start]) - first, end - first, lo, hi)
        work = np.bincount(rank, pairs[0] - pairs[1], self.world_size).max()
        # the keys of each piece, [low, high), without those of the rank's earlier pieces of the document; ranks lie far apart
        apart = rank * self.seq_len
        low = (np.maximum(first, start - hi) if self.sees_few else first) + apart
        high = (np.minimum(end, stop - lo) if self.sees_later else stop) + apart
        low[1:] = np.maximum(low[1:], np.maximum.accumulate(high)[:-1])
        moved = int(np.maximum(high - low, 0).sum() - (stop - start).sum())
        return _Cost(self._over(tokens.max(), work), idle, moved, bool(tokens.max() > self.most_rows or work > self.most_work))

    def _over(self, tokens: float, work: float) -> float:
        """By how much the tokens and the work of a rank exceed the limits, but for two rows."""
        return max(0.0, tokens - self.most_rows - 2, (work - self.most_work) / self.longest - 2 if self.longest else 0.0)

    def _pairs_before(self, rows: np.ndarray, length: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
        """Live pairs of the first rows of documents: as `DocumentPart.head`."""
        pairs = rows * (rows + 1) // 2
        if self.sees_later:
            below = np.maximum(rows - length - lo, 0)
            pairs -= lo * rows + below * (below + 1) // 2
        if self.sees_few:
            above = np.maximum(rows - 1 - hi, 0)
            pairs -= above * (above + 1) // 2
        return pairs

    def _sorted(self, rank: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Pieces in the order of ranks, and then of positions."""
        return np.array([rank, start, stop]).take((rank * (self.seq_len + 1) + start).argsort(kind="stable"), axis=1)

    def _dealt_padding(self) -> np.ndarray:
        """Positions of no document, in equal shares."""
        start, stop = np.append(0, self.stop), np.append(self.start, self.seq_len)
        before = np.append(0, (stop - start).cumsum())
        shares = before[-1] * np.arange(self.world_size + 1) // self.world_size
        cuts = _distinct(before, shares)
        gap, rank = (edges.searchsorted(cuts[:-1], side="right") - 1 for edges in (before, shares))
        shift = start[gap] - before[gap]
        return np.array([rank, cuts[:-1] + shift, cuts[1:] + shift])


def _distinct(*values: np.ndarray) -> np.ndarray:
    """The values in ascending order, each once."""
    found = np.sort(np.concatenate(values))
    return found[np.append(True, found[1:] != found[:-1])]
