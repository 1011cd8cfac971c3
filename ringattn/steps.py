"""One rank's part in a schedule: what it sends, receives and computes in each step, in rows of its buffers.

Buffer 0 is the rank's own shard, buffer t > 0 holds the K/V rows that step t computes with. dK/dV of a buffer have its rows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .plan import Plan, Tiles, move_keys
from .rows import Rows
from .schedule import Schedule, Transfer, gradient_transfers

# rows of long shards are divided at multiples of what kernels take at once
_BLOCK = 128


@dataclass(frozen=True, eq=False)
class Message:
    """Rows of a buffer, or of its dK/dV, that go to, or come from, a peer."""

    peer: int
    buffer: int
    slots: Rows
    whole: bool  # these are all of the buffer's rows


class Opening(NamedTuple):
    """A buffer that begins to fill, of so many rows: new, or made of the one with the number `old`, which nobody needs any more."""

    number: int
    rows: int
    old: int | None


@dataclass(frozen=True, eq=False)
class Step:
    """One rank's part in one step of a pass. `tiles` is over the rows from `begin` on of `buffer`.

    While they are computed, `sends` and `receives` move K/V, after `opens` has told which buffers begin to fill. In the backward pass
    also `grads_out` leave the dK/dV of earlier buffers, and `grads_in` come, each into one of the `boxes`, to be added to those of
    this step's buffer or of the rank's own; `grads_opens` tells which buffers of dK/dV this needs, `collects` whether anybody wants
    those of this step's buffer, and `adds` whether something is in them already. `closes` and `grads_close` name the buffers that are
    let go after this step.
    """

    tiles: Tiles
    buffer: int
    begin: int = 0
    opens: tuple[Opening, ...] = ()
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    grads_out: tuple[Message, ...] = ()
    grads_in: tuple[Message, ...] = ()
    grads_opens: tuple[Opening, ...] = ()
    boxes: tuple[Message, ...] = ()
    collects: bool = True
    adds: bool = False
    closes: tuple[int, ...] = ()
    grads_close: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of a forward and of a backward pass; in each, all ranks have equally many."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @cached_property
    def last(self) -> int:
        """The last step of the forward pass in which something is computed; 0 if none."""
        return max((t for t, step in enumerate(self.forward) if len(step.tiles)), default=0)

    @cached_property
    def alone(self) -> bool:
        """Whether the first step of the backward pass computes all of the gradients, and no others pass through this rank."""
        return not any(len(step.tiles) or step.grads_in or step.grads_out for step in self.backward[1:])


def make_steps(schedule: Schedule, plan: Plan, rank: int) -> Steps:
    """A rank's steps. The last one of the backward pass is there for the gradients of the one before.

    While the last gradients travel, the rank computes the second half of what it sees of its own shard; the first half hides the
    first K/V.
    """
    transfers = schedule.transfers(plan)
    buffers = _buffers(plan, rank, transfers)
    kv = _Messages(buffers, rank, transfers)
    grads = _Messages(buffers, rank, gradient_transfers(schedule, plan, transfers))
    count = 1 + max((t.into for t in transfers), default=0)
    times = range(count + (count > 1))
    numbers = itertools.count(-1, -1)  # below those of all other buffers
    boxes = [tuple(_box(message, next(numbers)) for message in grads.into[t]) for t in times]
    opens, closes = _reused(
        [[(number, _rows(buffers[number])) for number in kv.first[t]] for t in times],
        [[number for number in buffers if number and max(number, kv.last.get(number, 0)) == t] for t in times],
    )
    grads_opens, grads_close = _reused(
        [
            [*((box.buffer, len(box.slots)) for box in boxes[t]), *((t, _rows(buffers[t])) for _ in range(t in grads.last))]
            for t in times
        ],
        [
            [*(box.buffer for box in boxes[t]), *(number for number in buffers if number and grads.last.get(number) == t)]
            for t in times
        ],
    )
    steps = [
        Step(
            _tiles(plan, rank, buffers.get(t, ())),
            buffer=t,
            opens=opens[t],
            sends=tuple(kv.out[t]),
            receives=tuple(kv.into[t]),
            grads_out=tuple(grads.out[t]),
            grads_in=tuple(grads.into[t]),
            grads_opens=grads_opens[t],
            boxes=boxes[t],
            collects=t == 0 or t in grads.last,
            closes=closes[t],
            grads_close=grads_close[t],
        )
        for t in times
    ]
    forward, last = tuple(steps[:count]), steps[-1]
    own = steps[0].tiles
    half = _half(own) if last.grads_out or last.grads_in else 0
    if half:
        steps[0] = replace(steps[0], tiles=own.of_keys(0, half))
        rest = own.of_keys(half, own.k_rows)
        received = any(message.buffer == 0 for step in steps[:-1] for message in step.grads_in)
        steps[-1] = replace(last, tiles=rest, buffer=0, begin=half, collects=True, adds=received)
    return Steps(forward, tuple(steps))


def _reused(opens: list[list[tuple[int, int]]], closes: list[list[int]]) -> tuple[list[tuple[Opening, ...]], list[tuple[int, ...]]]:
    """What opens, (number, rows), and closes in each step, with what closes at the end of one step reused in the next."""
    sizes: dict[int, int] = {}
    found: list[tuple[Opening, ...]] = []
    closed: list[int] = []
    for t, step in enumerate(opens):
        openings = []
        for number, rows in step:
            old = next((old for old in closed if sizes[old] == rows), None)
            if old is not None:
                closed.remove(old)
                closes[t - 1].remove(old)
            openings.append(Opening(number, rows, old))
        sizes.update(step)
        closed = list(closes[t])
        found.append(tuple(openings))
    return found, [tuple(step) for step in closes]


def local_steps(tiles: Tiles) -> Steps:
    """The steps of a rank that has all it needs."""
    steps = (Step(tiles, 0),)
    return Steps(steps, steps)


@dataclass(frozen=True, eq=False)
class Piece:
    """An owner's rows in a buffer: rows [begin, begin + len(rows)) of it."""

    owner: int
    rows: Rows
    begin: int

    @property
    def end(self) -> int:
        return self.begin + len(self.rows)

    def slots(self, rows: Rows) -> Rows:
        """Some of the owner's rows as rows of the buffer."""
        if rows is self.rows:
            return Rows.span(self.begin, self.end)
        return Rows(rows.within(self.rows).ranges + self.begin)


Buffers = dict[int, tuple[Piece, ...]]


def _buffers(plan: Plan, rank: int, transfers: Iterable[Transfer]) -> Buffers:
    """What a rank holds in each buffer that it has."""
    owners: defaultdict[int, dict[int, Rows]] = defaultdict(dict)
    for t in transfers:
        if t.dst == rank:
            held = owners[t.into].get(t.owner)
            owners[t.into][t.owner] = t.rows if held is None else held | t.rows
    buffers: Buffers = {0: (Piece(rank, Rows.span(0, plan.lengths[rank]), 0),)}
    for number, held in owners.items():
        ends = np.cumsum([len(rows) for rows in held.values()]).tolist()
        buffers[number] = tuple(Piece(owner, rows, end - len(rows)) for (owner, rows), end in zip(held.items(), ends))
    return buffers


class _Messages:
    """A rank's transfers as messages, by step."""

    def __init__(self, buffers: Buffers, rank: int, transfers: Iterable[Transfer]) -> None:
        self.out: defaultdict[int, list[Message]] = defaultdict(list)
        self.into: defaultdict[int, list[Message]] = defaultdict(list)
        self.first: defaultdict[int, list[int]] = defaultdict(list)  # buffers that begin to fill in a step
        self.last: dict[int, int] = {}  # the last step in which a buffer's rows leave
        opened = set()
        for t in sorted(transfers, key=lambda t: t.step):
            if t.src == rank:
                self.out[t.step].append(_message(buffers, t.dst, t.held, t))
                self.last[t.held] = t.step
            elif t.dst == rank:
                self.into[t.step].append(_message(buffers, t.src, t.into, t))
                # K/V arrive in place
                assert t.held >= t.step or t.into <= t.step or len(self.into[t.step][-1].slots.ranges) == 1
                if t.into not in opened:
                    opened.add(t.into)
                    self.first[t.step].append(t.into)


def _message(buffers: Buffers, peer: int, number: int, transfer: Transfer) -> Message:
    piece = next(piece for piece in buffers[number] if piece.owner == transfer.owner)
    slots = piece.slots(transfer.rows)
    return Message(peer, number, slots, len(slots) == _rows(buffers[number]))


def _box(message: Message, number: int) -> Message:
    """Where dK/dV arrive that are to be added to others: a buffer of their own."""
    return Message(message.peer, number, Rows.span(0, len(message.slots)), whole=True)


def _rows(buffer: tuple[Piece, ...]) -> int:
    return buffer[-1].end if buffer else 0


def _tiles(plan: Plan, rank: int, buffer: tuple[Piece, ...]) -> Tiles:
    """What a rank computes with a buffer."""
    tiles = [move_keys(plan.tiles(rank, piece.owner), piece.rows, piece.begin) for piece in buffer]
    return Tiles(np.concatenate(tiles) if tiles else np.empty((0, 6), dtype=np.int64), plan.lengths[rank], _rows(buffer))


def _half(tiles: Tiles) -> int:
    """How many of the first keys have about half of the live pairs; 0 if the keys cannot be divided."""
    half = bisect_left(range(tiles.k_rows), tiles.pairs / 2, key=tiles.pairs_before)
    if half > _BLOCK:
        half -= half % _BLOCK
    return half if 0 < half < tiles.k_rows else 0
