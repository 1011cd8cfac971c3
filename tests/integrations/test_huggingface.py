"""Hugging Face models on a ring give the logits and gradients of dense attention; options are honoured or refused."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from transformers.masking_utils import AttentionMaskInterface

import ringattn as ra
from ringattn.integrations.huggingface import NAME, attach, detach, register, ring_attention_forward
from ringattn.integrations.huggingface_attachment import LiveMask, LivePairs
from ringattn.integrations.huggingface_labels import check_targets
from ringattn.training.causal_lm import CausalLMLoss, shift_labels, sum_gradients

TINY = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES = dict(**TINY, num_key_value_heads=2, use_cache=False, bos_token_id=None, eos_token_id=None, pad_token_id=None)
WINDOW = 7
BERT = dict(**TINY, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
# from version 5.0 on, the attention of encoders and of Qwen2-MoE uses AttentionInterface
SINCE_5 = getattr(transformers.BertModel, "_supports_attention_backend", False)
ALTERNATING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])


def make(kind: str, **settings) -> nn.Module:
    config_type = getattr(transformers, f"{kind}TextConfig" if kind in ("Gemma3", "Gemma4") else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config_type(**{**SIZES, **settings}))
    # keep fp64 where possible: eager attention rounds weights to fp32, and grouped experts do not take fp64
    if kind not in ("GptOss", "Gemma2"):
        model.set_attn_implementation("sdpa")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


MODELS = {
    "llama": lambda: make("Llama"),
    "qwen3": lambda: make("Qwen3", head_dim=16),
    # every layer has the window
    "mistral": lambda: make("Mistral", sliding_window=WINDOW),
    # the second layer has the window
    "qwen2": lambda: make("Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    # the scale does not follow from head_dim
    "gemma2": lambda: make("Gemma2", head_dim=8, query_pre_attn_scalar=5, attn_logit_softcapping=2.0, **ALTERNATING),
    "gemma3": lambda: make("Gemma3", head_dim=8, query_pre_attn_scalar=5, **ALTERNATING),
    # sinks in both layers, a window in one, experts
    "gpt-oss": lambda: make("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, **ALTERNATING),
    # rotary embeddings on a part of each head, biases, layer norm, an output bias
    "phi": lambda: make("Phi"),
    # head_dim 192 for queries and keys, 128 for values; experts in the second layer
    "deepseek-v3": lambda: make(
        "DeepseekV3",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    # two attention modules per layer, whose class has another name
    "longcat-flash": lambda: make(
        "LongcatFlash",
        num_layers=2,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        head_dim=8,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        moe_topk=2,
        zero_expert_num=2,
    ),
    # says that its attention is not causal whenever it has a mask
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=None,
            eos_token_id=None,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
        )
    ),
}
# frequencies that depend on the last position: a rank's own last position would give others
STRETCHED = dict(rope_theta=100.0, factor=4.0, original_max_position_embeddings=12)
for kind, scaling in dict(dynamic={}, longrope=dict(short_factor=[1.0] * 4, long_factor=[2.0, 3.0, 4.0, 5.0])).items():
    MODELS[kind] = lambda rope=dict(rope_type=kind, **STRETCHED, **scaling): make(
        "Llama", max_position_embeddings=12, **{"rope_parameters" if SINCE_5 else "rope_scaling": rope}
    )
if SINCE_5:
    # attention in both directions
    MODELS["bert"] = lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
    # asks for the mask of a window of 0, though no layer has a window
    MODELS["qwen2-moe"] = lambda: make(
        "Qwen2Moe", moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )
GEMMA4 = hasattr(transformers, "Gemma4TextConfig")
if GEMMA4:
    # the last two layers share the keys and values of the first two; an embedding for each layer
    MODELS["gemma4"] = lambda: make(
        "Gemma4",
        **{**ALTERNATING, "num_hidden_layers": 4, "layer_types": ALTERNATING["layer_types"] * 2},
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=61,
    )
    # as published: heads of 512 in global layers, whose values are their keys, with fewer heads of these; experts
    MODELS["gemma4 wide"] = lambda: make(
        "Gemma4",
        **{**ALTERNATING, "num_hidden_layers": 4, "layer_types": ALTERNATING["layer_types"] * 2},
        head_dim=8,
        global_head_dim=512,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        final_logit_softcapping=3.0,
    )
LAYOUTS = {"zigzag": ra.zigzag, "contiguous": ra.contiguous, "striped": ra.striped}
DOCUMENTS = (11, 1, 17, 8)
BOUNDS = [0, 11, 12, 29, 37]
# in older versions DeepSeek's and LongCat's experts run only in fp32; Gemma 2's eager attention rounds its weights to fp32
DTYPES = {"deepseek-v3": torch.float32, "longcat-flash": torch.float32}
TOLERANCE = {"deepseek-v3": 2e-6, "longcat-flash": 2e-6, "gemma2": 2e-6}


class Norm(nn.Module):
    """An RMS norm in fp64: transformers' own rounds to fp32 inside, which would hide small errors."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = getattr(norm, "weight", None)
        self.offset = 1.0 if type(norm).__name__.startswith("Gemma3") or type(norm).__name__.startswith("Gemma2") else 0.0
        self.eps = getattr(norm, "variance_epsilon", None) or norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight + self.offset
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().to(DTYPES.get(name, torch.float64))
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, child_name, Norm(child))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, len(parameter)))
    return model.train()


def sequence(seq_len: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (2, seq_len), generator=torch.Generator().manual_seed(1))


def dense_run(name: str, seq_len: int, mask: ra.Mask | None = None, packed: bool = False):
    """Logits, mean loss and gradients of the whole sequence in one process; packed: transformers itself separates documents."""
    model = build(name)
    tokens = sequence(seq_len)
    allowed = None if mask is None else mask.dense(seq_len)[None, None]
    if name == "gpt-oss" and packed:
        # transformers ignores documents in this model's masks: give masks to add, for each kind of layer
        mask = ra.documents(lengths=DOCUMENTS)
        live = dict(full_attention=mask, sliding_attention=mask & ra.sliding_window(WINDOW - 1))
        allowed = {kind: torch.where(mask.dense(seq_len), 0.0, -1e30)[None, None] for kind, mask in live.items()}
    positions = restarting(seq_len).expand(2, -1) if packed else None
    logits = model(input_ids=tokens, attention_mask=allowed, position_ids=positions, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def restarting(seq_len: int) -> torch.Tensor:
    """Positions within documents: (1, s)."""
    return torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(BOUNDS)])[None, :seq_len]


def ring_run(group, name: str, layout: ra.Layout, mask: ra.Mask | None, recompute: bool = False, documents: str | None = None):
    """This rank's logits, its part of the mean loss, and the gradients of all ranks."""
    torch.set_num_threads(1)
    rank = 0 if group is None else group.rank()
    model = build(name)
    attach(model, layout=layout, mask=mask, group=group)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = sequence(layout.seq_len)
    ids, labels = (ra.shard(x, layout, rank) for x in (tokens, shift_labels(tokens)))
    inputs = dict(input_ids=ids)
    if documents == "bounds":
        bounds = torch.tensor(BOUNDS, dtype=torch.int32)
        inputs |= dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=17, max_length_k=17)
    elif documents == "positions":
        inputs |= dict(position_ids=ra.shard(restarting(layout.seq_len), layout, rank).expand(2, -1))
    logits = model(**inputs).logits
    if recompute:
        # a call with other documents, before the first call's layers run again
        with torch.no_grad():
            model(input_ids=ids, cu_seq_lens_q=[0, 5, 37])
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * (layout.seq_len - 1))
    loss.backward()
    sum_gradients(model.parameters(), group)
    return logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(results: list, layout: ra.Layout, expected: tuple, atol: float = 1e-10) -> None:
    logits, loss, gradients = expected
    for rank, (own, _, summed) in enumerate(results):
        torch.testing.assert_close(own, ra.shard(logits, layout, rank), rtol=0, atol=atol, msg=lambda m: f"logits: {m}")
        assert all((summed[name] is None) == (gradient is None) for name, gradient in gradients.items())
        for name, gradient in gradients.items():
            if gradient is not None:
                torch.testing.assert_close(summed[name], gradient, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(sum(own for _, own, _ in results), loss, rtol=0, atol=atol)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some(8)
def test_on_one_rank_a_model_equals_the_dense_one(name):
    layout = ra.zigzag(37, 1)
    assert_same([ring_run(None, name, layout, None)], layout, dense_run(name, 37), TOLERANCE.get(name, 1e-10))


@pytest.mark.parametrize(
    ("name", "world_size", "kind"),
    [
        ("llama", 2, "zigzag"),
        ("llama", 3, "striped"),
        ("qwen3", 4, "zigzag"),
        ("mistral", 2, "zigzag"),
        ("qwen2", 2, "contiguous"),
        ("gemma2", 2, "zigzag"),
        ("gemma3", 3, "contiguous"),
        ("gpt-oss", 4, "zigzag"),
        ("phi", 2, "striped"),
        ("deepseek-v3", 2, "zigzag"),
        ("longcat-flash", 3, "zigzag"),
        ("dynamic", 4, "contiguous"),
        ("longrope", 4, "contiguous"),
    ]
    + [("bert", 3, "contiguous")] * SINCE_5
    + [
        ("gemma4", 2, "zigzag"),
        ("gemma4 wide", 3, "striped"),
        pytest.param("gemma4", 3, "striped", marks=pytest.mark.thorough),
        pytest.param("gemma4 wide", 2, "zigzag", marks=pytest.mark.thorough),
    ]
    * GEMMA4,
    ids=lambda value: str(value),
)
@pytest.mark.some(7)
def test_on_a_ring_a_model_equals_the_dense_one(gloo, name, world_size, kind):
    layout = LAYOUTS[kind](37, world_size)
    results = gloo.run(world_size, ring_run, name, layout, None, timeout=120)
    assert_same(results, layout, dense_run(name, 37), TOLERANCE.get(name, 1e-10))


@pytest.mark.parametrize(
    ("name", "world_size", "kind", "documents"),
    [
        ("llama", 2, "zigzag", "positions"),
        ("llama", 4, "striped", "bounds"),
        ("gemma3", 3, "contiguous", "positions"),
        ("longrope", 4, "contiguous", "positions"),
        ("dynamic", 4, "contiguous", "bounds"),
        ("gpt-oss", 2, "zigzag", "bounds"),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.some(3)
def test_packed_documents_see_only_themselves(gloo, name, world_size, kind, documents):
    layout = LAYOUTS[kind](37, world_size)
    results = gloo.run(world_size, ring_run, name, layout, None, False, documents, timeout=120)
    assert_same(results, layout, dense_run(name, 37, packed=True))


@pytest.mark.parametrize("documents", [None, "bounds"])
def test_recomputing_activations_changes_nothing(gloo, documents):
    layout = ra.zigzag(37, 2)
    results = gloo.run(2, ring_run, "mistral", layout, None, True, documents, timeout=120)
    assert_same(results, layout, dense_run("mistral", 37, packed=documents is not None))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_an_attached_mask_within_a_models_window(gloo, name):
    mask = ra.documents(lengths=DOCUMENTS)
    layout = ra.balanced(mask, 37, 2)
    whole = mask & ra.sliding_window(WINDOW - 1) if name == "mistral" else mask
    assert_same(gloo.run(2, ring_run, name, layout, mask, timeout=120), layout, dense_run(name, 37, whole))


def test_documents_of_a_call_are_intersected_with_an_attached_mask():
    layout, mask = ra.zigzag(37, 1), ra.prefix(20)
    result = ring_run(None, "llama", layout, mask, False, "bounds")
    whole = mask & ra.documents(lengths=DOCUMENTS, causal=False)
    assert_same([result], layout, dense_run("llama", 37, whole, packed=True))


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch):
    model = build("llama")
    attach(model, layout=ra.zigzag(9, 1))
    expected = model.model(input_ids=sequence(9)).last_hidden_state
    for inputs in (dict(cu_seq_lens_q=[0, 4, 12]), dict(cu_seq_lens_q=[0, 4, 9], unknown=3)):
        with pytest.raises(ValueError, match=r"needs at least 12 tokens|unknown is 3"):
            model(input_ids=sequence(9), **inputs)
    assert torch.equal(model.model(input_ids=sequence(9)).last_hidden_state, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_compiled_layers_have_no_graph_break(name):
    """Equal layers share one graph; packed documents have another."""
    model = build(name)
    attach(model, layout=ra.zigzag(37, 1))
    calls = [dict(input_ids=sequence(37), **extra) for extra in ({}, dict(cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS))]

    def run(inputs):
        logits = model(**inputs).logits
        return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    wanted = [run(inputs) for inputs in calls]
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for inputs, expected in zip(calls, wanted, strict=True):
        torch.testing.assert_close(run(inputs), expected, rtol=0, atol=1e-10)
    torch.compiler.reset()


@pytest.mark.thorough
def test_compiled_layers_without_attention_take_any_documents():
    """More sets of bounds than torch compiles graphs of a function."""
    torch.compiler.reset()
    model, compiled, backend = build("llama"), build("llama"), CompileCounterWithBackend("eager")
    for each in (model, compiled):
        attach(each, layout=ra.zigzag(37, 1))
    for layer in compiled.model.layers:
        layer.self_attn.forward = torch.compiler.disable(layer.self_attn.forward)
        layer.compile(backend=backend)
    for first in range(1, 11):
        bounds = torch.tensor([0, first, 37], dtype=torch.int32)
        wanted, found = (
            [x.logits, *torch.autograd.grad(x.logits.square().sum(), list(each.parameters()))]
            for each in (model, compiled)
            for x in [each(input_ids=sequence(37), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)]
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert backend.frame_count == 2  # before and after attention
    torch.compiler.reset()


@pytest.mark.thorough
def test_a_compiled_model_has_all_layers_in_one_graph():
    """Graphs break at the model's entry and at its request for a mask, but never at attention, forward or backward."""
    torch.compiler.reset()
    model = build("llama")
    attach(model, layout=ra.zigzag(37, 1))
    forwards, backwards = [], []

    def counting(name, counts):
        def count(graph, inputs):
            counts.append(sum(str(node.target) == f"ringattn.{name}.default" for node in graph.graph.nodes))
            return make_boxed_func(graph)

        return count

    backend = aot_autograd(fw_compiler=counting("forward", forwards), bw_compiler=counting("backward", backwards))
    compiled = torch.compile(model, backend=backend)

    def run(model, inputs):
        logits = model(**inputs).logits
        return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    for inputs in (dict(input_ids=sequence(37)), dict(input_ids=sequence(37), cu_seq_lens_q=BOUNDS)):
        torch.testing.assert_close(run(compiled, inputs), run(model, inputs), rtol=0, atol=1e-10)
        # the embedding, transformers' search for documents, the layers, the head
        assert len(forwards) <= 4
        assert [count for count in forwards if count] == [count for count in backwards if count] == [len(model.model.layers)]
        forwards.clear()
        backwards.clear()
    torch.compiler.reset()


def compiled_on_gpus(group, name: str, packed: bool):
    """The relative errors of this rank's logits and gradients in bf16 against fp32, for eager and for compiled layers."""
    layout = ra.zigzag(37, group.size())
    inputs = dict(input_ids=ra.shard(sequence(37), layout, group.rank()).cuda())
    if packed:
        inputs |= dict(cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS)
    found = []
    for dtype, compiled in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        torch.compiler.reset()
        model = build(name).to("cuda", dtype)
        attach(model, layout=layout, group=group)
        for layer in model.model.layers if compiled else ():
            layer.compile(fullgraph=True)
        logits = model(**inputs).logits
        gradients = torch.autograd.grad(logits.float().square().sum(), list(model.parameters()))
        found.append(torch.cat([x.flatten().float() for x in (logits.detach(), *gradients)]))
    torch.compiler.reset()
    exact, *others = found
    return [float((x - exact).norm() / exact.norm()) for x in others]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "packed"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_compiled_layers_on_gpus_are_as_exact_as_eager_ones(nccl, name, packed):
    """With torch.compile's default backend and no graph break."""
    for eager, compiled in nccl.run(nccl.size, compiled_on_gpus, name, packed, timeout=240):
        assert 0 < compiled <= 1.5 * eager < 0.1


def test_frequencies_after_a_call_are_refused():
    """A rotary embedding that runs again in the backward pass would choose its frequencies from this rank's positions."""
    model = build("dynamic")
    attach(model, layout=ra.zigzag(9, 1))
    model(input_ids=sequence(9))
    inputs = torch.zeros(1, 9, 32), torch.arange(9)[None]
    with pytest.raises(ValueError, match="LlamaRotaryEmbedding chooses its frequencies by the last position"):
        model.model.rotary_emb(*inputs)
    detach(model)
    model.model.rotary_emb(*inputs)


def positions_that_disagree(group, kind: str):
    layout = ra.zigzag(12, 2)
    model = build("llama")
    attach(model, layout=layout, group=group)
    inputs = dict(input_ids=ra.shard(sequence(12), layout, group.rank()))
    positions = layout.positions(group.rank())[None]
    if kind == "one rank only":
        inputs |= dict(position_ids=positions) if group.rank() else {}
    elif kind == "ahead":
        inputs |= dict(position_ids=positions + 3 * group.rank())
    else:
        # a jump within a document: for rank 1 the tokens 0 to 8 are one document, for rank 0 a document starts at 10
        inputs |= dict(position_ids=positions if group.rank() else torch.tensor([[0, 1, 2, 2, 0, 1]]))
    with pytest.raises(ValueError) as raised:
        model(**inputs)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one rank only", "ranks disagree: function is"),
        ("ahead", "run ahead of the global positions"),
        ("jump", "neither are the global positions nor restart"),
    ],
)
def test_position_ids_that_ranks_cannot_agree_on_are_refused_everywhere(gloo, kind, message):
    for said in gloo.run(2, positions_that_disagree, kind, timeout=60):
        assert message in said


def padding_on_one_rank(group):
    layout = ra.contiguous(12, 2)
    model = build("llama")
    attach(model, layout=layout, group=group)
    ids = ra.shard(sequence(12), layout, group.rank())
    mask = torch.ones_like(ids)
    mask[:, :2] -= group.rank()
    with pytest.raises(ValueError) as raised:
        model(input_ids=ids, attention_mask=mask)
    return str(raised.value)


def test_padding_on_one_rank_is_an_error_on_all(gloo):
    mine, others = gloo.run(2, padding_on_one_rank, timeout=30)
    assert others.startswith("attention_mask hides tokens of row 0 before others that it shows")
    assert mine == others


def test_position_ids_given_are_kept():
    model = build("llama")
    attach(model, layout=ra.zigzag(8, 1), mask=ra.causal())
    inputs = dict(input_ids=sequence(8), position_ids=torch.arange(8)[None] * 3)
    ring = model(**inputs).logits
    detach(model)
    # with a mask given, transformers does not treat the gaps as ends of packed documents
    dense = model(**inputs, attention_mask=ra.causal().dense(8)[None, None]).logits
    torch.testing.assert_close(ring, dense, rtol=0, atol=1e-10)


def test_a_model_that_keeps_its_attention_is_refused_when_attached(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match="LlamaForCausalLM keeps its attention, 'sdpa'"):
        attach(model, layout=ra.zigzag(9, 1))
    model(input_ids=sequence(9))


def test_positional_arguments_work_too():
    model = build("llama")
    attach(model, layout=ra.zigzag(9, 1))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = model(sequence(9), None, positions).logits
    assert torch.equal(packed, model(input_ids=sequence(9), position_ids=positions).logits)
    with pytest.raises(ValueError, match="attention_mask hides tokens"):
        model(sequence(9), torch.zeros(2, 9))
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(sequence(9), None, input_ids=sequence(9))


def test_another_layout_replaces_the_first_and_detach_undoes_it():
    model = build("llama")
    before = model(input_ids=sequence(9)).logits
    for seq_len in (5, 9):
        attach(model, layout=ra.zigzag(seq_len, 1))
        assert model(input_ids=sequence(seq_len)).logits.shape[1] == seq_len
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    assert hooks == 2, "the model and the model within it have one hook each"
    detach(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks or module._forward_hooks or hasattr(module, NAME) for module in model.modules())
    assert torch.equal(model(input_ids=sequence(9)).logits, before)


def test_a_model_loaded_with_the_rings_attention_gets_sdpa_when_detached():
    register()
    model = build("llama")
    before = model(input_ids=sequence(9)).logits
    model.set_attn_implementation(NAME)
    attach(model, layout=ra.zigzag(9, 1))
    detach(model)
    assert torch.equal(model(input_ids=sequence(9)).logits, before)


def test_detaching_a_model_that_is_not_attached_changes_nothing():
    model = build("llama")
    model.set_attn_implementation("eager")
    detach(model)
    assert model.config._attn_implementation == "eager"


def test_an_attached_model_whose_attention_was_changed_is_refused():
    model = build("llama")
    attach(model, layout=ra.zigzag(9, 1))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="LlamaForCausalLM is attached, but its attention was set to 'sdpa' since"):
        model(input_ids=sequence(9))
    attach(model, layout=ra.zigzag(9, 1))
    model(input_ids=sequence(9))


class Adapted(nn.Module):
    """As PEFT wraps a model with adapters in its layers: unknown attributes are the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, **inputs):
        return self.base_model(**inputs)


def test_a_model_with_adapters_is_attached_and_detached():
    model = Adapted(build("llama"))
    ids = sequence(9)
    dense = model(input_ids=ids).logits
    attach(model, layout=ra.zigzag(9, 1))
    torch.testing.assert_close(model(input_ids=ids).logits, dense, rtol=0, atol=1e-10)
    summed = CausalLMLoss(model)(shift_labels=shift_labels(ids), input_ids=ids)
    torch.testing.assert_close(summed, F.cross_entropy(dense[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    detach(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=ids).logits, dense)
    model.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    with pytest.raises(ValueError, match="Adapted puts learned tokens before each sequence"):
        CausalLMLoss(model)


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


# refused options and models


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
        (dict(dropout=1.5), r"dropout is 1\.5, but must be less than 1"),
        (dict(softcap=-50.0), r"softcap is -50\.0, but must be more than 0"),
        (dict(s_aux=torch.zeros(3)), r"sinks has shape \(3,\), but must be \(4,\)"),
        (dict(head_mask=torch.ones(4)), "head_mask is a tensor"),
        (dict(output_attentions=True), "output_attentions is True"),
        (dict(position_bias=torch.zeros(1, 4, 6, 6)), "position_bias is a tensor"),
        (dict(cache=object()), "cache is"),
        (dict(seq_idx=torch.zeros(6)), "seq_idx is a tensor of shape .*cu_seq_lens_q"),
        (dict(past_key_values=object()), "past_key_values is"),
        (dict(temperature=0.5), r"temperature is 0\.5, but the ring does not know .* attach\(model, ignore=\['temperature'\]\)"),
        (dict(indices=torch.zeros(6)), "indices is a tensor"),
        (dict(deterministic=True), r"deterministic is True.*torch\.use_deterministic_algorithms\(True\)"),
        (dict(keys=9), "keys have 9 tokens and the queries 6"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        attend_with(attached_module(), **options)


def test_options_without_effect_pass():
    attend_with(attached_module(), softcap=None, s_aux=None, output_attentions=False, dropout=0.0, sliding_window=None)


def test_the_option_deterministic_passes_if_torch_is_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        attend_with(attached_module(), deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_option_can_be_ignored_on_request():
    model = build("llama")
    attach(model, layout=ra.zigzag(6, 1), ignore=["temperature"])
    attend_with(model.model.layers[0].self_attn, temperature=0.5)
    with pytest.raises(ValueError, match=r"pressure is 0\.5"):
        attend_with(model.model.layers[0].self_attn, temperature=0.5, pressure=0.5)


def test_a_part_of_a_mask_is_refused():
    mask = LiveMask(None, None, True)
    assert mask[:, :, 0:, :] is mask
    with pytest.raises(ValueError, match=r"the model takes a part of its mask.*without logits_to_keep"):
        mask[:, :, -1:, :]


def test_windows_that_differ_are_refused():
    with pytest.raises(ValueError, match="sliding_window is 4 in LlamaAttention, but its mask was made for 5"):
        attend_with(attached_module(), sliding_window=4, attention_mask=LiveMask(None, 5, True))


def test_a_window_given_only_by_the_mask_is_honoured():
    module = attached_module()
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    by_mask, _ = ring_attention_forward(module, q, k, k, LiveMask(LivePairs(None), 2, True))
    by_module, _ = ring_attention_forward(module, q, k, k, None, sliding_window=2)
    assert torch.equal(by_mask, by_module)
    assert not torch.equal(by_mask, ring_attention_forward(module, q, k, k, None)[0])


def test_a_window_that_hides_a_token_from_itself_is_refused():
    with pytest.raises(ValueError, match="sliding_window is 0 in LlamaAttention, but a token sees itself at least"):
        attend_with(attached_module(), attention_mask=LiveMask(None, 0, True))


@pytest.mark.parametrize("mask", [None, LiveMask(None, 3, False)], ids=["module", "mask too"])
def test_a_window_on_a_module_that_is_not_causal_is_refused(mask):
    with pytest.raises(ValueError, match="sliding_window is 4 on a module that is not causal"):
        attend_with(attached_module(is_causal=False), sliding_window=4, attention_mask=mask)


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
        (dict(input_ids=sequence(6), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]] * 2)), "attention_mask hides tokens"),
        (dict(input_ids=sequence(6), attention_mask=torch.ones(2, 1, 6, 6)), "attention_mask is given"),
        (dict(input_ids=sequence(6), attention_mask=torch.tensor([[1, 1, 1, 2, 2, 2]] * 2)), "attention_mask counts to 2"),
        (dict(input_ids=sequence(6), output_attentions=True), "output_attentions is True"),
        (dict(input_ids=sequence(6), use_cache=True), "use_cache is True, but key/value caches"),
        (dict(input_ids=sequence(6), cu_seq_lens_q=[0, 6], cu_seq_lens_k=[0, 2, 6]), "cu_seq_lens_q and cu_seq_lens_k differ"),
        (dict(input_ids=sequence(6), cu_seq_lens_q=[3, 6]), r"cu_seq_lens_q starts with \[3\]"),
        (dict(input_ids=sequence(6), cu_seq_lens_q=[0, 2, 3]), "cu_seq_lens_q ends with 3, but the sequence has 6 tokens"),
        (dict(input_ids=sequence(6), max_length_q=6), "max_length_q is 6, but cu_seq_lens_q"),
        (dict(input_ids=sequence(6), position_ids=torch.arange(6).expand(3, 1, 6)), "position_ids have shape"),
        (
            dict(input_ids=sequence(6), position_ids=torch.stack([torch.arange(6), torch.zeros(6)]).long()),
            "position_ids differ between",
        ),
        (dict(input_ids=sequence(6), position_ids=torch.arange(6)[None] * 3), "position_ids run ahead"),
        ({}, "without input_ids"),
    ],
    ids=[
        *(
            "length",
            "labels",
            "padding",
            "4-D mask",
            "packing mask",
            "weights",
            "cache",
            "two bounds",
            "bounds",
            "bounds of a shard",
            "longest",
            "3-D positions",
        ),
        *("positions by row", "positions ahead", "no input"),
    ],
)
def test_inputs_are_refused_by_name(inputs, message):
    model = build("llama")
    attach(model, layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match=message):
        model(**inputs)


def test_generating_is_refused():
    model = build("llama")
    attach(model, layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match=r"key/value caches are not supported: .* to generate, give past_key_values=RingCache"):
        model.generate(input_ids=sequence(6), max_new_tokens=2, use_cache=True)
    with pytest.raises(ValueError, match="the input has 7 tokens, but rank 0"):
        model.generate(input_ids=sequence(6), max_new_tokens=2, use_cache=False)


def test_a_cache_that_a_config_asks_for_is_off():
    model = MODELS["llama"]()
    model.config.use_cache = True
    attach(model, layout=ra.zigzag(6, 1))
    assert model(input_ids=sequence(6)).past_key_values is None


def test_a_local_mean_is_refused_on_several_ranks(gloo):
    gloo.run(2, mean_of_own_tokens, timeout=60)


def mean_of_own_tokens(group):
    layout = ra.zigzag(12, 2)
    model = build("llama")
    attach(model, layout=layout, group=group)
    ids, labels = (ra.shard(x, layout, group.rank()) for x in (sequence(12), shift_labels(sequence(12))))
    with pytest.raises(ValueError, match="without num_items_in_batch"):
        model(input_ids=ids, labels=labels, shift_labels=labels)
    with pytest.raises(ValueError, match="num_items_in_batch is 10 on rank 0, but 12 on rank 1: pass the same on every rank"):
        model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=(labels != -100).sum())
    part = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=22)
    whole = F.cross_entropy(part.logits.flatten(0, 1), labels.flatten(), reduction="sum") / 22
    torch.testing.assert_close(part.loss.double(), whole, rtol=1e-6, atol=0)


def dropping(group):
    """Logits of this rank's tokens, of a model in training that drops weights of attention alone, and of it in eval mode."""
    layout = ra.zigzag(12, group.size())
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, attn_pdrop=0.25, resid_pdrop=0.0, embd_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config).double()
    attach(model, layout=layout, group=group)
    found = []
    for training in (True, True, False):
        torch.manual_seed(1)
        logits = model.train(training)(input_ids=ra.shard(sequence(12), layout, group.rank())).logits.detach()
        found.append(ra.unshard(logits, layout, group))
    return found


def test_dropout_in_training_is_that_of_one_process(gloo):
    first, again, without = gloo.run(2, dropping)[0]
    assert torch.equal(first, again)
    assert not torch.allclose(first, without)
    for x, wanted in zip((first, without), gloo.run(1, dropping)[0][::2]):
        torch.testing.assert_close(x, wanted, rtol=0, atol=1e-12)


def test_layers_that_mix_tokens_by_other_means_are_refused():
    model = build("llama")
    model.model.layers[1].mlp.short = nn.Conv1d(4, 4, 3)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.short is a Conv1d, which mixes tokens"):
        attach(model, layout=ra.zigzag(6, 1))
    model = build("gemma3")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="layer_types have 'linear_attention'"):
        attach(model, layout=ra.zigzag(6, 1))


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        pytest.param(
            lambda: transformers.BertForMultipleChoice(transformers.BertConfig(**BERT)),
            "answers from one token",
            id="choices",
        ),
        pytest.param(
            lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
            "pooler looks at one token of the sequence",
            id="first token",
        ),
        pytest.param(
            lambda: transformers.EsmForMaskedLM(
                transformers.EsmConfig(**BERT, pad_token_id=1, mask_token_id=4, token_dropout=True)
            ),
            "token_dropout is True",
            id="share of masked tokens",
        ),
        pytest.param(
            lambda: transformers.MobileBertForMaskedLM(transformers.MobileBertConfig(**BERT, embedding_size=24)),
            "trigram_input is True",
            id="neighbours",
        ),
    ]
    * SINCE_5,
)
def test_models_that_take_a_shard_for_the_whole_sequence_are_refused(make_model, message):
    with pytest.raises(ValueError, match=message):
        attach(make_model(), layout=ra.zigzag(6, 1))


def test_an_encoder_with_a_decoder_is_refused():
    model = build("llama")
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="is an encoder and a decoder"):
        attach(model, layout=ra.zigzag(6, 1))


def test_the_loss_of_any_causal_head_is_guarded():
    """Also of heads without CausalLM in their name."""
    model = build("gpt2")
    attach(model, layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match="shift them before sharding"):
        model(input_ids=sequence(6), labels=sequence(6))


def test_losses_of_other_heads_are_refused_on_several_ranks():
    layout, inputs = ra.zigzag(12, 2), dict(input_ids=sequence(6))
    model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
    for name in ("labels", "start_positions"):
        with pytest.raises(ValueError, match=f"{name} is given to BertForMaskedLM, whose loss would be of this rank's tokens"):
            check_targets(model, {**inputs, name: sequence(6)}, layout.world_size)


@pytest.mark.parametrize("again", [False, True], ids=["attached", "attached again"])
def test_a_head_around_an_attached_model_is_guarded_too(again):
    model, ids = build("llama"), sequence(6)
    for _ in range(1 + again):
        attach(model.model, layout=ra.zigzag(6, 1))
    model(input_ids=ids)
    with pytest.raises(ValueError, match="labels would be shifted within the shard"):
        model(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="labels would be shifted within the shard"):
        model(ids, None, None, None, None, ids)
    detach(model.model)
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
    assert not model._forward_pre_hooks


def test_a_head_whose_forward_is_called_without_its_hooks_is_guarded():
    """As by PEFT before 0.21: the hooks of the model inside still run and fill in its positions."""
    model, ids = build("llama"), sequence(6)
    before = model(input_ids=ids, labels=ids).loss
    for _ in range(2):
        attach(model, layout=ra.zigzag(6, 1))
    twin = copy.deepcopy(model)
    for head in (model, twin):
        with pytest.raises(ValueError, match="labels would be shifted within the shard"):
            head.forward(input_ids=ids, labels=ids)
        assert torch.equal(head.forward(input_ids=ids).logits, model(input_ids=ids).logits)
        assert torch.isfinite(head.forward(input_ids=ids, labels=ids, shift_labels=shift_labels(ids)).loss)
        with pytest.raises(ValueError, match="LlamaAttention runs in a model whose forward was called directly"):
            head.model.forward(input_ids=ids)
    detach(model)
    assert torch.equal(model(input_ids=ids, labels=ids).loss, before)


def test_modules_and_masks_that_disagree_on_what_is_causal_are_refused():
    """Some attention implementations of transformers follow the module, others the mask."""
    model, ids = build("llama"), sequence(6)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    dense = model(input_ids=ids).logits
    attach(model, layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match="is_causal is False in LlamaAttention, but its mask is causal"):
        model(input_ids=ids)
    attach(model, layout=ra.zigzag(6, 1), mask=ra.full() if SINCE_5 else ra.causal())
    torch.testing.assert_close(model(input_ids=ids).logits, dense, rtol=0, atol=1e-10)


def test_attention_weights_that_a_config_asks_for_are_refused():
    model = build("llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    attach(model, layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match="output_attentions is True"):
        model(input_ids=sequence(6))


def test_a_head_that_pools_around_an_attached_model_is_refused():
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES))
    attach(model.model, layout=ra.zigzag(6, 1))
    model.model(input_ids=sequence(6))
    with pytest.raises(ValueError, match="LlamaForSequenceClassification answers from one token"):
        model(input_ids=sequence(6))


def labels_around_the_decoder(group):
    """Rank 1 alone gives labels to a head that is not attached."""
    layout = ra.zigzag(12, 2)
    model = build("llama")
    attach(model.model, layout=layout, group=group)
    ids = ra.shard(sequence(12), layout, group.rank())
    with pytest.raises(ValueError) as raised:
        model(input_ids=ids, labels=ids if group.rank() else None)
    return str(raised.value)


def test_refused_labels_of_one_ranks_head_are_an_error_on_all(gloo):
    others, mine = gloo.run(2, labels_around_the_decoder, timeout=30)
    assert mine.startswith("labels would be shifted within the shard")
    assert "rank 1 refused the input: rank 1: labels would be shifted" in others


def test_shifted_labels_that_are_counted_without_labels_are_refused():
    """With label_smoothing_factor, transformers' Trainer calls a model so, and shifts the labels once more afterwards."""
    model, ids = build("llama"), sequence(6)
    inputs = dict(input_ids=ids, shift_labels=shift_labels(ids), num_items_in_batch=10)
    attach(model, layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match=r"label_smoothing_factor.*attach\(model, ignore=\['num_items_in_batch'\]\)"):
        model(**inputs)
    model.model(**inputs)
    attach(model, layout=ra.zigzag(6, 1), ignore=["num_items_in_batch"])
    model(**inputs)


class OwnLoss(transformers.LlamaForCausalLM):
    """A loss as in GPT2DoubleHeadsModel and GraniteSpeech, which take any arguments and ignore most of them."""

    def forward(self, input_ids, labels=None, **options):
        logits = super().forward(input_ids=input_ids, **options).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class LossOfShiftedLabels(transformers.LlamaForCausalLM):
    """A loss of shift_labels alone, as in Liger's forward passes."""

    def forward(self, input_ids, **options):
        shift_labels = options.pop("shift_labels", None)
        logits = super().forward(input_ids=input_ids).logits
        return self.loss_function(logits=logits, labels=None, shift_labels=shift_labels, vocab_size=SIZES["vocab_size"], **options)


def test_models_own_kinds_of_losses_are_refused_on_several_ranks():
    config, layout, ids = transformers.LlamaConfig(**SIZES), ra.zigzag(12, 2), sequence(6)
    all_of_it = dict(input_ids=ids, labels=ids, shift_labels=ids, num_items_in_batch=22)
    with pytest.raises(ValueError, match="labels is given to OwnLoss, whose loss would be of this rank's tokens alone"):
        check_targets(OwnLoss(config), all_of_it, layout.world_size)
    model = LossOfShiftedLabels(config)
    with pytest.raises(ValueError, match="shift_labels are given without num_items_in_batch"):
        check_targets(model, dict(input_ids=ids, shift_labels=ids), layout.world_size)
    check_targets(model, dict(input_ids=ids, shift_labels=ids, num_items_in_batch=22), layout.world_size)
    model = build("llama")
    check_targets(model, dict(input_ids=ids, shift_labels=ids), layout.world_size)
    check_targets(model, all_of_it, layout.world_size)
    for settings in (dict(output_router_logits=True), dict(output_router_logits=None)):
        model.config.output_router_logits = settings["output_router_logits"] is None
        with pytest.raises(ValueError, match="output_router_logits is True, and the routers' loss would be a mean over this rank"):
            check_targets(model, {**all_of_it, **settings}, layout.world_size)
    model.config.output_router_logits, model.config.z_loss_coefficient = False, 0.5  # Bamba's
    with pytest.raises(ValueError, match=r"z_loss_coefficient is 0\.5, but the z-loss is a mean over this rank's tokens"):
        check_targets(model, all_of_it, layout.world_size)
    check_targets(model, all_of_it, 1)


def shards_taken_for_the_sequence(group):
    layout = ra.zigzag(12, 2)
    sizes = dict(vocab_size=61, bos_token_id=None, eos_token_id=None)
    config = transformers.GPT2Config(**sizes, n_embd=32, n_layer=1, n_head=4, n_positions=64, num_labels=1)
    model = transformers.GPT2DoubleHeadsModel(config).eval()
    attach(model, layout=layout, group=group)
    ids = ra.shard(sequence(12), layout, group.rank())
    with pytest.raises(ValueError, match="GPT2DoubleHeadsModel makes its mc_logits from one token of the sequence"):
        model(input_ids=ids)
    model = build("llama")
    attach(model, layout=layout, group=group)
    with pytest.raises(ValueError, match="logits_to_keep is 1, but would keep the last tokens of each shard"):
        model(input_ids=ids, logits_to_keep=1)
    kept = model(input_ids=ids, logits_to_keep=torch.tensor([2, 5])).logits
    # a product of fewer rows may round otherwise
    torch.testing.assert_close(kept, model(input_ids=ids, logits_to_keep=0).logits[:, [2, 5]], rtol=0, atol=1e-12)


def test_outputs_made_from_one_token_are_refused_on_several_ranks(gloo):
    gloo.run(2, shards_taken_for_the_sequence, timeout=60)


def test_layers_that_ranks_would_skip_at_random_are_refused():
    model = build("llama")
    model.config.layerdrop = 0.5
    attach(model, layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match=r"layerdrop is 0\.5, by which ranks would skip different layers"):
        model.train()(input_ids=sequence(6))
    model.eval()(input_ids=sequence(6))


def test_packed_documents_without_their_mask_are_refused():
    """With `cp_size` above 1, accelerate takes the mask away from each attention module."""
    model = build("llama")
    attach(model, layout=ra.zigzag(6, 1))
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None, "is_causal": True}), with_kwargs=True
        )
    model(input_ids=sequence(6))
    with pytest.raises(ValueError, match="LlamaAttention is called without the mask that says where packed documents end"):
        model(input_ids=sequence(6), cu_seq_lens_q=[0, 2, 6])


def test_a_mask_that_sees_ahead_is_refused():
    """Image blocks attend in both directions: transformers adds that to the mask function."""
    register()
    function = AttentionMaskInterface()[NAME]
    blocks = torch.tensor([0, 1, 1, 0])
    options = dict(q_length=4, cache_position=torch.arange(4), allow_is_causal_skip=False)
    with pytest.raises(ValueError, match="a mask function of its own"):
        function(mask_function=lambda b, h, q, k: (k <= q) | (blocks[q] * blocks[k] == 1), **options)
    second = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0]])
    for images in (lambda b, q, k: second[b, q] * second[b, k] == 1, lambda b, q, k: second[b, q + 4] == 1):
        with pytest.raises(ValueError, match="a mask function of its own"):
            function(mask_function=lambda b, h, q, k, images=images: (k <= q) | images(b, q, k), batch_size=2, **options)
    assert function(mask_function=lambda b, h, q, k: k <= q, **options).is_causal
    assert not function(mask_function=lambda b, h, q, k: k >= 0, q_length=4, cache_position=torch.arange(4)).is_causal
    assert not function(mask_function=lambda b, h, q, k: k >= 0, allow_is_bidirectional_skip=True, **options).is_causal


def image_on_one_rank(group):
    layout = ra.contiguous(12, 2)
    model = build("llama")
    attach(model, layout=layout, group=group)
    modeling = transformers.models.llama.modeling_llama
    made = modeling.create_causal_mask
    options = dict(mask_function=lambda b, h, q, k: (k <= q) | bool(group.rank()), batch_size=2, q_length=6)
    modeling.create_causal_mask = lambda **_: AttentionMaskInterface()[NAME](
        cache_position=torch.arange(6), allow_is_causal_skip=False, **options
    )
    try:
        with pytest.raises(ValueError) as raised:
            model(input_ids=ra.shard(sequence(12), layout, group.rank()))
    finally:
        modeling.create_causal_mask = made
    return str(raised.value)


def test_a_refused_mask_of_one_rank_is_an_error_on_all(gloo):
    others, mine = gloo.run(2, image_on_one_rank, timeout=30)
    assert mine.startswith("this model adds a mask function of its own")
    assert "rank 1 refused the input: rank 1: this model adds a mask function" in others


def dropout_on_one_rank(group):
    layout = ra.zigzag(12, 2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_dropout=0.25)).train(bool(group.rank()))
    attach(model, layout=layout, group=group)
    with pytest.raises(ValueError) as raised:
        model(input_ids=ra.shard(sequence(12), layout, group.rank()))
    return str(raised.value)


def test_an_option_of_one_rank_is_an_error_on_all(gloo):
    others, mine = gloo.run(2, dropout_on_one_rank, timeout=30)
    assert mine == others
    assert "score is none on rank 0, but score(dropout=0.25)" in mine


SMALL_T5 = dict(vocab_size=31, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
ELSEWHERE = {
    "xlnet": (
        lambda: transformers.XLNetModel(transformers.XLNetConfig(vocab_size=31, d_model=16, n_layer=1, n_head=2, d_inner=16)),
        "choose a model that does .* or write",
    ),
    "longt5": (
        lambda: transformers.LongT5EncoderModel(transformers.LongT5Config(**SMALL_T5)),
        "choose a model that does .* or write",
    ),
    "longt5's decoder": (
        lambda: transformers.LongT5Model(transformers.LongT5Config(**SMALL_T5)).decoder,
        "is an encoder and a decoder, .* choose one of T5's or BART's kind",
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_models_that_cannot_be_attached_say_what_can(case):
    build_one, message = case
    with pytest.raises(ValueError, match=message):
        attach(build_one(), layout=ra.zigzag(6, 1))


def test_attach_refuses_bad_arguments_and_models():
    model = build("llama")
    with pytest.raises(ValueError, match="layout is for 4 ranks, but the group has 1"):
        attach(model, layout=ra.zigzag(6, 4))
    with pytest.raises(
        ValueError, match=r"Linear does not take its attention from AttentionInterface: .* call ringattn\.replace_att"
    ):
        attach(nn.Linear(2, 2), layout=ra.zigzag(6, 1))
    with pytest.raises(ValueError, match="leaves rank 0 without tokens"):
        attach(model, layout=ra.zigzag(0, 1))
    model.config.attention_chunk_size = 128
    with pytest.raises(ValueError, match="attention_chunk_size is 128"):
        attach(model, layout=ra.zigzag(6, 1))


def test_a_window_counts_the_token_itself():
    assert LivePairs(None).mask_for(is_causal=True, window=3).dense(6).sum(1).tolist() == [1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("name", ["Bart", "MegatronBert"])
def test_a_mask_that_the_model_made_itself_is_refused_with_what_to_install(name):
    """As transformers before 5 do; here a module is called as they call it."""
    sizes = dict(vocab_size=61, max_position_embeddings=64)
    if name == "Bart":
        small = dict(d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, is_decoder=True)
        model = transformers.BartForCausalLM(transformers.BartConfig(**sizes, **small))
        module = model.model.decoder.layers[0].self_attn
    else:
        small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, is_decoder=True)
        model = transformers.MegatronBertForCausalLM(transformers.MegatronBertConfig(**sizes, **small))
        module = model.bert.encoder.layer[0].attention.self
    attach(model, layout=ra.zigzag(8, 1))
    with pytest.raises(ValueError, match=r"attention_mask is given, .* install transformers 5"):
        module(torch.zeros(1, 8, 16), attention_mask=torch.zeros(1, 1, 8, 8))
