"""Models whose positions, windows, masks or attention are their own: on a ring equal to one process; padding; heads for sequences."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.bert import modeling_bert

import ringattn as ra
from ringattn.integrations.huggingface import attach, detach
from ringattn.training.causal_lm import IGNORE, sum_gradients
from ringattn.training.data import shard_batch
from tests.scored_models import makes_own_masks

pytestmark = makes_own_masks
ROOT = Path(__file__).resolve().parents[2]
N, VOCAB = 23, 97
TINY = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=1)
DROPOUT = dict(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)


def load_sweep():
    spec = importlib.util.spec_from_file_location("model_sweep", ROOT / "launch" / "repo" / "model_sweep.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


sweep = load_sweep()


def compare(group, kind, name, layout):
    torch.set_num_threads(1)
    with sweep.quiet():
        return sweep.compared(lambda: sweep.tiny(kind, name), layout, group)


# one of each kind that a function or a rule of its own opens: the sweep runs the others
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("causal", "StableLmForCausalLM"),  # takes AttentionInterface without saying so
        ("causal", "GPTJForCausalLM"),
        ("causal", "CodeGenForCausalLM"),
        ("causal", "GPTNeoForCausalLM"),  # windows of its own
        ("causal", "GPTNeoXJapaneseForCausalLM"),
        ("causal", "BartForCausalLM"),  # counts positions in its embeddings
        ("causal", "Llama4ForCausalLM"),  # chunks, and queries scaled by positions
        ("causal", "MegatronBertForCausalLM"),
        ("masked", "RobertaForMaskedLM"),  # positions after padding_idx
        ("masked", "ModernBertForMaskedLM"),  # windows in both directions
    ],
    ids=lambda value: value,
)
@pytest.mark.some(3)
def test_a_model_equals_one_process(gloo, kind, name):
    for world_size, layout in ((2, "zigzag"), (3, "contiguous")):
        for status, note in gloo.run(world_size, compare, kind, name, layout, timeout=120):
            assert status == sweep.EQUAL, note


def embedding_gemma():
    config = transformers.Gemma3TextConfig(
        **TINY,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
    )
    return transformers.Gemma3ForCausalLM(config)


def make(name):
    torch.manual_seed(0)
    if name == "embedding gemma":
        model = embedding_gemma()
    elif name == "esm with absolute positions":
        settings = dict(token_dropout=False, position_embedding_type="absolute", mask_token_id=3, emb_layer_norm_before=True)
        model = transformers.EsmForMaskedLM(transformers.EsmConfig(**TINY, **settings))
    model = model.double().eval()
    sweep.make_distinct(model)
    return model


def compare_made(group, name, layout):
    torch.set_num_threads(1)
    with sweep.quiet():
        return sweep.compared(lambda: make(name), layout, group)


@pytest.mark.parametrize("name", ["embedding gemma", "esm with absolute positions"])
def test_a_model_with_these_settings_equals_one_process(gloo, name):
    for status, note in gloo.run(2, compare_made, name, "zigzag", timeout=120):
        assert status == sweep.EQUAL, note


def bart():
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    widths = dict(encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0)
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=VOCAB, **sizes, **widths))
    model = model.double().eval()
    sweep.make_distinct(model)
    return model


def tokens(length, rows=2, seed=1):
    return torch.randint(5, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def bart_on_shards(group):
    torch.set_num_threads(1)
    text, answer = tokens(N), tokens(13, seed=2)
    model = bart()
    wanted = model(input_ids=text, decoder_input_ids=answer, use_cache=False).logits
    wanted.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model = bart()
    of_text, of_answer = ra.zigzag(N, group.size()), ra.contiguous(13, group.size())
    attach(model.model.encoder, layout=of_text, group=group)
    attach(model.model.decoder, layout=of_answer, group=group)
    rank, seen = group.rank(), []
    for layer in model.model.decoder.layers:
        layer.encoder_attn.k_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    logits = model(input_ids=ra.shard(text, of_text, rank), decoder_input_ids=ra.shard(answer, of_answer, rank)).logits
    # no rank makes the keys of another one's states
    assert seen == [of_text.lengths[rank]] * 2
    logits.square().sum().backward()
    sum_gradients(model.parameters(), group)
    torch.testing.assert_close(logits, ra.shard(wanted, of_answer, rank), rtol=1e-6, atol=1e-7)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-5, atol=1e-8)


def test_an_encoder_and_a_decoder_of_barts_kind(gloo):
    gloo.run(2, bart_on_shards, timeout=120)


def llama(**settings):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_key_value_heads=2, **settings)).double().eval()


def roberta():
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**TINY, **DROPOUT, max_position_embeddings=64, is_decoder=True)
    return transformers.RobertaForCausalLM(config).double().eval()


def bert():
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**TINY, **DROPOUT)).double().eval()


def bart_decoder():
    """It asks for a mask of an encoder's states, in both directions, though it is given none."""
    torch.manual_seed(0)
    sizes = dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, max_position_embeddings=64)
    return transformers.BartForCausalLM(transformers.BartConfig(vocab_size=VOCAB, **sizes, dropout=0.0)).double().eval()


PADDED = {
    "llama": (llama, [N, 14]),
    "roberta": (roberta, [N - 3, 14]),
    "bart": (bart_decoder, [N, 14]),
    "bert": (bert, [17, 17]),
}


def padded_batch(lengths):
    ids, mask = tokens(N), (torch.arange(N) < torch.tensor(lengths)[:, None]).long()
    return dict(input_ids=ids.where(mask == 1, 1), attention_mask=mask), ids.where(mask == 1, IGNORE)


def padded_run(group, name):
    torch.set_num_threads(1)
    build, lengths = PADDED[name]
    batch, labels = padded_batch(lengths)
    model = build()
    sweep.make_distinct(model)
    state = model.state_dict()
    logits = model(**batch, use_cache=False).logits if name != "bert" else model(**batch).logits
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum").backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    model = build()
    model.load_state_dict(state)
    attach(model, group=group)
    layout = ra.zigzag(N, group.size())
    shards = shard_batch(dict(**batch, labels=labels), layout, group.rank())
    shifted = shards.pop("shift_labels")
    own = model(**shards, layout=layout).logits
    F.cross_entropy(own.flatten(0, 1), shifted.flatten(), reduction="sum").backward()
    sum_gradients(model.parameters(), group)
    live = shards["attention_mask"] == 1
    torch.testing.assert_close(own[live], ra.shard(logits, layout, group.rank())[live], rtol=0, atol=1e-5)
    for key, p in model.named_parameters():
        if gradients[key] is not None:
            torch.testing.assert_close(p.grad, gradients[key], rtol=0, atol=2e-5 * max(1, gradients[key].abs().max().item()))


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.some(2)
def test_padding_on_the_right_changes_nothing(gloo, name):
    gloo.run(2, padded_run, name, timeout=120)


def refused(group, name, mask, inputs):
    model = PADDED[name][0]()
    attach(model, group=group, **inputs)
    layout = ra.contiguous(N, group.size())
    cut = [ra.shard(x, layout, group.rank()) for x in (tokens(N), mask)]
    with pytest.raises(ValueError) as raised:
        model(input_ids=cut[0], attention_mask=cut[1], layout=layout)
    return str(raised.value)


LEFT, UNEVEN = torch.ones(2, N, dtype=torch.int64), torch.ones(2, N, dtype=torch.int64)
LEFT[1, :3] = 0
UNEVEN[1, 20:] = 0


@pytest.mark.parametrize(
    ("name", "mask", "inputs", "message"),
    [
        ("llama", LEFT, {}, "attention_mask hides tokens of row 1 before others that it shows"),
        ("llama", UNEVEN * 0, {}, "attention_mask hides tokens of row 0 before others that it shows, or all of them"),
        ("llama", UNEVEN, dict(mask=ra.full()), "lets tokens see later ones: give rows of one length to a call"),
        ("bert", UNEVEN, {}, "attention_mask hides tokens of rows that end at different positions"),
    ],
    ids=["left", "nothing", "mask", "both directions"],
)
def test_other_padding_is_refused_on_every_rank(gloo, name, mask, inputs, message):
    for said in gloo.run(2, refused, name, mask, inputs, timeout=60):
        assert message in said


def test_padding_without_a_mask_is_refused_where_positions_skip_it():
    model = roberta()
    attach(model, layout=ra.zigzag(N, 1))
    ids = tokens(N)
    ids[0, 5] = 1
    with pytest.raises(ValueError, match="input_ids hold the padding token 1, whose positions this model skips"):
        model(input_ids=ids)


def test_labels_of_padding_are_refused():
    batch, _ = padded_batch([N, 14])
    with pytest.raises(ValueError, match="attention_mask hides tokens that have labels: set the labels of padding to -100"):
        shard_batch(dict(**batch, labels=batch["input_ids"]), ra.zigzag(N, 2), 0)


def classifier(name):
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**TINY, num_key_value_heads=2, num_labels=1)
        model = transformers.LlamaForSequenceClassification(config)
    elif name == "gpt2":
        sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=1, num_labels=3)
        model = transformers.GPT2ForSequenceClassification(
            transformers.GPT2Config(vocab_size=VOCAB, **sizes, bos_token_id=None, eos_token_id=None)
        )
    else:
        config = transformers.BertConfig(**TINY, **DROPOUT, num_labels=3)
        model = modeling_bert.BertForSequenceClassification(config)
    model = model.double().eval()
    sweep.make_distinct(model)
    return model


def classified(group, name):
    torch.set_num_threads(1)
    batch, _ = padded_batch([9, N] if name != "bert" else [N, N])
    labels = torch.tensor([0.5, -1.0]).double() if name == "llama" else torch.tensor([0, 2])
    model = classifier(name)
    dense = model(**batch, labels=labels)
    dense.loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    model = classifier(name)
    attach(model, group=group)
    layout = ra.zigzag(N, group.size())
    shards = shard_batch(batch, layout, group.rank())
    found = model(**shards, labels=labels, layout=layout)
    found.loss.backward()
    sum_gradients(model.parameters(), group)
    torch.testing.assert_close(found.logits, dense.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, dense.loss, rtol=1e-5, atol=1e-5)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[key], rtol=0, atol=2e-5 * max(1, gradients[key].abs().max().item()))
    detach(model)
    assert torch.equal(model(**batch).logits, dense.logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_head_for_sequences_answers_as_on_one_process(gloo, name):
    gloo.run(3, classified, name, timeout=120)


def test_a_layout_a_call_for_models_that_make_their_scores(gloo):
    gloo.run(2, two_layouts, timeout=120)


def two_layouts(group):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCAB, hidden_size=24, n_layer=2, n_head=3)).double()
    ids = tokens(N)
    wanted = [model(input_ids=ids[:, :length], use_cache=False).logits for length in (N, 14)]
    attach(model, group=group)
    for logits, layout in zip(wanted, (ra.zigzag(N, 2), ra.contiguous(14, 2)), strict=True):
        found = model(input_ids=ra.shard(ids[:, : layout.seq_len], layout, group.rank()), layout=layout).logits
        torch.testing.assert_close(found, ra.shard(logits, layout, group.rank()), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="lets tokens see later ones"):
        model(input_ids=ra.shard(ids, ra.zigzag(N, 2), group.rank()), layout=ra.zigzag(N, 2), mask=ra.full())


@pytest.mark.parametrize("name", ["StableLmForCausalLM", "GPTJForCausalLM", "BartForCausalLM"])
def test_detach_restores_a_model(name):
    with sweep.quiet():
        model = sweep.tiny("causal", name)
        ids = tokens(N)
        before = model(input_ids=ids, use_cache=False).logits
        attach(model, layout=ra.zigzag(N, 1))
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-5, atol=1e-5)
        detach(model)
        torch.testing.assert_close(model(input_ids=ids[:, :7], use_cache=False).logits, before[:, :7], rtol=1e-5, atol=1e-5)


def test_an_input_of_another_length_is_told_what_to_do():
    model = llama()
    attach(model, layout=ra.zigzag(N, 1))
    with pytest.raises(
        ValueError, match=r"the input has 9 tokens, but rank 0 of .* attach again, with its layout, or attach\(model\) once"
    ):
        model(input_ids=tokens(9))
