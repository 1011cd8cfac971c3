"""The layers of `bench linear`: a gated delta rule as in Qwen3-Next and Qwen3.5, and Mamba-2, each over ranks or in one process with fla.

`TokenPath` says how tokens reach each other; all else in a layer is local to a token.

Shapes: x and out (b, s, hidden), of a rank's tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

import ringattn as ra
from ringattn.recurrent.kernels import repeated, runs_vectors

_WIDTH = 4  # of the convolutions


class TokenPath(Protocol):
    """A causal convolution (b, s, c), and a recurrence as `ra.linear_attention` defines it."""

    def convolve(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def recur(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor | None, scale: float
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Sharded(TokenPath):
    """ringattn's, on shards."""

    layout: ra.Layout
    group: object
    kernels: ra.RecurrenceKernels | None = None

    def convolve(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ra.causal_conv1d(x, weight, layout=self.layout, group=self.group)

    def recur(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        options = dict(decay=decay, beta=beta, scale=scale, layout=self.layout, group=self.group, kernels=self.kernels)
        return ra.linear_attention(q, k, v, **options)


class FlaAlone(TokenPath):
    """flash-linear-attention in one process, as one would call it: the peer."""

    def convolve(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from fla.modules.causal_conv1d import causal_conv1d

        return causal_conv1d(x, weight)[0]

    def recur(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gla import chunk_gla
        from fla.ops.kda import chunk_kda
        from fla.ops.simple_gla import chunk_simple_gla

        delta, alone = chunk_gated_delta_rule, chunk_simple_gla
        if runs_vectors(decay, beta, q.device):
            # the only functions of fla that have a backward pass here
            delta, alone, decay = chunk_kda, chunk_gla, decay[..., None].expand(*decay.shape, q.shape[3])
        if beta is not None:
            return delta(q=q, k=k, v=v, g=decay, beta=beta, scale=scale)[0]
        q, k = (repeated(x, v.shape[2]) for x in (q, k))
        return alone(q=q, k=k, v=v, g=decay, scale=scale)[0]


class StatefulLayer(nn.Module, ABC):
    """A layer of random weights, the same on every rank."""

    @abstractmethod
    def mix(self, x: torch.Tensor, mixing: TokenPath) -> torch.Tensor:
        """The output of the layer."""


class GatedDeltaNet(StatefulLayer):
    """Qwen3-Next's: hidden 2048, 16 heads of queries and keys, 32 of values, of 128 each, by default."""

    def __init__(self, hidden: int = 2048, heads: int = 32, key_heads: int = 16, d: int = 128) -> None:
        super().__init__()
        self.sizes, self.d = (key_heads * d, key_heads * d, heads * d), d
        self.qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.gates = nn.Linear(hidden, heads * d, bias=False)
        self.factors = nn.Linear(hidden, 2 * heads, bias=False)
        self.conv = nn.Parameter(torch.randn(sum(self.sizes), _WIDTH) / _WIDTH)
        self.log_rate = nn.Parameter(torch.rand(heads).mul(16).clamp(min=0.01).log())
        self.norm, self.out = nn.RMSNorm(d), nn.Linear(heads * d, hidden, bias=False)

    def mix(self, x: torch.Tensor, mixing: TokenPath) -> torch.Tensor:
        qkv = F.silu(mixing.convolve(self.qkv(x), self.conv))
        q, k, v = (part.unflatten(2, (-1, self.d)) for part in qkv.split(self.sizes, dim=2))
        q, k = (F.normalize(part.float(), dim=3).to(x.dtype) for part in (q, k))
        beta, a = self.factors(x).float().chunk(2, dim=2)
        decay = -self.log_rate.float().exp() * F.softplus(a + 1)
        out = mixing.recur(q, k, v, decay, beta.sigmoid(), self.d**-0.5)
        return self.out(self.norm(out).flatten(2) * F.silu(self.gates(x)))


class Mamba2(StatefulLayer):
    """That of the 1.3B model: hidden 2048, 64 heads of 64, a state of 128 that all heads share, by default."""

    def __init__(self, hidden: int = 2048, heads: int = 64, d: int = 64, state: int = 128) -> None:
        super().__init__()
        self.sizes, self.d = (state, state, heads * d), d
        self.inner = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.gates = nn.Linear(hidden, heads * d, bias=False)
        self.steps = nn.Linear(hidden, heads, bias=False)
        self.conv = nn.Parameter(torch.randn(sum(self.sizes), _WIDTH) / _WIDTH)
        self.log_rate = nn.Parameter(torch.rand(heads).mul(16).clamp(min=1).log())
        self.skip = nn.Parameter(torch.ones(heads))
        self.norm, self.out = nn.RMSNorm(heads * d), nn.Linear(heads * d, hidden, bias=False)

    def mix(self, x: torch.Tensor, mixing: TokenPath) -> torch.Tensor:
        read, written, values = F.silu(mixing.convolve(self.inner(x), self.conv)).split(self.sizes, dim=2)
        values = values.unflatten(2, (-1, self.d))
        step = F.softplus(self.steps(x).float() - 4)
        decay = -self.log_rate.float().exp() * step
        scaled = (values * step[..., None]).to(x.dtype)
        out = mixing.recur(read[:, :, None], written[:, :, None], scaled, decay, None, 1.0)
        out = out + (values * self.skip[:, None]).to(x.dtype)
        return self.out(self.norm(out.flatten(2) * F.silu(self.gates(x))))


LAYERS = {"gdn": GatedDeltaNet, "mamba2": Mamba2}
SMALL = {"gdn": dict(hidden=32, heads=4, key_heads=2, d=16), "mamba2": dict(hidden=32, heads=4, d=16, state=16)}


def make_layer(name: str, device: str, dtype: torch.dtype, *, small: bool) -> StatefulLayer:
    """The same weights for each name."""
    torch.manual_seed(0)
    return LAYERS[name](**(SMALL[name] if small else {})).to(device, dtype)
