"""What the gradient kernels read, from the entrance in `backward` to each kernel's arguments.

Shapes: as in `backward`.
"""

from typing import NamedTuple

import torch

from .table import TileTable

# row_max, row_sum, delta
Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
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

    @property
    def statistics(self) -> Statistics:
        """What is known of each query row."""
        return self.row_max, self.row_sum, self.delta
