"""Runs the passes of `pass_q`, where queries move and keys stay (pass-Q, Yang et al. 2024, section 3.5).

Instructions are those of a backward pass over the transposed plan: buffers hold queries in the place of K/V, and their sums hold what
comes back. In the forward pass these are partials, and to add is to merge. In the backward pass queries move with the gradient of the
output and its statistics, and dQ comes back. dK/dV never move. Everything runs in the order of the instructions on the caller's stream;
messages, of queries and of what comes back, are under way beside the launch of their step.

Shapes: rows first, as in `passes.py`: (rows, b, h, d); a launch sees them as (b, rows, h, d).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ringattn_kernels.modifiers import ModifierSums

from ..device import local
from ..geometry.rows import Rows
from ..schedule.instructions import Add, Buffer, Close, Exchange, Holds, Launch, Message, Open, Wait, Zero
from ..schedule.program import Pass
from ..scores import Score
from ..transport import Handle, Peer, Transport

Rowwise = tuple[torch.Tensor, ...]  # tensors of the same rows
_EMPTY = (0.0, float("-inf"), 0.0)  # the identity of merges: out, row_max, row_sum


def forward(
    transport: Transport,
    program: Pass,
    score: Score,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    final: bool,
) -> local.State:
    """out (b, s, h, d_v), row_max and row_sum (b, h, s); with `final`, out in q's dtype."""
    dtype = torch.promote_types(q.dtype, torch.float32)

    def empty(rows: int) -> Rowwise:
        b, _, h, _ = q.shape
        return tuple(q.new_empty(rows, *shape, dtype=dtype) for shape in ((b, h, v.shape[3]), (b, h), (b, h)))

    def launch(x: Launch, queries: Rowwise) -> Rowwise:
        part = queries[0].transpose(0, 1)
        out, row_max, row_sum = local.settled(local.forward(part, k, v, x.tiles, score, state=None, final=False), part)
        return out.transpose(0, 1), row_max.permute(2, 0, 1), row_sum.permute(2, 0, 1)

    sums = _run(transport, program, (q.transpose(0, 1).contiguous(),), empty, launch, local.merge_rows, _EMPTY)
    out, row_max, row_sum = sums
    out = out.transpose(0, 1)
    row_max, row_sum = (x.permute(1, 2, 0).contiguous() for x in (row_max, row_sum))
    if score.sinks is not None:
        out, row_max, row_sum = local.with_sinks(out.contiguous(), row_max, row_sum, score.sinks)
    return out.to(q.dtype) if final else out.contiguous(), row_max, row_sum


def backward(
    transport: Transport,
    program: Pass,
    score: Score,
    queries: local.Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kv_dtype: torch.dtype | None = None,
    sums: ModifierSums | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the inputs' dtypes (dk and dv in `kv_dtype`). The gradients of modifiers are added to `sums`."""
    q, dout = queries.q, queries.dout
    dtype = torch.promote_types(q.dtype, torch.float32)
    # rows first in memory, as other passes return them
    dk, dv = (x.new_zeros(x.shape[1], x.shape[0], *x.shape[2:], dtype=dtype).transpose(0, 1) for x in (k, v))
    stats = torch.stack([queries.row_max, queries.row_sum, queries.delta], dim=-1).permute(2, 0, 1, 3)  # (s, b, h, 3)
    moved = tuple(x.contiguous() for x in (q.transpose(0, 1), dout.transpose(0, 1), stats))

    def empty(rows: int) -> Rowwise:
        return (q.new_empty(rows, *moved[0].shape[1:], dtype=dtype),)

    def launch(x: Launch, rows: Rowwise) -> Rowwise:
        part, dpart, row_stats = rows
        row_max, row_sum, delta = (y.permute(1, 2, 0).contiguous() for y in row_stats.unbind(-1))
        here = local.Queries(part.transpose(0, 1), dpart.transpose(0, 1), row_max, row_sum, delta)
        dq = local.query_sums(here, score, dtype)
        local.backward(here, k, v, x.tiles, score, dq=dq, dk=dk, dv=dv, add=True, sums=sums)
        return (dq.finish(dtype).transpose(0, 1),)

    (dq,) = _run(transport, program, moved, empty, launch, _sum, (0.0,))
    return dq.transpose(0, 1).to(q.dtype), *local.rounded((dk, dv), kv_dtype or k.dtype)


def _run(
    transport: Transport,
    program: Pass,
    own: Rowwise,
    empty: Callable[[int], Rowwise],
    launch: Callable[[Launch, Rowwise], Rowwise],
    add: Callable[[Any, Any], None],
    zero: Sequence[float],
) -> Rowwise:
    """What comes back for this rank's rows.

    own: what moves of its queries. empty: uninitialised results for so many rows. launch: the results of some queries with this rank's
    keys. add: adds results to others of the same rows, in place. zero: what adds nothing.
    """
    assert program.sums is not None
    held: dict[Buffer, Rowwise] = {program.own: own, program.sums: empty(program.sums.rows)}
    handle: Handle | None = None
    for x in program.instructions:
        match x:
            case Launch():
                assert x.sums is not None
                found = launch(x, tuple(y[x.begin : x.end] for y in held[x.keys]))
                into = tuple(y[x.begin : x.end] for y in held[x.sums])
                if x.add:
                    add(into, found)
                elif x.end - x.begin == x.sums.rows:
                    held[x.sums] = tuple(y.contiguous() for y in found)
                else:
                    _write(into, found)
            case Open():
                if x.buffer not in held:
                    if x.reuse is not None:
                        held[x.buffer] = held.pop(x.reuse)
                    elif x.buffer.holds is Holds.SUMS:
                        held[x.buffer] = empty(x.buffer.rows)
                    else:
                        held[x.buffer] = tuple(y.new_empty(x.buffer.rows, *y.shape[1:]) for y in own)
            case Exchange():
                handle = transport.exchange(_peers(held, x.sends), _peers(held, x.receives), at_rest=x.at_rest)
            case Wait():
                assert handle is not None
                handle.wait()
            case Add():
                _add_rows(held[x.buffer], held[x.staging], x.rows, add)
            case Zero():
                for y, value in zip(held[x.buffer], zero, strict=True):
                    y[x.begin : x.end].fill_(value)
            case Close():
                for buffer in x.buffers:
                    del held[buffer]
    return held[program.sums]


def _peers(held: dict[Buffer, Rowwise], messages: Iterable[Message]) -> list[Peer]:
    return [Peer(m.peer, x if m.whole else m.rows.take(x)) for m in messages for x in held[m.buffer]]


def _add_rows(totals: Rowwise, more: Rowwise, rows: Rows, add: Callable[[Any, Any], None]) -> None:
    parts = tuple(map(rows.take, totals))
    add(parts, more)
    # one range is a view, others are copies
    if rows.only is None:
        for total, x in zip(totals, parts, strict=True):
            total.index_copy_(0, rows.index(total.device), x)


def _write(into: Rowwise, values: Rowwise) -> None:
    for x, value in zip(into, values, strict=True):
        x.copy_(value)


def _sum(totals: Rowwise, more: Rowwise) -> None:
    for x, y in zip(totals, more, strict=True):
        x.add_(y)
