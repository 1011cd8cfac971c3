"""`LocalRecurrence`: what a rank computes of its segments by itself, before any state of another rank has come.

Segments that begin a document know the state that they begin with. Those that follow others are computed from zero. Their outputs from a
state h are then `out + state_queries @ h`, and their last states `total h + state`. With the delta rule, both follow from d_k more columns
of values: as columns of the state do not mix, values of 0 and an initial state of 1 (the identity) give `state_queries` and `total`.

The backward pass knows all states, so `RerunRecurrence` runs each segment from the state that it really begins with.

Shapes: b batch, s tokens of this rank, hk heads of q and k, h heads of v, n documents; m segments that follow others, of s' tokens in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from .kernels import RecurrenceKernels, repeated
from .segments import OwnSegments
from .state_passing import Summary


class RecurrenceInputs(NamedTuple):
    """A rank's rows as its user passed them, decay (b, s, h) or (b, s, h, d_k), and initial states (b, n, h, d_k, d_v)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor | None
    beta: torch.Tensor | None
    initial: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """Of states, and of decays and betas."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        b, _, h, d_v = self.v.shape
        return b, h, self.k.shape[3], d_v

    @property
    def decays(self) -> int:
        """Decays of a token and head: 0, 1 or d_k."""
        return 0 if self.decay is None else self.k.shape[3] if self.decay.dim() == 4 else 1


class InputGradients(NamedTuple):
    """The gradients of `RecurrenceInputs`; None where none is wanted."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    decay: torch.Tensor | None
    beta: torch.Tensor | None
    initial: torch.Tensor | None


class RecurrenceOutputs(NamedTuple):
    """Of segments that begin documents (b, s - s', h, d_v); of others, from zero (b, s', h, d_v), and (b, s', h, d_k)."""

    first: torch.Tensor
    following: torch.Tensor
    state_queries: torch.Tensor


class LocalRecurrence:
    """The states of a rank's segments: `first_states` (those that begin documents, b, h, d_k, d_v), `states` (m, b, h, d_k, d_v) from zero
    and `totals` (m, b, h, numbers). `read` gives the outputs."""

    def __init__(self, own: OwnSegments, inputs: RecurrenceInputs, scale: float, kernels: RecurrenceKernels) -> None:
        self._own, self._inputs, self._scale, self._kernels = own, inputs, scale, kernels
        lengths, ordered = own.lengths(own.first), by_position(own, inputs)
        self._first = kernels.run(*rows_of(own, own.first, ordered), first_states(own, inputs), lengths, scale)
        self.first_states = self._first.finals
        self._begin_following(*rows_of(own, own.following, ordered))

    def _begin_following(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, beta: torch.Tensor | None
    ) -> None:
        lengths, shape, run = self._own.lengths(self._own.following), self._inputs.state_shape, self._kernels.run
        zero, (*_, d_k, d_v) = v.new_zeros(len(lengths), *shape, dtype=self._inputs.dtype), shape
        if beta is None:
            self._from_zero = run(q, k, v, decay, None, zero, lengths, self._scale)
            self.states = self._from_zero.finals
            self.totals = zero.new_zeros(*zero.shape[:3], self._inputs.decays)
            self._queries, left = q, None
            if decay is not None and lengths:
                # of a state before the segment, at each token, as a logarithm
                parts = [part.unflatten(2, (shape[1], -1)).cumsum(1) for part in decay.flatten(2).split(lengths, dim=1)]
                left = torch.cat(parts, dim=1)  # (b, s', h, 1 or d_k)
                self.totals = torch.stack([part[:, -1] for part in parts])
            self._left = left
            return
        identity = torch.eye(d_k, dtype=zero.dtype, device=v.device).expand(*zero.shape[:3], d_k, d_k)
        wide = torch.cat([v, v.new_zeros(*v.shape[:3], d_k)], dim=3)
        self._from_zero = run(q, k, wide, decay, beta, torch.cat([zero, identity], dim=4), lengths, self._scale)
        self.states, totals = self._from_zero.finals.split([d_v, d_k], dim=4)
        self.totals = totals.flatten(3)

    def read(self) -> RecurrenceOutputs:
        """The outputs, which are no part of what other ranks need."""
        first, following = self._first.read(), self._from_zero.read()
        _, h, d_k, d_v = self._inputs.state_shape
        if self._inputs.beta is not None:
            return RecurrenceOutputs(first, *following.split([d_v, d_k], dim=3))
        factor = self._scale if self._left is None else self._left.exp() * self._scale
        dtype = self._kernels.dtype(self._queries)
        return RecurrenceOutputs(first, following, (repeated(self._queries.to(dtype), h) * factor).to(dtype))

    def summaries(self, numbers: int) -> dict[int, Summary]:
        """What each segment makes of a state, by index; `numbers` are those of a total."""
        b, h, _, _ = self._inputs.state_shape
        begins = {i: Summary(state.new_zeros(b, h, numbers), state) for i, state in zip(self._own.first, self.first_states)}
        return begins | {i: Summary(*pair) for i, *pair in zip(self._own.following, self.totals, self.states)}

    def with_states(self, out: RecurrenceOutputs, before: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The outputs of all rows (b, s, h, d_v), as the rank holds them, from the states that segments begin with."""
        own = self._own
        queries = own.parts(own.following, out.state_queries)
        parts = own.parts(own.first, out.first)
        for index, rows in own.parts(own.following, out.following).items():
            asked = queries[index].transpose(1, 2)
            parts[index] = rows + (asked @ before[index].to(asked.dtype)).transpose(1, 2)
        return own.whole(parts, self._inputs.v.to(out.following.dtype))


def by_position(own: OwnSegments, inputs: RecurrenceInputs) -> RecurrenceInputs:
    """The inputs with the rank's rows in the order of their positions."""
    rows = (None if x is None else own.by_position(x) for x in inputs[:5])
    return RecurrenceInputs._make([*rows, inputs.initial])


def rows_of(
    own: OwnSegments, indices: list[int], ordered: RecurrenceInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """q, k, v, and decay and beta in the dtype of states: the rows of some segments, one after the other."""
    q, k, v = (own.rows(indices, x) for x in (ordered.q, ordered.k, ordered.v))
    factors = (None if x is None else own.rows(indices, x).to(ordered.dtype) for x in (ordered.decay, ordered.beta))
    return q, k, v, *factors  # pyright: ignore[reportReturnType]


def first_states(own: OwnSegments, inputs: RecurrenceInputs) -> torch.Tensor:
    """The states (m, b, h, d_k, d_v) that the segments begin with that begin documents."""
    initial, documents = inputs.initial, own.documents(own.first)
    if initial is None or not documents:
        return torch.zeros(len(documents), *inputs.state_shape, dtype=inputs.dtype, device=inputs.q.device)
    return torch.stack([initial[:, document] for document in documents]).to(inputs.dtype)


class RerunRecurrence:
    """A rank's segments in the order of their positions, from the states that they begin with: `finals` (m, b, h, d_k, d_v), and `out`
    (b, rows, h, d_v). Differentiable."""

    def __init__(
        self,
        own: OwnSegments,
        inputs: RecurrenceInputs,
        before: dict[int, torch.Tensor],
        scale: float,
        kernels: RecurrenceKernels,
    ) -> None:
        self.indices = sorted((*own.first, *own.following))
        begins = before | dict(zip(own.first, first_states(own, inputs)))
        nothing = torch.zeros(0, *inputs.state_shape, dtype=inputs.dtype, device=inputs.q.device)
        initial = torch.stack([begins[index] for index in self.indices]) if self.indices else nothing
        ran = kernels.run(*rows_of(own, self.indices, by_position(own, inputs)), initial, own.lengths(self.indices), scale)
        self.finals, self.out = ran.finals, ran.read()
