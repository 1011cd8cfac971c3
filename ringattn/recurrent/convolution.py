"""`causal_conv1d`: the short causal convolution of layers with a state, over a sequence that is sharded over ranks.

A segment needs the last `width - 1` rows before it: its halo. They come from the ranks that hold them, from several if their segments are
shorter. The convolution is linear: each rank convolves its own rows without halos, while these are under way, and then adds what they
change.

Shapes: b batch, s tokens of this rank, c channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..runtime.agree import refusing
from ..runtime.groups import Group, get_context
from ..runtime.op import without_autocast
from .calls import DEFAULT_MASK, CheckedCall, agree_on_segments, check_call
from .checks import check_channels
from .halos import Halos
from .recomputed import gradients_of, leaves_of


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
        return _CausalConv1d.apply(call, x, weight, bias)  # pyright: ignore[reportReturnType]


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CheckedCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        halos = Halos(call.segments, call.context.transport, weight.shape[1])
        rows = call.own.by_position(x)
        pending = halos.start_forward(rows)
        with without_autocast(x.device.type):
            parts = _of_segments(call, rows, weight, bias)
            before = pending.wait()  # (m, b, width - 1, c)
            for index, added in zip(call.own.following, _of_halos(before, weight).unbind()):
                n = min(added.shape[1], parts[index].shape[1])
                parts[index] = torch.cat([parts[index][:, :n] + added[:, :n], parts[index][:, n:]], dim=1)
        ctx.call = call
        ctx.save_for_backward(x, weight, bias, before)
        return call.own.whole(parts, x.to(_dtype(x))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call: CheckedCall = ctx.call
        call.refuse_second_derivative("causal_conv1d")
        x, weight, bias, before = ctx.saved_tensors
        with call.context.turn, without_autocast(x.device.type):
            call.begin_backward()
            return None, *_gradients(call, grads[0], x, weight, bias, before, ctx.needs_input_grad[1:])


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
    own, width, dtype = call.own, weight.shape[1], _dtype(x)
    halos = Halos(call.segments, call.context.transport, width)
    dparts = own.split(own.by_position(dout).to(dtype))
    heads = [dparts[index][:, : width - 1] for index in own.following]
    dadded = [F.pad(head, (0, 0, 0, width - 1 - head.shape[1])) for head in heads]
    leaf_x, leaf_weight, leaf_bias = leaves = leaves_of((x, weight, bias), wanted)
    assert leaf_x is not None
    assert leaf_weight is not None
    with torch.enable_grad():
        halo_rows = before.detach().requires_grad_()
        added = _of_halos(halo_rows, leaf_weight)
    dhalos, dweight = gradients_of((halo_rows, leaf_weight), [(added, torch.stack(dadded))] if dadded else [])
    assert dhalos is not None
    pending = halos.start_backward(dhalos.to(dtype), x)
    with torch.enable_grad():
        parts = _of_segments(call, own.by_position(leaf_x), leaf_weight, leaf_bias)
    dx, dweight_here, dbias = gradients_of(leaves, [(part, dparts[index]) for index, part in parts.items()])
    passed = pending.wait()
    if dx is not None:
        dx = (dx.to(dtype) + own.as_held(passed)).to(x.dtype)
    if dweight_here is not None and dweight is not None:
        dweight_here = dweight_here + dweight
    return dx, dweight_here, dbias


def _of_segments(call: CheckedCall, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """The convolution of each segment by itself, by index. Differentiable."""
    own, dtype, width = call.own, _dtype(rows), weight.shape[1]
    every = own.split(rows)
    if not every:
        return {}
    padded = torch.cat([F.pad(part, (0, 0, width - 1, 0)) for part in every.values()], dim=1).to(dtype)
    out = _taps(padded, weight.to(dtype))
    if bias is not None:
        out = out + bias.to(dtype)
    found, row = {}, 0
    for index, part in every.items():
        found[index] = out[:, row : row + part.shape[1]]
        row += part.shape[1] + width - 1
    return found


def _of_halos(before: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What halos (m, b, width - 1, c) add to the first width - 1 rows of their segments. Differentiable."""
    dtype, width = _dtype(before), weight.shape[1]
    return _taps(F.pad(before, (0, 0, 0, width - 1)).to(dtype), weight.to(dtype))


def _taps(padded: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The convolution of rows after the first width - 1: (..., rows + width - 1, c) to (..., rows, c)."""
    width = weight.shape[1]
    rows = padded.shape[-2] - width + 1
    out = padded.narrow(-2, 0, rows) * weight[:, 0]
    for tap in range(1, width):
        out = out + padded.narrow(-2, tap, rows) * weight[:, tap]
    return out


def _dtype(x: torch.Tensor) -> torch.dtype:
    """Of all computation."""
    return torch.promote_types(x.dtype, torch.float32)
