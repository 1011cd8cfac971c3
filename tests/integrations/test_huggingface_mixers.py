"""Hybrid models of transformers on a ring: convolutions and recurrences of layers that are no attention, against one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import ringattn as ra
from ringattn.integrations.huggingface import attach, detach
from ringattn.training.causal_lm import sum_gradients
from tests.integrations.test_huggingface_models import N, sweep, tokens

HYBRIDS = {
    "qwen3-next": "Qwen3NextForCausalLM",
    "qwen3.5": "Qwen3_5ForCausalLM",
    "qwen3.5 with experts": "Qwen3_5MoeForCausalLM",
    "olmo hybrid": "OlmoHybridForCausalLM",
    "kimi linear": "KimiLinearForCausalLM",
    "bailing hybrid": "BailingHybridForCausalLM",
    "mamba 2": "Mamba2ForCausalLM",
    "bamba": "BambaForCausalLM",
    "granite hybrid": "GraniteMoeHybridForCausalLM",
    "nemotron h": "NemotronHForCausalLM",
    "falcon h1": "FalconH1ForCausalLM",
    "zamba 2": "Zamba2ForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon mamba": "FalconMambaForCausalLM",
    "jamba": "JambaForCausalLM",
    "zamba": "ZambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2 with experts": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "recurrent gemma": "RecurrentGemmaForCausalLM",
}
CU = (0, 2, 13, N)  # documents: one shorter than a convolution is wide
ENDS = (N, 14)  # of rows with padding


def step(logits, ids, places):
    """A weighted sum of log-probabilities; places (s,): 0 for tokens that do not count."""
    losses = F.cross_entropy(logits.flatten(0, 1), (ids * 7 + 3).flatten() % sweep.VOCAB, reduction="none").view(ids.shape)
    return (losses * places).sum()


def reference(model, ids, kind):
    """Logits, loss and gradients of one process, in which each document is a sequence of its own."""
    weights = weights_of(kind)
    bounds = CU if kind.startswith("packed") else (0, N)
    parts = [model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(bounds)]
    logits = torch.cat(parts, dim=1)
    loss = step(logits, ids, weights)
    loss.backward()
    return logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def weights_of(kind):
    weights = (1 + torch.arange(N) % 5).expand(2, -1).clone()
    if kind == "padded":
        weights[torch.arange(N) >= torch.tensor(ENDS)[:, None]] = 0
    return weights


def inputs_of(kind, layout, rank):
    def cut(x):
        return ra.shard(x, layout, rank)

    if kind == "packed":
        return dict(cu_seq_lens_q=torch.tensor(CU), cu_seq_lens_k=torch.tensor(CU))
    if kind == "packed by positions":
        restarting = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CU)])
        return dict(position_ids=cut(restarting[None]))
    if kind == "padded":
        return dict(attention_mask=cut((torch.arange(N) < torch.tensor(ENDS)[:, None]).long()))
    return {}


def equals_one_process(group, name, layout, kind):
    torch.set_num_threads(1)
    rank, layout = group.rank(), getattr(ra, layout)(N, group.size())
    with sweep.quiet(), sweep._Double():
        ids = tokens(N)
        wanted = reference(sweep.tiny("causal", HYBRIDS[name]).train(), ids, kind)
        model = sweep.tiny("causal", HYBRIDS[name]).train()
        attach(model, group=group)
        here = ra.shard(ids, layout, rank)
        logits = model(input_ids=here, layout=layout, **inputs_of(kind, layout, rank)).logits
        loss = step(logits, here, ra.shard(weights_of(kind), layout, rank))
        loss.backward()
    sum_gradients(model.parameters(), group)
    loss = loss.detach()
    torch.distributed.all_reduce(loss, group=group)
    live = ra.shard(weights_of(kind), layout, rank) > 0
    worst = {"logits": sweep.difference(logits.detach()[live], ra.shard(wanted[0], layout, rank)[live])}
    worst |= {"loss": sweep.difference(loss, wanted[1])}
    worst |= {key: sweep.difference(p.grad, wanted[2][key]) for key, p in model.named_parameters()}
    key = max(worst, key=worst.__getitem__)
    assert worst[key] < 1e-9, f"{key} differs by {worst[key]:.1e}"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["whole", "packed", "packed by positions", "padded"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_model_equals_one_process(gloo, name, layout, kind):
    for world_size in (2, 3, 4):
        gloo.run(world_size, equals_one_process, name, layout, kind, timeout=120)


def gradients(group, name, saving):
    """Of packed documents. Before the backward pass the model is called with other documents."""
    model = sweep.tiny("causal", HYBRIDS[name]).train()
    layout = ra.zigzag(N, group.size())
    attach(model, group=group)
    if saving == "layers":
        ra.checkpoint_layers(model.base_model.layers, offload=1)
    elif saving is not None:
        model.gradient_checkpointing_enable({"use_reentrant": saving == "reentrant"})
    here = ra.shard(tokens(N), layout, group.rank())
    logits = model(input_ids=here, layout=layout, **inputs_of("packed", layout, group.rank())).logits
    with torch.no_grad():
        model(input_ids=here, layout=layout)
    step(logits, here, ra.shard(weights_of("packed"), layout, group.rank())).backward()
    return {key: p.grad for key, p in model.named_parameters()}


def recompute(group, name, saving):
    torch.set_num_threads(1)
    with sweep.quiet():
        wanted, found = gradients(group, name, None), gradients(group, name, saving)
    for key, grad in wanted.items():
        assert (grad is None and found[key] is None) or torch.equal(found[key], grad), key


@pytest.mark.thorough
@pytest.mark.parametrize("saving", ["recomputed", "layers", "reentrant"])
@pytest.mark.parametrize("name", ["qwen3-next", "bamba", "jamba", "lfm2", "minimax", "recurrent gemma", "falcon h1", "mamba"])
def test_recomputing_activations_changes_nothing(gloo, name, saving):
    gloo.run(2, recompute, name, saving, timeout=120)
