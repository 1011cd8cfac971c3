"""`replace_attention`: a hand-written model gives the same results around a ring as whole; options that cannot be honoured are refused."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ringattn as ra

N = 21


class SelfAttention(nn.Module):
    def __init__(self, heads=4, kv_heads=2, **options):
        super().__init__()
        self.shapes = (heads, kv_heads)
        self.q = nn.Linear(8, 8, dtype=torch.float64)
        self.kv = nn.Linear(8, 4 * kv_heads, dtype=torch.float64)
        self.options = {"is_causal": True, "enable_gqa": True, **options}

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.shapes[1], 2)).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(SelfAttention(**options) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def whole_input():
    return torch.randn(2, 1, N, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def around_a_ring(group, options, mask, striped):
    """The greatest difference of this rank's output and parameter gradients from those of one process with a dense mask."""
    size, rank = group.size(), group.rank()
    layout = ra.striped(N, size) if striped else None
    held = ra.default_layout(ra.causal() if mask is None and options.get("is_causal", True) else mask or ra.full(), N, size)
    held = layout or held
    model = Model(**options)
    x, weight = whole_input()
    replaced = ra.replace_attention(model, layout=held, mask=mask, group=group)
    out = copy.deepcopy(model)(ra.shard(x, held, rank))
    assert torch.equal(out, model(ra.shard(x, held, rank)))
    (model(ra.shard(x, held, rank)) * ra.shard(weight, held, rank)).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
    got = [out, *(p.grad for p in model.parameters())]
    replaced.restore()
    if mask is not None:
        causal = ra.causal() if options.get("is_causal", True) else ra.full()
        for layer in model.layers:
            layer.options.update(is_causal=False, attn_mask=(mask & causal).dense(N))
    model.zero_grad()
    whole = model(x)
    (whole * weight).sum().backward()
    wanted = [ra.shard(whole, held, rank), *(p.grad for p in model.parameters())]
    return max(float((a - b).abs().max()) for a, b in zip(got, wanted))


@pytest.mark.parametrize(
    "compile_first", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["replaced first", "compiled first"]
)
@pytest.mark.thorough
def test_compiled_models_are_replaced(compile_first):
    """Options are refused in compiled models too."""
    mask, x = ra.documents(lengths=[5, N - 5]), whole_input()[0]
    model = Model()
    replaced = ra.replace_attention(model, mask=mask)
    wanted = model(x)
    replaced.restore()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    if compile_first:
        assert not torch.allclose(compiled(x), wanted)
    ra.replace_attention(model, mask=mask)
    torch.testing.assert_close(compiled(x), wanted, rtol=0, atol=1e-12)
    model.layers[0].options["attn_mask"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"attn_mask of torch\.float32 is added to scores"):
        compiled(x)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("options", "mask", "striped"),
    [
        ({}, None, False),
        ({"is_causal": False}, None, True),
        ({"scale": 0.3}, ra.sliding_window(5, 3), True),
        ({"is_causal": False}, ra.sliding_window(5, 3), False),
    ],
    ids=["causal", "full", "causal within a mask", "mask"],
)
def test_the_model_around_a_ring_equals_the_whole_model(gloo, options, mask, striped):
    assert max(gloo.run(3, around_a_ring, options, mask, striped)) < 1e-11


def dropping(group):
    """The whole output of a model with ALiBi that drops weights, and of it without dropout."""
    layout = ra.zigzag(N, group.size())
    found = []
    for p in (0.3, 0.0):
        model = Model(dropout_p=p)
        ra.replace_attention(model, layout=layout, group=group, score=ra.score(alibi=ra.alibi_slopes(4)))
        torch.manual_seed(2)
        found.append(ra.unshard(model(ra.shard(whole_input()[0], layout, group.rank())).detach(), layout, group))
    return found


def test_dropout_and_scores_are_those_of_one_rank(gloo):
    (ring, ring_without), (alone, alone_without) = gloo.run(3, dropping)[0], gloo.run(1, dropping)[0]
    torch.testing.assert_close(ring, alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(ring_without, alone_without, rtol=0, atol=1e-12)
    assert not torch.allclose(ring, ring_without)


REFUSED = {
    "mask": (
        {"attn_mask": torch.ones(N, N, dtype=torch.bool), "is_causal": False},
        "attn_mask is given, but around a ring what is live",
    ),
    "dropout": ({"dropout_p": 1.0}, r"dropout is 1\.0, but must be less than 1"),
    "heads": ({"enable_gqa": False}, "key has 2 heads and query has 4: pass enable_gqa=True"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_cannot_be_honoured_are_refused(options, message):
    model = Model(**options)
    ra.replace_attention(model)
    with pytest.raises(ValueError, match=message):
        model(whole_input()[0])


def test_modules_are_chosen_by_class_predicate_or_list():
    def replaced(model):
        return [name for name, module in model.named_modules() if "forward" in vars(module) and module is not model]

    for modules, names in (
        (None, ["layers.0", "layers.1"]),
        (lambda name, _: name.endswith("1"), ["layers.1"]),
        ("first", ["layers.0"]),
    ):
        model = Model()
        undo = ra.replace_attention(model, modules=[model.layers[0]] if modules == "first" else modules)
        assert replaced(model) == names
        with pytest.raises(ValueError, match="is replaced already"):
            ra.replace_attention(model, modules=list(undo.modules))
        undo.restore()
        assert not replaced(model)
        assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="Linear has no module that calls scaled_dot_product_attention"):
        ra.replace_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="modules holds a Linear that is not part of the model"):
        ra.replace_attention(Model(), modules=[nn.Linear(2, 2)])
    model = Model()
    ra.replace_attention(model, modules=[model.layers[0].q])
    with pytest.raises(ValueError, match="Linear calls no scaled_dot_product_attention, so nothing was replaced"):
        model(whole_input()[0])


class CheckpointingAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = SelfAttention()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


def test_checkpointing_within_a_chosen_module_is_refused():
    """Its second forward pass would run outside of the module, and attend within the shard."""
    model, x = CheckpointingAttention(), whole_input()[0].requires_grad_()
    replaced = ra.replace_attention(model)
    with pytest.raises(ValueError, match="attention runs without gradients inside a module that has them"):
        model(x)
    with torch.no_grad():
        model(x)
    replaced.restore()
    replaced.restore()
    ra.replace_attention(model, modules=[model.inner])
    model(x).sum().backward()


def test_modules_that_cannot_be_replaced_are_refused():
    """In evaluation, the fast path of torch's module does not make the call at all."""
    with pytest.raises(
        ValueError, match=r"MultiheadAttention computes attention by torch\.nn\.MultiheadAttention, which does not make"
    ):
        ra.replace_attention(nn.TransformerEncoderLayer(8, 2, 16))
    model = Model()
    with pytest.raises(ValueError, match="modules holds the same SelfAttention twice"):
        ra.replace_attention(model, modules=[model.layers[0]] * 2)


class Block(nn.Module):
    """A layer that makes the call itself, under a name that does not tell."""

    def forward(self, x):
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def call_elsewhere(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


class Layer(nn.Module):
    """A layer whose code does not show that it makes the call."""

    def forward(self, x):
        return call_elsewhere(x.unflatten(-1, (4, 2)).transpose(1, 2)).transpose(1, 2).flatten(2)


def test_layers_that_make_the_call_are_chosen_whatever_their_name():
    model, x, mask = nn.Sequential(Block(), SelfAttention()), whole_input()[0], ra.documents(lengths=[5, N - 5])
    documents = torch.cat([model(part) for part in x.split([5, N - 5], dim=1)], dim=1)
    ra.replace_attention(model, mask=mask)
    torch.testing.assert_close(model(x), documents, rtol=0, atol=1e-12)


def test_calls_outside_of_the_chosen_modules_are_refused():
    x, twin = whole_input()[0], nn.Sequential(Layer(), SelfAttention())
    model = copy.deepcopy(twin)
    replaced = ra.replace_attention(model)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="scaled_dot_product_attention is called outside of the replaced modules"):
            each(x)
    replaced.restore()
    replaced.restore()
    assert torch.equal(model(x), twin(x))
    ra.replace_attention(model, modules=[model[1]])
    torch.testing.assert_close(model(x), twin(x), rtol=0, atol=1e-12)


def test_a_models_own_forward_comes_back():
    """As accelerate's, which it sets on the model under mixed precision."""
    model = Model()
    own = model.forward = functools.partial(type(model).forward, model)
    ra.replace_attention(model).restore()
    assert model.forward is own


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv1d(8, 8, 3), "1 is a Conv1d, which mixes tokens beside attention"),
        (nn.GRU(8, 8), "1 is a GRU, which mixes tokens beside attention"),
        (nn.BatchNorm1d(8), "1 is a BatchNorm1d, which mixes tokens beside attention"),
        (nn.Conv1d(8, 8, 1), None),
    ],
    ids=["convolution", "recurrence", "batch norm", "a matrix product"],
)
def test_layers_that_mix_tokens_are_refused(layer, message):
    model = nn.Sequential(SelfAttention(), layer)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        ra.replace_attention(model)


def test_models_of_transformers_are_refused(llama):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is a model of transformers: use .*huggingface\.attach"):
        ra.replace_attention(llama)


def mask_on_one_rank(group):
    layout = ra.contiguous(N, 2)
    mask = torch.ones(layout.lengths[1], layout.lengths[1], dtype=torch.bool)
    model = Model(**({"attn_mask": mask, "is_causal": False} if group.rank() else {}))
    ra.replace_attention(model, layout=layout, group=group)
    with pytest.raises(ValueError) as raised:
        model(ra.shard(whole_input()[0], layout, group.rank()))
    return str(raised.value)


def test_a_mask_on_one_rank_is_an_error_on_all(gloo):
    others, mine = gloo.run(2, mask_on_one_rank, timeout=30)
    assert mine.startswith("attn_mask is given")
    assert "rank 1 refused the input: rank 1: attn_mask is given" in others


MASKS = ra.documents(lengths=[5, N - 5]), ra.documents(lengths=[9, N - 9])


def gradients_after_two_masks(run, prepare=None):
    """Of two forward passes with different masks and then one backward pass, in which the second mask is in place."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(SelfAttention()) for _ in range(2)))
    if prepare is not None:
        prepare(model)
    x, weight = whole_input()
    total = 0.0
    for mask in MASKS:
        replaced = ra.replace_attention(model, mask=mask)
        total = total + (run(model, x.clone().requires_grad_()) * weight).sum()
        replaced.restore()
    ra.replace_attention(model, mask=MASKS[1])
    total.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("reentrant", "message"),
    [
        (False, "a checkpointed module attended in the backward pass with another layout, mask, schedule or scale"),
        (True, "SelfAttention runs again in the backward pass under reentrant activation checkpointing"),
    ],
    ids=["saved tensors", "reentrant"],
)
def test_another_mask_between_a_checkpointed_forward_and_its_backward_is_refused(reentrant, message):
    with pytest.raises(ValueError, match=message):
        gradients_after_two_masks(functools.partial(checkpoint, use_reentrant=reentrant))


def test_checkpointed_layers_keep_the_mask_of_their_forward_pass():
    found = gradients_after_two_masks(lambda model, x: model(x), ra.checkpoint_layers)
    torch.testing.assert_close(found, gradients_after_two_masks(lambda model, x: model(x)), rtol=0, atol=1e-12)
