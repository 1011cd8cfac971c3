"""dq as a sum over several launches of `backward`, held in the order that suits the kernels that add to it.

Shapes: q, dq (b, sq, h, d).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from . import hopper
from .queries import Statistics

if TYPE_CHECKING:
    from .hopper.statistics import PaddedStatistics


class QuerySums:
    """dq of queries that meet their keys in several launches: `backward` adds to it, and `finish` returns it.

        sums = QuerySums(q, softmax_scale)
        backward(queries, k, v, table, dq=sums, dk=dk, dv=dv, add=False, ...)      # keys that no launch has met before
        backward(queries, k, v, another, dq=sums, dk=dk, dv=dv, ...)
        dq = sums.finish(q.dtype)

    The fused Hopper kernel adds in an order of its own, without the scale; `finish` restores the order and scales once, instead of each
    launch. Other kernels overwrite an fp32 tensor in their first launch and add to it later. Different launches may run different kernels.

    rows_dtype: the dtype of that tensor. For a single launch it may be dq's final dtype, which saves a cast.
    """

    def __init__(self, q: torch.Tensor, softmax_scale: float, rows_dtype: torch.dtype = torch.float32) -> None:
        self.q, self.softmax_scale, self.rows_dtype = q, softmax_scale, rows_dtype
        self._rows: torch.Tensor | None = None  # (b, sq, h, d)
        self._permuted: torch.Tensor | None = None  # see `hopper.fused.zero_sums`
        self._prepared: tuple[Statistics, PaddedStatistics] | None = None

    def rows(self) -> tuple[torch.Tensor, bool]:
        """A tensor like q, and whether to add to it: the first launch has to overwrite all of it."""
        add = self._rows is not None
        if self._rows is None:
            self._rows = torch.empty_like(self.q, dtype=self.rows_dtype)
        return self._rows, add

    def permuted(self) -> torch.Tensor:
        """The sums to which the fused kernel adds."""
        if self._permuted is None:
            self._permuted = hopper.fused.zero_sums(self.q)
        return self._permuted

    def prepared(self, statistics: Statistics) -> PaddedStatistics:
        """The statistics as the fused kernel reads them: made once for all launches with the same tensors."""
        if self._prepared is None or not all(map(operator.is_, self._prepared[0], statistics)):
            self._prepared = statistics, hopper.fused.prepare(statistics)
        return self._prepared[1]

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        """dq in `dtype`, zeros where no launch added. Call it once: it frees the memory of the sums."""
        rows, permuted = self._rows, self._permuted
        self._rows = self._permuted = self._prepared = None
        if permuted is not None:
            add = rows is not None
            rows = torch.empty_like(self.q, dtype=dtype) if rows is None else rows
            hopper.fused.finish(permuted, rows, self.softmax_scale, add)
        return torch.zeros_like(self.q, dtype=dtype) if rows is None else rows.to(dtype)
