"""One rank's part in a schedule: what it sends, receives and computes in each step, in rows of its buffers.

Buffer 0 is the rank's own shard, buffer t > 0 holds the K/V rows that step t computes with. dK/dV of a buffer have its rows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..geometry.plan import Plan, Tiles, move_keys
from ..geometry.rows import Rows
from .schedules import WAITING, Schedule, Transfer, forward_transfers, gradient_transfers

# rows of long shards are divided at multiples of what kernels take at once
_BLOCK = 128
# rows of a shard up to which three launches run side by side, and half of it for each further one: measured on four H200s
_LONG = 16384


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
    also `grads_out` leave the dK/dV of earlier buffers, and `grads_in` come, each into one of the `boxes`; `sums` are what earlier steps
    received, with the boxes, to be added before these leave. `collects` tells whether anybody wants the dK/dV of this step's buffer, and
    `adds` whether something is in them already.

    A step of the backward pass may begin to compute as soon as the exchange of the step before has ended, while that step still
    computes: so it writes to no memory that the step before needs, or that the sums between them change. `grads_opens` tells which
    buffer of dK/dV it makes, before anything else, and `box_opens` which boxes, after the sums. `grads_close` are let go when the
    exchange has ended, `boxes_close` when the sums have been added, and `closes` then in the next step.
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
    sums: tuple[tuple[Message, Message], ...] = ()
    box_opens: tuple[Opening, ...] = ()
    collects: bool = True
    adds: bool = False
    closes: tuple[int, ...] = ()
    grads_close: tuple[int, ...] = ()
    boxes_close: tuple[int, ...] = ()
    at_rest: bool = False  # see `Transport.exchange`

    @cached_property
    def moves(self) -> bool:
        """Whether there is anything to exchange."""
        return bool(self.sends or self.receives or self.grads_out or self.boxes)


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of a forward and of a backward pass; in each, all ranks have equally many. `sums` are added after the last one."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    sums: tuple[tuple[Message, Message], ...] = ()

    @cached_property
    def last(self) -> int:
        """The last step of the forward pass in which something is computed; 0 if none."""
        return max((t for t, step in enumerate(self.forward) if len(step.tiles)), default=0)

    @cached_property
    def side_by_side(self) -> bool:
        """Whether launches of the backward pass that run side by side are faster than one after another.

        Sums between them would wait for processors, and exchanges for the sums. Long launches, and the more of them there are, lose more
        than the processors that are idle at the end of each: their programs no longer read the same queries at the same time.
        """
        launches = sum(len(step.tiles) > 0 for step in self.backward)
        long = self.backward[0].tiles.q_rows << max(0, launches - 3) > _LONG
        return launches > 1 and not long and not any(step.sums for step in self.backward)

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
    fetching = _fetching(plan, rank, transfers, buffers)
    wider = forward_transfers(schedule, plan, transfers)
    forward = fetching if wider is transfers else _fetching(plan, rank, wider, _buffers(plan, rank, wider))
    gradients = _Messages(buffers, rank, gradient_transfers(schedule, plan, transfers))
    steps = _exchanging(fetching, gradients)
    sums = _sums(steps)
    steps = [replace(step, sums=tuple(before)) for step, before in zip(steps, sums)]
    own, last = steps[0].tiles, steps[-1]
    half = _half(own) if last.grads_out or last.grads_in else 0
    if half:
        received = any(message.buffer == 0 for step in steps for message, _ in step.sums)
        steps[0] = replace(steps[0], tiles=own.of_keys(0, half))
        steps[-1] = replace(last, tiles=own.of_keys(half, own.k_rows), buffer=0, begin=half, collects=True, adds=received)
    sizes = {t: _rows(buffers[t]) for t in gradients.last if t}
    leave = [[number for number in sizes if gradients.last[number] == t] for t in range(len(steps))]
    return Steps(tuple(forward), tuple(_with_gradients(steps, sizes, leave)), tuple(sums[-1]))


def _fetching(plan: Plan, rank: int, transfers: list[Transfer], buffers: Buffers) -> list[Step]:
    """The steps of transfers of K/V alone."""
    kv = _Messages(buffers, rank, transfers)
    times = range(1 + max((t.into for t in transfers), default=0))
    # alike on all ranks: where several messages come at first, less time hides each
    crowded = max(Counter(t.dst for t in transfers if t.step == 0).values(), default=0) > 1
    opens, closes = _reused(
        [[(number, _rows(buffers[number])) for number in kv.first[t]] for t in times],
        [[number for number in buffers if number and max(number, kv.last.get(number, 0)) == t] for t in times],
    )
    return [
        Step(
            _tiles(plan, rank, buffers.get(t, ())),
            buffer=t,
            opens=opens[t],
            sends=tuple(kv.out[t]),
            receives=tuple(kv.into[t]),
            closes=closes[t],
            at_rest=t == 0 and crowded,
        )
        for t in times
    ]


def _exchanging(fetching: list[Step], gradients: _Messages) -> list[Step]:
    """These steps with gradients on their way, and with a step more for the last of them."""
    count = len(fetching)
    if count > 1:
        fetching = [*fetching, Step(fetching[0].tiles.of_keys(0, 0), buffer=count)]
    numbers = itertools.count(-1, -1)  # below those of all other buffers
    return [
        replace(
            step,
            grads_out=tuple(gradients.out[t]),
            grads_in=tuple(gradients.into[t]),
            boxes=tuple(_box(message, next(numbers)) for message in gradients.into[t]),
            collects=t == 0 or t in gradients.last,
        )
        for t, step in enumerate(fetching)
    ]


_Sums = list[tuple[Message, Message]]


def _sums(steps: list[Step]) -> list[_Sums]:
    """What is added before each step's exchange, and after the last step: messages and their boxes.

    What others wait for is added in the next step. What came home may wait for `WAITING` steps more, so that fewer exchanges wait for
    sums, and at the end for the last step, which computes the rank's own dK/dV.
    """
    found: list[_Sums] = [[] for _ in range(len(steps) + 1)]
    home: list[_Sums] = []
    for t, step in enumerate(steps):
        came = list(zip(step.grads_in, step.boxes))
        found[t + 1] += [one for one in came if one[0].buffer]
        home += [[one for one in came if not one[0].buffer]]
        if t >= WAITING and t + 2 < len(steps):
            found[t + 1] += home[t - WAITING]
            home[t - WAITING] = []
    found[-1] += [one for ones in home for one in ones]
    return found


def _with_gradients(steps: list[Step], sizes: dict[int, int], leave: list[list[int]]) -> list[Step]:
    """Steps that tell when dK/dV open and close: of buffers of some sizes, which have left in a step, and the boxes of what comes."""
    # two moments a step: its dK/dV begin while the step before may still compute, its boxes after the sums
    opens, closes = ([[] for _ in range(2 * len(steps) + 1)] for _ in range(2))
    for t, step in enumerate(steps):
        opens[2 * t] += [(number, rows) for number, rows in sizes.items() if number == t]
        opens[2 * t + 1] += [(box.buffer, len(box.slots)) for box in step.boxes]
        closes[2 * t + 1] += leave[t]
        closes[2 * t] += [box.buffer for _, box in step.sums]
    opened, closed = _reused(opens, closes)
    return [
        replace(
            step,
            grads_opens=opened[2 * t],
            box_opens=opened[2 * t + 1],
            grads_close=closed[2 * t + 1],
            boxes_close=closed[2 * t],
        )
        for t, step in enumerate(steps)
    ]


def _reused(opens: list[list[tuple[int, int]]], closes: list[list[int]]) -> tuple[list[tuple[Opening, ...]], list[tuple[int, ...]]]:
    """What opens, (number, rows), and closes at each moment, with what closes at the end of one reused at the next."""
    sizes: dict[int, int] = {}
    found: list[tuple[Opening, ...]] = []
    closed: list[int] = []
    for t, moment in enumerate(opens):
        openings = []
        for number, rows in moment:
            old = next((old for old in closed if sizes[old] == rows), None)
            if old is not None:
                closed.remove(old)
                closes[t - 1].remove(old)
            openings.append(Opening(number, rows, old))
        sizes.update(moment)
        closed = list(closes[t])
        found.append(tuple(openings))
    return found, [tuple(moment) for moment in closes]


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
                assert t.into <= t.step or len(self.into[t.step][-1].slots.ranges) == 1
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
