"""Attention modules of transformers with plain arithmetic that cannot run around a ring by `AttentionInterface` alone: forward passes.

    BART, mBART, PLBart, Marian, Pegasus, Blenderbot, TrOCR, Whisper      attention to an encoder's states, too
    GPT-J, CodeGen, GPT-Neo, GPT-NeoX Japanese, MegatronBERT, RemBERT     weights made by the module itself
    Llama 4                                                               queries scaled by positions counted within the shard

A function here takes the place of the forward pass of one class, as in `huggingface_scores.py`: the module's own projections, attention
around the ring, and the module's own output.

Shapes: b batch, s local tokens, h query heads, d head dim, n hidden size, t tokens of the encoder's sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .huggingface_attachment import LiveMask, not_compiled, running_call
from .huggingface_forward import Asked, attend_around_ring, attend_to_states


def _bart(
    module: Any,
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: LiveMask | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of BART's way to these tokens, or to the encoder's states (b, t, n)."""
    seen = hidden_states if key_value_states is None else key_value_states
    q = module.q_proj(hidden_states).unflatten(-1, (module.num_heads, -1))
    k, v = (project(seen).unflatten(-1, (module.num_heads, -1)) for project in (module.k_proj, module.v_proj))
    options = {**options, "past_key_values": past_key_values}
    scores = dict(dropout=module.dropout if module.training else 0.0)
    if key_value_states is not None:
        out = attend_to_states(module, q, k, v, attention_mask, Asked(module.scaling, scores=scores), options)
    else:
        # modules of decoders without an encoder may not say that they are causal
        is_causal = _causality(attention_mask, otherwise=None)
        out = attend_around_ring(module, q, k, v, attention_mask, Asked(module.scaling, None, is_causal, scores), options)
    return module.out_proj(out.flatten(2)), None


def _bert(
    module: Any,
    hidden_states: torch.Tensor,
    attention_mask: LiveMask | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """BERT's attention before it took `AttentionInterface`; attention to an encoder's states is refused by its lengths."""
    seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    q = module.query(hidden_states).unflatten(-1, (module.num_attention_heads, -1))
    k, v = (project(seen).unflatten(-1, (module.num_attention_heads, -1)) for project in (module.key, module.value))
    is_causal = _causality(attention_mask, otherwise=module.is_decoder)
    asked = Asked(None, None, is_causal, dict(dropout=module.dropout.p if module.training else 0.0))
    options = {
        **options,
        "past_key_values": past_key_values,
        "output_attentions": output_attentions,
        "encoder_hidden_states": encoder_hidden_states,
    }
    return attend_around_ring(module, q, k, v, attention_mask, asked, options).flatten(2), None


def _gptj(
    module: Any,
    hidden_states: torch.Tensor,
    layer_past: Any = None,
    attention_mask: LiveMask | None = None,
    position_ids: torch.Tensor | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = (
        project(hidden_states).unflatten(-1, (module.num_attention_heads, -1))
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    options = {**options, "past_key_values": layer_past, "output_attentions": output_attentions}
    return _rotated_pairs(module, q, k, v, attention_mask, position_ids, options), None


def _codegen(
    module: Any,
    hidden_states: torch.Tensor,
    layer_past: Any = None,
    attention_mask: LiveMask | None = None,
    position_ids: torch.Tensor | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    # weights lie in 4 parts, as they did on 4 chips; each has the queries, then the values, then the keys of its heads
    parts = module.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))
    q, v, k = (x.flatten(-2).unflatten(-1, (module.num_attention_heads, -1)) for x in parts.unbind(-2))
    options = {**options, "past_key_values": layer_past, "output_attentions": output_attentions}
    return _rotated_pairs(module, q, k, v, attention_mask, position_ids, options), None


def _causality(mask: Any, otherwise: bool | None) -> bool | None:
    """What a mask says. A tensor, which models of transformers 4 make themselves, is refused where attention begins."""
    return mask.is_causal if isinstance(mask, LiveMask) else otherwise


def _rotated_pairs(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: LiveMask | None,
    position_ids: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention after GPT-J's rotary embeddings, which turn neighbouring columns of q and k (b, s, h, d); then the output (b, s, n)."""
    assert position_ids is not None
    sin, cos = module.embed_positions.to(position_ids.device)[position_ids].to(k.dtype).chunk(2, dim=-1)
    rotate = _modeling(module).apply_rotary_pos_emb
    width = q.shape[-1] if module.rotary_dim is None else module.rotary_dim
    q, k = (torch.cat([rotate(x[..., :width], sin, cos), x[..., width:]], dim=-1) for x in (q, k))
    asked = Asked(1 / module.scale_attn, scores=dict(dropout=module.attn_dropout.p if module.training else 0.0))
    out = attend_around_ring(module, q, k, v, mask, asked, options)
    return module.resid_dropout(module.out_proj(out.flatten(2)))


def _gpt_neo(
    module: Any,
    hidden_states: torch.Tensor,
    attention_mask: LiveMask | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """GPT-Neo's attention: no softmax scale, and windows in every other layer."""
    q, k, v = (
        project(hidden_states).unflatten(-1, (module.num_heads, -1)) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if not hasattr(module, "attention_type"):
        raise ValueError("GPT-Neo's attention does not say whether it is local before transformers 5: install transformers 5")
    window = module.config.window_size if module.attention_type == "local" else None
    asked = Asked(1.0, window, scores=dict(dropout=module.attn_dropout.p if module.training else 0.0))
    options = {**options, "past_key_values": layer_past, "output_attentions": output_attentions}
    out = attend_around_ring(module, q, k, v, attention_mask, asked, options)
    return module.resid_dropout(module.out_proj(out.flatten(2))), None


def _gpt_neox_japanese(
    module: Any,
    hidden_states: torch.Tensor,
    attention_mask: LiveMask | None = None,
    position_ids: torch.Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    assert position_embeddings is not None
    q, k, v = module.query_key_value(hidden_states).unflatten(-1, (module.num_attention_heads, -1)).chunk(3, dim=-1)
    width, rotate = module.rotary_ndims, _modeling(module).apply_rotary_pos_emb
    turned = rotate(q[..., :width].transpose(1, 2), k[..., :width].transpose(1, 2), *position_embeddings)
    q, k = (torch.cat([part.transpose(1, 2), x[..., width:]], dim=-1) for part, x in zip(turned, (q, k), strict=True))
    asked = Asked(1 / module.norm_factor, scores=dict(dropout=module.attention_dropout.p if module.training else 0.0))
    options = {**options, "past_key_values": layer_past, "output_attentions": output_attentions}
    out = attend_around_ring(module, q, k, v, attention_mask, asked, options)
    return module.dense(out.flatten(2)), None, module.dense_bias


def _llama4(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: torch.Tensor,
    attention_mask: LiveMask | None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Llama 4's attention. Layers without rotary embeddings scale their queries by positions in the whole sequence."""
    q, k, v = (
        project(hidden_states).unflatten(-1, (-1, module.head_dim)) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.use_rope:
        q, k = _modeling(module).apply_rotary_emb(q, k, position_embeddings.to(q.device))
    if hasattr(module, "qk_norm"):
        q, k = module.qk_norm(q), module.qk_norm(k)
    if module.attn_temperature_tuning and not module.use_rope:
        positions = _positions_of_shard(module, attention_mask).to(q.device)
        scales = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        q = (q * scales[:, None, None]).to(q.dtype)
    scores = dict(dropout=module.attention_dropout if module.training else 0.0)
    options = {**options, "past_key_values": past_key_values}
    out = attend_around_ring(module, q, k, v, attention_mask, Asked(module.scaling, scores=scores), options)
    return module.o_proj(out.flatten(2)), None


@not_compiled
def _positions_of_shard(module: Any, mask: LiveMask | None) -> torch.Tensor:
    """The global positions of this rank's tokens: (s,)."""
    call = running_call()
    attachment = mask.attachment if mask is not None else None if call is None else call.attachment
    if attachment is None:
        raise ValueError(f"{type(module).__name__} runs outside of a call of the attached model: call the model itself")
    return attachment.layout.positions(attachment.rank)


def _modeling(module: Any) -> Any:
    return sys.modules[type(module).__module__]


# not for modules that ask `AttentionInterface`, as these do from transformers 5.24 on
WITHOUT_INTERFACE = (_gptj, _codegen)
FORWARDS: dict[str, Callable[..., Any]] = {
    "bart.modeling_bart.BartAttention": _bart,
    "mbart.modeling_mbart.MBartAttention": _bart,
    "plbart.modeling_plbart.PLBartAttention": _bart,
    "marian.modeling_marian.MarianAttention": _bart,
    "pegasus.modeling_pegasus.PegasusAttention": _bart,
    "blenderbot.modeling_blenderbot.BlenderbotAttention": _bart,
    "blenderbot_small.modeling_blenderbot_small.BlenderbotSmallAttention": _bart,
    "trocr.modeling_trocr.TrOCRAttention": _bart,
    "whisper.modeling_whisper.WhisperAttention": _bart,
    "megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention": _bert,
    "rembert.modeling_rembert.RemBertSelfAttention": _bert,
    "gptj.modeling_gptj.GPTJAttention": _gptj,
    "codegen.modeling_codegen.CodeGenAttention": _codegen,
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": _gpt_neo,
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": _gpt_neox_japanese,
    "llama4.modeling_llama4.Llama4TextAttention": _llama4,
}
