"""Ranks as threads of one process, for tests: they run the same code as ranks that are processes."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from .base import Handle, Peer, Transport

T = TypeVar("T")

_TIMEOUT = 120.0


class _Mailboxes:
    """The queues of messages between ranks: one of each kind for each sender and receiver."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, int, str], queue.Queue] = defaultdict(queue.Queue)
        self._groups: dict[tuple[int, ...], _Mailboxes] = defaultdict(_Mailboxes)

    def of(self, ranks: tuple[int, ...]) -> _Mailboxes:
        """The mailboxes of a group of some of these ranks."""
        with self._lock:
            return self._groups[ranks]

    def box(self, src: int, dst: int, kind: str) -> queue.Queue:
        with self._lock:
            return self._boxes[src, dst, kind]


class _MailHandle(Handle):
    """Receives that have not copied from their mailboxes yet."""

    def __init__(self, waiting: list[tuple[queue.Queue, torch.Tensor]]) -> None:
        self._waiting = waiting

    def wait(self) -> None:
        for box, target in self._waiting:
            source = box.get(timeout=_TIMEOUT)
            assert source.shape == target.shape, (source.shape, target.shape)
            assert source.dtype == target.dtype, (source.dtype, target.dtype)
            target.copy_(source)
        self._waiting = []


class LoopbackTransport(Transport):
    """One rank of a world of threads; `bytes_sent_to[rank]` counts the bytes that it has sent to a rank."""

    def __init__(self, rank: int, size: int, mailboxes: _Mailboxes, ranks_per_node: int | None = None) -> None:
        self.rank = rank
        self.size = size
        self.bytes_sent_to = [0] * size
        self._ranks_per_node = size if ranks_per_node is None else ranks_per_node
        self._mailboxes = mailboxes

    def subgroup(self, ranks: Sequence[int]) -> LoopbackTransport:
        """This rank's transport in a group of some ranks, numbered in the order given; each of these ranks must make it."""
        return LoopbackTransport(list(ranks).index(self.rank), len(ranks), self._mailboxes.of(tuple(ranks)))

    @property
    def bytes_sent(self) -> int:
        return sum(self.bytes_sent_to)

    @property
    def ranks_per_node(self) -> int:
        return self._ranks_per_node

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        for dst, tensor in sends:
            assert tensor.is_contiguous()
            self.bytes_sent_to[dst] += tensor.numel() * tensor.element_size()
            self._mailboxes.box(self.rank, dst, "data").put(tensor.clone())
        return _MailHandle([(self._mailboxes.box(src, self.rank, "data"), tensor) for src, tensor in receives])

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        for dst in range(self.size):
            self._mailboxes.box(self.rank, dst, "control").put(record)
        wait = _TIMEOUT if patience is None else patience
        try:
            return [self._mailboxes.box(src, self.rank, "control").get(timeout=wait) for src in range(self.size)]
        except queue.Empty:
            if patience is None:
                raise
            return None


def run_ranks(size: int, work: Callable[[LoopbackTransport], T], ranks_per_node: int | None = None) -> list[T]:
    """Run `work(transport)` as `size` ranks, each in a thread, and return the results in rank order.

    The transports say that each node has `ranks_per_node` ranks, or (None) that all ranks are on one node. Raises the first rank's
    error; `queue.Empty`, which another rank's error may have caused, only if there is no other.
    """
    mailboxes = _Mailboxes()
    results: list = [None] * size
    errors: list[BaseException | None] = [None] * size

    def start(rank: int) -> None:
        # until torch is asked, a new thread's matrix products take all cores, whatever torch was told, and round otherwise
        torch.get_num_threads()
        try:
            results[rank] = work(LoopbackTransport(rank, size, mailboxes, ranks_per_node))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = next((error for error in errors if error is not None and not isinstance(error, queue.Empty)), None)
    first = first or next((error for error in errors if error is not None), None)
    if first is not None:
        raise first
    return results
