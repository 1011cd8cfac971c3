"""Messages through memory that ranks map: the protocol, apart from any device.

Each ordered pair of ranks has a channel: a part of some rank's arena, used as a ring. Both ends place the pair's messages in it by
the same rule, from their sizes alone, so that nothing is negotiated. The sender waits until the reader has read what lay there
before, copies a message into its place, and raises the reader's count of what is ready; the reader waits for that, pulls the
message straight into its target, and raises the sender's count of what is read. Counts only grow, and each is written by one rank
and waited for by the other, in its own memory.

A channel lies with a third rank where there is one: then both copies are between GPUs, which copy engines do beside kernels that
fill them; a copy within a GPU needs its multiprocessors. Two ranks have nobody else: there the channel lies with the sender, who
stages before it computes. So does a second, near channel of each pair, for small messages of an exchange that is at rest: they cross
the links once, and are with the reader in half the time.

All of it is queued: the host waits for nothing. Stages and pulls are queued so that each waits only for what some rank has queued
before, in the order of exchanges and of rounds within one: ranks that name a message in the same exchange never wait in a circle,
even where a device runs all its streams as one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from .base import Done, Handle, Peer, Ranks, Transport

_ALIGNMENT = 512  # bytes
_BURST = 16 << 20  # bytes of a message that are staged before the first of them are pulled

Mark = Any  # a point in a queue


class Piece(NamedTuple):
    """`nbytes` of a tensor from byte `begin`, as the `number`-th piece of a channel, at `offset` in the keeper's arena.

    Its place is free once the reader has read the channel's first `needs` pieces.
    """

    tensor: torch.Tensor
    begin: int
    nbytes: int
    number: int
    keeper: int
    offset: int
    needs: int


class Count(NamedTuple):
    """How many pieces of a channel, `near` or not, are `ready`, kept by the reader, or read, kept by the sender, to or from a `peer`."""

    near: bool
    ready: bool
    peer: int
    value: int


class Queue(ABC):
    """Operations that run one after another, beside all that other queues run."""

    @abstractmethod
    def mark(self) -> Mark:
        """All that is queued so far."""

    @abstractmethod
    def after(self, mark: Mark) -> None:
        """Go on when another queue has come to a mark."""

    @abstractmethod
    def wait(self, counts: Sequence[Count]) -> None:
        """Go on when this rank's counts have come to these values, or beyond."""

    @abstractmethod
    def stage(self, pieces: Sequence[Piece]) -> None:
        """Copy from tensors to their places."""

    @abstractmethod
    def pull(self, pieces: Sequence[Piece]) -> None:
        """Copy from places to tensors."""

    @abstractmethod
    def raise_to(self, counts: Sequence[Count]) -> None:
        """Set these counts at their peers, when all before has been done."""


class Memory(ABC):
    """A rank's arena with room for `size` - 1 channels of `capacity` bytes, its counts, and the arenas and counts of all others."""

    rank: int
    size: int
    capacity: int

    @property
    @abstractmethod
    def current(self) -> Queue:
        """The queue that computes."""

    @abstractmethod
    def queue(self) -> Queue:
        """A new queue."""


class Channel:
    """Where the pieces of an ordered pair of ranks lie: the same sequence of sizes gives the same places.

    Each rank keeps one channel of each distance, one after the other from byte `begin` of its arena on. `near`: with the sender.
    """

    def __init__(self, src: int, dst: int, size: int, capacity: int, *, near: bool = False, begin: int = 0) -> None:
        self._capacity = capacity // (2 * _ALIGNMENT) * (2 * _ALIGNMENT)
        assert self._capacity, capacity
        distance = (dst - src) % size
        third = distance + 1 if distance + 1 < size else 1
        self.near = near or size == 2
        self.keeper = src if self.near else (src + third) % size
        self._base = begin + (distance - 1) * capacity
        self._head = 0
        self._lying: deque[tuple[int, int, int]] = deque()  # (number, begin, end), oldest first
        self.count = 0

    def holds_two(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether there is room for these messages beside as many others: then none of them waits for another to be read."""
        return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors) <= self._capacity // 2

    def rounds(self, tensors: Iterable[torch.Tensor]) -> list[list[Piece]]:
        """Pieces of the next messages. Those of one round lie beside each other: none waits for another to be read."""
        rounds: list[list[Piece]] = []
        burst = 0
        largest = min(self._capacity // 2, _BURST)
        for tensor in tensors:
            total = tensor.numel() * tensor.element_size()
            for begin in range(0, total, largest):
                piece = self._place(tensor, begin, min(largest, total - begin))
                burst += piece.nbytes
                if not rounds or piece.needs > rounds[-1][0].number or burst > _BURST:
                    rounds.append([])
                    burst = piece.nbytes
                rounds[-1].append(piece)
        return rounds

    def _place(self, tensor: torch.Tensor, begin: int, nbytes: int) -> Piece:
        padded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        needs = 0
        if self._head + padded > self._capacity:
            # leave what lies behind: it is older than all that lies from the start on
            while self._lying and self._lying[0][1] >= self._head:
                needs = self._lying.popleft()[0] + 1
            self._head = 0
        first, self._head = self._head, self._head + padded
        while self._lying and self._lying[0][1] < self._head and self._lying[0][2] > first:
            needs = self._lying.popleft()[0] + 1
        piece = Piece(tensor, begin, nbytes, self.count, self.keeper, self._base + first, needs)
        self._lying.append((piece.number, first, self._head))
        self.count += 1
        return piece


class _Pending(Handle):
    def __init__(self, memory: Memory, marks: list[Mark], peers: list[Peer], outstanding: set[Handle]) -> None:
        self._memory = memory
        self._marks = marks
        self._peers = peers
        # so that their tensors live until the current queue waits for the transfer, whatever becomes of this handle
        self._outstanding = outstanding
        outstanding.add(self)

    def wait(self) -> None:
        if self in self._outstanding:
            for mark in self._marks:
                self._memory.current.after(mark)
            self._outstanding.remove(self)
            self._peers.clear()


class StagedTransport(Transport):
    """Exchanges through a `Memory`; records of the hosts go over another transport.

    Ranks must name a message in the same of their exchanges, counted alike, as they do in a schedule's steps.
    """

    _LANES = 2  # queues that pull, each from every second rank

    def __init__(self, control: Ranks) -> None:
        self.rank = control.rank
        self.size = control.size
        self._control = control
        self._memory: Memory | None = None
        self._outstanding: set[Handle] = set()

    @property
    def ranks_per_node(self) -> int | None:
        return self._control.ranks_per_node

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        return self._control.all_gather_control(record, patience)

    def _use(self, memory: Memory) -> None:
        """Exchange through this memory from now on."""
        self._memory = memory
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._out = {dst: self._channels(self.rank, dst, memory.capacity) for dst in others}
        self._in = {src: self._channels(src, self.rank, memory.capacity) for src in others}
        # of each channel out, the count that stages already wait for
        self._read = {channel: 0 for channels in self._out.values() for channel in channels}
        self._stages, self._near = memory.queue(), memory.queue()
        self._pulls = [memory.queue() for _ in range(min(self._LANES, len(others)))]

    def _channels(self, src: int, dst: int, capacity: int) -> list[Channel]:
        """The far channel of a pair, and the near one, if they are two."""
        if self.size == 2:
            return [Channel(src, dst, 2, capacity)]
        half = capacity // 2
        near = Channel(src, dst, self.size, half, near=True, begin=half * (self.size - 1))
        return [Channel(src, dst, self.size, half), near]

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        near: dict[int, list[list[Piece]]] = {}
        out: dict[int, list[list[Piece]]] = {}
        for dst, tensors in _by_rank(sends).items():
            channel = _choose(self._out[dst], tensors, at_rest)
            (near if channel.near and self.size > 2 else out)[dst] = channel.rounds(tensors)
        # nearest first, as in a ring
        found = sorted(_by_rank(receives).items(), key=lambda item: (self.rank - item[0]) % self.size)
        into = {src: _choose(self._in[src], tensors, at_rest).rounds(tensors) for src, tensors in found}
        if not near and not out and not into:
            return Done()
        memory = self._memory
        assert memory is not None, "connect comes first"
        lanes = {src: self._pulls[(self.rank - src) % self.size % len(self._pulls)] for src in into}
        start = memory.current.mark()
        used: list[Queue] = list(dict.fromkeys(lanes.values()))
        used += [queue for queue, staged in ((self._near, near), (self._stages, out)) if staged]
        for queue in used:
            queue.after(start)
        for staged in _transposed(near):
            self._stage(self._near, staged)
        if near:
            memory.current.after(self._near.mark())
        # two ranks stage before they compute, as far as that waits for nothing of this exchange
        before = self.size == 2 and bool(out)
        first = {dst: rounds[0][0].number for dst, rounds in out.items()}
        # a round's stages before its pulls: see above
        for staged, pulled in zip_longest(_transposed(out), _transposed(into), fillvalue={}):
            if before and any(piece.needs > first[dst] for dst, pieces in staged.items() for piece in pieces):
                before = False
                memory.current.after(self._stages.mark())
            if staged:
                self._stage(self._stages, staged)
            for src, pieces in pulled.items():
                done, kept_near = pieces[-1].number + 1, pieces[-1].keeper == src
                lanes[src].wait([Count(kept_near, True, src, done)])
                lanes[src].pull(pieces)
                lanes[src].raise_to([Count(kept_near, False, src, done)])
        if before:
            memory.current.after(self._stages.mark())
        return _Pending(memory, [queue.mark() for queue in used], [*sends, *receives], self._outstanding)

    def _stage(self, queue: Queue, staged: dict[int, list[Piece]]) -> None:
        waits, done = [], []
        for dst, pieces in staged.items():
            channel = self._out[dst][-1 if pieces[0].keeper == self.rank else 0]
            needs = max(piece.needs for piece in pieces)
            if needs > self._read[channel]:
                self._read[channel] = needs
                waits.append(Count(channel.near, False, dst, needs))
            done.append(Count(channel.near, True, dst, pieces[-1].number + 1))
        if waits:
            queue.wait(waits)
        queue.stage([piece for pieces in staged.values() for piece in pieces])
        queue.raise_to(done)


def _choose(channels: list[Channel], tensors: list[torch.Tensor], at_rest: bool) -> Channel:
    """The near channel, where there are two, for what it holds of an exchange that is at rest."""
    return channels[-1] if at_rest and channels[-1].holds_two(tensors) else channels[0]


def _by_rank(peers: Iterable[Peer]) -> dict[int, list[torch.Tensor]]:
    """Each rank's tensors that are not empty, in order."""
    tensors: dict[int, list[torch.Tensor]] = {}
    for rank, tensor in peers:
        assert tensor.is_contiguous()
        if tensor.numel():
            tensors.setdefault(rank, []).append(tensor)
    return tensors


def _transposed(rounds: dict[int, list[list[Piece]]]) -> list[dict[int, list[Piece]]]:
    """For each round, the pieces of each rank that has one."""
    count = max((len(of_rank) for of_rank in rounds.values()), default=0)
    return [{rank: of_rank[i] for rank, of_rank in rounds.items() if i < len(of_rank)} for i in range(count)]
