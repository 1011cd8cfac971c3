"""`CacheBatch`: what kernels read of the sequences that are decoded together.

Shapes: b sequences, t new tokens of each, n columns of a block table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ringattn_kernels.page_table import PageTable

from .pages import CachedSequence
from .pool import PagePool


@dataclass(eq=False)
class CacheBatch:
    """Sequences of a cache that are decoded together, with the room that `extend` made for their newest `tokens` tokens.

    It holds what changes from step to step on the device: lengths, the block tables of this rank's pages, and where this rank keeps
    the new tokens. It is out of date once one of its sequences changes otherwise.
    """

    pool: PagePool = field(repr=False)
    sequences: tuple[CachedSequence, ...]
    tokens: int
    table: PageTable = field(repr=False)
    state: torch.Tensor = field(repr=False)  # (2 + 2 * t, b) int64: lengths, first pages, and pages and slots of the new tokens
    editions: list[int] = field(repr=False)  # of the sequences
    plans: dict[str, Any] = field(default_factory=dict, repr=False)  # of fillings, by their layouts' digests

    @classmethod
    def empty(cls, pool: PagePool, sequences: tuple[CachedSequence, ...], tokens: int, max_tokens: int) -> CacheBatch:
        """One that is not up to date, with room in its table for sequences of `max_tokens` tokens."""
        b, ranks = len(sequences), pool.context.ranks.size
        width = -(-max_tokens // (pool.page_size * ranks))
        state = torch.zeros(2 + 2 * tokens, b, dtype=torch.int64, device=pool.device)
        table = PageTable(state[0], state[1], torch.zeros(b, width, dtype=torch.int32, device=pool.device), ranks)
        return cls(pool, sequences, tokens, table, state, [-1] * b)

    @cached_property
    def digest(self) -> int:
        """Of its sequences' numbers and its tokens: 63 bits, equal on ranks that have made the same batch."""
        text = repr((self.tokens, [sequence.number for sequence in self.sequences])).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    @property
    def slots(self) -> torch.Tensor:
        """(2, b, t) int64: the pages of the new tokens, and their slots there; the page past all others for tokens of other ranks."""
        return self.state[2:].unflatten(0, (2, self.tokens)).transpose(1, 2)

    def without_last(self, tokens: int) -> CacheBatch:
        """The same batch for queries that see nothing of each sequence's last tokens: `decode` takes its queries for those before them."""
        return replace(self, table=replace(self.table, lengths=self.table.lengths - tokens)) if tokens else self

    def check(self) -> None:
        """Raise ValueError if a sequence has changed since the batch was made."""
        for sequence, edition in zip(self.sequences, self.editions):
            if sequence.edition != edition:
                raise ValueError(
                    f"{sequence} has changed since this batch was made: make another one with extend, which for 0 tokens adds none"
                )

    def update(self, before: list[tuple[int, int]]) -> None:
        """Bring the tensors up to date. before: length and edition that each sequence had before its latest change, an extension."""
        ranks, width = self.pool.context.ranks, self.table.pages.shape[1]
        firsts = [(ranks.rank - sequence.home) % ranks.size for sequence in self.sequences]
        at, pages = [], []
        for row, (sequence, first, (length, edition)) in enumerate(zip(self.sequences, firsts, before)):
            # a row that was up to date lacks new pages alone: its last page was its own, if there was room in it
            right = -(-length // self.pool.page_size) if edition == self.editions[row] else 0
            column = max(0, -((first - right) // ranks.size))
            fresh = sequence.pages[first + column * ranks.size :: ranks.size]
            at += range(row * width + column, row * width + column + len(fresh))
            pages += fresh
        if at:
            self.table.pages.view(-1).index_copy_(0, self.pool.sent(at), self.pool.sent(pages).to(torch.int32))
        lengths = [sequence.length for sequence in self.sequences]
        self.state.copy_(self.pool.sent(np.concatenate([np.array([lengths, firsts]), *self._slots()])))
        self.editions[:] = [sequence.edition for sequence in self.sequences]
        self.plans.clear()

    def _slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Pages and slots, (t, b), where this rank keeps each new token."""
        ranks, size = self.pool.context.ranks, self.pool.page_size
        begin = np.array([sequence.length - self.tokens for sequence in self.sequences])
        begun = begin // size
        tails = [sequence.pages[page:] for sequence, page in zip(self.sequences, begun.tolist())]
        longest = max(1, *map(len, tails))
        pages = np.array([tail + [0] * (longest - len(tail)) for tail in tails]).T
        positions = begin + np.arange(self.tokens)[:, None]
        number = positions // size
        mine = (np.array([sequence.home for sequence in self.sequences]) + number) % ranks.size == ranks.rank
        return np.where(mine, np.take_along_axis(pages, number - begun, 0), self.pool.pages), positions % size
