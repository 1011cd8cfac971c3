"""The transport's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Peer(NamedTuple):
    """A tensor to send to, or to receive from, a rank of the group."""

    rank: int
    tensor: torch.Tensor


class Handle(ABC):
    """A transfer under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the tensors may be used: on a GPU the current stream waits, which is that of the transfer's start, not the host."""


class Ranks(ABC):
    """A group of ranks, 0 to size - 1, that can agree on what they do."""

    rank: int
    size: int
    context: Any = None  # what `context.py` keeps for them

    @abstractmethod
    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        """Every rank's record, all of one length, over a channel of the hosts that waits for no device.

        Blocks until all ranks have called; with `patience`, for at most so many seconds, and then returns None.
        """

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node: rank // ranks_per_node is a rank's node. None if nodes hold unequally many, or not one after the other."""
        return self.size

    def check_device(self, device: torch.device) -> None:  # noqa: B027 - any device will do, unless a transport says otherwise
        """Raise ValueError if tensors of this device cannot move between the ranks."""

    def connect(self, device: torch.device) -> None:  # noqa: B027 - nothing to set up, unless a transport says otherwise
        """Set up what the first exchange of tensors of this device needs; all ranks call it together."""


class Transport(Ranks):
    """A group of ranks that can exchange tensors."""

    @property
    def copy_engines(self) -> bool:
        """Whether these move messages, without processors; known once `connect` has returned."""
        return False

    @abstractmethod
    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        """Start sending and receiving contiguous tensors, all at once; the tensors must be left alone until the handle's `wait`.

        Between two ranks, receives match sends in order, and sizes agree: both sides know them beforehand. at_rest, the same on both:
        nothing computes while the exchange starts.
        """


class Done(Handle):
    """A transfer of nothing."""

    def wait(self) -> None:
        pass


class Alone(Transport):
    """A world of one rank: there is nobody to exchange anything with."""

    rank = 0
    size = 1

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Handle:
        assert not sends
        assert not receives
        return Done()

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        return [record]
