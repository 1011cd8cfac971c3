"""What training a causal language model on a sharded sequence needs beside ring attention.

Labels are shifted over the whole sequence, before it is split: the token after a shard's last one is on another rank.
The loss is a sum over local tokens divided by the count over all ranks, so that summing it, and its gradients, over the
ranks gives the mean over all tokens, however uneven the shards.

Shapes: b batch, s local tokens, n features, vocab tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # the label of a token that is not counted


def shift_labels(tokens: torch.Tensor) -> torch.Tensor:
    """The label of each token of whole sequences, the token after it; the last has none (`IGNORE`): (b, s) -> (b, s)."""
    return F.pad(tokens[..., 1:], (0, 1), value=IGNORE)


def token_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int = 512) -> torch.Tensor:
    """Summed cross-entropy of local tokens under logits `hidden @ weight.T`, `chunk` tokens at a time, fp32 or wider.

    Logits of a chunk are formed, reduced and dropped, and formed again in backward: those of a long shard never exist whole.

    Args:
        hidden: (b, s, n), the model's last hidden states.
        weight: (vocab, n), the output embedding.
        labels: (b, s) int64, `IGNORE` where a token is not counted.
        chunk: tokens whose logits exist at a time.

    Returns a scalar; 0 for an empty shard, with zero gradients. Divide it by the tokens counted on all ranks.
    Raises ValueError if the shapes do not fit.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"hidden has the tokens {tuple(hidden.shape[:-1])} and labels {tuple(labels.shape)}: give one a token")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, but must be (vocab, {hidden.shape[-1]}), hidden's features")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, but must be at least 1")
    total = (hidden.sum() + weight.sum()) * 0 if not labels.numel() else None
    for rows, targets in zip(hidden.flatten(0, -2).split(chunk), labels.flatten().split(chunk), strict=True):
        part = checkpoint(_chunk_loss, rows, weight, targets, use_reentrant=False)
        total = part if total is None else total + part
    assert isinstance(total, torch.Tensor)
    return total


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Replace each gradient by its sum over the ranks: the gradient of the summed loss. A collective; alone it does nothing.

    Every rank takes part for every trainable parameter: one that got no gradient here counts as zero.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    pending = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            pending.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for work in pending:
        assert work is not None
        work.wait()


def _chunk_loss(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = F.linear(rows, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
