"""What the protocol of `staged.py` needs from a device: `Memory` that all ranks map, and `Queue`s that copy and count in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from ringattn_kernels.submission import Submission

Mark = Any  # a point in a queue


class Addressed(Protocol):
    """A tensor, or what stands for one."""

    def data_ptr(self) -> Any: ...


class Part(NamedTuple):
    """`nbytes` bytes, from byte `begin` on, of the tensor `number` of an exchange's sends or receives; at `offset` in their chunk."""

    number: int
    begin: int
    nbytes: int
    offset: int


class PlacedChunk(NamedTuple):
    """A chunk's parts of `tensors`, and its place: `offset` in the arena of the rank `keeper`.

    The sender may write there once the reader has read the channel's first `must_be_read` chunks.
    """

    tensors: Sequence[Addressed]
    parts: tuple[Part, ...]
    keeper: int
    offset: int
    must_be_read: int


class Count(NamedTuple):
    """A number of chunks of the far or the `near` channel between this rank and a `peer`, in this rank's memory.

    ready: chunks that the peer has staged for this rank; otherwise chunks that the peer has read from this rank. Captured exchanges
    have counts of their own.
    """

    near: bool
    ready: bool
    peer: int
    captured: bool = False


Values = Sequence[tuple[Count, int]]


class Queue(ABC):
    """Operations that run one after another, and beside those of other queues."""

    @abstractmethod
    def mark(self) -> Mark:
        """The point after all operations queued so far."""

    @abstractmethod
    def after(self, mark: Mark) -> None:
        """Wait until another queue has reached a mark."""

    @abstractmethod
    def wait(self, values: Values) -> None:
        """Wait until this rank's counts have reached these values."""

    @abstractmethod
    def stage(self, chunks: Sequence[PlacedChunk]) -> None:
        """Copy from tensors to their places."""

    @abstractmethod
    def pull(self, chunks: Sequence[PlacedChunk]) -> None:
        """Copy from places to tensors."""

    @abstractmethod
    def raise_to(self, values: Values) -> None:
        """Set these counts at their peers, once all earlier operations are done."""

    @abstractmethod
    def set_back(self, counts: Sequence[Count]) -> None:
        """Set these counts of this rank to zero, before any later operation."""


class Memory(ABC):
    """A rank's arena and counts, and access to those of all ranks. An arena has room for `size` - 1 channels of `capacity` bytes."""

    rank: int
    size: int
    capacity: int

    @property
    @abstractmethod
    def current(self) -> Queue:
        """The queue that computes."""

    @property
    def capturing(self) -> bool:
        """Whether operations queued now are captured, to be replayed later."""
        return False

    @abstractmethod
    def queue(self) -> Queue:
        """A new queue."""

    def listed(self, queue: Queue, submission: Submission) -> Queue:
        """A queue that lists in a submission what it is given, instead of doing it. Only where passes are recorded."""
        raise NotImplementedError
