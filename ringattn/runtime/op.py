"""Attention as two operators of torch, `ringattn::forward` and `ringattn::backward`.

torch.compile, selective checkpointing and fake tensors see each operator as one call whose result has a known shape. They see nothing of
what happens inside, from the ranks' agreement to the last hop. Operators take tensors and numbers only, so all else is a `Call`, found by
its number. Where nothing of torch watches, the same functions run without dispatch.

Shapes: b batch, s local tokens, h query heads, hk key/value heads, d head dim, d_v value head dim. `agreed` is (3,): the length of the
whole sequence, the call's place in the group's order, and the identity of the call that computed the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as _modes_of_dispatch
from torch._C._functorch import peek_interpreter_stack

from .. import check
from ..scores import Score
from .calls import Call, find_call

# slopes, values, sinks and seed, of `ScoreMod.tensors`
Modifying = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
UNMODIFIED: Modifying = (None, None, None, None)
_AS_IT_IS = nullcontext()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: int | Call, softmax_scale: float, modifying: Modifying = UNMODIFIED
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out (b, s, h, d_v), row_max and row_sum (b, h, s) of a `Call`, or of the one with the number `call`. Differentiable."""
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or _requires_grad(*modifying[:3])
    )
    if torch.compiler.is_compiling() or seen(q, k, v):
        number = call if isinstance(call, int) else call.number
        out, row_max, row_sum, _ = FORWARD(q, k, v, *modifying, number, softmax_scale, needs_grad)
    elif needs_grad:
        out, row_max, row_sum = _apply(_forward, q, k, v, *modifying, call, softmax_scale, True)
    else:
        out, row_max, row_sum, _ = _forward(q, k, v, *modifying, call, softmax_scale, False)
    return out, row_max, row_sum


def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch must see the operators: in a transform or a mode of dispatch, and for tensors of other classes or without data.

    Else operators would cost the host as much as all that a call does besides its launches.
    """
    plain = type(q) in check.PLAIN and type(k) in check.PLAIN and type(v) in check.PLAIN and not q.is_meta
    return not plain or _modes_of_dispatch() > 0 or peek_interpreter_stack() is not None


def _requires_grad(*learned: torch.Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in learned)


_library = torch.library.Library("ringattn", "DEF")
# keeps the operators out of the CUDA graphs that torch.compile makes (torch 2.8 on): ranks must agree in every call, and what the first
# call makes must outlive the graph's memory
_TAGS = [torch.Tag.pt2_compliant_tag, *([torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else [])]
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor? values, Tensor? sinks, Tensor? seed, int call, float softmax_scale,"
    " bool needs_grad) -> (Tensor out, Tensor row_max, Tensor row_sum, Tensor agreed)",
    tags=_TAGS,
)
_library.define(
    "backward(Tensor? dout, Tensor? drow_sum, Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor? values, Tensor? sinks, Tensor? seed,"
    " Tensor out, Tensor row_max, Tensor row_sum, Tensor agreed, int call, float softmax_scale, bool[] wanted)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dslopes, Tensor dvalues, Tensor dsinks)",
    tags=_TAGS,
)
FORWARD = torch.ops.ringattn.forward.default
BACKWARD = torch.ops.ringattn.backward.default


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    values: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    number: int | Call,
    softmax_scale: float,
    needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    call = find_call(number)
    score = Score(softmax_scale) if call.kind is None else call.score(softmax_scale, q.shape[2], slopes, values, sinks, seed)
    # autocast would round the state between hops
    with call.turn, without_autocast(q.device.type):
        seq_len, place = call.begin(q, k, v, score, needs_grad)
        out, row_max, row_sum = call.rank_attention(seq_len, q, k, v).results(score, q, k, v, final=call.final)
    # for the backward pass; a tensor, because a compiled graph makes many calls under one number, and checkpointing may make it anew
    agreed = torch.frombuffer(array("q", (seq_len, place, call.identity(score))), dtype=torch.int64)
    return out.contiguous(), row_max, row_sum, agreed


def _forward_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any, values: Any, sinks: Any, seed: Any, number: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    b, s, h, _ = q.shape
    stats = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(b, s, h, v.shape[3], dtype=q.dtype if find_call(number).final else stats)
    row_max, row_sum = (q.new_empty(b, h, s, dtype=stats) for _ in range(2))
    return out, row_max, row_sum, torch.empty(3, dtype=torch.int64, device="cpu")


def _backward(
    dout: torch.Tensor | None,
    drow_sum: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    values: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    out: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    agreed: torch.Tensor,
    number: int | Call,
    softmax_scale: float,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    # wanted: whether the gradients of slopes, values and sinks are asked for
    call = find_call(number)
    score = Score(softmax_scale) if call.kind is None else call.score(softmax_scale, q.shape[2], slopes, values, sinks, seed)
    seq_len, place, made_by = agreed.tolist()
    if made_by != call.identity(score):
        call.refuse(
            ValueError(
                "a checkpointed module attended in the backward pass with another layout, mask, schedule or scale than in its forward "
                "pass: call backward before you change them, or checkpoint with ringattn.checkpoint_layers"
            )
        )
    # kernels read what lies in memory
    dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
    drow_sum = None if drow_sum is None else drow_sum.resolve_neg()
    with call.turn, without_autocast(q.device.type):
        call.begin_backward(q, k, v, score, place)
        rank_attention = call.rank_attention(seq_len, q, k, v)
        if dout.is_cuda and dout.dtype != q.dtype:
            dout = dout.to(q.dtype)  # kernels multiply it by v; a partial's is fp32
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        rows, there = (q, k, v, dout, out, row_max, row_sum), (slopes, values, sinks)
        asked = tuple([flag and x is not None for flag, x in zip(wanted, there)])
        dq, dk, dv, *learned = rank_attention.gradients(score, asked, rows, drow_sum)
    found = iter(learned)
    return dq, dk, dv, *[next(found) if flag else None for flag in asked]


def _backward_operator(
    dout: torch.Tensor | None, drow_sum: torch.Tensor | None, q: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    k, v, number = rest[0], rest[1], rest[-3]
    strides = _gradient_strides(q, k, v, find_call(number).alone)
    gradients: tuple[Any, ...] = _backward(dout, drow_sum, q, *rest)
    dq, dk, dv = [x if x.stride() == wanted else _with_strides(x, wanted) for x, wanted in zip(gradients[:3], strides, strict=True)]
    # an operator returns tensors: what is not asked for is empty
    return dq, dk, dv, *[q.new_empty(0) if x is None else x for x in gradients[3:]]


def _backward_shapes(
    dout: torch.Tensor | None,
    drow_sum: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    values: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    strides = _gradient_strides(q, k, v, find_call(rest[-3]).alone)
    gradients = (x.new_empty_strided(x.shape, like) for x, like in zip((q, k, v), strides, strict=True))
    others = zip((slopes, values, sinks), rest[-1], strict=True)
    return *gradients, *(torch.empty_like(x) if x is not None and asked else q.new_empty(0) for x, asked in others)


class _Attention(torch.autograd.Function):
    """`run`, which is `_forward` or its operator, with a backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., tuple[torch.Tensor, ...]],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slopes: torch.Tensor | None,
        values: torch.Tensor | None,
        sinks: torch.Tensor | None,
        seed: torch.Tensor | None,
        number: int | Call,
        softmax_scale: float,
        needs_grad: bool,
    ) -> tuple[torch.Tensor, ...]:
        output = run(q, k, v, slopes, values, sinks, seed, number, softmax_scale, needs_grad)
        ctx.save_for_backward(q, k, v, slopes, values, sinks, seed, *output)
        call = find_call(number)
        ctx.call, ctx.softmax_scale, ctx.captured = call, softmax_scale, not call.alone and check.captured(q)
        ctx.set_materialize_grads(False)
        if run is _forward:
            # one output less to wrap: `agreed` is for the backward pass alone
            ctx.mark_non_differentiable(output[1])
            return output[:3]
        ctx.mark_non_differentiable(output[1], output[3])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[4:7]
        gradients = gradients_of(ctx.call, ctx.softmax_scale, ctx.captured, wanted, grads, ctx.saved_tensors)
        return None, *gradients, None, None, None, None


def gradients_of(
    call: Call, softmax_scale: float, captured: bool, wanted: Sequence[bool], grads: Sequence[torch.Tensor | None], saved: Any
) -> list[torch.Tensor | None]:
    """The gradients of q, k, v, slopes, values and sinks. captured: whether the forward pass was. saved: what it saved."""
    if torch.is_grad_enabled():
        call.refuse(ValueError("ring attention has no second derivative: call backward without create_graph=True"))
    dout, _, drow_sum, *_ = grads
    if not call.alone:
        call.check_backward(check.captured(saved[0]), captured)
    if torch.compiler.is_compiling() or seen(*saved[:3]):
        dq, dk, dv, *others = BACKWARD(dout, drow_sum, *saved, call.number, softmax_scale, wanted)
    else:
        run: Any = _backward
        dq, dk, dv, *others = run(dout, drow_sum, *saved, call, softmax_scale, wanted)
    return [dq, dk, dv, *[x if asked else None for x, asked in zip(others, wanted)]]


# what torch's `apply` calls in the end, after it has looked for the transforms that `seen` knows of
_apply: Any = super(torch.autograd.Function, _Attention).apply  # pyrefly: ignore[missing-attribute]


def _forward_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any, values: Any, sinks: Any, *rest: Any
) -> tuple[torch.Tensor, ...]:
    # does what torch.library.register_autograd would, in a third of its time a call
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _requires_grad(slopes, values, sinks)):
        return _Attention.apply(_below_autograd, q, k, v, slopes, values, sinks, *rest)
    return _below_autograd(q, k, v, slopes, values, sinks, *rest)


def _below_autograd(*arguments: Any) -> tuple[torch.Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return FORWARD(*arguments)


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("forward", _forward_autograd, "Autograd")
_library.impl("backward", _backward_operator, "CompositeExplicitAutograd")
torch.library.register_fake("ringattn::forward", _forward_shapes, lib=_library)
torch.library.register_fake("ringattn::backward", _backward_shapes, lib=_library)


def without_autocast(device_type: str) -> AbstractContextManager:
    # torch knows no autocast of meta tensors, whose numbers nothing rounds
    on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else _AS_IT_IS


def in_one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast in its dtype, as torch's own attention runs: norms and rotary embeddings leave q and k in fp32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


def _gradient_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alone: bool) -> list[tuple[int, ...]]:
    """The strides of the gradients as the passes return them: dq like q; dk and dv contiguous, with their rows first if there are other
    ranks."""
    like_q = q
    if not q.is_contiguous():
        like_q = torch.empty_like(q, device="meta") if q.stride(-1) == 1 else q.new_empty(q.shape, device="meta")
    strides = [like_q.stride()]
    for b, s, hk, d in (k.shape, v.shape):
        strides.append((s * hk * d, hk * d, d, 1) if alone else (hk * d, b * hk * d, d, 1))
    return strides


def _with_strides(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """x with these strides, which a compiled graph relies on. Strides of dimensions of size 1 do not matter."""
    if not x.numel():
        return x
    same = all(size == 1 or has == wanted for size, has, wanted in zip(x.shape, x.stride(), strides, strict=True))
    return x if same else x.new_empty_strided(x.shape, strides).copy_(x)
