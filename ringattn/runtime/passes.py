"""The forward and the backward pass of one rank: runs its steps over a transport and this device.

K/V buffers and their gradients are (rows, b, hk, d), so that any rows of an owner are one contiguous message; the local
computation sees them as (b, rows, hk, d). Everything between steps is fp32 (fp64 for fp64 input). dQ never moves.

Shapes: b batch, s local tokens, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..device import local
from ..schedule.program import Message, Opening, Step, Steps
from ..score import Score
from ..transport import Handle, Peer, Transport

KV = tuple[torch.Tensor, torch.Tensor]


def forward(
    transport: Transport,
    steps: Steps,
    score: Score,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    final: bool,
) -> local.State:
    """out (b, s, h, d_v), row_max and row_sum (b, h, s); with `final`, out in q's dtype."""
    buffers = {0: _own(k, v)}
    state = None
    for t, step in enumerate(steps.forward):
        _open(step.opens, buffers)
        handle = _exchange(transport, step, buffers) if step.moves else None
        if len(step.tiles) or t == steps.last == 0:
            state = local.forward(q, *_keys(step, buffers), step.tiles, score, state=state, final=final and t == steps.last)
        if handle is not None:
            handle.wait()
        _close(step.closes, buffers)
    assert state is not None
    return state


def backward(
    transport: Transport,
    steps: Steps,
    score: Score,
    queries: local.Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kv_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the inputs' dtypes (dk and dv in `kv_dtype`)."""
    q, kv_dtype = queries.q, kv_dtype or k.dtype
    buffers = {0: _own(k, v)}
    # gradients that nothing is added to later leave the kernels in their final dtype
    alone = kv_dtype == q.dtype and steps.alone
    dtype = q.dtype if alone else queries.row_sum.dtype
    dq = local.query_sums(q, score, dtype)
    grads = {0: _like(buffers[0], k.shape[1], dtype)}
    if (last := steps.backward[-1]).adds:
        for x in grads[0].part(last.begin, k.shape[1]):
            x.zero_()
    closes: tuple[int, ...] = ()
    with local.lanes(queries, *buffers[0].batch_first(), dq, steps.backward[0].tiles, steps.side_by_side) as lanes:
        for step in steps.backward:
            _open(step.grads_opens, grads)
            lanes.join()
            if step.sums:
                with lanes.between():
                    _add(step.sums, grads)
            _close(closes, buffers)
            _close(step.boxes_close, grads)
            _open(step.opens, buffers)
            _open(step.box_opens, grads)
            handle = None
            if step.moves:
                with lanes.between():
                    handle = _exchange(transport, step, buffers, grads)
            if step.collects:
                dk, dv = grads[step.buffer].part(step.begin, step.begin + step.tiles.k_rows)
                with lanes.launch():
                    local.backward(queries, *_keys(step, buffers), step.tiles, score, dq=dq, dk=dk, dv=dv, add=step.adds)
                del dk, dv  # a step without a launch may let go of them
            if handle is not None:
                with lanes.between():
                    handle.wait()
            lanes.go_on()
            _close(step.grads_close, grads)
            closes = step.closes
    _add(steps.sums, grads)
    total = grads[0]
    del grads, buffers
    dk, dv = total.batch_first()
    return dq.finish(q.dtype), dk.to(kv_dtype), dv.to(kv_dtype)


class _Buffer:
    """K and V of some rows, or their gradients: (rows, b, hk, d) and (rows, b, hk, d_v)."""

    __slots__ = ("_batch_first", "rows", "rows_first")

    def __init__(self, rows_first: KV, batch_first: KV | None = None) -> None:
        self.rows_first = rows_first
        self.rows = rows_first[0].shape[0]
        self._batch_first = batch_first

    def batch_first(self) -> KV:
        """The same as views, (b, rows, hk, d) and (b, rows, hk, d_v)."""
        if self._batch_first is None:
            k, v = self.rows_first
            self._batch_first = k.transpose(0, 1), v.transpose(0, 1)
        return self._batch_first

    def part(self, begin: int, end: int) -> KV:
        """Rows [begin, end), batch first."""
        k, v = self.batch_first()
        return (k, v) if end - begin == self.rows else (k[:, begin:end], v[:, begin:end])


_Buffers = dict[int, _Buffer]


def _own(k: torch.Tensor, v: torch.Tensor) -> _Buffer:
    """The rank's shard, (b, s, hk, d) and (b, s, hk, d_v)."""
    rows_first = k.transpose(0, 1), v.transpose(0, 1)
    if rows_first[0].is_contiguous() and rows_first[1].is_contiguous():
        return _Buffer(rows_first, (k, v))
    return _Buffer((rows_first[0].contiguous(), rows_first[1].contiguous()))


def _like(buffer: _Buffer, rows: int, dtype: torch.dtype) -> _Buffer:
    """A buffer of as many batches and heads, with nothing in it yet."""
    k, v = buffer.rows_first
    return _Buffer((k.new_empty((rows, *k.shape[1:]), dtype=dtype), v.new_empty((rows, *v.shape[1:]), dtype=dtype)))


def _open(opens: Iterable[Opening], buffers: _Buffers) -> None:
    for number, rows, old in opens:
        buffers[number] = _like(buffers[0], rows, buffers[0].rows_first[0].dtype) if old is None else buffers.pop(old)


def _close(numbers: Iterable[int], buffers: _Buffers) -> None:
    for number in numbers:
        del buffers[number]


def _add(sums: Iterable[tuple[Message, Message]], grads: _Buffers) -> None:
    """Add what lies in boxes to the gradients that messages are about."""
    for message, box in sums:
        for total, received in zip(grads[message.buffer].rows_first, grads[box.buffer].rows_first):
            message.slots.add_to(total, received)


def _exchange(transport: Transport, step: Step, buffers: _Buffers, grads: _Buffers | None = None) -> Handle:
    """Start a step's K/V on their way, and after them, in the backward pass, its gradients."""
    sends, receives = _peers(step.sends, buffers), _peers(step.receives, buffers)
    if grads is not None:
        sends += _peers(step.grads_out, grads)
        receives += _peers(step.boxes, grads)
    return transport.exchange(sends, receives, at_rest=step.at_rest)


def _peers(messages: Iterable[Message], buffers: _Buffers) -> list[Peer]:
    """The rows that messages are about: views of the buffers, except for scattered rows to send, which are gathered."""
    peers = []
    for message in messages:
        k, v = buffers[message.buffer].rows_first
        if not message.whole:
            k, v = message.slots.take(k), message.slots.take(v)
        peers += Peer(message.peer, k), Peer(message.peer, v)
    return peers


def _keys(step: Step, buffers: _Buffers) -> KV:
    """The K/V that a step's tiles are over: (b, rows, hk, d) and (b, rows, hk, d_v)."""
    return buffers[step.buffer].part(step.begin, step.begin + step.tiles.k_rows)
