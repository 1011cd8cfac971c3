"""The merge of the partials of a decode context-parallel group of vLLM, of which each rank keeps its own heads.

Shapes: n query tokens, H heads of all ranks of the group, h heads of this rank, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..device import local


def reduce_scatter(
    out: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor, group: Any, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """The merge of all ranks' partials, out (n, H, d), row_max and row_sum (n, H): this rank's heads of it, (n, h, d).

    The statistics of all ranks are gathered, so that each rank weighs its own out; then these are summed.
    """
    everyone = group.all_gather(torch.stack([row_max, row_sum])[None], dim=0)  # (ranks, 2, n, H)
    total_max = everyone[:, 0].amax(0)
    # a row with nothing live on any rank has row_max = -inf: avoid inf - inf
    pivot = torch.where(total_max == float("-inf"), 0.0, total_max)
    weights = everyone[:, 1] * (everyone[:, 0] - pivot).exp()
    total = weights.sum(0)  # (n, H)
    share = weights[group.rank_in_group] / torch.where(total > 0, total, 1)
    found = group.reduce_scatter(out * share[..., None], dim=1)
    if sinks is None:
        return found
    h = found.shape[1]
    own = slice(group.rank_in_group * h, (group.rank_in_group + 1) * h)
    row_max, row_sum = (x[:, own, None].contiguous() for x in (total_max, total))  # (n, h, 1)
    return local.with_sinks(found[:, None], row_max, row_sum, sinks.float())[0][:, 0]


def all_to_all(
    out: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor, group: Any, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """What `reduce_scatter` returns, merged in the order of ranks: each rank gets the partials of its own heads alone."""
    ranks = group.world_size
    parts = [x.unflatten(1, (ranks, -1)).transpose(0, 1).reshape(ranks, -1) for x in (out, row_max, row_sum)]
    sent = torch.cat(parts, dim=1)
    packed = torch.empty_like(sent)
    dist.all_to_all_single(packed, sent, group=group.device_group)
    n, heads, d = out.shape
    q = out.new_empty(n, 1, heads // ranks, d)
    return local.merge_packed(packed, q, d, None if sinks is None else sinks.float())[:, 0]
