"""Messages through memory that ranks map: the protocol, apart from any device.

Each ordered pair of ranks has a channel: a part of some rank's arena, used as a ring. Both ends place the pair's messages in it by
the same rule, from their sizes alone, so that nothing is negotiated. The sender waits until the reader has read what lay there
before, copies a message into its place, and raises the reader's count of what is ready; the reader waits for that, pulls the
message straight into its target, and raises the sender's count of what is read. Counts only grow, and each is written by one rank
and waited for by the other, in its own memory.

A channel lies with a third rank where there is one: then both copies are between GPUs, which copy engines do beside kernels that
fill them; a copy within a GPU needs its multiprocessors. A second, near channel of each pair lies with the sender, who stages before
it computes. It is for small messages of an exchange that is at rest: they cross the links once, and are with the reader in half the
time. Two ranks have nobody else: there it takes of every exchange what it has room for. What is left goes by a channel that lies with
the reader, who pulls it when its computation has ended, and never has to wait for the sender's.

All of it is queued: the host waits for nothing. Stages and pulls are queued so that each waits only for what some rank has queued
before, in the order of exchanges and of rounds within one: ranks that name a message in the same exchange never wait in a circle,
even where a device runs all its streams as one.

A captured exchange is run again and again with the counts that it was captured with. So it has counts of its own, which it finds and
leaves at zero, and channels that it finds and leaves empty. The reader sets its count back once it has come to its last value, and
tells the sender only then that all is read; the sender waits for that at the end of the exchange, and sets its own count back. So no
count is raised anew before it was set back, and ranks need no barrier between two runs. Exchanges that are not captured use the same
places: once one has been captured, they too wait at their end until all is read. A graph promises no order but that of its edges:
what must be queued before a wait, lies before it along edges.
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
    """How many pieces of a channel, `near` or not, are `ready`, kept by the reader, or read, kept by the sender, to or from a `peer`.

    Captured exchanges have counts apart from those of others.
    """

    near: bool
    ready: bool
    peer: int
    value: int
    captured: bool = False


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

    @abstractmethod
    def set_back(self, counts: Sequence[Count]) -> None:
        """Set these counts of this rank to zero, before all that comes."""


class Memory(ABC):
    """A rank's arena with room for `size` - 1 channels of `capacity` bytes, its counts, and the arenas and counts of all others."""

    rank: int
    size: int
    capacity: int

    @property
    @abstractmethod
    def current(self) -> Queue:
        """The queue that computes."""

    @property
    def capturing(self) -> bool:
        """Whether what is queued now is captured, to be run again and again."""
        return False

    @abstractmethod
    def queue(self) -> Queue:
        """A new queue."""


class Channel:
    """Where the pieces of an ordered pair of ranks lie: the same sequence of sizes gives the same places.

    Each rank keeps one channel of each distance, one after the other from byte `begin` of its arena on. `near`: with the sender;
    otherwise with a third rank, or, of two, with the reader.
    """

    def __init__(self, src: int, dst: int, size: int, capacity: int, *, near: bool = False, begin: int = 0) -> None:
        self._capacity = capacity // (2 * _ALIGNMENT) * (2 * _ALIGNMENT)
        assert self._capacity, capacity
        distance = (dst - src) % size
        third = distance + 1 if distance + 1 < size else 1
        self.near = near
        self.keeper = src if near else (src + third) % size
        self._base = begin + (distance - 1) * capacity
        self._head = 0
        self._lying: deque[tuple[int, int, int]] = deque()  # (number, begin, end), oldest first
        self.count = 0

    def holds_two(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether there is room for these messages beside as many others: then none of them waits for another to be read."""
        return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors) <= self._capacity // 2

    def cut(self, tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """As much of these messages as there is room for, with none of it waiting for another part to be read, and the rest."""
        # behind the last place there may be less room than a piece needs
        room = self._capacity - self._largest
        first, rest = [], []
        for tensor in tensors:
            if tensor.nbytes <= room:
                first.append(tensor)
                room -= -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
                continue
            content = tensor.view(-1).view(torch.uint8)
            first += [content[:room]] if room > 0 else []
            rest.append(content[max(0, room) :])
            room = 0
        return first, rest

    def rounds(self, tensors: Iterable[torch.Tensor]) -> list[list[Piece]]:
        """Pieces of the next messages. Those of one round lie beside each other: none waits for another to be read."""
        rounds: list[list[Piece]] = []
        burst, largest = 0, self._largest
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

    @property
    def _largest(self) -> int:
        """Bytes of a piece."""
        return min(self._capacity // 2, _BURST)

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


class _Channels:
    """A rank's channels to and from all others: of each pair the far and the near one."""

    def __init__(self, rank: int, size: int, capacity: int) -> None:
        others = [other for other in range(size) if other != rank]
        self.out = {dst: _of_pair(rank, dst, size, capacity) for dst in others}
        self.into = {src: _of_pair(src, rank, size, capacity) for src in others}
        # of each channel out, the count that stages already wait for
        self.read = {channel: 0 for channels in self.out.values() for channel in channels}
        self._rank = rank

    def of_piece(self, dst: int, piece: Piece) -> Channel:
        """The one of the channels to a rank that a piece lies in."""
        return self.out[dst][-1 if piece.keeper == self._rank else 0]


def _of_pair(src: int, dst: int, size: int, capacity: int) -> list[Channel]:
    # of two ranks, what goes the far way waits for the reader
    far = capacity // 2 if size > 2 else max(2, capacity // (4 * _ALIGNMENT)) * _ALIGNMENT
    near = Channel(src, dst, size, capacity - far, near=True, begin=far * (size - 1))
    return [Channel(src, dst, size, far), near]


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
        self._captured = False  # whether any exchange has been

    @property
    def ranks_per_node(self) -> int | None:
        return self._control.ranks_per_node

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        return self._control.all_gather_control(record, patience)

    def _use(self, memory: Memory) -> None:
        """Exchange through this memory from now on."""
        self._memory = memory
        self._channels = _Channels(self.rank, self.size, memory.capacity)
        self._stages, self._near = memory.queue(), memory.queue()
        self._pulls = [memory.queue() for _ in range(min(self._LANES, self.size - 1))]

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        sent, received = _by_rank(sends), _by_rank(receives)
        if not sent and not received:
            return Done()
        memory = self._memory
        assert memory is not None, "connect comes first"
        captured = memory.capturing
        self._captured |= captured
        channels = _Channels(self.rank, self.size, memory.capacity) if captured else self._channels
        out, near_out = _placed(sent, channels.out, at_rest)
        # nearest first, as in a ring
        found = sorted(received, key=lambda src: (self.rank - src) % self.size)
        into, near_into = _placed({src: received[src] for src in found}, channels.into, at_rest)
        lanes = {src: self._pulls[(self.rank - src) % self.size % len(self._pulls)] for src in found}
        used: list[Queue] = list(dict.fromkeys(lanes.values()))
        used += [queue for queue, staged in ((self._near, near_out), (self._stages, out)) if staged]
        if captured:
            used = [*self._pulls, self._near, self._stages]
        _follow(used, [memory.current])
        for staged in _transposed(near_out):
            self._stage(self._near, staged, channels, captured)
        if near_out:
            _follow([memory.current], [self._near])
        # all stages that nothing of this exchange holds up come first, and a round's stages before its pulls: see above
        rounds = [({}, pulled) for pulled in _transposed(near_into)]
        for staged, pulled in (*rounds, *zip_longest(_transposed(out), _transposed(into), fillvalue={})):
            if staged:
                self._stage(self._stages, staged, channels, captured)
            if captured:
                _follow(self._pulls, [self._near, self._stages])
            for src, pieces in pulled.items():
                last = any(pieces is of_rank[src][-1] for of_rank in (into, near_into) if src in of_rank)
                _pull(lanes[src], src, pieces, captured, last)
        if self._captured:
            for queue, staged in ((self._near, near_out), (self._stages, out)):
                self._drain(queue, staged, channels, captured)
        return _Pending(memory, [queue.mark() for queue in used], [*sends, *receives], self._outstanding)

    def _stage(self, queue: Queue, staged: dict[int, list[Piece]], channels: _Channels, captured: bool) -> None:
        waits, done = [], []
        for dst, pieces in staged.items():
            channel = channels.of_piece(dst, pieces[0])
            needs = max(piece.needs for piece in pieces)
            if needs > channels.read[channel]:
                channels.read[channel] = needs
                waits.append(Count(channel.near, False, dst, needs, captured))
            done.append(Count(channel.near, True, dst, pieces[-1].number + 1, captured))
        if waits:
            if captured:
                _follow([queue], self._pulls)
            queue.wait(waits)
        queue.stage([piece for pieces in staged.values() for piece in pieces])
        queue.raise_to(done)

    def _drain(self, queue: Queue, staged: dict[int, list[list[Piece]]], channels: _Channels, captured: bool) -> None:
        """Wait until all that an exchange has staged is read."""
        last = [(channels.of_piece(dst, rounds[-1][-1]), dst) for dst, rounds in staged.items()]
        read = [Count(channel.near, False, dst, channel.count, captured) for channel, dst in last]
        if not read:
            return
        if captured:
            _follow([queue], self._pulls)
        queue.wait(read)
        if captured:
            queue.set_back([count._replace(value=0) for count in read])
        else:
            channels.read.update((channel, channel.count) for channel, _ in last)


def _pull(lane: Queue, src: int, pieces: list[Piece], captured: bool, last: bool) -> None:
    """A round of a rank's pieces, the exchange's `last` one or not."""
    done, near = pieces[-1].number + 1, pieces[-1].keeper == src
    lane.wait([Count(near, True, src, done, captured)])
    if captured and last:
        lane.set_back([Count(near, True, src, 0, captured)])
    lane.pull(pieces)
    lane.raise_to([Count(near, False, src, done, captured)])


def _follow(queues: Sequence[Queue], others: Sequence[Queue]) -> None:
    """What comes in these queues comes after what is queued in the others so far."""
    for mark in [other.mark() for other in others]:
        for queue in queues:
            queue.after(mark)


_Rounds = dict[int, list[list[Piece]]]


def _placed(messages: dict[int, list[torch.Tensor]], channels: dict[int, list[Channel]], at_rest: bool) -> tuple[_Rounds, _Rounds]:
    """The pieces of messages to or from each rank that go the far way, and of those that go the near one."""
    rounds: tuple[_Rounds, _Rounds] = {}, {}
    for rank, tensors in messages.items():
        for channel, part, of_way in zip(channels[rank], _divided(channels, rank, tensors, at_rest), rounds):
            if part:
                of_way[rank] = channel.rounds(part)
    return rounds


def _divided(
    channels: dict[int, list[Channel]], rank: int, tensors: list[torch.Tensor], at_rest: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What of a rank's messages goes the far way, and what the near one: of two ranks what there is room for, else all or nothing."""
    near = channels[rank][1]
    if len(channels) == 1:
        first, rest = near.cut(tensors)
        return rest, first
    return ([], tensors) if at_rest and near.holds_two(tensors) else (tensors, [])


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
