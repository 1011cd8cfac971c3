"""`PagedCache`: the keys and values of many sequences, in pages on the devices of all ranks (Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringattn_kernels.page_table import NO_WINDOW

from .. import check
from ..geometry.layout import Layout
from ..runtime.agree import refusing
from ..runtime.groups import Group, get_context
from .agreement import agree_on_call
from .batch import CacheBatch
from .filling import check_shards, fill
from .pages import CachedSequence, Pages
from .pool import PagePool


class PagedCache:
    """Keys and values of many sequences for all layers of a model, in pages on every rank. Every rank makes the same calls, in one order.

    Args:
        pages: of each rank. All layers share a page's number: it takes layers * kv_heads * page_size * (head_dim + v_head_dim) elements.
        kv_heads, head_dim, v_head_dim: of k (b, t, kv_heads, head_dim) and v; v_head_dim is head_dim by default.
        layers: of the model.
        page_size: tokens of a page, a power of two of at least 16.
        max_tokens: of a sequence, below 2**30; by default what all pages hold. It bounds the width of block tables.
        dtype, device: of the pages: bf16, fp16 or fp32, or fp64 on a CPU; by default torch's own.
        group: as for `ring_attention`, with one axis.

    A sequence's page j lies on rank `(home + j) % world_size`: ranks hold equal shares, to one page, however long sequences grow.
    Where a sequence ends, a page is filled in part: `waste` counts it. One more page a rank takes what other ranks keep.

    Calls but for `fill` and `decode` are not collective: no rank waits for another. Raises ValueError for bad input.

    >>> import torch, ringattn as ra
    >>> cache = ra.PagedCache(pages=8, kv_heads=2, head_dim=16)
    >>> batch = cache.extend([cache.add()], 5)
    >>> k = v = torch.randn(1, 5, 2, 16)
    >>> cache.append(batch, k, v)
    >>> ra.decode(torch.randn(1, 1, 4, 16), cache, batch).shape
    torch.Size([1, 1, 4, 16])
    """

    def __init__(
        self,
        *,
        pages: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        layers: int = 1,
        page_size: int = 64,
        max_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        group: Group | None = None,
    ) -> None:
        context = get_context(group)
        sizes = dict(kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, layers=layers, page_size=page_size)
        with context.turn, refusing(context.ranks):
            self.pool = PagePool(context, pages=pages, **sizes, dtype=dtype, device=device)
            if max_tokens is None:
                max_tokens = min(self.pool.pages * self.pool.page_size * context.ranks.size, NO_WINDOW - 1)
            self.max_tokens = check.integer("max_tokens", max_tokens, least=1, most=NO_WINDOW - 1)
        self._pages = Pages(context.ranks.size, self.pool.pages, self.pool.page_size, self.max_tokens)
        self._turn, self._ranks = context.turn, context.ranks

    @property
    def history(self) -> int:
        """A digest of all that was done to the sequences: 63 bits, equal on ranks that have made the same calls."""
        return self._pages.history

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Free pages of each rank."""
        return self._pages.free_pages

    @property
    def waste(self) -> float:
        """The share of the slots of held pages that hold no token, over all ranks. A page that sequences share counts once."""
        return self._pages.waste

    def add(self) -> CachedSequence:
        """A new sequence without tokens."""
        with self._turn:
            return self._pages.add()

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A sequence with the same tokens, in the same pages: what either adds, the other does not see.

        A page that both hold is copied when one of them adds to it. Raises ValueError for a sequence that does not live here.
        """
        with self._turn, refusing(self._ranks):
            return self._pages.fork(self._pages.check(sequence))

    def free(self, sequence: CachedSequence) -> None:
        """Give up a sequence. Raises ValueError for one that does not live here, such as one that was freed before."""
        with self._turn, refusing(self._ranks):
            self._pages.free(self._pages.check(sequence))

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget the tokens from `length` on, such as those that speculative decoding rejects. Raises ValueError for bad input."""
        with self._turn, refusing(self._ranks):
            self._pages.truncate(self._pages.check(sequence), check.integer("length", length))

    def evict(self, sequence: CachedSequence, before: int) -> None:
        """Give up the pages that hold only tokens before this position, for models whose windows see no farther back.

        `decode` refuses masks that see evicted tokens. Raises ValueError for bad input.
        """
        with self._turn, refusing(self._ranks):
            self._pages.evict(self._pages.check(sequence), check.integer("before", before))

    def extend(self, sequences: Sequence[CachedSequence], tokens: int, into: CacheBatch | None = None) -> CacheBatch:
        """Make room for `tokens` more tokens of each sequence, in all layers; `append` and `fill` then write them.

        into: a batch of the same sequences and tokens, whose device tensors are overwritten: what a CUDA graph reads in its replays.

        Raises `OutOfPages`, a ValueError, if a rank has too few pages, and ValueError for bad input. Then nothing has changed.
        """
        with self._turn, refusing(self._ranks):
            found = tuple(self._pages.check(x) for x in check.listed("sequences", sequences, "a list of sequences of this cache"))
            tokens = check.integer("tokens", tokens)
            if not found or len(set(found)) < len(found):
                raise ValueError(f"sequences holds {len(found)}, {len(set(found))} of them different: pass each once, at least one")
            if into is not None:
                self._check_into(into, found, tokens)
            before = [(x.length, x.edition) for x in found]
            copies = self._pages.extend(found, tokens)
        mine = [copy for copy in copies if copy.rank == self._ranks.rank]
        self.pool.copy([copy.source for copy in mine], [copy.target for copy in mine])
        batch = CacheBatch.empty(self.pool, found, tokens, self.max_tokens) if into is None else into
        batch.update(before)
        return batch

    def append(self, batch: CacheBatch, k: torch.Tensor, v: torch.Tensor, *, layer: int = 0) -> None:
        """Write the keys and values of a batch's new tokens, which every rank has computed; each rank keeps those of its own pages.

        k: (b, t, kv_heads, head_dim), v: (b, t, kv_heads, v_head_dim), in the cache's dtype, on its device.

        Raises ValueError for bad input.
        """
        with self._turn, refusing(self._ranks):
            self.check(batch)
            layer = self.pool.check_layer(layer)
            for name, x, dim in (("k", k, self.pool.head_dim), ("v", v, self.pool.v_head_dim)):
                self.pool.check_rows(name, x, (len(batch.sequences), batch.tokens, self.pool.kv_heads, dim))
        self.pool.store(batch.slots, k.detach(), v.detach(), layer)

    def fill(self, batch: CacheBatch, k: torch.Tensor, v: torch.Tensor, layout: Layout, *, layer: int = 0) -> None:
        """Write the keys and values of a batch's new tokens from the shards that a call of `ring_attention` takes. A collective.

        k: (b, s_local, kv_heads, head_dim), v: (b, s_local, kv_heads, v_head_dim): what this rank holds in `layout`, which is of the
        batch's new tokens. Each row goes from the rank that has it straight to the rank that keeps it; no rank gathers the sequence.

        Raises ValueError for bad input, and on every rank if ranks disagree or one refuses its input.
        """
        with self._turn:
            with refusing(self._ranks):
                self.check(batch)
                layer = self.pool.check_layer(layer)
                check_shards(batch, k, v, layout)
            agree_on_call(batch, self.history, k, {"function": "PagedCache.fill", "layout": layout, "layer": layer})
            fill(batch, k.detach(), v.detach(), layout, layer)

    def check(self, batch: Any) -> None:
        """Raise ValueError unless it is a batch of this cache, and up to date."""
        self._ranks.order.check()
        check.instance("batch", batch, CacheBatch, "make one with extend")
        if batch.pool is not self.pool:
            raise ValueError("batch is of another cache: make one with extend of this cache")
        for sequence in batch.sequences:
            self._pages.check(sequence)
        batch.check()

    def __repr__(self) -> str:
        return f"PagedCache({self.pool!r}, max_tokens={self.max_tokens})"

    def _check_into(self, into: Any, sequences: tuple[CachedSequence, ...], tokens: int) -> None:
        check.instance("into", into, CacheBatch, "pass a batch that extend of this cache returned")
        if into.pool is not self.pool or into.sequences != sequences or into.tokens != tokens:
            raise ValueError(f"into is a batch of {into.tokens} tokens of other sequences or another cache: pass one of the same")
