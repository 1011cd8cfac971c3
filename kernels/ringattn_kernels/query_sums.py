"""dq as a sum over several launches of `backward`, held as the kernels that add to it would have it.

Shapes: q, dq (b, sq, h, d).
"""

from __future__ import annotations

import operator

import torch

from . import hopper
from .inputs import Statistics


class QuerySums:
    """dq of queries that meet their keys in several launches: `backward` adds to it, and `finish` gives it.

        sums = QuerySums(q, softmax_scale)
        backward(..., table, dq=sums, dk=dk, dv=dv, add=False)      # keys that no launch has met before
        backward(..., another, dq=sums, dk=dk, dv=dv)
        dq = sums.finish(q.dtype)

    The fused Hopper kernel adds in an order of its own, without the scale; that is undone once, in `finish`, instead of in each
    launch. Others overwrite an fp32 tensor and then add to it. Which kernels run may differ from launch to launch.

    rows_dtype: that tensor's dtype. Where there is one launch alone it may be dq's final one, which saves a cast.
    """

    def __init__(self, q: torch.Tensor, softmax_scale: float, rows_dtype: torch.dtype = torch.float32) -> None:
        self.q, self.softmax_scale, self.rows_dtype = q, softmax_scale, rows_dtype
        self._rows: torch.Tensor | None = None  # (b, sq, h, d)
        self._permuted: torch.Tensor | None = None  # see `hopper_backward_fused.zero_sums`
        self._prepared: tuple[Statistics, hopper.fused.Prepared] | None = None

    def rows(self) -> tuple[torch.Tensor, bool]:
        """A tensor like q, and whether to add to it: at first all of it has to be overwritten."""
        add = self._rows is not None
        if self._rows is None:
            self._rows = torch.empty_like(self.q, dtype=self.rows_dtype)
        return self._rows, add

    def permuted(self) -> torch.Tensor:
        """What the fused kernel adds to."""
        if self._permuted is None:
            self._permuted = hopper.fused.zero_sums(self.q)
        return self._permuted

    def prepared(self, statistics: Statistics) -> hopper.fused.Prepared:
        """What the fused kernel reads of the queries' statistics: made once for all launches with the same tensors."""
        if self._prepared is None or not all(map(operator.is_, self._prepared[0], statistics)):
            self._prepared = statistics, hopper.fused.prepare(statistics)
        return self._prepared[1]

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        """dq in `dtype`, zeros where nothing was added. To be called once: the sums' memory is given back."""
        rows, permuted = self._rows, self._permuted
        self._rows = self._permuted = self._prepared = None
        if permuted is not None:
            add = rows is not None
            rows = torch.empty_like(self.q, dtype=dtype) if rows is None else rows
            hopper.fused.finish(permuted, rows, self.softmax_scale, add)
        return torch.zeros_like(self.q, dtype=dtype) if rows is None else rows.to(dtype)
