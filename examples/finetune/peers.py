"""Peers to compare ring attention with, by the name of `--attention`; both need a causal mask and shards of equal length.

    ulysses-sdpa       all-to-all from sequence to heads around torch's own attention, and back (DeepSpeed-Ulysses, Jacobs et al. 2023)
    context-parallel   torch.distributed's context_parallel, K/V around a ring; on GPUs only

torch's attention is cuDNN's on a GPU. Where activations are computed again, its results are kept, as those of ring attention are.

Shapes: b batch, s tokens of this rank, S = s * ranks, h heads, hk key/value heads, d head dim.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

# the layout that each needs
PEERS = {"ulysses-sdpa": "contiguous", "context-parallel": "zigzag"}
_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")


def attach_peer(model: nn.Module, name: str, tokens: int) -> None:
    """Switch a transformers model's attention to a peer. Raises ValueError where it cannot run."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    ranks, heads = dist.get_world_size(), model.config.num_attention_heads
    if name == "ulysses-sdpa" and (tokens % ranks or heads % ranks):
        raise ValueError(f"{tokens} tokens and {heads} heads over {ranks} ranks: ulysses-sdpa needs equal shards of both")
    if name == "context-parallel" and tokens % (2 * ranks):
        raise ValueError(f"{tokens} tokens over {ranks} ranks: context-parallel needs a multiple of {2 * ranks}")
    AttentionInterface.register(name, ulysses_forward if name == "ulysses-sdpa" else context_parallel_forward)
    AttentionMaskInterface.register(name, lambda *args, **options: None)
    model.set_attn_implementation(name)


def peer_checkpoint_contexts():
    """A `context_fn` of torch.utils.checkpoint that keeps the results of torch's attention."""
    kept = [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default for kernel in _KERNELS]
    return create_selective_checkpoint_contexts(kept)


def surroundings(name: str, device: torch.device) -> AbstractContextManager:
    """The context in which a step's forward and backward pass must run."""
    return _context_parallel(device) if name == "context-parallel" else nullcontext()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """torch's, causal: q (b, h, s, d), k and v (b, hk, s, d) -> (b, h, s, d)."""
    grouped = {} if k.shape[1] == q.shape[1] else {"enable_gqa": True}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, **grouped)


def context_parallel_forward(module: nn.Module, query, key, value, attention_mask, scaling=None, **unused):
    """q (b, h, s, d), k and v (b, hk, s, d) -> (b, s, h, d), None."""
    # context_parallel has no grouped-query attention: repeat K and V, autograd sums their gradients
    k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    return attention(query, k, v, scaling).transpose(1, 2), None


@contextmanager
def _context_parallel(device: torch.device):
    from torch.distributed.tensor.experimental import context_parallel

    # context_parallel requires a buffer to shard; our tensors are sharded already
    nothing = torch.zeros(1, 2 * dist.get_world_size(), device=device)
    with context_parallel(DeviceMesh.from_group(dist.group.WORLD, device.type), buffers=[nothing], buffer_seq_dims=[1]):
        yield


def ulysses_forward(module: nn.Module, query, key, value, attention_mask, scaling=None, **unused):
    """q (b, h, s, d), k and v (b, hk, s, d) -> (b, s, h, d), None."""
    ranks = dist.get_world_size()
    copies = max(1, ranks // key.shape[1])
    q, k, v = (to_heads(x) for x in (query, *(x.repeat_interleave(copies, dim=1) for x in (key, value))))
    return to_sequence(attention(q, k, v, scaling)), None


def to_heads(x: torch.Tensor) -> torch.Tensor:
    """(b, h, s, d) -> (b, h / ranks, S, d)."""
    b, h, s, d = x.shape
    ranks = dist.get_world_size()
    sent = x.reshape(b, ranks, h // ranks, s, d).transpose(0, 1).contiguous()  # (ranks, b, h / ranks, s, d)
    got = all_to_all_single_autograd(sent, None, None, dist.group.WORLD)  # from each rank, its tokens
    return got.permute(1, 2, 0, 3, 4).reshape(b, h // ranks, ranks * s, d)


def to_sequence(x: torch.Tensor) -> torch.Tensor:
    """(b, h / ranks, S, d) -> (b, s, h, d)."""
    b, h, total, d = x.shape
    ranks = dist.get_world_size()
    sent = x.reshape(b, h, ranks, total // ranks, d).permute(2, 0, 1, 3, 4).contiguous()  # (ranks, b, h / ranks, s, d)
    got = all_to_all_single_autograd(sent, None, None, dist.group.WORLD)  # from each rank, its heads
    return got.permute(1, 3, 0, 2, 4).reshape(b, total // ranks, ranks * h, d)
