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

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from .base import Done, Handle, Peer, Ranks, Transport

_ALIGNMENT = 512  # bytes
_BURST = 16 << 20  # bytes of messages that are staged before the first of them are pulled
_KEPT = 1024  # plans of exchanges

Mark = Any  # a point in a queue


class Part(NamedTuple):
    """`nbytes` from byte `begin` of the tensor with a number, of those that an exchange sends or receives, at `offset` in their burst."""

    number: int
    begin: int
    nbytes: int
    offset: int


class Burst(NamedTuple):
    """Messages, or parts of them, that lie beside each other in a channel: `nbytes` in all, and counted as one."""

    parts: tuple[Part, ...]
    nbytes: int


class Load(NamedTuple):
    """Parts of some tensors, at `offset` in the keeper's arena, once the reader has read the channel's first `needs` bursts."""

    tensors: Sequence[torch.Tensor]
    parts: tuple[Part, ...]
    keeper: int
    offset: int
    needs: int


class Count(NamedTuple):
    """How many bursts of a channel, `near` or not, are `ready`, kept by the reader, or read, kept by the sender, to or from a `peer`.

    Captured exchanges have counts apart from those of others.
    """

    near: bool
    ready: bool
    peer: int
    captured: bool = False


Values = Sequence[tuple[Count, int]]


class Queue(ABC):
    """Operations that run one after another, beside all that other queues run."""

    @abstractmethod
    def mark(self) -> Mark:
        """All that is queued so far."""

    @abstractmethod
    def after(self, mark: Mark) -> None:
        """Go on when another queue has come to a mark."""

    @abstractmethod
    def wait(self, values: Values) -> None:
        """Go on when this rank's counts have come to these values, or beyond."""

    @abstractmethod
    def stage(self, loads: Sequence[Load]) -> None:
        """Copy from tensors to their places."""

    @abstractmethod
    def pull(self, loads: Sequence[Load]) -> None:
        """Copy from places to tensors."""

    @abstractmethod
    def raise_to(self, values: Values) -> None:
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
    """Where the bursts that a rank sends to a peer, or receives from it, lie: the same sequence of sizes gives the same places.

    Each rank keeps one channel of each distance, one after the other from byte `begin` of its arena on. `near`: with the sender;
    otherwise with a third rank, or, of two, with the reader.
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
        self._capacity = room(capacity)
        src, dst = (rank, peer) if sends else (peer, rank)
        distance = (dst - src) % size
        third = distance + 1 if distance + 1 < size else 1
        self.keeper = src if near else (src + third) % size
        self.ready, self.read = Count(near, True, peer, captured), Count(near, False, peer, captured)
        self.known = 0  # the value of `read` that stages already wait for
        self.count = 0  # of bursts so far
        self._base = begin + (distance - 1) * capacity
        self._head = 0
        self._lying: deque[tuple[int, int, int]] = deque()  # (number, begin, end), oldest first

    def place(self, burst: Burst, tensors: Sequence[torch.Tensor]) -> Load:
        """The next burst, and where it lies."""
        needs, lying, first = 0, self._lying, self._head
        if first + burst.nbytes > self._capacity:
            # leave what lies behind: it is older than all that lies from the start on
            while lying and lying[0][1] >= first:
                needs = lying.popleft()[0] + 1
            first = 0
        self._head = end = first + burst.nbytes
        while lying and lying[0][1] < end and lying[0][2] > first:
            needs = lying.popleft()[0] + 1
        lying.append((self.count, first, end))
        self.count += 1
        return Load(tensors, burst.parts, self.keeper, self._base + first, needs)


def room(capacity: int) -> int:
    """Bytes of a channel that are used: two halves of aligned places."""
    used = capacity // (2 * _ALIGNMENT) * (2 * _ALIGNMENT)
    assert used, capacity
    return used


def padded(nbytes: int) -> int:
    """The bytes that a part of a message takes in a channel."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


Messages = Sequence[tuple[int, int, int]]  # or parts of them: the tensor's number, first byte, bytes


def cut(messages: Messages, capacity: int, largest: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """As much as a channel has room for in bursts of at most `largest` bytes, with none waiting for another to be read; and the rest."""
    # behind the last place there may be less room than a burst needs
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


def bursts(messages: Messages, largest: int) -> list[Burst]:
    """Messages in bursts of at most so many bytes."""
    found: list[list[Part]] = []
    end = largest  # of the last burst
    for number, first, nbytes in messages:
        for begin in range(0, nbytes, largest):
            part = min(largest, nbytes - begin)
            if end + padded(part) > largest:
                found.append([])
                end = 0
            found[-1].append(Part(number, first + begin, part, end))
            end += padded(part)
    return [Burst(tuple(parts), parts[-1].offset + padded(parts[-1].nbytes)) for parts in found]


class _Channels:
    """A rank's channels to and from all others: of each pair the far and the near one."""

    def __init__(self, rank: int, size: int, capacity: int, *, captured: bool = False) -> None:
        far, near = _shares(size, capacity)

        def of_pair(peer: int, sends: bool) -> tuple[Channel, Channel]:
            return (
                Channel(rank, peer, size, far, sends=sends, captured=captured),
                Channel(rank, peer, size, near, sends=sends, captured=captured, near=True, begin=far * (size - 1)),
            )

        others = [other for other in range(size) if other != rank]
        self.out = {dst: of_pair(dst, True) for dst in others}
        self.into = {src: of_pair(src, False) for src in others}


def _shares(size: int, capacity: int) -> tuple[int, int]:
    """Bytes of a pair's far and near channel. Of two ranks, what goes the far way waits for the reader."""
    far = capacity // 2 if size > 2 else max(2, capacity // (4 * _ALIGNMENT)) * _ALIGNMENT
    return far, capacity - far


class _Stage(NamedTuple):
    """A burst for a rank, through the far or the near channel."""

    dst: int
    near: bool
    burst: Burst


class _Pull(NamedTuple):
    """A burst from a rank, likewise, the `last` of its channel or not, in one of the lanes."""

    src: int
    near: bool
    burst: Burst
    lane: int
    last: bool


Sizes = tuple[tuple[int, int], ...]  # of messages: rank, bytes


@dataclass(frozen=True)
class _Plan:
    """What an exchange of messages of some sizes stages near, one burst a rank at a time, and its rounds after that: stages, then pulls.

    `first_near` and `first` are the first stages of each kind, and `lanes` those that pull.
    """

    near: tuple[tuple[_Stage, ...], ...]
    rounds: tuple[tuple[tuple[_Stage, ...], tuple[_Pull, ...]], ...]
    first_near: tuple[_Stage, ...]
    first: tuple[_Stage, ...]
    lanes: tuple[int, ...]


@functools.lru_cache(_KEPT)
def _make_plan(rank: int, size: int, capacity: int, sends: Sizes, receives: Sizes, at_rest: bool, lanes: int) -> _Plan:
    rooms = [room(share) for share in _shares(size, capacity)]
    # two bursts lie in a channel side by side: one is pulled while the next is staged
    largest = [min(space // 2, _BURST) for space in rooms]

    def divided(messages: Messages) -> Iterable[tuple[bool, list[Burst]]]:
        """What goes the far way, and what the near one: of two ranks what there is room for, else all or nothing."""
        if size == 2:
            near, far = cut(messages, rooms[1], largest[1])
        else:
            # with room for as much again, none of it waits for another to be read
            fits = at_rest and sum(padded(nbytes) for *_, nbytes in messages) <= rooms[1] // 2
            near, far = (messages, []) if fits else ([], messages)
        return zip((False, True), map(bursts, (far, near), largest))

    stages = [
        [_Stage(dst, near, burst) for burst in found]
        for dst, messages in _by_rank(sends).items()
        for near, found in divided(messages)
    ]
    pulls = []
    # nearest first, as in a ring
    for src, messages in sorted(_by_rank(receives).items(), key=lambda item: (rank - item[0]) % size):
        lane = (rank - src) % size % lanes
        for near, found in divided(messages):
            pulls.append([_Pull(src, near, burst, lane, burst is found[-1]) for burst in found])
    far_out, near_out = _by_way(stages)
    far_into, near_into = _by_way(pulls)
    # all stages that nothing of this exchange holds up come first, and a round's stages before its pulls: see above
    rounds = [((), pulled) for pulled in _transposed(near_into)]
    rounds += zip_longest(_transposed(far_out), _transposed(far_into), fillvalue=())
    return _Plan(
        near=tuple(_transposed(near_out)),
        rounds=tuple(rounds),
        first_near=tuple(found[0] for found in near_out),
        first=tuple(found[0] for found in far_out),
        lanes=tuple(dict.fromkeys(pull.lane for found in pulls for pull in found)),
    )


def _by_rank(sizes: Sizes) -> dict[int, list[tuple[int, int, int]]]:
    """Each rank's messages that are not empty, in order."""
    messages: dict[int, list[tuple[int, int, int]]] = {}
    for number, (rank, nbytes) in enumerate(sizes):
        if nbytes:
            messages.setdefault(rank, []).append((number, 0, nbytes))
    return messages


def _by_way(of_channels: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Those of far channels and those of near ones that are used."""
    far, near = ([found for found in of_channels if found and found[0].near == way] for way in (False, True))
    return far, near


def _transposed(of_channels: list[list[Any]]) -> list[tuple[Any, ...]]:
    """What is first of each channel, what is second of those that have one, and so on."""
    return [tuple(one for one in row if one is not None) for row in zip_longest(*of_channels)]


class _Pending(Handle):
    def __init__(self, current: Queue, marks: list[Mark], tensors: Sequence[torch.Tensor], outstanding: set[Handle]) -> None:
        self._current = current
        self._marks = marks
        self._tensors = tensors
        # so that their tensors live until the current queue waits for the transfer, whatever becomes of this handle
        self._outstanding = outstanding
        outstanding.add(self)

    def wait(self) -> None:
        if self in self._outstanding:
            for mark in self._marks:
                self._current.after(mark)
            self._outstanding.remove(self)
            self._tensors = ()


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
        if not sends and not receives:
            return Done()
        memory = self._memory
        assert memory is not None, "connect comes first"
        sent, received = [x for _, x in sends], [x for _, x in receives]
        assert all(map(torch.Tensor.is_contiguous, sent + received))
        sizes = tuple([(rank, x.nbytes) for rank, x in sends]), tuple([(rank, x.nbytes) for rank, x in receives])
        plan = _make_plan(self.rank, self.size, memory.capacity, *sizes, at_rest, len(self._pulls))
        captured = memory.capturing
        self._captured |= captured
        channels = _Channels(self.rank, self.size, memory.capacity, captured=True) if captured else self._channels
        current, stages, near = memory.current, self._stages, self._near
        pulls = self._pulls if captured else [self._pulls[lane] for lane in plan.lanes]
        used = [*pulls, *([near] if plan.near or captured else []), *([stages] if plan.first or captured else [])]
        _follow(used, [current])
        for staged in plan.near:
            _stage(near, _load(channels, staged, sent), captured, self._pulls)
        if plan.near:
            _follow([current], [near])
        for staged, pulled in plan.rounds:
            if staged:
                _stage(stages, _load(channels, staged, sent), captured, self._pulls)
            if captured:
                _follow(self._pulls, [near, stages])
            for src, way, burst, lane, last in pulled:
                _pull(self._pulls[lane], channels.into[src][way], burst, received, captured and last)
        if self._captured:
            for queue, staged in ((near, plan.first_near), (stages, plan.first)):
                _drain(queue, [channels.out[dst][way] for dst, way, _ in staged], captured, self._pulls)
        else:
            # what is staged near comes before what is computed next already
            used = [queue for queue in used if queue is not near]
        return _Pending(current, [queue.mark() for queue in used], sent + received, self._outstanding)


def _load(channels: _Channels, staged: Sequence[_Stage], sent: list[torch.Tensor]) -> list[tuple[Channel, Load]]:
    """The places of the next bursts."""
    ends = [(channels.out[dst][way], burst) for dst, way, burst in staged]
    return [(channel, channel.place(burst, sent)) for channel, burst in ends]


def _stage(queue: Queue, loads: list[tuple[Channel, Load]], captured: bool, pulls: Sequence[Queue]) -> None:
    waits = []
    for channel, load in loads:
        if load.needs > channel.known:
            channel.known = load.needs
            waits.append((channel.read, load.needs))
    if waits:
        if captured:
            _follow([queue], pulls)
        queue.wait(waits)
    queue.stage([load for _, load in loads])
    queue.raise_to([(channel.ready, channel.count) for channel, _ in loads])


def _pull(lane: Queue, channel: Channel, burst: Burst, received: list[torch.Tensor], set_back: bool) -> None:
    load = channel.place(burst, received)
    lane.wait([(channel.ready, channel.count)])
    if set_back:
        lane.set_back([channel.ready])
    lane.pull([load])
    lane.raise_to([(channel.read, channel.count)])


def _drain(queue: Queue, channels: list[Channel], captured: bool, pulls: Sequence[Queue]) -> None:
    """Wait until all that has been staged is read."""
    if not channels:
        return
    if captured:
        _follow([queue], pulls)
    queue.wait([(channel.read, channel.count) for channel in channels])
    if captured:
        queue.set_back([channel.read for channel in channels])
    for channel in channels:
        channel.known = channel.count


def _follow(queues: Sequence[Queue], others: Sequence[Queue]) -> None:
    """What comes in these queues comes after what is queued in the others so far."""
    for mark in [other.mark() for other in others]:
        for queue in queues:
            queue.after(mark)
