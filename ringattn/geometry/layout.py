"""Layouts: which global positions each rank holds.

A rank's shard is a tuple of spans; its local rows run through them in order. Spans may differ in length between ranks and may be
empty, so any sequence length works with any number of ranks, without padding.

Sources: zigzag, two opposite chunks a rank (Llama 3, Dubey et al. 2024, section 3.3.2); striped, every world_size-th token
(Striped Attention, Brandon et al. 2023).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from ..check import BUILD_A_LAYOUT, BUILD_A_MASK, MAX_RANKS, MAX_TOKENS, instance, integer, listed, shown
from ..check import dim as check_dim
from ..digest import Digested, constant
from .mask import Load, Mask
from .region import Table, count_pairs
from .region import common_stride as region_stride
from .span import Span, Spans, common_stride, fold, refine, span_table

# up to this ratio of the busiest rank's work to the mean, `default_layout` takes contiguous chunks
_EVEN = 1.25


@dataclass(frozen=True, eq=False)
class Layout(Digested):
    """Which positions each rank holds: `spans[rank]` are the spans of a rank's shard, in the order of its local rows.

    seq_len: tokens of the whole sequence. name: shown by `repr`. Raises ValueError unless the spans hold every position of
    `0 <= p < seq_len` exactly once.

    >>> import ringattn as ra
    >>> ra.Layout(8, spans=((ra.Span(0, 3),), (ra.Span(3, 5),))).lengths
    (3, 5)
    """

    seq_len: int
    spans: tuple[Spans, ...]
    name: str = "custom"

    def __post_init__(self) -> None:
        object.__setattr__(self, "seq_len", integer("seq_len", self.seq_len, most=MAX_TOKENS))
        instance("name", self.name, str, "it is shown by repr")
        shards = listed("spans", self.spans, "a tuple of Spans for each rank")
        if not shards:
            raise ValueError("spans is empty: a layout needs at least one rank")
        kept = tuple(tuple(span for span in map(_checked, _spans(spans)) if span.length) for spans in shards)
        object.__setattr__(self, "spans", kept)
        problem = _coverage_problem(self.seq_len, kept)
        if problem:
            raise ValueError(f"spans do not hold each of {self.seq_len} positions exactly once: {problem}")
        super().__post_init__()

    @property
    def world_size(self) -> int:
        return len(self.spans)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Local tokens of each rank."""
        return tuple(sum(span.length for span in spans) for spans in self.spans)

    def positions(self, rank: int) -> torch.Tensor:
        """The global position of each local row of a rank: (s_local,) int64, for RoPE and labels."""
        self._check_rank(rank)
        parts = [span.start + span.stride * torch.arange(span.length) for span in self.spans[rank]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def work(self, mask: Mask) -> np.ndarray:
        """Live (query, key) pairs of each rank's queries: (world_size,) int64."""
        instance("mask", mask, Mask, BUILD_A_MASK)
        return _work(self.spans, mask.regions(self.seq_len), self.seq_len)

    def balance(self, mask: Mask) -> float:
        """The busiest rank's live pairs over the mean of all ranks: 1.0 if work is even, or if nothing is live."""
        return _balance(self.work(mask))

    def _key(self) -> bytes:
        rows = [(rank, span.start, span.length, span.stride) for rank, spans in enumerate(self.spans) for span in spans]
        return np.array([(self.seq_len, self.world_size, 0, 0), *rows], dtype=np.int64).tobytes()

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


@constant
def contiguous(seq_len: int, world_size: int) -> Layout:
    """Rank r holds the r-th of `world_size` equal chunks. Raises ValueError for a negative length, or no ranks."""
    bounds = _bounds(seq_len, world_size, chunks=1)
    return Layout(seq_len, tuple((Span(a, b - a),) for a, b in bounds), "contiguous")


@constant
def zigzag(seq_len: int, world_size: int) -> Layout:
    """Rank r holds the r-th of `2 * world_size` equal chunks and the r-th from the end: even work under a causal mask.

    Source: Llama 3 (Dubey et al. 2024, section 3.3.2). Raises ValueError for a negative length, or no ranks.

    >>> import ringattn as ra
    >>> ra.zigzag(8, world_size=2).positions(0).tolist()
    [0, 1, 6, 7]
    """
    bounds = _bounds(seq_len, world_size, chunks=2)
    pairs = zip(bounds[:world_size], reversed(bounds[world_size:]), strict=True)
    spans = tuple(_joined([Span(a, b - a), Span(c, d - c)]) for (a, b), (c, d) in pairs)
    return Layout(seq_len, spans, "zigzag")


@constant
def striped(seq_len: int, world_size: int) -> Layout:
    """Rank r holds the positions r, r + world_size, r + 2 * world_size, ...

    Source: Striped Attention (Brandon et al. 2023). Raises ValueError for a negative length, or no ranks.
    """
    _bounds(seq_len, world_size, chunks=1)
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
    best: tuple[Spans, ...] = ()
    best_balance = float("inf")
    chunks = 1
    while True:
        bounds = _bounds(seq_len, world_size, chunks)
        work = _work([_joined([Span(a, b - a)]) for a, b in bounds], regions, seq_len)
        candidate = _deal(work, bounds, world_size)
        balance = _balance(_work(candidate, regions, seq_len))
        if not best or balance < best_balance - 1e-9:
            best, best_balance = candidate, balance
        chunks *= 2
        if best_balance <= 1.01 or chunks > 64 or chunks * world_size > seq_len:
            return Layout(seq_len, best, "balanced")


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


def _spans(spans: object) -> Iterator[Span]:
    """The spans of a rank, as a user gave them."""
    for span in spans if isinstance(spans, (tuple, list)) else (spans,):
        if not isinstance(span, Span) or span is spans:
            raise ValueError(f"spans holds {shown(span)}, but must hold a tuple of Spans for each rank")
        yield span


def _checked(span: Span) -> Span:
    """The span in integers of Python."""
    names = ("start", "length", "stride")
    return Span(*(integer(name, getattr(span, name), least=None, most=MAX_TOKENS) for name in names))


def _bounds(seq_len: int, world_size: int, chunks: int) -> list[tuple[int, int]]:
    """(start, stop) of `chunks * world_size` chunks whose lengths differ by at most one."""
    seq_len, world_size = integer("seq_len", seq_len, most=MAX_TOKENS), integer("world_size", world_size, least=1, most=MAX_RANKS)
    n = chunks * world_size
    edges = [seq_len * i // n for i in range(n + 1)]
    return list(pairwise(edges))


def _joined(spans: Sequence[Span]) -> Spans:
    """Join neighbouring spans of stride 1, and drop empty spans."""
    out: list[Span] = []
    for span in spans:
        if not span.length:
            continue
        if out and out[-1].stride == span.stride == 1 and out[-1].stop == span.start:
            start = out.pop().start
            span = Span(start, span.stop - start)
        out.append(span)
    return tuple(out)


def _work(shards: Sequence[Spans], regions: Table, seq_len: int) -> np.ndarray:
    """Live pairs of the queries of each shard with all keys."""
    sequence = (Span(0, seq_len),) if seq_len else ()
    stride = common_stride(*shards, sequence, at_least=region_stride(regions))
    queries, shard_of = span_table([refine(spans, stride)[0] for spans in shards])
    keys, _ = span_table([refine(sequence, stride)[0]])
    tiles, span_of, *_ = fold(queries, keys, regions, stride)
    out = np.zeros(len(shards), dtype=np.int64)
    np.add.at(out, shard_of[span_of], count_pairs(*tiles.T))
    return out


def _balance(work: np.ndarray) -> float:
    return float(work.max() / work.mean()) if work.any() else 1.0


def _deal(work: np.ndarray, bounds: list[tuple[int, int]], world_size: int) -> tuple[Spans, ...]:
    """Deal the chunks, the heaviest first, to the least loaded rank that has room."""
    room = len(bounds) // world_size
    hands: list[list[int]] = [[] for _ in range(world_size)]
    heap = [(0, rank) for rank in range(world_size)]
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        hands[rank].append(chunk)
        if len(hands[rank]) < room:
            heapq.heappush(heap, (load + int(work[chunk]), rank))
    # sort ranks by their first chunk, so that neighbours in the ring hold neighbouring text
    hands = sorted(sorted(hand) for hand in hands)
    return tuple(_joined([Span(bounds[c][0], bounds[c][1] - bounds[c][0]) for c in hand]) for hand in hands)


def _coverage_problem(seq_len: int, shards: tuple[Spans, ...]) -> str | None:
    """Why the spans do not hold each of 0..seq_len - 1 exactly once; None if they do."""
    spans = [span for spans in shards for span in spans]
    for span in spans:
        if span.length < 0 or span.stride < 1 or span.start < 0 or span.stop > seq_len:
            return f"{span} is not inside the sequence"
    total = sum(span.length for span in spans)
    if total != seq_len:
        return f"they hold {total} in all"
    stride = common_stride(*shards)
    fine = [piece for part in shards for piece in refine(part, stride)[0]]
    rows = np.array([(piece.start % stride, piece.start, piece.stop) for piece in fine], dtype=np.int64).reshape(-1, 3)
    residue, start, stop = rows[np.lexsort((rows[:, 1], rows[:, 0]))].T
    twice = (residue[1:] == residue[:-1]) & (start[1:] < stop[:-1])
    return f"position {start[1:][twice][0]} is held twice" if twice.any() else None
