"""Predicts one layer with a state on many GPUs, beside attention: its time, and the bytes of states and halos that ranks swap.

Messages are those that the layer sends, counted over all ranks' segments. Time is work over the machine's rate of recurrences, plus the
exchanges: that of the forward pass is waited for, and that of the backward pass runs beside segments' second run, where there is one.

Work counts 6 d_k d_v operations a token and head forward (a state is multiplied by the key, the write and the query), and 2.5 times that
backward. Segments that follow others also find out how they change a state: with the delta rule by d_k more columns of values, and they run
a second time in the backward pass; else by a product of queries and states. fla has kept the graphs of all others, as no activations are
taken to be recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..check import BUILD_A_MASK, MAX_RANKS, MAX_TOKENS, flag, instance, integer
from ..geometry.layout import Layout, contiguous
from ..geometry.mask import Mask, causal
from ..recurrent.halos import count_rows, halo_pieces
from ..recurrent.segments import Segments, check_mask, check_spans, make_segments
from .machine import Machine, check_nodes

_STATE = 4  # bytes of a number of a state
_ITEM = 2  # bytes of a number of the convolution's input; its gradients take 4
_BACKWARD = 2.5
DECAYS = ("none", "number", "vector")


@dataclass(frozen=True)
class RecurrentWork:
    """A layer with a state over a whole sequence: batch 1, 16-bit inputs, the layout that `layout(mask, tokens, ranks)` returns.

    heads: of values, with states (d_k, d_v). decays: "none", "number" or "vector", of a head. delta: whether the delta rule writes.
    channels, width: of its convolution; 0 channels for none.
    """

    tokens: int
    heads: int
    d_k: int
    d_v: int
    decays: str = "number"
    delta: bool = False
    channels: int = 0
    width: int = 4
    mask: Mask = causal()  # noqa: RUF009 (masks are frozen)
    layout: Callable[[Mask, int, int], Layout] = lambda _, *sizes: contiguous(*sizes)

    @property
    def numbers(self) -> int:
        """Of a total transition, a head."""
        return self.d_k**2 if self.delta else {"none": 0, "number": 1, "vector": self.d_k}[self.decays]

    @property
    def segment_bytes(self) -> int:
        """Of what another rank hears of a segment."""
        return _STATE * self.heads * (self.numbers + self.d_k * self.d_v)


@dataclass(frozen=True)
class RecurrentPrediction:
    """Seconds of a layer, of the slowest rank, and the most bytes that a rank sends, forward and backward."""

    forward: float
    backward: float
    exposed: float
    flop: float  # forward and backward, of a GPU, without what following segments and second runs add
    sent: float
    sent_between_nodes: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def tflops(self) -> float:
        return self.flop / self.total / 1e12


def predict_recurrence(
    machine: Machine, work: RecurrentWork, gpus: int, gpus_per_node: int, *, nccl: bool = False
) -> RecurrentPrediction:
    """Predict a layer on `gpus` GPUs; those of a node have consecutive ranks. With `nccl`, NCCL moves messages within a node too.

    Raises ValueError for impossible sizes, and for a layout or a mask that the layer does not take.

    >>> from ringattn.predict.machine import H200
    >>> predict_recurrence(H200, RecurrentWork(1 << 20, 32, 128, 128, delta=True), 8, 8).sent / 2**20
    28.0
    """
    check_recurrent_work(work, gpus, gpus_per_node)
    instance("machine", machine, Machine, "take one of MACHINES, or its with_rates(...)")
    flag("nccl", nccl)
    layout = work.layout(work.mask, work.tokens, gpus)
    check_spans(layout)
    segments = make_segments(layout, work.mask)
    states, halos = _sent(work, segments, gpus)
    node = np.arange(gpus) // min(gpus, gpus_per_node)
    away = node[:, None] != node
    link = machine.nccl if nccl or gpus > gpus_per_node or not machine.copies else machine.copy_engines(gpus)

    def seconds(messages: np.ndarray) -> float:
        """Of an exchange of these bytes, (gpus, gpus): of the rank that sends or receives most."""
        if not messages.any():
            return 0.0
        inside, outside = (np.maximum(part.sum(1), part.sum(0)) for part in (messages * ~away, messages * away))
        times = link.copies * inside / (machine.nvlink_gbs * 1e9) + outside / (machine.node_gbs * 1e9)
        return link.latency_us * 1e-6 + float(times.max())

    first, following = _work(work, segments, gpus)
    rate = machine.recurrence_tflops * 1e12
    once = (first + following) / rate  # (gpus,)
    columns = (1 + work.d_k / work.d_v) if work.delta else 1.0
    forward = first / rate + columns * following / rate + following / 3 / (machine.forward_tflops * 1e12)
    swaps = [seconds(messages) for messages in (halos[0], states[0], states[1], halos[1])]
    again = following / rate if work.delta else np.zeros(gpus)
    beside = np.maximum(again, swaps[2])
    backward = beside + _BACKWARD * once + swaps[3]
    total = states[0] + states[1] + halos[0] + halos[1]
    free = float((forward + again + _BACKWARD * once).max())
    took = float(forward.max()) + swaps[0] + swaps[1], float(backward.max())
    return RecurrentPrediction(
        forward=took[0],
        backward=took[1],
        exposed=max(0.0, sum(took) - free),
        flop=(1 + _BACKWARD) * float((first + following).sum()) / gpus,
        sent=float(total.sum(axis=1).max()),
        sent_between_nodes=float((total * away).sum(axis=1).max()),
    )


def check_recurrent_work(work: RecurrentWork, gpus: int, gpus_per_node: int) -> None:
    """Raise ValueError if the sizes of a layer or the numbers of GPUs are impossible."""
    instance("work", work, RecurrentWork, "make one with RecurrentWork(tokens, heads, d_k, d_v, ...)")
    figures = {"gpus": (gpus, MAX_RANKS), "gpus_per_node": (gpus_per_node, MAX_RANKS), "tokens": (work.tokens, MAX_TOKENS)}
    figures |= {"heads": (work.heads, MAX_RANKS), "d_k": (work.d_k, 256), "d_v": (work.d_v, 256), "width": (work.width, MAX_TOKENS)}
    for name, (value, most) in figures.items():
        integer(name, value, least=1, most=most)
    integer("channels", work.channels, least=0)
    check_nodes(gpus, gpus_per_node)
    if work.decays not in DECAYS:
        raise ValueError(f"decays is {work.decays!r}, but must be one of {', '.join(DECAYS)}")
    flag("delta", work.delta)
    instance("mask", work.mask, Mask, BUILD_A_MASK)
    check_mask(work.mask)
    work.mask.check_length(work.tokens)


def _work(work: RecurrentWork, segments: Segments, gpus: int) -> tuple[np.ndarray, np.ndarray]:
    """Operations of a forward pass of each rank: of segments that begin documents, and of others."""
    first, following = np.zeros(gpus), np.zeros(gpus)
    for segment in segments.every:
        (first if segment.first else following)[segment.rank] += len(segment)
    each = 6 * work.d_k * work.d_v * work.heads
    return each * first, each * following


def _sent(work: RecurrentWork, segments: Segments, gpus: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Bytes by sender and receiver, (gpus, gpus), of states and of halos: each forward and backward."""
    states = [np.zeros((gpus, gpus)) for _ in range(2)]
    for each, heard in zip(states, (segments.heard_by_later, segments.heard_by_earlier)):
        for sender in range(gpus):
            for receiver in range(gpus) if segments.is_linked(sender) else ():
                if receiver != sender:
                    each[sender, receiver] = len(heard(sender, receiver)) * work.segment_bytes
    halos = np.zeros((gpus, gpus))
    for (sender, receiver), pieces in halo_pieces(segments, work.width).items() if work.channels else ():
        if sender != receiver:
            halos[sender, receiver] = count_rows(pieces) * work.channels
    return states, [_ITEM * halos, 4 * halos.T]
