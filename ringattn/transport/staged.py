"""Exchanges through memory that all ranks map: the protocol, apart from any device. Its rules, and their reasons:

1. Each ordered pair of ranks has a channel: a ring buffer in some rank's arena. Both ends compute the place of each chunk from the
   sizes of the pair's messages alone (`channels.py`, `exchange_plan.py`), so ranks negotiate nothing.
2. Per chunk, the sender waits until the reader has read what lay in the chunk's place, stages the chunk (copies it there), and raises
   the reader's count "ready". The reader waits for that count, pulls the chunk (copies it straight into its target), and raises the
   sender's count "read". Counts only grow; one rank writes each count, and the other waits for it in its own memory. So no chunk
   is read before it is whole, and none is overwritten before it is read.
3. With three ranks or more, a pair's channel lies with a third rank. Both copies then run between GPUs, and copy engines do such copies
   beside kernels that fill the GPU. A copy within a GPU needs its multiprocessors.
4. Each pair has a second, near channel with the sender, who stages into it before it computes. With three ranks or more it carries
   small messages of exchanges at rest: they cross the links once and arrive in half the time.
5. Two ranks have no third rank. There the near channel carries as much of every exchange as it has room for. The far channel lies
   with the reader and carries the rest: the reader pulls when its own computation has ended, and never waits for the sender's.
6. Everything is queued; the host waits for nothing. Stages and pulls are queued in the order of exchanges, and of rounds within an
   exchange, so that each waits only for what some rank has queued before. If ranks name a message in the same exchange, they cannot
   deadlock, even where a device runs all its streams as one.
7. A CUDA graph replays a captured exchange with the counts of its capture. So captured exchanges have counts of their own, and each
   finds and leaves them at zero and its channels empty. The reader sets "ready" back to zero at its last value, and only then
   raises "read" to its last value. The sender waits for that at the end of the exchange, and sets "read" back to zero. So no count
   is raised anew before it was set back, and ranks need no barrier between replays.
8. Exchanges that are not captured use the same places. Once an exchange has been captured, they too wait at their end until all is
   read, so that a replay finds its channels empty.
9. A graph keeps no order but that of its edges. So whatever must be queued before a wait precedes it along edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringattn_kernels.recorder import recorder

from .base import Done, Handle, Peer, Ranks, Transport
from .channels import Channel, Channels, Chunk
from .exchange_plan import ExchangePlan, Stage, make_exchange_plan
from .listed_channels import FoundAddress, ListedChannels
from .memory import Addressed, Mark, Memory, Queue

if TYPE_CHECKING:
    from ringattn_kernels.recorder import Find, Later
    from ringattn_kernels.submission import Submission


class _StagedHandle(Handle):
    """An exchange in the queues; it holds the exchange's tensors until `wait`."""

    def __init__(self, current: Queue, marks: list[Mark], tensors: Sequence[torch.Tensor], outstanding: set[Handle]) -> None:
        self._current = current
        self._marks = marks
        self._tensors = tensors
        # keeps this handle, and so its tensors, alive until the current queue waits for the transfer, even if the caller drops it
        self._outstanding = outstanding
        outstanding.add(self)
        self.recorded: RecordedExchange | None = None

    def wait(self) -> None:
        if self in self._outstanding:
            for mark in self._marks:
                self._current.after(mark)
            self._outstanding.remove(self)
            self._tensors = ()
            if self.recorded is not None:
                recorder.note(self.recorded.wait)


class StagedTransport(Transport):
    """Exchanges through a `Memory`; another transport carries the hosts' records.

    The two ranks of a message must name it in the same exchange, counted from the first on. Schedules do so.
    """

    _PULL_QUEUES = 2  # each serves every second rank

    def __init__(self, control: Ranks) -> None:
        self.rank = control.rank
        self.size = control.size
        self._control = control
        self._memory: Memory | None = None
        self._outstanding: set[Handle] = set()
        self._captured = False  # whether any exchange was captured

    @property
    def ranks_per_node(self) -> int | None:
        return self._control.ranks_per_node

    @property
    def recorded_with(self) -> tuple | None:
        return (self._captured,)

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        return self._control.all_gather_control(record, patience)

    def posting(self, quick: Any = None) -> Callable[[bytes], Callable[[], list[bytes]]]:
        return self._control.posting(quick)

    def _use(self, memory: Memory) -> None:
        """Exchange through this memory from now on."""
        self._memory = memory
        self._channels = Channels(self.rank, self.size, memory.capacity)
        self._stages, self._near = memory.queue(), memory.queue()
        self._pulls = [memory.queue() for _ in range(min(self._PULL_QUEUES, self.size - 1))]

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        if not sends and not receives:
            return Done()
        memory = self._memory
        if memory is None:
            recorder.cannot_note("an exchange before the ranks are connected")
        assert memory is not None, "connect comes first"
        sent, received = [x for _, x in sends], [x for _, x in receives]
        assert all(map(torch.Tensor.is_contiguous, sent + received))
        sizes = tuple([(rank, x.nbytes) for rank, x in sends]), tuple([(rank, x.nbytes) for rank, x in receives])
        plan = make_exchange_plan(self.rank, self.size, memory.capacity, *sizes, at_rest, len(self._pulls))
        if recorder.rehearses:
            return self._rehearsed(memory, plan, sent, received)
        captured = memory.capturing
        self._captured |= captured
        channels = Channels(self.rank, self.size, memory.capacity, captured=True) if captured else self._channels
        queues = _Queues(memory.current, self._stages, self._near, self._pulls)
        marks = _queue(queues, channels, plan, sent, received, captured, self._captured)
        handle = _StagedHandle(queues.current, marks, sent + received, self._outstanding)
        if recorder.steps is not None:
            handle.recorded = RecordedExchange(memory, queues, channels, plan, sent, received, self._captured)
            recorder.note(handle.recorded)
        return handle

    def _rehearsed(self, memory: Memory, plan: ExchangePlan, sent: list[torch.Tensor], received: list[torch.Tensor]) -> Handle:
        """Note an exchange that does not take place."""
        queues = _Queues(memory.current, self._stages, self._near, self._pulls)
        # of its own: a rehearsal that ends early leaves nothing with the transport
        handle = _StagedHandle(queues.current, [], (), set())
        handle.recorded = RecordedExchange(memory, queues, self._channels, plan, sent, received, self._captured)
        recorder.note(handle.recorded)
        return handle


class _Queues(NamedTuple):
    """The queues of an exchange: the one that computes, those that stage into far and near channels, and those that pull."""

    current: Queue
    stages: Queue
    near: Queue
    pulls: list[Queue]


def _queue(
    queues: _Queues, channels: Channels, plan: ExchangePlan, sent: Sequence[Addressed], received: Sequence[Addressed],
    captured: bool, drained: bool,
) -> list[Mark]:  # fmt: skip
    """Queue all that a rank does in an exchange; the marks after which its messages have gone and come."""
    current, stages, near, all_pulls = queues
    pulls = all_pulls if captured else [all_pulls[index] for index in plan.pull_queues]
    used = [*pulls, *([near] if plan.near or captured else []), *([stages] if plan.first or captured else [])]
    _follow(used, [current])
    for staged in plan.near:
        used_near = _copy_in(near, channels, staged, sent, captured, all_pulls)
        # who computes waits for the copies alone: counts take a while to reach ranks whose links are busy
        copied = near.mark()
        near.raise_to([(channel.ready, channel.count) for channel in used_near])
        if staged is plan.near[-1]:
            current.after(copied)
    for staged, pulled in plan.rounds:
        if staged:
            _stage(stages, channels, staged, sent, captured, all_pulls)
        if captured:
            _follow(all_pulls, [near, stages])
        for src, is_near, chunk, index, last in pulled:
            _pull(all_pulls[index], channels.into[src][is_near], chunk, received, captured and last)
    if drained:
        for queue, firsts in ((near, plan.first_near), (stages, plan.first)):
            _drain(queue, [channels.out[dst][is_near] for dst, is_near, _ in firsts], captured, all_pulls)
    else:
        # the current queue already waits for the near stages
        used = [queue for queue in used if queue is not near]
    return [queue.mark() for queue in used]


class RecordedExchange:
    """An exchange of a pass that is recorded: it lists what it has queued in a submission, whose runs have other places and counts."""

    def __init__(
        self, memory: Memory, queues: _Queues, channels: Channels, plan: ExchangePlan, sent: list[torch.Tensor],
        received: list[torch.Tensor], drained: bool,
    ) -> None:  # fmt: skip
        self._memory, self._queues, self._channels, self._plan = memory, queues, channels, plan
        self._sent, self._received, self._drained = sent, received, drained

    def __call__(self, submission: Submission, find: Find) -> Later:
        current, stages, near, pulls = self._queues
        current, stages, near, *pulls = (self._memory.listed(x, submission) for x in (current, stages, near, *pulls))
        listed = _Queues(current, stages, near, pulls)
        channels = ListedChannels(self._channels, submission)
        sent, received = ([FoundAddress(x, find) for x in tensors] for tensors in (self._sent, self._received))
        self._current = listed.current
        self._marks = _queue(listed, channels, self._plan, sent, received, False, self._drained)
        self._sent = self._received = []
        return channels.next_places

    def wait(self, submission: Submission, find: Find) -> None:
        """The step in which the queue that computes waits for this exchange."""
        for mark in self._marks:
            self._current.after(mark)


def _stage(
    queue: Queue, channels: Channels, staged: Sequence[Stage], sent: Sequence[Addressed], captured: bool, pulls: Sequence[Queue]
) -> None:
    """Wait until the places of chunks are free, copy the chunks there, and say that they are ready."""
    used = _copy_in(queue, channels, staged, sent, captured, pulls)
    queue.raise_to([(channel.ready, channel.count) for channel in used])


def _copy_in(
    queue: Queue, channels: Channels, staged: Sequence[Stage], sent: Sequence[Addressed], captured: bool, pulls: Sequence[Queue]
) -> list[Channel]:
    """Wait until the places of chunks are free, and copy the chunks there. Returns their channels."""
    used = [channels.out[dst][is_near] for dst, is_near, _ in staged]
    placed = [channel.place(stage.chunk, sent) for channel, stage in zip(used, staged)]
    waits = [(channel.read, chunk.must_be_read) for channel, chunk in zip(used, placed) if channel.has_to_await(chunk.must_be_read)]
    if waits:
        if captured:
            _follow([queue], pulls)
        queue.wait(waits)
    queue.stage(placed)
    return used


def _pull(queue: Queue, channel: Channel, chunk: Chunk, received: Sequence[Addressed], set_back: bool) -> None:
    """Wait until a chunk is ready, copy it to its targets, and say that it is read."""
    placed = channel.place(chunk, received)
    queue.wait([(channel.ready, channel.count)])
    if set_back:
        queue.set_back([channel.ready])
    queue.pull([placed])
    queue.raise_to([(channel.read, channel.count)])


def _drain(queue: Queue, channels: list[Channel], captured: bool, pulls: Sequence[Queue]) -> None:
    """Wait until the readers have read all chunks of these channels."""
    if not channels:
        return
    if captured:
        _follow([queue], pulls)
    queue.wait([(channel.read, channel.count) for channel in channels])
    if captured:
        queue.set_back([channel.read for channel in channels])
    for channel in channels:
        channel.awaited = channel.count


def _follow(queues: Sequence[Queue], others: Sequence[Queue]) -> None:
    """Later operations of these queues run after all operations queued in the others so far."""
    for other in others:
        mark = other.mark()
        for queue in queues:
            queue.after(mark)
