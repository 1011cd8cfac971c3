"""`linear_attention`: a recurrence over a sequence that is sharded over ranks, on the layouts of `ring_attention`.

Each rank runs its segments from zero, which gives their outputs, their total transitions and the states that they end with. One exchange of
the latter two gives each segment the state that it really begins with. As the recurrence is linear in the state, its outputs then grow by
`state_queries @ state`, a matrix product: all else is done before the exchange is waited for.

The backward pass runs segments again, from the states that they begin with, while the gradients of states pass the other way. Segments
that begin documents began from theirs in the forward pass: fla's kernels keep what their backward pass needs of these. So they do of tails,
the rows of segments that follow others which decays let no state before the segment reach (`reach.py`): all else is about their heads.

Shapes: b batch, s tokens of this rank, hk heads of q and k, h heads of v, n documents; states (b, h, d_k, d_v).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from .. import check
from ..geometry.layout import Layout
from ..geometry.mask import Documents, Mask
from ..runtime.agree import refusing
from ..runtime.graph_breaks import breaks_graphs
from ..runtime.groups import Group, get_context
from ..runtime.op import without_autocast
from .calls import DEFAULT_MASK, CheckedCall, agree_on_segments, check_call
from .checks import check_states, check_tensors, overflow
from .kernels import RecurrenceKernels, check_kernels, choose_kernels
from .local import (
    Continued,
    FromStates,
    FromZero,
    InputGradients,
    RecurrenceInputs,
    StateReading,
    first_states,
    joined,
    reading_of,
    rows_from_states,
)
from .reach import reaches
from .recomputed import gradients_of, leaves_of, saving_is_hooked
from .segments import OwnSegments, Segments
from .state_passing import StatePassing, Summary
from .transitions import Decays, Matrices


@overload
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    decay: torch.Tensor | None = ...,
    beta: torch.Tensor | None = ...,
    layout: Layout | None = ...,
    mask: Mask | None = ...,
    group: Group | None = ...,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    name: str | None = ...,
    kernels: RecurrenceKernels | None = ...,
    return_final_state: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    decay: torch.Tensor | None = ...,
    beta: torch.Tensor | None = ...,
    layout: Layout | None = ...,
    mask: Mask | None = ...,
    group: Group | None = ...,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    name: str | None = ...,
    kernels: RecurrenceKernels | None = ...,
    return_final_state: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@breaks_graphs
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    layout: Layout | None = None,
    mask: Mask | None = None,
    group: Group | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    name: str | None = None,
    kernels: RecurrenceKernels | None = None,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A layer whose memory is a state, over the whole sequence, of which each rank holds a shard. A differentiable collective.

    Token t decays the head's state h, a matrix (d_k, d_v), writes to it, and reads it:

        h = exp(decay_t) h;  u = v_t, or with beta u = beta_t (v_t - k_t^T h);  h = h + k_t u^T;  out_t = scale q_t^T h

    | decay | beta | layer |
    |---|---|---|
    | none | none | linear attention without its normaliser (Katharopoulos et al. 2020) |
    | a number a head | none | RetNet (Sun et al. 2023), Mamba-2's SSD (Dao and Gu 2024) |
    | a vector over d_k | none | GLA (Yang et al. 2023) |
    | none | yes | DeltaNet (Schlag et al. 2021; Yang et al. 2024) |
    | a number a head | yes | Gated DeltaNet (Yang et al. 2024), the layers of Qwen3-Next |
    | a vector over d_k | yes | KDA (Kimi Team 2025) |

    Args:
        q, k: (b, s_local, hk, d_k), bf16, fp16 or fp32, or fp64 on CPU, with h % hk == 0; d_k up to 512.
        v: (b, s_local, h, d_v), d_v up to 512.
        decay: natural logarithms of decays, at most 0; -inf erases. (b, s_local, h), or (b, s_local, h, d_k), or (h,) for constants.
        beta: (b, s_local, h), how much the delta rule writes. Normalise k then: with beta |k|^2 above 2 states may grow without bound.
        layout: which rank holds which positions, in runs of consecutive tokens: not `striped`. By default as for `ring_attention`.
        mask: `causal()`, the default, or `documents(...)`, which begin with states of their own. Tokens after the last document get 0.
        group: as for `ring_attention`, but for grids.
        scale: of q; 1/sqrt(d_k) by default. Mamba-2 has 1.
        initial_state: (b, h, d_k, d_v), or (b, n, h, d_k, d_v) for n documents, the same on every rank; zeros by default.
        name: what this call is called on every rank, as for `ring_attention`.
        kernels: what computes a rank's own tokens: `torch_kernels()`, or `fla_kernels()`, those of flash-linear-attention. None: fla's for
            bf16 and fp16 on GPUs where it is installed and can compute the call, else plain torch.
        return_final_state: also return the state after the last token, or after that of each document, in the shape of `initial_state`.

    Returns out (b, s_local, h, d_v) in q's dtype; with `return_final_state` also the states, on every rank. States are fp32, fp64 for fp64
    input, and so is all computation in plain torch. The gradient of a final state is the sum of all ranks' gradients. The gradient of
    `initial_state` is a part on each rank: their sum is the gradient; so is that of constant decays.

    Raises ValueError for bad input, and on every rank if ranks disagree or one refuses its input. On CPUs, also for a decay above 0, and
    for a state that overflows although all input is finite.

    >>> import torch, ringattn as ra
    >>> q, k, v = torch.randn(3, 1, 16, 2, 8).unbind()
    >>> k = torch.nn.functional.normalize(k, dim=-1)
    >>> ra.linear_attention(q, k, v, decay=-torch.rand(1, 16, 2), beta=torch.rand(1, 16, 2)).shape
    torch.Size([1, 16, 2, 8])
    """
    context, mask = get_context(group), DEFAULT_MASK if mask is None else mask
    with context.turn:
        with refusing(context.ranks):
            check.tensors(q, k, v)
            check_call(context, q, "q", layout, mask, name)
            check_tensors(q, k, v, decay, beta)
            check.flag("return_final_state", return_final_state)
            factor = q.shape[3] ** -0.5 if scale is None else check.number("scale", scale, advice=" or None")
            if initial_state is not None:
                check_states(initial_state, q, v, mask)
            if kernels is not None:
                check_kernels(kernels, q, v, decay, beta)
        chosen = choose_kernels(q, v, decay, beta) if kernels is None else kernels
        tensors = q, k, v, decay, beta, initial_state
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        facts: dict[str, Any] = {
            "function": "linear_attention",
            "number of key heads": k.shape[2],
            "number of value heads": v.shape[2],
            "head_dim": q.shape[3],
            "v's head_dim": v.shape[3],
            "decay": "none" if decay is None else "a vector over head_dim" if decay.dim() == 4 else "a number a head",
            "beta": "none" if beta is None else "given",
            "scale": factor,
            "kernels": repr(chosen),
            "initial_state": "none" if initial_state is None else "given",
            "return_final_state": return_final_state,
            "requires_grad": needs_grad,
        }
        agreed = agree_on_segments(context, q, layout, mask, name, facts)
        if decay is not None and decay.dim() == 1:
            decay = decay.expand(*v.shape[:3])
        if initial_state is not None and not isinstance(mask, Documents):
            initial_state = initial_state[:, None]
        call = _LinearCall(agreed, factor, return_final_state, chosen, needs_grad)
        out, last = _LinearAttention.apply(call, q, k, v, decay, beta, initial_state)
    if not return_final_state:
        return out
    return out, last if isinstance(mask, Documents) else last.squeeze(1)


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The heads of segments that follow others, and the tails of some: `cut`, by index. Without a tail the head is the whole segment."""

    heads: OwnSegments
    tails: OwnSegments
    cut: list[int]


@dataclass(frozen=True, eq=False)
class _LinearCall:
    """A call, and its options."""

    checked: CheckedCall
    scale: float
    last_states: bool
    kernels: RecurrenceKernels
    needs_grad: bool

    @property
    def own(self) -> OwnSegments:
        return self.checked.own

    @property
    def segments(self) -> Segments:
        return self.checked.segments

    def passing(self, inputs: RecurrenceInputs) -> StatePassing:
        """How this rank passes states."""
        transition = Matrices(inputs.k.shape[3]) if inputs.beta is not None else Decays(inputs.decays)
        transport = self.checked.context.transport
        return StatePassing(
            transport, self.segments, transition, inputs.state_shape, self.last_states, inputs.dtype, inputs.q.device
        )

    def first(self, inputs: RecurrenceInputs) -> FromStates:
        """The rank's segments that begin documents."""
        return FromStates(self.own, self.own.first, inputs, first_states(self.own, inputs), self.scale, self.kernels)

    def pieces(self, inputs: RecurrenceInputs) -> _Pieces:
        """The rank's segments that follow others, cut where a state before them is forgotten."""
        rows = reaches(self.own, inputs.k, inputs.decay, inputs.beta)
        return _Pieces(*self.own.cut(rows), list(rows)) if rows else _Pieces(self.own, self.own, [])

    def following(self, inputs: RecurrenceInputs, pieces: _Pieces) -> FromZero:
        """The heads of those that follow others, before it is known from which states."""
        return FromZero(pieces.heads, inputs, self.scale, self.kernels)

    def tails(self, inputs: RecurrenceInputs, pieces: _Pieces, states: torch.Tensor) -> FromStates:
        """The tails, from the states (m, b, h, d_k, d_v) that the heads of all following segments make from zero."""
        chosen = [self.own.following.index(index) for index in pieces.cut]
        begins = states.detach()[chosen] if len(chosen) < len(states) else states.detach()
        if torch.is_grad_enabled():
            begins.requires_grad_()
        return FromStates(pieces.tails, pieces.cut, inputs, begins, self.scale, self.kernels)

    def rerun(self, inputs: RecurrenceInputs, states: torch.Tensor) -> FromStates:
        """The same in the backward pass, where it is known."""
        return FromStates(self.own, self.own.following, inputs, states, self.scale, self.kernels)

    def check_finite(
        self, inputs: RecurrenceInputs, own: dict[int, Summary], summaries: dict[int, Summary], states: dict[int, torch.Tensor]
    ) -> None:
        """On a CPU: raise ValueError for a state that overflows, in this rank's segments or where segments meet."""
        if inputs.q.device.type != "cpu" or not check.has_values(inputs.q):
            return
        every = self.segments.every
        # a total of decays is a logarithm, which may be -inf
        numbers = {i: [s.state] if inputs.beta is None or s.total is None else [s.state, s.total] for i, s in own.items()}
        error = next(filter(None, (overflow(inputs, found, every[i].stop - 1) for i, found in numbers.items())), None)
        if error is None and all(bool(summary.state.isfinite().all()) for summary in summaries.values()):
            error = next(filter(None, (overflow(inputs, (state,), at) for at, state in states.items())), None)
        if error is not None:
            with refusing(self.checked.context.ranks):
                raise error

    def final_states(self, last: dict[int, torch.Tensor], inputs: RecurrenceInputs) -> torch.Tensor:
        """The last state of each document, (b, n, h, d_k, d_v): of those without tokens, the first."""
        nothing = inputs.v.new_zeros(inputs.state_shape, dtype=inputs.dtype)
        found = []
        for document in range(self.segments.documents):
            first = nothing if inputs.initial is None else inputs.initial[:, document].to(inputs.dtype)
            found.append(last.get(document, first))
        return torch.stack(found, dim=1) if found else nothing[:, None][:, :0]


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _LinearCall, *tensors: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = RecurrenceInputs(*tensors)
        if call.checked.checkpointed.takes:
            return _take(ctx, call, inputs)
        # only what begins a document, and tails, begin now from the state that the backward pass must begin from
        hooked = saving_is_hooked()
        keeps = call.needs_grad and call.kernels.graphs_are_small and not hooked
        leaves = _leaves(inputs, ctx.needs_input_grad[1:]) if keeps else inputs
        passing = call.passing(inputs)
        with without_autocast(inputs.q.device.type):
            pieces = call.pieces(inputs)
            with torch.set_grad_enabled(keeps):
                first = call.first(leaves)
            # a delta rule from zero has d_k more columns of values: it costs less to run it again than to go back through them
            follows = keeps and inputs.beta is None and not pieces.cut
            with torch.set_grad_enabled(follows):
                following = call.following(leaves, pieces)
            with torch.set_grad_enabled(keeps):
                tails = call.tails(leaves, pieces, following.states)
            own = first.summaries() | following.summaries()
            own |= {index: Summary(own[index].total, state) for index, state in zip(pieces.cut, tails.finals.detach())}
            pending = passing.start_forward(own)
            with torch.set_grad_enabled(keeps):
                first_out, tails_out = first.out, tails.out
            with torch.set_grad_enabled(follows):
                following_out = following.out
            reading = following.reading
            summaries, _ = pending.wait()
            before, last = passing.states_before(summaries)
            call.check_finite(inputs, own, summaries, {call.segments.every[i].start: state for i, state in before.items()})
            heads = pieces.heads.parts(pieces.heads.following, following_out.detach())
            rest = pieces.tails.parts(pieces.cut, tails_out.detach())
            read = reading.parts(pieces.heads)
            out = joined(call.own, first_out.detach(), heads, rest, read, before, inputs.v).to(inputs.q.dtype)
            final = call.final_states(last, inputs) if call.last_states else None
            states = [before[index] for index in call.own.following]
        ctx.kept = _Kept(leaves, first, following if follows else None, tails) if keeps else None
        ctx.call, ctx.pieces = call, pieces
        begins = torch.stack(states) if states else following.states.detach()
        # checkpointing compares shapes of what it computes again: that of the heads' rows would be another if one bit of a decay were
        saved = (None, None) if pieces.cut and hooked else reading
        ctx.save_for_backward(*inputs, *saved, following.totals, begins)
        # other queries follow from the inputs at once
        queries = saved[0] if inputs.beta is not None else None
        call.checked.checkpointed.keep(call.checked.identity, (out, final, queries, following.totals, begins), pieces)
        return out, final

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: _LinearCall = ctx.call
        call.checked.refuse_second_derivative("linear_attention")
        grads = tuple(None if x is None else x.resolve_neg() for x in grads)
        *tensors, queries, factors, totals, states = ctx.saved_tensors
        inputs, pieces = RecurrenceInputs(*tensors), ctx.pieces
        with call.checked.context.turn, without_autocast(inputs.q.device.type):
            call.checked.begin_backward()
            kept, ctx.kept = ctx.kept, None
            reading = StateReading(queries, factors)
            tail_states = states
            if pieces.cut and (kept is None or queries is None):
                with torch.no_grad():
                    following = call.following(inputs, pieces)
                    reading, tail_states = following.reading, following.states
            if kept is None:  # or it is the second backward pass through a graph
                leaves = _leaves(inputs, ctx.needs_input_grad[1:])
                with torch.enable_grad():
                    kept = _Kept(leaves, call.first(leaves), None, call.tails(leaves, pieces, tail_states))
            return None, *_gradients(call, inputs, grads, kept, pieces, reading, totals, states)


def _take(ctx: Any, call: _LinearCall, inputs: RecurrenceInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The results of a recomputation, which checkpointed code has kept in the forward pass, and what the backward pass needs."""
    (out, final, queries, totals, begins), ctx.pieces = call.checked.checkpointed.take()
    assert out is not None
    ctx.kept, ctx.call = None, call
    saved: tuple[torch.Tensor | None, torch.Tensor | None] = queries, None
    if inputs.beta is None and not ctx.pieces.cut:
        with without_autocast(inputs.q.device.type):
            saved = reading_of(call.own, inputs, call.scale, call.kernels)
    ctx.save_for_backward(*inputs, *saved, totals, begins)
    return out, final


@dataclass(frozen=True, eq=False)
class _Kept:
    """A rank's inputs, cut from their history, and segments as run on them, with a graph: those that begin documents, and those that follow
    others, or None; and the tails of the latter."""

    leaves: RecurrenceInputs
    first: FromStates
    following: FromZero | None
    tails: FromStates


def _leaves(inputs: RecurrenceInputs, wanted: tuple[bool, ...]) -> RecurrenceInputs:
    return RecurrenceInputs(*leaves_of(inputs, wanted))  # pyrefly: ignore[bad-argument-type]


def _gradients(
    call: _LinearCall,
    inputs: RecurrenceInputs,
    grads: tuple[torch.Tensor | None, ...],
    kept: _Kept,
    pieces: _Pieces,
    reading: StateReading,
    totals: torch.Tensor,
    states: torch.Tensor,
) -> InputGradients:
    """The gradients of the inputs that are wanted, from those of out and of the last states."""
    dout, dlast = grads
    assert dout is not None
    passing, own, heads, dtype = call.passing(inputs), call.own, pieces.heads, call.kernels.dtype(inputs.q)
    dout = own.by_position(dout).to(dtype)
    # of the states that segments begin with, through the segments' own outputs
    pairs = zip(reading.parts(heads).values(), heads.parts(own.following, heads.rows(own.following, dout)).values())
    through = [part.gradient(rows).to(inputs.dtype) for part, rows in pairs]
    pending = passing.start_backward({i: Summary(*pair) for i, *pair in zip(own.following, totals, through)}, dlast)
    with torch.enable_grad():
        runs: list[tuple[OwnSegments, FromStates | Continued]] = [(own, kept.first), (pieces.tails, kept.tails)]
        leaves = kept.leaves
        if pieces.cut:
            # few rows: their gradients by themselves are added to those of all
            leaves = _leaves(_head_rows(heads, kept.leaves), tuple(x is not None and x.requires_grad for x in kept.leaves))
            following = rows_from_states(own.following, leaves, states, heads.lengths(own.following), call.scale, call.kernels)
        else:
            following = call.rerun(kept.leaves, states) if kept.following is None else kept.following.continued(states)
            runs.append((heads, following))
        outs = [run.out for _, run in runs]
    after = passing.gradients_after(*pending.wait())
    nothing = torch.zeros(inputs.state_shape, dtype=inputs.dtype, device=dout.device)

    def of_finals(indices: list[int]) -> torch.Tensor:
        return torch.stack([after.get(index, nothing) for index in indices])

    live: list[tuple[torch.Tensor, torch.Tensor]] = []
    for (rows, run), out in zip(runs, outs):
        if run.indices:
            live += [(out, rows.rows(run.indices, dout)), (run.finals, of_finals(run.indices))]
    *found, dtails = gradients_of((*kept.leaves, kept.tails.states), live)
    result = InputGradients(*found)
    if pieces.cut:
        assert dtails is not None
        after |= dict(zip(pieces.cut, dtails))
        live = [(following.out, heads.rows(own.following, dout)), (following.finals, of_finals(own.following))]
        result = _with_rows(heads, result, gradients_of(leaves, live))
    if result.initial is not None and dlast is not None:
        # the last state of a document without tokens is its first
        empty = [document for document in range(call.segments.documents) if document not in call.segments.held]
        result.initial[:, empty] += dlast[:, empty].to(result.initial.dtype)
    return result


def _head_rows(heads: OwnSegments, inputs: RecurrenceInputs) -> RecurrenceInputs:
    rows = (None if x is None else heads.rows(heads.following, heads.by_position(x.detach())) for x in inputs[:5])
    return RecurrenceInputs(*rows, None)  # pyrefly: ignore[bad-argument-type, bad-argument-count]


def _with_rows(heads: OwnSegments, gradients: InputGradients, of_heads: Sequence[torch.Tensor | None]) -> InputGradients:
    """Gradients, to which those of the heads' rows are added in place."""
    pairs = [(whole, part) for whole, part in zip(gradients[:5], of_heads) if whole is not None and part is not None]
    if not pairs:
        return gradients
    held = torch.arange(pairs[0][0].shape[1], device=pairs[0][0].device)
    rows = heads.rows(heads.following, heads.by_position(held[None]))[0]
    # an expanded gradient has no memory of its own
    sums = iter([whole.contiguous().index_add_(1, rows, part) for whole, part in pairs])
    return gradients._replace(**{name: next(sums) for name, x in zip(gradients._fields[:5], gradients) if x is not None})
