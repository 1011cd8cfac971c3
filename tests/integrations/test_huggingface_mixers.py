"""Hybrid models of transformers on a ring: convolutions and recurrences of layers that are no attention, against one process."""

from __future__ import annotations

import copy
import itertools
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import masking_utils

import ringattn as ra
from ringattn.integrations import huggingface_recurrences
from ringattn.integrations.huggingface import attach, detach
from ringattn.integrations.huggingface_mixers import rebound
from ringattn.recurrent.state_passing import StatePassing
from ringattn.runtime.ulysses import Hybrid
from ringattn.training.causal_lm import sum_gradients
from ringattn.transport import Alone
from tests.integrations.test_huggingface_models import N, sweep, tokens
from tests.recurrent.fla_stand_in import use_stand_in

pytestmark = pytest.mark.skipif(
    not hasattr(masking_utils, "create_recurrent_attention_mask"), reason="this version of transformers has other hybrid layers"
)

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
# of this version of transformers; asking it for an attribute would import each model, and its list of names takes a third of a second
NAMES = set(dir(transformers))
HYBRIDS = {name: model for name, model in HYBRIDS.items() if model in NAMES}
CU = (0, 2, 13, N)  # documents: one shorter than a convolution is wide
DROPPING = ("mamba", "mamba 2", "falcon mamba")  # their layers do not get what a call's caller adds
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


# a function of its own each; the last two have no mask of the model's, and a forward pass of ours
@pytest.mark.parametrize("name", ["qwen3-next", "mamba 2", "mamba", "recurrent gemma"])
@pytest.mark.some(2)
def test_packed_documents_of_a_hybrid_model_equal_one_process(gloo, name):
    gloo.run(2, equals_one_process, name, "zigzag", "packed", timeout=120)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["whole", "packed", "packed by positions", "padded"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_model_equals_one_process(gloo, name, layout, kind):
    for world_size in (2, 3, 4):
        gloo.run(world_size, equals_one_process, name, layout, kind, timeout=120)


@pytest.mark.parametrize("name", ["qwen3.5", "mamba 2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_named_kernels_get_a_layers_own_dtype(monkeypatch, name, dtype):
    """A stand-in of fla's kernels computes in it, as plain torch does in fp32 or wider: the same logits and loss."""
    seen = []
    model = sweep.tiny("causal", HYBRIDS[name]).train().to(dtype)
    ids, found = tokens(N), []
    for chosen in (ra.torch_kernels(), ra.fla_kernels()):
        run = type(chosen).run
        monkeypatch.setattr(type(chosen), "run", lambda self, q, *args, run=run: seen.append(q.dtype) or run(self, q, *args))
        attach(model, layout=ra.zigzag(N, 1), recurrence_kernels=chosen)
        with use_stand_in():
            logits = model(input_ids=ids).logits
        found.append((logits.detach(), step(logits.float(), ids, weights_of("whole")).detach()))
    assert set(seen) == {torch.promote_types(dtype, torch.float32), dtype}
    for got, wanted in zip(*found):
        error = ((got - wanted).double().norm() / wanted.double().norm()).item()
        assert error < (1e-9 if dtype == torch.float64 else 2e-2)
    with pytest.raises(ValueError, match="recurrence_kernels is 'fla', but must be a RecurrenceKernels"):
        attach(model, layout=ra.zigzag(N, 1), recurrence_kernels="fla")


def gradients(group, name, saving):
    """Of packed documents. Before the backward pass the model is called with other documents."""
    model = sweep.tiny("causal", HYBRIDS[name]).train()
    layout = ra.zigzag(N, group.size())
    attach(model, group=group)
    if saving == "layers":
        ra.checkpoint_layers(model.base_model.layers, offload=1)
    elif saving is not None:
        options = dict(context_fn=ra.checkpoint_contexts) if saving == "contexts" else {}
        model.gradient_checkpointing_enable({"use_reentrant": saving == "reentrant", **options})
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
@pytest.mark.parametrize("saving", ["recomputed", "contexts", "layers", "reentrant"])
@pytest.mark.parametrize("name", ["qwen3-next", "bamba", "jamba", "lfm2", "minimax", "recurrent gemma", "falcon h1", "mamba"])
def test_recomputing_activations_changes_nothing(gloo, name, saving):
    gloo.run(2, recompute, name, saving, timeout=120)


def fsdp2(group, name):
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    layout = ra.zigzag(N, group.size())
    here = ra.shard(tokens(N), layout, group.rank())
    mesh = torch.distributed.DeviceMesh.from_group(group, "cpu")
    with sweep.quiet():
        plain, model = sweep.tiny("causal", HYBRIDS[name]), sweep.tiny("causal", HYBRIDS[name])
        for each in (plain, model):
            attach(each, layout=layout, group=group)
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for each in (plain, model):
            each(input_ids=here).logits.square().sum().backward()
    sum_gradients(plain.parameters(), group)
    wanted = dict(plain.named_parameters())
    for key, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor() * group.size(), wanted[key].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-next", "bamba", "jamba", "lfm2", "minimax", "recurrent gemma"])
def test_weights_that_fsdp2_shards(gloo, name):
    gloo.run(2, fsdp2, name, timeout=120)


def made(name):
    with sweep.quiet():
        return sweep.tiny("causal", HYBRIDS[name])


def verified(group):
    torch.set_num_threads(1)
    # two kinds of layers with states, and attention
    for name in ("lfm2", "qwen3.5"):
        report = ra.verify(made(name).float(), dict(input_ids=tokens(N)), layout=ra.zigzag(N, group.size()), group=group)
        assert report.passed, report


def test_verify_compares_a_hybrid_model(gloo):
    gloo.run(2, verified, timeout=60)


def magnified(group, mistake):
    """A length at which the step of this model magnifies rounding: the ring's own is five times that of transformers."""
    torch.set_num_threads(1)
    found = StatePassing.states_before

    def mistaken(passing, summaries):
        before, last = found(passing, summaries)
        return {index: (1 + mistake) * state for index, state in before.items()}, last

    with mock.patch.object(StatePassing, "states_before", mistaken):
        return ra.verify(
            made("nemotron h").float(), dict(input_ids=tokens(64)), layout=ra.zigzag(64, group.size()), group=group
        ).passed


def test_verify_knows_rounding_that_a_step_magnifies_from_a_mistake(gloo):
    for world_size in (1, 2):
        assert all(gloo.run(world_size, magnified, 0.0, timeout=60))
    assert not any(gloo.run(2, magnified, 1e-3, timeout=60))


def test_normalised_vectors_keep_no_wider_copy():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(huggingface_recurrences._Normalized.apply, x)
    half = torch.randn(2, 5, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = huggingface_recurrences._Normalized.apply(half)
    assert out.dtype == torch.float32
    assert {t.dtype for t in kept if t.numel() == half.numel()} == {torch.bfloat16}
    (found,) = torch.autograd.grad(out.sum(), half)
    wide = half.detach().float().requires_grad_()
    (wanted,) = torch.autograd.grad((wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).sum(), wide)
    torch.testing.assert_close(found, wanted.bfloat16(), rtol=2**-7, atol=1e-6)


def test_detach_and_copies():
    model = made("lfm2")
    with torch.no_grad():
        before = model(input_ids=tokens(N), use_cache=False).logits
        attach(model, layout=ra.zigzag(N, 1))
        copied = copy.deepcopy(model)
        next(copied.base_model.layers[0].conv.parameters()).mul_(2.0)
        found = model(input_ids=tokens(N)).logits
        torch.testing.assert_close(found, before, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(copied(input_ids=tokens(N)).logits, found, rtol=1e-3, atol=1e-3), (
            "a copy runs with its own weights"
        )
        detach(model)
        assert torch.equal(model(input_ids=tokens(N), use_cache=False).logits, before)
    assert not any("forward" in vars(module) for module in model.modules())


def call(layout=None, mask=None, name="lfm2", change=None, **inputs):
    model = made(name)
    attach(model, mask=mask, layout=ra.zigzag(N, 1) if layout is None else layout)
    if change is not None:
        change(model)
    return model(input_ids=tokens(N), **inputs)


def call_around(**inputs):
    """The call of a head that is not attached, as its base model is, and that keeps arguments to itself."""
    model = made("mamba")
    attach(model.base_model, layout=ra.zigzag(N, 1))
    return model(input_ids=tokens(N), **inputs)


def double_path(model):
    """A layer whose own code does not always convolve."""
    own = type(model.base_model.layers[0].conv)
    original = own.forward

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, **kwargs):
        return hidden_states

    own.forward = forward
    try:
        model(input_ids=tokens(N))
    finally:
        own.forward = original


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: call(ra.striped(N, 2)), "layout is for 2 ranks"),
        (lambda: attach(made("lfm2"), group=Hybrid(Alone(), Alone(), Alone())), "states of Lfm2ShortConv pass between ranks in one row"),
        (lambda: call(mask=ra.sliding_window(4, 0)), "a recurrence sees all that came before"),
        (lambda: call(mask=ra.documents(lengths=[N]), cu_seq_lens_q=torch.tensor(CU), cu_seq_lens_k=torch.tensor(CU)),
         "takes one of the two: attach without a mask"),
        (lambda: call(seq_idx=torch.zeros(1, N)), "seq_idx is a tensor"),
        *((lambda name=name: call(name=name, seq_idx=torch.zeros(1, N)), "seq_idx is a tensor") for name in DROPPING),
        *((lambda name=name: call(name=name, cu_seqlens=CU), r"cu_seqlens is \(.*but the ring does not know") for name in DROPPING),
        (lambda: call_around(cu_seq_lens_q=torch.tensor(CU), cu_seq_lens_k=torch.tensor(CU)),
         "cu_seq_lens_q is given to MambaForCausalLM, which does not hand it on to the MambaModel within: attach the MambaForCausalLM"),
        (lambda: call(change=double_path), "Lfm2ShortConv ran without causal_conv1d_fn, within the shard"),
        (lambda: call(name="mamba", cache_params=[]), r"cache(_params)? is \[\], but key/value caches are not supported"),
        (lambda: ra.verify(made("lfm2"), dict(input_ids=tokens(N)), mask=ra.documents(lengths=[N])),
         "which transformers runs across packed documents"),
        (lambda: ra.verify(made("lfm2"), dict(input_ids=tokens(N), position_ids=torch.arange(N)[None] % 9)),
         "which transformers runs across packed documents"),
    ],
    ids=["striped", "grid", "window", "two documents", "seq_idx", *(f"seq_idx of {name}" for name in DROPPING),
         *(f"unknown to {name}" for name in DROPPING), "documents kept", "another way", "states", "verify masks", "verify positions"],
)  # fmt: skip
def test_what_is_refused_by_name(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def test_layers_that_cannot_be_changed_are_refused(monkeypatch):
    model = made("lfm2")
    layer = model.base_model.layers[0].conv
    layer.forward = layer.forward
    with pytest.raises(ValueError, match="the forward of Lfm2ShortConv is replaced already"):
        attach(model, layout=ra.zigzag(N, 1))
    del layer.forward

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, **kwargs):
        return self.causal_conv1d_fn(hidden_states)  # an attribute, as in older versions of transformers

    monkeypatch.setattr(type(layer), "forward", forward)
    with pytest.raises(ValueError, match="Lfm2ShortConv does not call causal_conv1d_fn in this version of transformers"):
        attach(model, layout=ra.zigzag(N, 1))


def test_a_decorator_of_another_kind_is_refused():
    def inner():
        return 1

    def outer():
        return 2

    outer.__wrapped__ = inner
    with pytest.raises(ValueError, match="outer has a decorator that ringattn does not know"):
        rebound(outer, {})


def other_models(group):
    """A refused layout is an error on every rank, and other processes' models of the same class are left alone."""
    model, other = made("lfm2"), made("lfm2")
    attach(model, group=group)
    layout = ra.striped(N, group.size())
    with pytest.raises(ValueError, match="but a state passes between runs of consecutive tokens"):
        model(input_ids=ra.shard(tokens(N), layout, group.rank()), layout=layout)
    assert sys.modules[type(other.base_model).__module__].causal_conv1d_fn.__module__.startswith("transformers")
    assert other(input_ids=tokens(N), use_cache=False).logits.isfinite().all()


@pytest.mark.thorough
def test_striped_shards_are_refused_on_every_rank(gloo):
    gloo.run(2, other_models, timeout=60)


@pytest.mark.thorough
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
@pytest.mark.parametrize("name", ["qwen3-next", "mamba 2", "mamba", "minimax", "recurrent gemma"])
def test_compiled_code_has_the_same_results(name, whole):
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = made(name).float()
        attach(model, layout=ra.zigzag(N, 1))
        if compiled and not whole:
            for layer in model.base_model.layers:
                layer.compile(backend="aot_eager")
        run = torch.compile(model, backend="aot_eager") if compiled and whole else model
        bounds = torch.tensor(CU)
        logits = run(input_ids=tokens(N), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).logits
        logits.square().mean().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * one.abs().max().item())
