"""What layers with states keep between calls of a model with a `RingCache`: states of recurrences, and last inputs of convolutions.

Every rank keeps them whole. Where new tokens run on shards, or are several, our convolutions and recurrences begin with what is kept, and
their last states and inputs reach all ranks. A single token runs through a layer's own code, which gets a `OneTokenCache` for
transformers' cache. What is kept is never changed in place: a call that fails leaves all as it was, and forks share it.

Rows of a call may end before its last token. What follows a row's end neither decays its state nor writes to it.

Shapes: b rows, s tokens of this rank, n new tokens of the longest row, c channels, w inputs that a convolution keeps, h heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..collective import unshard
from ..geometry.layout import Layout, contiguous
from ..geometry.span import Span
from ..recurrent.convolution import causal_conv1d
from ..runtime.groups import Group
from ..transport import Alone


@dataclass(frozen=True, eq=False)
class LayerState:
    """What a layer keeps: the last inputs of its convolution (b, c, w), in their dtype, None if it has none or has seen none yet; and the
    states (b, h, d_k, d_v) of its recurrences, in the order of their calls, fp32 or wider."""

    inputs: torch.Tensor | None = None
    recurrent: tuple[torch.Tensor, ...] = ()

    def chosen(self, rows: torch.Tensor) -> LayerState:
        """Of these rows of the batch."""
        inputs = None if self.inputs is None else self.inputs.index_select(0, rows.to(self.inputs.device))
        return LayerState(inputs, tuple(x.index_select(0, rows.to(x.device)) for x in self.recurrent))


@dataclass(frozen=True)
class OwnForm:
    """States as the own code of a layer keeps them, made of those of its recurrences; and back."""

    of: Callable[[tuple[torch.Tensor, ...]], torch.Tensor]
    back: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


AS_OURS = OwnForm(lambda states: states[0], lambda own: (own,))
VALUES_FIRST = OwnForm(lambda states: states[0].mT, lambda own: (own.mT,))  # (b, h, d_v, d_k)
OF_CHANNELS = OwnForm(lambda states: states[0].squeeze(3), lambda own: (own[..., None],))  # (b, c, n)
# (b, groups, c, n), of a recurrence for each group of channels
OF_GROUPS = OwnForm(lambda states: torch.stack(states, 1).squeeze(4), lambda own: own[..., None].unbind(1))


def chosen_states(states: Mapping[int, LayerState], rows: Sequence[int]) -> dict[int, LayerState]:
    """The states of all layers, by number, of these rows of the batch."""
    index = torch.tensor(rows, dtype=torch.int64)
    return {number: state.chosen(index) for number, state in states.items()}


class OneTokenCache:
    """In the place of transformers' cache, for the own code of a layer that computes one token a row: a copy of what the layer keeps.

    Layers of transformers 5.23 ask the cache for it, those of older versions take it from the cache's own `layers`.
    """

    record_past = False  # this and the states are read of `layers`

    def __init__(self, before: LayerState, form: OwnForm) -> None:
        self.conv_states = [None if before.inputs is None else before.inputs.clone()]
        # layers change it in place, and view it
        recurrent = form.of(before.recurrent).clone(memory_format=torch.contiguous_format) if before.recurrent else None
        self.recurrent_states = [recurrent]
        self._form = form

    @property
    def layers(self) -> Mapping[int, OneTokenCache]:
        return defaultdict(lambda: self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.conv_states[0]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent_states[0]

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        kept = self.recurrent_states[0]
        assert kept is not None
        return kept.copy_(recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    def after(self) -> LayerState:
        """What the layer keeps now."""
        inputs, recurrent = self.conv_states[0], self.recurrent_states[0]
        return LayerState(inputs, () if recurrent is None else self._form.back(recurrent))


@dataclass(eq=False)
class LayerCall:
    """A layer with states in a call with a `RingCache`: what it begins with, and what it keeps in the end.

    layout, group: of the new tokens. Where all ranks compute all of them, those of one rank. counts: the new tokens of each row.
    """

    before: LayerState
    layout: Layout
    group: Group | None
    rank: int
    counts: list[int]
    after: LayerState = field(default_factory=LayerState)

    @classmethod
    def alike(cls, before: LayerState, tokens: int, alone: Alone, counts: list[int]) -> LayerCall:
        """On all ranks alike."""
        return cls(before, contiguous(tokens, 1), alone, 0, counts)

    @property
    def is_one_token(self) -> bool:
        """Whether one token continues what is kept."""
        return self.layout.seq_len == 1 and (self.before.inputs is not None or bool(self.before.recurrent))

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str | None) -> torch.Tensor:
        """The convolution of the new tokens, (b, s, c) to (b, s, c), after the inputs that are kept."""
        width = weight.shape[1]
        self.after = replace(self.after, inputs=self._last_inputs(x, width))
        before, layout, at = self.before.inputs, self.layout, None
        if before is not None:
            layout, at = self._with_rows_before(width)
            if at is not None:
                x = torch.cat([x[:, :at], before.transpose(1, 2).to(x.dtype), x[:, at:]], 1)
        out = causal_conv1d(x, weight, bias, layout=layout, group=self.group, name=name)
        return out if at is None else torch.cat([out[:, :at], out[:, at + width :]], 1)

    def without_padding(
        self, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Values (b, s, h, d_v), decays and beta that leave a row's state alone after the row's last token."""
        if set(self.counts) == {self.layout.seq_len}:
            return v, decay, beta
        here = self.layout.positions(self.rank)
        dead = (here >= torch.tensor(self.counts)[:, None]).to(v.device)  # (b, s)
        if decay.dim() == 1:
            decay = decay.expand(*v.shape[:3])
        decay = decay.masked_fill(dead.view(*dead.shape, *[1] * (decay.dim() - 2)), 0.0)
        return v.masked_fill(dead[..., None, None], 0.0), decay, None if beta is None else beta.masked_fill(dead[..., None], 0.0)

    def first_state(self) -> torch.Tensor | None:
        """The state (b, h, d_k, d_v) that the layer's next recurrence begins with."""
        return self.before.recurrent[len(self.after.recurrent)] if self.before.recurrent else None

    def keep_state(self, state: torch.Tensor) -> None:
        """Keep the last state (b, h, d_k, d_v) of a recurrence."""
        self.after = replace(self.after, recurrent=(*self.after.recurrent, state))

    def _last_inputs(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """The last inputs of a convolution before the end of each row, on every rank: (b, c, width) from x (b, s, c)."""
        # (b, width); those before the new tokens are below 0
        wanted = torch.tensor(self.counts)[:, None] - width + torch.arange(width)
        positions = sorted(set(wanted.flatten().tolist()) - set(range(-width, 0)))
        rows = held_rows(self.layout, self.rank, positions)[1]
        new = whole_rows(x[:, torch.tensor(rows, dtype=torch.int64, device=x.device)], self.layout, positions, self.group)
        before = self.before.inputs
        before = x.new_zeros(len(x), width, x.shape[2]) if before is None else before.transpose(1, 2).to(x.dtype)
        both = torch.cat([before, new], 1)
        index = torch.where(wanted < 0, wanted, torch.searchsorted(torch.tensor(positions), wanted)) + width
        found = both.gather(1, index.to(x.device)[..., None].expand(-1, -1, x.shape[2]))
        return found.transpose(1, 2).contiguous()

    def _with_rows_before(self, rows: int) -> tuple[Layout, int | None]:
        """The layout with so many rows before the first, which that one's rank holds; and where, in this rank's rows, if it is this one."""
        at, spans = None, []
        for rank in range(self.layout.world_size):
            row, shifted = 0, []
            for span in self.layout.spans[rank]:
                is_first = span.start == 0
                if is_first and rank == self.rank:
                    at = row
                row += span.length
                shifted.append(Span(0, span.length + rows) if is_first else Span(span.start + rows, span.length))
            spans.append(tuple(shifted))
        return Layout(self.layout.seq_len + rows, tuple(spans), self.layout.name), at


def held_rows(layout: Layout, rank: int, positions: Sequence[int]) -> tuple[list[int], list[int]]:
    """Which of these positions, which ascend, a rank holds, as places in the list, and its local rows of them; in the order of its rows."""
    at, places, rows, row = np.asarray(positions, dtype=np.int64), [], [], 0
    for span in layout.spans[rank]:
        found = ((at >= span.start) & (at < span.stop) & ((at - span.start) % span.stride == 0)).nonzero()[0]
        places += found.tolist()
        rows += (row + (at[found] - span.start) // span.stride).tolist()
        row += span.length
    return places, rows


def whole_rows(x: torch.Tensor, layout: Layout, positions: Sequence[int], group: Group | None) -> torch.Tensor:
    """Rows of these positions, which ascend, on every rank: (b, rows, ...) from those of them that this rank holds, in its order."""
    held = (held_rows(layout, rank, positions)[0] for rank in range(layout.world_size))
    spans = tuple(tuple(Span(place, 1) for place in places) for places in held)
    return unshard(x, Layout(len(positions), spans, "kept"), group)
