"""What belongs to a call of an attached model stays with it: when layers run again in the backward pass, when calls are nested, when one
is interrupted. Positions tell: a layout of one rank that holds the sequence in another order shows them without other ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import ringattn as ra
from ringattn.integrations.huggingface import attach, detach

N = 12
TURNED = ra.Layout(N, spans=((ra.Span(5, N - 5), ra.Span(0, 5)),))
SIZES = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False)).double().train()


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(31, (1, N), generator=torch.Generator().manual_seed(seed))


def gradients_of_two_layouts(group, reentrant: bool) -> float:
    """Two forward passes with different layouts, then one backward pass: how far gradients are from those of one process."""
    whole, rank = make(), group.rank()
    model = copy.deepcopy(whole)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    (whole(input_ids=tokens()).logits.square().sum() - whole(input_ids=tokens(2)).logits.sum()).backward()
    losses = []
    for layout, ids in ((ra.zigzag(N, 2), tokens()), (ra.contiguous(N, 2), tokens(2))):
        attach(model, layout=layout, group=group)
        losses.append(model(input_ids=ra.shard(ids, layout, rank)).logits)
    (losses[0].square().sum() - losses[1].sum()).backward()
    worst = 0.0
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(mine.grad, group=group)
        worst = max(worst, float((mine.grad - theirs.grad).abs().max()))
    return worst


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_keep_the_layout_of_their_forward_pass(gloo, reentrant):
    assert max(gloo.run(2, gradients_of_two_layouts, reentrant, timeout=60)) < 1e-10


def test_detaching_before_the_backward_pass_is_refused():
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    attach(model, layout=TURNED)
    loss = model(input_ids=tokens()).logits.sum()
    detach(model)
    with pytest.raises(ValueError, match=r"a layer runs again in the backward pass after detach: call backward before detach"):
        loss.backward()


def test_reentrant_layers_without_their_mask_are_refused():
    model = make()
    attach(model, layout=TURNED)
    attention = model.model.layers[0].self_attn

    def run(x):
        return attention(x, position_embeddings=model.model.rotary_emb(x, torch.arange(N)[None]), attention_mask=None)[0]

    out = torch.utils.checkpoint.checkpoint(run, torch.randn(1, N, 16).double().requires_grad_(), use_reentrant=True)
    with pytest.raises(ValueError, match="LlamaAttention runs again in the backward pass under reentrant activation checkpointing"):
        out.sum().backward()


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
def test_a_model_called_within_another_ones_forward_has_its_own_positions(fails):
    outer, inner, ids = make(), make(3), tokens()
    for model in (outer, inner):
        attach(model, layout=TURNED)
    alone = outer(input_ids=ids).logits, inner(input_ids=ids).logits
    seen = []

    def call(module, args):
        seen.append(inner(input_ids=ids).logits)
        if fails:
            with pytest.raises(ValueError, match="the input has 1 tokens"):
                inner(input_ids=ids[:, :1])

    handle = outer.model.layers[0].register_forward_pre_hook(call)
    torch.testing.assert_close((outer(input_ids=ids).logits, seen[0]), alone, rtol=0, atol=0)
    handle.remove()
    torch.testing.assert_close((outer(input_ids=ids).logits, inner(input_ids=ids).logits), alone, rtol=0, atol=0)


def test_an_interrupted_call_leaves_nothing_behind():
    """Torch runs no hooks after a KeyboardInterrupt. Its traceback keeps the call's frames alive here, as in a notebook."""
    model, other, ids = make(), make(3), tokens()
    for each in (model, other):
        attach(each, layout=TURNED)
    alone = other(input_ids=ids).logits, model.model(input_ids=ids).last_hidden_state

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = model.model.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        model(input_ids=ids)
    handle.remove()
    assert raised.tb is not None
    torch.testing.assert_close((other(input_ids=ids).logits, model.model(input_ids=ids).last_hidden_state), alone, rtol=0, atol=0)


def test_a_part_that_was_attached_by_itself_later_is_refused():
    model = make()
    attach(model, layout=TURNED)
    attach(model.model, layout=ra.zigzag(N, 1))
    with pytest.raises(ValueError, match="LlamaModel was attached by itself after LlamaForCausalLM, which it is a part of"):
        model(input_ids=tokens())
    model.model(input_ids=tokens())
