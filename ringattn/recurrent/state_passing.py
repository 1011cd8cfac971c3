"""State passing: one exchange of small tensors gives each segment the state that it begins with, or the gradient of that it ends with.

Forward, each rank sends the (total, written) of its segments to the ranks that hold later segments of the same documents, and each
applies those before its own, in order of position. Backward, each sends the (total, gradient of the state before) of its segments to the
ranks that hold earlier ones, and each applies those after its own, in reverse. InputGradients of last states, which every rank may have, go
along.

Source: the passing of states between chunks of Mamba-2 (Dao and Gu 2024, section 8.2), with the scan on every rank instead of rank by rank.

Shapes: b batch, h heads, n documents; totals (b, h, numbers), states (b, h, d_k, d_v).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..transport import Handle, Peer, Transport
from .segments import Segments
from .transitions import Transition


class Summary(NamedTuple):
    """A segment's total transition, and the state that it ends with from zero (a document's first: with the state it begins with).

    In the backward pass: the total, and the gradient of the state that the segment begins with through the segment's own outputs.
    A document's first segment has no total, because no state comes before it; it is sent as zeros.
    """

    total: torch.Tensor | None
    state: torch.Tensor


@dataclass(frozen=True, eq=False)
class StatePassing:
    """What one rank sends, hears and scans.

    shape: of a state, (b, h, d_k, d_v). last_states: whether every rank needs the last state of each document.
    """

    transport: Transport
    segments: Segments
    transition: Transition
    shape: tuple[int, int, int, int]
    last_states: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def _rank(self) -> int:
        return self.transport.rank

    def start_forward(self, own: Mapping[int, Summary]) -> Pending:
        """Send the summaries of own segments; `own` holds all, by index."""
        heard = self._heard_by_all if self.last_states else self.segments.heard_by_later
        return self._start(own, heard, None)

    def start_backward(self, own: Mapping[int, Summary], last_gradients: torch.Tensor | None) -> Pending:
        """Send the summaries of the backward pass, and the gradients (b, n, h, d_k, d_v) of last states, if there are such."""
        return self._start(own, self.segments.heard_by_earlier, last_gradients)

    def states_before(self, summaries: Mapping[int, Summary]) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """The state that each own segment after a first begins with, by index; and with `last_states` the last ones, by document."""
        before, last = {}, {}
        for chain in self.segments.chains:
            document = self.segments.every[chain[0]].document
            own = [index for index in chain if self.segments.every[index].rank == self._rank]
            stop = chain[-1] if self.last_states else max(own, default=-1) - 1
            state = None
            for index in chain:
                if state is not None and index in own:
                    before[index] = state
                if index > stop:
                    break
                total, written = summaries[index]
                if state is None:
                    state = written
                else:
                    assert total is not None
                    state = self.transition.apply(total, state) + written
            if self.last_states:
                assert state is not None
                last[document] = state
        return before, last

    def gradients_after(
        self, summaries: Mapping[int, Summary], last_gradients: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The gradient of the state that each own segment ends with, by index, where there is one.

        last_gradients: of the last state of each document, summed over ranks, by document.
        """
        after: dict[int, torch.Tensor] = {}
        for chain in self.segments.chains:
            own = [index for index in chain if self.segments.every[index].rank == self._rank]
            gradient = last_gradients.get(self.segments.every[chain[0]].document)
            for index in reversed(chain):
                if gradient is not None and index in own:
                    after[index] = gradient
                if not own or index == own[0]:
                    break
                total, through_outputs = summaries[index]
                assert total is not None
                kept = 0 if gradient is None else self.transition.transposed(total, gradient)
                gradient = through_outputs + kept
        return after

    def _heard_by_all(self, sender: int, receiver: int) -> list[int]:
        return self.segments.own(sender)

    def _start(
        self, own: Mapping[int, Summary], heard: Callable[[int, int], list[int]], last_gradients: torch.Tensor | None
    ) -> Pending:
        found = Pending(self, own)
        sends, receives = [], []
        # short documents are many segments that no other rank hears of
        heard_by = {peer: heard(self._rank, peer) for peer in range(self.transport.size) if peer != self._rank}
        packed = {index: self._packed(own[index]) for index in {index for sent in heard_by.values() for index in sent}}
        mine = self.segments.documents_of(self._rank)
        for peer in range(self.transport.size):
            if last_gradients is not None and mine:
                found.gradients.append(last_gradients[:, mine])
            if peer == self._rank:
                continue
            if sent := heard_by[peer]:
                sends.append(Peer(peer, torch.stack([packed[index] for index in sent])))
            if received := heard(peer, self._rank):
                target = self._empty(len(received), *self.shape[:2], self.transition.numbers + self.shape[2] * self.shape[3])
                receives.append(Peer(peer, target))
                found.received.append((received, target))
            if last_gradients is not None and (theirs := self.segments.documents_of(peer)):
                sends.append(Peer(peer, last_gradients[:, theirs].contiguous()))
            if last_gradients is not None and mine:
                found.gradients[-1] = self._empty(self.shape[0], len(mine), *self.shape[1:])
                receives.append(Peer(peer, found.gradients[-1]))
        found.start(sends, receives)
        return found

    def _packed(self, summary: Summary) -> torch.Tensor:
        total, state = summary
        if total is None:
            total = state.new_zeros(*self.shape[:2], self.transition.numbers)
        return torch.cat([total, state.flatten(2)], dim=2)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Pending:
    """An exchange of summaries under way.

    received: the indices of a rank's segments, and the tensor of their summaries. gradients: of each rank, those of the last states of
    this rank's documents, (b, documents, h, d_k, d_v).
    """

    def __init__(self, passing: StatePassing, own: Mapping[int, Summary]) -> None:
        self._passing = passing
        self._own = own
        self.received: list[tuple[list[int], torch.Tensor]] = []
        self.gradients: list[torch.Tensor] = []

    def start(self, sends: list[Peer], receives: list[Peer]) -> None:
        self._sends = sends  # alive until they have gone
        self._handle: Handle = self._passing.transport.exchange(sends, receives)

    def wait(self) -> tuple[dict[int, Summary], dict[int, torch.Tensor]]:
        """All summaries that this rank knows, by index; and the sums of last states' gradients, added in rank order, by document."""
        self._handle.wait()
        self._sends.clear()
        numbers, shape = self._passing.transition.numbers, self._passing.shape
        found = dict(self._own)
        for indices, target in self.received:
            for index, packed in zip(indices, target):
                total, state = packed.split([numbers, shape[2] * shape[3]], dim=2)
                found[index] = Summary(total, state.unflatten(2, shape[2:]))
        if not self.gradients:
            return found, {}
        total = self.gradients[0].clone()
        for gradient in self.gradients[1:]:
            total += gradient
        mine = self._passing.segments.documents_of(self._passing.transport.rank)
        return found, dict(zip(mine, total.unbind(1)))
