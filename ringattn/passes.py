"""The forward and the backward pass of one rank: runs its steps over a transport and this device.

K/V buffers and their gradients are (rows, b, hk, d), so that any rows of an owner are one contiguous message; the local
computation sees them as (b, rows, hk, d). Everything between steps is fp32 (fp64 for fp64 input). dQ never moves.

Shapes: b batch, s local tokens, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import local
from .score import Score
from .steps import Message, Step, Steps
from .transport import Handle, Peer, Transport

KV = tuple[torch.Tensor, torch.Tensor]  # (rows, b, hk, d) and (rows, b, hk, d_v)
Buffers = dict[int, KV]


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
    buffers = {0: _rows_first(k, v)}
    state = None
    for t, step in enumerate(steps.forward):
        handle = _exchange(transport, step, buffers)
        if len(step.tiles) or t == steps.last == 0:
            state = local.forward(q, *_keys(step, buffers), step.tiles, score, state=state, final=final and t == steps.last)
        handle.wait()
        for number in step.closes:
            del buffers[number]
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
    buffers = {0: _rows_first(k, v)}
    # gradients that nothing is added to later leave the kernels in their final dtype
    alone = kv_dtype == q.dtype and steps.alone
    dtype = q.dtype if alone else queries.row_sum.dtype
    dq = local.query_sums(q, score, dtype)
    grads = {0: _empty(buffers[0], k.shape[1], dtype)}
    if (last := steps.backward[-1]).adds:
        for x in _part(grads[0], last.begin, k.shape[1]):
            x.zero_()
    for step in steps.backward:
        inbox = [(message, _empty(buffers[0], len(message.slots), dtype)) for message in step.grads_in]
        receives = [Peer(message.peer, x) for message, box in inbox for x in box]
        handle = _exchange(transport, step, buffers, _peers(step.grads_out, grads), receives)
        if step.collects:
            if step.buffer:
                grads[step.buffer] = _empty(buffers[0], step.tiles.k_rows, dtype)
            dk, dv = _batch_first(_part(grads[step.buffer], step.begin, step.begin + step.tiles.k_rows))
            local.backward(queries, *_keys(step, buffers), step.tiles, score, dq=dq, dk=dk, dv=dv, add=step.adds)
        handle.wait()
        for message, box in inbox:
            for total, received in zip(grads[message.buffer], box, strict=True):
                message.slots.add_to(total, received)
        for number in step.closes:
            del buffers[number]
        for number in step.grads_close:
            del grads[number]
    dk, dv = _batch_first(grads[0])
    return dq.finish(q.dtype), dk.to(kv_dtype), dv.to(kv_dtype)


def _exchange(
    transport: Transport, step: Step, buffers: Buffers, sends: Iterable[Peer] = (), receives: Iterable[Peer] = ()
) -> Handle:
    """Start a step's K/V on their way, into new buffers where it says so, and after them what else it sends and receives."""
    for number, rows in step.opens:
        buffers[number] = _empty(buffers[0], rows, buffers[0][0].dtype)
    return transport.exchange([*_peers(step.sends, buffers), *sends], [*_peers(step.receives, buffers), *receives])


def _peers(messages: Iterable[Message], buffers: Buffers) -> list[Peer]:
    """The rows that messages are about: views of the buffers, except for scattered rows to send, which are gathered."""
    return [Peer(message.peer, message.slots.take(x)) for message in messages for x in buffers[message.buffer]]


def _keys(step: Step, buffers: Buffers) -> KV:
    """The K/V that a step's tiles are over: (b, rows, hk, d) and (b, rows, hk, d_v)."""
    return _batch_first(_part(buffers[step.buffer], step.begin, step.begin + step.tiles.k_rows))


def _rows_first(k: torch.Tensor, v: torch.Tensor) -> KV:
    return k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()


def _batch_first(buffer: KV) -> KV:
    return buffer[0].transpose(0, 1), buffer[1].transpose(0, 1)


def _part(buffer: KV, begin: int, end: int) -> KV:
    k, v = buffer
    return buffer if end - begin == k.shape[0] else (k[begin:end], v[begin:end])


def _empty(buffer: KV, rows: int, dtype: torch.dtype) -> KV:
    k, v = buffer
    return k.new_empty((rows, *k.shape[1:]), dtype=dtype), v.new_empty((rows, *v.shape[1:]), dtype=dtype)
