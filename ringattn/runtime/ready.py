"""Calls that are like an earlier one whose passes are recorded: a key, a look-up, the ranks' check, and the replay.

A call asks the same questions each time: whether its input is good, what its rank does, whether a recording explains it. Here the answers
are kept with everything that they depend on. `replay_of` runs a call for which all of that is the same as before; any other goes the
long way, which says what is wrong with bad input. Ranks agree in each call, as on the long way, and with the same records. But launches
that wait for nothing are queued before the others' records are read.

Calls of many layers get the same layout and mask, or equal ones, and come from the same line: what the latest calls had is compared first.

Saved for the backward pass are the tensors of the long way, in its order: checkpointing may compute one call by either way.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _len_torch_dispatch_stack as _modes_of_dispatch
from torch._C._functorch import peek_interpreter_stack

from .. import check
from ..device import local
from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..schedule.schedules import Schedule
from ..scores import Score, ScoreKind, ScoreMod
from ..transport import Ranks
from .agree import Agreement, OtherShards, agreeing_backward, refusing
from .calls import RingCall
from .context import Context
from .op import Modifying, attention, gradients_of, seen
from .order import UNKNOWN, CallOrder, Label, label, line_from
from .rank_attention import RankAttention, Wanted

if TYPE_CHECKING:
    from types import CodeType

    from ringattn_kernels.recordings import InputKinds

# q, k and v; then slopes, values of a bias and sinks, where there are any
Tensors = tuple[torch.Tensor, ...]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# as the caller gave them: layout, mask, schedule and softmax_scale; and the kind of what is done to scores
Options = tuple[Layout | None, Mask, Schedule | None, float | None, ScoreKind | None]

_KEPT = 64
_RECENT = 32
_AT_A_TIME = 32
_KINDS = 4
_NAMED = 2  # the place of `_named` in a key


class ReadyCall:
    """A call whose forward pass is recorded, and its backward pass once that is.

    call: the one that went the long way. attention: what this rank does. score: that of the call. modifying: its tensors, as `op` takes
    them. agreed: what a rank alone saves of the agreement.
    """

    def __init__(
        self, call: RingCall, attention: RankAttention, seq_len: int, score: Score, modifying: Modifying, forward: Any
    ) -> None:
        assert call.known is not None
        self.call, self.attention, self.seq_len, self.softmax_scale = call, attention, seq_len, score.softmax_scale
        self._given = tuple([x is not None for x in modifying])
        self.forward = forward
        # out, row_max and row_sum from addresses of inputs, and what is called before anything moves between ranks, unless a rank is alone
        self.results: Callable[..., Results] = forward if forward.contiguous else partial(_contiguous, forward)
        self._post = call.context.ranks.posting(local.quick_records())
        self.facts, self.tokens, self.with_transport = call.known, call.tokens, attention.transport.recorded_with
        self._own_tokens = self.tokens[call.context.ranks.rank]
        self.identity = call.identity(score)
        self._agreements: list[torch.Tensor] = []  # of calls to come, and their memory
        self._agreed_numbers = array("q")
        self.agreed = self.agreement(0)
        # what it is recorded for, and the recording
        self._backward: tuple[InputKinds, Any] | None = None

    def agreement(self, place: int) -> torch.Tensor:
        """As `op` saves it: the length of the whole sequence, the call's place, and its identity. They are made many at a time."""
        if not self._agreements:
            numbers = self._agreed_numbers = array("q", (self.seq_len, 0, self.identity) * _AT_A_TIME)
            self._agreements = list(torch.frombuffer(numbers, dtype=torch.int64).view(_AT_A_TIME, 3).unbind())
        self._agreed_numbers[3 * len(self._agreements) - 2] = place
        return self._agreements.pop()

    @property
    def holds(self) -> bool:
        """Whether exchanges are recorded as they would run now."""
        return self.call.alone or self.attention.transport.recorded_with == self.with_transport

    def agreement_on(self, label: Label) -> Agreement:
        """Of the ranks, in a turn of this call."""
        ranks = self.call.context.ranks
        if ranks.order.two_threads:
            _refuse_threads(ranks)
        return Agreement(ranks, self.facts, self._own_tokens, label, self._post, self.tokens)

    def modifying(self, tensors: Sequence[torch.Tensor]) -> Modifying:
        """The tensors of a score as `op` takes them: None where there is none."""
        left = iter(tensors)
        slopes, values, sinks, seed = [next(left) if given else None for given in self._given]
        return slopes, values, sinks, seed

    def gradients(
        self, dout: torch.Tensor | None, drow_sum: torch.Tensor | None, wanted: Sequence[bool], saved: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """dq, dk, dv, and the gradients of the score's tensors, of which some are wanted."""
        found = None
        if dout is not None and drow_sum is None and not torch.is_grad_enabled():
            found = self._replayed(dout, saved)
            if found is None and self._learn(dout, wanted, saved):
                found = self._replayed(dout, saved)
        if found is not None:
            learned = iter(found[3:])
            return found if not wanted else (*found[:3], *[next(learned) if asked else None for asked in wanted])
        q, k, v, *tensors, out, row_max, row_sum, agreed = saved
        everything = q, k, v, *self.modifying(tensors), out, row_max, row_sum, agreed
        grads = dout, None, drow_sum
        dq, dk, dv, *others = gradients_of(self.call, self.softmax_scale, False, self._of_each(wanted), grads, everything)
        return dq, dk, dv, *[x for x, given in zip(others, self._given) if given]

    def _of_each(self, wanted: Sequence[bool]) -> Wanted:
        """Of the tensors that there are, as of slopes, values and sinks."""
        left = iter(wanted)
        return tuple([given and next(left) for given in self._given[:3]])

    def _replayed(self, dout: torch.Tensor, saved: Any) -> tuple[torch.Tensor, ...] | None:
        if self._backward is None:
            return None
        inputs, recording = self._backward
        rows, tensors = _inputs_of_backward(dout, saved)
        addresses = inputs.addresses((*rows, *tensors))
        seq_len, place, identity = saved[-1].tolist()
        # another identity is an error of the long way's
        if addresses is None or seq_len != self.seq_len or identity != self.identity or not self.holds:
            return None
        if self.call.alone:
            return recording(addresses)
        ranks = self.call.context.ranks
        with self.call.turn:
            if ranks.order.two_threads:
                _refuse_threads(ranks)
            return recording(addresses, agreeing_backward(ranks, self.facts, place, self._post))

    def _learn(self, dout: torch.Tensor, wanted: Sequence[bool], saved: Any) -> bool:
        """Keep the recording that a backward pass on the long way would replay; whether there is one."""
        rows, tensors = _inputs_of_backward(dout, saved)
        given = *rows, *tensors
        if not self.holds or _watched() or not all(type(x) in check.PLAIN for x in given):
            return False
        score = self.call.score(self.softmax_scale, rows[0].shape[2], *self.modifying(tensors))
        found = self.attention.recorded_gradients(score, self._of_each(wanted), rows)
        inputs = None if found is None else _inputs(given)
        if inputs is None:
            return False
        self._backward = inputs, found
        return True


def _equal(x: object, known: object) -> bool:
    """Whether they are equal values: callers may make the same mask in each call. What is no mask, such as an array, is not compared."""
    return type(x) is type(known) and x == known


def _contiguous(forward: Any, addresses: list[int], agree: Agreement | None = None) -> Results:
    out, row_max, row_sum = forward(addresses, agree)
    return out.contiguous(), row_max, row_sum


class _Replayed(torch.autograd.Function):
    """A forward pass that is replayed, with a backward pass."""

    @staticmethod
    def forward(ctx: Any, ready: ReadyCall, addresses: list[int], agree: Agreement | None, *inputs: torch.Tensor) -> Results:
        results = ready.results(addresses, agree)
        agreed = ready.agreed if agree is None else ready.agreement(agree.place)
        ctx.save_for_backward(*inputs, *results, agreed)
        ctx.ready = ready
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dout, _, drow_sum = grads
        return None, None, None, *ctx.ready.gradients(dout, drow_sum, ctx.needs_input_grad[6:], ctx.saved_tensors)


# what torch's `apply` calls in the end, after it has looked for transforms
_apply: Any = super(torch.autograd.Function, _Replayed).apply  # pyrefly: ignore[missing-attribute]


class Known:
    """A call of late that was replayed: what it was given, whether gradients were needed, and the line that called."""

    __slots__ = (
        "_addresses", "_caller", "_grad_enabled", "_kind", "_label", "_layout", "_mask", "_needs_grad", "_schedule", "_softmax_scale",
        "ready",
    )  # fmt: skip

    def __init__(self, key: tuple, options: Options, ready: ReadyCall) -> None:
        self._needs_grad, inputs, *_ = key
        # of inputs that need gradients as these do
        self._addresses, self._grad_enabled = inputs.addresses, torch.is_grad_enabled()
        # values that do not change: the same ones are equal ones
        self._layout, self._mask, self._schedule, self._softmax_scale, self._kind = options
        self.ready = ready
        self._caller: tuple[CodeType, int] | None = None
        self._label = UNKNOWN

    def addresses(self, inputs: Tensors, options: Options) -> list[int] | None:
        """Those of the inputs of a call, if the call is like this one; else None."""
        layout, mask, schedule, softmax_scale, kind = options
        if kind is not self._kind:  # equal kinds are one
            return None
        if mask is not self._mask and not _equal(mask, self._mask):
            return None
        if layout is not self._layout and not _equal(layout, self._layout):
            return None
        if schedule is not self._schedule and not _equal(schedule, self._schedule):
            return None
        if softmax_scale is not self._softmax_scale and not (type(softmax_scale) is float and softmax_scale == self._softmax_scale):
            return None
        return self._addresses(inputs) if torch.is_grad_enabled() is self._grad_enabled else None

    def label(self, name: str | None) -> Label:
        """The label of a call with this name by whoever calls `ring_attention`, three frames up."""
        if name is not None:
            return label(name)
        frame = sys._getframe(3)
        code, at = frame.f_code, frame.f_lasti
        if self._caller is None or self._caller[0] is not code or self._caller[1] != at:
            line, found = line_from(frame)
            if found is not frame:  # a line of ringattn, which others call
                return line
            self._caller, self._label = (code, at), line
        return self._label

    def run(self, inputs: Tensors, addresses: list[int], agree: Agreement | None = None) -> Results:
        """out, row_max and row_sum; see `ReadyCall`."""
        if not self._needs_grad:
            return self.ready.results(addresses, agree)
        return _apply(self.ready, addresses, agree, *inputs)


def replay_of(
    context: Context,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    score: ScoreMod | None,
    name: str | None,
) -> Results | None:
    """The results of a call, if it is like one whose passes are recorded; None if it has to go the long way. Differentiable."""
    if not context.ready or not (name is None or type(name) is str):
        return None
    inputs: Tensors = (q, k, v)
    if score is not None:
        if type(q) not in check.PLAIN:
            return None
        inputs = *inputs, *_present(score.tensors(torch.promote_types(q.dtype, torch.float32)))
    for number, known in enumerate(context.latest_ready):
        # a model's layers are of few kinds; a batch never seen has a mask that no call had, and is not compared with all the rest
        if number == _KINDS and not _is_named(context, options):
            return None
        addresses = known.addresses(inputs, options)
        if addresses is not None:
            break
    else:
        known = _known(context, inputs, options)
        addresses = None if known is None else known.addresses(inputs, options)
        if known is None or addresses is None:
            return None
    ready = known.ready
    latest = context.latest_attention
    if latest is None or latest[1] is not ready.attention:
        context.use(ready.attention)
    if ready.call.alone:
        return known.run(inputs, addresses)
    if not ready.holds:
        return None
    with context.turn:
        place = known.label(name)
        try:
            return known.run(inputs, addresses, ready.agreement_on(place))
        except OtherShards as found:
            agreed = found.agreed
        layout, mask, schedule, _, kind = options
        call = RingCall(context, layout, mask, schedule, place, kind)
        call.agreed = agreed
        return attention(q, k, v, call, ready.softmax_scale, ready.modifying(inputs[3:]))


def learn(
    context: Context,
    call: RingCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    softmax_scale: float,
    modifying: Modifying,
) -> None:
    """Keep a call that has gone the long way, if its forward pass is recorded by now."""
    if call.known is None or call.known_attention is None:
        return
    seq_len, rank_attention = call.known_attention
    if not rank_attention.replays:
        return
    score = call.score(softmax_scale, q.shape[2], *modifying)
    found = rank_attention.recorded_results(score, q, k, v)
    inputs = q, k, v, *_present(modifying)
    key = None if found is None else _key(inputs, options)
    if key is not None and not seen(q, k, v):
        if len(context.ready) >= _KEPT:
            context.ready, context.latest_ready = {}, []
        context.ready[key] = ReadyCall(call, rank_attention, seq_len, score, modifying, found)


def _present(modifying: Modifying) -> list[torch.Tensor]:
    return [x for x in modifying if x is not None]


def _known(context: Context, inputs: Tensors, options: Options) -> Known | None:
    """What is kept of a call like this one, which becomes the latest one."""
    key = _key(inputs, options)
    ready = None if key is None else context.ready.get(key)
    if key is None or ready is None:
        return None
    context.repeats.again()
    known = Known(key, options, ready)
    context.latest_ready = [known, *context.latest_ready[: _RECENT - 1]]
    return known


def _is_named(context: Context, options: Options) -> bool:
    """Whether a call that is kept had this layout, mask and schedule."""
    named = _named(options)
    return any(key[_NAMED] == named for key in context.ready)


def _named(options: Options) -> tuple[str | None, str, str | None] | None:
    """Layout, mask and schedule by their digests, of which equal ones are of equal values of one class; None for what is none of these."""
    layout, mask, schedule, _, _ = options
    try:
        return None if layout is None else layout.digest, mask.digest, None if schedule is None else schedule.digest
    except AttributeError:
        return None


def _key(inputs: Tensors, options: Options) -> tuple | None:
    """Whether gradients are needed, and all that the checks, the plan and the recording of a call depend on; None if it cannot be told."""
    *_, softmax_scale, kind = options
    if not (softmax_scale is None or type(softmax_scale) is float) or _watched() or check.in_forward_mode():
        return None
    named, told = _named(options), _inputs(inputs)
    return None if named is None or told is None else (_need_grad(inputs), told, named, softmax_scale, kind)


def _need_grad(inputs: Tensors) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _inputs(inputs: tuple[torch.Tensor, ...]) -> InputKinds | None:
    """What a recording depends on, and of inputs all but their values and addresses; None where it cannot be told."""
    now = local.state_of_replays()
    try:
        return None if now is None else local.inputs_of_replays(now, inputs, _UNWATCHED)
    except ValueError:
        return None


def _refuse_threads(ranks: Ranks) -> None:
    """Raise ValueError, on every rank, because two threads have called at once."""
    order: CallOrder = ranks.order
    with refusing(ranks):
        order.check()


def _inputs_of_backward(dout: torch.Tensor, saved: Any) -> tuple[Tensors, list[torch.Tensor]]:
    """Rows as `RankAttention.gradients` takes them, and the tensors of the score."""
    q, k, v, *tensors, out, row_max, row_sum, _ = saved
    return (q, k, v, dout, out, row_max, row_sum), tensors


def _watched() -> bool:
    """Whether torch must see operators (see `op.seen`)."""
    return _modes_of_dispatch() > 0 or peek_interpreter_stack() is not None


# the same, and that this is no forward-mode AD, as `InputKinds` asks in each call
_UNWATCHED = (_modes_of_dispatch, None, 0), (peek_interpreter_stack, None, None), (check.in_forward_mode, None, False)
