"""A call of an attached model with a `RingCache` under way: what the model runs with, its attention, and its whole output.

Shapes: b rows of a call, n columns of its tokens, u rows that differ, m tokens of the longest row, w kept positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..collective import unshard
from ..geometry.layout import Layout
from ..geometry.mask import causal, sliding_window
from ..runtime.agree import refusing
from ..runtime.op import in_one_dtype
from ..scores import ScoreMod
from ..serving.batch import CacheBatch
from ..serving.cache import PagedCache
from ..serving.decoding import MOST_QUERIES, decode
from ..serving.prefilling import prefill
from ..transport import Alone
from .generation_models import CachedHeads
from .generation_states import LayerCall, LayerState, whole_rows
from .huggingface_attachment import Attachment, Window, not_compiled
from .huggingface_inputs import CACHES, CachedInputs

_OUTPUTS = ("logits", "last_hidden_state", "hidden_states", *CACHES)  # that are made whole
_NO_KEYS = (
    "the model shares keys between layers, or skips layers, which a RingCache does not support, or is in training mode with "
    "checkpointing: call model.eval()"
)


class CacheOfCalls(Protocol):
    """What a call needs of its `RingCache`."""

    paged: PagedCache
    kept: CachedHeads
    states: dict[int, LayerState]
    alone: Alone

    def commit(self, call: CachedCall) -> None: ...

    def roll_back(self) -> None: ...


@dataclass(eq=False)
class CachedCall:
    """A call of an attached model with a `RingCache` under way.

    layout: of the new tokens; None if every rank computes all of them. lengths: of the sequences before. layer: the attention that has
    given its keys to the cache, and not attended yet. calls: of layers with states, by number.
    """

    cache: CacheOfCalls
    inputs: CachedInputs
    batch: CacheBatch
    layout: Layout | None
    attachment: Attachment
    lengths: list[int]
    layer: int | None = None
    written: set[int] = field(default_factory=set)  # layers of the pages
    calls: dict[int, LayerCall] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)  # positions among the new tokens whose logits are wanted, in order
    selects: bool = False  # whether the model makes logits of the kept positions alone

    @property
    def continues(self) -> bool:
        """Whether tokens were cached before."""
        return any(self.lengths)

    @property
    def last_position(self) -> int:
        """Of all rows."""
        return max(length + count for length, count in zip(self.lengths, self.inputs.counts)) - 1

    def arguments(self, model: Any, kwargs: dict[str, Any], rank: int) -> dict[str, Any]:
        """What this rank runs the model with."""
        inputs, device = self.inputs, self.inputs.ids.device
        here = torch.arange(inputs.tokens) if self.layout is None else self.layout.positions(rank)
        begin = torch.tensor(self.lengths)[:, None]
        begin = begin[:1] if len(set(self.lengths)) == 1 else begin
        found = {name: value for name, value in kwargs.items() if name not in ("attention_mask", "cache_position")}
        # MiniMax asks for a cache of its own class where it is told to use one
        found |= dict(input_ids=inputs.ids[:, here.to(device)], use_cache=model.config.model_type != "minimax")
        if self.attachment.takes_positions:
            found |= dict(position_ids=(begin + here).to(device))
        self.kept = sorted(set(inputs.places(inputs.keeps).flatten().tolist()) - {-1})
        if "logits_to_keep" in kwargs:
            self.selects = len(self.kept) < inputs.tokens
            found["logits_to_keep"] = self._kept_here(here).to(device) if self.selects else 0
        return found

    def check_layer(self, module: nn.Module, sees_past_only: bool, window: Window) -> int | None:
        """A layer's window, as transformers counts it. Raises ValueError if decoding has no mask for what the layer sees."""
        kind = type(module).__name__
        with refusing(self.attachment.ranks):
            if not sees_past_only:
                raise ValueError(f"{kind} is not causal, but a call with a RingCache is: generate with causal models")
            if not isinstance(window, int | None):
                raise ValueError(
                    f"{kind} attends within chunks, but a RingCache takes causal attention and windows: detach, then generate"
                )
        return window

    def layer_call(self, number: int) -> LayerCall:
        """A layer with states in this call."""
        if number not in self.calls:
            before = self.cache.states.get(number, LayerState())
            if self.layout is None:
                made = LayerCall.alike(before, self.inputs.tokens, self.cache.alone, self.inputs.counts)
            else:
                made = LayerCall(before, self.layout, self.attachment.group, self.attachment.rank, self.inputs.counts)
            self.calls[number] = made
        return self.calls[number]

    @not_compiled
    def keep(self, module: nn.Module, k: torch.Tensor, v: torch.Tensor) -> int:
        """Keep the new keys (u, m, hk, d) and values (u, m, hk, d_v) that a layer attends to, and return its layer of the pages.

        What continues on shards is kept by `prefill`, when it attends. Raises ValueError for a layer that has given no keys to the cache.
        """
        layer, self.layer = self.layer, None
        with refusing(self.attachment.ranks):
            if layer is None:
                raise ValueError(f"{type(module).__name__} wrote no keys to the cache: {_NO_KEYS}")
        k, v = in_one_dtype(k, v)
        at = self.cache.kept.layers.index(layer)
        if self.layout is None:
            self.cache.paged.append(self.batch, k, v, layer=at)
        elif not self.continues:
            self.cache.paged.fill(self.batch, k, v, self.layout, layer=at)
        self.written.add(at)
        return at

    @not_compiled
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        scaling: float | None,
        score: ScoreMod | None,
    ) -> torch.Tensor:
        """Attention of the new tokens of a layer of the pages, q (u, m, h, d), to all tokens of their rows up to each: (u, m, h, d_v).

        k, v: the new tokens' keys (u, m, hk, d) and values (u, m, hk, d_v). With a layout, m are this rank's tokens.
        """
        mask = causal() if window is None else sliding_window(window - 1)
        options: Any = dict(layer=layer, mask=mask, softmax_scale=scaling, score=score)
        q, k, v = in_one_dtype(q, k, v)
        if self.layout is not None:
            return prefill(q, k, v, self.cache.paged, self.batch, self.layout, **options)
        after = q.shape[1]
        parts = []
        for part in q.split(MOST_QUERIES, 1):
            after -= part.shape[1]
            parts.append(decode(part, self.cache.paged, self.batch.without_last(after), **options))
        return torch.cat(parts, 1)

    def end(self, output: Any) -> Any:
        """The model's output, whole, after its tokens are in the cache; None, of a model that failed, takes them out again.

        Raises ValueError if a layer has kept no keys, and for output that cannot be made whole.
        """
        if output is None:
            self.cache.roll_back()
            return None
        kept = self.cache.kept
        missing = [layer for at, layer in enumerate(kept.layers) if at not in self.written]
        without = set(range(kept.mixers)) - self.calls.keys()
        try:
            with refusing(self.attachment.ranks):
                if missing:
                    raise ValueError(f"layers {missing} wrote no keys to the cache: {_NO_KEYS}")
                if without:
                    raise ValueError(f"{len(without)} of {kept.mixers} layers with states did not run: {_NO_KEYS}")
                unknown = [name for name, value in output.items() if value is not None and name not in _OUTPUTS]
                if unknown:
                    raise ValueError(
                        f"the model returns {', '.join(unknown)}, which would be of this rank's tokens: a call with a RingCache returns "
                        f"{', '.join(_OUTPUTS)}"
                    )
            for name, value in output.items():
                if name == "logits":
                    output[name] = self._whole_logits(value)
                elif name == "last_hidden_state":
                    output[name] = self._placed(self._whole(value), range(self.inputs.tokens), self.inputs.columns)
                elif name == "hidden_states" and value is not None:
                    output[name] = tuple(
                        self._placed(self._whole(x), range(self.inputs.tokens), self.inputs.columns) for x in value
                    )
        except BaseException:
            self.cache.roll_back()
            raise
        self.cache.commit(self)
        return output

    def _kept_here(self, here: torch.Tensor) -> torch.Tensor:
        """The local rows of kept positions, in their order."""
        return torch.isin(here, torch.tensor(self.kept)).nonzero().flatten()

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """(u, m, ...) from this rank's rows."""
        return x if self.layout is None else unshard(x, self.layout, self.attachment.group)

    def _whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """(b, keeps, vocabulary), where columns of padding are 0."""
        positions: Sequence[int] = self.kept if self.selects else range(self.inputs.tokens)
        if self.selects and self.layout is not None:
            logits = whole_rows(logits, self.layout, self.kept, self.attachment.group)
        else:
            logits = self._whole(logits)
        return self._placed(logits, positions, self.inputs.keeps)

    def _placed(self, x: torch.Tensor, positions: Sequence[int], columns: int) -> torch.Tensor:
        """x (u, w, ...) at these positions among the new tokens, as the last columns (b, columns, ...) of the caller's rows."""
        inputs = self.inputs
        if inputs.is_plain and len(positions) == columns:
            return x
        places = {position: i for i, position in enumerate(positions)}
        index = torch.tensor([[places.get(at, 0) for at in row] for row in inputs.places(columns).tolist()], device=x.device)
        found = x[torch.tensor(inputs.rows, device=x.device)[:, None], index]
        hidden = (inputs.places(columns) < 0).to(x.device)
        return found.masked_fill(hidden.view(*hidden.shape, *[1] * (x.dim() - 2)), 0.0)
