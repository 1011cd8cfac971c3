"""Ring attention in Hugging Face transformers, through its `AttentionInterface` (transformers 4.57 and 5).

    attach(model, layout=ra.zigzag(seq_len, world_size))            # once per layout
    logits = model(input_ids=ra.shard(tokens, layout, rank)).logits  # this rank's rows

`attach` switches a model's attention to "ringattn". Each attention module gets one frozen object that says which positions the ranks
hold, what is live and who the ranks are. Every rank then runs the model on its own shard of the sequence; everything but
attention is local to a token. Position ids default to the shard's global positions.

Each option that a model passes to its attention is either honoured or refused by name (`huggingface_checks.py`). Honoured are
sliding windows, packed documents, attention sinks, a softcap and dropout. A padding mask, a key/value cache, position bias, chunked
attention and attention weights as output raise ValueError, and so does any option that this module does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import check
from ..attention import ring_attention
from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..runtime.agree import refusing
from ..runtime.groups import Group, get_context
from ..scores import ScoreMod, score
from ..training.checkpoint import runs_again_reentrantly
from .huggingface_attachment import NAME, Attachment, LiveMask, LivePairs, running_call
from .huggingface_checks import (
    check_attention,
    check_head_dims,
    check_model,
    check_positions_taken,
    dynamic_rotary,
    models,
    models_around,
)
from .huggingface_hooks import hook_holder, hook_model, hook_rotary, live_mask, unhook, unhook_holder
from .huggingface_labels import guard_loss, release_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attach", "detach", "register", "ring_attention_forward"]

_ATTENTION = re.compile("Attention|MLA$")  # class names of modules that use AttentionInterface


def register() -> None:
    """Make "ringattn" known to transformers as an attention implementation. `attach` calls it; you may call it again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, ring_attention_forward)
    AttentionMaskInterface.register(NAME, live_mask)


def attach(
    model: PreTrainedModel, *, layout: Layout, mask: Mask | None = None, group: Group | None = None, ignore: Iterable[str] = ()
) -> None:
    """Run a transformers model's attention around a ring, from the next forward on. Call it again to change the layout.

    Args:
        model: a `PreTrainedModel` whose attention goes through `AttentionInterface`.
        layout: which positions each rank holds; its world size is the group's.
        mask: which pairs are live, over global positions; None is causal for causal modules, full for the others.
            It is intersected with a module's own sliding window, and with the documents of a call.
        group: the ranks of the ring: a ProcessGroup, a DeviceMesh, a hybrid, or None for the default group.
        ignore: names of further options that the model passes to its attention and that, as you know, do not affect it.

    Call the model with this rank's rows: `input_ids` or `inputs_embeds` of `layout.lengths[rank]` tokens. Caches are off.

    - `position_ids` default to the layout's. If you give them without a mask, they must be the global positions, or restart at each
      packed document: then tokens see their own document only (the ranks compare them once per call).
    - `cu_seq_lens_q` and `cu_seq_lens_k`, the bounds of packed documents in the whole sequence, have the same effect without a
      comparison, and `position_ids` then restart by default. `max_length_q` and `max_length_k` may come with them.
    - Shift labels before the sequence is split: a causal model's `labels` are refused without `shift_labels`. On several ranks they are
      also refused without `num_items_in_batch`, the number of tokens counted on all ranks, because a rank's own mean is not the
      mean of all; the ranks compare this number. Labels of other heads are refused on several ranks. The same holds for the
      head of a model that holds an attached model.

    Raises ValueError if the layout is for another number of ranks or leaves a rank without tokens, if the model cannot take another
    attention, and if it would take a shard for the whole sequence: it mixes tokens by other means too, pools them, or has its own
    positions.
    """
    rank = _check_arguments(layout, mask, group, ignore)
    check_model(model)
    modules = [module for module in model.modules() if _ATTENTION.search(type(module).__name__)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no module with Attention or MLA in its class name")
    check_head_dims(modules)
    check_positions_taken(model)
    register()
    rotary = dynamic_rotary(model)
    is_new = not hasattr(model, NAME)
    attachment = Attachment(layout, LivePairs(mask), group, rank, frozenset(ignore), _previous_attention(model), bool(rotary))
    _attach_models(model, attachment)
    for module in rotary:
        if not hasattr(module, NAME):
            hook_rotary(module)
    if is_new:
        for holder in models_around(model):
            hook_holder(holder)
    for module in [*modules, *rotary]:
        setattr(module, NAME, attachment)
    _switch_attention(model)


def detach(model: PreTrainedModel, attn_implementation: str | None = None) -> None:
    """Undo `attach`: the model runs on whole sequences again.

    attn_implementation: the attention to use from now on. None for the one before `attach`, or "sdpa" if that was the ring's.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"{type(model).__name__} is not a model of transformers: give the one that was attached")
    before = _previous_attention(model)
    own = models(model)
    for holder in models_around(model):
        if not any(hasattr(part, NAME) for part in models(holder) if part not in own):
            unhook_holder(holder)
    for module in model.modules():
        # not delattr: a wrapper such as PEFT's shows attributes that are not its own
        vars(module).pop(NAME, None)
        release_loss(module)
        unhook(module)
    model.set_attn_implementation(attn_implementation or before or "sdpa")


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
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: q (b, h, s, d), k (b, hk, s, d), v (b, hk, s, d_v) -> (b, s, h, d_v), None.

    `s_aux` (h,) are attention sinks, `softcap` caps scores, and `dropout` drops weights: see `ringattn.score`. Which weights are dropped
    follows from torch's generator for the CPU, which must be in the same state on all ranks.
    """
    attachment: Attachment | None = getattr(module, NAME, None)
    if attachment is None:
        raise ValueError(
            f"{type(module).__name__} is set to {NAME!r} but has no layout: call ringattn.integrations.huggingface.attach"
        )
    # another one may be attached by the time a checkpointed layer runs again
    if isinstance(attention_mask, LiveMask) and attention_mask.attachment is not None:
        attachment = attention_mask.attachment
    request = module, attachment, query, key, attention_mask, sliding_window, is_causal
    if torch.compiler.is_compiling():
        check_attention(options, attachment.ignored)
        modified = _score(s_aux, softcap, dropout)
        sees_past_only, window = _causality_and_window(*request)
    else:
        with refusing(attachment.ranks):
            if attention_mask is None and runs_again_reentrantly():
                raise ValueError(
                    f"{type(module).__name__} runs again in the backward pass under reentrant activation checkpointing, without the mask "
                    'by which it would know its layout: call gradient_checkpointing_enable({"use_reentrant": False})'
                )
            check_attention(options, attachment.ignored)
            modified = _score(s_aux, softcap, dropout)
            sees_past_only, window = _causality_and_window(*request)
    if torch.is_autocast_enabled(query.device.type):
        # rotary embeddings leave q and k in fp32 and v in the low precision; autocast would use the low one for all three
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) if x.dtype == torch.float32 else x for x in (query, key, value))
    live = attachment.live if attention_mask is None or attention_mask.live is None else attention_mask.live
    out = ring_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        layout=attachment.layout,
        mask=live.mask_for(sees_past_only, window),
        group=attachment.group,
        softmax_scale=scaling,
        score=modified,
        name=_call_name(module),
    )
    return out, None


def _score(sinks: torch.Tensor | None, softcap: float | None, dropout: float) -> ScoreMod | None:
    """What a layer asks for; None if for nothing."""
    if sinks is None and softcap is None and not dropout:
        return None
    return score(sinks=sinks, softcap=softcap, dropout=dropout)


def _call_name(module: nn.Module) -> str | None:
    """What tells a layer's calls from those of others: its number. None in compiled code, where it would be a graph for each layer."""
    number = None if torch.compiler.is_compiling() else getattr(module, "layer_idx", None)
    return None if number is None else f"{type(module).__name__} of layer {number}"


def _check_arguments(layout: Layout, mask: Mask | None, group: Group | None, ignore: Iterable[str]) -> int:
    """This rank in the group. Raises ValueError for bad arguments of `attach`."""
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
    return ranks.rank


def _previous_attention(model: Any) -> str | None:
    """The attention implementation that a model had before `attach`; None if it was loaded with the ring's."""
    attachment: Attachment | None = getattr(model, NAME, None)
    before = model.config._attn_implementation if attachment is None else attachment.previous_attention
    return None if before == NAME else before


def _attach_models(model: nn.Module, attachment: Attachment) -> None:
    """Attach and hook a model and the models in it: a model with a head holds one without, and users may call either."""
    for part in models(model):
        if not hasattr(part, NAME):
            hook_model(part)
        setattr(part, NAME, attachment)
        guard_loss(part, attachment.layout)


def _switch_attention(model: PreTrainedModel) -> None:
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    # transformers only warns if parts keep their own attention, such as vision towers
    if model.config._attn_implementation != NAME:
        kept = model.config._attn_implementation
        detach(model, kept)
        raise ValueError(
            f"{type(model).__name__} keeps its attention, {kept!r}, as parts of it take none from AttentionInterface: attach the text "
            "model inside it, or another model"
        )


def _causality_and_window(
    module: nn.Module,
    attachment: Attachment,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: LiveMask | None,
    window: int | None,
    is_causal: bool | None,
) -> tuple[bool, int | None]:
    """Whether tokens see none after them, and the window. Raises ValueError if the module and its mask do not fit each other."""
    if mask is not None and not isinstance(mask, LiveMask):
        raise ValueError(
            "attention_mask is given, but ring attention takes its mask over global positions: pass it as attach(model, mask=...)"
        )
    # a mask holds the call's documents; without one look at the call, which torch.compile could not trace
    call = None if mask is not None else running_call()
    if call is not None and call.live is not None and call.live.documents is not None:
        raise ValueError(
            f"{type(module).__name__} is called without the mask that says where packed documents end: the model does not pass it on, "
            "or a hook took it away, as accelerate's does with cp_size above 1: leave cp_size at 1"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"the keys have {key.shape[2]} tokens and the queries {query.shape[2]}: key/value caches and "
            "cross-attention are not supported; call the model with use_cache=False"
        )
    of_mask, of_module = None if mask is None else mask.is_causal, getattr(module, "is_causal", True)
    sees_past_only = next(known for known in (of_mask, is_causal, of_module) if known is not None)
    window = _window(module, window, mask, sees_past_only)
    if of_mask and is_causal is None and not of_module and attachment.live.mask is None:
        raise ValueError(
            f"is_causal is False in {type(module).__name__}, but its mask is causal: attach(model, mask=...) the one you mean, "
            "ringattn.full() or ringattn.causal()"
        )
    if mask is not None and mask.live is None:
        raise ValueError(
            f"{type(module).__name__} runs in a model whose forward was called directly, without the hooks that fill in positions: "
            "call the model itself"
        )
    return sees_past_only, window


def _window(module: nn.Module, given: int | None, mask: LiveMask | None, is_causal: bool) -> int | None:
    """The module's window. What the module says and what the mask of its kind of layer says must agree."""
    of_mask = None if mask is None else mask.window
    window = of_mask if given is None else given
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window is {window} in {type(module).__name__}, but a token sees itself at least: give 1 or more, or None"
        )
    if window is not None and not is_causal:
        raise ValueError(
            f"sliding_window is {window} on a module that is not causal, where transformers' models differ in its meaning: "
            "set the config's window to None and attach with mask=ringattn.sliding_window(left, right)"
        )
    if given is not None and of_mask is not None and given != of_mask:
        raise ValueError(f"sliding_window is {given} in {type(module).__name__}, but its mask was made for {of_mask}: give one")
    return window
