"""`ringattn.training.tiled`: modules give the same results over tiles of the sequence, with less memory."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

from ringattn.training.tiled import tile_modules, tiled


@pytest.mark.parametrize("rows", [1, 4, 7, 13, 100])
def test_tiles_give_the_same(rows):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 5)).double()
    x = torch.randn(2, 13, 6, dtype=torch.float64, requires_grad=True)
    seen = []
    module[0].register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    inputs = [x, *module.parameters()]
    expected, out = module(x), tiled(module, x, rows)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(value.square().sum(), inputs) for value in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert max(seen[1:]) <= rows


def test_a_models_mlps_are_tiled_in_place():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(61, (1, 11))
    before, names = model(input_ids=ids).logits, list(model.state_dict())
    assert tile_modules(model, 8) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert tile_modules(model, 3) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    seen = []
    twin = copy.deepcopy(model)
    twin.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    torch.testing.assert_close(twin(input_ids=ids).logits, before)
    assert seen == [3, 3, 3, 2]
    assert list(model.state_dict()) == names
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"


def test_tiled_norms_keep_only_their_input():
    """A bf16 norm keeps its input in fp32, and the normalized input; tiles keep only views of the input. Weight gradients add up."""
    torch.manual_seed(0)
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(16).bfloat16()
    x = torch.randn(1, 11, 16, dtype=torch.bfloat16, requires_grad=True)

    def step(module):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.untyped_storage().data_ptr(): t}) or t, lambda t: t):
            out = module(x)
        grads = torch.autograd.grad(out.float().square().sum(), [x, norm.weight])
        return out, grads, sum(t.untyped_storage().nbytes() for t in kept.values())

    expected, (dx, dweight), whole = step(norm)
    tile_modules(nn.ModuleList([norm]), 4, suffix="Norm")
    out, (tiled_dx, tiled_dweight), kept = step(norm)
    # sums over other numbers of rows may be vectorized otherwise: at most one rounding to bf16 apart
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)
    torch.testing.assert_close(tiled_dx, dx, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(tiled_dweight, dweight, rtol=2**-7, atol=2**-6)
    assert kept <= x.nbytes + norm.weight.nbytes
    assert whole >= 3 * x.nbytes


@pytest.mark.parametrize("rows", [1, 4, 22])
def test_norms_with_a_gate(rows):
    """Two tensors of as many rows are cut alike: out and all gradients."""
    torch.manual_seed(0)
    norm = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5RMSNormGated(16)
    x, gate = (torch.randn(22, 16, requires_grad=True) for _ in range(2))
    leaves = [x, gate, norm.weight]
    expected = norm(x, gate)
    grads = torch.autograd.grad(expected.square().sum(), leaves)
    assert tile_modules(nn.ModuleList([norm]), rows, suffix="NormGated") == ["0"]
    out = norm(x, gate)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), leaves), grads)


@pytest.mark.gpu
def test_tiles_take_less_memory_on_a_gpu():
    """An eighth of the hidden layer, which dominates: two of sixteen tiles exist at a time, forward and backward."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=8192, vocab_size=8, num_attention_heads=1)
    mlp = transformers.models.llama.modeling_llama.LlamaMLP(config).cuda()
    x = torch.randn(1, 8192, 64, device="cuda", requires_grad=True)
    peaks, found = [], []
    for run in (mlp, lambda x: tiled(mlp, x, 512)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append(torch.autograd.grad(run(x).square().sum(), [x, *mlp.parameters()]))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0] / 8
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_tokens_without_a_batch_are_tiled_too():
    """Experts get such tokens."""
    torch.manual_seed(0)
    module, x = nn.Linear(6, 5), torch.randn(13, 6)
    seen = []
    module.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    torch.testing.assert_close(tiled(module, x, 4), nn.functional.linear(x, module.weight, module.bias))
    assert seen == [4, 4, 4, 1]


def test_modules_that_cannot_be_tiled_are_named():
    with pytest.raises(ValueError, match="rows is 0, but must be at least 1"):
        tiled(nn.Identity(), torch.zeros(1, 4, 2), 0)
    with pytest.raises(ValueError, match="the module returns a tuple for a tile"):
        tiled(lambda x: (x, x), torch.zeros(1, 4, 2), 2)
    with pytest.raises(ValueError, match="Identity has no module whose class name ends in 'MLP'"):
        tile_modules(nn.Identity(), 4)
