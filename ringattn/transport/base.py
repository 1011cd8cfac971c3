"""The interface of transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Peer(NamedTuple):
    """A rank of the group, and the tensor to send to it or to receive from it."""

    rank: int
    tensor: torch.Tensor


class Handle(ABC):
    """A transfer under way."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the tensors may be used. On a GPU the host does not wait, but the current stream, which must be the one current at
        the transfer's start."""


class Ranks(ABC):
    """A group of ranks, 0 to size - 1, that can swap short records."""

    rank: int
    size: int
    context: Any = None  # the `Context` of this group, once it is made
    order: Any = None  # the `CallOrder` of its calls, likewise

    @abstractmethod
    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        """Every rank's record, all of one length, over a channel between the hosts that waits for no device.

        Blocks until all ranks have called. With `patience`, returns None after that many seconds.
        """

    def posting(self, quick: Any = None) -> Callable[[bytes], Callable[[], list[bytes]]]:
        """`all_gather_control` without patience in two parts, past all that stands between; for ranks that are connected.

        The first part takes this rank's record, which the others may read from then on if they share memory with it, and returns the
        second, which waits for theirs. No other record may come between the two. quick: does it in C where the ranks share memory
        (`post` and `swap` of `ringattn_kernels/submission.c`), or None.
        """

        def post(record: bytes) -> Callable[[], list[bytes]]:
            def collect() -> list[bytes]:
                records = self.all_gather_control(record, None)
                assert records is not None
                return records

            return collect

        return post

    @property
    def ranks_per_node(self) -> int | None:
        """The number of ranks on each node: rank // ranks_per_node is a rank's node.

        None if nodes hold different numbers of ranks, or ranks that are not consecutive.
        """
        return self.size

    def check_device(self, device: torch.device) -> None:  # noqa: B027 - transports may allow all devices
        """Raise ValueError if tensors on this device cannot move between the ranks."""

    def connect(self, device: torch.device) -> None:  # noqa: B027 - transports may have nothing to set up
        """Set up what the first exchange of tensors on this device needs; all ranks call it together."""


class Transport(Ranks):
    """A group of ranks that can exchange tensors."""

    @property
    def copy_engines(self) -> bool:
        """Whether copy engines move the messages, so that no multiprocessors are needed; known once `connect` has returned."""
        return False

    @property
    def recorded_with(self) -> tuple | None:
        """What a recorded exchange (`ringattn_kernels.recordings`) depends on besides its messages; None if exchanges are not recorded."""
        return None

    @abstractmethod
    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        """Start sending and receiving contiguous tensors, all at once; leave the tensors alone until the handle's `wait`.

        Between two ranks, receives match sends in order and in size: both sides know the sizes beforehand. at_rest, the same on both
        sides: nothing computes while the exchange starts.
        """

    def all_gather(self, rows: torch.Tensor) -> None:
        """Fill the other ranks' rows of a contiguous tensor (ranks, ...) that has this rank's own; all ranks call it together.

        The current stream then has them, and the host waits for nothing.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [Peer(rank, rows[self.rank]) for rank in others]
        self.exchange(sends, [Peer(rank, rows[rank]) for rank in others]).wait()


class Done(Handle):
    """A transfer of nothing."""

    def wait(self) -> None:
        pass


class SilentTransport(Transport):
    """The transport of one rank whose peers always agree with it and send nothing: for what a rank does by itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        return Done()

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        return [record] * self.size


class Alone(Transport):
    """A group of one rank, which exchanges nothing."""

    rank = 0
    size = 1

    @property
    def recorded_with(self) -> tuple | None:
        return ()

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        assert not sends
        assert not receives
        return Done()

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        return [record]
