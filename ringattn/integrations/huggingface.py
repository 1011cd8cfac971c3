"""Attachment attention in Hugging Face transformers, through its `AttentionInterface` (transformers 4.57 and 5).

    attach(model, layout=ra.zigzag(seq_len, world_size))            # once a layout
    logits = model(input_ids=ra.shard(tokens, layout, rank)).logits  # this rank's rows

`attach` switches a model's attention to "ringattn" and gives each attention module one frozen object that says which
positions the ranks hold, what is live and who the ranks are. Every rank then runs the model on its own shard of the
sequence; everything but attention is local to a token. Position ids default to the shard's global positions.

Whatever a model asks of its attention is honoured or refused by name (`huggingface_checks.py`). A sliding window, packed documents
and attention sinks are honoured; a padding mask, dropout, a softcap, a key/value cache, position bias, chunked attention and
attention weights as output raise ValueError, and so does any option that is not known here.

What is live travels through the model as its `attention_mask`: transformers asks for one mask per kind of layer, and gets a
`LiveMask` instead of a tensor. Any module that would use it as a tensor, around this door, stops with an error.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from .. import check
from ..attention import ring_attention
from ..geometry.layout import Layout
from ..geometry.mask import Documents, Mask, causal, documents, full, sliding_window
from ..runtime.agree import Facts, agree, refuse
from ..runtime.groups import Group, get_context
from ..training.data import documents_of_positions, packed_positions
from . import huggingface_checks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attach", "detach", "register", "ring_attention_forward"]

NAME = "ringattn"
_ATTENTION = re.compile("Attention|MLA$")  # the names of modules that take theirs from AttentionInterface


@dataclass(frozen=True, eq=False)
class Live:
    """What is live in a call: the attached mask, within the call's documents. Masks are made once a kind of layer."""

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
            # transformers counts the query's own position: a window of 1 sees only itself
            self._masks[key] = mask if window is None else mask & sliding_window(window - 1, None)
        return self._masks[key]


@dataclass(frozen=True, eq=False)
class LiveMask:
    """What stands for a mask tensor inside a model: what is live in this call, and what this kind of layer is.

    Some models tell their attention that it is not causal whenever there is a mask, so the mask knows better.
    """

    live: Live | None
    window: int | None
    is_causal: bool | None

    def __getitem__(self, index: Any) -> LiveMask:
        """Itself where no token is cut off, as Gemma 4 asks of its masks before layers that share keys and values."""
        if any(part not in (slice(None), slice(0, None)) for part in (index if isinstance(index, tuple) else (index,))):
            raise ValueError(
                "the model takes a part of its mask, for tokens of its choice, but ring attention has one for all of a shard: call "
                "it without logits_to_keep"
            )
        return self


@dataclass(frozen=True, eq=False)
class Attachment:
    """What an attention module needs to know: who holds what, what is live, and among whom."""

    layout: Layout
    live: Live
    group: Group | None
    rank: int
    ignored: frozenset[str]
    before: str | None
    wants_last: bool  # rotary frequencies depend on the largest position of the sequence

    def __deepcopy__(self, memo: dict) -> Attachment:
        return self  # a process group has no copy, and a copied model is on the same ring


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A call of an attached model under way: of which model, and what is live in it."""

    model: nn.Module
    live: Live
    last: int | None = None  # the last position of all ranks, where rotary frequencies depend on it


_Function = TypeVar("_Function", bound=Callable)


def _between_graphs(function: _Function) -> _Function:
    """Never traced by torch.compile: it keeps what a call is about in a ContextVar, and ranks may talk to each other in it."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


# for the mask function, which transformers calls within, and models within the model
_call: ContextVar[ModelCall | None] = ContextVar("ringattn_call", default=None)


def register() -> None:
    """Make "ringattn" known to transformers as an attention implementation. `attach` does it too; twice is fine."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, ring_attention_forward)
    AttentionMaskInterface.register(NAME, _live_mask)


def attach(
    model: PreTrainedModel, *, layout: Layout, mask: Mask | None = None, group: Group | None = None, ignore: Iterable[str] = ()
) -> None:
    """Run a transformers model's attention around a ring, from the next forward on; again with another layout replaces it.

    Args:
        model: a `PreTrainedModel` whose attention goes through `AttentionInterface`.
        layout: which positions each rank holds; its world size is the group's.
        mask: which pairs are live, over global positions; None is causal for causal modules, full for the others.
            A module's own sliding window is intersected with it, and so are documents given with a call.
        group: the ranks of the ring: a ProcessGroup, a DeviceMesh, a hybrid, or None for the default group.
        ignore: names of further options that the model passes to its attention and that do not touch it, as you know.

    Call the model with this rank's rows: `input_ids` or `inputs_embeds` of `layout.lengths[rank]` tokens. Caches are off.

    - `position_ids` are filled in from the layout unless given. Given without a mask, they must be the global positions, or
      restart at each packed document: then tokens see their own document only (the ranks compare them, once a call).
    - `cu_seq_lens_q` and `cu_seq_lens_k`, the bounds of packed documents in the whole sequence, do the same without comparing,
      and `position_ids` restart by default. `max_length_q` and `max_length_k` may come with them.
    - Labels must be shifted before the sequence is split, so a causal model's `labels` are refused without `shift_labels`; and on
      several ranks without `num_items_in_batch`, the tokens counted on all of them, since the mean of one rank's is another; the ranks
      compare it.
      Those of other heads are refused on several ranks. The same holds for a head around an attached model.

    Raises ValueError if the layout is for another number of ranks or leaves one empty, or the model cannot take another
    attention, or would take a shard for the whole: it mixes tokens by other means too, pools them, or has positions of its own.
    """
    check.instance("layout", layout, Layout, check.BUILD_A_LAYOUT)
    if mask is not None:
        check.instance("mask", mask, Mask, check.BUILD_A_MASK)
    if isinstance(ignore, str):
        raise ValueError(f"ignore is {ignore!r}, but must be a list of names: give [{ignore!r}]")
    ranks = get_context(group).ranks
    if layout.world_size != ranks.size:
        raise ValueError(f"layout is for {layout.world_size} ranks, but the group has {ranks.size}: make it for {ranks.size}")
    if 0 in layout.lengths:
        raise ValueError(
            f"{layout!r} leaves rank {layout.lengths.index(0)} without tokens, which transformers' models cannot run on: "
            "use fewer ranks or a longer sequence"
        )
    huggingface_checks.check_model(model)
    modules = [module for module in model.modules() if _ATTENTION.search(type(module).__name__)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no module with Attention or MLA in its class name")
    register()
    attached: Attachment | None = getattr(model, NAME, None)
    before = model.config._attn_implementation if attached is None else attached.before
    before = None if before == NAME else before  # loaded with it, but never attached
    rotary = huggingface_checks.dynamic_rotary(model)
    ring = Attachment(layout, Live(mask), group, ranks.rank, frozenset(ignore), before, bool(rotary))
    # a model with a head holds one without: whichever is called gets its positions
    for module in huggingface_checks.models(model):
        if not hasattr(module, NAME):
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)
        setattr(module, NAME, ring)
        huggingface_checks.guard_loss(module, layout)
    for module in rotary:
        if not hasattr(module, NAME):
            module.register_forward_pre_hook(_add_last, with_kwargs=True)
            module.register_forward_hook(_drop_last)
    if attached is None:
        for module in huggingface_checks.models_around(model):
            if _around not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_around, with_kwargs=True)
    for module in [*modules, *rotary]:
        setattr(module, NAME, ring)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    # transformers only warns of parts that have attention of their own, in vision towers for one
    if model.config._attn_implementation != NAME:
        kept = model.config._attn_implementation
        detach(model, kept)
        raise ValueError(
            f"{type(model).__name__} keeps its attention, {kept!r}, as parts of it take none from AttentionInterface: attach the model of "
            "text within, or another model"
        )


def detach(model: PreTrainedModel, attn_implementation: str | None = None) -> None:
    """Undo `attach`: the model runs on whole sequences again, with the attention it had before, or another of transformers'."""
    attached: Attachment | None = getattr(model, NAME, None)
    for module in huggingface_checks.models_around(model):
        if not any(
            hasattr(part, NAME) for part in huggingface_checks.models(module) if part not in huggingface_checks.models(model)
        ):
            _unhook(module, (_around,))
    for module in model.modules():
        vars(module).pop(NAME, None)  # a wrapper such as PEFT's passes attributes on that are not its own
        huggingface_checks.release_loss(module)
        _unhook(module, _HOOKS)
    if attn_implementation is None:
        before = model.config._attn_implementation if attached is None else attached.before
        attn_implementation = "sdpa" if before in (None, NAME) else before
    model.set_attn_implementation(attn_implementation)


def ring_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LiveMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: q (b, h, s, d), k (b, hk, s, d), v (b, hk, s, d_v) -> (b, s, h, d_v), None.

    `s_aux` (h,) are attention sinks: a score a head that takes part in every softmax and brings no value.
    """
    ring: Attachment | None = getattr(module, NAME, None)
    if ring is None:
        raise ValueError(
            f"{type(module).__name__} is set to {NAME!r} but has no layout: call ringattn.integrations.huggingface.attach"
        )
    try:
        if attention_mask is not None and not isinstance(attention_mask, LiveMask):
            raise ValueError(
                "attention_mask is given, but ring attention takes its mask over global positions: attach(model, mask=...) it"
            )
        huggingface_checks.check_attention(dropout, options, ring.ignored)
        # a mask that is there knows of its documents; torch.compile follows no ContextVar
        call = None if attention_mask is not None else _call.get()
        if call is not None and call.live.documents is not None:
            raise ValueError(
                f"{type(module).__name__} is called without the mask that says where packed documents end: the model does not pass it on, "
                "or a hook took it away, as accelerate's does with cp_size above 1: leave cp_size at 1"
            )
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"the keys have {key.shape[2]} tokens and the queries {query.shape[2]}: key/value caches and "
                "cross-attention are not supported; call the model with use_cache=False"
            )
        known = None if attention_mask is None else attention_mask.is_causal
        looks_back = next(said for said in (known, is_causal, getattr(module, "is_causal", True)) if said is not None)
        window = _window(module, sliding_window, attention_mask, looks_back)
        if known and is_causal is None and not getattr(module, "is_causal", True) and ring.live.mask is None:
            raise ValueError(
                f"is_causal is False in {type(module).__name__}, but its mask is causal: attach(model, mask=...) the one that is meant, "
                "ringattn.full() or ringattn.causal()"
            )
        if attention_mask is not None and attention_mask.live is None:
            raise ValueError(
                f"{type(module).__name__} runs in a model that was entered by its forward, around the hooks that give it its positions: "
                "call the model itself"
            )
    except ValueError as error:
        if not torch.compiler.is_compiling():
            _tell(ring, error)
        raise
    if torch.is_autocast_enabled(query.device.type):
        # rotary embeddings leave q and k in fp32 and v in the low precision: all three go as autocast would have them
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) if x.dtype == torch.float32 else x for x in (query, key, value))
    live = ring.live if attention_mask is None or attention_mask.live is None else attention_mask.live
    out, stats = ring_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        layout=ring.layout,
        mask=live.mask_for(looks_back, window),
        group=ring.group,
        softmax_scale=scaling,
        return_stats=True,
    )
    return (out if s_aux is None else _with_sinks(out, stats.lse, s_aux)), None


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The output (b, s, h, d_v) of a softmax with one more score a head, `sinks` (h,), which brings no value.

    With l = exp(lse) the sum over the keys, every weight becomes l / (l + exp(sink)) = sigmoid(lse - sink) times itself.
    """
    if sinks.shape != lse.shape[1:2]:
        raise ValueError(f"s_aux has shape {tuple(sinks.shape)}, but must be ({lse.shape[1]},): one sink a query head")
    share = (lse - sinks.to(lse.dtype)[None, :, None]).sigmoid()  # (b, h, s)
    return (out * share.transpose(1, 2).unsqueeze(-1)).to(out.dtype)


def _window(module: nn.Module, given: int | None, mask: LiveMask | None, is_causal: bool) -> int | None:
    """The module's window: what it says itself and what its kind of layer's mask says must be one."""
    masked = None if mask is None else mask.window
    window = masked if given is None else given
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window is {window} in {type(module).__name__}, but a token sees itself at least: give 1 or more, or None"
        )
    if window is not None and not is_causal:
        raise ValueError(
            f"sliding_window is {window} on a module that is not causal, where transformers gives it no one meaning: "
            "set the config's window to None and attach with mask=ringattn.sliding_window(left, right)"
        )
    if given is not None and masked is not None and given != masked:
        raise ValueError(f"sliding_window is {given} in {type(module).__name__}, but its mask was made for {masked}: give one")
    return window


@_between_graphs
def _live_mask(*args: Any, local_size: int | None = None, **options: Any) -> LiveMask:
    """transformers' mask function: no tensor, but what is live; refuses a mask that asks for more."""
    call = _call.get()
    try:
        is_causal = huggingface_checks.check_mask(**options)
    except ValueError as error:
        if call is not None:
            _tell(getattr(call.model, NAME), error)
        raise
    if call is None:
        return LiveMask(None, local_size, is_causal)
    # a model whose layers have no window may ask for the mask of one all the same (Qwen2-MoE: of 0)
    if is_causal is not None and (local_size is None or (is_causal and local_size > 0)):
        call.live.mask_for(is_causal, local_size)  # compiled layers find it made
    return LiveMask(call.live, local_size, is_causal)


@_between_graphs
def _enter(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before the model runs: the shard must be the layout's, positions are global, documents known, labels shifted already."""
    ring: Attachment = model.ringattn  # pyright: ignore[reportAssignmentType]
    call = _call.get()
    within = call is not None and call.model is not model  # a model that has done the rest
    given = None
    args, kwargs = _named(model, args, kwargs)
    try:
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"{type(model).__name__} is attached, but its attention was set to {model.config._attn_implementation!r} since, which "
                "would attend within the shard: attach it again, or detach it"
            )
        tokens = huggingface_checks.check_inputs(model, args, kwargs, ring.layout, ring.rank)
        if not within:
            huggingface_checks.check_targets(model, kwargs, ring.layout, ring.ignored)
            given, kwargs = huggingface_checks.take_documents(kwargs)
    except ValueError as error:
        _tell(ring, error)
        raise
    if not within:
        _agree_on_count(ring, kwargs)
    if getattr(model.config, "use_cache", None):
        kwargs = {**kwargs, "use_cache": False}
    if within:
        return args, kwargs
    positions = kwargs.get("position_ids")
    if given is None and positions is not None and ring.live.mask is None:
        given = documents_of_positions(positions, ring.layout, get_context(ring.group).ranks)
    if positions is None:
        here = ring.layout.positions(ring.rank)
        positions = (here if given is None else packed_positions(given, here))[None]
        kwargs["position_ids"] = positions.to(tokens.device)
    last = max(agree(get_context(ring.group).ranks, _LAST_POSITION, int(positions.max()))) if ring.wants_last else None
    _call.set(ModelCall(model, ring.live if given is None else Live(ring.live.mask, given), last))
    return args, kwargs


@_between_graphs
def _around(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before a head runs that is not attached, around a model that is: it would take a shard for the whole like one that is."""
    ring: Attachment | None = next((getattr(part, NAME) for part in huggingface_checks.models(model) if hasattr(part, NAME)), None)
    if ring is None or hasattr(model, NAME):
        return
    kwargs = _named(model, args, kwargs)[1]
    try:
        huggingface_checks.check_head(model)
        huggingface_checks.check_targets(model, kwargs, ring.layout, ring.ignored)
    except ValueError as error:
        _tell(ring, error)
        raise
    _agree_on_count(ring, kwargs)


def _named(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A call's arguments by their names, but for the first where it stands alone."""
    named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) if len(args) > 1 else {}
    if named.keys() & kwargs.keys():
        return args, kwargs  # the model says so
    return args[len(named) :], {**named, **kwargs}


def _unhook(module: nn.Module, ours: tuple) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def _agree_on_count(ring: Attachment, kwargs: dict[str, Any]) -> None:
    """Raise ValueError, on every rank, if the ranks would divide their losses by different numbers of tokens: their own ones."""
    count, ranks = kwargs.get("num_items_in_batch"), get_context(ring.group).ranks
    if count is None or ranks.size == 1 or all(kwargs.get(name) is None for name in ("labels", "shift_labels")):
        return
    agree(ranks, Facts({"function": "the loss of a model's head", "num_items_in_batch": int(count)}), 0)


def _tell(ring: Attachment, error: ValueError) -> None:
    """Tell the other ranks what this one is refused for: they may have taken their input, and would wait."""
    ranks = get_context(ring.group).ranks
    if ranks.size > 1:
        refuse(ranks, error)


@_between_graphs
def _leave(model: PreTrainedModel, args: tuple, output: Any) -> None:
    call = _call.get()
    if call is not None and call.model is model:
        _call.set(None)
        huggingface_checks.check_output(model, output, getattr(model, NAME).layout)


@_between_graphs
def _add_last(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before a rotary embedding chooses its frequencies by the largest position: one position more, the last of all ranks."""
    call = _call.get()
    if call is None or call.last is None:
        raise ValueError(
            f"{type(module).__name__} chooses its frequencies by the last position of the sequence, which is known within a call of the "
            "attached model alone: checkpoint the layers, not what makes their rotary embeddings"
        )
    named = "position_ids" in kwargs
    positions = kwargs["position_ids"] if named else args[1]  # (..., s)
    positions = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), call.last)], dim=-1)
    return (args, {**kwargs, "position_ids": positions}) if named else ((args[0], positions, *args[2:]), kwargs)


def _drop_last(module: nn.Module, args: tuple, output: Any) -> Any:
    """After it: without that position's part of the embeddings (..., s + 1, d)."""
    return tuple(part[..., :-1, :] for part in output) if isinstance(output, tuple) else output[..., :-1, :]


_HOOKS = (_enter, _leave, _around, _add_last, _drop_last)
_LAST_POSITION = Facts({"function": "the last position, by which rotary frequencies are chosen"})
