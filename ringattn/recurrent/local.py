"""What a rank computes of its segments by itself: `FromStates`, those whose first states are known, and `FromZero`, all others.

Segments that begin a document know the state that they begin with. Those that follow others are computed from zero. Their outputs from a
state h are then `out + state_queries @ h`, and their last states `total h + state`. With the delta rule, both follow from d_k more columns
of values: as columns of the state do not mix, values of 0 and an initial state of 1 (the identity) give `state_queries` and `total`.

The backward pass knows all states, and runs from them what has left no graph.

Shapes: b batch, s tokens of this rank, hk heads of q and k, h heads of v, n documents; m segments that follow others, of s' tokens in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from .kernels import RecurrenceKernels, repeated
from .segments import OwnSegments
from .state_passing import Summary
from .transitions import Decays

_ROWS = 8192  # of a product over tokens, whose sum is of half precision


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


class StateReading(NamedTuple):
    """How rows of segments that follow others read the states (b, h, d_k, d_v) before these: queries^T state, times factors.

    queries: (b, s', heads, d_k), where heads divide h. factors: (b, s', h, 1) or None.
    """

    queries: torch.Tensor
    factors: torch.Tensor | None

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """(b, s', h, d_v), if the rows are of one segment."""
        (b, s, heads, _), (h, d_v) = self.queries.shape, state.shape[1::2]
        # heads of values that share a head of queries are columns of one product
        columns = state.to(self.queries.dtype).unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)
        out = (self.queries.transpose(1, 2) @ columns).transpose(1, 2).reshape(b, s, h, d_v)
        return out if self.factors is None else out * self.factors

    def gradient(self, dout: torch.Tensor) -> torch.Tensor:
        """The gradient of the state, from that of what was read. Parts of half precision add up in fp32."""
        (_, _, heads, d_k), (b, _, h, d_v) = self.queries.shape, dout.shape
        dout = dout if self.factors is None else (dout * self.factors).to(self.queries.dtype)
        parts = zip(self.queries.split(_ROWS, dim=1), dout.unflatten(2, (heads, -1)).flatten(3).split(_ROWS, dim=1))
        products = (queries.permute(0, 2, 3, 1) @ rows.transpose(1, 2) for queries, rows in parts)
        total = next(products).to(torch.promote_types(dout.dtype, torch.float32))
        for product in products:
            total = total + product
        return total.unflatten(3, (-1, d_v)).transpose(2, 3).reshape(b, h, d_k, d_v)

    def parts(self, own: OwnSegments) -> dict[int, StateReading]:
        """Of each segment by itself, by index."""
        queries = own.parts(own.following, self.queries)
        factors = {} if self.factors is None else own.parts(own.following, self.factors)
        return {index: StateReading(part, factors.get(index)) for index, part in queries.items()}


class Continued(NamedTuple):
    """What `FromStates` has, of segments that have been run from zero, or whose rows are given by themselves."""

    indices: list[int]
    finals: torch.Tensor
    out: torch.Tensor


class FromStates:
    """Some of a rank's segments, from the states (m, b, h, d_k, d_v) that they begin with: `finals`, in the same shape, and `out`
    (b, rows, h, d_v). Differentiable."""

    def __init__(
        self,
        own: OwnSegments,
        indices: list[int],
        inputs: RecurrenceInputs,
        states: torch.Tensor,
        scale: float,
        kernels: RecurrenceKernels,
    ) -> None:
        self.indices, self.states = indices, states
        self._ran = kernels.run(*_rows_of(own, indices, inputs), states, own.lengths(indices), scale)
        self.finals = self._ran.finals

    @cached_property
    def out(self) -> torch.Tensor:
        """It is no part of what other ranks need."""
        return self._ran.read()

    def summaries(self) -> dict[int, Summary]:
        """The states that segments which begin documents end with, by index."""
        return {index: Summary(None, state) for index, state in zip(self.indices, self.finals.detach())}


def rows_from_states(
    indices: list[int],
    rows: RecurrenceInputs,
    states: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    kernels: RecurrenceKernels,
) -> Continued:
    """Segments of these lengths, from the states (m, b, h, d_k, d_v) that they begin with: their rows alone. Differentiable."""
    decay, beta = (None if x is None else x.to(rows.dtype) for x in (rows.decay, rows.beta))
    ran = kernels.run(rows.q, rows.k, rows.v, decay, beta, states, lengths, scale)
    return Continued(indices, ran.finals, ran.read())


class FromZero:
    """A rank's segments that follow others, run from zero: `states` (m, b, h, d_k, d_v) that they end with; `totals` (m, b, h, numbers);
    `reading`, and `out` (b, s', h, d_v)."""

    def __init__(self, own: OwnSegments, inputs: RecurrenceInputs, scale: float, kernels: RecurrenceKernels) -> None:
        self._own, self._inputs, self._scale, self._kernels = own, inputs, scale, kernels
        q, k, v, decay, beta = _rows_of(own, own.following, inputs)
        lengths, shape = own.lengths(own.following), inputs.state_shape
        zero = v.new_zeros(len(lengths), *shape, dtype=inputs.dtype)
        if beta is None:
            self._ran = kernels.run(q, k, v, decay, None, zero, lengths, scale)
            self.states = self._ran.finals
            with torch.no_grad():
                self.totals, self._left = _totals_and_left(own, inputs, decay)
            return
        d_k = shape[2]
        identity = torch.eye(d_k, dtype=zero.dtype, device=v.device).expand(*zero.shape[:3], d_k, d_k)
        wide = torch.cat([v, v.new_zeros(*v.shape[:3], d_k)], dim=3)
        self._ran = kernels.run(q, k, wide, decay, beta, torch.cat([zero, identity], dim=4), lengths, scale)
        self.states, totals = self._ran.finals.split([shape[3], d_k], dim=4)
        self.totals = totals.flatten(3)

    def summaries(self) -> dict[int, Summary]:
        """What each segment makes of a state, by index."""
        return {index: Summary(*pair) for index, *pair in zip(self._own.following, self.totals, self.states.detach())}

    @cached_property
    def out(self) -> torch.Tensor:
        """It is no part of what other ranks need."""
        return self._read[..., : self._inputs.state_shape[3]]

    @cached_property
    def reading(self) -> StateReading:
        """How these segments' rows read the states before them."""
        if self._inputs.beta is not None:
            # by themselves: what keeps them keeps no columns of values
            return StateReading(self._read[..., self._inputs.state_shape[3] :].contiguous(), None)
        return _reading(self._inputs, _rows(self._own, self._own.following, self._inputs.q), self._left, self._scale, self._kernels)

    def continued(self, before: torch.Tensor) -> Continued:
        """These segments, without a delta rule, from the states before them (m, b, h, d_k, d_v). Differentiable."""
        own = self._own
        q, decay = _rows(own, own.following, self._inputs.q), self._inputs.decay
        decay = None if decay is None else _rows(own, own.following, decay).to(self._inputs.dtype)
        totals, left = _totals_and_left(own, self._inputs, decay)
        parts = _reading(self._inputs, q, left, self._scale, self._kernels).parts(own).values()
        added = [part.read(state) for part, state in zip(parts, before)]
        finals = self.states + Decays(self._inputs.decays).apply(totals, before)
        return Continued(own.following, finals, self.out + torch.cat(added, dim=1) if added else self.out)

    @cached_property
    def _read(self) -> torch.Tensor:
        return self._ran.read()


def reading_of(own: OwnSegments, inputs: RecurrenceInputs, scale: float, kernels: RecurrenceKernels) -> StateReading:
    """`FromZero.reading` without a delta rule: nothing needs to run for it."""
    q, decay = _rows(own, own.following, inputs.q), inputs.decay
    decay = None if decay is None else _rows(own, own.following, decay).to(inputs.dtype)
    return _reading(inputs, q, _totals_and_left(own, inputs, decay)[1], scale, kernels)


def joined(
    own: OwnSegments,
    first: torch.Tensor,
    heads: Mapping[int, torch.Tensor],
    tails: Mapping[int, torch.Tensor],
    readings: Mapping[int, StateReading],
    before: Mapping[int, torch.Tensor],
    like: torch.Tensor,
) -> torch.Tensor:
    """The outputs of all rows (b, s, h, d_v), as the rank holds them, from the states that segments which follow others begin with.

    first: of segments that begin documents, (b, s - s', h, d_v). heads, tails: of others, by index, from zero. like: (b, s, h, d_v).
    """
    parts = own.parts(own.first, first)
    for index, rows in heads.items():
        head = rows + readings[index].read(before[index])
        parts[index] = torch.cat([head, tails[index]], dim=1) if index in tails else head
    return own.whole(parts, like.to(first.dtype))


def first_states(own: OwnSegments, inputs: RecurrenceInputs) -> torch.Tensor:
    """The states (m, b, h, d_k, d_v) that the segments begin with that begin documents."""
    initial, documents = inputs.initial, own.documents(own.first)
    if initial is None or not documents:
        return torch.zeros(len(documents), *inputs.state_shape, dtype=inputs.dtype, device=inputs.q.device)
    return torch.stack([initial[:, document] for document in documents]).to(inputs.dtype)


def _totals_and_left(
    own: OwnSegments, inputs: RecurrenceInputs, decay: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`FromZero.totals`, and at each token what is left of a state before its segment, (b, s', h, 1 or d_k): both as logarithms."""
    lengths, (b, h, _, _) = own.lengths(own.following), inputs.state_shape
    if decay is None or not lengths:
        return inputs.v.new_zeros(len(lengths), b, h, inputs.decays, dtype=inputs.dtype), None
    # a GPU adds up along the last dim, of neighbours in memory, ten times as fast as along others
    rows = (part.movedim(1, -1).contiguous().cumsum(-1).movedim(-1, 1) for part in decay.flatten(2).split(lengths, dim=1))
    parts = [part.unflatten(2, (h, -1)) for part in rows]
    return torch.stack([part[:, -1] for part in parts]), torch.cat(parts, dim=1)


def _reading(
    inputs: RecurrenceInputs, q: torch.Tensor, left: torch.Tensor | None, scale: float, kernels: RecurrenceKernels
) -> StateReading:
    """How rows with queries q (b, s', hk, d_k) read states without a delta rule."""
    dtype, (_, h, d_k, _) = kernels.dtype(q), inputs.state_shape
    q = q.to(dtype)
    if left is None:
        return StateReading((q * scale).to(dtype), None)
    factors = left.exp() * scale
    if left.shape[3] == 1 and d_k > 1:
        return StateReading(q, factors)
    return StateReading((repeated(q, h) * factors).to(dtype), None)


def _rows_of(
    own: OwnSegments, indices: list[int], inputs: RecurrenceInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """q, k, v, and decay and beta in the dtype of states: the rows of some segments, one after the other."""
    q, k, v, decay, beta = (None if x is None else _rows(own, indices, x) for x in inputs[:5])
    factors = (None if x is None else x.to(inputs.dtype) for x in (decay, beta))
    return q, k, v, *factors  # pyrefly: ignore[bad-return]


def _rows(own: OwnSegments, indices: list[int], x: torch.Tensor) -> torch.Tensor:
    """The rows of some segments, one after the other, of those that the rank holds."""
    return own.rows(indices, own.by_position(x))
