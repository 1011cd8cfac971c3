"""`RankAttention`: one rank's attention, from its own rows to its own rows.

Around the passes, rows are put in the order in which the plan counts them, and on a grid of ranks an all-to-all swaps rows for heads. The
backward pass mirrors the forward pass.

Shapes: b batch, s local tokens, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch

from ringattn_kernels.modifiers import ModifierSums
from ringattn_kernels.repeats import Replays

from ..device import local
from ..device.streams import Moment
from ..geometry.rows import Order
from ..schedule.program import Program
from ..scores import Score
from ..transport import Transport
from . import passes, query_passes
from .ulysses import HeadExchange, kv_copies

Wanted = tuple[bool, ...]  # whether the gradients of slopes, values of a bias and sinks are asked for
_ROWS = 7  # tensors of rows that a backward pass gets


@dataclass(frozen=True, eq=False)
class RankAttention:
    """What one rank does in both passes.

    transport: the ring's. program: the rank's instructions. q_order, k_order: the orders in which the plan counts the rows of q, and of k
    and v; None if they come so. exchange, k_exchange: on a grid, the all-to-all to heads of the rows of q, and of k and v. replays:
    the recordings that `local.replayed` keeps; None where passes are not replayed. plan_bytes: of the plan that the program holds.
    """

    transport: Transport
    program: Program
    q_order: Order | None = None
    k_order: Order | None = None
    exchange: HeadExchange | None = None
    k_exchange: HeadExchange | None = None
    replays: Replays | None = None
    plan_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the plan, and of the tables of its launches that have been made, on the host and on the device."""
        launches = (launch for one_pass in self.program.made for launch in one_pass.launches)
        tables = {id(table): table for table in (launch.made for launch in launches) if table is not None}
        return self.plan_bytes + sum(table.nbytes for table in tables.values())

    def forward(self, score: Score, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, final: bool) -> local.State:
        """out (b, s, h, d_v), row_max and row_sum (b, h, s); with `final`, out in q's dtype."""
        q, k, v = _sorted(q, self.q_order), _sorted(k, self.k_order), _sorted(v, self.k_order)
        if self.exchange is not None:
            score = self._score_here(score, q.shape[2])
            copies = self._kv_copies(q, k)
            (q,), (k, v) = self._to_heads((q,), (_repeated(k, copies), _repeated(v, copies)))
        run = query_passes.forward if self.program.queries_move else passes.forward
        out, row_max, row_sum = run(self.transport, self.program.forward, score, q, k, v, final=final)
        if self.exchange is not None:
            out, stats = self.exchange.to_rows(out, _as_rows(row_max, row_sum))
            row_max, row_sum = _as_stats(stats)
        return _restored(out, self.q_order), _restored(row_max, self.q_order, dim=2), _restored(row_sum, self.q_order, dim=2)

    def backward(
        self,
        score: Score,
        queries: local.Queries,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        slopes_too: bool = False,
        values_too: bool = False,
        began: Moment | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ModifierSums]:
        """dq, dk, dv in the inputs' dtypes, and the gradients of slopes and of a bias's values, where they are asked for.

        All are of this rank's rows (on a grid, those of slopes and values: of its heads axis's rows). began: see `passes.backward`.
        """
        heads = queries.q.shape[2]
        if self.exchange is not None:
            score = self._score_here(score, heads)
        sums = local.modifier_sums(score, slopes_too, values_too)
        q, dout = _sorted(queries.q, self.q_order), _sorted(queries.dout, self.q_order)
        k, v = _sorted(k, self.k_order), _sorted(v, self.k_order)
        stats = queries.row_max, queries.row_sum, queries.delta
        if self.q_order is not None:
            stats = tuple(self.q_order.sort(x, dim=2) for x in stats)
        kv_dtype, copies = k.dtype, 1
        if self.exchange is not None:
            copies = self._kv_copies(q, k)
            # the gradients of a head's copies are added before they are rounded
            kv_dtype = k.dtype if copies == 1 else queries.row_sum.dtype
            rows = (q, dout, _as_rows(*stats)), (_repeated(k, copies), _repeated(v, copies))
            (q, dout, packed), (k, v) = self._to_heads(*rows)
            stats = _as_stats(packed)
        if not (self.takes_rows_as_they_come and q is queries.q and dout is queries.dout):
            row_max, row_sum, delta = stats
            queries = local.Queries(q, dout, row_max, row_sum, delta)
        given = self.transport, self.program.backward, score, queries, k, v
        if self.program.queries_move:
            dq, dk, dv = query_passes.backward(*given, kv_dtype=kv_dtype, sums=sums)
        else:
            dq, dk, dv = passes.backward(*given, kv_dtype=kv_dtype, sums=sums, began=began)
        if self.exchange is not None:
            if self._one_exchange:
                dq, dk, dv = self.exchange.to_rows(dq, dk, dv)
            else:
                assert self.k_exchange is not None
                (dq,), (dk, dv) = self.exchange.to_rows(dq), self.k_exchange.to_rows(dk, dv)
            dk, dv = _summed(dk, copies, k.dtype), _summed(dv, copies, v.dtype)
        dq, dk, dv = _restored(dq, self.q_order), _restored(dk, self.k_order), _restored(dv, self.k_order)
        return dq, dk, dv, sums if score.modifiers is None else self._sums_of_all_heads(sums, heads)

    def results(self, score: Score, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, final: bool) -> local.Tensors:
        """`forward`, or its replay."""
        facts = self._facts("forward", score)
        if facts is None:
            return self.forward(score, q, k, v, final=final)
        assert self.replays is not None
        words = None if score.modifiers is None else score.modifiers.words
        return local.replayed(self.replays, facts, (q, k, v, *score.tensors), partial(self._results, score, final), words)

    def gradients(self, score: Score, wanted: Wanted, rows: local.Tensors, drow_sum: torch.Tensor | None = None) -> local.Tensors:
        """dq, dk, dv, and the gradients of slopes, values of a bias and sinks that are wanted, in this order.

        rows: q, k, v, dout, out, row_max and row_sum. drow_sum: the gradient of row_sum, if there is one.
        """
        facts = self._facts("backward", score, wanted, drow_sum is not None)
        if facts is None:
            return self._gradients(score, wanted, rows, drow_sum)
        assert self.replays is not None
        inputs = *rows, *score.tensors, *(() if drow_sum is None else (drow_sum,))
        words = None if score.modifiers is None else score.modifiers.words
        return local.replayed(self.replays, facts, inputs, partial(self._gradients_of, score, wanted), words)

    def recorded_results(self, score: Score, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> local.Recording | None:
        """The recording that `results` would replay now, if there is one."""
        facts = self._facts("forward", score)
        return None if facts is None else local.recorded(self.replays, facts, (q, k, v, *score.tensors))

    def recorded_gradients(self, score: Score, wanted: Wanted, rows: local.Tensors) -> local.Recording | None:
        """The recording that `gradients` would replay now without a gradient of row_sum, if there is one."""
        facts = self._facts("backward", score, wanted, False)
        return None if facts is None else local.recorded(self.replays, facts, (*rows, *score.tensors))

    def rehearse(self, score: Score, wanted: Wanted, shapes: local.RowShapes, *, final: bool) -> None:
        """Record both passes before their first call, for contiguous tensors, if they can be recorded without it.

        score: one with tensors like those of the call. wanted: as in `gradients`.
        """
        facts, backward_facts = self._facts("forward", score), self._facts("backward", score, wanted, False)
        rows = self.program.forward.own.rows
        if self.replays is None or facts is None or backward_facts is None or not rows:
            return
        b, h, hk, d, d_v, dtype, device = shapes
        q, k, v, dout = (
            ((b, rows, heads, dim), (rows * heads * dim, heads * dim, dim, 1), dtype)
            for heads, dim in ((h, d), (hk, d), (hk, d_v), (h, d_v))
        )
        tensors = [(tuple(x.shape), x.stride(), x.dtype) for x in score.tensors]
        found = local.rehearsed(self.replays, facts, (q, k, v, *tensors), device, partial(self._results, score, final))
        if found:
            given = q, k, v, dout, *found, *tensors
            local.rehearsed(self.replays, backward_facts, given, device, partial(self._gradients_of, score, wanted))

    def _facts(self, name: str, score: Score, *others: Hashable) -> tuple | None:
        """What a pass of this name depends on besides its inputs; None if it is not replayed."""
        of_transport = None if self.replays is None else self.transport.recorded_with
        return None if of_transport is None else (name, score.numbers, of_transport, *others)

    def _results(
        self, score: Score, final: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor
    ) -> local.Tensors:
        """`forward` with these tensors of the score."""
        return self.forward(score.with_tensors(tensors), q, k, v, final=final)

    def _gradients_of(self, score: Score, wanted: Wanted, *inputs: torch.Tensor) -> local.Tensors:
        """`gradients` with these tensors: the rows, those of the score, and the gradient of row_sum, if there is one."""
        rows, tensors = inputs[:_ROWS], inputs[_ROWS : _ROWS + len(score.tensors)]
        drow_sum = inputs[-1] if len(inputs) > _ROWS + len(tensors) else None
        return self._gradients(score.with_tensors(tensors), wanted, rows, drow_sum)

    def _gradients(self, score: Score, wanted: Wanted, rows: local.Tensors, drow_sum: torch.Tensor | None) -> local.Tensors:
        q, k, v, dout, out, row_max, row_sum = rows
        slopes_too, values_too, sinks_too = wanted
        ready = self.takes_rows_as_they_come
        once = ready and self.program.backward.alone and score.modifiers is None
        # K and V leave while this rank prepares its queries, for which nothing is let go of again
        began = local.moment(k) if ready and self.k_order is None and drow_sum is None and not self.program.backward.alone else None
        alone = (k, v, self.program.backward.launches[0].tiles) if once else None
        queries = local.queries(q, out, dout, row_max, row_sum, drow_sum, ready=ready, once=once, alone=alone)
        dsinks = None
        if sinks_too:
            assert score.sinks is not None
            # first: delta may lie where dq will
            dsinks = local.sinks_gradient(row_max, row_sum, queries.delta, score.sinks)
        *gradients, sums = self.backward(score, queries, k, v, slopes_too=slopes_too, values_too=values_too, began=began)
        return *gradients, *[x for x in (sums.slopes, sums.values, dsinks) if x is not None]

    @property
    def takes_rows_as_they_come(self) -> bool:
        """Whether this rank's launches get the rows of q as they come: in their order, with their heads, and none that move."""
        return self.q_order is None and self.exchange is None and not self.program.queries_move

    @property
    def _one_exchange(self) -> bool:
        return self.k_exchange is self.exchange

    def _to_heads(
        self, of_queries: tuple[torch.Tensor, ...], of_keys: tuple[torch.Tensor, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Rows of queries, and of keys, as all rows of the heads axis for this rank's heads: in one exchange, if they are the same rows."""
        assert self.exchange is not None and self.k_exchange is not None
        if self._one_exchange:
            found = self.exchange.to_heads(*of_queries, *of_keys)
            return found[: len(of_queries)], found[len(of_queries) :]
        return self.exchange.to_heads(*of_queries), self.k_exchange.to_heads(*of_keys)

    def _heads_here(self, heads: int) -> tuple[int, int]:
        """The first query head that this rank computes, and one past the last."""
        assert self.exchange is not None
        here = heads // self.exchange.transport.size
        return self.exchange.transport.rank * here, (self.exchange.transport.rank + 1) * here

    def _score_here(self, score: Score, heads: int) -> Score:
        """What is done to the scores of the heads that this rank computes."""
        begin, end = self._heads_here(heads)
        modifiers = score.modifiers and score.modifiers.of_heads(begin, end)
        sinks = None if score.sinks is None else score.sinks[begin:end].contiguous()
        return Score(score.softmax_scale, modifiers, sinks)

    def _sums_of_all_heads(self, sums: ModifierSums, heads: int) -> ModifierSums:
        """Sums of the heads that this rank computes, as those of all heads: zeros for the others."""
        if self.exchange is None:
            return sums
        begin, end = self._heads_here(heads)
        slopes, values = sums.slopes, sums.values
        if slopes is not None:
            slopes = torch.nn.functional.pad(slopes, (begin, heads - end))
        if values is not None:
            values = torch.nn.functional.pad(values, (0, 0, begin, heads - end))
        return ModifierSums(slopes, values)

    def _kv_copies(self, q: torch.Tensor, k: torch.Tensor) -> int:
        assert self.exchange is not None
        return kv_copies(q.shape[2], k.shape[2], self.exchange.transport.size)


def _sorted(x: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Rows in the order in which the plan counts them, with a contiguous last dimension."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if order is None else order.sort(x, dim=1)


def _restored(x: torch.Tensor, order: Order | None, dim: int = 1) -> torch.Tensor:
    """Rows in the order in which they came."""
    return x if order is None else order.restore(x, dim=dim)


def _repeated(x: torch.Tensor, copies: int) -> torch.Tensor:
    return x if copies == 1 else x.repeat_interleave(copies, dim=2)


def _summed(dx: torch.Tensor, copies: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradients of a head's copies as one, in a fixed order, rounded once."""
    return dx if copies == 1 else dx.unflatten(2, (-1, copies)).sum(3).to(dtype)


def _as_rows(*stats: torch.Tensor) -> torch.Tensor:
    """n tensors (b, h, s) as one (b, s, h, n), for one message."""
    return torch.stack(stats, dim=-1).transpose(1, 2)


def _as_stats(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inverse of `_as_rows`, as copies: results of an operator must not share memory."""
    return tuple(x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in rows.unbind(-1))
