"""Ranks whose memory operations run one at a time in an order that a test chooses: to prove the protocol of `staged.py`.

Every operation of every queue may come next whose wait is over, and copies happen in two halves, so that a torn or overwritten
message shows. If nothing can come next and something is left, the ranks have locked each other out: `Deadlock`. What is captured
becomes a graph, whose operations may run in any order that its edges leave.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ringattn.transport.base import Ranks
from ringattn.transport.staged import Count, Load, Mark, Memory, Part, Queue, StagedTransport, Values

_TIMEOUT = 60.0

_Key = tuple[int, Count]  # the rank that keeps a count, and which it is


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
        self.counts: dict[_Key, int] = {}
        self.queues: list[deque[_Operation]] = []
        self.changed = threading.Condition()
        self.choose = choose

    def step(self) -> bool:
        """Do one operation, if any may come next."""
        able = [index for index, queue in enumerate(self.queues) if queue and queue[0].ready()]
        if able:
            self.queues[self.choose(able)].popleft().run()
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


class Graph:
    """What a rank's queues were told while it was captured: nodes, of which each comes after some before it."""

    def __init__(self, world: World) -> None:
        self._nodes: list[tuple[SimulatedQueue, _Operation, list[int]]] = []
        self._world = world
        self._last: dict[SimulatedQueue, int] = {}
        self._queues: dict[SimulatedQueue, deque[_Operation]] = {}

    def add(self, queue: SimulatedQueue, operation: _Operation, after: Sequence[int] = ()) -> int:
        before = [*after, *([self._last[queue]] if queue in self._last else [])]
        assert before or not self._nodes, "a queue must come after what is captured before it is captured itself"
        self._nodes.append((queue, operation, before))
        self._last[queue] = len(self._nodes) - 1
        return self._last[queue]

    def end(self) -> None:
        """All that was captured must come before the end of the queue that computes."""
        reached, found = set(), [len(self._nodes) - 1] if self._nodes else []
        while found:
            node = found.pop()
            if node not in reached:
                reached.add(node)
                found += self._nodes[node][2]
        assert len(reached) == len(self._nodes), "a queue was captured and not joined"
        if not self._world.serial:
            self._queues = {queue: deque() for queue in self._last}
            self._world.queues += self._queues.values()

    def run(self, current: SimulatedQueue) -> None:
        """Queue all of it."""
        started: list[bool] = []
        done: set[int] = set()
        current.run(lambda: started.append(True))
        for number in self._order() if self._world.serial else range(len(self._nodes)):
            queue, operation, before = self._nodes[number]
            self._queues.get(queue, current.operations).append(
                _Operation(
                    lambda number=number, operation=operation: (operation.run(), done.add(number)),
                    lambda operation=operation, before=before: bool(started) and done.issuperset(before) and operation.ready(),
                )
            )
        current.run(lambda: None, lambda: len(done) == len(self._nodes))

    def _order(self) -> Iterator[int]:
        """All nodes in some order that the edges leave."""
        missing = [len(before) for _, _, before in self._nodes]
        behind: list[list[int]] = [[] for _ in self._nodes]
        for number, (_, _, before) in enumerate(self._nodes):
            for other in before:
                behind[other].append(number)
        able = [number for number, count in enumerate(missing) if not count]
        while able:
            number = self._world.choose(able)
            able.remove(number)
            yield number
            for other in behind[number]:
                missing[other] -= 1
                if not missing[other]:
                    able.append(other)


class SimulatedQueue(Queue):
    def __init__(self, memory: SimulatedMemory, operations: deque[_Operation]) -> None:
        self.operations = operations
        self._memory = memory
        self._world = memory.world
        self._rank = memory.rank

    def run(self, action: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        """Queue any action, such as a computation."""
        if self._memory.graph is not None:
            self._memory.graph.add(self, _Operation(action, ready))
            return
        with self._world.changed:
            self.operations.append(_Operation(action, ready))
            self._world.changed.notify_all()

    def mark(self) -> Mark:
        if self._memory.graph is not None:
            return self._memory.graph.add(self, _Operation(lambda: None))
        reached: list[bool] = []
        self.run(lambda: reached.append(True))
        return reached

    def after(self, mark: Mark) -> None:
        if self._memory.graph is not None:
            assert isinstance(mark, int), "what is captured cannot come after what is not"
            self._memory.graph.add(self, _Operation(lambda: None), [mark])
        else:
            self.run(lambda: None, lambda: bool(mark))

    def wait(self, values: Values) -> None:
        have = self._world.counts
        self.run(lambda: None, lambda: all(have.get((self._rank, count), 0) >= value for count, value in values))

    def stage(self, loads: Sequence[Load]) -> None:
        for load, part in _parts(loads):
            self._copy(_place(self._world, load, part), _bytes(load, part))

    def pull(self, loads: Sequence[Load]) -> None:
        for load, part in _parts(loads):
            self._copy(_bytes(load, part), _place(self._world, load, part))

    def raise_to(self, values: Values) -> None:
        for count, value in values:
            key = count.peer, count._replace(peer=self._rank)
            self.run(lambda key=key, value=value: self._raise(key, value))

    def set_back(self, counts: Sequence[Count]) -> None:
        for count in counts:
            assert count.captured
            self.run(lambda key=(self._rank, count): self._world.counts.update({key: 0}))

    def _raise(self, key: _Key, value: int) -> None:
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
        self.world = world
        self.graph: Graph | None = None
        self._operations: deque[_Operation] | None = None
        self._current = _Host(self, deque()) if on_host else self.queue()

    @property
    def current(self) -> SimulatedQueue:
        return self._current

    def queue(self) -> SimulatedQueue:
        with self.world.changed:
            if not self.world.serial or self._operations is None:
                self._operations = deque()
                self.world.queues.append(self._operations)
        return SimulatedQueue(self, self._operations)

    @property
    def capturing(self) -> bool:
        return self.graph is not None

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """What is queued meanwhile does not run, but becomes a graph."""
        graph = self.graph = Graph(self.world)
        try:
            yield graph
        finally:
            self.graph = None
        graph.end()


class SimulatedTransport(StagedTransport):
    """A rank of a `World`."""

    def __init__(self, control: Ranks, world: World, *, on_host: bool = False) -> None:
        super().__init__(control)
        self.memory = SimulatedMemory(world, self.rank, on_host=on_host)
        self._use(self.memory)


def _parts(loads: Sequence[Load]) -> Iterator[tuple[Load, Part]]:
    return ((load, part) for load in loads for part in load.parts)


def _bytes(load: Load, part: Part) -> torch.Tensor:
    return load.tensors[part.number].view(-1).view(torch.uint8)[part.begin : part.begin + part.nbytes]


def _place(world: World, load: Load, part: Part) -> torch.Tensor:
    begin = load.offset + part.offset
    return world.arenas[load.keeper][begin : begin + part.nbytes]
