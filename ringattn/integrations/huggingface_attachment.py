"""What `attach` leaves in a transformers model, and what is live in a call of the model.

A model holds one frozen `Attachment`, and so does each of its attention modules. While the model runs, `current_call` holds a
`ModelCall`. What is live travels through the model as its `attention_mask`: transformers asks for one mask per kind of layer, and gets
a `LiveMask` instead of a tensor. A module that tries to use it as a tensor stops with an error.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..geometry.layout import Layout
from ..geometry.mask import Documents, Mask, causal, documents, full, sliding_window
from ..runtime.groups import Group, get_context
from ..transport import Ranks

NAME = "ringattn"  # of the attention implementation, and of the attribute that holds an `Attachment`


@dataclass(frozen=True, eq=False)
class LivePairs:
    """What is live in a call: the attached mask, within the call's documents. Makes one mask per kind of layer."""

    mask: Mask | None
    documents: Documents | None = None
    _masks: dict[tuple[bool, int | None], Mask] = field(default_factory=dict, repr=False)

    def mask_for(self, is_causal: bool, window: int | None) -> Mask:
        """The mask (None: causal or full, as the module is) within the documents and the module's window."""
        key = (is_causal, window)
        if key not in self._masks:
            mask = self.mask
            if mask is None and self.documents is None:
                mask = causal() if is_causal else full()
            if self.documents is not None:
                packed = documents(cu_seqlens=self.documents.cu_seqlens, causal=is_causal and mask is None)
                mask = packed if mask is None else mask & packed
            assert mask is not None
            # transformers counts the query's own position: in a window of 1 a token sees only itself
            self._masks[key] = mask if window is None else mask & sliding_window(window - 1, None)
        return self._masks[key]


@dataclass(frozen=True, eq=False)
class LiveMask:
    """Stands for a mask tensor inside a model: what is live in this call (None: unknown), and the window and causality of the layer.

    Some models say that their attention is not causal whenever there is a mask; `is_causal` then holds the truth.
    """

    live: LivePairs | None
    window: int | None
    is_causal: bool | None

    def __getitem__(self, index: Any) -> LiveMask:
        """Itself if the index cuts off no token: Gemma 4 takes such a part for layers that share keys and values."""
        if any(part not in (slice(None), slice(0, None)) for part in (index if isinstance(index, tuple) else (index,))):
            raise ValueError(
                "the model takes a part of its mask, for some tokens, but ring attention has one mask for the whole shard: call "
                "it without logits_to_keep"
            )
        return self


@dataclass(frozen=True, eq=False)
class Attachment:
    """What an attention module needs to know: the layout, what is live, the ranks, and the options to ignore."""

    layout: Layout
    live: LivePairs
    group: Group | None
    rank: int
    ignored: frozenset[str]
    previous_attention: str | None  # the implementation before `attach`, for `detach`
    needs_last_position: bool  # rotary frequencies depend on the sequence's last position

    @property
    def ranks(self) -> Ranks:
        return get_context(self.group).ranks

    def __deepcopy__(self, memo: dict) -> Attachment:
        return self  # a process group cannot be copied, and a copied model stays on the same ring


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A call of an attached model under way: the model, and what is live in the call."""

    model: nn.Module
    live: LivePairs
    last_position: int | None = None  # over all ranks, if rotary frequencies depend on it


# set by the outermost attached model's hooks, read by models within it and by transformers' mask function
current_call: ContextVar[ModelCall | None] = ContextVar("ringattn_call", default=None)
