"""Rows of q, and what the backward pass reads of each row. This module imports torch only, so that importing it loads no kernel.

Shapes: q (b, sq, h, d), dout (b, sq, h, dv), row_max, row_sum and delta (b, h, sq).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .hopper.statistics import PaddedStatistics

# row_max, row_sum, delta
Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Queries:
    """Rows of q, and what the backward pass reads of each; the statistics are those of all keys of the row.

    q: (b, sq, h, d). dout: (b, sq, h, dv), the gradient of the output. row_max, row_sum: (b, h, sq), merged over all launches of the
    forward. delta: (b, h, sq), rowsum(dout * out) less the gradient of the log-sum-exp, if there is one. ready: what
    `query_sums.ready_queries` made for the fused Hopper kernel, if it did: its statistics, zeros to add dq to, and, if these statistics and
    delta lie in it, the memory of dq; or, if the kernel writes dq itself, no zeros, and dq.
    """

    q: torch.Tensor
    dout: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor
    delta: torch.Tensor
    ready: tuple[PaddedStatistics, torch.Tensor | None, torch.Tensor | None] | None = None

    @property
    def statistics(self) -> Statistics:
        """(row_max, row_sum, delta)."""
        return self.row_max, self.row_sum, self.delta
