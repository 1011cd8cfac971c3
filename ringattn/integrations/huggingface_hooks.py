"""What runs around an attached model and inside it: the hooks of its modules, and transformers' mask function.

torch.compile traces none of it: it keeps the calls under way in a ContextVar, and ranks may talk to each other in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..geometry.mask import Documents, documents
from ..geometry.region import LO
from ..runtime.agree import Facts, agree, refusing
from ..training.data import documents_of_positions, packed_positions
from .huggingface_attachment import (
    NAME,
    Attachment,
    LiveMask,
    LivePairs,
    ModelCall,
    begin_call,
    calling_frame,
    end_call,
    not_compiled,
    running_call,
    running_calls,
)
from .huggingface_checks import (
    check_caches,
    check_documents_arrive,
    check_head,
    check_inputs,
    check_mask,
    check_options,
    check_output,
    check_positions,
    mask_window,
    models,
    take_documents,
)
from .huggingface_encoder import check_both_attached, with_states
from .huggingface_inputs import CACHES, named_caches
from .huggingface_labels import agree_on_count, check_targets
from .huggingface_padding import agreed_rows, check_padded_labels
from .huggingface_positions import check_unpadded, give_positions
from .huggingface_scores import check_mask_of_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .generation import RingCache

_LAST_POSITION = Facts({"function": "the last position, by which rotary frequencies are chosen"})


def hook_model(model: nn.Module) -> None:
    """Let a model that is attached for the first time fill in positions and check its input."""
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)


def hook_rotary(module: nn.Module) -> None:
    """Let a rotary embedding see the last position of all ranks."""
    module.register_forward_pre_hook(_add_last, with_kwargs=True)
    module.register_forward_hook(_drop_last)


def hook_holder(model: nn.Module) -> None:
    """Let a model that holds an attached model check its input, unless it does so already."""
    if _around not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_around, with_kwargs=True)
        model.register_forward_hook(_leave_around, always_call=True)


def unhook(module: nn.Module) -> None:
    """Remove all these hooks."""
    _remove(module, (_enter, _leave, _around, _leave_around, _add_last, _drop_last, give_positions))


def unhook_holder(model: nn.Module) -> None:
    """Undo `hook_holder`."""
    _remove(model, (_around, _leave_around))


def _remove(module: nn.Module, ours: Iterable[Callable]) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


@not_compiled
def live_mask(*args: Any, local_size: int | None = None, **options: Any) -> LiveMask:
    """transformers' mask function: returns what is live instead of a tensor. Raises ValueError if the mask asks for more."""
    call = running_call()
    if call is None or call.live is None or call.attachment is None:
        # a model that holds an attached one may make the masks for it, whose call then sees to padding
        return LiveMask(None, local_size, check_mask(**options, is_padded=True), given=options.get("attention_mask"))
    with refusing(call.attachment.ranks):
        is_causal = check_mask(**options, is_padded=call.live.rows is not None)
        window = mask_window(local_size, is_causal, _whole_tokens(call.attachment), **options)
        # a model may ask for a mask that no layer uses: of a window that it has not (Qwen2-MoE: of 0), of states that it has not (BART)
        is_asked = not isinstance(window, int) or (is_causal and window > 0)
        if is_causal is not None and is_asked and call.live.hides_padding(is_causal):
            call.live.mask_for(is_causal, window)  # compiled layers cannot make it, but find it made
    return LiveMask(call.live, window, is_causal, call.attachment)


def _whole_tokens(attachment: Attachment) -> int:
    """The length of the whole sequence of a call."""
    cached = attachment.cached
    # a call with a cache has a layout of the new tokens at most
    return attachment.layout.seq_len if cached is None else cached.last_position + 1


@not_compiled
def _enter(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before an attached model runs: check its input, fill in positions, and note what is live."""
    attachment: Attachment = model.ringattn  # pyrefly: ignore[bad-assignment]
    call = running_call()
    # a model that is part of an attached one, whose hook has filled in positions and noted what is live
    is_inner = call is not None and call.holds(model)
    packed = None
    args, kwargs = _by_name(model, args, kwargs)
    kwargs = named_caches(model, _without_masks_of_holders(kwargs))
    cache = _ring_cache(kwargs)
    with refusing(attachment.ranks):
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"{type(model).__name__} is attached, but its attention was set to {model.config._attn_implementation!r} since, which "
                "would attend within the shard: attach it again, or detach it"
            )
        if is_inner and call is not None and call.attachment is not None and call.attachment.attached is attachment:
            attachment = call.attachment
        elif is_inner and call is not None:
            raise ValueError(
                f"{type(model).__name__} was attached by itself after {type(call.model).__name__}, which it is a part of: attach the "
                f"{type(call.model).__name__} again, and it alone"
            )
        elif cache is None:
            check_caches(kwargs)
            attachment, kwargs = attachment.take_layout(model, kwargs)
    if attachment.cached is not None:  # of the call that this one is a part of
        return args, kwargs
    if cache is not None:
        kwargs = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
        if attachment.is_recurrent:
            with refusing(attachment.ranks):
                check_options(model, kwargs, attachment.ignored)
        attachment, kwargs = cache.begin(model, attachment, kwargs)
        last = attachment.cached.last_position if attachment.cached is not None and attachment.needs_last_position else None
        if attachment.gives_mask:
            kwargs = {**kwargs, "attention_mask": LiveMask(attachment.live, None, True, attachment)}
        begin_call(ModelCall(model, attachment.live, next(running_calls(), None), calling_frame(), attachment, last))
        return (), kwargs
    with refusing(attachment.ranks):
        tokens = check_inputs(model, args, kwargs, attachment.layout, attachment.rank)
        if not is_inner:
            if attachment.of_call is not None:
                check_mask_of_scores(model, attachment.live.mask, attachment.layout)
            check_targets(model, kwargs, attachment.ranks.size, attachment.ignored)
            holders = [holder for holder in running_calls() if holder.live is None and holder.holds(model)]
            check_documents_arrive(model, kwargs, holders)
            packed, kwargs = take_documents(kwargs, attachment.layout)
            if attachment.is_recurrent:
                check_options(model, kwargs, attachment.ignored)
            check_positions(model, kwargs, attachment.layout, holders)
    if not is_inner:
        agree_on_count(attachment.ranks, kwargs)
    if getattr(model.config, "use_cache", None):
        kwargs = {**kwargs, "use_cache": False}
    if is_inner:
        return args, kwargs
    padding = kwargs.get("attention_mask")
    rows = agreed_rows(padding, attachment.layout, attachment.ranks)
    with refusing(attachment.ranks):
        _check_padded(model, kwargs, attachment, rows, packed)
    positions = kwargs.get("position_ids")
    if positions is None:
        here = attachment.layout.positions(attachment.rank)
        positions = (here if packed is None else packed_positions(packed, here))[None].to(tokens.device)
    elif packed is None and attachment.live.mask is None:
        packed = documents_of_positions(positions, attachment.layout, attachment.ranks)
    last = None
    if attachment.needs_last_position:
        last = max(agree(attachment.ranks, _LAST_POSITION, int(positions.max()))[0])
    if attachment.first_position:
        positions = positions + attachment.first_position
    if attachment.takes_positions:
        kwargs = {**kwargs, "position_ids": positions}
    else:
        kwargs = {name: value for name, value in kwargs.items() if name != "position_ids"}
    if attachment.has_forwards:
        kwargs, attachment = with_states(model, kwargs, attachment, packed is not None)
    if rows is not None and packed is not None:
        raise ValueError("position_ids restart at packed documents, and attention_mask hides tokens: give one of the two")
    if rows is not None and len(set(rows)) == 1:
        packed = documents(cu_seqlens=[0, rows[0]])
        assert isinstance(packed, Documents)
    live = attachment.live if packed is None and rows is None else LivePairs(attachment.live.mask, packed, rows)
    if attachment.gives_mask:
        kwargs = {**kwargs, "attention_mask": LiveMask(live, None, True, attachment)}
    begin_call(ModelCall(model, live, next(running_calls(), None), calling_frame(), attachment, last, positions))
    return args, kwargs


@not_compiled
def _leave(model: PreTrainedModel, args: tuple, output: Any) -> Any:
    """After an attached model ran, or failed: the call is over. With a `RingCache` its output becomes whole."""
    call = end_call(model)
    if call is None or call.attachment is None:
        return None
    if call.attachment.cached is not None:
        return call.attachment.cached.end(output)
    check_output(model, output, call.attachment.layout)
    return None


@not_compiled
def _around(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Before a model runs that is not attached but holds one that is: its head would take the shard for the whole sequence."""
    attachment: Attachment | None = next((getattr(part, NAME) for part in models(model) if hasattr(part, NAME)), None)
    if attachment is None or hasattr(model, NAME):
        return
    kwargs = _by_name(model, args, kwargs)[1]
    with refusing(attachment.ranks):
        if _ring_cache(kwargs) is not None:
            raise ValueError(
                f"{type(model).__name__} is called with a RingCache, but only a part of it is attached: attach the model that generates"
            )
        check_head(model)
        if attachment.has_forwards:
            check_both_attached(model)
        # the model within takes them
        attachment, kwargs = attachment.take_layout(model, kwargs)
        check_targets(model, kwargs, attachment.ranks.size, attachment.ignored)
        check_positions(model, kwargs, attachment.layout)
    agree_on_count(attachment.ranks, kwargs)
    given = frozenset(name for name, value in kwargs.items() if value is not None)
    begin_call(ModelCall(model, None, next(running_calls(), None), calling_frame(), given=given))


@not_compiled
def _leave_around(model: PreTrainedModel, args: tuple, output: Any) -> None:
    """After it ran, or failed: the call is over."""
    end_call(model)


def _ring_cache(kwargs: dict[str, Any]) -> RingCache | None:
    """The cache that a call was given, if it is one of ours."""
    given = [kwargs[name] for name in CACHES if kwargs.get(name) is not None]
    if not given:
        return None
    # it imports transformers, as the caller of a model has done
    from .generation import RingCache

    return next((cache for cache in given if isinstance(cache, RingCache)), None)


def _check_padded(
    model: nn.Module, kwargs: dict[str, Any], attachment: Attachment, rows: tuple[int, ...] | None, packed: Documents | None
) -> None:
    """Raise ValueError for padding on the right that would be seen, or that has labels."""
    padding = kwargs.get("attention_mask")
    if attachment.first_position:
        hidden = None if rows is None or padding is None else padding == 0
        check_unpadded(kwargs.get("input_ids"), hidden, attachment.first_position - 1)
    if rows is None:
        return
    if packed is not None:
        raise ValueError(
            "packed documents are given, and attention_mask hides tokens: give one of the two; nothing sees what follows the last document"
        )
    check_padded_labels(padding, kwargs.get("shift_labels"))
    if any(getattr(call.model, "encoder", None) is model for call in running_calls()):
        raise ValueError(
            "attention_mask hides tokens of an encoder, whose decoder would see them: cut them off, or give a row of the batch to each call"
        )
    mask = attachment.live.mask
    if mask is not None and len(set(rows)) > 1 and bool((mask.regions(attachment.layout.seq_len)[:, LO] < 0).any()):
        raise ValueError(
            f"attention_mask hides tokens of rows that end at different positions, and {mask!r} lets tokens see later ones: give rows of "
            "one length to a call, or attach a mask within ringattn.causal()"
        )


def _by_name(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A call's arguments by their names; a single positional argument stays as it is."""
    named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) if len(args) > 1 else {}
    if named.keys() & kwargs.keys():
        return args, kwargs  # given twice: the model itself raises the error
    return args[len(named) :], {**named, **kwargs}


def _without_masks_of_holders(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with the mask tensor (b, s) from which a model that holds this one made masks, as Gemma 3's and 4's do.

    They were made before this call, and so without what is live in it: this model makes its own.
    """
    masks = kwargs.get("attention_mask")
    first = next(iter(masks.values()), None) if isinstance(masks, dict) else masks
    if not isinstance(first, LiveMask) or first.live is not None:
        return kwargs
    return {**kwargs, "attention_mask": first.given}


@not_compiled
def _add_last(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before a rotary embedding chooses its frequencies by the largest position: append the last position of all ranks."""
    call = running_call()
    if call is None or call.last_position is None:
        raise ValueError(
            f"{type(module).__name__} chooses its frequencies by the last position of the sequence, which is known only within a call of "
            "the attached model: checkpoint the layers, but not the rotary embeddings"
        )
    by_name = "position_ids" in kwargs
    positions = kwargs["position_ids"] if by_name else args[1]  # (..., s)
    positions = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), call.last_position)], dim=-1)
    return (args, {**kwargs, "position_ids": positions}) if by_name else ((args[0], positions, *args[2:]), kwargs)


def _drop_last(module: nn.Module, args: tuple, output: Any) -> Any:
    """After it: remove that position from the embeddings (..., s + 1, d)."""
    return tuple(part[..., :-1, :] for part in output) if isinstance(output, tuple) else output[..., :-1, :]
