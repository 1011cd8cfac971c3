"""`ringattn.training.loss`: the mean over all tokens and its gradient, for each wrapper's reduction of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import IGNORE, CausalLMLoss, sum_gradients, token_loss
from ringattn.training.data import shard_batch
from ringattn.training.loss import Reduction, averaged, count_tokens, deepspeed, mean_loss, summed

SEQ_LEN = 24


def build() -> CausalLMLoss:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return CausalLMLoss(transformers.LlamaForCausalLM(config), loss=token_loss)


def whole_batch(replica: int) -> dict[str, torch.Tensor]:
    """A replica's sequence. The first half has few labels; the last quarter of the second replica, a rank's shard, has none."""
    ids = torch.randint(61, (1, SEQ_LEN), generator=torch.Generator().manual_seed(replica))
    labels = ids.clone()
    labels[:, 1:9] = IGNORE
    if replica:
        labels[:, 12:] = IGNORE
    return dict(input_ids=ids, labels=labels)


def expected(replicas: int):
    model = build()
    batches = [shard_batch(whole_batch(replica), ra.contiguous(SEQ_LEN, 1), 0) for replica in range(replicas)]
    counted = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in batches)
    loss = sum(model(**batch) for batch in batches) / counted
    loss.backward()
    return loss.item(), counted, {name: p.grad for name, p in model.named_parameters()}


def wrapped_step(group, wrapper: str, replicas: int, ring: int, accumulate: bool = False, device: str = "cpu"):
    """A step on the first replicas x ring ranks; the other ranks only take part in making groups. Run it on all ranks of the job."""
    torch.set_num_threads(1)
    mesh = DeviceMesh(device, torch.arange(replicas * ring).view(replicas, ring), mesh_dim_names=("data", "ring"))
    everyone = DeviceMesh(device, torch.arange(replicas * ring))
    if mesh.get_coordinate() is None:
        return None
    group = everyone.get_group()
    layout = ra.contiguous(SEQ_LEN, ring)
    model = build().to(device)
    attach(model.model, layout=layout, group=mesh["ring"])
    mine = shard_batch(whole_batch(mesh.get_local_rank("data")), layout, mesh.get_local_rank("ring"))
    mine = {name: value.to(device) for name, value in mine.items()}
    reduction = summed() if wrapper == "none" else averaged(everyone if wrapper == "fsdp2" else group)
    run = model
    if wrapper == "ddp":
        run = DistributedDataParallel(model, process_group=group)
    elif wrapper == "fsdp2":
        for layer in model.model.model.layers:
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)
    if accumulate:
        # the same tokens in two micro-batches: each counts other tokens, and the numbers differ
        parts = [mine["shift_labels"].clone(), mine["shift_labels"].clone()]
        parts[0][:, :4], parts[1][:, 4:] = IGNORE, IGNORE
        total = count_tokens(*parts, group=group)
        means = []
        for labels in parts:
            step = mean_loss(run(**{**mine, "shift_labels": labels}), labels, reduction=reduction, group=group, tokens=total)
            step.loss.backward()
            means.append(step.mean.item())
        mean, tokens = sum(means), total.item()
    else:
        step = mean_loss(run(**mine), mine["shift_labels"], reduction=reduction, group=group)
        step.loss.backward()
        mean, tokens = step.mean.item(), step.tokens.item()
    if wrapper == "none":
        sum_gradients(model.parameters(), group)
    gradients = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()}
    valid = int((mine["shift_labels"] != IGNORE).sum())
    return mean, tokens, {name: gradient.cpu() for name, gradient in gradients.items()}, valid


def assert_the_mean_over_all_tokens(results: list, replicas: int, atol: float = 1e-7) -> None:
    loss, counted, gradients = expected(replicas)
    for mean, tokens, summed_up, _ in results:
        assert mean == pytest.approx(loss, rel=1e-6)
        assert tokens == counted
        for name, gradient in gradients.items():
            torch.testing.assert_close(summed_up[name], gradient, rtol=2e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp2"])
@pytest.mark.parametrize(("replicas", "ring"), [(1, 2), (2, 2)], ids=["1x2", "2x2"])
@pytest.mark.some(3)
def test_gradients_are_those_of_the_mean_over_all_tokens(gloo, wrapper, replicas, ring):
    results = gloo.run(8, wrapped_step, wrapper, replicas, ring, timeout=120)[: replicas * ring]
    assert_the_mean_over_all_tokens(results, replicas)
    valid = [valid for *_, valid in results]
    assert len(set(valid)) == len(valid), "the ranks' counts differ"
    assert (0 in valid) == (replicas == 2), "one shard is all padding"


def test_micro_batches_add_up(gloo):
    assert_the_mean_over_all_tokens(gloo.run(8, wrapped_step, "none", 2, 2, True, timeout=120)[:4], 2)


def said_of_wrapped_models(group):
    """The errors for a model in FSDP, which passes on its attributes, and for models that fully_shard was given in other parts."""
    everyone, said = DeviceMesh("cpu", torch.arange(group.size())), []
    mine = shard_batch(whole_batch(0), ra.contiguous(SEQ_LEN, 1), 0)
    in_fsdp = FullyShardedDataParallel(
        build().model, group, ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"), use_orig_params=True
    )
    whole, head = build(), build()
    fully_shard(whole.model, mesh=everyone)
    fully_shard(head.model.lm_head, mesh=everyone)
    fully_shard(head, mesh=everyone)
    for call in (lambda: CausalLMLoss(in_fsdp), lambda: whole(**mine), lambda: head(**mine)):
        with pytest.raises(ValueError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_models_that_were_wrapped_instead_of_the_loss_are_refused(gloo):
    """In FSDP without shards each rank would have trained by itself."""
    for of_fsdp, of_whole, of_head in gloo.run(8, said_of_wrapped_models):
        assert of_fsdp.startswith("FullyShardedDataParallel is not a model of transformers: give one before it is wrapped")
        assert of_whole.startswith("FSDPLlamaForCausalLM was sharded by itself")
        assert of_head.startswith("the output embedding was sharded by itself")


def over_axes(group):
    """Losses, counts and gradients over a mesh of two axes and a grid, and the errors for a transport and a list."""
    mesh = DeviceMesh("cpu", torch.arange(8).view(4, 2), mesh_dim_names=("ring", "heads"))
    found, said = [], []
    for where in (mesh, ra.hybrid(mesh), mesh["ring"]):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.full((2,), float(group.rank()))
        sum_gradients([parameter], where)
        labels = torch.full((1, 3), 5)
        step = mean_loss(torch.tensor(6.0 * group.rank()), labels, reduction=averaged(where), group=where)
        found.append(
            (averaged(where).divisor, step.mean.item(), count_tokens(labels, group=where).item(), *parameter.grad.tolist())
        )
    for bad in (ra.process_group(mesh["ring"]), [group]):
        for call in (averaged, lambda bad: sum_gradients([], bad)):
            with pytest.raises(ValueError) as caught:
                call(bad)
            said.append(str(caught.value))
    return found, said


def test_groups_may_have_several_axes(gloo):
    for rank, (found, said) in enumerate(gloo.run(8, over_axes)):
        assert found[0] == found[1] == (8, 7.0, 24.0, 28.0, 28.0)
        of_axis = sum(range(rank % 2, 8, 2))
        assert found[2] == (4, of_axis / 2, 12.0, of_axis, of_axis)
        assert all("pass the ProcessGroup it was made of" in text for text in said[:2])
        assert all("group is a list, but must be a ProcessGroup" in text for text in said[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_gradients_on_gpus_are_those_of_the_mean_over_all_tokens(nccl, wrapper):
    """On all GPUs: two rings of half of them each if their number is even, otherwise one ring."""
    count = nccl.size
    replicas = 1 if count % 2 else 2
    results = nccl.run(count, wrapped_step, wrapper, replicas, count // replicas, False, "cuda", timeout=120)
    assert_the_mean_over_all_tokens(results, replicas)


def test_without_a_valid_token_all_is_zero():
    model = build()
    batch = shard_batch(whole_batch(0), ra.contiguous(SEQ_LEN, 1), 0)
    batch["shift_labels"][:] = IGNORE
    step = mean_loss(model(**batch), batch["shift_labels"], reduction=Reduction(3))
    step.loss.backward()
    assert step.loss.item() == step.mean.item() == step.tokens.item() == 0
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_the_factors_of_wrappers():
    assert not dist.is_initialized()
    assert [summed().divisor, averaged().divisor, deepspeed(4).divisor, deepspeed(4, accumulation=8).divisor] == [1, 1, 4, 32]
    value = torch.tensor(10.0)
    assert mean_loss(value, torch.tensor([[1, 2, IGNORE]]), reduction=deepspeed(4)).loss.item() == 20.0


def test_the_factor_is_not_rounded_to_a_narrow_loss():
    """In fp16 the factor of a mean over 100 million tokens would be 0."""
    value = torch.tensor(10.0, dtype=torch.float16, requires_grad=True)
    step = mean_loss(value, torch.tensor([[1]]), reduction=Reduction(3), tokens=10**8)
    assert step.loss.item() == pytest.approx(3e-7)


def compiled_in_place(model):
    model.compile()
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Reduction(0), "divisor is 0, but must be at least 1"),
        (lambda: deepspeed(1.5), r"data_parallel is 1\.5"),
        (lambda: mean_loss(torch.zeros(3), torch.zeros(1, 3), reduction=summed()), r"summed_loss has shape \(3,\)"),
        (lambda: mean_loss(0.5, torch.zeros(1, 3), reduction=summed()), r"summed_loss is 0\.5, but must be a Tensor"),
        (lambda: mean_loss(torch.zeros(()), [0, 1], reduction=summed()), r"labels is \[0, 1\], but must be a Tensor"),
        (lambda: count_tokens(), "labels is empty"),
        (lambda: count_tokens([torch.zeros(1, 3)]), r"count_tokens\(\*labels\)"),
        (lambda: CausalLMLoss(build().model.model), "has no linear output embedding"),
        (lambda: CausalLMLoss(build()), "CausalLMLoss is not a model of transformers: give one before it is wrapped"),
        (lambda: CausalLMLoss(torch.compile(build().model)), "OptimizedModule is not a model of transformers: give one before"),  # type: ignore[arg-type]
        (lambda: CausalLMLoss(compiled_in_place(build().model)), "LlamaForCausalLM was compiled by itself"),
    ],
    ids=[
        "divisor",
        "data parallel",
        "no sum",
        "a number",
        "a list",
        "no labels",
        "a list of labels",
        "no head",
        "wrapped",
        "compiled",
        "compiled in place",
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# settings that are not neutral; the cap of RecurrentGemma is its default
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Phi": {},
    "Gemma2": dict(head_dim=8, final_logit_softcapping=0.3),
    "RecurrentGemma": dict(block_types=["recurrent"], lru_width=16),
    "xLSTM": dict(num_heads=2, qk_dim_factor=1.0, output_logit_soft_cap=0.3),
    "Cohere": dict(logit_scale=0.25),
    "FalconH1": dict(mamba_n_heads=2, mamba_d_head=8, mamba_d_ssm=16, mamba_d_state=4, mamba_chunk_size=4, lm_head_multiplier=3.0),
    "Granite": dict(logits_scaling=3.0),
    "HyperCLOVAX": dict(logits_scaling=3.0),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if hasattr(transformers, f"{kind}Config")])
def test_the_summed_loss_is_that_of_the_models_own_logits(kind):
    """An output bias (Phi), final softcaps (Gemma 2 to xLSTM), factors (Cohere, Falcon-H1), and a divisor (Granite) that HyperCLOVAX
    uses as a factor."""
    sizes = dict(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    config = getattr(transformers, f"{kind}Config")(**sizes, **KINDS[kind], bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    if kind in ("RecurrentGemma", "xLSTM"):
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=5.0)  # logits that a cap changes
    if kind == "Phi":
        torch.nn.init.normal_(model.lm_head.bias)
    inputs = dict(input_ids=torch.randint(61, (2, 9)), use_cache=False)
    labels = torch.randint(61, (2, 9))
    logits = model(**inputs).logits
    whole = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = CausalLMLoss(model)(shift_labels=labels, **inputs)
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    parameters = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), torch.autograd.grad(whole, parameters), rtol=1e-4, atol=1e-6)


def test_the_base_model_is_found_where_its_prefix_names_nothing():
    """Llama 4's class of texts names its base model as its class of images and texts does, and has none of this name."""
    sizes = dict(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    config = transformers.Llama4TextConfig(**sizes, intermediate_size_mlp=24, head_dim=8, num_local_experts=2, pad_token_id=None)
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config)
    inputs = dict(input_ids=torch.randint(61, (2, 9)), use_cache=False)
    labels = torch.randint(61, (2, 9))
    whole = F.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(CausalLMLoss(model)(shift_labels=labels, **inputs), whole, rtol=1e-6, atol=0)


def test_a_head_with_further_layers_is_refused():
    """BERT's head has a dense layer and a norm before the output embedding; the loss would use the output embedding alone."""
    sizes = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=True))
    with pytest.raises(
        ValueError, match=r"BertLMHeadModel has cls\.predictions\.transform\.dense\.weight beside its output embedding"
    ):
        CausalLMLoss(model)


class Multiplied(transformers.LlamaForCausalLM):
    """Multiplies its logits in its own forward pass, as MuseGlimmer does."""

    def forward(self, **inputs):
        return super().forward(**inputs).logits * self.config.output_multiplier


class Unscaled(transformers.CohereForCausalLM):
    """Has Cohere's config but its own head, without the scale, as AyaVision does."""

    def forward(self, **inputs):
        return self.lm_head(self.model(**inputs)[0])


def test_a_scale_applies_only_if_the_forward_pass_uses_it():
    config = build().model.config
    config.output_multiplier = 0.25
    ids = torch.randint(61, (2, 9))
    multiplied = Multiplied(config)
    whole = F.cross_entropy(multiplied(input_ids=ids).flatten(0, 1), ids.flatten(), reduction="sum")
    torch.testing.assert_close(CausalLMLoss(multiplied)(shift_labels=ids, input_ids=ids), whole, rtol=1e-6, atol=0)
    unscaled = Unscaled(transformers.CohereConfig(**config.to_dict()))
    with pytest.raises(ValueError, match=r"logit_scale is 0\.0625 in the config, but Unscaled does not use it"):
        CausalLMLoss(unscaled)


class Tempered(transformers.LlamaForCausalLM):
    """Has a setting of its own, and a vocabulary that is padded."""

    def forward(self, **inputs):
        return (super().forward(**inputs).logits / self.config.temperature_of_logits)[..., : self.config.unpadded_vocab_size]


@pytest.mark.parametrize(
    "setting", [dict(temperature_of_logits=0.7), dict(unpadded_vocab_size=60)], ids=lambda given: next(iter(given))
)
def test_a_number_of_the_config_that_makes_logits_in_an_unknown_way_is_refused(setting):
    config = build().model.config
    vars(config).update(dict(temperature_of_logits=1.0, unpadded_vocab_size=61) | setting)
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name} is {value} in the config, and Tempered uses it where it makes its logits"):
        CausalLMLoss(Tempered(config))


class Kept(nn.Module):
    """A module in PEFT's `modules_to_save`: the frozen original, and the copies that adapters train."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.original_module = module.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(module.in_features, module.out_features, bias=False)})
        self.active_adapters, self.disable_adapters = ["default"], False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.original_module if self.disable_adapters else self.modules_to_save["default"])(x)


def test_an_output_embedding_that_is_trained_beside_adapters():
    model = build().model
    model.lm_head = Kept(model.lm_head)
    ids = torch.randint(61, (2, 9))
    run = CausalLMLoss(model)
    for model.lm_head.disable_adapters in (False, True):
        whole = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten(), reduction="sum")
        torch.testing.assert_close(run(shift_labels=ids, input_ids=ids), whole, rtol=1e-6, atol=0)
    lora = nn.Identity()
    lora.base_layer = nn.Linear(16, 61)
    model.lm_head = lora
    with pytest.raises(ValueError, match="LlamaForCausalLM has an adapter on its output embedding"):
        CausalLMLoss(model)


def test_losses_of_routers_are_not_left_out_silently():
    run = build()
    ids = torch.randint(61, (2, 9))
    run(shift_labels=ids, input_ids=ids, output_router_logits=False)
    run.model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits is True, but this loss is of the logits alone"):
        run(shift_labels=ids, input_ids=ids)


def test_a_z_loss_is_not_left_out_silently():
    """Bamba's, which its own head would add once a rank."""
    model = build().model
    model.z_loss_coefficient = 0.0
    CausalLMLoss(model)
    model.z_loss_coefficient = 0.5
    with pytest.raises(ValueError, match=r"z_loss_coefficient is 0\.5, but the z-loss is a mean over this rank's tokens"):
        CausalLMLoss(model)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False])
def test_the_fused_kernel_gives_the_chunked_loss(autocast):
    """Liger's kernel against chunks in fp64: its error is at most 2x that of chunks in its own dtype, and 3x in gradients."""
    pytest.importorskip("liger_kernel")
    from ringattn.training.causal_lm import Head, fused_token_loss

    torch.manual_seed(0)
    hidden = torch.randn(2, 777, 256, device="cuda", requires_grad=True)
    weight = (torch.randn(5003, 256, device="cuda") / 16).requires_grad_()
    labels = torch.randint(5003, (2, 777), device="cuda")
    labels[:, 100:300] = IGNORE
    head = Head(scale=0.5, softcap=20.0)

    def run(loss, dtype):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast and dtype == torch.float32):
            values = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
            value = loss(*values, labels, head=head)
        return value.double(), [g.double() for g in torch.autograd.grad(value, values)]

    exact, exact_gradients = run(token_loss, torch.float64)
    ours, ours_gradients = run(fused_token_loss, torch.float32)
    theirs, theirs_gradients = run(token_loss, torch.float32)
    assert abs(ours - exact) <= max(2 * abs(theirs - exact), 1e-3 if autocast else 1e-5 * exact)
    for own, other, truth in zip(ours_gradients, theirs_gradients, exact_gradients, strict=True):
        assert (own - truth).norm() <= 3 * (other - truth).norm() + 1e-6 * truth.norm()
