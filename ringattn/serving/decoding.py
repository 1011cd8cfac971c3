"""`decode`: attention of the newest tokens of some sequences to a paged cache.

Each rank computes the partial of its own pages; ranks swap these once, and each merges them in the order of ranks.

Shapes: b sequences, t query tokens of each, h query heads, d and d_v head dims.
"""

from __future__ import annotations

import torch

from ringattn_kernels.page_table import NO_WINDOW

from .. import check
from ..device import local
from ..geometry.mask import Causal, Mask, SlidingWindow, causal
from ..runtime.agree import refusing
from ..scores import Score, ScoreMod
from .agreement import agree_on_call
from .batch import CacheBatch
from .cache import PagedCache

MOST_QUERIES = 16  # tokens of a sequence in one call

_DEFAULT_MASK = causal()


def decode(
    q: torch.Tensor,
    cache: PagedCache,
    batch: CacheBatch,
    *,
    layer: int = 0,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    score: ScoreMod | None = None,
) -> torch.Tensor:
    """softmax(softmax_scale * q k^T) v of the last t tokens of each sequence over all of its tokens up to each. A collective.

    Every rank calls it with the same q and the same options, after it has written the new tokens' keys and values of the layer; every
    rank gets the same result, bit for bit. Source: flash-decoding (Dao et al. 2023) over pages (Kwon et al. 2023), with the block-merge
    formula of `partial.py` between ranks.

    Args:
        q: (b, t, h, d), in the cache's dtype, on its device, with t from 1 to 16: row j of a sequence of n tokens is at position n - t + j.
        cache: where the keys and values are.
        batch: what `extend` of the cache returned last for these sequences; they may have different lengths.
        layer: of the model.
        mask: causal by default; or `sliding_window(left)`.
        softmax_scale: 1/sqrt(d) by default.
        score: what else happens to scores, from `score(...)`: a softcap, ALiBi, sinks (each row counts them once, on any number of ranks).

    Returns out (b, t, h, d_v) in q's dtype. There is no backward pass. Raises ValueError for bad input, and on every rank if ranks disagree
    or one refuses its input. The same call gives the same bits.

    After the same call has been made once, all ranks together can capture it in a CUDA graph; `extend(..., into=batch)` then moves the
    replays on to the next tokens.

    >>> import torch, ringattn as ra
    >>> cache = ra.PagedCache(pages=8, kv_heads=2, head_dim=16)
    >>> batch = cache.extend([cache.add(), cache.add()], 3)
    >>> cache.append(batch, torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16))
    >>> ra.decode(torch.randn(2, 3, 4, 16), cache, batch, mask=ra.sliding_window(1)).shape
    torch.Size([2, 3, 4, 16])
    """
    check.instance("cache", cache, PagedCache, "make one with PagedCache(...)")
    mask = _DEFAULT_MASK if mask is None else mask
    context = cache.pool.context
    with context.turn:
        with refusing(context.ranks):
            cache.check(batch)
            layer = cache.pool.check_layer(layer)
            window = _check(q, batch, mask, score)
            scale = check.softmax_scale(softmax_scale, q.shape[3])
        facts: dict[str, object] = {"function": "decode", "number of query tokens": q.shape[1], "layer": layer}
        facts |= {"mask": mask, "softmax_scale": scale, "score": "none" if score is None else score.kind}
        agree_on_call(batch, cache.history, q, facts)
        # kernels read rows of contiguous numbers
        q = q.detach() if q.stride(3) == 1 else q.detach().contiguous()
        return _attend(q, batch, layer, window, scale, score)


def _attend(
    q: torch.Tensor,
    batch: CacheBatch,
    layer: int,
    window: int | None,
    softmax_scale: float,
    score: ScoreMod | None,
) -> torch.Tensor:
    """This rank's partial, all ranks' partials, and their merge."""
    (b, t, h, _), pool = q.shape, batch.pool
    dtype = torch.promote_types(q.dtype, torch.float32)
    modifiers = sinks = None
    if score is not None:
        slopes, _, sinks, _ = score.tensors(dtype)
        modifiers = score.kind.modifiers(slopes, None, None, h)
    arguments = q, pool.k[layer], pool.v[layer], batch.table, Score(softmax_scale, modifiers), window
    transport = pool.context.transport
    if transport.size == 1:
        return local.attend_pages(*arguments, sinks=sinks)
    packed = q.new_empty(transport.size, b * t * h * (pool.v_head_dim + 2), dtype=dtype)
    local.attend_pages(*arguments, packed=packed[transport.rank])
    transport.all_gather(packed)
    return local.merge_packed(packed, q, pool.v_head_dim, sinks)


def _check(q: torch.Tensor, batch: CacheBatch, mask: Mask, score: ScoreMod | None) -> int | None:
    """Check this rank's input; the window of the mask, or None."""
    check.tensors(q, q, q)
    (_, t, h, _), pool = q.shape, batch.pool
    pool.check_rows("q", q, (len(batch.sequences), t, h, pool.head_dim))
    if torch.is_grad_enabled() and q.requires_grad:
        raise ValueError("q requires gradients, but decode has no backward pass: call it under torch.no_grad()")
    if h == 0 or h % pool.kv_heads:
        raise ValueError(f"q has {h} heads, but must have a multiple of the cache's {pool.kv_heads} key/value heads")
    shortest = min(batch.sequences, key=lambda sequence: sequence.length)
    if not 1 <= t <= min(MOST_QUERIES, shortest.length):
        raise ValueError(
            f"q has {t} tokens, but must have from 1 to {MOST_QUERIES}, and at most as many as each sequence: {shortest}"
        )
    if score is not None:
        check.instance("score", score, ScoreMod, check.BUILD_A_SCORE)
        score.check(q)
        if score.bias is not None or score.dropout:
            raise ValueError(f"score is {score.kind!r}, but decode takes a softcap, alibi and sinks: pass these alone")
    window = window_of(mask, "decode")
    check_evicted(batch, t, mask, window)
    return window


def check_evicted(batch: CacheBatch, t: int, mask: Mask, window: int | None) -> None:
    """Raise ValueError if the mask, of this window, lets the last t tokens see evicted ones."""
    pool = batch.pool
    for sequence in batch.sequences:
        oldest = 0 if window is None else max(0, sequence.length - t - window)
        if oldest < sequence.evicted * pool.page_size:
            raise ValueError(
                f"mask is {mask!r}, which sees the token {oldest} of {sequence}, but the tokens before "
                f"{sequence.evicted * pool.page_size} are evicted: pass a shorter window, or evict less"
            )


def window_of(mask: Mask, function: str) -> int | None:
    """How many tokens before itself a query sees; None: all."""
    if isinstance(mask, Causal):
        return None
    if isinstance(mask, SlidingWindow) and mask.right == 0:
        return None if mask.left is None else min(mask.left, NO_WINDOW)
    raise ValueError(f"mask is {check.shown(mask)}, but {function} takes causal() and sliding_window(left): pass one of these")
