"""`ringattn.verify`: correct models pass, and models with each common mistake do not."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ringattn as ra
from ringattn.device import blocked, local
from ringattn.device.philox import kept
from ringattn.integrations import huggingface, huggingface_attachment, huggingface_forward
from ringattn.integrations.huggingface import attach
from ringattn.scores import ScoreKind, ScoreMod
from ringattn.training.causal_lm import IGNORE, CausalLMLoss
from ringattn.training.data import pack
from ringattn.verification import Difference, gradient_limit
from ringattn.whole_step import dense_copy
from ringattn_kernels.modifiers import Dropout, ModifierSums
from tests import scored_models

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, bos_token_id=None, eos_token_id=None, pad_token_id=None, attention_dropout=0.0,
)  # fmt: skip
KINDS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}


def build(name: str, seed: int = 0, **changes) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {**SIZES, **changes}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if name == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=7))
    if name == "gemma3":
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **KINDS, final_logit_softcapping=2.0))
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**{"num_experts_per_tok": 1, "num_local_experts": 2, **sizes}, **KINDS)
    )


def tokens() -> torch.Tensor:
    return torch.randint(61, (2, 37), generator=torch.Generator().manual_seed(1))


def report_of(
    group,
    name: str,
    mistake: str | None = None,
    packed: bool = False,
    mask: ra.Mask | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
) -> ra.Report:
    torch.set_num_threads(1)
    # on GPUs sizes for the fastest kernels, and all experts for every token, so that rounding does not change the choice; the router's
    # bias has a gradient of as many numbers, and two may happen to be exact in one of the runs
    sizes = {} if device == "cpu" else dict(hidden_size=256, head_dim=64, num_experts_per_tok=8, num_local_experts=8)
    model = build(name, dist.get_rank() if mistake == "weights" else 0, **sizes).to(device, dtype)
    batch = dict(input_ids=tokens())
    if packed:
        batch = pack([tokens()[0, :11], tokens()[0, 11:30], tokens()[1, :7]])
    patch = pytest.MonkeyPatch()
    if mistake == "positions":
        # with a mask attached, position ids serve as positions alone; without one, the ring would refuse these
        mask, truth = ra.causal(), ra.Layout.positions
        patch.setattr(ra.Layout, "positions", lambda self, rank: truth(self, rank) * self.world_size)
    elif mistake == "documents":
        patch.setattr(huggingface_attachment, "documents", lambda **options: ra.causal())
    elif mistake == "sinks":
        patch.setattr(ScoreMod, "tensors", without_sinks)
    elif mistake == "labels":
        batch = {**batch, "shift_labels": batch["input_ids"]}
        patch.setattr(ra.step_batch, "shard_batch", shifted_within_shards)
    with patch.context():
        try:
            report = ra.verify(model, batch, group=group, mask=mask, autocast=autocast)
        finally:
            patch.undo()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hasattr(model, huggingface.NAME)
    return report


def shifted_within_shards(batch, layout, rank):
    from ringattn.training.data import shard_batch

    part = shard_batch({"input_ids": batch["input_ids"], "labels": batch["input_ids"]}, layout, rank)
    return {**part, "shift_labels": torch.cat([part["input_ids"][:, 1:], torch.full((2, 1), -100)], dim=1)}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("mistral", dict(packed=True)),
        ("gemma3", {}),
        ("gpt-oss", dict(packed=True)),
        ("llama", dict(mask=ra.prefix(9))),
        ("mistral", dict(mask=ra.documents(lengths=[20, 17]))),
        ("mistral", dict(mask=ra.prefix(9))),
    ],
    ids=["llama", "mistral packed", "gemma3", "gpt-oss packed", "llama prefix", "mistral documents", "mistral prefix"],
)
@pytest.mark.some(4)
def test_right_models_pass(gloo, name, options):
    first, second = gloo.run(2, report_of, name, None, *[options.get(key) for key in ("packed", "mask")], timeout=120)
    assert first == second
    assert first.passed, str(first)
    assert len(first.differences) == 1 + len(list(build(name).parameters()))
    assert str(first).endswith("all within bounds")
    assert re.search(r"gradient of model\.layers\.\d\.self_attn\.q_proj\.weight", str(first))


def test_an_attached_part_of_a_model_stays_attached():
    model = build("llama")
    layout = ra.zigzag(20, 1)
    huggingface.attach(model.model, layout=layout, ignore=["temperature"])
    report = ra.verify(model, dict(input_ids=tokens()))
    assert report.passed, report
    assert not hasattr(model, huggingface.NAME)
    assert (model.model.ringattn.layout, model.model.ringattn.ignored) == (layout, {"temperature"})


@pytest.mark.parametrize(
    ("name", "mistake", "packed"),
    [("llama", "positions", False), ("llama", "labels", False), ("llama", "documents", True), ("gpt-oss", "sinks", False)],
)
@pytest.mark.some(2)
def test_mistakes_do_not_pass(gloo, name, mistake, packed):
    for report in gloo.run(2, report_of, name, mistake, packed, timeout=120):
        assert not report.passed
        assert "NOT within bounds" in str(report)
        assert "FAILED" in str(report)


GPU_MODELS = {
    "llama autocast": ("llama", False, torch.float32, torch.bfloat16),
    "mistral packed": ("mistral", True, torch.bfloat16, None),
    "gpt-oss": ("gpt-oss", False, torch.bfloat16, None),
    "gpt-oss fp32": ("gpt-oss", True, torch.float32, None),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "packed", "dtype", "autocast"), GPU_MODELS.values(), ids=GPU_MODELS)
def test_right_models_pass_on_gpus(nccl, name, packed, dtype, autocast):
    """In low precision, with grouped heads, windows, packed documents and sinks: loss and all gradients against one process."""
    first, *others = nccl.run(nccl.size, report_of, name, None, packed, None, "cuda", dtype, autocast, timeout=120)
    assert all(other == first for other in others)
    assert first.passed, str(first)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "mistake", "packed"), [("llama", "documents", True), ("gpt-oss", "sinks", False)])
def test_mistakes_do_not_pass_on_gpus(nccl, name, mistake, packed):
    for report in nccl.run(nccl.size, report_of, name, mistake, packed, None, "cuda", torch.bfloat16, timeout=120):
        assert not report.passed


@pytest.mark.parametrize(
    ("theirs", "numbers", "limit"),
    [(1e-2, 4096, 3e-2), (1e-2, 32, 3e-2), (1e-2, 8, 6e-2), (0.1, 2, 0.5), (0.3, 2, 0.9), (0.0, 1, 0.0)],
)
def test_gradients_of_few_numbers_may_be_farther_but_not_missing(theirs, numbers, limit):
    """One number's rounding error may be close to zero in one run and not in another."""
    assert gradient_limit(theirs, numbers) == pytest.approx(limit)


def test_weights_that_differ_are_named(gloo):
    with pytest.raises(AssertionError, match=r"the ranks have different weights, for one in model.embed_tokens.weight"):
        gloo.run(2, report_of, "llama", "weights", timeout=120)


def reports_of_grid(group):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("ring", "heads"))
    if mesh.get_coordinate() is None:
        return None
    group = ra.hybrid(mesh)
    with pytest.raises(ValueError, match="the ranks have different weights"):
        report_of(group, "llama", "weights")
    assert not report_of(group, "llama", "documents", packed=True).passed
    return [ra.verify(build("llama"), dict(input_ids=tokens()), group=where) for where in (mesh, group)]


@pytest.mark.thorough
def test_a_grid_is_verified_as_a_ring_is(gloo):
    found = gloo.run(8, reports_of_grid, timeout=120)[:4]
    assert all(report == found[0][0] and report.passed for reports in found for report in reports)


def other_batches(group):
    ids = (tokens() + group.rank()) % 61
    # on rank 0 no label counts, which by itself would be an error on that rank only
    labels = ids if group.rank() else torch.full_like(ids, IGNORE)
    for batch in (dict(input_ids=ids), dict(input_ids=tokens(), labels=labels)):
        with pytest.raises(ValueError, match="the ranks have different batches"):
            ra.verify(build("llama"), batch, group=group)


def test_batches_that_differ_are_refused_on_all_ranks(gloo):
    gloo.run(2, other_batches, timeout=60)


def sharded(group):
    model = build("llama")
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(ValueError, match=r"the weights are sharded, for one model\.embed_tokens\.weight: verify the model before"):
        ra.verify(model, dict(input_ids=tokens()), group=group)
    with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel: verify it before, or pass its \.module"):
        ra.verify(DistributedDataParallel(build("llama"), process_group=group), dict(input_ids=tokens()), group=group)


def test_wrapped_models_are_refused(gloo):
    gloo.run(2, sharded, timeout=60)


def test_a_step_without_gradients_or_with_another_autocast_is_refused():
    with pytest.raises(ValueError, match="gradients are off"), torch.no_grad():
        ra.verify(build("llama"), dict(input_ids=tokens()))
    with pytest.raises(ValueError, match=r"autocast is 'bfloat16', but must be torch\.bfloat16"):
        ra.verify(build("llama"), dict(input_ids=tokens()), autocast="bfloat16")


def test_a_custom_loss_and_autocast():
    def loss(model, inputs):
        return CausalLMLoss(model)(**inputs)

    for name, autocast in (("llama", torch.bfloat16), ("gemma3", None)):
        report = ra.verify(build(name), dict(input_ids=tokens()), loss=loss, autocast=autocast)
        assert report.passed, report


class Plain(nn.Module):
    """A module without transformers: one layer of attention, around a ring or dense."""

    def __init__(self, layout: ra.Layout | None, scale: float = 0.5) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 24)
        self.qkv = nn.Linear(24, 72)
        self.out = nn.Linear(24, 61)
        self.layout = layout
        self.scale = scale

    def forward(self, input_ids, **unused):
        q, k, v = self.qkv(self.embed(input_ids)).view(*input_ids.shape, 3, 3, 8).unbind(2)
        if self.layout is None:
            out = ra.reference.attention(q, k, v, softmax_scale=0.5)
        else:
            out = ra.ring_attention(q, k, v, layout=self.layout, softmax_scale=self.scale)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.out(out.flatten(2)))


def test_a_plain_module_is_compared_with_its_twin():
    layout = ra.zigzag(37, 1)
    whole = Plain(None)
    for scale in (0.5, 0.6):
        model = Plain(layout, scale)
        model.load_state_dict(whole.state_dict())
        assert ra.verify(model, dict(input_ids=tokens()), layout=layout, whole=whole).passed == (scale == 0.5)
    with pytest.raises(ValueError, match="Plain is not a transformers model"):
        ra.verify(model, dict(input_ids=tokens()), layout=layout)


class Handwritten(nn.Module):
    """A module with two calls of torch's attention; `own_sinks` is a parameter that a score may hold."""

    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 24)
        self.qkv = nn.ModuleList(nn.Linear(24, 72) for _ in range(2))
        self.out = nn.Linear(24, 61)
        self.own_sinks = nn.Parameter(torch.randn(4))
        self.options = options

    def forward(self, input_ids, **unused):
        x = self.embed(input_ids)
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, 4, 6)).transpose(1, 3).unbind(2)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True, **self.options).transpose(1, 2).flatten(2)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.out(x))


def all_parts(model: nn.Module | None = None, seed: int | None = None) -> ra.ScoreMod:
    """A score of everything, whose slopes and table, and sinks unless they are the model's, require gradients."""
    generator = torch.Generator().manual_seed(2)
    slopes, table, sinks = (torch.rand(shape, generator=generator).requires_grad_() for shape in ((2, 4), (4, 8), (4,)))
    bias = ra.relative_bias(table, ra.t5_buckets(8, 12, bidirectional=False))
    sinks = sinks if model is None else model.own_sinks
    return ra.score(softcap=1.5, alibi=slopes, bias=bias, sinks=sinks, dropout=0.3, seed=seed)


def without_sinks(self, dtype, tensors=ScoreMod.tensors):
    slopes, values, sinks, seed = tensors(self, dtype)
    return slopes, values, sinks - 100, seed


def other_offset(dropout, *rest):
    return kept(Dropout(dropout.p, dropout.seed, dropout.offset + 1, dropout.heads, dropout.first_head), *rest)


def without_softcap(self, *given, modifiers=ScoreKind.modifiers):
    return replace(modifiers(self, *given), softcap=None)


# what is wrong in the ring: how to make it so, and the rows that show it (None: any)
FAULTS = {
    "softcap": (ScoreKind, "modifiers", without_softcap, None),
    "distances": (blocked._Block, "distance", property(lambda self: self.k_positions - self.q_positions[:, None] + 1), None),
    "sinks": (blocked, "with_sinks", lambda out, row_max, row_sum, sinks: (out, row_max, row_sum), None),
    "pairs": (blocked, "kept", other_offset, None),
    "gradient of slopes": (ModifierSums, "add_distances", lambda self, sums: None, {"score.alibi"}),
    "gradient of sinks": (local, "sinks_gradient", lambda row_max, row_sum, delta, sinks: 2 * sinks, {"score.sinks"}),
}


def scored(group):
    """Reports of right models: scores of all parts, with sinks of the model, and none; and of each fault."""
    torch.set_num_threads(1)
    found = {}
    layout = ra.striped(37, group.size())
    for name, mask, score in (
        ("all", None, all_parts()),
        ("window", ra.sliding_window(11, 3), all_parts(seed=9)),
        ("none", None, None),
        ("dropout_p", None, None),
    ):
        options = dict(dropout_p=0.3, scale=0.4) if name == "dropout_p" else {}
        model = Handwritten(**options)
        found[name] = ra.verify(model, dict(input_ids=tokens()), layout=layout, mask=mask, group=group, score=score)
    model = Handwritten()
    found["sinks of the model"] = ra.verify(model, dict(input_ids=tokens()), group=group, score=all_parts(model))
    assert "forward" not in vars(model) and model.own_sinks.grad is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "kept", other_offset)
        found["other pairs"] = ra.verify(Handwritten(dropout_p=0.3), dict(input_ids=tokens()), group=group)
    for name, (where, attribute, wrong, _) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, attribute, wrong)
            found[name] = ra.verify(Handwritten(), dict(input_ids=tokens()), group=group, score=all_parts())
    return found


@pytest.mark.thorough
def test_scores_of_right_models_pass_and_wrong_ones_do_not(gloo):
    first, second = gloo.run(2, scored, timeout=60)
    assert first == second
    for name, report in first.items():
        rows = {row.name: row.passed for row in report.differences}
        learned = set() if name in ("none", "dropout_p", "other pairs") else {"score.alibi", "score.bias", "score.sinks"}
        learned -= {"score.sinks"} if name == "sinks of the model" else set()
        assert {row for row in rows if row.startswith("score.")} == learned
        assert report.passed == (name not in (*FAULTS, "other pairs")), f"{name}: {report}"
        wrong = FAULTS.get(name, (None,) * 4)[3]
        assert wrong is None or {row for row, passed in rows.items() if not passed} == wrong


def refused_scores(group):
    """What each rank is told if rank 1 has another score, or what is none."""
    sinks, other = torch.zeros(4), torch.ones(4)
    pairs = {
        "a text": (None, "softcap"),
        "no score": (ra.score(softcap=1.0), None),
        "softcap": (ra.score(softcap=1.0), ra.score(softcap=2.0)),
        "sinks": (ra.score(sinks=sinks), ra.score(sinks=other)),
        "seed": (ra.score(dropout=0.1), ra.score(dropout=0.1, seed=5)),
        "slopes": (ra.score(alibi=torch.zeros(3)), ra.score(alibi=torch.zeros(3))),
    }
    found = {}
    for name, scores in pairs.items():
        with pytest.raises(ValueError) as caught:
            ra.verify(Handwritten(), dict(input_ids=tokens()), group=group, score=scores[group.rank()])
        found[name] = str(caught.value)
    return found


def test_bad_scores_are_refused_on_all_ranks(gloo):
    first, second = gloo.run(2, refused_scores, timeout=60)
    assert first["a text"] == f"rank 1 refused the input: rank 1: {second['a text']}"
    assert second["a text"].startswith("score is 'softcap', but must be a ScoreMod")
    for name, words in (
        ("no score", "score is"),
        ("softcap", "score is"),
        ("sinks", "sinks of score is"),
        ("seed", "seed and offset"),
    ):
        assert first[name] == second[name]
        assert first[name].startswith(f"ranks disagree: {words}")
    assert first["slopes"].startswith("alibi has shape (3,), but must be (4,) or (2, 4)")


def test_scores_of_models_with_their_own_attention_are_refused():
    for model, whole in ((build("llama"), None), (Plain(ra.zigzag(37, 1)), Plain(None))):
        with pytest.raises(ValueError, match="brings its own attention, which says by itself what happens to scores"):
            ra.verify(model, dict(input_ids=tokens()), whole=whole, score=ra.score(softcap=1.0))


def without_slopes(self, *given, modifiers=ScoreKind.modifiers):
    return replace(modifiers(self, *given), slopes=None)


def other_bias(self, slopes, values, *given, modifiers=ScoreKind.modifiers):
    return modifiers(self, slopes, None if values is None else values.flip(1), *given)


# models that drop weights in training, and what may be wrong in the ring
OF_TRANSFORMERS = {
    "llama": (blocked, "kept", other_offset),
    "gpt2": (blocked, "kept", other_offset),
    "bert": (blocked, "kept", other_offset),
    "gemma2": (ScoreKind, "modifiers", without_softcap),
    "gpt-oss": (blocked, "with_sinks", lambda out, row_max, row_sum, sinks: (out, row_max, row_sum)),
    "bloom": (ScoreKind, "modifiers", without_slopes),
    "mpt": (ScoreKind, "modifiers", without_slopes),
    "falcon-alibi": (ScoreKind, "modifiers", without_slopes),
    "t5": (ScoreKind, "modifiers", other_bias),
    "umt5": (ScoreKind, "modifiers", other_bias),
}


def scored_by_the_model(group, name: str):
    """Reports of a right ring and of a wrong one."""
    torch.set_num_threads(1)
    model = scored_models.build(name, dropout=0.3)
    found = [ra.verify(model, dict(input_ids=tokens()), group=group, loss=scored_models.squares)]
    assert not hasattr(model, huggingface.NAME) and model.training
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*OF_TRANSFORMERS[name])
        found.append(ra.verify(model, dict(input_ids=tokens()), group=group, loss=scored_models.squares))
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            *x.values, marks=[*x.marks, *([] if x.values[0] in ("gpt2", "bloom", "t5", "gemma2") else [pytest.mark.thorough])]
        )
        for x in scored_models.EACH
        if x.values[0] in OF_TRANSFORMERS
    ],
)
@pytest.mark.some(2)
def test_scores_that_models_of_transformers_make_are_compared(gloo, name):
    for right, wrong in gloo.run(2, scored_by_the_model, name, timeout=60):
        assert right.passed, right
        assert not wrong.passed, wrong


def scored_on_gpus(group, name: str):
    model = scored_models.build(name, 64, dropout=0.3).to("cuda", torch.bfloat16)
    ids = torch.randint(61, (2, 255), generator=torch.Generator().manual_seed(1))
    return ra.verify(model, dict(input_ids=ids), group=group, loss=scored_models.squares)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["gpt2", "gemma2", *(pytest.param(x, marks=scored_models.makes_own_masks) for x in ("bloom", "t5"))]
)
def test_scores_that_models_of_transformers_make_are_compared_on_gpus(nccl, name):
    """All gradients; the loss, one number, may be exact by chance."""
    for report in nccl.run(nccl.size, scored_on_gpus, name, timeout=120):
        assert all(row.passed for row in report.differences if row.name != "loss"), report


@pytest.mark.parametrize(
    ("name", "before", "of_whole"),
    [("llama", "sdpa", "sdpa"), ("llama", "eager", "eager"), ("llama", "flash_attention_2", "eager"), ("gemma2", "sdpa", "eager")],
)
def test_the_whole_step_has_an_attention_that_can_do_it(name, before, of_whole):
    """SDPA caps no scores, and flash attention takes no fp64."""
    model = scored_models.build(name)
    model.config._attn_implementation = before
    assert dense_copy(model).config._attn_implementation == of_whole


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "mask"])
@pytest.mark.some(3)
def test_scores_under_documents_are_compared(name, packed):
    if name in scored_models.OWN_FORWARDS and scored_models.makes_own_masks.args[0]:
        pytest.skip(scored_models.makes_own_masks.kwargs["reason"])
    batch, mask = dict(input_ids=tokens()), ra.documents(lengths=[20, 17], causal=name == "gpt2")
    if packed:
        batch, mask = pack([tokens()[0, :11], tokens()[0, 11:30], tokens()[1, :7]]), None
    report = ra.verify(scored_models.build(name, dropout=0.3), batch, mask=mask, loss=scored_models.squares)
    assert report.passed, report


@scored_models.makes_own_masks
def test_whole_steps_that_cannot_be_are_refused():
    for name in ("bloom", "falcon-alibi"):
        for options in (dict(mask=ra.causal()), dict(batch=pack([tokens()[0]]))):
            with pytest.raises(ValueError, match="makes ALiBi from its own mask, so its whole step takes no other"):
                ra.verify(scored_models.build(name), **{"batch": dict(input_ids=tokens()), **options})


def translator(name: str):
    """A model with an encoder and a decoder."""
    torch.manual_seed(0)
    if name == "t5":
        sizes = dict(d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=3, decoder_start_token_id=0, pad_token_id=0)
        return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=61, **sizes)).eval()
    sizes = dict(d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3, decoder_attention_heads=3)
    widths = dict(encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64)
    return transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=61, **sizes, **widths)).eval()


def answer():
    return torch.randint(3, 61, (2, 19), generator=torch.Generator().manual_seed(4))


def translated(group, name: str):
    """Reports of a right step, and of one in which answers see the first half of the text alone."""
    torch.set_num_threads(1)
    model, batch = translator(name), dict(input_ids=tokens(), labels=answer())
    if name == "t5":
        attach(model.encoder, layout=ra.striped(37, group.size()), group=group)
    found = [ra.verify(model, batch, kv_layout=ra.contiguous(37, group.size()), layout=ra.striped(19, group.size()), group=group)]
    assert hasattr(model.get_encoder(), huggingface.NAME) == (name == "t5") and not hasattr(model.get_decoder(), huggingface.NAME)
    with mock.patch.object(huggingface_forward, "full", return_value=ra.sliding_window(40, 0)):
        found.append(ra.verify(model, batch, group=group))
    return found


@pytest.mark.thorough
@scored_models.makes_own_masks
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_and_a_decoder_are_compared(gloo, name):
    for right, wrong in gloo.run(2, translated, name, timeout=120):
        assert right.passed, right
        assert not wrong.passed, wrong
        assert right.layout == ra.striped(19, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mask=ra.causal()), "mask is given, but BartForConditionalGeneration has an encoder and a decoder"),
        (dict(of_keys=["input_ids"]), "of_keys is given, but BartForConditionalGeneration says itself that its encoder takes"),
        (dict(labels=None), "has an encoder and a decoder: give labels"),
        (dict(attention_mask=torch.arange(37).expand(2, -1) < 30), "attention_mask hides tokens"),
        (
            dict(position_ids=torch.arange(37)[None]),
            "the batch has 'position_ids', but for BartForConditionalGeneration verify takes",
        ),
        (dict(kv_layout=ra.zigzag(36, 1)), "input_ids has shape .*, but zigzag.* is for 36 tokens in dim 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_an_encoder_and_a_decoder_cannot_take_is_refused(options, message):
    named = {"mask", "of_keys", "kv_layout"}
    batch = dict(input_ids=tokens(), labels=answer()) | {name: x for name, x in options.items() if name not in named}
    with pytest.raises(ValueError, match=message):
        ra.verify(translator("bart"), batch, **{name: x for name, x in options.items() if name in named})


class Looking(nn.Module):
    """Queries that see other tokens, around a ring or dense."""

    def __init__(self, mask: ra.Mask | None = None, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out, self.mask = nn.Embedding(61, 24), nn.Linear(24, 61), mask or ra.full()
        self.options = options

    def forward(self, input_ids, seen, **unused):
        q, k = (self.embed(x).unflatten(-1, (3, 8)) for x in (input_ids, seen))
        around, whole = (
            functools.partial(f, **x) for f, x in ((ra.ring_attention, self.options), (ra.reference.attention, dict(q_offset=0)))
        )
        call = around if self.options else whole
        return transformers.modeling_outputs.CausalLMOutput(logits=self.out(call(q, k, k, mask=self.mask).flatten(2)))


def looking(group):
    """Reports of a right step, and of one that sees too few keys."""
    torch.set_num_threads(1)
    layout, kv_layout = ra.zigzag(19, group.size()), ra.striped(37, group.size())
    around = dict(layout=layout, kv_layout=kv_layout, group=group)
    batch, options = dict(input_ids=answer(), seen=tokens()), dict(of_keys=["seen"], whole=Looking(), **around)
    return [ra.verify(Looking(mask, **around), batch, **options) for mask in (ra.full(), ra.sliding_window(30, 30))]


def test_keys_of_their_own_layout_are_compared(gloo):
    for right, wrong in gloo.run(2, looking):
        assert right.passed, right
        assert not wrong.passed, wrong


def test_keys_that_cannot_be_told_are_refused():
    batch, layouts = dict(input_ids=answer(), seen=tokens()), dict(layout=ra.zigzag(19, 1), kv_layout=ra.zigzag(37, 1))
    whole, model = Looking(), Looking(**layouts)
    for options, message in (
        (dict(kv_layout=ra.zigzag(37, 1)), "kv_layout is given without of_keys"),
        (dict(of_keys=["seen"]), "of_keys is given without kv_layout"),
        (dict(kv_layout=ra.zigzag(37, 1), of_keys=["sen"]), "of_keys holds 'sen', but the batch has no such tensor"),
        (dict(kv_layout=ra.zigzag(36, 1), of_keys=["seen"]), "seen has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            ra.verify(model, batch, whole=whole, **options)
    with pytest.raises(ValueError, match="kv_layout or of_keys is given, but Handwritten is compared with one sequence"):
        ra.verify(Handwritten(), batch, kv_layout=ra.zigzag(37, 1))


def test_a_gradient_that_is_zero_but_for_rounding_is_compared_with_all():
    """A bias of keys adds the same to all scores of a row, where no rotary embedding follows."""
    report = ra.verify(scored_models.build("bert").bfloat16(), dict(input_ids=tokens()), loss=scored_models.squares)
    rows = [row for row in report.differences if row.name.endswith("key.bias")]
    assert len(rows) == 2
    assert all(row.passed and 0 < row.sharded < 1e-4 and row.whole < 1e-4 for row in rows), report


def test_a_report_is_a_table_whatever_the_names_lengths():
    rows = (Difference("loss", 0.0, 0.0, 1.0), Difference("layers.0." + 60 * "w", 0.0, 0.0, 1.0), Difference("b", 0.0, 0.0, 1.0))
    _, head, *lines, _ = str(ra.Report(ra.zigzag(8, 1), 1.0, 1.0, rows)).split("\n")
    assert len(lines) == 3
    assert {line.index("  0.0e+00") for line in lines} == {head.index("sharded") - 2}


def test_a_report_names_the_worst_of_like_layers():
    rows = [Difference(f"layers.{n}.weight", error, 0.0, 1.0) for n, error in enumerate((0.1, 3.0, 0.2))]
    table = str(ra.Report(ra.zigzag(8, 1), 1.0, 1.0, (Difference("loss", 0.0, 0.0, 1.0), *rows)))
    assert "gradient of layers.1.weight   3.0e+00" in table
    assert "layers.0" not in table
    assert "layers.2" not in table


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (dict(inputs_embeds=torch.zeros(1, 6, 24)), r"the batch has \['inputs_embeds'\], but neither labels nor input_ids"),
        (dict(labels=torch.zeros(1, 6)), r"the batch has \['labels'\], but neither input_ids nor inputs_embeds"),
    ],
    ids=["no labels", "no tokens"],
)
def test_a_batch_without_tokens_or_labels_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        ra.verify(Plain(None), batch)


def test_dropout_is_refused():
    model = transformers.PhiForCausalLM(transformers.PhiConfig(**{**SIZES, "resid_pdrop": 0.1})).train()
    with pytest.raises(ValueError, match=r"resid_dropout drops 0\.1 of its input at random.*set its p to 0"):
        ra.verify(model, dict(input_ids=tokens()))
    assert not hasattr(model, huggingface.NAME)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_random_numbers_other_than_a_dropout_modules_are_refused():
    """A step that draws them would pass, because the whole step is as far from its reference."""
    model = build("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: nn.functional.dropout(out, 0.5))
    with pytest.raises(ValueError, match="the step draws random numbers"):
        ra.verify(model, {"input_ids": torch.arange(12)[None]})


def test_steps_with_nothing_to_compare_are_refused():
    model, ids = build("llama"), torch.arange(12)[None]
    with pytest.raises(ValueError, match="all labels are -100, so that there is no loss to compare"):
        ra.verify(model, {"input_ids": ids, "labels": torch.full_like(ids, IGNORE)})
    with pytest.raises(ValueError, match="LlamaForCausalLM has no parameter that requires gradients"):
        ra.verify(model.requires_grad_(False), {"input_ids": ids})


def plain_without_a_twin(group):
    with pytest.raises(ValueError, match="Plain is not a transformers model"):
        ra.verify(Plain(ra.zigzag(12, 2)), {"input_ids": torch.arange(12)[None]}, group=group)


def test_a_model_without_a_twin_is_refused_on_all_ranks(gloo):
    gloo.run(2, plain_without_a_twin)


def test_nan_never_passes():
    assert Difference("loss", 1.0, 1.0, 1.0).passed
    assert not Difference("loss", float("nan"), 1.0, 1.0).passed
