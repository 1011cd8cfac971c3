"""`prefill`: a chunk of new tokens goes into a paged cache, and attends to all tokens of its sequences.

The pages of a sequence are a layout: page j lies on rank `(home + j) % world_size`. So a chunk is a call of attention with queries of one
layout and keys of another. What moves, queries or pages, is what moves fewer bytes.

Shapes: b sequences, t new tokens of each, of which a rank holds s_local; h query heads, hk key/value heads, d and d_v head dims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .. import check
from ..geometry.layout import Layout, layout_of_pieces
from ..geometry.mask import Mask, causal
from ..geometry.plan import Keys
from ..runtime.agree import refusing
from ..runtime.rank_attention import RankAttention
from ..schedule.schedules import RowTraffic, Schedule
from ..scores import MOST_PLACES, Score, ScoreMod
from .agreement import agree_on_call
from .batch import CacheBatch
from .cache import PagedCache
from .decoding import check_evicted, window_of
from .filling import check_shards, fill
from .pages import CachedSequence

Run = tuple[int, int]  # pages [begin, end)

_DEFAULT_MASK = causal()


class _Alike(NamedTuple):
    """Sequences of a batch whose pages lie alike on the ranks, by their rows in the batch, and what this rank does for them.

    pages: (n, this rank's pages of each), in the order of their positions. tokens: of these pages, filled.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    tokens: int
    work: RankAttention


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: PagedCache,
    batch: CacheBatch,
    layout: Layout,
    *,
    layer: int = 0,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    score: ScoreMod | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """Write a chunk's keys and values, and attend from its queries to all tokens of each sequence up to each query. A collective.

    Every rank calls it with its shards of the t new tokens that `extend` made room for. Chunk by chunk, it computes what `ring_attention`
    would for the whole sequence, and holds no more than the cache, a chunk, and what comes of other ranks. Keys are not gathered: if the
    chunk's queries are fewer bytes than the pages that they see, queries move and partials come back.

    Args:
        q: (b, s_local, h, d), k: (b, s_local, kv_heads, head_dim), v: (b, s_local, kv_heads, v_head_dim): this rank's rows of the new
            tokens in `layout`, in the cache's dtype, on its device. h is a multiple of kv_heads.
        cache: where keys and values go.
        batch: what `extend` of the cache returned for these sequences; before it, they may have any lengths.
        layout: of the t new tokens.
        layer: of the model.
        mask: causal by default; or `sliding_window(left)`.
        softmax_scale: 1/sqrt(d) by default.
        score: what else happens to scores, from `score(...)`: anything but dropout.
        schedule: what moves when; by default what moves fewer bytes of `default_schedule` and `pass_q`.

    Returns out (b, s_local, h, d_v) in q's dtype, in the order of `layout`. There is no backward pass. Raises ValueError for bad input, and
    on every rank if ranks disagree or one refuses its input. Source: chunked prefill (Agrawal et al. 2023), pass-Q (Yang et al. 2024).

    >>> import torch, ringattn as ra
    >>> cache = ra.PagedCache(pages=8, kv_heads=2, head_dim=16)
    >>> document, q, k, v = cache.add(), torch.randn(1, 96, 4, 16), *torch.randn(2, 1, 96, 2, 16)
    >>> parts = []
    >>> for chunk in (slice(0, 64), slice(64, 96)):
    ...     tokens = chunk.stop - chunk.start
    ...     batch = cache.extend([document], tokens)
    ...     parts.append(ra.prefill(q[:, chunk], k[:, chunk], v[:, chunk], cache, batch, ra.zigzag(tokens, 1)))
    >>> torch.allclose(torch.cat(parts, dim=1), ra.reference.attention(q, k, v), atol=1e-5)
    True
    """
    check.instance("cache", cache, PagedCache, "make one with PagedCache(...)")
    mask = _DEFAULT_MASK if mask is None else mask
    context = cache.pool.context
    with context.turn:
        with refusing(context.ranks):
            cache.check(batch)
            layer = cache.pool.check_layer(layer)
            check_shards(batch, k, v, layout)
            _check(q, k, v, batch, layout, mask, score, schedule)
            scale = check.softmax_scale(softmax_scale, q.shape[3])
        facts: dict[str, object] = {"function": "prefill", "layout": layout, "layer": layer, "mask": mask, "softmax_scale": scale}
        facts |= {"schedule": str(schedule), "score": "none" if score is None else score.kind}
        agree_on_call(batch, cache.history, q, facts)
        with torch.no_grad():
            chunks = _chunks(batch, layout, mask, q.shape[2], score is not None and score.kind.placed, schedule)
            fill(batch, k.detach(), v.detach(), layout, layer)
            return _attend(q.detach(), batch, chunks, layer, scale, score)


def _attend(
    q: torch.Tensor, batch: CacheBatch, chunks: list[_Alike], layer: int, softmax_scale: float, score: ScoreMod | None
) -> torch.Tensor:
    pool, (b, s, h, _) = batch.pool, q.shape
    slopes = values = sinks = None
    if score is not None:
        slopes, values, sinks, _ = score.tensors(torch.promote_types(q.dtype, torch.float32))
    out = q.new_empty(b, s, h, pool.v_head_dim)
    with torch.autocast(q.device.type, enabled=False):
        for chunk in chunks:
            own = slopes if slopes is None or len(slopes) == 1 else slopes.index_select(0, chunk.rows)
            modifiers = None if score is None else score.kind.modifiers(own, values, None, h)
            k, v = (_rows_of_pages(x[layer], chunk) for x in (pool.k, pool.v))
            found = chunk.work.forward(Score(softmax_scale, modifiers, sinks), q.index_select(0, chunk.rows), k, v, final=True)
            out.index_copy_(0, chunk.rows, found[0])
    return out


def _rows_of_pages(x: torch.Tensor, chunk: _Alike) -> torch.Tensor:
    """This rank's rows of the chunk's sequences, (n, tokens, hk, d), from pages (pages, hk, page_size, d)."""
    found = x.transpose(1, 2).index_select(0, chunk.pages.flatten())  # (n * pages, page_size, hk, d)
    return found.unflatten(0, chunk.pages.shape).flatten(1, 2)[:, : chunk.tokens]


def _chunks(batch: CacheBatch, layout: Layout, mask: Mask, h: int, placed: bool, schedule: Schedule | None) -> list[_Alike]:
    """What this rank does for the batch's sequences: those of one length, home and eviction together."""
    key = repr(("prefill", layout.digest, mask.digest, h, placed, schedule and schedule.digest))
    if key not in batch.plans:
        # all layers share it
        alike: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row, sequence in enumerate(batch.sequences):
            alike[sequence.length, sequence.home, sequence.evicted].append(row)
        batch.plans[key] = [_chunk(batch, rows, layout, mask, h, placed, schedule) for rows in alike.values()]
    return batch.plans[key]


def _chunk(
    batch: CacheBatch, rows: list[int], layout: Layout, mask: Mask, h: int, placed: bool, schedule: Schedule | None
) -> _Alike:
    pool, context = batch.pool, batch.pool.context
    sequences = [batch.sequences[row] for row in rows]
    first = sequences[0]
    runs = () if placed else alike_pages(first, pool.page_size, batch.tokens, window_of(mask, "prefill"))
    kv_layout = page_layout(first, pool.page_size, context.ranks.size, runs)
    # positions count from the first token that is not evicted: masks and scores know distances alone
    keys = Keys(kv_layout, kv_layout.seq_len - batch.tokens)
    traffic = None
    if schedule is None:
        traffic = RowTraffic.of(h, pool.kv_heads, pool.head_dim, pool.v_head_dim, pool.dtype.itemsize, backward=False)
    work = context.rank_attention(layout, mask, schedule, None, placed, keys, traffic)
    begin = first.evicted + (context.ranks.rank - first.home - first.evicted) % context.ranks.size
    pages = [sequence.pages[begin :: context.ranks.size] for sequence in sequences]
    sent = pool.sent([page for own in pages for page in own]).view(len(rows), len(pages[0]))
    return _Alike(pool.sent(rows), sent, kv_layout.lengths[context.ranks.rank], work)


def page_layout(sequence: CachedSequence, page_size: int, world_size: int, runs: Sequence[Run] = ()) -> Layout:
    """Which rank holds which tokens of a cached sequence, from the first that is not evicted.

    The pages of each of `runs` trade positions among themselves, so that those of a rank follow one another: one span instead of many.
    """
    length = sequence.length - sequence.evicted * page_size
    number = np.arange(-(-length // page_size))
    rank = (sequence.home + sequence.evicted + number) % world_size
    place = number.copy()
    for begin, end in runs:
        place[begin + rank[begin:end].argsort(kind="stable")] = number[begin:end]
    order = rank.argsort(kind="stable")
    start = (place * page_size)[order]
    return layout_of_pieces(rank[order], start, (start + page_size).clip(max=length), world_size, length, "pages")


def alike_pages(sequence: CachedSequence, page_size: int, tokens: int, window: int | None) -> list[Run]:
    """Runs of pages that the queries of the last `tokens` tokens see alike: those that none of them sees, and those that all see whole.

    Pages are counted from the first that is not evicted. window: how far back a query sees; None: to the first token.
    """
    length = sequence.length - sequence.evicted * page_size
    begin = length - tokens
    unseen = 0 if window is None else max(0, begin - window) // page_size
    seen = unseen if window is None else max(unseen, -(-(length - 1 - window) // page_size))
    return [(0, unseen), (seen, max(seen, begin // page_size))]


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: CacheBatch,
    layout: Layout,
    mask: Mask,
    score: ScoreMod | None,
    schedule: Schedule | None,
) -> None:
    """Check this rank's input."""
    check.tensors(q, k, v)
    (_, _, h, _), pool = q.shape, batch.pool
    pool.check_rows("q", q, (len(batch.sequences), layout.lengths[pool.context.ranks.rank], h, pool.head_dim))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("q, k or v requires gradients, but prefill has no backward pass: call it under torch.no_grad()")
    if h == 0 or h % pool.kv_heads:
        raise ValueError(f"q has {h} heads, but must have a multiple of the cache's {pool.kv_heads} key/value heads")
    if schedule is not None:
        check.instance("schedule", schedule, Schedule, check.BUILD_A_SCHEDULE)
        if schedule.by_memory:
            raise ValueError(f"schedule is {schedule}, but prefill takes waves by their width: pass waves(width)")
    if score is not None:
        check.instance("score", score, ScoreMod, check.BUILD_A_SCORE)
        score.check(q)
        if score.dropout:
            raise ValueError(f"score is {score.kind!r}, but prefill takes no dropout: leave it out")
        longest = max(sequence.length for sequence in batch.sequences)
        if score.kind.placed and longest > MOST_PLACES:
            raise ValueError(f"a sequence has {longest} tokens, but scores that depend on positions take at most 2**31")
    check_evicted(batch, batch.tokens, mask, window_of(mask, "prefill"))
