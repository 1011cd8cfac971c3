"""The peers of ring attention: other ways to compute attention over a sharded sequence, as users would write them.

    ulysses                     all-to-all from sequence to heads and back around PyTorch's attention (cuDNN), over a contiguous layout
    ulysses+flash4              the same around FlashAttention-4, where it is installed
    cp-alltoall, cp-allgather   torch.distributed's context_parallel over cuDNN, with its two ways to rotate K/V
    ring_flash_attn             the zigzag ring of the package ring-flash-attn, where it is installed

`PEER_METHODS` holds them by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringattn as ra
from ringattn.transport import Transport

from .cases import RingCase, Tensors


@dataclass(frozen=True)
class Contestant:
    """A way to compute attention: its layout of the sequence, and the function from (q, k, v) shards to out.

    surroundings: makes the context that both passes run in.
    transport: what moves K/V, of ring attention only.
    graph: capture each pass in a CUDA graph.
    """

    layout: ra.Layout
    compute: Callable[[Tensors], torch.Tensor]
    surroundings: Callable[[], AbstractContextManager] = nullcontext
    transport: Transport | None = None
    graph: bool = False


def ulysses(case: RingCase, attention: Callable[..., torch.Tensor]) -> Contestant:
    """DeepSpeed-Ulysses (Jacobs et al. 2023), with contiguous shards of equal length; one rank calls the kernel alone.

    attention: of whole sequences, causal.
    """
    group = case.ranks.group

    def compute(leaves: Tensors) -> torch.Tensor:
        out = attention(*(_AllToAll.apply(x[0], True, group)[None] for x in leaves))
        return _AllToAll.apply(out[0], False, group)[None]

    # one rank has nothing to swap
    return Contestant(case.layout("contiguous"), compute if case.ranks.size > 1 else lambda leaves: attention(*leaves))


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """cuDNN through torch; on a CPU what torch has there."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def flash4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention-4."""
    from flash_attn.cute import flash_attn_func

    return first(flash_attn_func(q, k, v, causal=True))


def first(result: torch.Tensor | tuple) -> torch.Tensor:
    """out, which FlashAttention-4 returns alone, or before the log-sum-exp."""
    return result[0] if isinstance(result, tuple) else result


class _AllToAll(torch.autograd.Function):
    """(s_local, h, d) to (s, h / world_size, d), or back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, to_heads: bool, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.to_heads, ctx.group = to_heads, group
        return _swap(x, to_heads, group)

    @staticmethod
    def backward(ctx, dx: torch.Tensor):
        return _swap(dx, not ctx.to_heads, ctx.group), None, None


def _swap(x: torch.Tensor, to_heads: bool, group: dist.ProcessGroup) -> torch.Tensor:
    n = group.size()
    parts = x.unflatten(1, (n, -1)).transpose(0, 1) if to_heads else x.unflatten(0, (n, -1))
    parts = parts.contiguous()  # (n, s_local, h / n, d)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)


def context_parallel(case: RingCase, rotate: str) -> Contestant:
    """torch.distributed.tensor.experimental.context_parallel, whose balanced layout is zigzag; `rotate` is its own word."""
    from torch.distributed.tensor.experimental import context_parallel as enter
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    n = case.ranks.size
    mesh = dist.device_mesh.DeviceMesh.from_group(case.ranks.group, case.device)
    repeats = case.heads // case.kv_heads

    @contextmanager
    def surroundings():
        set_rotate_method(rotate)
        # context_parallel must be given a buffer to shard; our inputs are sharded already
        nothing = torch.zeros(1, 2 * n, device=case.device)
        with enter(mesh, buffers=[nothing], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield

    def compute(leaves: Tensors) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in leaves)
        # context_parallel has no grouped-query attention: repeat K and V, and let autograd sum their gradients
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Contestant(case.layout(), compute, surroundings)


def ring_flash_attn(case: RingCase) -> Contestant:
    """The zigzag ring of zhuzilin/ring-flash-attention."""
    from ring_flash_attn import zigzag_ring_flash_attn_func

    options = dict(causal=True, group=case.ranks.group)
    return Contestant(case.layout(), lambda leaves: zigzag_ring_flash_attn_func(*leaves, **options))


PEER_METHODS: dict[str, Callable[[RingCase], Contestant]] = {
    "ulysses": lambda case: ulysses(case, cudnn),
    "ulysses+flash4": lambda case: ulysses(case, flash4),
    "cp-alltoall": lambda case: context_parallel(case, "alltoall"),
    "cp-allgather": lambda case: context_parallel(case, "allgather"),
    "ring_flash_attn": ring_flash_attn,
}
FLASH4 = "flash_attn.cute"
# the packages that peers need beside torch
PACKAGES = {"ulysses+flash4": FLASH4, "ring_flash_attn": "ring_flash_attn"}


def is_installed(package: str) -> bool:
    """Whether a package is there; its name may have dots."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
