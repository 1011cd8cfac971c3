"""Layouts: which global positions each rank holds.

A rank's shard is a tuple of spans; its local rows run through them in order. Spans may differ in length between ranks and may be
empty, so any sequence length works with any number of ranks, without padding.

Sources: zigzag, two opposite chunks a rank (Llama 3, Dubey et al. 2024, section 3.3.2); striped, every world_size-th token
(Striped Attention, Brandon et al. 2023).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, wraps
from itertools import pairwise

import numpy as np
import torch

from ringattn_kernels.native import numbers, plans

from ..check import BUILD_A_LAYOUT, BUILD_A_MASK, MAX_RANKS, MAX_TOKENS, instance, integer, listed, shown
from ..check import dim as check_dim
from ..digest import Digested, constant
from .mask import Load, Mask
from .region import Table, count_pairs, pairs_of
from .region import common_stride as region_stride
from .span import Span, Spans, common_stride, fold, look, refine, spans_to_table, spread

# up to this ratio of the busiest rank's work to the mean, `default_layout` takes contiguous chunks
_EVEN = 1.25
# `balanced` is content with this ratio, and cuts a rank's share into at most so many chunks
_EVEN_ENOUGH = 1.01
_MOST_CHUNKS = 64
_MOST_KEPT = 64  # layouts of a kind


class Layout(Digested):
    """Which positions each rank holds: `spans[rank]` are the spans of a rank's shard, in the order of its local rows.

    seq_len: tokens of the whole sequence. name: shown by `repr`. world_size: how many ranks there are. table: the spans of all ranks, an
    (n, 4) int64 table of rank, start, length and stride. Raises ValueError unless the spans hold every position of `0 <= p < seq_len`
    exactly once.

    >>> import ringattn as ra
    >>> ra.Layout(8, spans=((ra.Span(0, 3),), (ra.Span(3, 5),))).lengths
    (3, 5)
    """

    seq_len: int
    name: str
    world_size: int
    table: Table

    def __init__(self, seq_len: int, spans: tuple[Spans, ...], name: str = "custom") -> None:
        seq_len = integer("seq_len", seq_len, most=MAX_TOKENS)
        instance("name", name, str, "it is shown by repr")
        shards = listed("spans", spans, "a tuple of Spans for each rank")
        if not shards:
            raise ValueError("spans is empty: a layout needs at least one rank")
        kept = tuple(tuple(span for span in map(_checked, _spans(spans)) if span.length) for spans in shards)
        table = spans_to_table(kept)
        problem = _coverage_problem(seq_len, table, len(kept))
        if problem:
            raise ValueError(f"spans do not hold each of {seq_len} positions exactly once: {problem}")
        self._keep(seq_len, name, len(kept), table)

    @classmethod
    def _of_table(cls, seq_len: int, name: str, world_size: int, table: Table) -> Layout:
        """From a table that holds each position once, which is not checked."""
        layout = object.__new__(cls)
        layout._keep(seq_len, name, world_size, table)
        return layout

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set: a layout is immutable")

    def _keep(self, seq_len: int, name: str, world_size: int, table: Table) -> None:
        self.__dict__.update(seq_len=seq_len, name=name, world_size=world_size, table=table)
        self.__post_init__()

    @cached_property
    def spans(self) -> tuple[Spans, ...]:
        """The spans of each rank."""
        spans = list(map(Span, *self.table[:, 1:].T.tolist()))
        bounds = self.table[:, 0].searchsorted(np.arange(self.world_size + 1)).tolist()
        return tuple(tuple(spans[a:b]) for a, b in pairwise(bounds))  # pyrefly: ignore[bad-argument-type]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Local tokens of each rank."""
        rank, _, length, _ = self.table.T
        return tuple(np.bincount(rank, length, self.world_size).astype(np.int64).tolist())  # pyrefly: ignore[bad-argument-type]

    def positions(self, rank: int) -> torch.Tensor:
        """The global position of each local row of a rank: (s_local,) int64, for RoPE and labels."""
        self._check_rank(rank)
        shards, start, length, stride = self.table.T
        own = slice(*shards.searchsorted((rank, rank + 1)).tolist())
        start, length, stride = start[own], length[own], stride[own]
        # the sums of steps: within a span its stride, at its first row the way from the last one of the span before
        last = start + stride * (length - 1)
        steps = stride.repeat(length)
        steps[length.cumsum() - length] = start - np.concatenate([[0], last[:-1]])[: len(start)]
        return torch.from_numpy(steps.cumsum(out=steps))

    def work(self, mask: Mask) -> np.ndarray:
        """Live (query, key) pairs of each rank's queries: (world_size,) int64."""
        instance("mask", mask, Mask, BUILD_A_MASK)
        return _work(self.table, self.world_size, mask.regions(self.seq_len), self.seq_len)

    def balance(self, mask: Mask) -> float:
        """The busiest rank's live pairs over the mean of all ranks: 1.0 if work is even, or if nothing is live."""
        work = self.work(mask)
        return _balance(int(work.max()), int(work.sum()), len(work))

    def _key(self) -> bytes:
        return np.concatenate([np.array([[self.seq_len, self.world_size, 0, 0]]), self.table]).tobytes()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __repr__(self) -> str:
        return f"{self.name}(seq_len={self.seq_len}, world_size={self.world_size})"

    def _check_rank(self, rank: int) -> int:
        found = integer("rank", rank, least=None)
        if not 0 <= found < self.world_size:
            raise ValueError(f"rank is {rank}, but {self!r} has the ranks 0 to {self.world_size - 1}")
        return found


def _kept(make: Callable[[int, int], Layout]) -> Callable[[int, int], Layout]:
    """`make`, which keeps the layouts that it made of late: callers may ask for the same one in each call."""
    kept = lru_cache(_MOST_KEPT)(make)

    @wraps(make)
    def get(seq_len: int, world_size: int) -> Layout:
        # other types may equal a number that is kept and yet be refused, or have no hash
        return (kept if type(seq_len) is type(world_size) is int else make)(seq_len, world_size)

    return get


@constant
@_kept
def contiguous(seq_len: int, world_size: int) -> Layout:
    """Rank r holds the r-th of `world_size` equal chunks. Raises ValueError for a negative length, or no ranks."""
    edges = _edges(seq_len, world_size, chunks=1)
    return _of_chunks(np.arange(world_size)[:, None], edges, "contiguous")


@constant
@_kept
def zigzag(seq_len: int, world_size: int) -> Layout:
    """Rank r holds the r-th of `2 * world_size` equal chunks and the r-th from the end: even work under a causal mask.

    Source: Llama 3 (Dubey et al. 2024, section 3.3.2). Raises ValueError for a negative length, or no ranks.

    >>> import ringattn as ra
    >>> ra.zigzag(8, world_size=2).positions(0).tolist()
    [0, 1, 6, 7]
    """
    edges = _edges(seq_len, world_size, chunks=2)
    ranks = np.arange(world_size)
    return _of_chunks(np.array([ranks, 2 * world_size - 1 - ranks]).T, edges, "zigzag")


@constant
@_kept
def striped(seq_len: int, world_size: int) -> Layout:
    """Rank r holds the positions r, r + world_size, r + 2 * world_size, ...

    Source: Striped Attention (Brandon et al. 2023). Raises ValueError for a negative length, or no ranks.
    """
    _sizes(seq_len, world_size)
    spans = tuple((Span(rank, len(range(rank, seq_len, world_size)), world_size),) for rank in range(world_size))
    return Layout(seq_len, spans, "striped")


@constant
def balanced(mask: Mask, seq_len: int, world_size: int) -> Layout:
    """Ranks get chunks so that all have about equal work under this mask, and numbers of tokens that differ by at most one chunk.

    The sequence is cut into equal chunks, at first one a rank. The heaviest chunk goes first, to the rank with the least work that
    has room. The number of chunks a rank doubles, up to 64, until work is within 1 % of even; the most even layout is kept.
    Raises ValueError if the mask does not fit the length.

    >>> import ringattn as ra
    >>> mask = ra.documents(lengths=[700, 100, 100, 124])
    >>> round(ra.zigzag(1024, 4).balance(mask), 2), round(ra.balanced(mask, 1024, 4).balance(mask), 2)
    (1.99, 1.01)
    """
    instance("mask", mask, Mask, BUILD_A_MASK)
    regions = mask.regions(seq_len)
    _sizes(seq_len, world_size)
    ranks = balanced_ranks(regions, seq_len, world_size)
    hands = ranks.argsort(kind="stable").reshape(world_size, -1)
    return _of_chunks(hands, _edges(seq_len, world_size, len(ranks) // world_size), "balanced")


@constant
def default_layout(mask: Mask, seq_len: int, world_size: int) -> Layout:
    """The layout that suits a mask.

    - `zigzag` if later queries see more keys: causal and prefix.
    - `contiguous` if all queries see equally many keys: full, dilated windows, and windows with a limit on both sides. If a window spans
      more than about two fifths of the sequence, the first and last ranks would have much less work: then `balanced`.
    - `balanced` for all other masks.
    """
    instance("mask", mask, Mask, BUILD_A_MASK)
    if mask.load is Load.GROWING:
        return zigzag(seq_len, world_size)
    if mask.load is Load.EVEN:
        flat = contiguous(seq_len, world_size)
        if flat.balance(mask) <= _EVEN:
            return flat
    return balanced(mask, seq_len, world_size)


def shard(x: torch.Tensor, layout: Layout, rank: int, dim: int = 1) -> torch.Tensor:
    """A copy of the rows of `x` that a rank holds, along `dim` (size `layout.seq_len`). Differentiable.

    Raises ValueError if the size does not match the layout's.

    >>> import torch, ringattn as ra
    >>> ra.shard(torch.arange(8)[None], ra.zigzag(8, world_size=2), rank=0)
    tensor([[0, 1, 6, 7]])
    """
    instance("x", x, torch.Tensor, "pass the whole sequence")
    instance("layout", layout, Layout, BUILD_A_LAYOUT)
    layout._check_rank(rank)
    dim = check_dim("x", x, dim)
    if x.size(dim) != layout.seq_len:
        raise ValueError(
            f"x has {x.size(dim)} tokens in dim {dim}, but {layout!r} is for {layout.seq_len}: shard the whole sequence"
        )
    lead = (slice(None),) * dim
    parts = [x[(*lead, slice(span.start, span.stop, span.stride))] for span in layout.spans[rank]]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


def balanced_ranks(regions: Table, seq_len: int, world_size: int) -> np.ndarray:
    """The rank of each of the equal chunks of `balanced`."""
    most = 1
    while 2 * most <= _MOST_CHUNKS and 2 * most * world_size <= seq_len:
        most *= 2
    finest = _edges(seq_len, world_size, most)
    work = _work_of_chunks(finest, regions, seq_len)
    best, best_balance = np.arange(world_size)[:, None], float("inf")
    chunks = 1
    while chunks <= most and best_balance > _EVEN_ENOUGH:
        hands, busiest, total = _deal(work, chunks * world_size, world_size)
        balance = _balance(busiest, total, world_size)
        if balance < best_balance - 1e-9:
            best, best_balance = hands, balance
        chunks *= 2
    ranks = np.empty(best.size, dtype=np.int64)
    ranks[best.ravel()] = np.arange(world_size).repeat(best.shape[1])
    return ranks


def _spans(spans: object) -> Iterator[Span]:
    """The spans of a rank, as a user gave them."""
    for span in spans if isinstance(spans, (tuple, list)) and not isinstance(spans, Span) else (spans,):
        if not isinstance(span, Span) or span is spans:
            raise ValueError(f"spans holds {shown(span)}, but must hold a tuple of Spans for each rank")
        yield span


def _checked(span: Span) -> Span:
    """The span in integers of Python."""
    names = ("start", "length", "stride")
    return Span(*(integer(name, getattr(span, name), least=None, most=MAX_TOKENS) for name in names))


def _sizes(seq_len: int, world_size: int) -> tuple[int, int]:
    """Both as integers of Python, checked."""
    return integer("seq_len", seq_len, most=MAX_TOKENS), integer("world_size", world_size, least=1, most=MAX_RANKS)


def _edges(seq_len: int, world_size: int, chunks: int) -> np.ndarray:
    """The bounds of `chunks * world_size` chunks whose lengths differ by at most one. Those of twice as many are among them."""
    seq_len, world_size = _sizes(seq_len, world_size)
    n = chunks * world_size
    return seq_len * np.arange(n + 1) // n


def _of_chunks(hands: np.ndarray, edges: np.ndarray, name: str) -> Layout:
    """A layout from the (world_size, n) chunks that each rank holds, ascending, and the chunks' bounds."""
    ranks = np.arange(len(hands)).repeat(hands.shape[1])
    return layout_of_pieces(ranks, edges[hands].ravel(), edges[hands + 1].ravel(), len(hands), int(edges[-1]), name)


def layout_of_pieces(rank: np.ndarray, start: np.ndarray, stop: np.ndarray, world_size: int, seq_len: int, name: str) -> Layout:
    """A layout of pieces [start, stop) of ranks, in the order of ranks and, within a rank, of positions.

    They hold each position once, which is not checked. Neighbouring pieces of a rank are one span.
    """
    live = start < stop
    rank, start, stop = rank[live], start[live], stop[live]
    edges = np.ones(len(rank) + 1, dtype=bool)  # before each piece, and at the end: whether a span ends and another one begins
    edges[1:-1] = (rank[1:] != rank[:-1]) | (start[1:] != stop[:-1])
    first, last = edges[:-1], edges[1:]
    start = start[first]
    table = np.array([rank[first], start, stop[last] - start, np.ones_like(start)]).T
    return Layout._of_table(seq_len, name, world_size, table)


def _work(table: Table, shards: int, regions: Table, seq_len: int) -> np.ndarray:
    """Live pairs of the queries of each shard with all keys."""
    sequence = np.array([[0, 0, seq_len, 1]])[: min(1, seq_len)]
    stride = common_stride(table, sequence, at_least=region_stride(regions))
    queries, _ = refine(table, shards, stride)
    keys, _ = refine(sequence, 1, stride)
    tiles, span_of, _ = fold(queries, keys, regions, look(queries, regions))
    return _sums(queries.shard[span_of], pairs_of(tiles), shards)


def _work_of_chunks(edges: np.ndarray, regions: Table, seq_len: int) -> np.ndarray:
    """Live pairs of the queries of each chunk with all keys."""
    chunks = len(edges) - 1
    if region_stride(regions) > 1:
        table = np.array([np.arange(chunks), edges[:-1], edges[1:] - edges[:-1], np.ones(chunks, dtype=np.int64)]).T
        return _work(table[table[:, 2] > 0], chunks, regions, seq_len)
    native = plans()
    if native is not None:
        return numbers(native.work(edges, regions))
    q_start, q_stop, k_start, k_stop, lo, hi, _ = regions.T
    region, chunk = spread(edges[1:].searchsorted(q_start, side="right"), edges[:-1].searchsorted(q_stop))
    q_start, q_stop, k_start, k_stop, lo, hi = (x[region] for x in (q_start, q_stop, k_start, k_stop, lo, hi))
    pairs = count_pairs(np.maximum(q_start, edges[chunk]), np.minimum(q_stop, edges[chunk + 1]), k_start, k_stop, lo, hi)
    return _sums(chunk, pairs, chunks)


def _sums(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """The sum of the values with each index: (size,) int64."""
    out = np.zeros(size, dtype=np.int64)
    np.add.at(out, index, values)
    return out


def _balance(busiest: int, total: int, ranks: int) -> float:
    return ranks * busiest / total if total else 1.0


def _deal(work: np.ndarray, chunks: int, world_size: int) -> tuple[np.ndarray, int, int]:
    """Deal the chunks, the heaviest first, to the least loaded rank that has room: (world_size, n) chunks of each rank, ascending.

    And the work of the busiest rank, and that of all. work: of equally many parts of each chunk.
    """
    room, native = chunks // world_size, plans()
    if native is not None:
        dealt, busiest, total = native.deal(work, chunks, world_size)
        return numbers(dealt, room), busiest, total
    work = work.reshape(chunks, -1).sum(axis=1)
    hands: list[list[int]] = [[] for _ in range(world_size)]
    # load * world_size + rank of the ranks that have room: the least load first, and of equal ones the first rank
    heap = list(range(world_size))
    heaviest_first = (-work).argsort(kind="stable")
    for chunk, load in zip(heaviest_first.tolist(), work[heaviest_first].tolist()):
        before = heap[0]
        hand = hands[before % world_size]
        hand.append(chunk)
        if len(hand) < room:
            heapq.heapreplace(heap, before + load * world_size)
        else:
            heapq.heappop(heap)
    # sort ranks by their first chunk, so that neighbours in the ring hold neighbouring text
    dealt = np.sort(np.array(hands), axis=1)
    return dealt[dealt[:, 0].argsort()], int(work[dealt].sum(axis=1).max()), int(work.sum())


def _coverage_problem(seq_len: int, table: Table, shards: int) -> str | None:
    """Why the spans do not hold each of 0..seq_len - 1 exactly once; None if they do."""
    _, start, length, stride = table.T
    odd = ((length < 0) | (stride < 1) | (start < 0) | (start + stride * (length - 1) >= seq_len)).nonzero()[0]
    if len(odd):
        return f"{Span(*table[odd[0], 1:].tolist())} is not inside the sequence"
    total = int(length.sum())
    if total != seq_len:
        return f"they hold {total} in all"
    fine, _ = refine(table, shards, common_stride(table))
    residue = fine.start % fine.stride
    order = np.lexsort((fine.start, residue))
    residue, start, last = residue[order], fine.start[order], fine.last[order]
    twice = (residue[1:] == residue[:-1]) & (start[1:] <= last[:-1])
    return f"position {start[1:][twice][0]} is held twice" if twice.any() else None
