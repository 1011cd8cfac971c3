"""Megatron-core's GPT around the ring of its context-parallel group: logits and all gradients of its own dense attention.

They ran with megatron-core 0.16.1 over gloo on CPUs, where Megatron is asked to take the CPU for its GPU. It is not in the development
environment: without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringattn as ra

pytestmark = pytest.mark.thorough
pytest.importorskip("megatron.core")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.enums import AttnBackend, AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from ringattn.integrations.megatron import RingCoreAttention, ring_spec  # noqa: E402

VOCAB, HEADS = 37, 4
SIZES = dict(num_layers=2, hidden_size=16, num_attention_heads=HEADS, ffn_hidden_size=24)
PLAIN = dict(
    use_cpu_initialization=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    masked_softmax_fusion=False,
    bias_dropout_fusion=False,
    gradient_accumulation_fusion=False,
    apply_rope_fusion=False,
)
UNEVEN = ra.Layout(29, ((ra.Span(0, 3),), (ra.Span(20, 9), ra.Span(3, 6)), (ra.Span(9, 4),), (ra.Span(13, 7),)))


@contextlib.contextmanager
def on_cpu(context_parallel=1):
    """Megatron's groups, with the CPU in the place of its GPU."""
    with (
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
    ):
        parallel_state.initialize_model_parallel(context_parallel_size=context_parallel)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def build(spec, options):
    torch.manual_seed(0)
    config = TransformerConfig(**SIZES | PLAIN | options)
    # rotary embeddings of Megatron's context parallelism need a GPU
    return GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=64, position_embedding_type="learned_absolute").double()


def batch(n):
    generator = torch.Generator().manual_seed(2)
    ids, labels = torch.randint(VOCAB, (2, 2, n), generator=generator)
    return ids, torch.arange(n).expand(2, n), labels


def step(model, ids, positions, labels, attention_mask=None):
    logits = model(ids, positions, attention_mask)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return dict(logits=logits.detach()) | {name: p.grad for name, p in model.named_parameters()}


def difference(n, mask, options, given):
    """The greatest difference of logits and gradients, summed over the ring, from those of Megatron's own attention; relative."""
    ring = parallel_state.get_context_parallel_group()
    model = build(get_gpt_layer_local_spec(), options | dict(window_size=None, cp_comm_type=None))
    saved = model.sharded_state_dict().keys()
    wanted = step(model, *batch(n), attention_mask=~mask.dense(n)[None, None])
    model = build(ring_spec(get_gpt_layer_local_spec(), **given), options | dict(context_parallel_size=ring.size()))
    assert model.sharded_state_dict().keys() == saved
    layout = given.get("layout") or ra.zigzag(n, ring.size())
    found = step(model, *(ra.shard(x, layout, ring.rank()) for x in batch(n)))
    found["logits"] = ra.unshard(found["logits"], layout, ring)
    for name, x in found.items():
        if name != "logits":
            dist.all_reduce(x, group=ring)
    assert found.keys() == wanted.keys()
    return max(float((found[name] - x).abs().max() / x.abs().max()) for name, x in wanted.items())


def differences(group, context_parallel):
    with on_cpu(context_parallel):
        return {name: difference(n, *rest) for name, (n, ranks, *rest) in CASES.items() if ranks == context_parallel}


CASES = {
    "causal": (24, 4, ra.causal(), {}, {}),
    "two ranks": (20, 2, ra.causal(), {}, {}),
    "eight ranks": (32, 8, ra.causal(), {}, {}),
    "shared heads": (24, 4, ra.causal(), dict(num_query_groups=2, cp_comm_type="p2p"), {}),
    "uneven": (29, 4, ra.causal(), dict(cp_comm_type="all_gather"), dict(layout=UNEVEN)),
    "window": (24, 4, ra.sliding_window(5, 0), dict(window_size=(5, 0)), {}),
    "mask": (24, 4, ra.prefix(7), {}, dict(mask=ra.prefix(7), schedule=ra.gather())),
    "scaled": (24, 4, ra.causal(), dict(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True, softmax_scale=0.3), {}),
    "off by one": (24, 4, ra.causal(), dict(softmax_type="off-by-one"), {}),
    "learned offset": (24, 4, ra.causal(), dict(softmax_type="learnable"), {}),
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_step_is_that_of_one_process(gloo, ranks):
    for found in gloo.run(8, differences, ranks):
        assert found
        assert all(difference < 1e-9 for difference in found.values()), found


def alone(config, **given):
    """The core attention of a layer on one rank."""
    one = SimpleNamespace(size=lambda: 1)
    with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        config = config if isinstance(config, TransformerConfig) else TransformerConfig(**SIZES | PLAIN | config)
        groups = SimpleNamespace(tp=one, cp=None)
        return RingCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups, **given)


def qkv(rows=10, heads=HEADS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(rows, 2, h, 4, generator=generator) for h in (HEADS, heads, heads)]


def reference(**options):
    return ra.reference.attention(*(x.transpose(0, 1) for x in qkv()), **options).transpose(0, 1).flatten(2)


def test_dropout_in_training_alone():
    core = alone(dict(attention_dropout=0.3), score=ra.score(softcap=2.0, seed=5))
    wanted = reference(mask=ra.causal(), score=ra.score(softcap=2.0, dropout=0.3, seed=5))
    torch.testing.assert_close(core(*qkv(), None), wanted)
    torch.testing.assert_close(core.eval()(*qkv(), None), reference(mask=ra.causal(), score=ra.score(softcap=2.0)))


def test_kinds_of_attention_and_windows():
    core = alone({})
    torch.testing.assert_close(core(*qkv(), None, attn_mask_type=AttnMaskType.no_mask), reference(mask=ra.full()))
    windowed = dict(window_size=(3, 0), window_attn_skip_freq=[0, 1])
    torch.testing.assert_close(alone(windowed)(*qkv(), None), reference(mask=ra.causal()))
    second = TransformerConfig(**SIZES | PLAIN | windowed | dict(window_attn_skip_freq=[1, 0]))
    torch.testing.assert_close(alone(second)(*qkv(), None), reference(mask=ra.sliding_window(3, 0)))


REFUSED = {
    "cp_comm_type": ({}, dict(cp_comm_type="a2a"), "cp_comm_type is 'a2a', but must be 'p2p', 'all_gather' or None"),
    "both": ({}, dict(cp_comm_type="p2p", schedule=ra.gather()), "cp_comm_type is 'p2p', and a schedule is given"),
    "dropout": ({}, dict(score=ra.score(dropout=0.1)), "score has dropout 0.1, but config.attention_dropout says it"),
    "sinks": (
        dict(softmax_type="off-by-one"),
        dict(score=ra.score(sinks=torch.zeros(HEADS))),
        "score has sinks, but config.softmax_type is 'off-by-one'",
    ),
    "attention_backend": (dict(attention_backend=AttnBackend.flash), {}, "config.attention_backend is AttnBackend.flash, but"),
    "deterministic_mode": (dict(deterministic_mode=True), {}, "config.deterministic_mode is True, but PyTorch's switch is off"),
    "flash_decode": (dict(flash_decode=True), {}, "config.flash_decode is True, but there is no key/value cache"),
    "fp8": (dict(fp8_dot_product_attention=True), {}, "config.fp8_dot_product_attention is True, but attention around a ring"),
    "qk_clip": (dict(qk_clip=True), {}, "config.qk_clip is True, but the greatest logits are not returned"),
    "size": (dict(context_parallel_size=2), {}, "config.context_parallel_size is 2, but the context-parallel group has 1 ranks"),
    "mask": ({}, dict(mask=torch.ones(2, 2)), "mask is a tensor of shape (2, 2), but must be a Mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_by_name(name):
    options, given, message = REFUSED[name]
    config = TransformerConfig(**SIZES | PLAIN)
    for option, value in options.items():
        setattr(config, option, value)  # past Megatron's own checks
    with pytest.raises(ValueError) as error:
        alone(config, **given)
    assert message in str(error.value)


def test_calls_that_are_refused():
    core = alone({})
    for name in ("attention_mask", "attention_bias", "packed_seq_params"):
        given = dict(attention_mask=None) | {name: torch.ones(2, 2)}
        with pytest.raises(ValueError, match=f"{name} is given to RingCoreAttention, but around a ring"):
            core(*qkv(), **given)
    with pytest.raises(ValueError, match=r"attn_mask_type is AttnMaskType.padding, whose mask is a tensor"):
        core(*qkv(), None, attn_mask_type=AttnMaskType.padding)


def test_specs_of_one_layer_and_of_a_block():
    spec = get_gpt_layer_local_spec()
    own = spec.submodules.self_attention.submodules.core_attention
    for layer in [ring_spec(spec), *ring_spec(TransformerBlockSubmodules(layer_specs=[spec] * 2)).layer_specs]:
        assert layer.submodules.self_attention.submodules.core_attention.module is RingCoreAttention
    assert spec.submodules.self_attention.submodules.core_attention is own, "they are copies"


def test_specs_that_are_refused():
    spec = get_gpt_layer_local_spec()
    with pytest.raises(ValueError, match="spec is a int, but must be the ModuleSpec of a transformer layer"):
        ring_spec(3)
    spec.submodules.cross_attention = spec.submodules.self_attention
    with pytest.raises(ValueError, match="a layer of spec has cross_attention, whose keys are other tokens"):
        ring_spec(spec)
    spec.submodules.self_attention = torch.nn.Identity
    with pytest.raises(ValueError, match=r"a layer of spec has .*Identity.* for self_attention, which has no core_attention"):
        ring_spec(spec)


def odd_shards(group):
    """Two equal chunks a rank have an even number of rows, on every rank."""
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=group)
    config = TransformerConfig(**SIZES | PLAIN)
    config.context_parallel_size = 2
    core = RingCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    with pytest.raises(ValueError) as error:
        core(*qkv(5 + group.rank()), None)
    return str(error.value)


def test_a_refusal_reaches_every_rank(gloo):
    assert all("5 rows, but Megatron cuts a sequence into two equal chunks" in error for error in gloo.run(2, odd_shards))
