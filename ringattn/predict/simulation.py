"""Simulates one layer's attention on a model of a machine, step by step.

Each rank goes through its steps at its own pace. The computation and the exchange of a step run side by side, and the step lasts as
long as the longer one. An exchange begins when all ranks that the rank swaps messages with have reached that step. Live pairs come
from the plan, messages from the schedule, for all ranks. Nothing runs beside the all-to-all of a heads axis.

Shapes: n ranks of the ring, t steps; h query heads and hk key/value heads of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..geometry.layout import Layout, default_layout
from ..geometry.mask import Mask
from ..geometry.plan import make_plan
from ..runtime.ulysses import kv_copies, ring_layout
from ..schedule.instructions import Exchange, Holds, Launch
from ..schedule.memory import RowBytes, peak_bytes
from ..schedule.program import Pass, compile_programs
from ..schedule.schedules import PassQ, Schedule
from .machine import Link, Machine

ITEM = 2  # bytes of an element of q, k, v
_SUM = 4  # bytes of an element of sums: states between steps, and gradients


@dataclass(frozen=True)
class Workload:
    """A layer's attention over a whole sequence: batch 1, 16-bit inputs, the layout that `layout(mask, tokens, ranks)` returns.

    kv_tokens: keys that are others than the queries, with a layout of their own; the first query then has the position `q_offset`.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: Mask
    layout: Callable[[Mask, int, int], Layout] = default_layout
    kv_tokens: int | None = None
    q_offset: int = 0

    @property
    def length(self) -> int:
        """Of a sequence that holds all queries and keys."""
        return self.tokens if self.kv_tokens is None else max(self.q_offset + self.tokens, self.kv_tokens)


@dataclass(frozen=True)
class Option:
    """A way to run the workload: a schedule for the ring, and a heads axis of `heads_axis` ranks (1: none).

    If the ranks of an axis share a node, copy engines move its messages, as in groups by default; with `nccl`, NCCL does. Between nodes
    it is always NCCL.
    """

    schedule: Schedule
    heads_axis: int = 1
    nccl: bool = False

    def __str__(self) -> str:
        return repr(self.schedule) if self.heads_axis == 1 else f"heads {self.heads_axis}, {self.schedule!r}"


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the rank that ends last: its computation, its exchange by itself, and the whole step with its waits."""

    name: str
    compute: float
    transfer: float
    total: float


@dataclass(frozen=True)
class PassTime:
    """A pass's steps, its seconds, and the seconds that it would take if communication were free."""

    steps: tuple[StepTime, ...]
    seconds: float
    free: float

    def between(self, before: Sequence[StepTime], after: Sequence[StepTime]) -> PassTime:
        """This pass with steps before and after it, which have nothing beside them."""
        around = (*before, *after)
        seconds, free = (sum(getattr(step, name) for step in around) for name in ("total", "compute"))
        return PassTime((*before, *self.steps, *after), self.seconds + seconds, self.free + free)


@dataclass(frozen=True)
class Prediction:
    """Seconds of a layer, and bytes on the GPU that has most."""

    option: Option
    forward: float
    backward: float
    exposed: float  # what free communication would save
    alone_forward: float  # the same work in one launch, without communication: the kernels' rate
    alone_backward: float
    flop: float  # forward and backward
    sent: float  # forward and backward
    sent_between_nodes: float
    peak: float  # beyond inputs, output and gradients
    gpus: int  # the simulated GPUs and, in `work`, what they did: smaller than asked for if figures are extrapolated
    work: Workload
    forward_steps: tuple[StepTime, ...]
    backward_steps: tuple[StepTime, ...]

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def alone(self) -> float:
        return self.alone_forward + self.alone_backward

    @property
    def tflops(self) -> float:
        return self.flop / self.total / 1e12


def simulate(machine: Machine, work: Workload, gpus: int, gpus_per_node: int, option: Option) -> Prediction:
    """Simulate all ranks and steps of one option."""
    world = Simulation(machine, work, gpus, gpus_per_node, option)
    forward, backward = world.forward(), world.backward()
    alone = [float(world.kernel(world.pairs.sum(axis=1), backward).max()) for backward in (False, True)]
    sent = world.sent
    return Prediction(
        option=option,
        forward=forward.seconds,
        backward=backward.seconds,
        exposed=forward.seconds - forward.free + backward.seconds - backward.free,
        alone_forward=alone[0],
        alone_backward=alone[1],
        flop=3.5 * 4 * float(world.pairs.sum()) / world.n * world.h * world.d,
        sent=float(sent.sum(axis=1).max()),
        sent_between_nodes=float(sent[:, 1].max()),
        peak=world.peak_bytes(),
        gpus=gpus,
        work=work,
        forward_steps=forward.steps,
        backward_steps=backward.steps,
    )


class Simulation:
    """One option on some GPUs: what each rank computes, moves and holds in each step. `layout` is by default the workload's."""

    def __init__(
        self, machine: Machine, work: Workload, gpus: int, gpus_per_node: int, option: Option, layout: Layout | None = None
    ) -> None:
        self.machine, self.option, self.u = machine, option, option.heads_axis
        self.gpus_per_node = gpus_per_node
        self.n = gpus // self.u
        layout = work.layout(work.mask, work.tokens, gpus) if layout is None else layout
        keys = None if work.kv_tokens is None else work.layout(work.mask, work.kv_tokens, gpus)
        kv_layout = None if keys is None else ring_layout(keys, self.u)
        plan = make_plan(ring_layout(layout, self.u), work.mask, kv_layout, work.q_offset)
        self.queries_move = isinstance(option.schedule, PassQ)
        self.pairs = plan.pairs()  # (n, n)
        if self.queries_move:
            self.pairs = plan.transposed.pairs()  # a rank computes all pairs of its keys
        self.rows, self.k_rows = max(plan.q_lengths), max(plan.lengths)
        self.own_rows, self.own_k_rows = max(layout.lengths), max((layout if keys is None else keys).lengths)
        self.copies = kv_copies(work.heads, work.kv_heads, self.u)
        self.h, self.hk, self.d = work.heads // self.u, work.kv_heads * self.copies // self.u, work.head_dim
        self.node = np.arange(self.n) * self.u // gpus_per_node

        # the other ranks of a rank's heads axis: those on its node, those on other nodes
        inside = min(self.u, gpus_per_node)
        self.peers = np.array([inside - 1, self.u - inside])
        programs = compile_programs(option.schedule, plan, range(self.n))
        self.forward_counts = self._count([program.forward for program in programs], self.row_bytes_forward)
        self.backward_counts = self._count([program.backward for program in programs], self.row_bytes)

    @property
    def link(self) -> Link:
        """What moves the messages of the ring."""
        return self._link(self.n, self.n * self.u)

    @property
    def heads_link(self) -> Link:
        return self._link(self.u, self.u)

    def _link(self, ranks: int, among: int) -> Link:
        """The link of an axis of `ranks` ranks, which lie within `among` consecutive ones."""
        by_copy_engines = among <= self.gpus_per_node and not self.option.nccl
        return self.machine.copy_engines(ranks) if by_copy_engines else self.machine.nccl

    @property
    def kv_row(self) -> int:
        return 2 * self.hk * self.d * ITEM

    @property
    def grad_row(self) -> int:
        return 2 * self.hk * self.d * _SUM

    def kernel(self, pairs: np.ndarray, backward: bool) -> np.ndarray:
        """Seconds of launches with nothing beside them."""
        machine = self.machine
        rate, launch = machine.forward_tflops, machine.forward_launch_us
        flop = 4.0 * pairs * self.h * self.d
        if backward:
            rate, launch, flop = machine.backward_tflops, machine.backward_launch_us, 2.5 * flop
        return (pairs > 0) * (launch / 1e6 + flop / rate / 1e12)

    @property
    def row_bytes(self) -> RowBytes:
        """Of what moves in the backward pass, and of what comes back."""
        if self.queries_move:
            return RowBytes(self.h * (2 * self.d * ITEM + 3 * _SUM), self.h * self.d * _SUM)
        return RowBytes(self.kv_row, self.grad_row)

    @property
    def row_bytes_forward(self) -> RowBytes:
        """Likewise in the forward pass, in which only partials of queries that move come back."""
        if self.queries_move:
            return RowBytes(self.h * self.d * ITEM, self.h * (self.d + 2) * _SUM)
        return self.row_bytes

    def forward(self) -> PassTime:
        counts = self.forward_counts
        # each launch but the first reads the state of the one before; each but the last writes it
        computes = counts.pairs > 0
        resumed = computes & (np.cumsum(computes, axis=0) > 1)
        left = computes & (np.cumsum(computes[::-1], axis=0)[::-1] > 1)
        state = (resumed * 1.0 + left) * self.rows * self.h * self.d * _SUM
        if self.queries_move:
            # each launch writes partials; an Add reads two and writes one
            state = 3 * counts.sums * self.row_bytes_forward.sums + computes * self.rows * self.h * self.d * _SUM
        compute = self.kernel(counts.pairs, backward=False) + state / self.machine.hbm_gbs / 1e9
        there, back = self._swap("q, k, v to heads", self._qkv), self._swap("out to rows", self._out + 2 * self._stat)
        return self._paced(compute, counts).between(there, back)

    def backward(self) -> PassTime:
        counts = self.backward_counts
        computes = counts.pairs > 0
        resumed = computes & (np.cumsum(computes, axis=0) > 1)
        # an Add reads the received rows and the sum, and writes the sum
        touched = (computes * 1.0 + resumed) * self.rows * self.h * self.d * _SUM + 3 * counts.sums * self.row_bytes.sums
        compute = self.kernel(counts.pairs, backward=True) + touched / self.machine.hbm_gbs / 1e9
        there = self._swap("q, k, v, dout to heads", self._qkv + self._out + 3 * self._stat)
        back = self._swap("dq, dk, dv to rows", self._dqkv)
        return self._paced(compute, counts).between(there, back)

    @cached_property
    def sent(self) -> np.ndarray:
        """Bytes that each rank sends within its node and between nodes, forward and backward: (n, 2)."""
        swapped = 2 * (self._qkv + self._out) + 5 * self._stat + self._dqkv
        ring = sum(counts.moved[:, 0].sum(axis=0) for counts in (self.forward_counts, self.backward_counts))
        return ring + swapped * self.peers

    def peak_bytes(self) -> float:
        """The most bytes in the backward pass beyond inputs, output and gradients: gradient sums, statistics, others' K/V and dK/dV.

        The peak comes in a launch, before the returned gradients are allocated; or when sums are rounded to these gradients; or in the
        last all-to-all, with dq, dk and dv from both before and after it. With a heads axis, q, k, v, dout and the statistics of a
        rank's heads add to all of these. Rows that are copied before they are sent count until they have left.

        Statistics are row_max and row_sum, and three that are made from them: delta, and what kernels read of rows. Those are made once a
        pass, and lie in dq's memory if a single launch reads them. With a heads axis, or queries that move, launches make the last two.
        """
        stat = self.rows * self.h * _SUM
        alone = not any(self.backward_counts.pairings)
        if self.u > 1 or self.queries_move:
            state, in_launches = 3 * stat, 2 * stat
        else:
            state, in_launches = (2 if alone else 5) * stat, 0
        if self.u > 1:
            state += 3 * self.u * self._stat + 2 * self.d * ITEM * (self.h * self.rows + self.hk * self.k_rows)
        returned = self.u * self.own_rows * self.h * self.d * ITEM + self.own_k_rows * self.kv_row * self.u // self.copies
        query_sums = self.rows * self.h * self.d * _SUM
        dq = self.rows * self.h * self.d * ITEM
        if not alone:
            # the sums of dk and dv are freed before those of dq are rounded, if they are rounded themselves
            sums, rounded = self.k_rows * self.grad_row, self.k_rows * self._dkv_row
            others = self.others_bytes(beside_launch=in_launches, beside_last=rounded if rounded < sums else 0)
            most = query_sums + max(sums + others, rounded + dq)
        else:
            most = query_sums + self.k_rows * self._dkv_row + max(in_launches, dq)
        if self.u > 1:
            most = max(most, 2 * self.u * self._dqkv)
        return state + most - returned

    def others_bytes(self, **beside: int) -> int:
        """The most bytes of others' K/V and dK/dV that a rank holds at a time in the backward pass. beside: as in `peak_bytes`."""
        return max(peak_bytes(each, self.row_bytes, gathered=True, **beside) for each in self.backward_counts.passes)

    def _count(self, passes: Sequence[Pass], row_bytes: RowBytes) -> _Counts:
        """Count what all ranks do in each step of a pass."""
        counts = _Counts(passes, self.n)
        for rank, each in enumerate(passes):
            for x in each.instructions:
                if isinstance(x, Launch):
                    counts.pairs[x.step, rank] += x.pairs
                elif isinstance(x, Exchange):
                    for way, messages in enumerate((x.sends, x.receives)):
                        for message in messages:
                            between = int(self.node[rank] != self.node[message.peer])
                            rows, holds = len(message.rows), message.buffer.holds
                            counts.moved[x.step, way, rank, between] += rows * row_bytes.of_buffer(holds)
                            counts.sums[x.step, rank] += rows * (way == 1 and holds is Holds.SUMS)
                    counts.pairings[x.step] += [(rank, message.peer) for message in x.sends]
        return counts

    def _transfer(self, moved: np.ndarray, link: Link) -> np.ndarray:
        """Seconds of exchanges, (..., 2) to (...): links within nodes, links between nodes and both directions work at the same time."""
        seconds = (moved / np.array([self.machine.nvlink_gbs / link.copies, self.machine.node_gbs]) / 1e9).max(axis=-1)
        return seconds + (seconds > 0) * link.latency_us / 1e6

    def _paced(self, compute: np.ndarray, counts: _Counts) -> PassTime:
        """The pass with every rank at its own pace; its steps are those of the rank that ends last."""
        transfer = self._transfer(counts.moved, self.link).max(axis=1)  # (t, n)
        busy = compute + np.minimum(compute, transfer) * self.link.slowdown
        begin = _begin(busy, transfer, counts.pairings)
        last = int(begin[-1].argmax())
        columns = compute[:, last].tolist(), transfer[:, last].tolist(), np.diff(begin[:, last]).tolist()
        steps = tuple(StepTime(f"step {t}", *seconds) for t, seconds in enumerate(zip(*columns)))
        free = _begin(compute, np.zeros_like(transfer), counts.pairings)
        return PassTime(steps, float(begin[-1].max()), float(free[-1].max()))

    def _swap(self, name: str, bytes_a_peer: int) -> list[StepTime]:
        """An all-to-all of the heads axis, and the copies before and after it."""
        if self.u == 1:
            return []
        transfer = float(self._transfer(bytes_a_peer * self.peers, self.heads_link))
        copies = 4 * self.u * bytes_a_peer / self.machine.hbm_gbs / 1e9
        return [StepTime(name, copies, transfer, copies + transfer)]

    @property
    def _qkv(self) -> int:
        return self.own_rows * self.h * self.d * ITEM + self.own_k_rows * self.kv_row

    @property
    def _out(self) -> int:
        return self.own_rows * self.h * self.d * ITEM

    @property
    def _stat(self) -> int:
        return self.own_rows * self.h * _SUM

    @property
    def _dqkv(self) -> int:
        return self.own_rows * self.h * self.d * ITEM + self.own_k_rows * self._dkv_row

    @property
    def _dkv_row(self) -> int:
        # gradients of copied heads are still to be added, so they are sums
        return self.grad_row if self.copies > 1 else self.kv_row


class _Counts:
    """What n ranks do in each of t steps of a pass, counted from their instructions."""

    def __init__(self, passes: Sequence[Pass], n: int) -> None:
        steps = passes[0].steps
        self.passes = passes
        self.pairs = np.zeros((steps, n))  # live pairs computed
        self.moved = np.zeros((steps, 2, n, 2))  # bytes sent and received, within the node and between nodes
        self.sums = np.zeros((steps, n))  # rows of sums received
        self.pairings: list[list[tuple[int, int]]] = [[] for _ in range(steps)]  # (sender, receiver) of each message


def _begin(busy: np.ndarray, transfer: np.ndarray, pairings: Sequence[Sequence[tuple[int, int]]]) -> np.ndarray:
    """When each rank begins each step, and in the last row ends, in seconds: (t + 1, n)."""
    begin = np.zeros((len(busy) + 1, busy.shape[1]))
    for t, now in enumerate(begin[:-1]):
        src, dst = np.array(pairings[t], dtype=np.int64).reshape(-1, 2).T
        together, longest = now.copy(), transfer[t].copy()
        for one, other in ((src, dst), (dst, src)):
            np.maximum.at(together, one, now[other])
            np.maximum.at(longest, one, transfer[t, other])
        begin[t + 1] = np.maximum(now + busy[t], together + longest)
    return begin
