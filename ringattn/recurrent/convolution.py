"""`causal_conv1d`: the short causal convolution of layers with a state, over a sequence that is sharded over ranks.

A segment needs the last `width - 1` rows before it: its halo. They come from the ranks that hold them, from several if their segments are
shorter. Each rank convolves its own rows without halos, while these are under way, and then computes anew the rows that see a halo.

Shapes: b batch, s tokens of this rank, c channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..runtime.agree import refusing
from ..runtime.graph_breaks import breaks_graphs
from ..runtime.groups import Group, get_context
from ..runtime.op import without_autocast
from .calls import DEFAULT_MASK, CheckedCall, agree_on_segments, check_call
from .checks import check_channels
from .halos import Halos
from .local_convolution import compute_dtype, of_segments, taps
from .recomputed import gradients_of, leaves_of


@breaks_graphs
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    layout: Layout | None = None,
    mask: Mask | None = None,
    group: Group | None = None,
    name: str | None = None,
) -> torch.Tensor:
    """A causal convolution of each channel by itself over the whole sequence, of which each rank holds a shard. A differentiable
    collective.

        out_t = bias + sum over 0 <= j < width of weight[:, width - 1 - j] * x_(t - j)

    with 0 before the first token of the sequence, or of its document. That is `torch.nn.Conv1d(c, c, width, groups=c,
    padding=width - 1)` without its last `width - 1` outputs; an activation is the caller's.

    Args:
        x: (b, s_local, c), bf16, fp16 or fp32, or fp64 on CPU.
        weight: (c, width), the same on every rank, of any floating dtype; `conv.weight.squeeze(1)` of an `nn.Conv1d`.
        bias: (c,), likewise; none by default.
        layout, mask, group, name: as for `linear_attention`.

    Returns (b, s_local, c) in x's dtype, computed in fp32 (fp64 for fp64). The gradients of weight and bias are a part on each rank: their
    sum is the gradient. Raises ValueError for bad input, and on every rank if ranks disagree or one refuses its input.

    >>> import torch, ringattn as ra
    >>> ra.causal_conv1d(torch.ones(1, 5, 1), torch.tensor([[1.0, 10.0, 100.0]])).flatten().tolist()
    [100.0, 110.0, 111.0, 111.0, 111.0]
    """
    context, mask = get_context(group), DEFAULT_MASK if mask is None else mask
    with context.turn:
        with refusing(context.ranks):
            check_channels(x, weight, bias)
            check_call(context, x, "x", layout, mask, name)
        tensors = x, weight, bias
        facts: dict[str, Any] = {
            "function": "causal_conv1d",
            "number of channels": x.shape[2],
            "width": weight.shape[1],
            "bias": "none" if bias is None else "given",
            "requires_grad": torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors),
        }
        call = agree_on_segments(context, x, layout, mask, name, facts)
        return _CausalConv1d.apply(call, x, weight, bias)


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CheckedCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        own, width, checkpointed = call.own, weight.shape[1], call.checkpointed
        halos = Halos(call.segments, call.context.transport, width)
        rows = own.by_position(x)
        pending = None if checkpointed.takes else halos.start_forward(rows)
        with without_autocast(x.device.type):
            parts = of_segments(own, rows, weight, bias)
            if pending is None:
                (before,), _ = checkpointed.take()
            else:
                before = pending.add_to(x.new_zeros(len(own.following), x.shape[0], width - 1, x.shape[2]))
                # not out, which is larger than the recurrence's own, and is computed again as fast as a norm
                checkpointed.keep(call.identity, (before,))
            assert before is not None
            for index, halo, begin in zip(own.following, before, _begins(call, rows, width)):
                parts[index][:, : begin.shape[1]] = taps(torch.cat([halo, begin], dim=1), weight, bias)
        ctx.call = call
        ctx.save_for_backward(x, weight, bias, before)
        return own.whole(parts, x.to(compute_dtype(x))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call: CheckedCall = ctx.call
        call.refuse_second_derivative("causal_conv1d")
        x, weight, bias, before = ctx.saved_tensors
        with call.context.turn, without_autocast(x.device.type):
            call.begin_backward()
            return None, *_gradients(call, grads[0].resolve_neg(), x, weight, bias, before, ctx.needs_input_grad[1:])


def _gradients(
    call: CheckedCall,
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, weight and bias that are wanted."""
    own, width, dtype = call.own, weight.shape[1], compute_dtype(x)
    halos = Halos(call.segments, call.context.transport, width)
    dout = own.by_position(dout)
    rows, leaf_weight, leaf_bias = leaves = leaves_of((own.by_position(x), weight, bias), (True, *wanted[1:]))
    assert rows is not None
    assert leaf_weight is not None
    with torch.enable_grad():
        halo_rows = before.detach().requires_grad_()
        added = taps(F.pad(halo_rows, (0, 0, 0, width - 1)), leaf_weight, None)  # to the rows that see a halo
    heads = [F.pad(part, (0, 0, 0, width - 1 - part.shape[1])) for part in _begins(call, dout, width)]
    dhalos, dweight = gradients_of((halo_rows, leaf_weight), [(added, torch.stack(heads).to(dtype))] if heads else [])
    assert dhalos is not None
    pending = halos.start_backward(dhalos.to(dtype))
    with torch.enable_grad():
        parts = of_segments(own, rows, leaf_weight, leaf_bias)
    every = own.split(dout)
    dx, dweight_here, dbias = gradients_of(leaves, [(part, every[index].to(part.dtype)) for index, part in parts.items()])
    assert dx is not None
    pending.add_to(dx)
    if dweight_here is not None and dweight is not None:
        dweight_here = dweight_here + dweight
    return own.as_held(dx) if wanted[0] else None, dweight_here, dbias


def _begins(call: CheckedCall, rows: torch.Tensor, width: int) -> list[torch.Tensor]:
    """The first width - 1 rows (b, up to width - 1, c) of each segment that follows others."""
    every = call.own.split(rows)
    return [every[index][:, : width - 1] for index in call.own.following]
