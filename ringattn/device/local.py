"""Runs a set of tiles on this device: the Triton kernels on a GPU, plain torch elsewhere. The one place that chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringattn_kernels.modifiers import ModifierSums
from ringattn_kernels.page_table import PageTable
from ringattn_kernels.repeats import Replays
from ringattn_kernels.table import TileTable

from ..geometry.rows import Rows
from ..partial import Partial, merge
from ..schedule.instructions import Add, Exchange
from ..schedule.program import Pass, Program
from ..scores import Score
from . import blocked, paged
from .streams import InOrder, Moment, SideBySide, Streams

if TYPE_CHECKING:
    import numpy as np

    import ringattn_kernels
    from ringattn_kernels import ContinuedRows, TensorKind
    from ringattn_kernels.continued import RowPart
    from ringattn_kernels.recordings import InputKinds, Kind, Question, Recording

    QuerySums = blocked.TorchQuerySums | ringattn_kernels.QuerySums

_NO_SUMS = ModifierSums(None, None)
Queries = blocked.Queries
State = blocked.State
Tensors = tuple[torch.Tensor, ...]
Pair = tuple[torch.Tensor, torch.Tensor]


class RowShapes(NamedTuple):
    """Of the tensors that launches get: batch size, heads of q, and of k and v, head dims of q and k, and of v."""

    b: int
    h: int
    hk: int
    d: int
    d_v: int
    dtype: torch.dtype
    device: torch.device


def continued(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, program: Pass, score: Score) -> ContinuedRows | None:
    """What a pass whose result is final hands to all its launches, so that rows which only the first one touches are done with it.

    k, v: as the first launch gets them. None if nothing is to be gained.
    """
    if not (q.is_cuda and q.numel()) or score.modifiers is not None or len(program.launches) < 2:
        return None
    import ringattn_kernels

    part = ringattn_kernels.continued_rows(q, k, v, program.launches[0].tiles, program.continued, score.softmax_scale)
    if part is None:
        return None
    return ringattn_kernels.ContinuedRows(part, q.new_empty((*q.shape[:3], v.shape[3])))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: TileTable,
    score: Score,
    *,
    state: State | None,
    final: bool,
    continued: ContinuedRows | None = None,
) -> State:
    """Attention of q over the tiles' pairs, on top of `state`: (out, row_max, row_sum). See `blocked.forward`, and `continued`.

    Rows that leave as final count the score's sinks.
    """
    options = dict(softmax_scale=score.softmax_scale, modifiers=score.modifiers, sinks=score.sinks, state=state, final=final)
    if not (q.is_cuda and q.numel()):
        return blocked.forward(q, k, v, tiles, **options)
    import ringattn_kernels

    return ringattn_kernels.forward(q, k, v, tiles, **options, continued=continued)


def settled(state: State, q: torch.Tensor) -> State:
    """A state that no further launch adds to, in fp32 (fp64 for fp64)."""
    if q.is_cuda:
        return state
    dtype = torch.promote_types(q.dtype, torch.float32)
    return blocked.settled(state, dtype, dtype)


def replayed(
    found: Replays, facts: tuple, inputs: Tensors, work: Callable[..., Tensors], words: Mapping[str, int] | None = None
) -> Tensors:
    """`work(*inputs)`, which computes tensors. A GPU replays what it did for tensors of the same kinds and the same `facts`, with other
    words; see `recordings.replay`."""
    if inputs[0].is_cuda and inputs[0].numel():
        import ringattn_kernels

        return ringattn_kernels.replay(found, facts, inputs, work, words)
    return work(*inputs)


def rehearsed(
    found: Replays, facts: tuple, kinds: Sequence[Kind], device: torch.device, work: Callable[..., Tensors]
) -> tuple[Kind, ...]:
    """Record what `replayed` would record in a call with such tensors, and do none of it, if that is possible on this device.

    kinds: shapes, strides and dtypes of the inputs. Returns those of what `work` computes, or nothing.
    """
    if device.type != "cuda":
        return ()
    import ringattn_kernels.recordings

    with torch.no_grad(), torch.cuda.device(device):
        return ringattn_kernels.recordings.rehearse(found, facts, kinds, device, work)


def recorded(found: Replays | None, facts: tuple, inputs: Tensors) -> Recording | None:
    """What `replayed` would run now for such inputs, if they begin at different addresses; None if nothing is recorded."""
    if not found:
        return None
    import ringattn_kernels.recordings

    return ringattn_kernels.recordings.recorded(found, facts, inputs)


def state_of_replays() -> tuple | None:
    """What recordings depend on besides their inputs; None where nothing may be replayed. For a device that has recorded something."""
    import ringattn_kernels.recordings

    return ringattn_kernels.recordings.state()


def inputs_of_replays(now: tuple, inputs: Tensors, questions: tuple[Question, ...]) -> InputKinds:
    """Tensors like these, with this state, as what a recording is for; and what else must be so when it runs."""
    import ringattn_kernels.recordings

    return ringattn_kernels.recordings.InputKinds(now, inputs, questions)


def quick_records() -> Any:
    """What swaps records in C (see `Ranks.posting`); None where that is missing. For a device that has recorded something."""
    import ringattn_kernels.recordings

    return ringattn_kernels.recordings.quick_records()


def queries(
    q: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    drow_sum: torch.Tensor | None = None,
    *,
    ready: bool = True,
    once: bool = False,
    alone: tuple[torch.Tensor, torch.Tensor, TileTable] | None = None,
) -> Queries:
    """What a backward pass reads of its rows. drow_sum: (b, h, s), the gradient of row_sum, if there is one.

    ready: make what launches will read, too, because they get these very tensors.
    once: a single launch reads them, and nobody after `QuerySums.finish`. alone: K, V and tiles of this launch, if it only scales scores.
    """
    if q.is_cuda and out.numel():
        import ringattn_kernels

        return ringattn_kernels.ready_queries(q, out, dout, row_max, row_sum, drow_sum, ready, once, alone)
    if q.is_cuda:
        # no rows; queries that move bring a delta of the dtype that other ranks' kernels have
        return Queries(q, dout, row_max, row_sum, torch.empty_like(row_max))
    delta = blocked.delta(out, dout)
    if drow_sum is not None:
        # d lse = d row_sum * row_sum enters dS = P (dP - delta) as P d lse
        delta = delta - drow_sum * row_sum
    return Queries(q, dout, row_max, row_sum, delta)


def add(totals: Pair, more: Pair, rows: Rows) -> None:
    """Add two contiguous tensors (n, b, heads, d) to these rows of two others, in place."""
    if totals[0].is_cuda:
        import ringattn_kernels

        if rows.only is None:
            ringattn_kernels.add_rows(totals, more, rows.index(totals[0].device))
        else:
            ringattn_kernels.add_pair((rows.take(totals[0]), rows.take(totals[1])), more)
    else:
        for total, x in zip(totals, more):
            rows.add_to(total, x)


def zero(tensors: Tensors) -> None:
    """Set at most two tensors of one dtype, whose strides leave no gaps, to zero."""
    if tensors and tensors[0].is_cuda:
        import ringattn_kernels

        ringattn_kernels.zero(*tensors)
    else:
        for x in tensors:
            x.zero_()


def take(pair: Pair, rows: Rows) -> Pair:
    """These rows of two tensors (all rows, b, heads, d), contiguous: views where they can be."""
    if pair[0].is_cuda and rows.only is None:
        import ringattn_kernels

        return ringattn_kernels.take_rows(pair, rows.index(pair[0].device))
    return rows.take(pair[0]), rows.take(pair[1])


def contiguous(pair: Pair) -> Pair:
    """Two tensors (rows, b, heads, d) with their rows one after another in memory: as they are, or as copies."""
    if pair[0].is_contiguous() and pair[1].is_contiguous():
        return pair
    if pair[0].is_cuda:
        import ringattn_kernels

        return ringattn_kernels.take_rows(pair)
    return pair[0].contiguous(), pair[1].contiguous()


def merge_rows(totals: State, more: State) -> None:
    """Merge partials of the same rows into others, in place: out (n, b, h, d_v), row_max and row_sum (n, b, h); totals are contiguous."""
    if totals[0].is_cuda:
        import ringattn_kernels

        ringattn_kernels.merge_rows(totals, more)
        return
    parts = (
        Partial(out.transpose(0, 1), row_max.permute(1, 2, 0), row_sum.permute(1, 2, 0)) for out, row_max, row_sum in (totals, more)
    )
    found = merge(*parts)
    for total, x in zip(totals, (found.out.transpose(0, 1), found.row_max.permute(2, 0, 1), found.row_sum.permute(2, 0, 1))):
        total.copy_(x)


def rounded(pair: Pair, dtype: torch.dtype) -> Pair:
    """Two tensors of one dtype in another one, with their strides."""
    if pair[0].dtype == dtype:
        return pair
    if pair[0].is_cuda:
        import ringattn_kernels

        return ringattn_kernels.rounded_pair(pair, dtype)
    return pair[0].to(dtype), pair[1].to(dtype)


def rounded_sums(totals: Pair, more: Sequence[tuple[Pair, Rows]], dtype: torch.dtype) -> Pair:
    """`rounded` of two tensors (n, b, heads, d), after others have been added in turn to these rows; contiguous if there are any."""
    together = totals[0].is_cuda and totals[0].dtype != dtype
    # up to the last rows that are no span, each in a launch of its own
    alone = max((number for number, (_, rows) in enumerate(more, 1) if rows.only is None), default=0) if together else len(more)
    for pair, rows in more[:alone]:
        add(totals, pair, rows)
    if alone == len(more):
        return rounded(totals, dtype)
    import ringattn_kernels

    widths = [x[:1].numel() for x in totals]
    spans = [(pair, (rows.only[0] * widths[0], rows.only[0] * widths[1])) for pair, rows in more[alone:] if rows.only]
    return ringattn_kernels.rounded_pair(totals, dtype, spans)


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
    if score.modifiers is None:
        return _NO_SUMS
    sums = ModifierSums.empty(score.modifiers, slopes_too, values_too)
    zero(sums.tensors)
    return sums


def prepare(program: Program, shapes: RowShapes, softmax_scale: float, *, final: bool) -> None:
    """Make what launches and messages of a program will read on their device: tables, and the indices of scattered rows."""
    for one_pass in (program.forward, program.backward):
        for x in one_pass.instructions:
            if isinstance(x, Exchange):
                scattered = [message.rows for message in x.sends if not message.whole]
            else:
                scattered = [x.rows] if isinstance(x, Add) else []
            for rows in scattered:
                if rows.only is None:
                    rows.index(shapes.device)
    if shapes.device.type == "cuda":
        launches = program.forward.launches
        part = None
        if final and len(launches) > 1 and not program.queries_move:
            part = _continued_rows(launches[0].tiles, program.forward.continued, shapes, softmax_scale)
        for number, launch in enumerate(launches):
            # where queries move, each launch makes partials of its own
            first = program.queries_move or number == 0
            last = launch.last and not program.queries_move
            _prepare_forward(launch.tiles, shapes, softmax_scale, first=first, final=final and last, part=part)
        for launch in program.backward.launches:
            _prepare_backward(launch.tiles, shapes, softmax_scale)


def _continued_rows(tiles: TileTable, later: np.ndarray, shapes: RowShapes, softmax_scale: float) -> RowPart | None:
    import ringattn_kernels

    return ringattn_kernels.continued_rows(*_kinds(tiles, shapes)[:3], tiles, later, softmax_scale)


def _prepare_forward(
    tiles: TileTable, shapes: RowShapes, softmax_scale: float, *, first: bool, final: bool, part: RowPart | None
) -> None:
    import ringattn_kernels

    q, k, v, _ = _kinds(tiles, shapes)
    ringattn_kernels.prepare_forward(q, k, v, tiles, softmax_scale=softmax_scale, first=first, final=final, part=part)


def _prepare_backward(tiles: TileTable, shapes: RowShapes, softmax_scale: float) -> None:
    import ringattn_kernels

    ringattn_kernels.prepare_backward(*_kinds(tiles, shapes), tiles, softmax_scale=softmax_scale)


def _kinds(tiles: TileTable, shapes: RowShapes) -> tuple[TensorKind, TensorKind, TensorKind, TensorKind]:
    """q, k, v and dout of a launch; k and v have their rows first in memory."""
    from ringattn_kernels import TensorKind

    b, h, hk, d, d_v, dtype, device = shapes
    queries = (TensorKind((b, tiles.q_rows, h, n), dtype, device) for n in (d, d_v))
    keys = (TensorKind((b, tiles.k_rows, hk, n), dtype, device, (hk * n, b * hk * n, n, 1)) for n in (d, d_v))
    (q, dout), (k, v) = queries, keys
    return q, k, v, dout


def with_sinks(out: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor, sinks: torch.Tensor) -> State:
    """out (b, s, h, d_v), row_max and row_sum (b, h, s) of a softmax with one more score a row, sinks (h,), which has no value."""
    if out.is_cuda and out.numel():
        import ringattn_kernels

        return ringattn_kernels.with_sinks(out, row_max, row_sum, sinks)
    return blocked.with_sinks(out, row_max, row_sum, sinks)


def sinks_gradient(row_max: torch.Tensor, row_sum: torch.Tensor, delta: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """(h,), from statistics that count sinks. A sink's dP is 0, so that its dS is -P delta."""
    if delta.is_cuda and delta.numel():
        import ringattn_kernels

        return ringattn_kernels.sinks_gradient(row_max, row_sum, delta, sinks)
    weights = (sinks[:, None] - row_max).exp_().div_(row_sum)
    # without a live pair and a sink 0 would be divided by 0
    return weights.masked_fill_(row_sum == 0, 0.0).mul_(delta).sum((0, 2)).neg_()


def moment(x: torch.Tensor) -> Moment | None:
    """The point that x's device has come to on the current stream; None on a device without streams."""
    if not x.is_cuda:
        return None
    found = Moment()
    found.record(torch.cuda.current_stream(x.device))
    return found


def streams(
    queries: Queries, k: torch.Tensor, v: torch.Tensor, dq: QuerySums, program: Pass, score: Score, began: Moment | None = None
) -> Streams:
    """Where the instructions of a backward pass run. Launches run side by side where the kernels that run add to dq in any order.

    k, v: the rank's own, as a launch gets them; K/V of other ranks come in tensors of the same kind. began: exchanges need to come after
    that alone, if they run beside launches.
    """
    if isinstance(dq, blocked.TorchQuerySums) or not program.side_by_side or score.modifiers is not None:
        return InOrder()
    tiles = program.launches[0].tiles
    if not len(tiles):
        return InOrder()
    from ringattn_kernels.dispatch import Kernels, backward_kernels

    if backward_kernels(queries, k, v, tiles, score.softmax_scale) != Kernels.HOPPER_FUSED:
        return InOrder()
    # on the caller's stream, before all launches
    dq.permuted(v.shape[3])
    dq.prepared(queries.statistics)
    return SideBySide(queries.q.device, program.far, began)


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
        if not add:
            zero((dk, dv))
        return
    scale, modifiers = score.softmax_scale, score.modifiers
    if isinstance(dq, blocked.TorchQuerySums):
        blocked.backward(queries, k, v, tiles, softmax_scale=scale, modifiers=modifiers, sums=sums, dq=dq, dk=dk, dv=dv, add=add)
    else:
        import ringattn_kernels

        ringattn_kernels.backward(
            queries, k, v, tiles, softmax_scale=scale, modifiers=modifiers, sums=sums, dq=dq, dk=dk, dv=dv, add=add
        )


def attend_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: PageTable,
    score: Score,
    window: int | None,
    *,
    sinks: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
) -> torch.Tensor:
    """out of the last t tokens of each sequence, q (b, t, h, d), over this rank's pages of keys; see `paged.attend_pages`."""
    if q.is_cuda:
        import ringattn_kernels

        run = ringattn_kernels.attend_pages
    else:
        run = paged.attend_pages
    scale, modifiers = score.softmax_scale, score.modifiers
    return run(q, k, v, table, softmax_scale=scale, window=window, modifiers=modifiers, sinks=sinks, packed=packed)[0]


def merge_packed(packed: torch.Tensor, q: torch.Tensor, d_v: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """out of all ranks' partials; see `paged.merge_packed`."""
    if q.is_cuda:
        import ringattn_kernels

        return ringattn_kernels.merge_packed(packed, q, d_v, sinks)[0]
    return paged.merge_packed(packed, q, d_v, sinks)[0]
