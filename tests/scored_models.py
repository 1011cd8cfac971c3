"""Tiny models of transformers whose attention modifies scores: ALiBi, a relative bias, a softcap, sinks, and dropout of weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.bloom import modeling_bloom

from ringattn.training.causal_lm import forward_names

VOCAB = 61
# buckets of one distance, of several, and the last one
T5 = dict(num_layers=2, num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=10, dropout_rate=0.0)
TOKENS = dict(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None)


def _causal_lm(kind: str, head_dim: int, **settings) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(
        **{**TOKENS, "pad_token_id": None, "hidden_size": 4 * head_dim, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, **settings},
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _gpt2(head_dim: int) -> nn.Module:
    sizes = dict(n_embd=4 * head_dim, n_layer=2, n_head=4, n_positions=512)
    config = transformers.GPT2Config(**TOKENS, **sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def _bert(head_dim: int) -> nn.Module:
    sizes = dict(hidden_size=3 * head_dim, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)
    config = transformers.BertConfig(
        vocab_size=VOCAB, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=None
    )
    return transformers.BertForMaskedLM(config)


def _bloom(head_dim: int) -> nn.Module:
    # 3 heads: not a power of 2
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=3 * head_dim, n_layer=2, n_head=3)
    return transformers.BloomForCausalLM(config)


def _mpt(head_dim: int) -> nn.Module:
    config = transformers.MptConfig(vocab_size=VOCAB, d_model=3 * head_dim, n_layers=2, n_heads=3, max_seq_len=512)
    return transformers.MptForCausalLM(config)


def _falcon(head_dim: int) -> nn.Module:
    sizes = dict(hidden_size=3 * head_dim, num_hidden_layers=2, num_attention_heads=3, multi_query=False)
    options = dict(bias=True, alibi=True, new_decoder_architecture=False, attn_implementation="sdpa")
    return transformers.FalconForCausalLM(transformers.FalconConfig(vocab_size=VOCAB, **sizes, **options))


def _t5(kind: str, head_dim: int) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCAB, d_model=3 * head_dim, d_kv=head_dim, d_ff=48, **T5)
    return getattr(transformers, f"{kind}EncoderModel")(config)


SCORED = {
    "llama": lambda d: _causal_lm("Llama", d),
    "gemma2": lambda d: _causal_lm("Gemma2", d, attn_logit_softcapping=1.5, final_logit_softcapping=None, sliding_window=9),
    # all experts for every token, so that rounding does not change the choice
    "gpt-oss": lambda d: _causal_lm("GptOss", d, num_experts_per_tok=2, num_local_experts=2, sliding_window=9),
    "gpt2": _gpt2,
    "bert": _bert,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon-alibi": _falcon,
    "t5": lambda d: _t5("T5", d),
    "mt5": lambda d: _t5("MT5", d),
    "umt5": lambda d: _t5("UMT5", d),
}
OWN_FORWARDS = {"bloom", "mpt", "falcon-alibi", "t5", "mt5", "umt5"}  # of `huggingface_scores`
makes_own_masks = pytest.mark.skipif(
    "create_causal_mask" not in forward_names(modeling_bloom.BloomModel),
    reason="this version of transformers makes their masks itself",
)
EACH = [pytest.param(name, marks=makes_own_masks if name in OWN_FORWARDS else ()) for name in SCORED]


class Norm(nn.Module):
    """T5's norm in any precision: transformers' own rounds to fp32 inside."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def build(name: str, head_dim: int = 8, dropout: float = 0.0) -> nn.Module:
    """A model with weights of attention that differ from each other, in training; dropout is of these weights alone."""
    torch.manual_seed(0)
    model = SCORED[name](head_dim)
    make_distinct(model)
    drop_weights(model, dropout)
    return model.train()


def make_distinct(model: nn.Module, std: float | None = None) -> None:
    """Give attention weights that differ from each other, and T5 norms that do not round. std: by default what keeps a layer's size."""
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if type(child).__name__.endswith("T5LayerNorm"):
                setattr(parent, child_name, Norm(child))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                own = parameter.shape[-1] ** -0.5 if std is None else std
                parameter.copy_(torch.randn(parameter.shape) * (1.0 if "relative" in name else own))


def drop_weights(model: nn.Module, p: float) -> None:
    """Let attention drop its weights, and nothing else."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("BloomAttention", "FalconAttention"):
            module.attention_dropout.p = p
        elif kind == "MptAttention":
            module.attn_dropout_p = p
        elif kind == "GPT2Attention":
            module.attn_dropout.p = p
        elif kind == "BertSelfAttention":
            module.dropout.p = p
        elif kind.endswith("T5Attention"):
            module.dropout = p
        elif kind.endswith("Attention") and hasattr(module, "attention_dropout"):
            module.attention_dropout = p


def squares(model: nn.Module, inputs) -> torch.Tensor:
    """A loss of all outputs of a model, with or without a head."""
    inputs = {name: x for name, x in inputs.items() if name != "shift_labels"}
    out = model(**inputs)[0]
    return (out if out.dtype == torch.float64 else out.float()).square().sum()
