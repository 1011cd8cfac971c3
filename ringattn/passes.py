"""The forward and the backward pass of one rank: runs its steps over a transport and this device.

K/V buffers and their gradients are (rows, b, hk, d), so that any rows of an owner are one contiguous message; the local
computation sees them as (b, rows, hk, d). Everything between steps is fp32 (fp64 for fp64 input). dQ never moves.

Shapes: b batch, s local tokens, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import local
from .schedule import Message, Step
from .score import Score
from .transport import Peer, Transport

KV = tuple[torch.Tensor, torch.Tensor]  # (rows, b, hk, d) and (rows, b, hk, d_v)


def forward(
    transport: Transport,
    steps: tuple[Step, ...],
    score: Score,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    final: bool,
) -> local.State:
    """out (b, s, h, d_v), row_max and row_sum (b, h, s); with `final`, out in q's dtype."""
    last = max((t for t, step in enumerate(steps) if len(step.tiles)), default=0)
    buffer = _rows_first(k, v)
    state = None
    for t, step in enumerate(steps[:-1]):
        arriving = _like(buffer, step.receives)
        handle = transport.exchange(_outgoing(step.sends, buffer), _incoming(step.receives, arriving))
        if len(step.tiles) or t == last == 0:
            state = local.forward(q, *_batch_first(buffer), step.tiles, score, state=state, final=final and t == last)
        handle.wait()
        buffer = arriving
    assert state is not None
    return state


def backward(
    transport: Transport,
    steps: tuple[Step, ...],
    score: Score,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    delta: torch.Tensor,
    *,
    kv_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the inputs' dtypes (dk and dv in `kv_dtype`), from the merged statistics and delta (b, h, s)."""
    kv_dtype = kv_dtype or k.dtype
    inputs = (dout, row_max, row_sum, delta)
    # gradients that nothing is added to later leave the kernels in their final dtype
    alone = kv_dtype == q.dtype and not any(len(step.tiles) or step.grads_own for step in steps[1:])
    buffer = _rows_first(k, v)
    # stand-ins until step 0 has computed them; before that nothing is sent or added
    dq, own, grads = q, buffer, buffer
    for t, step in enumerate(steps):
        previous = grads
        if t > 0:
            grads = _zeros_like(buffer, row_sum.dtype)
        arriving = _like(buffer, step.receives)
        # gradients that come for this step's rows, and for the rank's own
        inbox = [(message, grads, _empty_rows(grads, message)) for message in step.grads_in]
        inbox += [(message, own, _empty_rows(own, message)) for message in step.grads_own]
        sends = _outgoing(step.sends, buffer) + _outgoing(step.grads_out, previous)
        receives = _incoming(step.receives, arriving)
        receives += [Peer(message.peer, x) for message, _, box in inbox for x in box]
        handle = transport.exchange(sends, receives)
        if t == 0:
            dtype = q.dtype if alone else row_sum.dtype
            dq, dk, dv = local.gradients(q, *_batch_first(buffer), *inputs, step.tiles, score, dtype=dtype)
            own = grads = dk.transpose(0, 1), dv.transpose(0, 1)
        else:
            dk, dv = _batch_first(grads)
            local.add_gradients(q, *_batch_first(buffer), *inputs, step.tiles, score, dq=dq, dk=dk, dv=dv)
        handle.wait()
        for message, target, box in inbox:
            for total, received in zip(target, box, strict=True):
                message.slots.add_to(total, received)
        buffer = arriving
    dk, dv = _batch_first(own)
    return dq.to(q.dtype), dk.to(kv_dtype), dv.to(kv_dtype)


def _rows_first(k: torch.Tensor, v: torch.Tensor) -> KV:
    return k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()


def _batch_first(buffer: KV) -> KV:
    return buffer[0].transpose(0, 1), buffer[1].transpose(0, 1)


def _like(buffer: KV, receives: tuple[Message, ...]) -> KV:
    """An empty buffer for what the messages bring."""
    rows = sum(len(message.slots) for message in receives)
    k, v = buffer
    return k.new_empty(rows, *k.shape[1:]), v.new_empty(rows, *v.shape[1:])


def _zeros_like(buffer: KV, dtype: torch.dtype) -> KV:
    k, v = buffer
    return torch.zeros(k.shape, dtype=dtype, device=k.device), torch.zeros(v.shape, dtype=dtype, device=v.device)


def _empty_rows(buffer: KV, message: Message) -> KV:
    k, v = buffer
    return k.new_empty(len(message.slots), *k.shape[1:]), v.new_empty(len(message.slots), *v.shape[1:])


def _outgoing(messages: Iterable[Message], buffer: KV) -> list[Peer]:
    return [Peer(message.peer, message.slots.take(x).contiguous()) for message in messages for x in buffer]


def _incoming(messages: Iterable[Message], buffer: KV) -> list[Peer]:
    return [Peer(message.peer, message.slots.take(x)) for message in messages for x in buffer]
