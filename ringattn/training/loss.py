"""The exact mean loss over all tokens of all ranks, whatever a wrapper does with the gradients.

Every rank has a sum S_r of token losses and a count n_r of valid tokens. The loss of the step is L = sum(S_r) / N with N = sum(n_r), over
all ranks, of rings and of data parallelism alike. If counts differ between ranks, the mean of the ranks' own means is another number.

The gradient of L is sum(d S_r) / N. A rank's backward pass adds its part of this sum; the backward pass of attention carries gradients
between ranks. Wrappers sum the ranks' gradients and divide by some number d, so each rank calls backward on S_r * d / N.
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
    """How the ranks' gradients are reduced before the optimiser's step: they are summed and divided by `divisor`."""

    divisor: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "divisor", check.integer("divisor", self.divisor, least=1))


def summed() -> Reduction:
    """For `causal_lm.sum_gradients`, or a wrapper that is set not to divide: divisor 1."""
    return Reduction(1)


def averaged(group: Group | None = None) -> Reduction:
    """For DDP, FSDP and FSDP2, which average over the ranks of their group: the divisor is the number of these ranks.

    `group`: the process group or device mesh (of any dimensions) given to the wrapper, which must have all ranks of the loss; None for
    all ranks.
    """
    return Reduction(math.prod(dist.get_world_size(axis) for axis in process_groups(group)))


def deepspeed(data_parallel: int, accumulation: int = 1) -> Reduction:
    """For DeepSpeed, which sums over all ranks and divides by the data-parallel ranks and by the steps of gradient accumulation.

    `data_parallel`: the number of rings, if the engine knows each ring's ranks as sequence parallel (it then divides by world size over
    ring size); otherwise the number of all ranks. `accumulation`: the engine's `gradient_accumulation_steps`, by which
    `engine.backward` divides each loss.
    """
    return Reduction(check.integer("data_parallel", data_parallel, least=1) * check.integer("accumulation", accumulation, least=1))


@dataclass(frozen=True)
class MeanLoss:
    """`loss`: this rank's part, scaled; call backward on it. `mean`: the step's loss, to show; equal on all ranks. `tokens`: N."""

    loss: torch.Tensor
    mean: torch.Tensor
    tokens: torch.Tensor


def mean_loss(
    summed_loss: torch.Tensor,
    labels: torch.Tensor,
    *,
    reduction: Reduction,
    group: Group | None = None,
    tokens: torch.Tensor | float | None = None,
) -> MeanLoss:
    """The exact mean loss over all valid tokens of all ranks, and the loss to call backward on; a collective.

    Args:
        summed_loss: scalar, the sum of the losses of this rank's valid tokens (`CausalLMLoss`, `token_loss`); in fp32, because narrower
            types do not hold sums over many tokens.
        labels: this rank's shifted labels, `IGNORE` where a token does not count; a rank may have no token that counts.
        reduction: what the wrapper does with gradients: `averaged()`, `deepspeed(...)` or `summed()`.
        group: all ranks whose gradients are reduced together, ring and data parallel: a group, a mesh of any dimensions, a hybrid, or
            None for all ranks.
        tokens: with gradient accumulation, the number of valid tokens of all micro-batches of the step on all ranks (`count_tokens`);
            `mean` is then this micro-batch's part, and the parts of a step add up to its loss.

    If no rank has a valid token, the loss, the gradients and `tokens` are 0. Raises ValueError if summed_loss is not a scalar, or
    reduction is not a `Reduction`.
    """
    check.instance("reduction", reduction, Reduction, "make one with averaged(), deepspeed(...) or summed()")
    if not isinstance(summed_loss, torch.Tensor) and hasattr(summed_loss, "logits"):
        raise ValueError(
            f"summed_loss is a {type(summed_loss).__name__}, the output of a model: wrap CausalLMLoss(model), not the model, and give "
            "what it returns"
        )
    check.instance("summed_loss", summed_loss, torch.Tensor, "give the sum that CausalLMLoss or token_loss returns, before .item()")
    check.instance("labels", labels, torch.Tensor, "give this rank's shifted labels")
    if summed_loss.dim():
        raise ValueError(f"summed_loss has shape {tuple(summed_loss.shape)}, but must be a scalar: the sum over this rank's tokens")
    counted = _valid(labels).to(summed_loss.device)
    both = _sum_over(torch.stack([summed_loss.detach().double(), counted.double()]), group)
    total = both[1] if tokens is None else _scalar("tokens", tokens).to(both.device)
    share = 1 / total.clamp(min=1)
    factor = (reduction.divisor * share).to(torch.promote_types(summed_loss.dtype, torch.float32))
    return MeanLoss(summed_loss.to(factor.dtype) * factor, both[0] * share, total)


def count_tokens(*labels: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """The number of valid tokens in these labels, such as all micro-batches of a step, on all ranks: a float64 scalar; a collective."""
    if not labels:
        raise ValueError("labels is empty: give the labels of at least one micro-batch")
    for each in labels:
        check.instance("labels", each, torch.Tensor, "give one tensor per micro-batch, count_tokens(*labels)")
    return _sum_over(torch.stack([_valid(each) for each in labels]).sum().double(), group)


def _valid(labels: torch.Tensor) -> torch.Tensor:
    """The number of labels that count."""
    if labels.is_floating_point() or labels.is_complex() or labels.layout != torch.strided or labels.is_meta:
        raise ValueError(
            f"labels are of {labels.dtype}, {labels.layout} on {labels.device}, but must be dense, of integers, with values"
        )
    return (labels != IGNORE).sum()


def _scalar(name: str, value: torch.Tensor | float) -> torch.Tensor:
    """A number or a tensor of one, as a float64 scalar."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(check.number(name, value, least=0), dtype=torch.float64)
    if value.dim() or value.is_complex() or value.is_meta or value.layout != torch.strided:
        raise ValueError(
            f"{name} is a tensor of shape {tuple(value.shape)}, {value.dtype} on {value.device}, but must be a real scalar"
        )
    return value.detach().double()


def _sum_over(values: torch.Tensor, group: Group | None) -> torch.Tensor:
    for axis in process_groups(group):
        dist.all_reduce(values, group=axis)
    return values
