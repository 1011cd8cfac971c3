"""Fills a paged cache from shards: each row goes once, from the rank that has it to the rank that keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import check
from ..geometry.layout import Layout
from ..transport import Peer
from .batch import CacheBatch


@dataclass(frozen=True)
class _Filling:
    """What a rank sends to each rank, itself too, and where it keeps what each rank sends.

    rows: by rank, rows of this rank's shards, (b, s_local) as one dimension. slots: by rank, pages of this rank and slots there, (2, n).
    """

    rows: list[torch.Tensor]
    slots: list[torch.Tensor]


def check_shards(batch: CacheBatch, k: Any, v: Any, layout: Any) -> None:
    """Raise ValueError unless k and v are this rank's shards of the batch's new tokens."""
    pool, ranks = batch.pool, batch.pool.context.ranks
    check.instance("layout", layout, Layout, "pass the layout that the shards were made with")
    if layout.world_size != ranks.size:
        raise ValueError(f"layout {layout!r} is for {layout.world_size} ranks, but the cache has {ranks.size}")
    if layout.seq_len != batch.tokens:
        raise ValueError(
            f"layout {layout!r} is of {layout.seq_len} tokens, but the batch has {batch.tokens} new ones: extend by as many"
        )
    held = layout.lengths[ranks.rank]
    for name, x, dim in (("k", k, pool.head_dim), ("v", v, pool.v_head_dim)):
        pool.check_rows(name, x, (len(batch.sequences), held, pool.kv_heads, dim))


def fill(batch: CacheBatch, k: torch.Tensor, v: torch.Tensor, layout: Layout, layer: int) -> None:
    """Send rows of shards to the ranks that keep them, in one message a rank, and keep what comes."""
    if layout.digest not in batch.plans:
        # all layers share it
        batch.plans[layout.digest] = _filling(batch, layout)
    filling: _Filling = batch.plans[layout.digest]
    pool, transport = batch.pool, batch.pool.context.transport
    own = transport.rank
    shards = [x.reshape(-1, *x.shape[2:]) for x in (k, v)]
    widths = pool.kv_heads * pool.head_dim, pool.kv_heads * pool.v_head_dim
    # both sides know where there is nothing to send
    sends = [
        Peer(rank, torch.cat([x.index_select(0, rows).flatten() for x in shards]))
        for rank, rows in enumerate(filling.rows)
        if rank != own and len(rows)
    ]
    receives = [
        Peer(rank, k.new_empty(slots.shape[1] * sum(widths)))
        for rank, slots in enumerate(filling.slots)
        if rank != own and slots.shape[1]
    ]
    handle = transport.exchange(sends, receives)
    keys, values = (x.index_select(0, filling.rows[own]) for x in shards)
    pool.store(filling.slots[own], keys, values, layer)
    handle.wait()
    for rank, message in receives:
        slots = filling.slots[rank]
        keys, values = message.split([slots.shape[1] * width for width in widths])
        pool.store(slots, keys.view(-1, *k.shape[2:]), values.view(-1, *v.shape[2:]), layer)


def _filling(batch: CacheBatch, layout: Layout) -> _Filling:
    pool, ranks = batch.pool, batch.pool.context.ranks
    rows, slots = [], []
    for rank in range(ranks.size):
        # both ends list rows sequence by sequence, in the order of the sender's rows
        keepers = _keepers(batch, layout.positions(ranks.rank).numpy())
        rows.append(pool.sent(np.flatnonzero(keepers == rank)))
        positions = layout.positions(rank).numpy()
        sequence, row = np.nonzero(_keepers(batch, positions) == ranks.rank)
        index = pool.sent(sequence * batch.tokens + positions[row])
        slots.append(batch.slots.flatten(1).index_select(1, index))
    return _Filling(rows, slots)


def _keepers(batch: CacheBatch, positions: np.ndarray) -> np.ndarray:
    """(b, positions): the rank that keeps each of some of the new tokens."""
    begin, homes = (np.array(x)[:, None] for x in zip(*((x.length - batch.tokens, x.home) for x in batch.sequences)))
    return (homes + (begin + positions) // batch.pool.page_size) % batch.pool.context.ranks.size
