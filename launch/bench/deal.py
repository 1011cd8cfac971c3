"""Predicts attention over sequences that are dealt to rings of several sizes, beside rings of one size. It needs no GPU.

Global batches have sequences of log-normal lengths, the same for all ways. Each step's sequences are packed in their ring and `placed`.
A step lasts as long as its slowest ring by the planner's model (`python -m ringattn plan`), with the fastest schedule of each ring. Each
cell is TFLOP/s of the live pairs, a GPU, both passes of one layer over all steps, and the tokens of a step's longest shard over the mean,
for which the other layers wait. The columns:

    dealt       `deal_sequences`
    in nodes    the same, with `ranks_per_node`
    least       rings of the smallest power of two of GPUs that holds the longest sequence. Longest first, a sequence joins the ring, of
                any step, that has room and the least work
    all GPUs    one ring
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import ringattn as ra
from ringattn.predict.machine import MACHINES, Machine
from ringattn.predict.planner import options, predict
from ringattn.predict.simulation import Prediction, Workload
from ringattn.training.rings import RingGroup, deal_sequences

from .shared.cases import log_normal_lengths

Steps = list[tuple[RingGroup, ...]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--machine", choices=sorted(MACHINES), default="h200")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="that a GPU holds (default: 8192 32768)")
    parser.add_argument("--means", type=int, nargs="+", default=[2048, 16384], help="mean lengths (default: 2048 16384)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a length (default: 1)")
    parser.add_argument("--steps", type=int, default=4, help="that the tokens of a global batch fill (default: 4)")
    parser.add_argument("--batches", type=int, default=3, help="global batches of each mix (default: 3)")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)


def main(arguments: argparse.Namespace) -> None:
    if arguments.gpus & (arguments.gpus - 1):
        raise SystemExit(f"--gpus is {arguments.gpus}, but must be a power of two: rings of one size share them")
    print("| GPUs | tokens a GPU | mean length | " + " | ".join(WAYS) + " |")
    print("|---" * (3 + len(WAYS)) + "|")
    for tokens in arguments.tokens:
        for mean in arguments.means:
            whole = tokens * arguments.gpus
            batches = [
                log_normal_lengths(mean, arguments.sigma, arguments.steps * whole, seed, longest=whole)
                for seed in range(arguments.batches)
            ]
            row = " | ".join(
                cell([(lengths, make(lengths, arguments, tokens)) for lengths in batches], arguments) for make in WAYS.values()
            )
            print(f"| {arguments.gpus} | {tokens:,} | {mean:,} | {row} |", flush=True)


def least_rings(lengths: list[int], arguments: argparse.Namespace, tokens: int) -> Steps:
    """Rings of the smallest size that holds the longest sequence."""
    size = 1
    while size * tokens < max(lengths):
        size *= 2
    return fixed_rings(lengths, arguments.gpus, tokens, size)


def fixed_rings(lengths: list[int], gpus: int, tokens: int, size: int) -> Steps:
    """Longest first, a sequence joins the ring, of any step, that has room and the least work."""
    rings: list[tuple[list[int], int, int]] = []  # sequences, tokens, work
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = min(
            (n for n, ring in enumerate(rings) if ring[1] + lengths[i] <= size * tokens), key=lambda n: rings[n][2], default=None
        )
        if at is None:
            at = len(rings)
            rings += [([], 0, 0)] * (gpus // size)
        held, filled, work = rings[at]
        rings[at] = [*held, i], filled + lengths[i], work + lengths[i] ** 2
    all_rings = [RingGroup(n * size % gpus, size, tuple(held)) for n, (held, *_) in enumerate(rings)]
    return [tuple(all_rings[n : n + gpus // size]) for n in range(0, len(all_rings), gpus // size)]


def cell(batches: list[tuple[list[int], Steps]], arguments: argparse.Namespace) -> str:
    """TFLOP/s a GPU over all batches, and the longest shards' tokens over the mean."""
    seconds = longest = 0.0
    for lengths, steps in batches:
        for step in steps:
            found = [fastest([lengths[i] for i in ring.sequences], ring.size, arguments) for ring in step if ring.sequences]
            seconds += max(one.total for one, _ in found)
            longest += max(held for _, held in found)
    every = [n for lengths, _ in batches for n in lengths]
    flop = 3.5 * 4 * sum(n * (n + 1) // 2 for n in every) * arguments.heads * arguments.head_dim
    return f"{flop / seconds / arguments.gpus / 1e12:.0f}, {longest * arguments.gpus / sum(every):.2f}"


def fastest(lengths: list[int], gpus: int, arguments: argparse.Namespace) -> tuple[Prediction, int]:
    """The prediction of a ring with these sequences, and the tokens of its longest shard."""
    machine: Machine = MACHINES[arguments.machine]
    mask, per_node = ra.documents(lengths=lengths), min(gpus, arguments.gpus_per_node)
    layout = ra.placed(mask, sum(lengths), gpus)
    work = Workload(sum(lengths), arguments.heads, arguments.kv_heads, arguments.head_dim, mask, lambda *_: layout)
    tried = [option for option in options(work, gpus, per_node) if option.heads_axis == 1]
    return min((predict(machine, work, gpus, per_node, option) for option in tried), key=lambda one: one.total), max(layout.lengths)


WAYS: dict[str, Callable[[list[int], argparse.Namespace, int], Steps]] = {
    "dealt": lambda lengths, given, tokens: deal_sequences(lengths, given.gpus, tokens),
    "in nodes": lambda lengths, given, tokens: deal_sequences(lengths, given.gpus, tokens, given.gpus_per_node),
    "least": least_rings,
    "all GPUs": lambda lengths, given, tokens: fixed_rings(lengths, given.gpus, tokens, given.gpus),
}
