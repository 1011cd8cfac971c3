"""dq as a sum over several launches of `backward`, held in the order that suits the kernels that add to it.

Shapes: q, dq (b, sq, h, d).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from . import hopper
from .pairs import rounded, zero
from .queries import Queries, Statistics
from .statistics import launch_rows

if TYPE_CHECKING:
    from .hopper.statistics import PaddedStatistics
    from .table import TileTable

    # K, V and the table of a launch
    Alone = tuple[torch.Tensor, torch.Tensor, TileTable]


class QuerySums:
    """dq of queries that meet their keys in several launches: `backward` adds to it, and `finish` returns it.

        sums = QuerySums(q, softmax_scale)
        backward(queries, k, v, table, dq=sums, dk=dk, dv=dv, add=False, ...)      # keys that no launch has met before
        backward(queries, k, v, another, dq=sums, dk=dk, dv=dv, ...)
        dq = sums.finish(q.dtype)

    The fused Hopper kernel adds in an order of its own, without the scale; `finish` restores the order and scales once, instead of each
    launch. Other kernels overwrite an fp32 tensor in their first launch and add to it later. Different launches may run different kernels.

    rows_dtype: the dtype of that tensor. For a single launch it may be dq's final dtype, which saves a cast.
    queries: what `ready_queries` made of q and its rows, if it did.
    """

    def __init__(
        self, q: torch.Tensor, softmax_scale: float, rows_dtype: torch.dtype = torch.float32, queries: Queries | None = None
    ) -> None:
        self.q, self.softmax_scale, self.rows_dtype = q, softmax_scale, rows_dtype
        self._rows: torch.Tensor | None = None  # (b, sq, h, d)
        self._permuted: torch.Tensor | None = None  # see `hopper.fused.zero_sums`
        self._prepared: tuple[Statistics, PaddedStatistics] | None = None
        self._zeros: torch.Tensor | None = None  # what becomes `_permuted`, if it is asked for
        self._dq: torch.Tensor | None = None  # memory for what `finish` writes
        self._owned = False  # whether programs have the sums of whole heads for themselves, and write dq
        if queries is not None and queries.ready is not None:
            padded, self._zeros, self._dq = queries.ready
            self._prepared = queries.statistics, padded
            self._owned = self._zeros is None

    def own(self) -> torch.Tensor | None:
        """dq, which the single launch writes itself (see `hopper.fused.owns_heads`), or None. Once it is asked for, it is written."""
        if not self._owned:
            return None
        assert self._rows is None, "one launch alone finds dq"
        self._rows, self._dq = self._dq, None
        return self._rows

    def rows(self) -> tuple[torch.Tensor, bool]:
        """A tensor like q, and whether to add to it: the first launch has to overwrite all of it."""
        add = self._rows is not None
        if self._rows is None:
            self._rows = torch.empty_like(self.q, dtype=self.rows_dtype)
        return self._rows, add

    def permuted(self, v_dim: int) -> torch.Tensor:
        """The sums to which the fused kernel adds. v_dim: the head dim of v."""
        if self._permuted is None:
            self._permuted = hopper.fused.zero_sums(self.q, v_dim) if self._zeros is None else self._zeros
        return self._permuted

    def prepared(self, statistics: Statistics) -> PaddedStatistics:
        """The statistics as the fused kernel reads them: made once for all launches with the same tensors."""
        if self._prepared is None or not all(map(operator.is_, self._prepared[0], statistics)):
            self._prepared = statistics, hopper.fused.prepare(statistics)
        return self._prepared[1]

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        """dq in `dtype`, zeros where no launch added. Call it once: it frees the memory of the sums."""
        rows, permuted, dq = self._rows, self._permuted, self._dq
        self._rows = self._permuted = self._prepared = self._zeros = self._dq = None
        if permuted is not None:
            add = rows is not None
            if rows is None:
                rows = dq if dq is not None and dq.dtype == dtype else torch.empty_like(self.q, dtype=dtype)
            hopper.fused.finish(permuted, rows, self.softmax_scale, add)
        if rows is None:
            rows = torch.empty_like(self.q, dtype=dtype)
            zero(rows)
        return rounded(rows, dtype)


def ready_queries(
    q: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor,
    drow_sum: torch.Tensor | None = None, ready: bool = True, once: bool = False, alone: Alone | None = None,
) -> Queries:  # fmt: skip
    """`Queries` of a backward pass, and, if `ready`, what the fused Hopper kernel needs of them where it may run, in one launch.

    out, dout: (b, sq, h, dv). drow_sum: (b, h, sq), the gradient of row_sum, if there is one.
    once: a single launch reads them, and nobody after `QuerySums.finish`. Then they lie in the memory that dq will take, if they fit.
    alone: what that launch gets, if it does not modify scores. Then it may write dq itself (see `hopper.fused.owns_heads`).
    """
    b, sq, h, _ = q.shape
    # the gradient of a sum is one number, seen as many
    drow_sum = None if drow_sum is None else drow_sum.contiguous()
    if not ready or hopper.obstacle or not hopper.fused.may_run(q, out):
        delta = torch.empty_like(row_max)
        launch_rows(out, dout, delta, sq, row_sum=row_sum, drow_sum=drow_sum)
        return Queries(q, dout, row_max, row_sum, delta)
    padded_rows = hopper.statistics.whole_blocks(sq)
    dq = torch.empty_like(q) if once else None
    owned = once and alone is not None and hopper.fused.owns_heads(q, *alone)
    padded, rows = 2 * b * h * padded_rows, b * h * sq  # numbers
    if owned:
        room = torch.empty(padded + rows, device=q.device, dtype=torch.float32)
    elif dq is not None and dq.is_contiguous() and dq.nbytes >= 4 * (padded + rows):
        room = dq.view(-1).view(torch.float32)
    else:
        dq, room = None, torch.empty(padded + rows, device=q.device, dtype=torch.float32)
    pivot, negated = room[:padded].view(2, b * h, padded_rows).unbind()
    delta = room[padded : padded + rows].view(b, h, sq)
    shape = hopper.fused.shape_of_sums(q, out.shape[3])
    sums = None if owned else torch.empty(shape, device=q.device, dtype=torch.float32)
    launch_rows(
        out, dout, delta, padded_rows, row_max=row_max, row_sum=row_sum, drow_sum=drow_sum, pivot=pivot, negated=negated, sums=sums,
        head_dim=shape[2],
    )  # fmt: skip
    return Queries(q, dout, row_max, row_sum, delta, (hopper.statistics.PaddedStatistics(pivot, negated), sums, dq))
