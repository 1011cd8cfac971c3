"""The exact mean loss over all tokens of all ranks, whatever a wrapper does with the gradients.

Every rank has a sum S_r of token losses and a count n_r of valid tokens. The loss of the step is L = sum(S_r) / N with N = sum(n_r), over
all ranks: those of a ring and of data parallel alike. A mean of the ranks' own means is another number as soon as counts differ.

A rank's backward pass gives d S_r, where attention has already sent home what other ranks' tokens owe to this rank's. The gradient
of L is sum(d S_r) / N. Wrappers sum the ranks' gradients and divide by some d; so each rank calls backward on S_r * d / N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import check
from ..runtime.groups import Group, process_groups
from .causal_lm import IGNORE


@dataclass(frozen=True)
class Reduction:
    """What becomes of the ranks' gradients before the optimiser's step: their sum, divided by `divisor`."""

    divisor: int

    def __post_init__(self) -> None:
        check.integer("divisor", self.divisor, least=1)


def summed() -> Reduction:
    """`causal_lm.sum_gradients`, or a wrapper told not to divide: divisor 1."""
    return Reduction(1)


def averaged(group: Group | None = None) -> Reduction:
    """DDP, FSDP and FSDP2: the mean over the ranks of their group, which must be all ranks of the loss: divisor, their number.

    `group`: the process group or device mesh (of any dimensions) given to the wrapper; None for all ranks.
    """
    return Reduction(math.prod(dist.get_world_size(axis) for axis in process_groups(group)))


def deepspeed(data_parallel: int, accumulation: int = 1) -> Reduction:
    """DeepSpeed: the sum over all ranks, divided by the data-parallel ranks and by the steps of gradient accumulation.

    `data_parallel`: replicas of a ring, if the engine was given the ring's ranks as sequence parallel (it then divides by world size
    over ring size), or all ranks if it knows of none. `accumulation`: the engine's `gradient_accumulation_steps`, by which
    `engine.backward` divides each loss.
    """
    return Reduction(check.integer("data_parallel", data_parallel, least=1) * check.integer("accumulation", accumulation, least=1))


@dataclass(frozen=True)
class MeanLoss:
    """`loss`: call backward on it (this rank's part, scaled). `mean`: the loss of the step, for people, equal on all ranks. `tokens`: N."""

    loss: torch.Tensor
    mean: torch.Tensor
    tokens: torch.Tensor


def mean_loss(
    summed_loss: torch.Tensor,
    labels: torch.Tensor,
    *,
    reduction: Reduction,
    group: Group | None = None,
    tokens: torch.Tensor | int | None = None,
) -> MeanLoss:
    """The exact mean over all valid tokens of all ranks, and what to call backward on; a collective.

    Args:
        summed_loss: scalar, the losses of this rank's valid tokens summed (`CausalLMLoss`, `token_loss`); in fp32, for sums of many tokens
            do not fit narrower types.
        labels: this rank's shifted labels, `IGNORE` where a token does not count; all may be.
        reduction: what the wrapper does with gradients: `averaged()`, `deepspeed(...)` or `summed()`.
        group: all ranks whose gradients are reduced together, ring and data parallel: a group, a mesh of any dimensions, a hybrid, or
            None for all ranks.
        tokens: with gradient accumulation, the valid tokens of all micro-batches of the step on all ranks (`count_tokens`); `mean` is
            then this micro-batch's part, and the parts of a step add up to its loss.

    Where no rank has a valid token, the loss is 0 and so are the gradients, and `tokens` says so. Raises ValueError if summed_loss is no
    scalar, or reduction no `Reduction`.
    """
    check.instance("reduction", reduction, Reduction, "make one with averaged(), deepspeed(...) or summed()")
    check.instance("summed_loss", summed_loss, torch.Tensor, "give the sum that CausalLMLoss or token_loss returns, before .item()")
    check.instance("labels", labels, torch.Tensor, "give this rank's shifted labels")
    if summed_loss.dim():
        raise ValueError(f"summed_loss has shape {tuple(summed_loss.shape)}, but must be a scalar: the sum over this rank's tokens")
    counted = (labels != IGNORE).sum().to(summed_loss.device)
    both = _sum_over(torch.stack([summed_loss.detach().double(), counted.double()]), group)
    total = both[1] if tokens is None else torch.as_tensor(tokens, dtype=torch.float64, device=both.device)
    share = 1 / total.clamp(min=1)
    factor = (reduction.divisor * share).to(torch.promote_types(summed_loss.dtype, torch.float32))
    return MeanLoss(summed_loss.to(factor.dtype) * factor, both[0] * share, total)


def count_tokens(*labels: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The valid tokens among the labels of all ranks, say of all micro-batches of a step: a float64 scalar; a collective."""
    if not labels:
        raise ValueError("labels is empty: give those of at least one micro-batch")
    for each in labels:
        check.instance("labels", each, torch.Tensor, "give one tensor a micro-batch, count_tokens(*labels)")
    return _sum_over(torch.stack([(each != IGNORE).sum() for each in labels]).sum().double(), group)


def _sum_over(values: torch.Tensor, group: Group | None) -> torch.Tensor:
    for axis in process_groups(group):
        dist.all_reduce(values, group=axis)
    return values
