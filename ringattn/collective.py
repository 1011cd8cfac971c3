"""`unshard`: assemble a sharded sequence on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from . import check
from .geometry.layout import Layout, shard
from .runtime.agree import Facts, refusing
from .runtime.agreed import Agreed
from .runtime.context import Context
from .runtime.groups import Group, get_context
from .runtime.ulysses import ring_layout
from .transport import Peer, Transport


def unshard(x_local: torch.Tensor, layout: Layout, group: Group | None = None, dim: int = 1) -> torch.Tensor:
    """The whole sequence on every rank, `layout.seq_len` long along `dim`, from every rank's shard. A collective, differentiable.

    The gradient of a shard is its slice of the sum of all ranks' gradients of the whole sequence (the adjoint), added in rank order. If
    every rank computes the same loss from the whole sequence, divide that loss by the number of ranks.

    Raises ValueError for bad input, and on every rank if ranks disagree on shapes, dtype, dim or layout.
    """
    context = get_context(group)
    with context.turn:
        return _unshard(x_local, layout, context, dim)


def _unshard(x_local: torch.Tensor, layout: Layout, context: Context, dim: int) -> torch.Tensor:
    ranks, agreed = context.ranks, None
    with refusing(ranks):
        ranks.order.check()
        check.instance("x_local", x_local, torch.Tensor, "pass this rank's shard")
        check.dense_tensor("x_local", x_local)
        check.instance("layout", layout, Layout, "pass the layout that the shards were made with")
        if layout.world_size != ranks.size:
            raise ValueError(f"layout {layout!r} is for {layout.world_size} ranks, but the group has {ranks.size}")
        check.no_transforms(x_local=x_local)
        dim = check.dim("x_local", x_local, dim)
        held = layout.lengths[ranks.rank]
        if x_local.shape[dim] != held:
            raise ValueError(
                f"x_local has {x_local.shape[dim]} tokens in dim {dim}, but rank {ranks.rank} of {layout!r} holds {held}"
            )
        if x_local.is_meta and ranks.size > 1:
            raise ValueError("x_local is on meta, so it has no values to gather: pass this rank's shard on cpu or cuda")
        ranks.check_device(x_local.device)
    if ranks.size > 1:
        other_dims = (*x_local.shape[:dim], *x_local.shape[dim + 1 :])
        facts = {
            "function": "unshard",
            "shape but for dim": other_dims,
            "dim": dim,
            "dtype": x_local.dtype,
            "device": x_local.device.type,
            "layout": layout,
            "requires_grad": torch.is_grad_enabled() and x_local.requires_grad,
            "captured in a CUDA graph": check.captured(x_local),
        }
        agreed, _ = Agreed.now(context, Facts(facts), held)
        ranks.connect(x_local.device)
    if context.hybrid is not None:
        # first along the heads axis, then along the ring
        x_local = _Unshard.apply(x_local, context.hybrid.axis_layout(layout), context.hybrid.heads, dim, agreed)
        layout = ring_layout(layout, context.hybrid.heads.size)
    return _Unshard.apply(x_local, layout, context.transport, dim, agreed)


def _adjoint(function: type[torch.autograd.Function], ctx: Any, grads: tuple[torch.Tensor, ...]) -> Any:
    """The backward pass of one of the two functions below, which are each other's adjoint: the other one, and no more gradients."""
    agreed = ctx.agreed
    with nullcontext() if agreed is None else agreed.context.turn:
        agreed = agreed and agreed.backward()
        return function.apply(*grads, ctx.layout, ctx.transport, ctx.dim, agreed), None, None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_local: torch.Tensor, layout: Layout, transport: Transport, dim: int, agreed: Agreed | None
    ) -> torch.Tensor:
        ctx.layout, ctx.transport, ctx.dim, ctx.agreed = layout, transport, dim, agreed
        mine = x_local.transpose(0, dim).contiguous()
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        parts = {rank: mine.new_empty(layout.lengths[rank], *mine.shape[1:]) for rank in others}
        transport.exchange([Peer(rank, mine) for rank in others], [Peer(rank, parts[rank]) for rank in others]).wait()
        parts[transport.rank] = mine
        whole = mine.new_empty(layout.seq_len, *mine.shape[1:])
        for rank, part in parts.items():
            row = 0
            for span in layout.spans[rank]:
                whole[span.start : span.stop : span.stride] = part[row : row + span.length]
                row += span.length
        return whole.transpose(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _adjoint(_ShardOfSum, ctx, grads)


class _ShardOfSum(torch.autograd.Function):
    """The adjoint of `_Unshard`: this rank's shard of the sum of all ranks' whole sequences."""

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, layout: Layout, transport: Transport, dim: int, agreed: Agreed | None
    ) -> torch.Tensor:
        ctx.layout, ctx.transport, ctx.dim, ctx.agreed = layout, transport, dim, agreed
        rows = whole.transpose(0, dim)
        slices = [shard(rows, layout, rank, dim=0).contiguous() for rank in range(transport.size)]
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        received = {rank: torch.empty_like(slices[transport.rank]) for rank in others}
        transport.exchange([Peer(rank, slices[rank]) for rank in others], [Peer(rank, received[rank]) for rank in others]).wait()
        received[transport.rank] = slices[transport.rank]
        total = received[0].clone()
        for rank in range(1, transport.size):
            total += received[rank]
        return total.transpose(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _adjoint(_Unshard, ctx, grads)
