"""Channels as a recorded exchange lists them: places and counts are numbers that each run of the recording has anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .channels import Channel, Channels, Chunk
from .memory import Addressed, PlacedChunk

if TYPE_CHECKING:
    from ringattn_kernels.recorder import Find
    from ringattn_kernels.submission import Submission


class FoundAddress:
    """What stands for a tensor: its address is a number of each run, unless the tensor was there before."""

    def __init__(self, x: torch.Tensor, find: Find) -> None:
        found = find(x)
        self._address: Any = x.data_ptr() if found is None else found

    def data_ptr(self) -> Any:
        return self._address


class ListedChannels(Channels):
    """A rank's channels, of which each placement is listed, and made anew by `next_places`, in the same order."""

    def __init__(self, channels: Channels, submission: Submission) -> None:
        self._placed: list[tuple[Channel, Chunk]] = []
        self.out, self.into = (
            {peer: tuple(_ListedChannel(x, submission, self._placed) for x in pair) for peer, pair in pairs.items()}
            for pairs in (channels.out, channels.into)
        )

    def next_places(self) -> list[int]:
        """The numbers of a run: the place of each chunk in its arena, how many chunks must have been read, and the channel's count."""
        numbers = []
        for channel, chunk in self._placed:
            offset, must_be_read = channel.next(chunk.nbytes)
            if must_be_read > channel.awaited:
                channel.awaited = must_be_read
            numbers += offset, channel.awaited, channel.count
        return numbers


class _ListedChannel(Channel):
    """A channel whose places are told later. A sender always waits: if there is no need to, it waits for what was awaited before."""

    def __init__(self, channel: Channel, submission: Submission, placed: list[tuple[Channel, Chunk]]) -> None:
        self._channel, self._submission, self._placed = channel, submission, placed
        self.keeper, self.ready, self.read = channel.keeper, channel.ready, channel.read
        self.awaited, self.count = channel.awaited, channel.count

    def has_to_await(self, must_be_read: int) -> bool:
        return True

    def place(self, chunk: Chunk, tensors: Sequence[Addressed]) -> PlacedChunk:
        offset, must_be_read, count = self._submission.more_numbers(3)
        self.count: Any = count  # pyrefly: ignore[bad-assignment]
        self._placed.append((self._channel, chunk))
        numbers: Any = offset, must_be_read
        return PlacedChunk(tensors, chunk.parts, self.keeper, *numbers)
