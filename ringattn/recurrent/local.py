"""`LocalRecurrence`: what a rank computes of its segments by itself, before any state of another rank has come.

Segments that begin a document know the state that they begin with. Those that follow others are computed from zero. Their outputs from a
state h are then `out + state_queries @ h`, and their last states `total h + state`. With the delta rule, both follow from d_k more columns
of values: as columns of the state do not mix, values of 0 and an initial state of 1 (the identity) give `state_queries` and `total`.

Shapes: b batch, s tokens of this rank, hk heads of q and k, h heads of v, n documents; m segments that follow others, of s' tokens in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from .chunks import Chunks
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
        """Of all computation."""
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
    and `totals` (m, b, h, numbers). `read` gives the outputs. Differentiable."""

    def __init__(self, own: OwnSegments, inputs: RecurrenceInputs, scale: float) -> None:
        self._own, self._inputs = own, inputs
        q, k, v, decay, beta = (None if x is None else own.by_position(x).to(inputs.dtype) for x in inputs[:5])
        assert q is not None
        assert k is not None
        assert v is not None
        q = q * scale
        copies = v.shape[2] // k.shape[2]
        if copies > 1:
            q, k = q.repeat_interleave(copies, dim=2), k.repeat_interleave(copies, dim=2)
        first, following = (
            (own.rows(i, k), own.rows(i, v), _rows(own, i, decay), _rows(own, i, beta)) for i in (own.first, own.following)
        )
        self._first_q, self._following_q = own.rows(own.first, q), own.rows(own.following, q)
        self._first = Chunks(*first, self._initial(), own.lengths(own.first))
        self.first_states = self._first.finals
        self._begin_following(*following)

    def _begin_following(self, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, beta: torch.Tensor | None) -> None:
        lengths, shape = self._own.lengths(self._own.following), self._inputs.state_shape
        zero, (*_, d_k, d_v) = v.new_zeros(len(lengths), *shape), shape
        self._left: torch.Tensor | None = None  # of a state before the segment, at each token, as a logarithm
        if beta is None:
            self._from_zero = Chunks(k, v, decay, None, zero, lengths)
            self.states = self._from_zero.finals
            self.totals = zero.new_zeros(*zero.shape[:3], self._inputs.decays)
            if decay is not None and lengths:
                left = [part.unflatten(2, (shape[1], -1)).cumsum(1) for part in decay.flatten(2).split(lengths, dim=1)]
                self._left = torch.cat(left, dim=1)  # (b, s', h, 1 or d_k)
                self.totals = torch.stack([part[:, -1] for part in left])
            return
        identity = torch.eye(d_k, dtype=v.dtype, device=v.device).expand(*zero.shape[:3], d_k, d_k)
        wide = torch.cat([v, v.new_zeros(*v.shape[:3], d_k)], dim=3)
        self._from_zero = Chunks(k, wide, decay, beta, torch.cat([zero, identity], dim=4), lengths)
        self.states, totals = self._from_zero.finals.split([d_v, d_k], dim=4)
        self.totals = totals.flatten(3)

    def read(self) -> RecurrenceOutputs:
        """The outputs, which are no part of what other ranks need."""
        first, following = self._first.read(self._first_q), self._from_zero.read(self._following_q)
        if self._inputs.beta is not None:
            _, _, d_k, d_v = self._inputs.state_shape
            return RecurrenceOutputs(first, *following.split([d_v, d_k], dim=3))
        return RecurrenceOutputs(
            first, following, self._following_q if self._left is None else self._following_q * self._left.exp()
        )

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
            parts[index] = rows + (queries[index].transpose(1, 2) @ before[index]).transpose(1, 2)
        return own.whole(parts, self._inputs.v.to(self._inputs.dtype))

    def _initial(self) -> torch.Tensor:
        initial, documents = self._inputs.initial, self._own.documents(self._own.first)
        if initial is None or not documents:
            return torch.zeros(len(documents), *self._inputs.state_shape, dtype=self._inputs.dtype, device=self._inputs.q.device)
        return torch.stack([initial[:, document] for document in documents]).to(self._inputs.dtype)


def _rows(own: OwnSegments, indices: list[int], x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else own.rows(indices, x)
