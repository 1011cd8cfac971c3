"""Hugging Face models on a ring give the logits and gradients of the same models dense; options are honoured or refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import ringattn as ra
from ringattn.integrations.causal_lm import shift_labels, sum_gradients, token_loss
from ringattn.integrations.huggingface import NAME, attach, detach, register, ring_attention_forward

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
WINDOW = 7
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    # every layer has the window
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=WINDOW)),
    # the second layer has it
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
}
LAYOUTS = {"zigzag": ra.zigzag, "contiguous": ra.contiguous, "striped": ra.striped}
DOCUMENTS = (11, 1, 17, 8)


def build(name: str) -> nn.Module:
    """The model in fp64 throughout: transformers' own norms round to fp32 inside, which would hide small errors."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                norm.load_state_dict(child.state_dict())
                setattr(parent, child_name, norm)
    return model


def sequence(seq_len: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (2, seq_len), generator=torch.Generator().manual_seed(1))


def dense_run(name: str, seq_len: int, mask: ra.Mask | None = None):
    """Logits, mean loss and gradients, of the whole sequence in one process."""
    model = build(name)
    tokens = sequence(seq_len)
    allowed = None if mask is None else mask.dense(seq_len)[None, None]
    out = model(input_ids=tokens, labels=tokens, attention_mask=allowed)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(out.loss.double(), loss, rtol=1e-6, atol=0)  # transformers' own, in fp32
    loss.backward()
    return out.logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def ring_run(group, name: str, layout: ra.Layout, mask: ra.Mask | None, recompute: bool = False):
    """This rank's logits, its part of the mean loss, and the gradients of all ranks."""
    torch.set_num_threads(1)
    rank = 0 if group is None else group.rank()
    model = build(name)
    attach(model, layout=layout, mask=mask, group=group)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = sequence(layout.seq_len)
    ids, labels = (ra.shard(x, layout, rank) for x in (tokens, shift_labels(tokens)))
    out = model.model(input_ids=ids)
    loss = token_loss(out.last_hidden_state, model.lm_head.weight, labels, chunk=5) / (2 * (layout.seq_len - 1))
    loss.backward()
    sum_gradients(model.parameters(), group)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return logits, loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(results: list, layout: ra.Layout, expected: tuple) -> None:
    logits, loss, gradients = expected
    for rank, (own, _, summed) in enumerate(results):
        torch.testing.assert_close(own, ra.shard(logits, layout, rank), rtol=0, atol=1e-10, msg=lambda m: f"logits: {m}")
        for name, gradient in gradients.items():
            torch.testing.assert_close(summed[name], gradient, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(sum(own for _, own, _ in results), loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_alone_a_model_is_the_dense_one(name):
    layout = ra.zigzag(37, 1)
    assert_same([ring_run(None, name, layout, None)], layout, dense_run(name, 37))


@pytest.mark.parametrize(
    ("name", "world_size", "kind"),
    [("llama", 2, "zigzag"), ("llama", 3, "striped"), ("mistral", 2, "zigzag"), ("qwen2", 2, "contiguous")],
    ids=lambda value: str(value),
)
def test_on_a_ring_a_model_is_the_dense_one(gloo, name, world_size, kind):
    layout = LAYOUTS[kind](37, world_size)
    assert_same(gloo.run(world_size, ring_run, name, layout, None, timeout=120), layout, dense_run(name, 37))


def test_recomputing_activations_changes_nothing(gloo):
    layout = ra.zigzag(37, 2)
    assert_same(gloo.run(2, ring_run, "llama", layout, None, True, timeout=120), layout, dense_run("llama", 37))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_documents_within_a_models_window(gloo, name):
    mask = ra.documents(lengths=DOCUMENTS)
    layout = ra.balanced(mask, 37, 2)
    whole = mask & ra.sliding_window(WINDOW - 1) if name == "mistral" else mask
    assert_same(gloo.run(2, ring_run, name, layout, mask, timeout=120), layout, dense_run(name, 37, whole))


def test_position_ids_given_are_kept():
    model = build("llama")
    attach(model, layout=ra.zigzag(8, 1))
    inputs = dict(input_ids=sequence(8), position_ids=torch.arange(8)[None] * 3)
    ring = model(**inputs).logits
    detach(model)
    # with its mask given, transformers does not take the gaps for the ends of packed documents
    dense = model(**inputs, attention_mask=ra.causal().dense(8)[None, None]).logits
    torch.testing.assert_close(ring, dense, rtol=0, atol=1e-10)


def test_another_layout_replaces_the_first_and_detach_undoes_it():
    model = build("llama")
    before = model(input_ids=sequence(9)).logits
    for seq_len in (5, 9):
        attach(model, layout=ra.zigzag(seq_len, 1))
        assert model(input_ids=sequence(seq_len)).logits.shape[1] == seq_len
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    assert hooks == 2, "the model and the model within it have one hook each"
    detach(model)
    assert not any(module._forward_pre_hooks or hasattr(module, NAME) for module in model.modules())
    assert torch.equal(model(input_ids=sequence(9)).logits, before)


def test_a_copied_model_stays_on_the_ring():
    model = build("llama")
    attach(model, layout=ra.zigzag(9, 1))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(input_ids=sequence(9)).logits, model(input_ids=sequence(9)).logits)


def test_under_autocast_attention_runs_in_the_low_precision():
    torch.manual_seed(0)
    model = MODELS["llama"]()
    attach(model, layout=ra.zigzag(9, 1))
    seen = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        ring = model(input_ids=sequence(9)).logits
        detach(model)
        dense = model(input_ids=sequence(9)).logits
    assert seen[0] == torch.bfloat16
    torch.testing.assert_close(ring, dense, rtol=0, atol=0.02)


def test_a_mask_of_ones_asks_for_nothing():
    model = build("llama")
    attach(model, layout=ra.zigzag(9, 1))
    ids = sequence(9)
    assert torch.equal(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, model(input_ids=ids).logits)


# what is refused


def attend_with(module: nn.Module, keys: int = 6, **options) -> None:
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, keys, 8)
    ring_attention_forward(module, q, k, k, **{"attention_mask": None, **options})


def attached_module(is_causal: bool = True) -> nn.Module:
    module = build("llama")
    attach(module, layout=ra.zigzag(6, 1))
    attention = module.model.layers[0].self_attn
    attention.is_causal = is_causal
    return attention


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(attention_mask=torch.ones(1, 1, 6, 6)), "attention_mask is given"),
        (dict(dropout=0.1), r"dropout is 0\.1"),
        (dict(softcap=50.0), r"softcap is 50\.0"),
        (dict(s_aux=torch.zeros(4)), r"s_aux is a tensor of shape \(4,\), but attention sinks"),
        (dict(head_mask=torch.ones(4)), "head_mask is a tensor"),
        (dict(output_attentions=True), "output_attentions is True"),
        (dict(position_bias=torch.zeros(1, 4, 6, 6)), "position_bias is a tensor"),
        (dict(cache=object()), "cache is"),
        (dict(cu_seq_lens_q=torch.tensor([0, 6])), "cu_seq_lens_q is a tensor"),
        (dict(cu_seq_lens_k=torch.tensor([0, 6])), "cu_seq_lens_k is a tensor"),
        (dict(seq_idx=torch.zeros(6)), "seq_idx is a tensor"),
        (dict(indices=torch.zeros(6)), "indices is a tensor"),
        (dict(keys=9), "keys have 9 tokens and the queries 6"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        attend_with(attached_module(), **options)


def test_options_that_ask_for_nothing_pass():
    attend_with(attached_module(), softcap=None, s_aux=None, output_attentions=False, dropout=0.0, sliding_window=None)


def test_a_window_on_a_module_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match="sliding_window is 4"):
        attend_with(attached_module(is_causal=False), sliding_window=4)


def test_a_model_without_a_layout_is_refused():
    register()
    model = build("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="has no layout"):
        model(input_ids=sequence(6))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (dict(input_ids=sequence(5)), "the input has 5 tokens, but rank 0"),
        (dict(input_ids=sequence(6), labels=sequence(6)), "shift them before sharding"),
        (dict(input_ids=sequence(6), attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]] * 2)), "attention_mask hides tokens"),
        (dict(input_ids=sequence(6), attention_mask=torch.ones(2, 1, 6, 6)), "attention_mask is given"),
        (dict(input_ids=sequence(6), output_attentions=True), "output_attentions is True"),
        ({}, "without input_ids"),
    ],
    ids=["length", "labels", "padding", "4-D mask", "weights", "no input"],
)
def test_inputs_are_refused_by_name(inputs, message):
    model = build("llama")
    attach(model, layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match=message):
        model(**inputs)


def test_a_cache_in_use_is_refused():
    model = build("llama")
    attach(model, layout=ra.zigzag(6, 1))
    past = model(input_ids=sequence(6), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="key/value caches"):
        model(input_ids=sequence(6), past_key_values=past)


def test_dropout_in_training_is_refused():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_dropout=0.25))
    attach(model, layout=ra.zigzag(6, 1))
    model.train()
    with pytest.raises(ValueError, match=r"dropout is 0\.25"):
        model(input_ids=sequence(6))
    model.eval()
    model(input_ids=sequence(6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8)), "softcap is"),
        (
            lambda: transformers.GptOssForCausalLM(
                transformers.GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
            ),
            "s_aux is",
        ),
    ],
    ids=["gemma2", "gpt-oss"],
)
def test_models_that_need_more_are_refused(make, message):
    model = make()
    attach(model, layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match=message):
        model(input_ids=sequence(6))


def test_attach_refuses_what_it_cannot_do():
    model = build("llama")
    with pytest.raises(ValueError, match="layout is for 4 ranks, but the group has 1"):
        attach(model, layout=ra.zigzag(6, 4))
    with pytest.raises(ValueError, match="Linear does not take its attention from AttentionInterface"):
        attach(nn.Linear(2, 2), layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match="leaves rank 0 without tokens"):
        attach(model, layout=ra.zigzag(0, 1))
    model.config.attention_chunk_size = 128
    with pytest.raises(ValueError, match="attention_chunk_size is 128"):
        attach(model, layout=ra.zigzag(6, 1))
