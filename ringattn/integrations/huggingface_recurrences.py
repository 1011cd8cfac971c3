"""Convolutions and recurrences of transformers' layers, over a sequence that is sharded over ranks.

    causal_conv1d_fn                  the short convolution of almost all of them
    torch_chunk_gated_delta_rule      Qwen3-Next, Qwen3.5, OLMo-Hybrid
    chunk_kimi_delta_attention        Kimi Linear: a decay for each dimension of keys
    mamba2_chunk_scan                 Mamba-2, and the models that have its layers
    mamba_selective_scan              Mamba, Jamba: a state for each channel
    MiniMax, RecurrentGemma           whole layers, whose recurrences are no functions of their own

Functions here take the arguments of transformers' functions of these names, after a `Mixing`. They ignore what asks for a faster way to
the same numbers (`chunk_size`, `use_mambapy`). Caches never come: what a `RingCache` keeps is in the `Mixing`.

Shapes: b batch, s local tokens, c channels, h heads, g groups of heads, n numbers of a state, d head dim.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..recurrent.convolution import causal_conv1d
from ..recurrent.kernels import RecurrenceKernels, choose_kernels
from ..recurrent.linear_attention import linear_attention
from ..runtime.groups import Group
from .generation_states import LayerCall

_NORM_EPSILON = 1e-6  # of normalised queries and keys, as in transformers


@dataclass(frozen=True, eq=False)
class Mixing:
    """One call of a layer: how tokens reach each other in it, and what a `RingCache` keeps of it.

    used: the names of the functions that the layer has called.
    """

    layout: Layout
    mask: Mask
    group: Group | None
    name: str | None
    kernels: RecurrenceKernels | None
    cached: LayerCall | None = None
    used: set[str] = field(default_factory=set)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(b, s, c) to (b, s, c)."""
        if self.cached is not None:
            return self.cached.convolve(x, weight, bias, self.name)
        return causal_conv1d(x, weight, bias, layout=self.layout, mask=self.mask, group=self.group, name=self.name)

    def recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None = None,
        scale: float | None = None,
        *,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """`linear_attention`, (b, s, h, d_v), for a layer of this dtype: fla's kernels compute in it, others in fp32 or wider."""
        options: dict[str, Any] = {}
        if self.cached is not None:
            v, decay, beta = self.cached.without_padding(v, decay, beta)
            options = dict(initial_state=self.cached.first_state(), return_final_state=True)
        like_q, like_v = (x.new_empty(1, dtype=dtype).expand_as(x) for x in (q, v))
        kernels = self.kernels or choose_kernels(like_q, like_v, decay, beta)
        out: Any = linear_attention(
            *(x.to(kernels.dtype(like_q)) for x in (q, k, v)),
            decay=decay,
            beta=beta,
            layout=self.layout,
            mask=self.mask,
            group=self.group,
            scale=scale,
            name=self.name,
            kernels=kernels,
            **options,
        )
        if self.cached is not None:
            out, last = out
            self.cached.keep_state(last)
        return out.contiguous()  # some layers take views of it


def _convolution(
    mixing: Mixing,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:
    """(b, c, s) to (b, c, s)."""
    from transformers.activations import ACT2FN

    out = mixing.convolve(hidden_states.transpose(1, 2), weight, bias).transpose(1, 2)
    return out if activation is None else ACT2FN[activation](out)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Normalized(torch.autograd.Function):
    """Vectors (..., d) over their norms, in fp32 or wider. Keeps its input for the backward pass, and no wider copy of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(_wide(x))
        factor = (wide.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt()
        ctx.save_for_backward(x, factor)
        return wide * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, factor = ctx.saved_tensors
        out = x * factor
        gradient = gradients[0]
        return (factor * (gradient - out * (gradient * out).sum(-1, keepdim=True))).to(x.dtype)


def _delta_rule(
    mixing: Mixing,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Queries and keys (b, s, hk, d_k), values (b, s, h, d_v), g (b, s, h) or (b, s, h, d_k), beta (b, s, h) to (b, s, h, d_v)."""
    q, k = (_Normalized.apply(x) if use_qk_l2norm_in_kernel else x.to(_wide(x)) for x in (query, key))
    return mixing.recur(q, k, value, g, beta, dtype=query.dtype).to(query.dtype), None


def _mamba2(
    mixing: Mixing,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> torch.Tensor:
    """States (b, s, h, d), steps (b, s, h), A and D (h,), B and C (b, s, g, n) to (b, s, h, d), in fp32 or wider."""
    step = _step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    x = hidden_states.to(step.dtype)
    out = mixing.recur(C, B, x * step[..., None], A.to(step.dtype) * step, scale=1.0, dtype=hidden_states.dtype).to(step.dtype)
    return out if D is None else out + x * D[:, None]


def _mamba(
    mixing: Mixing,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **options: Any,
) -> torch.Tensor:
    """States, steps and gates (b, c, s), A (c, n), B and C (b, n, s), D (c,) to (b, c, s), in fp32 or wider.

    Each channel is a head, with keys of n numbers, which all heads share, and values of one.
    """
    step = _step(dt.transpose(1, 2), delta_bias, delta_softplus)  # (b, s, c)
    x = hidden_states.transpose(1, 2).to(step.dtype)
    q, k = (states.transpose(1, 2)[:, :, None] for states in (C, B))
    v = (x * step)[..., None]
    out = mixing.recur(q, k, v, A.to(step.dtype) * step[..., None], scale=1.0, dtype=hidden_states.dtype).squeeze(-1)
    if D is not None:
        out = out + x * D
    out = out.transpose(1, 2)
    return out if z is None else out * F.silu(z)


def _step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """How long a token lasts, in fp32 or wider; bias: of the last dimension."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return (F.softplus(dt) if softplus else dt).to(torch.promote_types(dt.dtype, torch.float32))


def _none(mixing: Mixing, *args: Any, **options: Any) -> None:
    """A whole layer in one kernel, which is there only with other packages: the layer goes on without it."""


def lightning(mixing: Mixing, module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
    """MiniMax's lightning attention: one decay a head for all tokens."""
    qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (module.num_attention_heads, 3 * module.head_dim))
    q, k, v = qkv.chunk(3, dim=-1)
    decay = -module.slope_rate.flatten().to(torch.promote_types(v.dtype, torch.float32))
    out = module.norm(mixing.recur(q, k, v, decay, scale=1.0, dtype=v.dtype).to(v.dtype).flatten(2))
    return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * out), None


def recurrent_block(
    mixing: Mixing, module: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """RecurrentGemma's block: a short convolution, then a real-gated linear recurrent unit, whose state is a number a channel."""
    gate = module.act_fn(module.linear_y(hidden_states))
    x = mixing.convolve(module.linear_x(hidden_states), module.conv_1d.weight.squeeze(1), module.conv_1d.bias)
    unit = module.rg_lru
    rows = x.unflatten(-1, (unit.num_attention_heads, unit.block_width)).flatten(0, 1).transpose(0, 1)  # (h, b * s, d)
    input_gate, recurrent_gate = (
        torch.sigmoid(torch.baddbmm(bias[:, None], rows, weight).transpose(0, 1).reshape(x.shape))
        for bias, weight in (
            (unit.input_gate_bias, unit.input_gate_weight),
            (unit.recurrent_gate_bias, unit.recurrent_gate_weight),
        )
    )
    decay = -8.0 * recurrent_gate * F.softplus(unit.recurrent_param)  # (b, s, c), a logarithm
    begins = (position_ids == 0)[..., None]  # (b or 1, s, 1): tokens that forget all before them
    root = sys.modules[type(module).__module__].SqrtBoundDerivative.apply  # with transformers' bound of its derivative
    factor = torch.where(begins, 1.0, root(1 - torch.exp(2 * decay)))
    v = (x * input_gate * factor.type(x.dtype))[..., None]  # (b, s, c, 1)
    one = v.new_ones(*v.shape[:2], 1, 1)
    states = mixing.recur(one, one, v, decay.masked_fill(begins, -torch.inf), scale=1.0, dtype=x.dtype).to(x.dtype)
    return module.linear_out(states.squeeze(-1) * gate), None


# what takes the place of each function of transformers
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _none,
    "mamba_selective_scan": _mamba,
    "mamba_inner_fn": _none,
}
