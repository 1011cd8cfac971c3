"""Runs a rank's instructions over a transport and this device: the forward and the backward pass.

K/V buffers and their sums are (rows, b, hk, d), so that any rows of an owner are one contiguous message; launches see them as
(b, rows, hk, d). A rank without others sends no messages and leaves its K/V as they are. Everything between steps is fp32 (fp64 for fp64
input). dQ never moves.

Shapes: b batch, s local tokens, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ringattn_kernels.modifiers import ModifierSums

from ..device import local
from ..device.streams import Moment
from ..geometry.rows import Rows
from ..schedule.instructions import Add, Buffer, Close, Exchange, Fence, Holds, Launch, Message, Open, Stream, Wait, Zero
from ..schedule.program import Pass
from ..scores import Score
from ..transport import Handle, Peer, Transport

KV = tuple[torch.Tensor, torch.Tensor]


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
    buffers = _Buffers(program.own, k, v, alone=transport.size == 1)
    state: local.State | None = None
    continued: local.ContinuedRows | None = None
    handle: Handle | None = None
    for x in program.instructions:
        match x:
            case Launch():
                keys = buffers.part(x.keys, x.begin, x.end)
                if state is None and final:
                    continued = local.continued(q, *keys, program, score)
                state = local.forward(q, *keys, x.tiles, score, state=state, final=final and x.last, continued=continued)
            case Open():
                buffers.open(x)
            case Exchange():
                handle = buffers.exchange(transport, x)
            case Wait():
                assert handle is not None
                handle.wait()
            case Close():
                buffers.close(x)
    assert state is not None
    if final:
        return state
    state = local.settled(state, q)
    return state if score.sinks is None else local.with_sinks(*state, score.sinks)


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
    began: Moment | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the inputs' dtypes (dk and dv in `kv_dtype`). The gradients of modifiers are added to `sums`.

    began: when k and v were there, and all memory was free that is free now.
    """
    q, kv_dtype = queries.q, kv_dtype or k.dtype
    assert program.sums is not None
    # gradients that nothing is added to later leave the kernels in their final dtype
    dtype = q.dtype if kv_dtype == q.dtype and program.alone else torch.promote_types(q.dtype, torch.float32)
    dq = local.query_sums(queries, score, dtype)
    buffers = _Buffers(program.own, k, v, dtype, alone=transport.size == 1)
    buffers.open(Open(0, program.sums))
    handle: Handle | None = None
    last: list[tuple[KV, Rows]] = []  # what is added to the rank's own sums at the end
    began = began if buffers.as_given else None
    with local.streams(queries, *buffers.part(program.own, 0, k.shape[1]), dq, program, score, began) as streams:
        for x in program.instructions:
            match x:
                case Launch():
                    assert x.sums is not None
                    keys, (dk, dv) = buffers.part(x.keys, x.begin, x.end), buffers.part(x.sums, x.begin, x.end)
                    with streams.launch(x):
                        local.backward(queries, *keys, x.tiles, score, dq=dq, dk=dk, dv=dv, add=x.add, sums=sums)
                    del keys, dk, dv  # a Close lets go of their memory
                case Fence():
                    streams.fence(x.stream)
                case Open():
                    buffers.open(x)
                case Close():
                    buffers.close(x)
                case Exchange():
                    with streams.exchanges:
                        handle = buffers.exchange(transport, x)
                    if x.at_rest:
                        # it begins with copies that would wait for multiprocessors
                        streams.fence(Stream.LAUNCHES)
                case Wait():
                    assert handle is not None
                    with streams.exchanges:
                        handle.wait()
                case Add() if x.stream is Stream.CALLER:
                    last.append((buffers.rows(x.staging), x.rows))
                case Add():
                    with streams.exchanges:
                        buffers.add(x)
                case Zero():
                    buffers.zero(x)
    own = buffers.rows(program.sums)
    del buffers
    dk, dv = local.rounded_sums(own, last, kv_dtype)
    del own, last  # dq needs room
    return dq.finish(q.dtype), dk.transpose(0, 1), dv.transpose(0, 1)


class _Buffers:
    """The tensors of a pass's buffers: K and V, or their sums, (rows, b, hk, d) and (rows, b, hk, d_v)."""

    def __init__(
        self, own: Buffer, k: torch.Tensor, v: torch.Tensor, sums_dtype: torch.dtype | None = None, *, alone: bool
    ) -> None:
        as_given = k.transpose(0, 1), v.transpose(0, 1)
        rows = as_given if alone else local.contiguous(as_given)
        self.as_given = rows is as_given  # whether nothing was copied
        self._views: dict[Buffer, KV] = {own: (k, v)} if self.as_given else {}  # batch first
        self._rows: dict[Buffer, KV] = {own: rows}
        self._like = rows
        self._sums_dtype = sums_dtype
        self._alone = alone

    def part(self, buffer: Buffer, begin: int, end: int) -> KV:
        """Rows [begin, end) of a buffer as views, batch first: (b, rows, hk, d) and (b, rows, hk, d_v)."""
        views = self._views.get(buffer)
        if views is None:
            k, v = self._rows[buffer]
            views = self._views[buffer] = k.transpose(0, 1), v.transpose(0, 1)
        return views if end - begin == buffer.rows else (views[0][:, begin:end], views[1][:, begin:end])

    def rows(self, buffer: Buffer) -> KV:
        """A buffer's tensors."""
        return self._rows[buffer]

    def open(self, x: Open) -> None:
        if x.reuse is None:
            k, v = self._like
            rows, dtype = x.buffer.rows, k.dtype if x.buffer.holds is Holds.KV else self._sums_dtype
            if self._alone:
                k, v = (like.new_empty((like.shape[1], rows, *like.shape[2:]), dtype=dtype) for like in (k, v))
                self._views[x.buffer], self._rows[x.buffer] = (k, v), (k.transpose(0, 1), v.transpose(0, 1))
            else:
                self._rows[x.buffer] = (
                    k.new_empty((rows, *k.shape[1:]), dtype=dtype),
                    v.new_empty((rows, *v.shape[1:]), dtype=dtype),
                )
        else:
            self._rows[x.buffer] = self._rows.pop(x.reuse)
            views = self._views.pop(x.reuse, None)
            if views is not None:
                self._views[x.buffer] = views

    def close(self, x: Close) -> None:
        for buffer in x.buffers:
            del self._rows[buffer]
            self._views.pop(buffer, None)

    def exchange(self, transport: Transport, x: Exchange) -> Handle:
        return transport.exchange(self._peers(x.sends), self._peers(x.receives), at_rest=x.at_rest)

    def _peers(self, messages: Iterable[Message]) -> list[Peer]:
        """The rows that messages are about: views of the buffers, except for scattered rows to send, which are gathered."""
        peers = []
        for message in messages:
            pair = self._rows[message.buffer]
            k, v = pair if message.whole else local.take(pair, message.rows)
            peers += Peer(message.peer, k), Peer(message.peer, v)
        return peers

    def add(self, x: Add) -> None:
        local.add(self._rows[x.buffer], self._rows[x.staging], x.rows)

    def zero(self, x: Zero) -> None:
        k, v = self._rows[x.buffer]
        local.zero((k[x.begin : x.end], v[x.begin : x.end]))
