"""Which models a `RingCache` is for, and what it keeps of their layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import check
from ..geometry.layout import Layout, contiguous
from ..geometry.mask import Causal
from ..recurrent.segments import check_spans
from .huggingface_attachment import NAME, Attachment
from .huggingface_heads import answers_from
from .huggingface_inputs import cache_name
from .huggingface_mixers import mixers

# of layers without attention, in a config's layer_types
_NOT_ATTENDING = ("linear_attention", "conv", "moe", "mlp")


@dataclass(frozen=True)
class CachedHeads:
    """What a model's layers keep: the numbers of those that attend, K/V heads, dims of keys and values, and how many layers have states.

    A model without attention has one layer of pages, of which only the lengths of its sequences are used.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    v_head_dim: int
    mixers: int = 0
    kinds: tuple[str, ...] = ()  # of those

    @classmethod
    def of(cls, model: Any) -> CachedHeads:
        """Those of an attached model. Raises ValueError if its layers cannot be told."""
        states = mixers(model)
        modules = [x for x in model.modules() if hasattr(x, NAME) and hasattr(x, "layer_idx") and x not in states]
        config, kind = model.config.get_text_config(decoder=True), type(model).__name__
        kinds = tuple(sorted({type(x).__name__ for x in states}))
        if states:
            types = getattr(config, "layer_types", None)
            if types is None:
                raise ValueError(
                    f"the config of {kind} has no layer_types, by which a cache tells layers that attend from those with states"
                )
            layers = tuple(i for i, of_layer in enumerate(types) if of_layer not in _NOT_ATTENDING)
            if not layers:
                return cls((), 1, 1, 1, len(states), kinds)
        else:
            modules = [x for x in modules if isinstance(x.layer_idx, int)]
            layers = tuple(range(max((x.layer_idx for x in modules), default=-1) + 1))
        if not modules:
            raise ValueError(f"{kind} has no attention modules with a layer_idx, by which a cache tells layers")
        heads, first = config.num_attention_heads, modules[0]
        is_latent = hasattr(first, "qk_head_dim")  # MLA, whose keys have as many heads as its queries
        kv_heads = heads if is_latent else getattr(config, "num_key_value_heads", None) or heads
        names = ("qk_head_dim",) if is_latent else ("head_dim", "attention_head_dim")
        dims = (getattr(first, name, None) for name in names)
        head_dim = next(filter(None, dims), config.hidden_size // heads)
        return cls(layers, kv_heads, head_dim, getattr(first, "v_head_dim", None) or head_dim, len(states), kinds)


def check_decodes(model: Any, attachment: Attachment) -> None:
    """Raise ValueError if a model cannot decode around the ring."""
    kind = type(model).__name__
    if attachment.has_forwards:
        raise ValueError(f"the attention of {kind} has no door for a RingCache: generate with a detached model")
    # states alone need no positions
    if attachment.first_position or not (attachment.takes_positions or attachment.mixes):
        raise ValueError(
            f"{kind} counts positions in a way of its own, which a RingCache does not support: generate with a detached model"
        )
    if answers_from(model) is not None:
        raise ValueError(f"{kind} answers once for a sequence, and keeps nothing for later tokens: call it without a RingCache")
    if attachment.live.mask is not None and not isinstance(attachment.live.mask, Causal):
        raise ValueError(
            f"{kind} was attached with mask={attachment.live.mask!r}, but generation is causal: attach it without a mask, and windows "
            "of its layers hold"
        )
    shared = getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    if shared:
        raise ValueError(f"num_kv_shared_layers is {shared}, but a RingCache does not support layers that share keys and values")


def check_cache_name(model: Any, kwargs: Mapping[str, Any], cache: Any) -> None:
    """Raise ValueError if a call gives the cache to a model that takes it under another name; or, to one of Mamba's kind, for whose caches
    transformers' generate does not cut off old tokens, several tokens that may be old."""
    name = cache_name(model)
    if kwargs.get(name) is not cache:
        raise ValueError(
            f"{type(model).__name__} takes its cache as {name}: model.generate(ids, {name}=RingCache(model, tokens=...))"
        )
    seen = cache.get_seq_length()
    new = getattr(kwargs.get("input_ids"), "shape", (1, 1))[-1]
    if name != "cache_params" or not seen or kwargs.get("attention_mask") is not None or new == 1:
        return
    raise ValueError(
        f"input_ids has {new} tokens, and the cache {seen}, but no attention_mask (batch, old + new) says whether they are new: "
        f"call model(new, {name}=cache, attention_mask=...) with all new tokens but the last, then generate from that one"
    )


def check_goes_back(kept: CachedHeads, what: str) -> None:
    """Raise ValueError if a model has layers with states, which `what` asks to go back."""
    if kept.mixers:
        raise ValueError(
            f"{what} takes tokens back, but {kept.mixers} layers of the model keep states, which only go on: fork() the cache before "
            "tokens that may have to go, or reset() it"
        )


def prompt_layout(make: Callable[[int, int], Layout], tokens: int, ranks: int, kept: CachedHeads) -> Layout | None:
    """The layout of so many new tokens; None if there are fewer tokens than ranks: then all ranks compute them.

    Raises ValueError if `make` makes another, or one that states cannot pass through.
    """
    if tokens < ranks:
        return None
    layout = make(tokens, ranks)
    check.instance("layout", layout, Layout, "pass ringattn.zigzag, or another function that returns a layout")
    if layout.world_size != ranks or layout.seq_len != tokens:
        raise ValueError(f"layout makes {layout!r} for {tokens} tokens on {ranks} ranks: let it take both as they are")
    if kept.mixers:
        check_spans(layout)
    return contiguous(tokens, ranks) if 0 in layout.lengths else layout
