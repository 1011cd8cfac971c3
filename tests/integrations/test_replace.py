"""`replace_attention`: a hand-written model gives the same results around a ring as whole; options that cannot be honoured are refused."""

import copy

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


@pytest.mark.parametrize("compile_first", [False, True], ids=["replaced first", "compiled first"])
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
    model.layers[0].options["dropout_p"] = 0.5
    with pytest.raises(ValueError, match=r"dropout_p is 0\.5, but attention dropout is not supported"):
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


REFUSED = {
    "mask": (
        {"attn_mask": torch.ones(N, N, dtype=torch.bool), "is_causal": False},
        "attn_mask is given, but around a ring a mask is",
    ),
    "dropout": ({"dropout_p": 0.1}, "dropout_p is 0.1, but attention dropout is not supported"),
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
        return [name for name, module in model.named_modules() if "forward" in vars(module)]

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
    with pytest.raises(ValueError, match="Linear has no module with attention or attn in the name"):
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
