"""What `attach` leaves in a transformers model, and what is live in a call of the model.

A model holds one frozen `Attachment`, and so does each of its attention modules. While the model runs, `running_call()` is a
`ModelCall`. What is live travels through the model as its `attention_mask`: transformers asks for one mask per kind of layer, and gets
a `LiveMask` instead of a tensor. Activation checkpointing keeps it with a layer's arguments, so a layer that runs again in the backward
pass attends as it did in the forward pass, whatever is attached by then.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from .. import check
from ..geometry.layout import Layout
from ..geometry.mask import Documents, Mask, causal, documents, full, sliding_window
from ..recurrent.kernels import RecurrenceKernels
from ..runtime.groups import Group, get_context
from ..transport import Ranks

_Function = TypeVar("_Function", bound=Callable)

_OF_CALLS = ("layout", "mask")  # arguments of calls, where they were not given to `attach`
NAME = "ringattn"  # of the attention implementation, and of the attribute that holds an `Attachment`


@dataclass(frozen=True)
class ChunkedWindow:
    """Attention in chunks of `size` tokens of a sequence of `seq_len`, as in Llama 4: a token sees its own chunk only."""

    size: int
    seq_len: int

    def documents(self, packed: Documents | None) -> Mask:
        """The chunks as documents; in packed documents they begin anew."""
        bounds = [0, self.seq_len] if packed is None else [*packed.cu_seqlens, self.seq_len]
        starts = (start for a, b in itertools.pairwise(bounds) for start in range(a, b, self.size))
        return documents(cu_seqlens=[*starts, self.seq_len], causal=False)


# of a layer: as transformers counts it, with the token itself; to the left and to the right, without it; chunks; or no limit
Window: TypeAlias = int | tuple[int, int] | ChunkedWindow | None


@dataclass(frozen=True, eq=False)
class LivePairs:
    """What is live in a call: the attached mask, within the call's documents. Makes one mask per kind of layer.

    rows: the number of tokens of each row, if there is padding on the right. documents: within them, if all rows end at one position.
    """

    mask: Mask | None
    documents: Documents | None = None
    rows: tuple[int, ...] | None = None
    _masks: dict[tuple[bool, Window], Mask] = field(default_factory=dict, repr=False)

    def hides_padding(self, is_causal: bool) -> bool:
        """Whether one mask for all rows can hide their padding from tokens of such a layer."""
        return is_causal or self.mask is not None or self.rows is None or len(set(self.rows)) == 1

    def mask_for(self, is_causal: bool, window: Window) -> Mask:
        """The mask (None: causal or full, as the module is) within the documents and the module's window or chunks.

        Raises ValueError if tokens would see padding, of rows that end at several positions.
        """
        key = (is_causal, window)
        if key not in self._masks:
            mask = self.mask
            if not self.hides_padding(is_causal):
                raise ValueError(
                    "attention_mask hides tokens of rows that end at different positions, and tokens of this model see later ones, where "
                    "the ring has one mask for all rows: give rows of one length to a call, or pack the sequences with pack(...)"
                )
            if mask is None and self.documents is None:
                mask = causal() if is_causal else full()
            if self.documents is not None:
                packed = documents(cu_seqlens=self.documents.cu_seqlens, causal=is_causal and mask is None)
                mask = packed if mask is None else mask & packed
            assert mask is not None
            if isinstance(window, ChunkedWindow):
                mask = mask & window.documents(self.documents)
            elif isinstance(window, tuple):
                mask = mask & sliding_window(*window)
            elif window is not None:
                # transformers counts the query's own position: in a window of 1 a token sees only itself
                mask = mask & sliding_window(window - 1, None)
            self._masks[key] = mask
        return self._masks[key]


@dataclass(frozen=True, eq=False)
class LiveMask:
    """Stands for a mask tensor inside a model: what is live in this call (None: unknown), and the window and causality of the layer.

    Some models say that their attention is not causal whenever there is a mask; `is_causal` then holds the truth. `attachment` is the
    call's, None outside of one. There, `given` is the mask tensor (b, s) of which this was asked for.
    """

    live: LivePairs | None
    window: Window
    is_causal: bool | None
    attachment: Attachment | None = None
    given: torch.Tensor | None = None

    @property
    def ndim(self) -> int:
        """0, as it is no tensor: Falcon adds ALiBi to masks of four dimensions, where our forward pass does it."""
        return 0

    def to(self, *args: Any, **kwargs: Any) -> LiveMask:
        """Itself: it has no dtype and no device to change, as MPT does."""
        return self

    def __getitem__(self, index: Any) -> LiveMask:
        """Itself if the index cuts off no token: Gemma 4 takes such a part for layers that share keys and values."""
        if any(part not in (slice(None), slice(0, None)) for part in (index if isinstance(index, tuple) else (index,))):
            raise ValueError(
                "the model takes a part of its mask, for some tokens, but ring attention has one mask for the whole shard: call "
                "it without logits_to_keep"
            )
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        raise _as_tensor(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _as_tensor(getattr(function, "__name__", str(function)))


def _as_tensor(name: str) -> ValueError:
    return ValueError(
        f"the model's own code uses its mask as a tensor ({name}), but around a ring no mask tensor exists: either a module changes "
        "its mask (Doge's), and the model cannot run on shards, or a layer runs again in the backward pass after detach: call "
        "backward before detach"
    )


@dataclass(frozen=True, eq=False)
class Attachment:
    """What an attention module needs to know: the layout, what is live, the ranks, the options to ignore, and the seed of dropout.

    fixed_layout: of all calls; None if each call brings its own. of_call: what was attached, if this is that of such a call, or of one
    with a `RingCache`; cached: the latter.
    """

    fixed_layout: Layout | None
    live: LivePairs
    group: Group | None
    rank: int
    ignored: frozenset[str]
    previous_attention: str | None  # the implementation before `attach`, for `detach`
    needs_last_position: bool  # rotary frequencies depend on the sequence's last position
    takes_positions: bool = True  # position_ids; without them, scores depend on distances, which the layout gives to attention
    has_forwards: bool = False  # attention has forward passes of our own (`huggingface_scores.py`, `huggingface_plain.py`)
    says_so: bool = True  # the model's class says that its attention comes from AttentionInterface
    mixes: bool = False  # has layers with convolutions or recurrences (`huggingface_mixers.py`)
    gives_mask: bool = False  # the model hands its attention_mask to such layers as it is
    first_position: int = 0  # of a sequence, as the model counts: RoBERTa's kind begins after padding_idx
    seed: int | None = None  # of dropout; None: each call draws one
    recurrence_kernels: RecurrenceKernels | None = None  # of those layers; None: chosen in each call
    of_call: Attachment | None = None
    states: Layout | None = None  # of the encoder's states that a decoder was called with
    cached: Any = None  # a `huggingface_call.CachedCall`

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has no other layers: states have an order, but no positions."""
        return self.mixes and not self.takes_positions

    @property
    def layout(self) -> Layout:
        """The layout of this call. Raises ValueError where it is unknown."""
        if self.fixed_layout is None:
            raise ValueError(
                "the model was attached without a layout, and a part of it runs where the call's is unknown: give layout= to the call of "
                "the attached model, or attach(model, layout=...)"
            )
        return self.fixed_layout

    @property
    def attached(self) -> Attachment:
        """What `attach` made, of which this may be a call's."""
        return self if self.of_call is None else self.of_call

    def take_layout(self, model: nn.Module, kwargs: dict[str, Any]) -> tuple[Attachment, dict[str, Any]]:
        """The attachment of a call, and the call's arguments without its layout and mask. Raises ValueError if they do not fit."""
        given = [name for name in _OF_CALLS if kwargs.get(name) is not None]
        kind = type(model).__name__
        if self.fixed_layout is not None:
            # such an argument would be of the model itself, which says so if it has none
            if "layout" in given and isinstance(kwargs["layout"], Layout):
                raise ValueError(
                    f"{kind} is called with layout={kwargs['layout']!r}, but was attached with {self.fixed_layout!r} for all calls: "
                    "attach(model) without a layout, and give one to each call"
                )
            return self, kwargs
        if "layout" not in given:
            raise ValueError(
                f"{kind} was attached without a layout, and is called without one: call model(**batch, layout=...), or "
                "attach(model, layout=...)"
            )
        layout, mask = kwargs["layout"], kwargs.get("mask")
        check_layout(layout, mask, self.ranks)
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_CALLS}
        live = self.live if mask is None else LivePairs(mask)
        return replace(self, fixed_layout=layout, live=live, of_call=self), kwargs

    @property
    def ranks(self) -> Ranks:
        return get_context(self.group).ranks

    def __deepcopy__(self, memo: dict) -> Attachment:
        return self  # a process group cannot be copied, and a copied model stays on the same ring


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A call of an attached model under way, or of a model that holds one.

    live: what is live in the call; None in the call of a holder. outer: the call within which this one was made. frame: Python's, which
    waits for the call to end. Torch runs no hooks after a KeyboardInterrupt, so a call whose frame does not run any more is over.
    """

    model: nn.Module
    live: LivePairs | None
    outer: ModelCall | None
    frame: FrameType
    attachment: Attachment | None = None
    last_position: int | None = None  # over all ranks, if rotary frequencies depend on it
    positions: torch.Tensor | None = None  # of this rank's tokens (b or 1, s), as the model takes them
    given: frozenset[str] = frozenset()  # of a holder's call, the names of what its caller gave

    def holds(self, model: nn.Module) -> bool:
        """Whether a model is a part of this call's model, and not the model itself."""
        return model is not self.model and any(part is model for part in self.model.modules())


def check_layout(layout: object, mask: object, ranks: Ranks) -> None:
    """Raise ValueError for a layout that is none of these ranks, leaves one of them without tokens, or does not fit the mask."""
    check.instance("layout", layout, Layout, check.BUILD_A_LAYOUT)
    assert isinstance(layout, Layout)
    check.optional("mask", mask, Mask, check.BUILD_A_MASK)
    if layout.world_size != ranks.size:
        raise ValueError(f"layout is for {layout.world_size} ranks, but the group has {ranks.size}: make it for {ranks.size}")
    if 0 in layout.lengths:
        raise ValueError(
            f"{layout!r} leaves rank {layout.lengths.index(0)} without tokens, which transformers' models cannot run on: "
            "use fewer ranks or a longer sequence"
        )


def not_compiled(function: _Function) -> _Function:
    """Let torch.compile leave a function alone, at the cost of a graph break."""
    return torch.compiler.disable(function)


def calling_frame() -> FrameType:
    """The frame that called a module's hook, and waits for the module to end."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch._dynamo"):
        frame = frame.f_back
    return frame


def running_calls() -> Iterator[ModelCall]:
    """The calls under way in this thread, innermost first."""
    call = _latest.get()
    if call is None:
        return
    running = set()
    frame = sys._getframe()
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    while call is not None:
        if call.frame in running:
            yield call
        call = call.outer


def running_call() -> ModelCall | None:
    """The innermost call of an attached model under way in this thread."""
    return next((call for call in running_calls() if call.live is not None), None)


def begin_call(call: ModelCall) -> None:
    _latest.set(call)


def end_call(model: nn.Module) -> ModelCall | None:
    """Forget the latest call of this model, and what was called in it; returns it, if there is one."""
    call = _latest.get()
    while call is not None and call.model is not model:
        call = call.outer
    if call is not None:
        _latest.set(call.outer)
    return call


# set by the hooks of attached models and of their holders, read by models within them and by transformers' mask function
_latest: ContextVar[ModelCall | None] = ContextVar("ringattn_call", default=None)
