"""Which models a `RingCache` is for, and what it keeps of their layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..geometry.mask import Causal
from .huggingface_attachment import NAME, Attachment
from .huggingface_heads import answers_from


@dataclass(frozen=True)
class CachedHeads:
    """What a model's layers keep: their number, K/V heads, and dims of keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, model: Any) -> CachedHeads:
        """Those of an attached model. Raises ValueError if its layers cannot be told."""
        modules = [x for x in model.modules() if hasattr(x, NAME) and isinstance(getattr(x, "layer_idx", None), int)]
        if not modules:
            raise ValueError(f"{type(model).__name__} has no attention modules with a layer_idx, by which a cache tells layers")
        config, first = model.config.get_text_config(decoder=True), modules[0]
        heads = config.num_attention_heads
        is_latent = hasattr(first, "qk_head_dim")  # MLA, whose keys have as many heads as its queries
        kv_heads = heads if is_latent else getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(first, "qk_head_dim" if is_latent else "head_dim", None) or config.hidden_size // heads
        return cls(max(x.layer_idx for x in modules) + 1, kv_heads, head_dim, getattr(first, "v_head_dim", None) or head_dim)


def check_decodes(model: Any, attachment: Attachment) -> None:
    """Raise ValueError if a model cannot decode around the ring."""
    kind = type(model).__name__
    if attachment.has_forwards:
        raise ValueError(f"the attention of {kind} has no door for a RingCache: generate with a detached model")
    if attachment.mixes:
        raise ValueError(
            f"{kind} has layers with states or convolutions, of which a RingCache keeps nothing: generate with a detached model"
        )
    if attachment.first_position or not attachment.takes_positions:
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
