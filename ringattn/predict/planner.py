"""Predicts time, exposed communication and memory of a layer's attention on many GPUs, for every schedule: `python -m ringattn plan`.

`simulation.py` counts the work: live pairs of each rank and owner come from the plan, rows of each message from the schedule's
transfers. `Machine`, a model of a few constants, turns these counts into times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf

from ..check import BUILD_A_MASK, MAX_RANKS, MAX_TOKENS, flag, instance, integer, listed, number
from ..geometry.mask import Mask
from ..schedule.schedules import Schedule, Waves, double_ring, gather, pass_q, ring, waves
from .machine import Machine, check_nodes
from .simulation import ITEM, Option, Prediction, Workload, simulate

# the most ranks of a ring that is simulated whole (or those of four nodes or six waves, if more). The figures of a longer ring are
# extrapolated from two smaller ones with shards of the same size, since every further rank adds the same amount
_RANKS = 32
_MAX_HEAD_DIM = 256  # the machines' rates are those of kernels up to it


def predict(machine: Machine, work: Workload, gpus: int, gpus_per_node: int, option: Option) -> Prediction:
    """Predict one option on `gpus` GPUs; those of a node have consecutive ranks. Raises ValueError if work or option do not fit them."""
    check_work(work, gpus, gpus_per_node)
    instance("machine", machine, Machine, "take one of MACHINES, or its with_rates(...)")
    instance("option", option, Option, "make one with Option(schedule), or take one of options(...)")
    instance("schedule", option.schedule, Schedule, "build one with ring(), waves(width) and the like")
    integer("heads_axis", option.heads_axis, least=1, most=MAX_RANKS)
    gpus = int(gpus)
    u, gpus_per_node = option.heads_axis, min(gpus, int(gpus_per_node))
    if gpus % u or work.heads % u:
        raise ValueError(f"the heads axis is {u}, but must divide the {gpus} GPUs and the {work.heads} heads")
    if gpus_per_node % u and u % gpus_per_node:
        raise ValueError(f"the heads axis is {u}, but must divide the {gpus_per_node} GPUs of a node, or be a multiple of them")
    n, shard = gpus // u, ceil(work.tokens / gpus)
    worlds = None
    if work.kv_tokens is None:
        worlds = _smaller_worlds(work.mask, option.schedule, n, max(1, gpus_per_node // u), shard * u)
    if worlds is None:
        return simulate(machine, work, gpus, gpus_per_node, option)
    small, large = (
        simulate(machine, replace(work, tokens=shard * ranks * u), ranks * u, gpus_per_node, option) for ranks in worlds
    )
    if work.mask.reach is None:
        return _continued(small, large, (n - worlds[1]) / (worlds[1] - worlds[0]))
    # in a larger world the busiest ranks do no more work, but the mean rises: the first positions, which see fewer keys, weigh less
    further = (worlds[1] / n - 1) / (1 - worlds[1] / worlds[0])
    return replace(large, flop=large.flop + (large.flop - small.flop) * further)


def options(work: Workload, gpus: int, gpus_per_node: int, *, nccl: bool = False) -> list[Option]:
    """The options worth comparing; with `nccl`, without copy engines. A heads axis lies within a node, or holds all GPUs."""
    check_work(work, gpus, gpus_per_node)
    flag("nccl", nccl)
    gpus_per_node = min(gpus, gpus_per_node)
    axes = [u for u in range(1, gpus_per_node + 1) if gpus_per_node % u == 0]
    if gpus > gpus_per_node:
        axes.append(gpus)
    found = []
    for u in axes:
        if work.heads % u:
            continue
        ranks, per_node = gpus // u, max(1, gpus_per_node // u)
        found.append(Option(ring(), u, nccl))
        if u == 1:
            found += [Option(waves(width), u, nccl) for width in (1, 2, 4, 8) if width < ranks - 1]
        if ranks > 2:
            found.append(Option(gather(), u, nccl))
        if 1 < per_node < ranks:
            found.append(Option(double_ring(per_node), u, nccl))
        if work.kv_tokens is not None and ranks > 1:
            found += [Option(pass_q(over), u, nccl) for over in (ring(), gather())[: ranks - 1]]
    return found


def recommend(predictions: Iterable[Prediction], memory: float) -> Prediction | None:
    """The fastest (forward plus backward) that takes at most `memory` bytes beyond inputs, output and gradients; None if none does."""
    if not (isinstance(memory, float) and memory == inf):
        memory = number("memory", memory)
    found = listed("predictions", predictions, "a list of Predictions")
    for each in found:
        instance("predictions", each, Prediction, "make them with predict(...)")
    fitting = [p for p in found if p.peak <= memory]
    return min(fitting, key=lambda p: p.total) if fitting else None


def held_bytes(work: Workload, gpus: int) -> int:
    """Bytes that q, k, v, out and the gradients of all four take on a GPU."""
    check_work(work, gpus, gpus)
    k_tokens = work.tokens if work.kv_tokens is None else work.kv_tokens
    return (ceil(work.tokens / gpus) * work.heads + ceil(k_tokens / gpus) * work.kv_heads) * work.head_dim * 4 * ITEM


def check_work(work: Workload, gpus: int, gpus_per_node: int) -> None:
    """Raise ValueError if the sizes of the attention or the numbers of GPUs are impossible."""
    instance("work", work, Workload, "make one with Workload(tokens, heads, kv_heads, head_dim, mask)")
    figures = {"gpus": (gpus, MAX_RANKS), "gpus_per_node": (gpus_per_node, MAX_RANKS), "tokens": (work.tokens, MAX_TOKENS)}
    figures |= {
        "head_dim": (work.head_dim, _MAX_HEAD_DIM),
        "heads": (work.heads, MAX_RANKS),
        "kv_heads": (work.kv_heads, MAX_RANKS),
    }
    if work.kv_tokens is not None:
        figures |= {"kv_tokens": (work.kv_tokens, MAX_TOKENS)}
    integer("q_offset", work.q_offset, most=MAX_TOKENS)
    for name, (value, most) in figures.items():
        integer(name, value, least=1, most=most)
    check_nodes(gpus, gpus_per_node)
    if work.heads % work.kv_heads:
        raise ValueError(f"kv_heads is {work.kv_heads}, which does not divide the {work.heads} heads")
    instance("mask", work.mask, Mask, BUILD_A_MASK)
    if not callable(work.layout):
        raise ValueError(f"layout is {work.layout!r}, but must be a function of (mask, tokens, ranks), such as placed")
    if work.kv_tokens is None and work.q_offset:
        raise ValueError(f"q_offset is {work.q_offset}, but without kv_tokens queries and keys are the same tokens")
    work.mask.check_length(work.length)


def _smaller_worlds(mask: Mask, schedule: Schedule, n: int, per_node: int, shard: int) -> tuple[int, int] | None:
    """The sizes of two smaller rings from which a ring of n ranks is extrapolated; None if it is to be simulated whole.

    Both rings have whole nodes and are longer than twice the mask's reach and than three waves. Only full and causal masks and windows
    look the same at all sizes.
    """
    if not mask.scales:
        return None
    # from the third wave on, memory holds K/V of one wave and dK/dV of another
    waves_ = schedule.in_forward
    of_waves = 3 * (waves_.width or 0) if isinstance(waves_, Waves) else 0
    half = per_node * max(2, ceil(max(_RANKS / 2, of_waves, 2 * (mask.reach or 0) / shard) / per_node))
    return (half, 2 * half) if n > 2 * half else None


def _continued(small: Prediction, large: Prediction, further: float) -> Prediction:
    """The line through two predictions, at `further` times their distance beyond the second."""
    names = ["forward", "backward", "exposed", "alone_forward", "alone_backward", "flop", "sent", "sent_between_nodes"]
    if len(small.backward_steps) == len(large.backward_steps):
        # with the same number of steps each holds more; with more steps each holds as much as before
        names.append("peak")
    ends = {name: (getattr(small, name), getattr(large, name)) for name in names}
    return replace(large, **{name: high + (high - low) * further for name, (low, high) in ends.items()})
