"""Schedules: the order in which owners' K/V come to hand, as data.

Time runs in steps, numbered alike on all ranks. In step t a rank computes with the K/V rows in its buffer (in step 0: its own
shard) while the transfers of step t fill the buffers of step t + 1. A schedule only says who sends which rows to whom; sizes
follow from the plan, so that nothing is negotiated. Gradients need no route of their own: after a step, the dK/dV rows whose
K/V row was sent on follow it, one step behind, and all others go home to their owner.

Sources: ring (Ring Attention, Liu et al. 2023, section 3); gather, all K/V at once (Llama 3, Dubey et al. 2024, section 3.3.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from .plan import Plan, Rows, Tiles, move_keys


@dataclass(frozen=True)
class Transfer:
    """`rows` of an owner's K/V (or of its dK/dV) from rank `src` to rank `dst`."""

    src: int
    dst: int
    owner: int
    rows: Rows


class Schedule(ABC):
    """Who sends which rows to whom, step by step."""

    @abstractmethod
    def steps(self, world_size: int) -> int:
        """Number of steps in which something is computed."""

    @abstractmethod
    def incoming(self, plan: Plan, rank: int, step: int) -> tuple[Transfer, ...]:
        """The transfers that fill a rank's buffer of `step` >= 1, in buffer order; they are under way in step - 1."""

    @abstractmethod
    def outgoing(self, plan: Plan, rank: int, step: int) -> tuple[Transfer, ...]:
        """The transfers out of a rank's buffer of `step`, under way in that step."""

    @abstractmethod
    def holders(self, plan: Plan, owner: int, step: int) -> tuple[int, ...]:
        """The ranks, other than the owner, that have rows of an owner in their buffer of `step`, ascending in time and rank."""


@dataclass(frozen=True)
class Ring(Schedule):
    """K/V go to the next rank each step; rows that no later rank needs stay behind. Memory for two shards of K/V."""

    def steps(self, world_size: int) -> int:
        return world_size

    def incoming(self, plan: Plan, rank: int, step: int) -> tuple[Transfer, ...]:
        owner = (rank - step) % plan.world_size
        rows = plan.carried(owner)[step]
        return (Transfer((rank - 1) % plan.world_size, rank, owner, rows),) if len(rows) else ()

    def outgoing(self, plan: Plan, rank: int, step: int) -> tuple[Transfer, ...]:
        owner = (rank - step) % plan.world_size
        rows = plan.carried(owner)[step + 1]
        return (Transfer(rank, (rank + 1) % plan.world_size, owner, rows),) if len(rows) else ()

    def holders(self, plan: Plan, owner: int, step: int) -> tuple[int, ...]:
        return ((owner + step) % plan.world_size,) if step and len(plan.carried(owner)[step]) else ()

    def __repr__(self) -> str:
        return "ring()"


@dataclass(frozen=True)
class Gather(Schedule):
    """Each rank fetches all the rows it needs straight from their owners, behind its own K/V, and computes them in one launch.

    Two steps; memory for all the K/V rows that a rank needs.
    """

    def steps(self, world_size: int) -> int:
        return min(2, world_size)

    def incoming(self, plan: Plan, rank: int, step: int) -> tuple[Transfer, ...]:
        owners = [owner for owner in range(plan.world_size) if owner != rank]
        found = (Transfer(owner, rank, owner, plan.needs(rank, owner)) for owner in owners)
        return tuple(t for t in found if len(t.rows)) if step == 1 else ()

    def outgoing(self, plan: Plan, rank: int, step: int) -> tuple[Transfer, ...]:
        others = [other for other in range(plan.world_size) if other != rank]
        found = (Transfer(rank, other, rank, plan.needs(other, rank)) for other in others)
        return tuple(t for t in found if len(t.rows)) if step == 0 else ()

    def holders(self, plan: Plan, owner: int, step: int) -> tuple[int, ...]:
        return tuple(t.dst for t in self.outgoing(plan, owner, 0)) if step == 1 else ()

    def __repr__(self) -> str:
        return "gather()"


def ring() -> Schedule:
    """K/V go around the ring, a hop a step, with the next hop in flight while this one is computed."""
    return Ring()


def gather() -> Schedule:
    """All K/V rows that a rank needs at once, straight from their owners."""
    return Gather()


def default_schedule(plan: Plan) -> Schedule:
    """`gather` where no rank needs more rows from the others than three shards hold, else `ring`.

    Up to there the backward pass peaks at no more memory than a ring's.

    Few ranks, windows and documents gather; long causal sequences over many ranks go around the ring.
    """
    n = plan.world_size
    held = 3 * max(plan.lengths)
    for rank in range(n):
        if sum(len(plan.needs(rank, owner)) for owner in range(n) if owner != rank) > held:
            return Ring()
    return Gather()


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
        return Rows(rows.within(self.rows).ranges + self.begin)


@dataclass(frozen=True, eq=False)
class Message:
    """Rows of this rank's buffer (or of its own shard) that go to, or come from, a peer."""

    peer: int
    slots: Rows


@dataclass(frozen=True, eq=False)
class Step:
    """One rank's part in one step. `tiles` is over `k_rows` rows of the buffer. All rows are rows of buffers.

    During it, `sends` leave this step's buffer and `receives` fill the next one. In the backward pass also `grads_out` leave
    the dK/dV of the previous step's buffer for the next holder or the owner, `grads_in` come to be added to this step's dK/dV,
    and `grads_own` to the rank's own.
    """

    k_rows: int
    tiles: Tiles
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    grads_out: tuple[Message, ...]
    grads_in: tuple[Message, ...]
    grads_own: tuple[Message, ...]


def make_steps(schedule: Schedule, plan: Plan, rank: int) -> tuple[Step, ...]:
    """A rank's steps. The last one computes nothing: it is there for the gradients of the one before."""
    n = schedule.steps(plan.world_size)
    buffers = [_buffer(schedule, plan, rank, step) for step in range(n + 1)]
    return tuple(_step(schedule, plan, rank, step, buffers, n) for step in range(n + 1))


def local_steps(tiles: Tiles) -> tuple[Step, ...]:
    """The steps of a rank that has all it needs."""
    nothing = Tiles(np.empty((0, 6), dtype=np.int64), tiles.q_rows, 0)
    return Step(tiles.k_rows, tiles, (), (), (), (), ()), Step(0, nothing, (), (), (), (), ())


def bytes_sent(schedule: Schedule, plan: Plan, rank: int, row_bytes: int) -> int:
    """Bytes of K/V that a rank sends in a forward pass, at `row_bytes` for the K and V of one row."""
    steps = range(schedule.steps(plan.world_size))
    return row_bytes * sum(len(t.rows) for step in steps for t in schedule.outgoing(plan, rank, step))


def _buffer(schedule: Schedule, plan: Plan, rank: int, step: int) -> tuple[Piece, ...]:
    if step == 0:
        return (Piece(rank, Rows.span(0, plan.lengths[rank]), 0),)
    if step >= schedule.steps(plan.world_size):
        return ()
    pieces: list[Piece] = []
    for transfer in schedule.incoming(plan, rank, step):
        pieces.append(Piece(transfer.owner, transfer.rows, pieces[-1].end if pieces else 0))
    return tuple(pieces)


def _step(schedule: Schedule, plan: Plan, rank: int, step: int, buffers: list[tuple[Piece, ...]], n: int) -> Step:
    here = buffers[step]
    tiles = [move_keys(plan.tiles(rank, piece.owner), piece.rows, piece.begin) for piece in here]
    k_rows = here[-1].end if here else 0
    return Step(
        k_rows=k_rows,
        tiles=Tiles(np.concatenate(tiles) if tiles else np.empty((0, 6), dtype=np.int64), plan.lengths[rank], k_rows),
        sends=tuple(Message(t.dst, _piece(here, t.owner).slots(t.rows)) for t in schedule.outgoing(plan, rank, step))
        if step < n
        else (),
        receives=_arrivals(schedule, plan, rank, buffers, step + 1) if step + 1 < n else (),
        grads_out=_grads_out(schedule, plan, rank, buffers[step - 1], step - 1) if step > 1 else (),
        grads_in=_grads_in(schedule, plan, rank, here, step) if 1 < step < n else (),
        grads_own=_grads_own(schedule, plan, rank, step - 1) if step > 1 else (),
    )


def _arrivals(schedule: Schedule, plan: Plan, rank: int, buffers: list[tuple[Piece, ...]], step: int) -> tuple[Message, ...]:
    arriving = zip(schedule.incoming(plan, rank, step), buffers[step], strict=True)
    return tuple(Message(transfer.src, Rows.span(piece.begin, piece.end)) for transfer, piece in arriving)


def _grads_out(schedule: Schedule, plan: Plan, rank: int, buffer: tuple[Piece, ...], step: int) -> tuple[Message, ...]:
    """dK/dV of the buffer of `step`: rows sent on follow, the others go home."""
    onward = schedule.outgoing(plan, rank, step)
    messages = [Message(t.dst, _piece(buffer, t.owner).slots(t.rows)) for t in onward]
    for piece in buffer:
        home = _left_behind(piece, onward)
        if len(home):
            messages.append(Message(piece.owner, piece.slots(home)))
    return tuple(messages)


def _grads_in(schedule: Schedule, plan: Plan, rank: int, buffer: tuple[Piece, ...], step: int) -> tuple[Message, ...]:
    """What followed this step's K/V here, one step behind; K/V that came straight from its owner brings none."""
    followed = [t for t in schedule.incoming(plan, rank, step) if t.src != t.owner]
    return tuple(Message(t.src, _piece(buffer, t.owner).slots(t.rows)) for t in followed)


def _grads_own(schedule: Schedule, plan: Plan, rank: int, step: int) -> tuple[Message, ...]:
    """dK/dV of this rank's own rows that come home from the holders of `step`."""
    messages = []
    for holder in schedule.holders(plan, rank, step):
        piece = _piece(_buffer(schedule, plan, holder, step), rank)
        home = _left_behind(piece, schedule.outgoing(plan, holder, step))
        if len(home):
            messages.append(Message(holder, home))
    return tuple(messages)


def _left_behind(piece: Piece, onward: tuple[Transfer, ...]) -> Rows:
    home = piece.rows
    for transfer in onward:
        if transfer.owner == piece.owner:
            home = home - transfer.rows
    return home


def _piece(buffer: tuple[Piece, ...], owner: int) -> Piece:
    return next(piece for piece in buffer if piece.owner == owner)
