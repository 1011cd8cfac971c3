"""A peer to compare with: all-to-all from sequence to heads around torch's own attention (DeepSpeed-Ulysses, Jacobs et al. 2023).

Each rank gets all tokens of its share of the heads, runs scaled_dot_product_attention on them, and sends the output back. Needs
contiguous shards of equal length, heads that the ranks divide, and a causal mask; key/value heads are repeated up to the ranks.

Shapes: b batch, s tokens of this rank, S = s * ranks, h heads, d head dim.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

NAME = "ulysses-sdpa"


def attach_ulysses(model: nn.Module, tokens: int) -> None:
    """Switch a transformers model's attention to this one. Raises ValueError where it cannot run."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    ranks, heads = dist.get_world_size(), model.config.num_attention_heads
    if tokens % ranks or heads % ranks:
        raise ValueError(f"{tokens} tokens and {heads} heads over {ranks} ranks: ulysses-sdpa needs equal shards of both")
    AttentionInterface.register(NAME, ulysses_forward)
    AttentionMaskInterface.register(NAME, lambda *args, **options: None)
    model.set_attn_implementation(NAME)


def ulysses_forward(module: nn.Module, query, key, value, attention_mask, scaling=None, **unused):
    """q (b, h, s, d), k and v (b, hk, s, d) -> (b, s, h, d), None."""
    ranks = dist.get_world_size()
    copies = max(1, ranks // key.shape[1])
    q, k, v = (to_heads(x) for x in (query, *(x.repeat_interleave(copies, dim=1) for x in (key, value))))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return to_sequence(out), None


def to_heads(x: torch.Tensor) -> torch.Tensor:
    """(b, h, s, d) -> (b, h / ranks, S, d)."""
    b, h, s, d = x.shape
    ranks = dist.get_world_size()
    sent = x.reshape(b, ranks, h // ranks, s, d).transpose(0, 1).contiguous()  # (ranks, b, h / ranks, s, d)
    got = all_to_all_single(torch.empty_like(sent), sent)  # from each rank, its tokens
    return got.permute(1, 2, 0, 3, 4).reshape(b, h // ranks, ranks * s, d)


def to_sequence(x: torch.Tensor) -> torch.Tensor:
    """(b, h / ranks, S, d) -> (b, s, h, d)."""
    b, h, total, d = x.shape
    ranks = dist.get_world_size()
    sent = x.reshape(b, h, ranks, total // ranks, d).permute(2, 0, 1, 3, 4).contiguous()  # (ranks, b, h / ranks, s, d)
    got = all_to_all_single(torch.empty_like(sent), sent)  # from each rank, its heads
    return got.permute(1, 3, 0, 2, 4).reshape(b, total // ranks, ranks * h, d)
