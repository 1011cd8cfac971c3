"""Models of diffusers around a ring: outputs and all gradients of one process, and refusals by name.

They ran with diffusers 0.42.1, which is too large for the development environment: without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra

pytestmark = pytest.mark.thorough
diffusers = pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn  # noqa: E402

from ringattn.integrations.diffusers import attach, detach, register  # noqa: E402
from ringattn.integrations.diffusers_ring import DiffusersRing  # noqa: E402
from tests.integrations.diffusers_models import MODELS, flux, wan  # noqa: E402

N = 25  # Wan's tokens
TEXT_FIRST = ("encoder_hidden_states", "hidden_states")


def step(model, inputs):
    """The output and the gradients of its input and of all parameters."""
    x = inputs["hidden_states"].detach().clone().requires_grad_()
    # diffusers' own hooks of the whole model take no other outputs than tensors, as pipelines ask for
    (out,) = model(**inputs | dict(hidden_states=x), return_dict=False)
    out.square().mean().backward()
    return dict(out=out.detach(), input=x.grad) | {name: p.grad for name, p in model.named_parameters()}


def total(found, group, over):
    """The sum of the ranks' gradients over a number; the output stays."""
    for name, x in found.items():
        if name != "out" and x is not None:
            dist.all_reduce(x, group=group)
            x /= over
    return found


def on_ring(group, name, options, sizes=None):
    model, inputs = MODELS[name](**sizes or {})
    attach(model, group=group, **options)
    return total(step(model, inputs), group, group.size())


def assert_same(found, wanted, tolerance=1e-5):
    for mine in found:
        assert mine.keys() == wanted.keys()
        for name, x in wanted.items():
            assert (mine[name] is None) == (x is None), name
            if x is not None:
                difference, scale = float((mine[name] - x).abs().max()), max(float(x.abs().max()), 1e-3)
                assert difference < tolerance * scale, f"{name}: {difference} of {scale}"


@contextlib.contextmanager
def dense(live):
    """torch's attention to a model's own tokens sees what is live of them."""
    original = F.scaled_dot_product_attention

    def masked(query, key, value, attn_mask=None, **options):
        if query.shape[2] == key.shape[2] == len(live):
            attn_mask = live
        return original(query, key, value, attn_mask=attn_mask, **options)

    with mock.patch.object(F, "scaled_dot_product_attention", masked):
        yield


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_one_process(gloo, name, ranks):
    assert_same(gloo.run(ranks, on_ring, name, {}), step(*MODELS[name]()))


def test_joint_sequences_of_any_lengths(gloo):
    for sizes in (dict(text=2, image=11), dict(text=8, image=1)):  # the last ranks hold no text, or no image
        assert_same(gloo.run(3, on_ring, "Flux", {}, sizes), step(*flux(**sizes)), 1e-6)


def near_frames(n):
    """Each frame of 5 tokens sees itself and the two around it."""
    frames = torch.arange(n // 5)
    return ra.block_sparse((frames[:, None] - frames).abs() <= 1, 5)


MASKED = {
    "window": ("Wan", ra.sliding_window(7, 4), {}),
    "frames": ("Wan", near_frames(N), {}),
    "frames, even work": ("Wan", near_frames(N), dict(layouts=lambda n: ra.balanced(near_frames(n), n, 3))),
    "causal, zigzag": ("Wan", ra.causal(), dict(layouts=lambda n: ra.zigzag(n, 3))),
    "text before image": ("Flux", ra.prefix(7), dict(joined=TEXT_FIRST)),
    "joint, striped": ("Flux", ra.sliding_window(5, 2), dict(joined=TEXT_FIRST, layouts=lambda n: ra.striped(n, 3))),
}


def masked_on_ring(group, case):
    name, mask, options = MASKED[case]
    return on_ring(group, name, options | dict(mask=mask))


@pytest.mark.parametrize("case", MASKED)
def test_windows_and_blocks(gloo, case):
    name, mask, _ = MASKED[case]
    model, inputs = MODELS[name]()
    with dense(mask.dense(N if name == "Wan" else 18)):
        wanted = step(model, inputs)
    assert_same(gloo.run(3, masked_on_ring, case), wanted)


def on_grid(group):
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("ring", "heads"))
    model, inputs = flux()
    attach(model, group=mesh)
    return total(step(model, inputs), group, 8)


def test_a_ring_and_an_all_to_all_to_heads(gloo):
    assert_same(gloo.run(8, on_grid), step(*flux()), 1e-6)


def of_diffusers(group, config, sizes, how):
    """The model cut by diffusers, which counts accelerators."""
    model, inputs = flux(**sizes)
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        model.enable_parallelism(config=diffusers.ContextParallelConfig(**config))
    if how == "attached":
        attach(model)
        return total(step(model, inputs), group, 1)
    with attention_backend(register()):
        return total(step(model, inputs), group, 1)


CONFIGS = {
    # gloo assembles no uneven outputs for diffusers, so the text alone is uneven
    "ring": (dict(ring_degree=8, ring_anything=True), dict(text=11, image=16)),
    "heads": (dict(ring_degree=4, ulysses_degree=2), dict(text=8, image=16)),
}


@pytest.mark.parametrize("how", ["attached", "in a block"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_diffusers_cuts(gloo, name, how):
    config, sizes = CONFIGS[name]
    assert_same(gloo.run(8, of_diffusers, config, sizes, how), step(*flux(**sizes)), 1e-6)


def heads(hk=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 21, h, 4, dtype=torch.float64, generator=generator) for h in (4, hk, hk)]


def called(group, options):
    layout = ra.contiguous(21, group.size())
    q, k, v = (ra.shard(x, layout, group.rank()) for x in heads(2))
    ring = DiffusersRing(group, score=ra.score(seed=3), joined=("x",), rows=dict(x=21))
    out = dispatch_attention_fn(q, k, v, enable_gqa=True, **options, backend=register(), parallel_config=ring)
    return ra.unshard(out, layout, group)


OPTIONS = {
    "scale": (dict(scale=0.3), dict(mask=ra.full(), softmax_scale=0.3)),
    "is_causal": (dict(is_causal=True), dict(mask=ra.causal())),
    "dropout_p": (dict(dropout_p=0.2), dict(mask=ra.full(), score=ra.score(dropout=0.2, seed=3))),
    "window_size": (dict(attention_kwargs=dict(window_size=(3, -1))), dict(mask=ra.sliding_window(3, None))),
    "both": (dict(is_causal=True, attention_kwargs=dict(window_size=(3, 2))), dict(mask=ra.sliding_window(3))),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_honoured(gloo, name):
    given, same = OPTIONS[name]
    wanted = ra.reference.attention(*heads(2), **same)
    assert all(torch.allclose(found, wanted) for found in gloo.run(2, called, given))


REFUSED = {
    "attn_mask": (
        dict(attn_mask=torch.ones(2, 7, dtype=torch.bool)),
        "attn_mask is given to attention of diffusers, but around a ring",
    ),
    "is_causal": (dict(is_causal=True), "is_causal is given, but the order of the tokens is unknown"),
    "window_size": (
        dict(attention_kwargs=dict(window_size=(3, 3))),
        "window_size is given, but the order of the tokens is unknown",
    ),
    "return_lse": (
        dict(attention_kwargs=dict(return_lse=True)),
        "return_lse is given to attention of diffusers, but the backend returns",
    ),
    "softcap": (dict(attention_kwargs=dict(softcap=3.0)), "softcap is given to attention of diffusers, but give it as"),
    "deterministic": (dict(attention_kwargs=dict(deterministic=True)), "deterministic is given"),
    "return_attn_probs": (dict(attention_kwargs=dict(return_attn_probs=True)), "return_attn_probs is given"),
    "enable_gqa": (dict(enable_gqa=False), "key has 2 heads and query has 4: pass enable_gqa=True"),
    "dropout_p": (dict(dropout_p=1.5), "dropout is 1.5, but must be less than 1"),
}


def refused(group, options, on):
    q, k, v = (x[:, :7] for x in heads(2))
    given = dict(enable_gqa=True) | (options if group.rank() == on else {})
    with pytest.raises(ValueError) as error:
        dispatch_attention_fn(q, k, v, **given, backend=register(), parallel_config=DiffusersRing(group))
    return str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_reach_every_rank(gloo, name):
    options, message = REFUSED[name]
    assert all(message in error for error in gloo.run(2, refused, options, 1))


def test_without_a_ring_it_is_the_attention_of_diffusers():
    model, inputs = wan()
    live = torch.rand(2, 9) < 0.7
    with attention_backend(register()):
        assert torch.equal(model(**inputs).sample, wan()[0](**inputs).sample)
        q, k, v = heads()
        found = dispatch_attention_fn(q, k[:, :9], v[:, :9], attn_mask=live)
        with pytest.raises(ValueError, match="window_size is given to attention of diffusers, but outside of a ring"):
            dispatch_attention_fn(q, k, v, attention_kwargs=dict(window_size=(1, 1)))
    assert torch.equal(found, dispatch_attention_fn(q, k[:, :9], v[:, :9], attn_mask=live))


def test_detach_restores_the_model():
    model, inputs = wan()
    wanted = model(**inputs).sample
    attach(model, mask=ra.sliding_window(2, 2))
    attach(model, mask=ra.sliding_window(3, 3))
    assert not torch.allclose(model(**inputs).sample, wanted)
    detach(model)
    assert torch.equal(model(**inputs).sample, wanted)
    detach(model)


def test_autocast():
    model, inputs = wan()
    q, k, v = (x.float() for x in heads())
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(**inputs).sample
        attach(model)
        torch.testing.assert_close(model(**inputs).sample, wanted, rtol=0.05, atol=0.05)
        # norms may leave q and k in fp32
        out = dispatch_attention_fn(q, k, v.bfloat16(), backend=register(), parallel_config=DiffusersRing())
    assert out.dtype == torch.bfloat16


def test_a_call_without_the_joined_inputs_is_refused():
    ring = DiffusersRing(joined=("hidden_states",))
    with pytest.raises(ValueError, match="none of hidden_states was cut in this call of the model, so the positions are unknown"):
        dispatch_attention_fn(*heads(), backend=register(), parallel_config=ring)


def test_bad_arguments_of_attach():
    model, _ = flux()
    with pytest.raises(ValueError, match=r"model is .*, but must be a ModelMixin: pass the transformer of a pipeline"):
        attach(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="joined holds 'text', but the plan cuts hidden_states, encoder_hidden_states"):
        attach(model, joined=("text",))
    with pytest.raises(ValueError, match=r"mask is given, so joined must name all inputs of tokens .* hidden_states is missing"):
        attach(model, mask=ra.causal())
    with pytest.raises(ValueError, match="plan names 'head', but FluxTransformer2DModel has no such module"):
        attach(model, plan={"head": model._cp_plan["proj_out"]})
    with pytest.raises(ValueError, match="plan holds 3, but must hold ContextParallelInput"):
        attach(model, plan={"": {"hidden_states": 3}})
    model._cp_plan = None
    with pytest.raises(ValueError, match="FluxTransformer2DModel has no plan for context parallelism"):
        attach(model)
    attach(wan()[0], layouts=lambda n: ra.contiguous(n, 1))
    model, inputs = wan()
    attach(model, layouts=lambda n: ra.contiguous(n + 1, 1))
    with pytest.raises(ValueError, match=r"layouts\(25\) is contiguous\(seq_len=26, world_size=1\), but must be for 25 tokens"):
        model(**inputs)
    model, inputs = MODELS["LTX"]()
    attach(model, mask=ra.causal(), joined=("hidden_states", "encoder_hidden_states"))
    with pytest.raises(
        ValueError, match="attention has 25 queries and 25 keys on this rank, but hidden_states, encoder_hidden_states"
    ):
        model(**inputs)


def test_another_backend_is_refused():
    model, inputs = wan()
    attach(model)
    model.set_attention_backend("native")
    with pytest.raises(ValueError, match="the model is cut for ringattn, but another attention backend was chosen"):
        model(**inputs)


def test_processors_without_a_backend_are_refused():
    model = diffusers.SD3Transformer2DModel(
        sample_size=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16,
        pooled_projection_dim=8, out_channels=4, in_channels=4, pos_embed_max_size=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="computes attention by JointAttnProcessor2_0, which takes no backend of diffusers"):
        attach(model, plan={})


def both_options(group):
    model, _ = flux()
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ring_degree=8, convert_to_fp32=False))
    errors = []
    for options in (dict(mask=ra.full()), {}):
        with pytest.raises(ValueError) as error:
            attach(model, **options)
        errors.append(str(error.value))
    return errors


def test_options_of_diffusers_that_are_refused(gloo):
    for first, second in gloo.run(8, both_options):
        assert "mask is given, but enable_parallelism was called on the model" in first
        assert "convert_to_fp32 is False, but sums around the ring are always in fp32" in second


def under_ddp(group):
    """DDP's mean of the gradients is the gradient."""
    model, inputs = wan()
    attach(model, group=group)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    wrapped(**inputs).sample.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_ddp_takes_the_gradient(gloo):
    wanted = step(*wan())
    assert_same(gloo.run(3, under_ddp), {name: x for name, x in wanted.items() if name not in ("out", "input")})
