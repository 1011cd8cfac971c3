"""`substitute_hf_flash_attn`: models of transformers on chunks of packed documents give the results of each document by itself."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ringattn.integrations.ring_flash_attn.adapters.hf_adapter import (  # noqa: E402
    DATA_PARAMS,
    flash_attention_forward,
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
    use_ring_attn,
)

LENGTHS = (5, 8, 3)
SIZES = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def model_of(kind):
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=3)).double()
    sizes = SIZES | dict(head_dim=4, num_local_experts=2, num_experts_per_tok=1)
    if kind == "gpt_oss":
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, sliding_window=4)).double()
        model.set_experts_implementation("eager")
        return model
    config = transformers.Gemma2Config(**SIZES, head_dim=4, sliding_window=4, attn_logit_softcapping=2.0)
    return transformers.Gemma2ForCausalLM(config).double()


def set_attention(model, name):
    """As from_pretrained does, but without a look for the package flash_attn."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name


def batch_of(rank=0, size=1):
    """This rank's chunk of ids and positions, and the bounds of the whole batch."""
    ids = torch.randint(31, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return ids.chunk(size, 1)[rank], positions.chunk(size, 1)[rank], bounds


def trained(group, kind, name):
    """The greatest difference of this rank's logits, and of the sum of all ranks' gradients, from those of single documents."""
    rank, size = group.rank(), group.size()
    model = model_of(kind)
    ids, _, bounds = batch_of()
    weight = torch.randn(1, ids.shape[1], 31, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    alone = copy.deepcopy(model)
    set_attention(alone, "eager")
    logits = torch.cat([alone(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)
    (logits * weight).sum().backward()
    substitute_hf_flash_attn(group, heads_k_stride=1)
    set_attention(model, name)
    update_ring_flash_attn_params(bounds, group)
    ids, positions, _ = batch_of(rank, size)
    found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    (found * weight.chunk(size, 1)[rank]).sum().backward()
    worst = float((found - logits.chunk(size, 1)[rank]).abs().max())
    for x, y in zip(model.parameters(), alone.parameters(), strict=True):
        torch.distributed.all_reduce(x.grad, group=group)
        worst = max(worst, float((x.grad - y.grad).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        ("llama", "flash_attention_2", 2),
        ("llama", "ring_packed", 4),
        ("mistral", "ring_packed", 2),
        ("gemma2", "ring_packed", 2),
        ("gpt_oss", "ring_packed", 2),
    ],
)
@pytest.mark.some(2)
def test_packed_chunks_are_single_documents(gloo, kind, name, size):
    found = gloo.run(size, trained, kind, name)
    assert max(found) < 1e-4, found  # the models' norms and rotary embeddings are in fp32


def refused(group, how, on):
    """The error of this rank, where the rank `on` calls in a way that cannot be honoured."""
    rank, size = group.rank(), group.size()
    model = model_of("llama")
    substitute_hf_flash_attn(group, heads_k_stride=1)
    set_attention(model, "flash_attention_2")
    ids, positions, bounds = batch_of(rank, size)
    given = dict(input_ids=ids, position_ids=positions, use_cache=False)
    if how != "no update":
        update_ring_flash_attn_params(bounds, group)
    if rank == on:
        if how == "padding":
            given["attention_mask"] = torch.tensor([[0] + [1] * (ids.shape[1] - 1)])
        elif how == "positions":
            given.pop("position_ids")
        elif how == "rows":
            given |= dict(input_ids=ids.expand(2, -1), position_ids=positions.expand(2, -1))
        elif how == "tokens":
            given |= dict(input_ids=ids[:, 1:], position_ids=positions[:, 1:])
        elif how == "option":
            given["cu_seq_lens_q"] = bounds
    with pytest.raises(ValueError) as error:
        model(**given)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "message"),
    {
        "no update": "no documents are known: call update_ring_flash_attn_params",
        "padding": "attention_mask is given, or hides padding",
        "positions": "position_ids neither restart at each document nor count from the start",
        "rows": "the batch has 2 rows, but documents are packed into one row",
        "tokens": "this rank has 7 tokens, but cu_seqlens ends with 16, 8 for each of 2 ranks",
        "option": "cu_seq_lens_q is a tensor of shape (4,), but substitute_hf_flash_attn does not know",
    }.items(),
)
def test_refusals_reach_every_rank(gloo, how, message):
    assert all(message in error for error in gloo.run(2, refused, how, 1))


def refused_updates(group):
    from transformers import AttentionInterface

    before = dict(AttentionInterface._global_mapping)
    try:
        for name in ("flash_attention_2", "ring_packed"):
            AttentionInterface._global_mapping.pop(name, None)
        with pytest.raises(ValueError, match="nothing is substituted"):
            use_ring_attn(True)
        # programs with attention of their own read the arguments
        update_ring_flash_attn_params(torch.tensor([0, 4]), group)
        assert DATA_PARAMS["local_k_slice"] == slice(0, 2 * group.rank() + 2)
        with pytest.raises(ValueError, match="heads_k_stride is 0, but must be at least 1"):
            substitute_hf_flash_attn(group, 0)
        substitute_hf_flash_attn(group, 1)
        with pytest.raises(ValueError, match="must start with 0"):
            update_ring_flash_attn_params(torch.tensor([1, 4]), group)
        with pytest.raises(ValueError, match="which 2 ranks do not divide"):
            update_ring_flash_attn_params(torch.tensor([0, 5]), group)
        if not transformers.utils.is_flash_attn_2_available():
            with pytest.raises(ValueError, match="without the package flash_attn there is no attention"):
                use_ring_attn(False)
        with pytest.raises(ValueError, match="process_group is not that of substitute_hf_flash_attn"):
            update_ring_flash_attn_params(torch.tensor([0, 4]), None)  # all ranks of the tests
    finally:
        AttentionInterface._global_mapping.update(before)


def test_update_refuses_what_does_not_fit(gloo):
    gloo.run(2, refused_updates)


def switched(group):
    """What a call of the substituted attention does while the ring is on, off, and on again."""
    from transformers import AttentionInterface

    registered = AttentionInterface._global_mapping
    before = dict(registered)
    try:
        registered["flash_attention_2"] = lambda module, query, *tensors, **options: ("alone", sorted(options))
        substitute_hf_flash_attn(group, 1)
        substitute_hf_flash_attn(group, 1)
        update_ring_flash_attn_params(torch.tensor([0, 3, 8]), group)
        x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
        module = torch.nn.Linear(1, 1)
        found = [flash_attention_forward(module, x, x, x, None, scaling=0.5)[0]]
        registered["flash_attention_2"].is_on = False  # as use_ring_attn(False) sets where the package flash_attn is
        found.append(flash_attention_forward(module, x, x, x, None, scaling=0.5, is_causal=True))
        use_ring_attn(True)
        found.append(flash_attention_forward(module, x, x, x, None, scaling=0.5)[0])
        return found
    finally:
        registered.clear()
        registered.update(before)


def test_the_ring_is_switched_off_and_on(gloo):
    for first, off, again in gloo.run(2, switched):
        assert torch.equal(first, again)
        assert off == ("alone", ["dropout", "is_causal", "scaling"])
