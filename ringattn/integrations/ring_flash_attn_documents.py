"""What the package ring_flash_attn makes of packed documents before a call: the bounds in a rank's rows, and in the keys that they see."""

from __future__ import annotations

import torch

from .. import check
from ..runtime.graph_breaks import breaks_graphs
from .ring_flash_attn_arguments import Prepared, keep, row_bounds, values

__all__ = ["llama3_flash_attn_prepare_cu_seqlens"]


@breaks_graphs
def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """What a rank's call of `llama3_flash_attn_varlen_func` needs to know of packed documents, once a batch.

    Args:
        cu_seqlens: (documents + 1,) integers, the bounds of all documents in the whole sequence, whose length world_size divides.
        causal: as in the call.
        rank: this rank.
        world_size: the number of ranks.

    Returns `cu_seqlens_q`, the bounds in this rank's rows; `cu_seqlens_k`, those in the keys that its queries see, which are the rows
    `local_k_slice` of the whole sequence; the longest of each; and that slice. Raises ValueError for bad input. The two tensors
    remember the whole sequence's bounds: if they are copied, the hosts have to swap them in each call.

    >>> import torch
    >>> from ringattn.integrations.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens
    >>> llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, rank=1, world_size=2)
    (tensor([0, 4]), tensor([0, 5]), 4, 5, slice(3, 8, None))
    """
    check.dense_tensor("cu_seqlens", cu_seqlens)
    check.flag("causal", causal)
    check.integer("world_size", world_size, least=1)
    check.integer("rank", rank, most=world_size - 1)
    bounds = values("cu_seqlens", cu_seqlens)
    row_bounds("cu_seqlens", cu_seqlens, bounds[-1] if bounds else 0, bounds[-1] if bounds else 0)
    if bounds[-1] % world_size:
        raise ValueError(f"cu_seqlens ends with {bounds[-1]}, which world_size {world_size} does not divide: pad the sequence")
    rows = bounds[-1] // world_size
    first, last = rank * rows, (rank + 1) * rows
    inner = [bound for bound in bounds if first < bound < last]
    begins = max(bound for bound in bounds if bound <= first)
    ends = last if causal else min(bound for bound in bounds if bound >= last)
    queries = (0, *(bound - first for bound in inner), rows)
    keys = (0, *(bound - begins for bound in inner), ends - begins)
    made = [torch.tensor(found, dtype=cu_seqlens.dtype, device=cu_seqlens.device) for found in (queries, keys)]
    for x, found in zip(made, (queries, keys)):
        keep(x, found)
    Prepared(bounds, causal, rank, world_size, slice(begins, ends)).remember(*made)
    return made[0], made[1], _longest(queries), _longest(keys), slice(begins, ends)


def _longest(bounds: tuple[int, ...]) -> int:
    return max(b - a for a, b in zip(bounds, bounds[1:]))
