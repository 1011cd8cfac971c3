"""Calls that are like an earlier one whose passes are recorded: a key, a look-up, the ranks' check, and the replay.

A call asks the same questions each time: whether its input is good, what its rank does, whether a recording explains it. Here the answers
are kept with everything that they depend on. `replay_of` runs a call for which all of that is the same as before; any other goes the
long way, which says what is wrong with bad input. Ranks agree in each call, as on the long way, and with the same records.

Saved for the backward pass are the tensors of the long way, in its order: checkpointing may compute one call by either way.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as _modes_of_dispatch
from torch._C._functorch import peek_interpreter_stack

from .. import check
from ..device import local
from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..schedule.schedules import Schedule
from ..scores import Score
from .agree import agree, agree_backward, refusing
from .calls import RingCall
from .context import Context
from .op import attention, gradients_of, seen
from .order import label
from .rank_attention import RankAttention

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# as the caller gave them: layout, mask, schedule and softmax_scale
Options = tuple[Layout | None, Mask, Schedule | None, float | None]

_KEPT = 64
_NOT_ASKED = (False, False, False)
_UNMODIFIED = (None, None, None, None)


class ReadyCall:
    """A call whose forward pass is recorded, and its backward pass once that is.

    call: the one that went the long way. attention: what this rank does. agreed: what a rank alone saves of the agreement.
    """

    def __init__(self, call: RingCall, attention: RankAttention, seq_len: int, softmax_scale: float, forward: Any) -> None:
        assert call.known is not None
        self.call, self.attention, self.seq_len, self.softmax_scale = call, attention, seq_len, softmax_scale
        self.forward = forward
        self.facts, self.tokens, self.with_transport = call.known, call.tokens, attention.transport.recorded_with
        self.identity = call.identity(Score(softmax_scale))
        self.agreed = self.agreement(0)
        # what it is recorded for, and the recording
        self._backward: tuple[tuple, Any] | None = None

    def agreement(self, place: int) -> torch.Tensor:
        """As `op` saves it: the length of the whole sequence, the call's place, and its identity."""
        return torch.frombuffer(array("q", (self.seq_len, place, self.identity)), dtype=torch.int64)

    @property
    def holds(self) -> bool:
        """Whether exchanges are recorded as they would run now."""
        return self.call.alone or self.attention.transport.recorded_with == self.with_transport

    def results(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, addresses: list[int]) -> Results:
        """out, row_max and row_sum."""
        out, row_max, row_sum = self.forward(addresses)
        return out.contiguous(), row_max, row_sum

    def gradients(self, dout: torch.Tensor | None, drow_sum: torch.Tensor | None, saved: Any) -> tuple[torch.Tensor | None, ...]:
        """dq, dk and dv."""
        found = None if dout is None or drow_sum is not None or torch.is_grad_enabled() else self._replayed(dout, saved)
        if found is None:
            everything = *saved[:3], *_UNMODIFIED, *saved[3:]
            grads = dout, None, drow_sum
            found = gradients_of(self.call, self.softmax_scale, False, _NOT_ASKED, grads, everything)[:3]
            if dout is not None and drow_sum is None:
                self._learn(dout, saved)
        return tuple(found)

    def _replayed(self, dout: torch.Tensor, saved: Any) -> tuple[torch.Tensor, ...] | None:
        if self._backward is None or _watched():
            return None
        key, addresses = _told(_given(dout, saved))
        agreed = saved[-1].tolist()
        # another identity is an error of the long way's
        if key != self._backward[0] or agreed != [self.seq_len, agreed[1], self.identity] or not self.holds:
            return None
        if self.call.alone:
            return self._backward[1](addresses)
        ranks = self.call.context.ranks
        with self.call.turn:
            with refusing(ranks):
                ranks.order.check()
            agree_backward(ranks, self.facts, agreed[1])
            return self._backward[1](addresses)

    def _learn(self, dout: torch.Tensor, saved: Any) -> None:
        """Keep the recording of a backward pass that has gone the long way."""
        given = _given(dout, saved)
        key, _ = _told(given)
        if key is None or not self.holds or _watched() or not all(type(x) in check.PLAIN for x in given):
            return
        found = local.recorded(self.attention.replays or {}, ("backward", self.softmax_scale, self.with_transport), given)
        if found is not None:
            self._backward = key, found


class _Replayed(torch.autograd.Function):
    """A forward pass that is replayed, with a backward pass."""

    @staticmethod
    def forward(
        ctx: Any, ready: ReadyCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, addresses: list[int], agreed: torch.Tensor
    ) -> Results:
        results = ready.results(q, k, v, addresses)
        ctx.save_for_backward(q, k, v, *results, agreed)
        ctx.ready = ready
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dout, _, drow_sum = grads
        return None, *ctx.ready.gradients(dout, drow_sum, ctx.saved_tensors), None, None


# what torch's `apply` calls in the end, after it has looked for transforms
_apply: Any = super(torch.autograd.Function, _Replayed).apply  # pyright: ignore[reportAttributeAccessIssue]


def replay_of(
    context: Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, name: str | None
) -> Results | None:
    """The results of a call, if it is like one whose passes are recorded; None if it has to go the long way. Differentiable."""
    if not context.ready or not (name is None or type(name) is str):
        return None
    key, addresses = _key(q, k, v, options)
    if key is None:
        return None
    # calls of many layers are alike, and comparing keys costs less than hashing them
    latest = context.latest_ready
    ready = latest[1] if latest is not None and latest[0] == key else context.ready.get(key)
    if ready is None:
        return None
    context.latest_ready = key, ready
    context.use(ready.attention)
    ranks = context.ranks
    if ranks.size == 1:
        return _run(ready, key, q, k, v, addresses, ready.agreed)
    with context.turn:
        with refusing(ranks):
            ranks.order.check()
        place = label(name)
        tokens, number = agree(ranks, ready.facts, q.shape[1], place)
        ranks.connect(q.device)
        if tokens == ready.tokens and ready.holds:
            return _run(ready, key, q, k, v, addresses, ready.agreement(number))
        # other ranks have other shards than before
        layout, mask, schedule, _ = options
        call = RingCall(context, layout, mask, schedule, place)
        call.agreed = tokens, number
        return attention(q, k, v, call, ready.softmax_scale)


def learn(
    context: Context, call: RingCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, softmax_scale: float
) -> None:
    """Keep a call that has gone the long way, if its forward pass is recorded by now."""
    if call.known is None or call.known_attention is None:
        return
    seq_len, rank_attention = call.known_attention
    of_transport = rank_attention.transport.recorded_with
    if not rank_attention.replays or of_transport is None:
        return
    found = local.recorded(rank_attention.replays, ("forward", softmax_scale, of_transport), (q, k, v))
    key, _ = _key(q, k, v, options) if found is not None else (None, [])
    if key is not None and not seen(q, k, v):
        if len(context.ready) >= _KEPT:
            context.ready = {}
        context.ready[key] = ReadyCall(call, rank_attention, seq_len, softmax_scale, found)


def _run(
    ready: ReadyCall, key: tuple, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, addresses: list[int], agreed: torch.Tensor
) -> Results:
    needs_grad = key[0]
    return _apply(ready, q, k, v, addresses, agreed) if needs_grad else ready.results(q, k, v, addresses)


def _key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[tuple | None, list[int]]:
    """Whether gradients are needed, with all that the checks, the plan and the recording of a call depend on; and the addresses.

    None instead where any of it cannot be told, or where torch watches: such a call goes the long way.
    """
    layout, mask, schedule, softmax_scale = options
    if not (softmax_scale is None or type(softmax_scale) is float) or _watched() or check.in_forward_mode():
        return None, []
    told, addresses = _told((q, k, v))
    if told is None:
        return None, []
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    try:
        # equal digests are of equal values of one class
        named = None if layout is None else layout.digest, mask.digest, None if schedule is None else schedule.digest
    except AttributeError:
        return None, []
    return (needs_grad, told, named, softmax_scale), addresses


def _told(inputs: tuple[torch.Tensor, ...]) -> tuple[tuple | None, list[int]]:
    """What a recording depends on, and of inputs all but their values and addresses; and the addresses. None where it cannot be told."""
    try:
        # tensors without memory, or with several, have no address or no strides
        addresses = [x.data_ptr() for x in inputs]
        kinds = [(type(x), x.shape, x.stride(), x.dtype, x.device, not a % 16) for x, a in zip(inputs, addresses)]
    except (AttributeError, RuntimeError, TypeError):
        return None, []
    now = local.state_of_replays()
    # inputs at one address would be taken for one another
    return (None if now is None or len(set(addresses)) < len(addresses) else (now, *kinds)), addresses


def _given(dout: torch.Tensor, saved: Any) -> tuple[torch.Tensor, ...]:
    """The inputs of a backward pass as `op` gives them to be recorded."""
    q, k, v, out, row_max, row_sum, _ = saved
    return q, k, v, dout, out, row_max, row_sum


def _watched() -> bool:
    """Whether torch must see operators (see `op.seen`)."""
    return _modes_of_dispatch() > 0 or peek_interpreter_stack() is not None
