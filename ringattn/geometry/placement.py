"""Placement of packed documents: short ones stay whole on a rank, long ones are spread over as few ranks as carry their work.

`packing.py` fills the ranks; here are the documents of a mask, what a placement costs, and its layout.

Sources: moved rows against even work (DCP, Jiang et al. 2025); documents sharded one by one (WLB-LLM, Wang et al. 2025); head and
tail of one sequence (Llama 3, Dubey et al. 2024, section 3.3.2).
"""

from __future__ import annotations

from itertools import chain
from math import ceil

import numpy as np

from ..check import BUILD_A_MASK, MAX_RANKS, MAX_TOKENS, instance, integer, number
from ..digest import constant
from .layout import Layout, balanced, layout_of_pieces
from .mask import Mask
from .packing import Pool, fill_ranks
from .region import Q_START, STRIDE, Table, count_pairs


@constant
def placed(mask: Mask, seq_len: int, world_size: int, tolerance: float = 0.03) -> Layout:
    """Packed documents on ranks, with even work, even numbers of tokens, and few rows of K/V that move.

    mask: `documents(...)`, also within a window, or combined with `&`: every region of it is a square on the diagonal. For all
        other masks this is `balanced`.
    tolerance: by how much the work of the busiest rank, and the tokens of the longest shard, may exceed the mean of all ranks.

    Work, the live pairs, is the time of attention. Tokens are the time of all other layers, and memory. Documents stay whole where the
    tolerance allows it, so a larger one moves less. Beyond the tolerance, a rank has at most two tokens, or the work of two rows of the
    longest document (three with a window to both sides). If contiguous chunks or zigzag are as even and move less, they are taken.
    Positions of no document (padding) are dealt evenly.

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
    regions = regions[regions[:, Q_START].argsort(kind="stable")]
    if not _are_documents(regions):
        return balanced(mask, seq_len, world_size)
    task = _Task(regions, seq_len, world_size, tolerance)
    found = [task.place(whole=True)]
    costs = [task.cost(found[0])]
    if costs[0][0]:
        found.append(task.place(whole=False))
    if costs[0][1]:
        ranks = np.arange(world_size)
        found += [task.chunks(ranks), task.chunks(np.concatenate([ranks, ranks[::-1]]))]
    costs += map(task.cost, found[1:])
    pieces = found[costs.index(min(costs))]
    rank, start, stop = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))].T
    return layout_of_pieces(rank, start, stop, world_size, seq_len, "placed")


def _are_documents(regions: Table) -> bool:
    """Whether each region, in order of its queries, is a square on the diagonal, apart from the others, with the diagonal live."""
    q_start, q_stop, k_start, k_stop, lo, hi, stride = regions.T
    square = (q_start == k_start) & (q_stop == k_stop) & (lo <= 0) & (hi >= 0) & (stride == 1)
    return bool(square.all() and (q_start[1:] >= q_stop[:-1]).all())


class _Task:
    """Documents for the ranks, and what a placement costs. A placement is an (n, 3) table of rank, start and stop, within documents."""

    def __init__(self, regions: Table, seq_len: int, world_size: int, tolerance: float) -> None:
        self.start, self.stop, _, _, self.lo, self.hi, _ = regions.T
        self.work = count_pairs(*regions[:, :STRIDE].T)
        self.seq_len, self.world_size = seq_len, world_size
        self.most_rows = max(ceil(seq_len / world_size), int(min(seq_len, (1 + tolerance) * seq_len / world_size)))
        self.most_work = (1 + tolerance) * int(self.work.sum()) / world_size

    def place(self, whole: bool) -> Table:
        """A placement of the documents, with the padding dealt evenly. `whole`: ranks take whole documents first."""
        rows = self.stop - self.start
        order = (self.work / rows).argsort(kind="stable")
        # packing takes later rows for those with more work: where earlier ones have more, it gets each document in reverse
        reverse = self.hi.sum() < -self.lo.sum()
        lo, hi = (-self.hi, -self.lo) if reverse else (self.lo, self.hi)
        table = np.array([self.start, rows, lo, hi, np.zeros_like(rows), rows]).T[order]
        pool = Pool(table, self.work[order])
        padding = self._padding()
        most_rows = self.most_rows - int((padding[:, 2] - padding[:, 1]).sum() + self.world_size - 1) // self.world_size
        shards = fill_ranks(pool, self.world_size, most_rows, self.most_work, whole)
        start, length, _, _, begin, end = pool.table(list(chain.from_iterable(shards))).T
        if reverse:
            begin, end = length - end, length - begin
        ranks = np.repeat(np.arange(self.world_size), list(map(len, shards)))
        return np.concatenate([np.array([ranks, start + begin, start + end]).T, padding])

    def chunks(self, ranks: np.ndarray) -> Table:
        """The placement of equal chunks of the sequence, which go to these ranks."""
        edges = self.seq_len * np.arange(len(ranks) + 1) // len(ranks)
        cuts = _distinct(edges, self.start, self.stop)
        return np.array([ranks[edges.searchsorted(cuts[:-1], side="right") - 1], cuts[:-1], cuts[1:]]).T

    def cost(self, pieces: Table) -> tuple[float, int]:
        """By how much the limits of work and tokens are exceeded, but for two rows; and how many rows of K/V move."""
        rank, start, stop = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))].T
        document = (self.start.searchsorted(start, side="right") - 1).clip(0)
        tokens = np.bincount(rank, stop - start, self.world_size).max()
        live = start < self.stop[document] if len(self.start) else np.zeros(len(start), dtype=bool)
        rank, start, stop, document = (x[live] for x in (rank, start, stop, document))
        first, end, lo, hi = (x[document] for x in (self.start, self.stop, self.lo, self.hi))
        pairs = count_pairs(start, stop, first, end, lo, hi)
        work = np.bincount(rank, pairs, self.world_size).max()
        longest = int((self.stop - self.start).max(initial=0))
        over = max(0.0, tokens - self.most_rows - 2, (work - self.most_work) / longest - 2 if longest else 0.0)
        # the keys of each piece, [low, high), without those of the rank's earlier pieces of the document; ranks lie far apart
        apart = rank * self.seq_len
        low, high = np.maximum(first, start - hi) + apart, np.minimum(end, stop - lo) + apart
        seen = np.maximum.accumulate(np.concatenate([[0], high]))[:-1]
        return over, int((high - np.maximum(low, seen)).clip(0).sum() - (stop - start).sum())

    def _padding(self) -> Table:
        """Positions of no document, in equal shares."""
        start, stop = np.append(0, self.stop), np.append(self.start, self.seq_len)
        if (start == stop).all():
            return np.empty((0, 3), dtype=np.int64)
        before = np.append(0, (stop - start).cumsum())
        shares = before[-1] * np.arange(self.world_size + 1) // self.world_size
        cuts = _distinct(before, shares)
        gap, rank = (edges.searchsorted(cuts[:-1], side="right") - 1 for edges in (before, shares))
        shift = start[gap] - before[gap]
        return np.array([rank, cuts[:-1] + shift, cuts[1:] + shift]).T


def _distinct(*values: np.ndarray) -> np.ndarray:
    """The values in ascending order, each once."""
    found = np.sort(np.concatenate(values))
    return found[np.append(True, found[1:] != found[:-1])]
