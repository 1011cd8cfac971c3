"""Runs a set of tiles on this device: the Triton kernels on a GPU, plain torch elsewhere. The one place that chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ringattn_kernels.modifiers import ModifierSums
from ringattn_kernels.table import TileTable

from ..schedule.program import Pass
from ..scores import Score
from . import blocked
from .streams import InOrder, SideBySide, Streams

if TYPE_CHECKING:
    import ringattn_kernels

    QuerySums = blocked.TorchQuerySums | ringattn_kernels.QuerySums

_NO_SUMS = ModifierSums(None, None)
Queries = blocked.Queries
State = blocked.State
Tensors = tuple[torch.Tensor, ...]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: TileTable, score: Score, *, state: State | None, final: bool
) -> State:
    """Attention of q over the tiles' pairs, on top of `state`: (out, row_max, row_sum). See `blocked.forward`."""
    if q.is_cuda and q.numel():
        import ringattn_kernels

        run = ringattn_kernels.forward
    else:
        run = blocked.forward
    return run(q, k, v, tiles, softmax_scale=score.softmax_scale, modifiers=score.modifiers, state=state, final=final)


def settled(state: State, q: torch.Tensor) -> State:
    """A state that no further launch adds to, in fp32 (fp64 for fp64)."""
    if q.is_cuda:
        return state
    dtype = torch.promote_types(q.dtype, torch.float32)
    return blocked.settled(state, dtype, dtype)


def replayed(found: dict, facts: tuple, inputs: Tensors, work: Callable[[], Tensors]) -> Tensors:
    """`work()`, which computes tensors from the inputs. A GPU replays what it did for tensors of the same kinds and the same `facts`."""
    if inputs[0].is_cuda and inputs[0].numel():
        import ringattn_kernels

        return ringattn_kernels.replay(found, facts, inputs, work)
    return work()


def queries(
    q: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    drow_sum: torch.Tensor | None = None,
    *,
    ready: bool = True,
) -> Queries:
    """What a backward pass reads of its rows. drow_sum: (b, h, s), the gradient of row_sum, if there is one.

    ready: make what launches will read, too, because they get these very tensors.
    """
    if q.is_cuda and out.numel():
        import ringattn_kernels

        return ringattn_kernels.ready_queries(q, out, dout, row_max, row_sum, drow_sum, ready)
    delta = blocked.delta(out, dout)
    if drow_sum is not None:
        # d lse = d row_sum * row_sum enters dS = P (dP - delta) as P d lse
        delta = delta - drow_sum * row_sum
    return Queries(q, dout, row_max, row_sum, delta)


def query_sums(queries: Queries, score: Score, dtype: torch.dtype) -> QuerySums:
    """The sums that the launches of one backward pass add dQ to; `finish(dtype)` gives dQ, once.

    dtype: fp32 (fp64); or, for a pass of a single launch, the dtype of dQ.
    """
    if queries.q.is_cuda:
        import ringattn_kernels

        return ringattn_kernels.QuerySums(queries.q, score.softmax_scale, dtype, queries)
    return blocked.TorchQuerySums(queries.q)


def modifier_sums(score: Score, slopes_too: bool, values_too: bool) -> ModifierSums:
    """The sums that the launches of one backward pass add the gradients of slopes and values to, where they are asked for."""
    return _NO_SUMS if score.modifiers is None else ModifierSums.zeros(score.modifiers, slopes_too, values_too)


def with_sinks(out: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor, sinks: torch.Tensor) -> State:
    """out (b, s, h, d_v), row_max and row_sum (b, h, s) of a softmax with one more score a row, sinks (h,), which has no value."""
    if out.is_cuda and out.numel():
        import ringattn_kernels

        return ringattn_kernels.with_sinks(out, row_max, row_sum, sinks)
    return blocked.with_sinks(out, row_max, row_sum, sinks)


def sinks_gradient(row_max: torch.Tensor, row_sum: torch.Tensor, delta: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """(h,), from statistics that count sinks. A sink's dP is 0, so that its dS is -P delta."""
    weights = (sinks[:, None] - row_max).exp_().div_(row_sum)
    # without a live pair and a sink 0 would be divided by 0
    return weights.masked_fill_(row_sum == 0, 0.0).mul_(delta).sum((0, 2)).neg_()


def streams(queries: Queries, k: torch.Tensor, v: torch.Tensor, dq: QuerySums, program: Pass, score: Score) -> Streams:
    """Where the instructions of a backward pass run. Launches run side by side where the kernels that run add to dq in any order.

    k, v: the rank's own, as a launch gets them; K/V of other ranks come in tensors of the same kind.
    """
    if isinstance(dq, blocked.TorchQuerySums) or not program.side_by_side or score.modifiers is not None:
        return InOrder()
    tiles = program.launches[0].tiles
    if not len(tiles):
        return InOrder()
    from ringattn_kernels.dispatch import Kernels, backward_kernels

    if backward_kernels(queries, k, v, tiles) != Kernels.HOPPER_FUSED:
        return InOrder()
    # on the caller's stream, before all launches
    dq.permuted()
    dq.prepared(queries.statistics)
    return SideBySide(queries.q.device)


def backward(
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: TileTable,
    score: Score,
    *,
    dq: QuerySums,
    dk: torch.Tensor,
    dv: torch.Tensor,
    add: bool,
    sums: ModifierSums | None = None,
) -> None:
    """Adds the gradients of the tiles' pairs to dq, dk and dv, and those of modifiers to `sums`, in place. See `blocked.backward`.

    With add=False, dk and dv, of any dtype, are overwritten. dq is added to in any case.
    """
    if not len(tiles):
        for x in () if add else (dk, dv):
            x.zero_()
        return
    scale, modifiers = score.softmax_scale, score.modifiers
    if isinstance(dq, blocked.TorchQuerySums):
        blocked.backward(queries, k, v, tiles, softmax_scale=scale, modifiers=modifiers, sums=sums, dq=dq, dk=dk, dv=dv, add=add)
    else:
        import ringattn_kernels

        ringattn_kernels.backward(
            queries, k, v, tiles, softmax_scale=scale, modifiers=modifiers, sums=sums, dq=dq, dk=dk, dv=dv, add=add
        )
