"""Simulated memory of ranks, to test the protocol of `staged.py`: operations run one at a time, in an order that a test chooses.

The next operation may be the first of any queue that need not wait. A copy takes two operations, half of the bytes each, so that a torn
or overwritten message shows. If operations are left and none can run, the ranks have deadlocked: `Deadlock`. Captured operations
become a graph, which runs them in any order that its edges allow.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringattn.transport.base import Ranks
from ringattn.transport.memory import Count, Mark, Memory, Part, PlacedChunk, Queue, Values
from ringattn.transport.staged import StagedTransport
from ringattn_kernels import waits
from ringattn_kernels.submission import Number

_TIMEOUT = 60.0

_Key = tuple[int, Count]  # the rank whose memory holds the count, and the count


class Deadlock(AssertionError):
    """Operations are left, and every queue waits."""


class World:
    """The memory of all ranks, and their queues.

    `choose(queues)` picks one of the queues that can go on; it runs its next operation. With `serial`, all queues of a rank are one.
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
        """Run one operation, if any can run; return whether one did."""
        able = [index for index, queue in enumerate(self.queues) if queue and queue[0].ready()]
        if able:
            self.queues[self.choose(able)].popleft().run()
        return bool(able)

    def finish(self) -> None:
        """Run all that is queued. Raises Deadlock if some operations cannot run."""
        while self.step():
            pass
        left = [len(queue) for queue in self.queues if queue]
        if left:
            raise Deadlock(f"{len(left)} queues wait with {left} operations in them")


class _Operation:
    """Something to `run` once it is `ready`."""

    def __init__(self, run: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.run = run
        self.ready = ready


class Graph:
    """The operations of a rank's queues during a capture: nodes, each with the earlier nodes that it comes after."""

    def __init__(self, world: World) -> None:
        self._nodes: list[tuple[SimulatedQueue, _Operation, list[int]]] = []
        self._world = world
        self._last: dict[SimulatedQueue, int] = {}
        self._queues: dict[SimulatedQueue, deque[_Operation]] = {}

    def add(self, queue: SimulatedQueue, operation: _Operation, after: Sequence[int] = ()) -> int:
        before = [*after, *([self._last[queue]] if queue in self._last else [])]
        assert before or not self._nodes, "a queue must wait for a captured operation before its own operations are captured"
        self._nodes.append((queue, operation, before))
        self._last[queue] = len(self._nodes) - 1
        return self._last[queue]

    def end(self) -> None:
        """End the capture. The last operation, of the queue that computes, must come after all others."""
        reached, found = set(), [len(self._nodes) - 1] if self._nodes else []
        while found:
            node = found.pop()
            if node not in reached:
                reached.add(node)
                found += self._nodes[node][2]
        assert len(reached) == len(self._nodes), "a queue was captured, and the queue that computes does not wait for it"
        if not self._world.serial:
            self._queues = {queue: deque() for queue in self._last}
            self._world.queues += self._queues.values()

    def run(self, current: SimulatedQueue) -> None:
        """Queue all operations."""
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
        """All nodes, in some order that the edges allow."""
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
    """A queue of a rank of a `World`."""

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
            assert isinstance(mark, int), "a captured operation cannot come after one that is not captured"
            self._memory.graph.add(self, _Operation(lambda: None), [mark])
        else:
            self.run(lambda: None, lambda: bool(mark))

    def wait(self, values: Values) -> None:
        have = self._world.counts
        self.run(lambda: None, lambda: all(have.get((self._rank, count), 0) >= value for count, value in values))

    def stage(self, chunks: Sequence[PlacedChunk]) -> None:
        for chunk, part in _parts(chunks):
            self._copy(_place(self._world, chunk, part), _bytes(chunk, part))

    def pull(self, chunks: Sequence[PlacedChunk]) -> None:
        for chunk, part in _parts(chunks):
            self._copy(_bytes(chunk, part), _place(self._world, chunk, part))

    def raise_to(self, values: Values) -> None:
        for count, value in values:
            key = count.peer, count._replace(peer=self._rank)
            self.run(lambda key=key, value=value: self._raise(key, value))

    def set_back(self, counts: Sequence[Count]) -> None:
        for count in counts:
            assert count.captured
            self.run(lambda key=(self._rank, count): self._world.counts.update({key: 0}))

    def _raise(self, key: _Key, value: int) -> None:
        assert value > self._world.counts.get(key, 0), "counts only grow"
        self._world.counts[key] = value

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        middle = len(target) // 2
        self.run(lambda: target[middle:].copy_(source[middle:]))
        self.run(lambda: target[:middle].copy_(source[:middle]))


class Listing:
    """Operations that are listed once and then queued as often as wanted: what a `Submission` is on a GPU, with as few marks and waits.

    caller: the queue whose later operations come after all that it was told to come after.
    """

    def __init__(self, caller: Queue) -> None:
        self.numbers = 0
        self._caller = caller
        self._listed: list[waits.Do | waits.Mark | waits.After] = []

    def more_numbers(self, count: int) -> list[Number]:
        self.numbers += count
        return [Number(index) for index in range(self.numbers - count, self.numbers)]

    def do(self, queue: Queue, step: Callable[[list[int]], object]) -> None:
        self._listed.append(waits.Do(queue, step))

    def mark(self, queue: Queue) -> int:
        self._listed.append(waits.Mark(queue, len(self._listed)))
        return len(self._listed) - 1

    def after(self, queue: Queue, mark: int) -> None:
        self._listed.append(waits.After(queue, mark))

    def __call__(self, numbers: list[int]) -> None:
        assert len(numbers) == self.numbers
        marks: dict[Hashable, Mark] = {}
        for x in waits.ordered(self._listed, self._caller):
            queue: Any = x.stream
            if isinstance(x, waits.Do):
                x.call(numbers)
            elif isinstance(x, waits.Mark):
                marks[x.name] = queue.mark()
            else:
                queue.after(marks[x.name])


class _ListedQueue(Queue):
    """A queue whose operations go into a listing."""

    def __init__(self, queue: Queue, listing: Listing) -> None:
        self._queue = queue
        self._listing = listing

    def mark(self) -> Mark:
        return self._listing.mark(self._queue)

    def after(self, mark: Mark) -> None:
        self._listing.after(self._queue, mark)

    def wait(self, values: Values) -> None:
        self._listing.do(self._queue, lambda numbers: self._queue.wait(_known(values, numbers)))

    def stage(self, chunks: Sequence[PlacedChunk]) -> None:
        self._listing.do(self._queue, lambda numbers: self._queue.stage([_placed(chunk, numbers) for chunk in chunks]))

    def pull(self, chunks: Sequence[PlacedChunk]) -> None:
        self._listing.do(self._queue, lambda numbers: self._queue.pull([_placed(chunk, numbers) for chunk in chunks]))

    def raise_to(self, values: Values) -> None:
        self._listing.do(self._queue, lambda numbers: self._queue.raise_to(_known(values, numbers)))

    def set_back(self, counts: Sequence[Count]) -> None:
        raise AssertionError("captured exchanges are not listed")


def _known(values: Values, numbers: list[int]) -> Values:
    return [(count, _value(value, numbers)) for count, value in values]


def _placed(chunk: PlacedChunk, numbers: list[int]) -> PlacedChunk:
    """A chunk where this run has it; its tensors' addresses are the tensors themselves."""
    return chunk._replace(tensors=[x.data_ptr() for x in chunk.tensors], offset=_value(chunk.offset, numbers))


def _value(value: Number | int, numbers: list[int]) -> int:
    return numbers[value.index] + value.offset if isinstance(value, Number) else value


class _Host(SimulatedQueue):
    """The queue that computes, as a host thread: it runs its operations at once, and those of other queues while it waits."""

    def run(self, action: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        with self._world.changed:
            while not ready():
                if not self._world.step() and not self._world.changed.wait(_TIMEOUT):
                    raise Deadlock("nothing has moved")
                self._world.changed.notify_all()
            action()


class SimulatedMemory(Memory):
    """One rank's view of a `World`. Its computation is a queue, or (`on_host`) the host's thread."""

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

    def listed(self, queue: Queue, submission: Any) -> Queue:
        return _ListedQueue(queue, submission)

    @property
    def capturing(self) -> bool:
        return self.graph is not None

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Operations queued within it do not run, but become a graph."""
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


def _parts(chunks: Sequence[PlacedChunk]) -> Iterator[tuple[PlacedChunk, Part]]:
    return ((chunk, part) for chunk in chunks for part in chunk.parts)


def _bytes(chunk: PlacedChunk, part: Part) -> torch.Tensor:
    return chunk.tensors[part.number].view(-1).view(torch.uint8)[part.begin : part.begin + part.nbytes]


def _place(world: World, chunk: PlacedChunk, part: Part) -> torch.Tensor:
    begin = chunk.offset + part.offset
    return world.arenas[chunk.keeper][begin : begin + part.nbytes]
