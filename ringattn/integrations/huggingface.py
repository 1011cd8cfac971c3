"""Ring attention in Hugging Face transformers, through its `AttentionInterface` (transformers 4.57 and 5).

    attach(model, layout=ra.zigzag(seq_len, world_size))            # once a layout
    logits = model(input_ids=ra.shard(tokens, layout, rank)).logits  # this rank's rows

`attach` switches a model's attention to "ringattn" and gives each attention module one frozen object that says which
positions the ranks hold, what is live and who the ranks are. Every rank then runs the model on its own shard of the
sequence; everything but attention is local to a token. Position ids default to the shard's global positions.

Whatever a model asks of its attention is honoured or refused by name: a sliding window becomes part of the mask; a
padding mask, dropout, a softcap, attention sinks, a key/value cache, position bias, chunked attention and attention
weights as output raise ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..attention import ring_attention
from ..context import Group, get_context
from ..layout import Layout
from ..mask import Mask, causal, full, sliding_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "ringattn"


@dataclass(frozen=True)
class Ring:
    """What an attention module needs to know: who holds what, what is live, and among whom."""

    layout: Layout
    mask: Mask | None
    group: Group | None
    rank: int
    _masks: dict[tuple[bool, int | None], Mask] = field(default_factory=dict, compare=False, repr=False)

    def mask_for(self, is_causal: bool, window: int | None) -> Mask:
        """The attached mask (None: causal or full, as the module is) within the module's window, made once."""
        key = (is_causal, window)
        if key not in self._masks:
            mask = (causal() if is_causal else full()) if self.mask is None else self.mask
            # transformers counts the query's own position: a window of 1 sees only itself
            self._masks[key] = mask if window is None else mask & sliding_window(window - 1, None)
        return self._masks[key]

    def __deepcopy__(self, memo: dict) -> Ring:
        return self  # a process group has no copy, and a copied model is on the same ring


def register() -> None:
    """Make "ringattn" known to transformers as an attention implementation. `attach` does it too; twice is fine."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, ring_attention_forward)
    AttentionMaskInterface.register(NAME, _refuse_masks)


def attach(model: PreTrainedModel, *, layout: Layout, mask: Mask | None = None, group: Group | None = None) -> None:
    """Run a transformers model's attention around a ring, from the next forward on; again with another layout replaces it.

    Args:
        model: a `PreTrainedModel` whose attention goes through `AttentionInterface`.
        layout: which positions each rank holds; its world size is the group's.
        mask: which pairs are live, over global positions; None is causal for causal modules, full for the others.
            A module's own sliding window is intersected with it.
        group: the ranks of the ring: a ProcessGroup, a 1-D DeviceMesh, or None for the default group.

    Call the model with this rank's rows: `input_ids` or `inputs_embeds` of `layout.lengths[rank]` tokens. `position_ids`
    are filled in from the layout unless given (give them where positions restart, as in packed documents). Labels must be
    shifted before the sequence is split, so a causal model's `labels` are refused without `shift_labels`.

    Raises ValueError if the layout is for another number of ranks or leaves one empty, or the model cannot take another
    attention.
    """
    rank, size = _rank_and_size(group)
    if layout.world_size != size:
        raise ValueError(f"layout is for {layout.world_size} ranks, but the group has {size}: make it for {size}")
    if 0 in layout.lengths:
        raise ValueError(
            f"{layout!r} leaves rank {layout.lengths.index(0)} without tokens, which transformers' models cannot run on: "
            "use fewer ranks or a longer sequence"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} does not take its attention from AttentionInterface: ring attention cannot be put in"
        )
    if getattr(model.config, "attention_chunk_size", None) is not None:
        raise ValueError(
            f"attention_chunk_size is {model.config.attention_chunk_size}: chunked attention is not supported; "
            "attach with mask=ringattn.documents(...) and a config without it"
        )
    modules = [module for module in model.modules() if "Attention" in type(module).__name__]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no module with Attention in its class name")
    register()
    ring = Ring(layout, mask, group, rank)
    # a model with a head holds one without: whichever is called gets its positions
    for module in _models(model):
        if not hasattr(module, NAME):
            module.register_forward_pre_hook(_prepare_inputs, with_kwargs=True)
        setattr(module, NAME, ring)
    for module in modules:
        setattr(module, NAME, ring)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


def detach(model: PreTrainedModel, attn_implementation: str = "sdpa") -> None:
    """Undo `attach`: the model runs on whole sequences again, with an attention of transformers' own."""
    for module in model.modules():
        if hasattr(module, NAME):
            del module.ringattn
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _prepare_inputs:
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    model.set_attn_implementation(attn_implementation)


def ring_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: q (b, h, s, d), k (b, hk, s, d), v (b, hk, s, d_v) -> (b, s, h, d_v), None."""
    ring = getattr(module, NAME, None)
    if ring is None:
        raise ValueError(
            f"{type(module).__name__} is set to {NAME!r} but has no layout: call ringattn.integrations.huggingface.attach"
        )
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse_options(attention_mask, dropout, options)
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"the keys have {key.shape[2]} tokens and the queries {query.shape[2]}: key/value caches and "
            "cross-attention are not supported; call the model with use_cache=False"
        )
    if sliding_window is not None and not is_causal:
        raise ValueError(
            f"sliding_window is {sliding_window} on a module that is not causal, where transformers gives it no one meaning: "
            "set the config's window to None and attach with mask=ringattn.sliding_window(left, right)"
        )
    if torch.is_autocast_enabled(query.device.type):
        # rotary embeddings leave q and k in fp32 and v in the low precision: all three go as autocast would have them
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) if x.dtype == torch.float32 else x for x in (query, key, value))
    out = ring_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        layout=ring.layout,
        mask=ring.mask_for(is_causal, sliding_window),
        group=ring.group,
        softmax_scale=scaling,
    )
    return out, None


# what models pass beside the tensors, and why it cannot be honoured; None, False and 0 ask for nothing
_REFUSED = {
    "softcap": "capped scores are not supported",
    "s_aux": "attention sinks are not supported",
    "head_mask": "masking heads is not supported",
    "output_attentions": "attention weights are never formed",
    "position_bias": "biased scores are not supported",
    "cache": "paged key/value caches are not supported",
    "cu_seq_lens_q": "say which tokens belong together with attach(mask=ringattn.documents(...))",
    "cu_seq_lens_k": "say which tokens belong together with attach(mask=ringattn.documents(...))",
    "seq_idx": "say which tokens belong together with attach(mask=ringattn.documents(...))",
    "indices": "sparse selections of keys are not supported",
}


def _refuse_options(attention_mask: Any, dropout: float, options: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(
            "attention_mask is given, but ring attention takes its mask over global positions: attach(model, mask=...) it"
        )
    if dropout:
        raise ValueError(f"dropout is {dropout}, but attention dropout is not supported: set attention_dropout=0.0")
    for name, why in _REFUSED.items():
        value = options.get(name)
        if value is not None and value is not False:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{name} is {shown}, but {why}")


def _refuse_masks(*args: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> None:
    """transformers' mask function: a ring needs no mask tensor, so there is none, and one that is asked for is refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask hides tokens (padding), but ring attention takes its mask over global positions: "
            "attach(model, mask=ringattn.documents(...)) hides what follows the last document"
        )
    if options.get("use_vmap"):
        raise ValueError(
            "this model adds a mask function of its own, which ring attention does not know: attach(model, mask=...) the whole mask"
        )


def _prepare_inputs(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before the model runs: the shard must be the layout's, positions are global, labels are shifted already."""
    ring: Ring = model.ringattn  # pyright: ignore[reportAssignmentType]
    tokens = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    tokens = args[0] if tokens is None and args else tokens
    if not isinstance(tokens, torch.Tensor):
        raise ValueError("the model is called without input_ids and inputs_embeds: give this rank's shard of one of them")
    here = ring.layout.lengths[ring.rank]
    if tokens.shape[1] != here:
        raise ValueError(
            f"the input has {tokens.shape[1]} tokens, but rank {ring.rank} of {ring.layout!r} holds {here}: "
            "cut the whole sequence with ringattn.shard"
        )
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None and "CausalLM" in type(model).__name__:
        raise ValueError(
            "labels would be shifted within the shard, which loses the token after its end: shift them before sharding, "
            "see ringattn.integrations.causal_lm"
        )
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions is True, but attention weights are never formed: leave it out")
    if kwargs.get("position_ids") is None:
        kwargs = {**kwargs, "position_ids": ring.layout.positions(ring.rank).to(tokens.device)[None]}
    return args, kwargs


def _models(model: nn.Module) -> list[nn.Module]:
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _rank_and_size(group: Group | None) -> tuple[int, int]:
    ranks = get_context(group).ranks
    return ranks.rank, ranks.size
