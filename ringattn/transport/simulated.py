"""Ranks whose memory operations run one at a time in an order that a test chooses: to prove the protocol of `staged.py`.

Every operation of every queue may come next whose wait is over, and copies happen in two halves, so that a torn or overwritten
message shows. If nothing can come next and something is left, the ranks have locked each other out: `Deadlock`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from .base import Ranks
from .staged import Count, Mark, Memory, Piece, Queue, StagedTransport

_TIMEOUT = 60.0


class Deadlock(AssertionError):
    """Every queue that is not empty waits."""


class World:
    """The memory of all ranks, and their queues.

    `choose(queues)` picks the queue, of those that may go on, that does its next operation. With `serial` a rank's queues are one.
    """

    def __init__(self, size: int, capacity: int, choose: Callable[[list[int]], int], *, serial: bool = False) -> None:
        self.size = size
        self.capacity = capacity
        self.serial = serial
        self.arenas = [torch.full((max(1, size - 1) * capacity,), 0xEE, dtype=torch.uint8) for _ in range(size)]
        self.counts: dict[tuple[int, bool, bool, int], int] = {}  # by rank, near, whether of what is ready, and peer
        self.queues: list[deque[_Operation]] = []
        self.changed = threading.Condition()
        self._choose = choose

    def step(self) -> bool:
        """Do one operation, if any may come next."""
        able = [index for index, queue in enumerate(self.queues) if queue and queue[0].ready()]
        if able:
            self.queues[self._choose(able)].popleft().run()
        return bool(able)

    def finish(self) -> None:
        """Do all that is queued."""
        while self.step():
            pass
        left = [len(queue) for queue in self.queues if queue]
        if left:
            raise Deadlock(f"{len(left)} queues wait with {left} operations in them")


class _Operation:
    def __init__(self, run: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.run = run
        self.ready = ready


class SimulatedQueue(Queue):
    def __init__(self, world: World, rank: int, operations: deque[_Operation]) -> None:
        self._world = world
        self._rank = rank
        self._operations = operations

    def run(self, action: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        """Queue any action, such as a computation."""
        with self._world.changed:
            self._operations.append(_Operation(action, ready))
            self._world.changed.notify_all()

    def mark(self) -> Mark:
        reached: list[bool] = []
        self.run(lambda: reached.append(True))
        return reached

    def after(self, mark: Mark) -> None:
        self.run(lambda: None, lambda: bool(mark))

    def wait(self, counts: Sequence[Count]) -> None:
        have = self._world.counts
        self.run(
            lambda: None, lambda: all(have.get((self._rank, near, ready, peer), 0) >= value for near, ready, peer, value in counts)
        )

    def stage(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._copy(_place(self._world, piece), _bytes(piece))

    def pull(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._copy(_bytes(piece), _place(self._world, piece))

    def raise_to(self, counts: Sequence[Count]) -> None:
        for near, ready, peer, value in counts:
            self.run(lambda key=(peer, near, ready, self._rank), value=value: self._raise(key, value))

    def _raise(self, key: tuple[int, bool, bool, int], value: int) -> None:
        assert value > self._world.counts.get(key, 0), "a count only grows"
        self._world.counts[key] = value

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        middle = len(target) // 2
        self.run(lambda: target[middle:].copy_(source[middle:]))
        self.run(lambda: target[:middle].copy_(source[:middle]))


class _Host(SimulatedQueue):
    """A host thread as the queue that computes: it does what it is told at once, and does others' operations while it waits."""

    def run(self, action: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        with self._world.changed:
            while not ready():
                if not self._world.step() and not self._world.changed.wait(_TIMEOUT):
                    raise Deadlock("nothing has moved")
                self._world.changed.notify_all()
            action()


class SimulatedMemory(Memory):
    """One rank's view of a `World`. Its computation is a queue too, unless the host's thread is to compute by itself."""

    def __init__(self, world: World, rank: int, *, on_host: bool) -> None:
        self.rank = rank
        self.size = world.size
        self.capacity = world.capacity
        self._world = world
        self._operations: deque[_Operation] | None = None
        self._current = _Host(world, rank, deque()) if on_host else self.queue()

    @property
    def current(self) -> SimulatedQueue:
        return self._current

    def queue(self) -> SimulatedQueue:
        with self._world.changed:
            if not self._world.serial or self._operations is None:
                self._operations = deque()
                self._world.queues.append(self._operations)
        return SimulatedQueue(self._world, self.rank, self._operations)


class SimulatedTransport(StagedTransport):
    """A rank of a `World`."""

    def __init__(self, control: Ranks, world: World, *, on_host: bool = False) -> None:
        super().__init__(control)
        self.memory = SimulatedMemory(world, self.rank, on_host=on_host)
        self._use(self.memory)


def _bytes(piece: Piece) -> torch.Tensor:
    return piece.tensor.view(-1).view(torch.uint8)[piece.begin : piece.begin + piece.nbytes]


def _place(world: World, piece: Piece) -> torch.Tensor:
    return world.arenas[piece.keeper][piece.offset : piece.offset + piece.nbytes]
