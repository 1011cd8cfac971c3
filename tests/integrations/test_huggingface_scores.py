"""Models of transformers that make their scores themselves give dense logits and gradients on a ring: ALiBi and T5's relative bias."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

import ringattn as ra
from ringattn.integrations import huggingface_scores
from ringattn.integrations.huggingface import NAME, attach, detach
from ringattn.integrations.huggingface_attachment import Attachment
from ringattn.training.causal_lm import CausalLMLoss, shift_labels, sum_gradients
from tests.scored_models import drop_weights, make_distinct, makes_own_masks

pytestmark = makes_own_masks
N, ANSWER, VOCAB, P = 23, 13, 31, 0.25
LAYOUTS = {"zigzag": ra.zigzag, "contiguous": ra.contiguous, "striped": ra.striped}
DOCUMENTS = (7, 1, 15)
BOUNDS = [0, 7, 8, 23]
FALCON = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, bias=True, new_decoder_architecture=False)
# buckets of one distance, of several, and the last one
T5 = dict(
    d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=10
)


def falcon(**settings) -> nn.Module:
    config = transformers.FalconConfig(vocab_size=VOCAB, **{**FALCON, **settings}, attn_implementation="sdpa")
    return transformers.FalconForCausalLM(config)


def t5(kind: str, model: str = "EncoderModel") -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCAB, **T5, dropout_rate=0.0)
    return getattr(transformers, f"{kind}{model}")(config)


MODELS = {
    # 3 heads: not a power of 2
    "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCAB, hidden_size=24, n_layer=2, n_head=3)),
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(
            vocab_size=VOCAB, d_model=24, n_layers=2, n_heads=3, max_seq_len=N, attn_config=dict(clip_qkv=0.5, softmax_scale=0.5)
        )
    ),
    "falcon-alibi": lambda: falcon(alibi=True, multi_query=False, parallel_attn=False),
    # 4 heads that share 2 of keys and values, and rotary embeddings
    "falcon-groups": lambda: falcon(new_decoder_architecture=True, hidden_size=32, num_attention_heads=4, num_kv_heads=2),
    "falcon": lambda: falcon(multi_query=True),
    "t5": lambda: t5("T5"),
    "mt5": lambda: t5("MT5"),
    "umt5": lambda: t5("UMT5"),
}
BOTH = {"t5-both": lambda: t5("T5", "ForConditionalGeneration"), "umt5-both": lambda: t5("UMT5", "ForConditionalGeneration")}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = {**MODELS, **BOTH}[name]().double()
    make_distinct(model, std=0.2)
    return model.train()


@contextlib.contextmanager
def in_fp64() -> Iterator[None]:
    """transformers' BLOOM and MPT round their softmax to fp32."""
    softmax, to_float = F.softmax, torch.Tensor.float

    def in_dtype(x, dim=None, dtype=None):
        return softmax(x, dim=dim)

    with (
        mock.patch.object(F, "softmax", in_dtype),
        mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x)),
    ):
        yield


def sequence(length: int = N) -> torch.Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(length))


def weights(out: torch.Tensor, length: int) -> torch.Tensor:
    """Of the sum of outputs that is the loss, for the whole sequence."""
    return torch.randn(2, length, out.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def run(model: nn.Module, layout: ra.Layout | None = None, rank: int = 0, answer: ra.Layout | None = None, **inputs):
    """Outputs, loss and gradients of the shard, or of the whole sequence."""
    cut = (lambda x, by: x) if layout is None else (lambda x, by: ra.shard(x, by, rank))
    inputs |= dict(input_ids=cut(sequence(), layout))
    length, of_out = N, layout
    if hasattr(model, "decoder"):
        inputs |= dict(decoder_input_ids=cut(sequence(ANSWER), answer))
        length, of_out = ANSWER, answer
    out = model(**inputs)[0]
    loss = (out * cut(weights(out, length), of_out)).sum()
    loss.backward()
    return out.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@functools.cache
def dense(name: str):
    with in_fp64():
        return run(build(name), **(dict(use_cache=False) if name in ("bloom", "mpt") else {}))


def ring_run(group, name: str, kind: str, recompute: bool = False):
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    model = build(name)
    layout, answer = LAYOUTS[kind](N, size), ra.zigzag(ANSWER, size)
    if name in BOTH:
        attach(model.encoder, layout=layout, group=group)
        attach(model.decoder, layout=answer, group=group)
    else:
        attach(model, layout=layout, group=group)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    out, loss, _ = run(model, layout, rank, answer)
    sum_gradients(model.parameters(), group)
    return ra.unshard(out, answer if name in BOTH else layout, group), loss, {name: p.grad for name, p in model.named_parameters()}


def assert_same(results: list, expected: tuple) -> None:
    out, loss, gradients = expected
    for own, _, summed in results:
        torch.testing.assert_close(own, out, rtol=0, atol=1e-10)
        for name, gradient in gradients.items():
            torch.testing.assert_close(summed[name], gradient, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(sum(part for _, part, _ in results), loss, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        ("bloom", 2, "zigzag"),
        ("mpt", 3, "contiguous"),
        ("falcon-alibi", 2, "zigzag"),
        ("falcon-groups", 2, "contiguous"),
        ("falcon", 3, "striped"),
        ("t5", 3, "zigzag"),
        ("mt5", 2, "striped"),
        ("umt5", 2, "contiguous"),
        ("t5-both", 3, "contiguous"),
        ("umt5-both", 2, "zigzag"),
    ],
    ids=str,
)
@pytest.mark.some(5)
def test_a_model_on_a_ring_equals_the_dense_one(gloo, name, size, kind):
    assert_same(gloo.run(size, ring_run, name, kind), dense(name))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["falcon-alibi", "t5"])
def test_compiled_layers_have_no_graph_break(name):
    model = build(name)
    attach(model, layout=ra.zigzag(N, 1))
    torch.compiler.reset()
    for layer in model.encoder.block if name == "t5" else model.transformer.h:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert_same([run(model)], dense(name))
    torch.compiler.reset()


@pytest.mark.thorough
def test_compiled_layers_of_a_decoder_have_no_graph_break():
    model = build("t5-both")
    attach(model.encoder, layout=ra.zigzag(N, 1))
    attach(model.decoder, layout=ra.zigzag(ANSWER, 1))
    torch.compiler.reset()
    for layer in [*model.encoder.block, *model.decoder.block]:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert_same([run(model)], dense("t5-both"))
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["bloom", "t5", "t5-both"])
def test_recomputing_activations_changes_nothing(name):
    """T5's first layer hands its table on to the others."""
    assert_same([ring_run(None, name, "zigzag", True)], dense(name))


def in_documents(group, name: str, how: str):
    layout = ra.zigzag(N, group.size())
    model = build(name)
    is_causal = name != "t5"
    attach(model, layout=layout, group=group, mask=ra.documents(lengths=DOCUMENTS, causal=is_causal) if how == "mask" else None)
    inputs = {}
    if how == "bounds":
        inputs = dict(cu_seq_lens_q=BOUNDS)
    elif how == "positions":
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None].expand(2, -1)
        inputs = dict(position_ids=ra.shard(positions, layout, group.rank()))
    return ra.unshard(run(model, layout, group.rank(), **inputs)[0], layout, group)


@pytest.mark.parametrize(("name", "how"), [("bloom", "bounds"), ("falcon-alibi", "mask"), ("mpt", "positions"), ("t5", "bounds")])
def test_packed_documents_equal_documents_by_themselves(gloo, name, how):
    model = build(name)
    with in_fp64(), torch.no_grad():
        alone = [model(input_ids=part)[0] for part in sequence().split(DOCUMENTS, 1)]
    torch.testing.assert_close(gloo.run(2, in_documents, name, how)[0], torch.cat(alone, 1), rtol=0, atol=1e-10)


def dropping(group, name: str):
    """Outputs of models that drop weights of attention alone, in training and not."""
    model = build(name)
    drop_weights(model, P)
    layout, answer = ra.zigzag(N, group.size()), ra.contiguous(ANSWER, group.size())
    for part, of_part in [(model.encoder, layout), (model.decoder, answer)] if name in BOTH else [(model, layout)]:
        attach(part, layout=of_part, group=group)
    found = []
    for training in (True, False):
        torch.manual_seed(1)
        out = run(model.train(training), layout, group.rank(), answer)[0]
        found.append(ra.unshard(out, answer if name in BOTH else layout, group))
    return found


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon-alibi", "t5", "umt5-both"])
@pytest.mark.some(2)
def test_dropout_in_training_is_that_of_one_process(gloo, name):
    found, wanted = gloo.run(2, dropping, name)[1], gloo.run(1, dropping, name)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert not torch.allclose(*found)


def test_cross_attention_drops_weights_too():
    model = build("t5-both")
    attach(model.encoder, layout=ra.zigzag(N, 1))
    attach(model.decoder, layout=ra.zigzag(ANSWER, 1))
    expected = run(model)[0]
    for block in model.decoder.block:
        block.layer[1].EncDecAttention.dropout = P
    assert not torch.allclose(run(model)[0], expected)


def test_falcon_drops_no_weights_without_alibi():
    model = build("falcon")
    attach(model, layout=ra.zigzag(N, 1))
    expected = run(model)[0]
    for layer in model.transformer.h:
        layer.self_attention.attention_dropout.p = P
    assert torch.equal(run(model)[0], expected)


@pytest.mark.parametrize("h", [1, 3, 4, 12, 16])
def test_slopes_are_those_of_the_models(h):
    bloom, falcon, mpt = (
        huggingface_scores._slopes_on(build, h, torch.device("cpu"))
        for build in (modeling_bloom.build_alibi_tensor, modeling_falcon.build_alibi_tensor, modeling_mpt.build_mpt_alibi_tensor)
    )
    torch.testing.assert_close(bloom, ra.alibi_slopes(h), rtol=1e-5, atol=0)
    assert torch.equal(falcon, bloom.bfloat16().float())
    # MPT takes every other slope of the next power of 2 first
    assert set(mpt.tolist()) <= set(ra.alibi_slopes(1 << (h - 1).bit_length()).tolist())
    distance = torch.arange(5)
    torch.testing.assert_close(
        modeling_mpt.build_mpt_alibi_tensor(h, 5)[:, 0], -mpt[:, None] * distance.flip(0), rtol=1e-6, atol=1e-7
    )


def test_the_summed_loss_of_a_causal_model():
    """`CausalLMLoss` gives the model positions, which BLOOM does not take."""
    model, ids = build("bloom"), sequence()
    wanted = F.cross_entropy(dense("bloom")[0][:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    attach(model, layout=ra.zigzag(N, 1))
    inputs = dict(input_ids=ids, position_ids=torch.arange(N)[None].expand(2, -1), shift_labels=shift_labels(ids))
    torch.testing.assert_close(CausalLMLoss(model)(**inputs), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi", "t5"])
def test_detach_restores_the_model(name):
    model = build(name)
    before = model(input_ids=sequence())[0]
    implementation = model.config._attn_implementation
    for _ in range(2):
        attach(model, layout=ra.zigzag(N, 1))
    twin = copy.deepcopy(model)
    for attached in (model, twin):
        with torch.no_grad():
            assert torch.equal(attached(input_ids=sequence())[0], model(input_ids=sequence())[0])
    assert all(module.forward.__self__ is module for module in twin.modules() if "forward" in vars(module))
    detach(model)
    assert model.config._attn_implementation == implementation
    assert not any("forward" in vars(module) or hasattr(module, NAME) for module in model.modules())
    assert torch.equal(model(input_ids=sequence())[0], before)


# what is refused


@functools.cache
def attached(name: str) -> nn.Module:
    """A model for calls that leave nothing behind."""
    model = build(name)
    attach(model, layout=ra.zigzag(N, 1))
    return model


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon-alibi", "t5"])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (dict(attention_mask=torch.ones(2, N).triu(1)), "attention_mask hides tokens"),
        (dict(head_mask=torch.ones(2, 3)), "head_mask is a tensor of shape .* masking heads is not supported"),
        (dict(output_attentions=True), "output_attentions is True"),
        (dict(past_key_values=transformers.DynamicCache()), "key/value caches are not supported"),
        (dict(use_cache=True), "use_cache is True, but key/value caches"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_inputs_are_refused_by_name(name, inputs, message):
    with pytest.raises(ValueError, match=message):
        attached(name)(input_ids=sequence(), **inputs)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (huggingface_scores._bloom, dict(residual=0, layer_past=0)),
        (huggingface_scores._mpt, dict(past_key_values=0)),
        (huggingface_scores._falcon, dict(alibi=None, attention_mask=None, layer_past=0)),
        (huggingface_scores._t5, dict(past_key_values=0)),
        (huggingface_scores._umt5, dict(past_key_values=0)),
    ],
    ids=["bloom", "mpt", "falcon", "t5", "umt5"],
)
def test_caches_are_refused_by_layers_too(function, options, request):
    name = request.node.callspec.id.replace("falcon", "falcon-alibi")
    module = next(x for x in attached(name).modules() if "forward" in vars(x))
    with pytest.raises(ValueError, match="past_key_values is 0, but key/value caches are not supported"):
        function(module, torch.zeros(2, N, 24).double(), **options)


def test_a_mask_of_ones_asks_for_nothing():
    model = attached("bloom")
    assert torch.equal(model(input_ids=sequence(), attention_mask=torch.ones(2, N))[0], model(input_ids=sequence())[0])


def test_alibi_with_keys_of_the_future_is_refused():
    for name in ("bloom", "mpt", "falcon-alibi"):
        with pytest.raises(ValueError, match=r"lets tokens see later ones.*attach a mask within ringattn\.causal\(\)"):
            attach(build(name), layout=ra.zigzag(N, 1), mask=ra.prefix(4))
    for name in ("falcon", "t5"):
        attach(build(name), layout=ra.zigzag(N, 1), mask=ra.prefix(4))


def test_a_forward_pass_that_is_replaced_already_is_refused():
    model = build("bloom")
    model.transformer.h[1].self_attention.forward = print
    with pytest.raises(ValueError, match="the forward of BloomAttention is replaced already"):
        attach(model, layout=ra.zigzag(N, 1))


def test_a_model_that_makes_its_masks_itself_is_refused(monkeypatch):
    monkeypatch.setattr(huggingface_scores, "_MASKS", {"an older function"})
    with pytest.raises(ValueError, match="BloomForCausalLM makes its masks itself in this version of transformers"):
        attach(build("bloom"), layout=ra.zigzag(N, 1))


class BloomAttention(modeling_bloom.BloomAttention):
    """A class of the same name, from another file."""


def test_other_classes_of_the_same_name_are_refused():
    model = build("bloom")
    model.transformer.h[1].self_attention.__class__ = BloomAttention
    with pytest.raises(ValueError, match="BloomForCausalLM does not take its attention from AttentionInterface"):
        attach(model, layout=ra.zigzag(N, 1))


def test_an_encoder_and_a_decoder_are_attached_by_parts():
    model, states = build("t5-both"), torch.zeros(2, N, 24).double()
    with pytest.raises(ValueError, match="is an encoder and a decoder, whose sequences differ: attach its encoder and its decoder"):
        attach(model, layout=ra.zigzag(N, 1))
    attach(model.encoder, layout=ra.zigzag(N, 1))
    with pytest.raises(ValueError, match="only one of its parts is attached: attach its decoder too"):
        run(model)
    attach(model.decoder, layout=ra.zigzag(ANSWER, 1))
    with pytest.raises(ValueError, match="encoder_hidden_states are given to T5Stack itself"):
        model.decoder(input_ids=sequence(ANSWER), encoder_hidden_states=states)
    with pytest.raises(
        ValueError, match="T5Attention attends to an encoder's states without the mask that says which tokens they are of"
    ):
        model.decoder.block[0].layer[1].EncDecAttention(states, key_value_states=states)
    with pytest.raises(ValueError, match="the encoder's states have 22 tokens, but rank 0"):
        model(encoder_outputs=(states[:, 1:],), decoder_input_ids=sequence(ANSWER))
    with pytest.raises(ValueError, match="packed documents are given to a model with an encoder and a decoder"):
        model(encoder_outputs=(states,), decoder_input_ids=sequence(ANSWER), cu_seq_lens_q=[0, 4, ANSWER])
    with (
        mock.patch.object(Attachment, "ranks", property(lambda self: SimpleNamespace(size=1))),
        pytest.raises(ValueError, match="the encoder and the decoder are attached to different groups"),
    ):
        model(encoder_outputs=(states,), decoder_input_ids=sequence(ANSWER))
    for part in (model.encoder, model.decoder):
        detach(part)
    assert torch.equal(run(model)[0], run(build("t5-both"))[0])


def test_buckets_that_cannot_be_are_refused_when_attached():
    model = build("t5")
    for module in model.modules():
        module.relative_attention_max_distance = 2
    with pytest.raises(ValueError, match="max_distance is 2, but"):
        attach(model, layout=ra.zigzag(N, 1))
    assert not hasattr(model, NAME)


def labels_on_two_ranks(group):
    model = build("t5-both")
    attach(model.encoder, layout=ra.zigzag(N, 2), group=group)
    attach(model.decoder, layout=ra.zigzag(ANSWER, 2), group=group)
    with pytest.raises(ValueError) as raised:
        model(input_ids=sequence()[:, :12], labels=sequence(ANSWER)[:, :7])
    return str(raised.value)


def test_labels_of_an_answer_are_refused_on_several_ranks(gloo):
    for said in gloo.run(2, labels_on_two_ranks):
        assert "labels is given to T5ForConditionalGeneration, whose loss would be of this rank's tokens alone" in said
