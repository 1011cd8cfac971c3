"""What the gradient kernels read, from the entrance in `backward` to each kernel's arguments.

Shapes: as in `backward`.
"""

from dataclasses import dataclass

import torch

from .table import TileTable


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call of `backward`, the pairs that are live, and the scale."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor
    delta: torch.Tensor
    table: TileTable
    softmax_scale: float
