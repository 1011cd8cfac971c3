"""Channels: messages cut into chunks, and the place of each chunk in the ring buffer of its pair of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .memory import Addressed, Count, Part, PlacedChunk

ALIGNMENT = 512  # bytes

# messages, or parts of them, each as (the tensor's number, first byte, bytes)
Messages = Sequence[tuple[int, int, int]]


class Chunk(NamedTuple):
    """Messages, or parts of messages, side by side: `nbytes` in all. A channel's counts count chunks."""

    parts: tuple[Part, ...]
    nbytes: int


class Channel:
    """The places of the chunks from one rank to another, in a ring buffer. Both ends get the same places from the same sizes.

    Every arena holds one channel of each distance between sender and reader, one after the other from byte `begin` on. A `near` channel
    lies with the sender; a far one lies with a third rank, or with the reader where there are two ranks.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        size: int,
        capacity: int,
        *,
        sends: bool,
        near: bool = False,
        begin: int = 0,
        captured: bool = False,
    ) -> None:
        self._capacity = usable(capacity)
        src, dst = (rank, peer) if sends else (peer, rank)
        distance = (dst - src) % size
        third = distance + 1 if distance + 1 < size else 1
        self.keeper = src if near else (src + third) % size
        self.ready, self.read = Count(near, True, peer, captured), Count(near, False, peer, captured)
        self.awaited = 0  # the greatest value of `read` that the sender has queued a wait for
        self.count = 0  # chunks placed so far
        self._base = begin + (distance - 1) * capacity
        self._head = 0
        self._occupied: dict[int, tuple[int, int]] = {}  # (begin, end) of each chunk from number `_oldest` on
        self._oldest = 0

    def has_to_await(self, must_be_read: int) -> bool:
        """Whether the sender still has to wait until so many chunks are read; it does so now."""
        if must_be_read <= self.awaited:
            return False
        self.awaited = must_be_read
        return True

    def place(self, chunk: Chunk, tensors: Sequence[Addressed]) -> PlacedChunk:
        """The next chunk's place."""
        # past the constructor, a function in Python that takes as long as the rest
        return tuple.__new__(PlacedChunk, (tensors, chunk.parts, self.keeper, *self.next(chunk.nbytes)))  # pyrefly: ignore[bad-specialization]

    def next(self, nbytes: int) -> tuple[int, int]:
        """The offset of the next chunk, of so many bytes, and what must be read before: see `PlacedChunk`."""
        # a function less than with a deque: recorded passes come here for each chunk
        count, occupied, first, oldest, must_be_read = self.count, self._occupied, self._head, self._oldest, 0
        if first + nbytes > self._capacity:
            # wrap around; the chunks behind `first` are older than all those at the start
            while oldest < count and occupied[oldest][0] >= first:
                del occupied[oldest]
                must_be_read = oldest = oldest + 1
            first = 0
        self._head = end = first + nbytes
        while oldest < count and occupied[oldest][0] < end and occupied[oldest][1] > first:
            del occupied[oldest]
            must_be_read = oldest = oldest + 1
        occupied[count] = first, end
        self.count, self._oldest = count + 1, oldest
        return self._base + first, must_be_read


class Channels:
    """A rank's channels to each other rank (`out`) and from each other rank (`into`): pairs of a far and a near channel."""

    def __init__(self, rank: int, size: int, capacity: int, *, captured: bool = False) -> None:
        far, near = shares(size, capacity)

        def pair(peer: int, sends: bool) -> tuple[Channel, Channel]:
            return (
                Channel(rank, peer, size, far, sends=sends, captured=captured),
                Channel(rank, peer, size, near, sends=sends, captured=captured, near=True, begin=far * (size - 1)),
            )

        others = [other for other in range(size) if other != rank]
        self.out: Mapping[int, tuple[Channel, ...]] = {dst: pair(dst, True) for dst in others}
        self.into: Mapping[int, tuple[Channel, ...]] = {src: pair(src, False) for src in others}


def shares(size: int, capacity: int) -> tuple[int, int]:
    """Bytes of a pair's far and near channel. Of two ranks the far channel gets the smaller share: its chunks wait for the reader."""
    far = capacity // 2 if size > 2 else max(2, capacity // (4 * ALIGNMENT)) * ALIGNMENT
    return far, capacity - far


def usable(capacity: int) -> int:
    """The bytes of a channel that are used: two halves of aligned places."""
    used = capacity // (2 * ALIGNMENT) * (2 * ALIGNMENT)
    assert used, capacity
    return used


def padded(nbytes: int) -> int:
    """The bytes that a part of a message takes in a channel."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def make_chunks(messages: Messages, largest: int) -> list[Chunk]:
    """Messages in chunks of at most `largest` bytes."""
    found: list[list[Part]] = []
    end = largest  # of the last chunk
    for number, first, nbytes in messages:
        for begin in range(0, nbytes, largest):
            part = min(largest, nbytes - begin)
            if end + padded(part) > largest:
                found.append([])
                end = 0
            found[-1].append(Part(number, first + begin, part, end))
            end += padded(part)
    return [Chunk(tuple(parts), parts[-1].offset + padded(parts[-1].nbytes)) for parts in found]


def split_at(messages: Messages, capacity: int, largest: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """What a channel of `capacity` bytes holds at once, in chunks of at most `largest` bytes, and the rest of the messages."""
    # the place at the channel's end may be too small for a chunk
    free = capacity - largest
    first, rest = [], []
    for number, begin, nbytes in messages:
        fits = min(nbytes, free)
        free -= padded(fits)
        if fits:
            first.append((number, begin, fits))
        if fits < nbytes:
            rest.append((number, begin + fits, nbytes - fits))
    return first, rest
