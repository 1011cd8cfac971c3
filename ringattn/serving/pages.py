"""Which page of which rank holds what: the books of a paged cache, equal on all ranks. No tensors, no communication.

Page j of a sequence lies on rank `(home + j) % ranks`, so that a sequence is balanced to one page however long it grows; an empty
sequence gets the rank with the most free pages as its home. Sequences share pages until one of them adds to a shared page, which is then
copied (PagedAttention, Kwon et al. 2023, sections 4.3 and 4.4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class OutOfPages(ValueError):
    """A rank has too few free pages. Every rank raises it, and nothing has changed: free or evict sequences, and call again."""


@dataclass(eq=False)
class CachedSequence:
    """A sequence of a `PagedCache`, which alone changes it. number: the same on all ranks. length: its tokens, on all ranks together."""

    number: int
    length: int = 0
    home: int = field(default=0, repr=False)  # the rank of page 0
    pages: list[int] = field(default_factory=list, repr=False)  # by their number on their ranks; -1 where evicted
    evicted: int = field(default=0, repr=False)  # pages
    edition: int = field(default=0, repr=False)  # how often it has changed


class PageCopy(NamedTuple):
    """On one rank, a page to copy to another before something is added there."""

    rank: int
    source: int
    target: int


class Pages:
    """The pages of all ranks, `count` of `size` tokens on each, and the sequences that hold them."""

    def __init__(self, ranks: int, count: int, size: int, max_tokens: int) -> None:
        self.ranks, self.count, self.size, self.max_tokens = ranks, count, size, max_tokens
        self.history = 0  # a digest of all that was done, to compare between ranks
        self._free = [list(range(count - 1, -1, -1)) for _ in range(ranks)]
        self._holders = [[0] * count for _ in range(ranks)]  # how many sequences hold a page
        self._live: dict[int, CachedSequence] = {}
        self._latest = 0

    def add(self) -> CachedSequence:
        """An empty sequence."""
        self._latest += 1
        self._live[self._latest] = found = CachedSequence(self._latest)
        self._note("add")
        return found

    def check(self, sequence: object) -> CachedSequence:
        """Raise ValueError unless it is a sequence that lives in these pages."""
        if not isinstance(sequence, CachedSequence):
            raise ValueError(
                f"sequences holds a {type(sequence).__name__}, but must hold what add() or fork() of this cache returned"
            )
        if self._live.get(sequence.number) is not sequence:
            raise ValueError(f"{sequence} does not live in this cache: it was freed, or is of another cache")
        return sequence

    def extend(self, sequences: Sequence[CachedSequence], tokens: int) -> list[PageCopy]:
        """Make room for `tokens` more tokens of each sequence; returns the pages to copy first. All or nothing."""
        homes, shared, needed = self._needed(sequences, tokens)
        for rank in range(self.ranks):
            if needed[rank] > len(self._free[rank]):
                raise OutOfPages(
                    f"rank {rank} has {len(self._free[rank])} free pages of {self.count}, but {tokens} more tokens of "
                    f"{len(sequences)} sequences need {needed[rank]} there: free, truncate or evict sequences first"
                )
        # what no pages are left for is an overflow, however long a sequence may be
        for sequence in sequences:
            if sequence.length + tokens > self.max_tokens:
                raise ValueError(
                    f"{sequence} would have {sequence.length + tokens} tokens, but the cache holds at most {self.max_tokens} of a "
                    "sequence: make it with a larger max_tokens"
                )
        copies = []
        for sequence, home in zip(sequences, homes, strict=True):
            sequence.home = home
            if sequence in shared:
                last = len(sequence.pages) - 1
                rank, source = self._rank(sequence, last), sequence.pages[last]
                sequence.pages[last] = self._take(rank)
                self._holders[rank][source] -= 1
                copies.append(PageCopy(rank, source, sequence.pages[last]))
            sequence.length += tokens
            for number in range(len(sequence.pages), -(-sequence.length // self.size)):
                sequence.pages.append(self._take((home + number) % self.ranks))
            sequence.edition += 1
        self._note("extend", tokens, *(sequence.number for sequence in sequences))
        return copies

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """Another sequence of the same tokens, in the same pages."""
        found = self.add()
        found.length, found.home, found.evicted, found.pages = (
            sequence.length,
            sequence.home,
            sequence.evicted,
            sequence.pages.copy(),
        )
        for number in range(found.evicted, len(found.pages)):
            self._holders[self._rank(found, number)][found.pages[number]] += 1
        # what is added to it from now on must not change the other
        sequence.edition += 1
        self._note("fork", sequence.number)
        return found

    def free(self, sequence: CachedSequence) -> None:
        """Give up a sequence and the pages that no other one holds."""
        self._drop(sequence, sequence.evicted, len(sequence.pages))
        del self._live[sequence.number]
        self._note("free", sequence.number)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget the tokens from `length` on."""
        least = sequence.evicted * self.size
        if not least <= length <= sequence.length:
            raise ValueError(f"length is {length}, but must be from {least} to {sequence.length}: {sequence} holds these tokens")
        kept = -(-length // self.size)
        self._drop(sequence, kept, len(sequence.pages))
        del sequence.pages[kept:]
        sequence.length = length
        sequence.edition += 1
        self._note("truncate", sequence.number, length)

    def evict(self, sequence: CachedSequence, before: int) -> None:
        """Give up the pages that hold only tokens before a position."""
        if not 0 <= before <= sequence.length:
            raise ValueError(f"before is {before}, but must be from 0 to {sequence.length}, the length of {sequence}")
        end = max(before // self.size, sequence.evicted)
        self._drop(sequence, sequence.evicted, end)
        sequence.pages[sequence.evicted : end] = [-1] * (end - sequence.evicted)
        sequence.evicted = end
        sequence.edition += 1
        self._note("evict", sequence.number, before)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(map(len, self._free))

    @property
    def waste(self) -> float:
        """The share of the slots of all held pages that hold no token; a page that is shared counts once. 0.0 if no page is held."""
        filled: dict[tuple[int, int], int] = {}
        for sequence in self._live.values():
            for number in range(sequence.evicted, len(sequence.pages)):
                page = self._rank(sequence, number), sequence.pages[number]
                tokens = min(self.size, sequence.length - number * self.size)
                filled[page] = max(tokens, filled.get(page, 0))
        return 1 - sum(filled.values()) / (len(filled) * self.size) if filled else 0.0

    def _needed(self, sequences: Sequence[CachedSequence], tokens: int) -> tuple[list[int], set[CachedSequence], list[int]]:
        """The homes of sequences that get more tokens, those whose last page must be copied, and the pages that each rank gives."""
        needed, homes, shared = [0] * self.ranks, [], set()
        left: dict[tuple[int, int], int] = {}  # holders of a page, less those that will hold a copy
        for sequence in sequences:
            home = sequence.home
            if not sequence.pages:
                home = max(range(self.ranks), key=lambda rank: len(self._free[rank]) - needed[rank])
            elif sequence.length % self.size and tokens:
                rank, page = self._rank(sequence, len(sequence.pages) - 1), sequence.pages[-1]
                holders = left.get((rank, page), self._holders[rank][page])
                if holders > 1:
                    left[rank, page] = holders - 1
                    needed[rank] += 1
                    shared.add(sequence)
            homes.append(home)
            begin, end = len(sequence.pages), -(-(sequence.length + tokens) // self.size)
            for i in range(min(self.ranks, end - begin)):
                needed[(home + begin + i) % self.ranks] += -(-(end - begin - i) // self.ranks)
        return homes, shared, needed

    def _rank(self, sequence: CachedSequence, number: int) -> int:
        return (sequence.home + number) % self.ranks

    def _take(self, rank: int) -> int:
        page = self._free[rank].pop()
        self._holders[rank][page] = 1
        return page

    def _drop(self, sequence: CachedSequence, begin: int, end: int) -> None:
        for number in range(begin, end):
            rank, page = self._rank(sequence, number), sequence.pages[number]
            self._holders[rank][page] -= 1
            if not self._holders[rank][page]:
                self._free[rank].append(page)

    def _note(self, *what: object) -> None:
        text = repr((self.history, *what)).encode()
        self.history = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
