"""The plan of an exchange: which chunk goes through which channel, and in which order a rank stages and pulls.

A plan follows from the sizes of messages, so one plan serves all exchanges of the same sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from .channels import Chunk, Messages, make_chunks, padded, shares, split_at, usable

_LARGEST_CHUNK = 16 << 20  # bytes: of a longer message, the reader pulls the first chunks while the sender stages the next
_KEPT = 1024  # plans

Sizes = tuple[tuple[int, int], ...]  # of messages: (rank, bytes)


class Stage(NamedTuple):
    """A chunk for a rank, through the far or the `near` channel."""

    dst: int
    near: bool
    chunk: Chunk


class Pull(NamedTuple):
    """A chunk from a rank, through the far or the `near` channel, in one of the queues that pull; `last`: of its channel."""

    src: int
    near: bool
    chunk: Chunk
    queue: int
    last: bool


@dataclass(frozen=True)
class ExchangePlan:
    """What a rank does in an exchange of messages of given sizes.

    near: stages through near channels, in groups that hold one chunk for each rank.
    rounds: after those, (stages through far channels, pulls) of each round.
    first_near, first: the first stage of each near, and of each far, channel in use.
    pull_queues: the queues that pull.
    """

    near: tuple[tuple[Stage, ...], ...]
    rounds: tuple[tuple[tuple[Stage, ...], tuple[Pull, ...]], ...]
    first_near: tuple[Stage, ...]
    first: tuple[Stage, ...]
    pull_queues: tuple[int, ...]


@functools.lru_cache(_KEPT)
def make_exchange_plan(
    rank: int, size: int, capacity: int, sends: Sizes, receives: Sizes, at_rest: bool, pull_queues: int
) -> ExchangePlan:
    """The plan of a rank. Each pair of ranks has `capacity` bytes of an arena; `Transport.exchange` explains `at_rest`."""
    rooms = [usable(share) for share in shares(size, capacity)]
    # two chunks fit in a channel side by side: the reader pulls one while the sender stages the next
    largest = [min(room // 2, _LARGEST_CHUNK) for room in rooms]

    def by_channel(messages: Messages) -> Iterable[tuple[bool, list[Chunk]]]:
        """A pair's chunks for the far channel, then those for the near one."""
        if size == 2:
            near, far = split_at(messages, rooms[1], largest[1])
        else:
            # with room for twice as much, no chunk waits until another has been read
            fits = at_rest and sum(padded(nbytes) for *_, nbytes in messages) <= rooms[1] // 2
            near, far = (messages, []) if fits else ([], messages)
        return zip((False, True), map(make_chunks, (far, near), largest))

    stages = [
        [Stage(dst, near, chunk) for chunk in chunks]
        for dst, messages in _by_rank(sends).items()
        for near, chunks in by_channel(messages)
    ]
    pulls = []
    # nearest first, as in a ring
    for src, messages in sorted(_by_rank(receives).items(), key=lambda item: (rank - item[0]) % size):
        queue = (rank - src) % size % pull_queues
        for near, chunks in by_channel(messages):
            pulls.append([Pull(src, near, chunk, queue, chunk is chunks[-1]) for chunk in chunks])
    far_out, near_out = _far_and_near(stages)
    far_into, near_into = _far_and_near(pulls)
    # rule 6 of `staged.py`: first all stages that wait for nothing of this exchange, and in each round stages before pulls
    rounds = [((), pulled) for pulled in _transposed(near_into)]
    rounds += zip_longest(_transposed(far_out), _transposed(far_into), fillvalue=())
    return ExchangePlan(
        near=tuple(_transposed(near_out)),
        rounds=tuple(rounds),
        first_near=tuple(of_channel[0] for of_channel in near_out),
        first=tuple(of_channel[0] for of_channel in far_out),
        pull_queues=tuple(dict.fromkeys(pull.queue for of_channel in pulls for pull in of_channel)),
    )


def _by_rank(sizes: Sizes) -> dict[int, list[tuple[int, int, int]]]:
    """Each rank's messages that are not empty, in order."""
    messages: dict[int, list[tuple[int, int, int]]] = {}
    for number, (rank, nbytes) in enumerate(sizes):
        if nbytes:
            messages.setdefault(rank, []).append((number, 0, nbytes))
    return messages


def _far_and_near(by_channel: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
    """The stages, or pulls, of far channels in use, and those of near channels in use."""
    far, near = ([found for found in by_channel if found and found[0].near == kind] for kind in (False, True))
    return far, near


def _transposed(by_channel: list[list[Any]]) -> list[tuple[Any, ...]]:
    """The first of each channel, then the second of each channel that has one, and so on."""
    return [tuple(one for one in row if one is not None) for row in zip_longest(*by_channel)]
