"""Run modules that treat each token by itself over tiles of the sequence: their inner activations exist for one tile at a time.

The hidden layer of an MLP is some four times as wide as its input, and a norm's backward pass takes as much memory in fp32. At a million
tokens on eight GPUs, these are the activations that do not fit.
Source: ALST (Bekman et al. 2025, section 3.1, "sequence tiling").

Shapes: b batch, s local tokens, n features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import check


def tiled(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: int) -> torch.Tensor:
    """`function(x)` over tiles of `rows` tokens, each recomputed in the backward pass: (..., s, n) -> (..., s, m).

    `function` must treat each token by itself; the gradients of its parameters add up. Raises ValueError for rows below 1.
    """
    check.function("function", function, "of a tensor (..., s, n)")
    check.instance("x", x, torch.Tensor, "pass (..., s, n)")
    rows = check.integer("rows", rows, least=1)
    if x.dim() < 2 or x.layout != torch.strided:
        raise ValueError(f"x is a tensor of shape {tuple(x.shape)} and {x.layout}, but must be dense, (..., s, n)")
    if x.shape[-2] <= rows:
        return function(x)
    return _joined_tiles(function, (x,), rows)


def _joined_tiles(function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    """`function` over tiles of all tensors (..., s, n) at once."""
    tiles = zip(*(x.split(rows, dim=-2) for x in tensors), strict=True)
    parts = [checkpoint(function, *tile, use_reentrant=False) for tile in tiles]
    for part in parts:
        if not isinstance(part, torch.Tensor):
            raise ValueError(
                f"the module returns a {type(part).__name__} for a tile, but must return one tensor, one row per token"
            )
    return torch.cat(parts, dim=-2)


class _Tiled(nn.Module):
    """A mixin: the module's own forward, over tiles of `tile_rows` tokens."""

    tile_rows: int

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if others and x.shape[-2] > self.tile_rows:
            return _joined_tiles(super().forward, (x, *others), self.tile_rows)
        return super().forward(x, *others) if others else tiled(super().forward, x, self.tile_rows)


def tile_modules(model: nn.Module, rows: int, suffix: str = "MLP") -> list[str]:
    """Let every module whose class name ends in `suffix` run over tiles of `rows` tokens; returns the modules' names.

    `suffix="Norm"` is for norms: in transformers they keep their input in fp32, and the normalized input beside their output. A module may
    take several tensors of as many rows, as norms with gates do (`suffix="NormGated"`), whose rows are those of all heads.

    Parameters and their names stay. Call it before wrapping in FSDP2; a second call changes the rows. Raises ValueError if no module
    fits.
    """
    check.instance("model", model, nn.Module, "pass the model itself")
    check.instance("suffix", suffix, str, 'pass the end of a class name, such as "MLP"')
    rows = check.integer("rows", rows, least=1)
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith(suffix)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no module whose class name ends in {suffix!r}")
    for _, module in found:
        if not isinstance(module, _Tiled):
            # a new class, because a patched forward would be wrong in copies and wrappers
            module.__class__ = type(type(module).__name__, (_Tiled, type(module)), {})
        object.__setattr__(module, "tile_rows", rows)
    return [name for name, _ in found]
