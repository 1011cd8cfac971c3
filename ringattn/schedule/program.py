"""Programs: a rank's part in a schedule, compiled once into the instructions of a forward and of a backward pass.

In step t a rank computes with the K/V of buffer t, while one exchange moves what later steps need. Buffer 0 is the rank's own shard.
The backward pass has one step more, for the last gradients on their way. Each step of it reads, in order:

    Open      the sums of the dK/dV of this step's buffer
    Fence     exchanges come after the launches so far
    Add       what came in earlier steps, from its staging buffers
    Close     K/V of the last step, and the staging buffers that were added
    Open      the K/V that begin to come, and staging buffers for the sums that come
    Exchange  K/V, and sums on their way to their owners
    Launch
    Wait
    Fence     the next launch comes after the exchange
    Close     sums that have left

A step in which a rank has nothing to do holds no instructions, so no rank waits in the steps of others.

A launch may begin while the launch before it still computes: it writes to no memory that the earlier launch reads, or that an Add
between them changes. A launch over the rank's own keys may even compute until the end of the pass, if its `far` is another one. If the
last step adds to the rank's own sums, a Zero comes before all other instructions. After the last step, a Fence makes the caller's
stream wait, and the remaining Add instructions follow.

A step of the forward pass is Open, Exchange, Launch, Wait, Close.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

import numpy as np

from ringattn_kernels.table import TileTable

from ..geometry.plan import Plan, half_of_pairs, live_pairs, make_tiles, move_keys, of_keys, transpose
from ..geometry.rows import Rows
from .instructions import Add, Buffer, Close, Exchange, Fence, Holds, Instruction, Launch, Message, Open, Stream, Wait, Zero
from .schedules import WAITING, PassQ, Schedule, Traffic, Transfer, gradient_transfers

# rows of long shards are divided at multiples of what kernels take at once
_BLOCK = 128
# rows of a shard up to which three launches run side by side, and half of it for each further one: measured on four H200s
_LONG = 16384


@dataclass(frozen=True, eq=False)
class Pass:
    """The instructions of one pass, and the buffers that are there before the first: the rank's own K/V, and the sums of its dK/dV.

    steps: how many steps all ranks count.
    """

    instructions: tuple[Instruction, ...]
    steps: int
    own: Buffer
    sums: Buffer | None = None

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(x for x in self.instructions if isinstance(x, Launch))

    @cached_property
    def continued(self) -> np.ndarray:
        """(n, 2): ranges of the rows of Q that launches after the first touch."""
        return np.concatenate([np.zeros((0, 2), dtype=np.int64), *(x.tiles.tiles[:, :2] for x in self.launches[1:])])

    @cached_property
    def side_by_side(self) -> bool:
        """Whether launches that run side by side are faster than one after another.

        Add instructions between them would wait for processors, and exchanges for the Add instructions. Long launches, and many of
        them, lose more than the processors that are idle at the end of each: their programs no longer read the same queries at the same
        time.
        """
        launches = sum(launch.pairs > 0 for launch in self.launches)
        if launches < 2 or any(isinstance(x, Add) and x.stream is Stream.EXCHANGES for x in self.instructions):
            return False
        return self.launches[0].tiles.q_rows << max(0, launches - 3) <= _LONG

    @cached_property
    def far(self) -> Launch | None:
        """Of launches that run side by side the one over other ranks' keys, if there is a single one: exchanges wait for no other."""
        found = [x for x in self.launches if x.pairs and x.keys is not self.own]
        return found[0] if self.side_by_side and len(found) == 1 else None

    @cached_property
    def alone(self) -> bool:
        """Whether the first launch computes all gradients, and no others come to this rank or leave it."""
        others = any(launch.pairs for launch in self.launches[1:]) or any(isinstance(x, Add) for x in self.instructions)
        exchanges = (x for x in self.instructions if isinstance(x, Exchange))
        return not others and not any(message.buffer.holds is Holds.SUMS for x in exchanges for message in x.sends)


@dataclass(frozen=True, eq=False)
class Program:
    """What a rank does in a call: the instructions of its two passes. `queries_move`: their buffers hold queries, see `query_passes`."""

    forward: Pass
    make_backward: Callable[[], Pass]
    queries_move: bool = False

    @cached_property
    def backward(self) -> Pass:
        """It is made at its first use: a new batch's forward pass begins sooner, and its backward pass while the GPU still computes."""
        return self.make_backward()

    @property
    def made(self) -> tuple[Pass, ...]:
        """The passes that have been made."""
        return self.forward, *([self.backward] if "backward" in self.__dict__ else [])


def compile_program(schedule: Schedule, plan: Plan, rank: int) -> Program:
    """A rank's program."""
    if isinstance(schedule, PassQ):
        over, plan = schedule.moving, plan.transposed
        return _program_of_queries(_Compiler(over, plan, lambda kind: kind.traffic(plan, rank)), rank)
    return _Compiler(schedule, plan, lambda kind: kind.traffic(plan, rank)).program(rank)


def compile_programs(schedule: Schedule, plan: Plan, ranks: Iterable[int]) -> list[Program]:
    """The programs of some ranks."""
    over, plan = (schedule.moving, plan.transposed) if isinstance(schedule, PassQ) else (schedule, plan)
    compiler = _Compiler(over, plan, lambda kind: Traffic.whole(kind.transfers(plan)))
    return [_program_of_queries(compiler, rank) if over is not schedule else compiler.program(rank) for rank in ranks]


def backward_passes(schedule: Schedule, plan: Plan, ranks: Iterable[int]) -> list[Pass]:
    """The backward passes of some ranks."""
    compiler = _Compiler(schedule, plan, lambda kind: Traffic.whole(kind.transfers(plan)))
    return [compiler.backward(rank) for rank in ranks]


def _program_of_queries(compiler: _Compiler, rank: int) -> Program:
    """The program of a compiler over a transposed plan: in both passes, something comes back for each row that moves."""
    found = compiler.backward(rank)
    instructions = (_of_queries(x) if isinstance(x, Launch) else x for x in found.instructions)
    both = replace(found, instructions=tuple(instructions))
    return Program(both, lambda: both, queries_move=True)


def _of_queries(launch: Launch) -> Launch:
    return replace(launch, make_tiles=lambda: transpose(launch.tiles))


def local_program(tiles: TileTable) -> Program:
    """The program of a rank that has all that it needs."""
    own, sums = Buffer(tiles.k_rows, Holds.KV), Buffer(tiles.k_rows, Holds.SUMS)
    launch = Launch(0, own, 0, tiles.k_rows, live_pairs(tiles), lambda: tiles, last=True)
    return Program(Pass((launch,), 1, own), lambda: Pass((replace(launch, sums=sums),), 1, own, sums))


class _Compiler:
    """Compiles a schedule's programs. traffic: gives the transfers of a schedule that are needed for them."""

    def __init__(self, schedule: Schedule, plan: Plan, traffic: Callable[[Schedule], Traffic]) -> None:
        self._schedule, self._plan, self._traffic = schedule, plan, traffic

    @cached_property
    def _kv(self) -> _Transfers:
        """Of a backward pass."""
        return _Transfers(self._traffic(self._schedule))

    @cached_property
    def _forward_kv(self) -> _Transfers:
        schedule = self._schedule.in_forward
        return self._kv if schedule is self._schedule else _Transfers(self._traffic(schedule))

    @cached_property
    def _gradients(self) -> _Transfers:
        found = gradient_transfers(self._schedule, self._plan, self._kv.traffic.transfers, self._kv.traffic.last)
        return _Transfers(replace(self._kv.traffic, transfers=found))

    def program(self, rank: int) -> Program:
        held = _Held(self._plan, rank, self._forward_kv)

        def make_backward() -> Pass:
            # where both passes hold the same, their launches share tiles
            same = self._forward_kv is self._kv
            return _backward(held if same else _Held(self._plan, rank, self._kv), self._gradients)

        return Program(_forward(held), make_backward)

    def backward(self, rank: int) -> Pass:
        return _backward(_Held(self._plan, rank, self._kv), self._gradients)


class _Transfers:
    """Transfers of a kind, by rank."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._of_rank: defaultdict[int, list[Transfer]] = defaultdict(list)
        for t in traffic.transfers:
            self._of_rank[t.src].append(t)
            self._of_rank[t.dst].append(t)

    def of(self, rank: int) -> list[Transfer]:
        """Those that leave a rank or come to it."""
        return self._of_rank[rank]


def _forward(held: _Held) -> Pass:
    kv = held.messages
    found: list[Instruction] = []
    for t in range(held.steps):
        found += [Open(t, held.buffer(number)) for number in kv.first[t]]
        exchange = _exchange(t, kv.out[t], kv.into[t], t == 0 and held.crowded)
        found += exchange
        if held.pairs(t):
            found.append(held.launch(t))
        found += [Wait(t) for _ in exchange]
        found += _close(t, [held.buffer(number) for number in kv.leave(t)])
    if not any(isinstance(x, Launch) for x in found):
        # nothing is live: one launch writes zeros
        found.insert(next((i for i, x in enumerate(found) if isinstance(x, Wait)), len(found)), held.launch(0))
    last, launch = [(i, x) for i, x in enumerate(found) if isinstance(x, Launch)][-1]
    found[last] = replace(launch, last=True)
    return Pass(_reuse_memory(found), held.steps, held.buffer(0))


def _backward(held: _Held, gradient_transfers: _Transfers) -> Pass:
    kv = held.messages
    gradients = _Messages(held, Holds.SUMS, gradient_transfers.of(held.rank))
    steps = held.steps + (held.steps > 1)
    came = [[(message, Buffer(len(message.rows), Holds.SUMS)) for message in gradients.into[t]] for t in range(steps)]
    adds = _adds(held, came)
    launches = _backward_launches(held, gradients, steps, adds)
    found: list[Instruction] = []
    for t in range(steps):
        before = len(found)
        if t in gradients.last and t:
            found.append(Open(t, held.sums(t)))
        found.append(Fence(t, Stream.EXCHANGES))
        found += adds[t]
        found += _close(t, [held.buffer(number) for number in kv.leave(t - 1)])
        found += _close(t, [add.staging for add in adds[t]])
        found += [Open(t, held.buffer(number)) for number in kv.first[t]]
        found += [Open(t, staging) for _, staging in came[t]]
        receives = [Message(message.peer, staging, Rows.span(0, staging.rows), whole=True) for message, staging in came[t]]
        exchange = _exchange(t, kv.out[t] + gradients.out[t], kv.into[t] + receives, t == 0 and held.crowded)
        found += exchange
        found += launches[t]
        found += [Wait(t) for _ in exchange]
        found.append(Fence(t, Stream.LAUNCHES))
        found += _close(t, [held.sums(number) for number in gradients.leave(t) if number])
        if all(isinstance(x, Fence) for x in found[before:]):
            # other ranks' step: this one has nothing to wait for
            del found[before:]
    if adds[steps]:
        found += [Fence(steps - 1, Stream.CALLER), *adds[steps]]
    elif not any(isinstance(x, Exchange) for x in found):
        found = [x for x in found if not isinstance(x, Fence)]
    second = next((x for x in launches[steps - 1] if x.add), None)
    if second is not None and second.sums is not None:
        found.insert(0, Zero(0, second.sums, second.begin, second.end))
    return Pass(_reuse_memory(found), steps, held.buffer(0), held.sums(0))


def _adds(held: _Held, came: list[list[tuple[Message, Buffer]]]) -> list[list[Add]]:
    """What is added before each step's exchange, and after the last step.

    Sums that others wait for are added in the next step. Sums that came home may wait for `WAITING` steps more, so that fewer exchanges
    wait for an Add, and at the end for the last step, which computes the rank's own dK/dV.
    """
    steps = len(came)
    found: list[list[Add]] = [[] for _ in range(steps + 1)]
    home: list[list[tuple[Message, Buffer]]] = []

    def add(step: int, arrivals: Iterable[tuple[Message, Buffer]]) -> None:
        stream = Stream.EXCHANGES if step < steps else Stream.CALLER
        found[step] += [Add(min(step, steps - 1), staging, m.buffer, m.rows, stream) for m, staging in arrivals]

    own = held.sums(0)
    for t, arrivals in enumerate(came):
        add(t + 1, [one for one in arrivals if one[0].buffer is not own])
        home.append([one for one in arrivals if one[0].buffer is own])
        if t >= WAITING and t + 2 < steps:
            add(t + 1, home[t - WAITING])
            home[t - WAITING] = []
    add(steps, [one for arrivals in home for one in arrivals])
    return found


def _backward_launches(held: _Held, gradients: _Messages, steps: int, adds: list[list[Add]]) -> list[list[Launch]]:
    """The launches of each step.

    While the last gradients travel, the rank computes the second half of what it sees of its own shard. The first half hides the
    first K/V.
    """
    found = [[held.launch(t, sums=True)] if t == 0 or t in gradients.last else [] for t in range(steps)]
    if gradients.out[steps - 1] or gradients.into[steps - 1]:
        own = found[0][0]
        half = _half(own)
        if half:
            # sums of other ranks may have been added to the second half before it is computed
            received = any(add.buffer is own.sums for step in adds[:steps] for add in step)
            first, second = of_keys(own.tiles, 0, half), of_keys(own.tiles, half, own.end)
            pairs = live_pairs(first)
            found[0] = [replace(own, end=half, pairs=pairs, make_tiles=lambda: first)]
            rest = {"begin": half, "pairs": own.pairs - pairs, "make_tiles": lambda: second}
            found[-1] = [replace(own, step=steps - 1, add=received, **rest)]
    return found


def _exchange(step: int, sends: list[Message], receives: list[Message], at_rest: bool) -> list[Instruction]:
    """One exchange, or nothing if there are no messages."""
    return [Exchange(step, tuple(sends), tuple(receives), at_rest)] if sends or receives else []


def _close(step: int, buffers: Sequence[Buffer]) -> list[Instruction]:
    return [Close(step, tuple(buffers))] if buffers else []


def _reuse_memory(instructions: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """Let a buffer that opens take the memory of one of its size that closes just before, if nothing runs in between."""
    found: list[Instruction] = []
    closed: dict[Buffer, int] = {}  # since anything was run: buffers, and the steps in which they close
    opens: list[Open] = []

    def flush() -> None:
        steps = dict.fromkeys(closed.values())
        found.extend(Close(step, tuple(buffer for buffer, at in closed.items() if at == step)) for step in steps)
        found.extend(opens)
        closed.clear()
        opens.clear()

    for x in instructions:
        if isinstance(x, Close):
            closed |= dict.fromkeys(x.buffers, x.step)
        elif isinstance(x, Open):
            reuse = next((old for old in closed if (old.rows, old.holds) == (x.buffer.rows, x.buffer.holds)), None)
            if reuse is not None:
                del closed[reuse]
            opens.append(x if reuse is None else replace(x, reuse=reuse))
        else:
            if closed or opens:
                flush()
            found.append(x)
    flush()
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _Piece:
    """An owner's rows in a buffer: rows [begin, begin + len(rows)) of it."""

    owner: int
    rows: Rows
    begin: int

    @property
    def end(self) -> int:
        return self.begin + len(self.rows)

    @cached_property
    def all_rows_of_buffer(self) -> Rows:
        return Rows.span(self.begin, self.end)

    def rows_of_buffer(self, rows: Rows) -> Rows:
        """Some of the owner's rows as rows of the buffer."""
        if rows is self.rows:
            return self.all_rows_of_buffer
        found = rows.within(self.rows)
        return Rows.disjoint(found.ranges + self.begin, len(found)) if self.begin else found


class _Held:
    """What a rank holds in the buffer of each step: its own shard in buffer 0, and what transfers bring."""

    def __init__(self, plan: Plan, rank: int, kv: _Transfers) -> None:
        self.rank, self._plan = rank, plan
        self.steps, self.crowded = kv.traffic.last + 1, kv.traffic.crowded
        transfers = kv.of(rank)
        owners: defaultdict[int, dict[int, Rows]] = defaultdict(dict)
        for t in transfers:
            if t.dst == rank:
                before = owners[t.into].get(t.owner)
                owners[t.into][t.owner] = t.rows if before is None else before | t.rows
        self._pieces: dict[int, tuple[_Piece, ...]] = {0: (_Piece(rank, Rows.span(0, plan.lengths[rank]), 0),)}
        for number, held in owners.items():
            ends = accumulate([len(rows) for rows in held.values()])
            self._pieces[number] = tuple(_Piece(owner, rows, end - len(rows)) for (owner, rows), end in zip(held.items(), ends))
        self._piece_of = {(number, piece.owner): piece for number, pieces in self._pieces.items() for piece in pieces}
        self._buffers: dict[tuple[int, bool], Buffer] = {}  # by number, and whether it holds sums
        self._tiles: dict[int, TileTable] = {}
        self._pairs = plan.pairs_by_owner(rank)
        self.messages = _Messages(self, Holds.KV, transfers)

    @property
    def numbers(self) -> Iterable[int]:
        """The steps whose buffers hold something."""
        return self._pieces

    def buffer(self, number: int, holds: Holds = Holds.KV) -> Buffer:
        """The buffer of a step's K/V, or of their sums."""
        key = number, holds is Holds.SUMS
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = Buffer(self._pieces[number][-1].end if number in self._pieces else 0, holds)
        return found

    def sums(self, number: int) -> Buffer:
        """The buffer of the sums of dK/dV of a step's K/V."""
        return self.buffer(number, Holds.SUMS)

    def pairs(self, number: int) -> int:
        """Live pairs of the rank's queries with the K/V of a step's buffer."""
        return sum([self._pairs[piece.owner] for piece in self._pieces.get(number, ())])

    def launch(self, number: int, sums: bool = False) -> Launch:
        """The launch over all of a step's buffer."""
        keys = self.buffer(number)
        tiles = partial(self.tiles, number)
        return Launch(number, keys, 0, keys.rows, self.pairs(number), tiles, self.sums(number) if sums else None)

    def tiles(self, number: int) -> TileTable:
        """What the rank computes with the rows in a step's buffer."""
        found = self._tiles.get(number)
        if found is None:
            found = self._tiles[number] = _tiles(self._plan, self.rank, self._pieces.get(number, ()))
        return found

    def message(self, peer: int, number: int, holds: Holds, transfer: Transfer) -> Message:
        """A transfer's rows in a buffer, to a peer or from it."""
        piece = self._piece_of[number, transfer.owner]
        rows, buffer = piece.rows_of_buffer(transfer.rows), self.buffer(number, holds)
        return Message(peer, buffer, rows, len(rows) == buffer.rows)


class _Messages:
    """A rank's transfers of a kind as messages: those that leave (`out`) and come (`into`) in each step."""

    def __init__(self, held: _Held, holds: Holds, transfers: Iterable[Transfer]) -> None:
        self.out: defaultdict[int, list[Message]] = defaultdict(list)
        self.into: defaultdict[int, list[Message]] = defaultdict(list)
        self.first: defaultdict[int, list[int]] = defaultdict(list)  # the buffers that begin to fill in a step
        self.last: dict[int, int] = {}  # the last step in which rows of a buffer leave
        # not `held` itself, which has these messages: a plan is freed with the last program that needs it
        self._numbers, self._holds = held.numbers, holds
        opened = set()
        for t in sorted(transfers, key=lambda t: t.step):
            if t.src == held.rank:
                self.out[t.step].append(held.message(t.dst, t.held, holds, t))
                self.last[t.held] = t.step
            else:
                self.into[t.step].append(held.message(t.src, t.into, holds, t))
                # K/V arrive in place
                assert t.into <= t.step or len(self.into[t.step][-1].rows.ranges) == 1
                if t.into not in opened:
                    opened.add(t.into)
                    self.first[t.step].append(t.into)

    def leave(self, step: int) -> list[int]:
        """The buffers that nobody needs after a step: K/V when they are computed and sent, sums when they are sent."""
        if self._holds is Holds.SUMS:
            return [number for number, last in self.last.items() if last == step]
        return [number for number in self._numbers if number and max(number, self.last.get(number, 0)) == step]


def _tiles(plan: Plan, rank: int, pieces: Sequence[_Piece]) -> TileTable:
    """What a rank computes with the rows in a buffer."""
    if not pieces:
        return make_tiles(plan.tiles_of_launch(rank, rank)[:0], plan.q_lengths[rank], 0, plan.stride)
    tables = [plan.tiles_of_launch(rank, piece.owner) for piece in pieces]
    if len(pieces) == 1 and pieces[0].rows.only == (0, plan.lengths[pieces[0].owner]):
        return make_tiles(tables[0], plan.q_lengths[rank], pieces[0].end, plan.stride)
    # the rows of all pieces as one set, in which those of different owners lie apart
    apart = (max(plan.lengths) + 1) * np.arange(len(pieces))
    held = Rows.disjoint(np.concatenate([piece.rows.ranges + begin for piece, begin in zip(pieces, apart.tolist())]))
    moved = apart.repeat([len(table) for table in tables])
    table = move_keys(np.concatenate([table.T for table in tables], axis=1).T, held, 0, plan.stride, moved)
    return make_tiles(table, plan.q_lengths[rank], pieces[-1].end, plan.stride)


def _half(launch: Launch) -> int:
    """How many of the first keys have about half of the live pairs; 0 if the keys cannot be divided."""
    return half_of_pairs(launch.tiles, _BLOCK)
