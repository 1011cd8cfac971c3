"""What belongs to a call of an attached model stays with it: when layers run again in the backward pass, when calls are nested, when one
is interrupted. Positions tell: a layout of one rank that holds the sequence in another order shows them without other ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def own_layouts(number: int, ranks: int) -> tuple[ra.Layout, ra.Mask | None, dict]:
    """The layout, the mask and the further arguments of one of several calls, of whole sequences."""
    bounds = torch.tensor([0, 5, N], dtype=torch.int32)
    return [
        (ra.zigzag(N, ranks), None, {}),
        (ra.balanced(ra.documents([5, 7]), N, ranks), None, dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)),
        (ra.contiguous(N, ranks), ra.sliding_window(3), {}),
    ][number]


def gradients_of_calls_with_layouts_of_their_own(group, checkpointed: bool) -> float:
    """How far the logits and the gradients of three calls are from those of models that were attached for each."""
    rank = group.rank()
    one, other = make(), make()
    worst, losses = 0.0, []
    attach(one, group=group)
    if checkpointed:
        one.gradient_checkpointing_enable({"use_reentrant": False})
    for number in range(3):
        layout, mask, further = own_layouts(number, group.size())
        ids = ra.shard(tokens(number), layout, rank)
        attach(other, layout=layout, mask=mask, group=group)
        wanted = other(input_ids=ids, **further).logits
        wanted.square().sum().backward()
        found = one(input_ids=ids, layout=layout, mask=mask, **further).logits
        losses.append(found.square().sum())
        worst = max(worst, float((found - wanted).abs().max()))
    # all backward passes after all forward passes
    sum(losses).backward()
    return max([worst, *(float((a.grad - b.grad).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_call_brings_its_layout(gloo, checkpointed):
    assert max(gloo.run(2, gradients_of_calls_with_layouts_of_their_own, checkpointed, timeout=60)) < 1e-10


def test_the_mask_of_attach_holds_for_calls_without_one():
    model, other = make(), make()
    attach(model, mask=ra.sliding_window(2))
    attach(other, layout=TURNED, mask=ra.sliding_window(2))
    assert torch.equal(model(input_ids=tokens(), layout=TURNED).logits, other(input_ids=tokens()).logits)
    attach(other, layout=TURNED, mask=ra.full())
    assert torch.equal(model(input_ids=tokens(), layout=TURNED, mask=ra.full()).logits, other(input_ids=tokens()).logits)
    # positions are those of the call's layout
    straight = ra.contiguous(N, 1)
    assert not torch.equal(model(input_ids=tokens(), layout=TURNED).logits, model(input_ids=tokens(), layout=straight).logits)


class Holder(nn.Module):
    """Holds an attached model, as a user's own module does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model(**batch).logits


def test_layouts_reach_models_inside_others_and_inner_models_follow():
    model, other = make(), make()
    attach(model)
    attach(other, layout=TURNED)
    wanted = other(input_ids=tokens()).logits
    assert torch.equal(Holder(model)(input_ids=tokens(), layout=TURNED), wanted)
    states = model.model(input_ids=tokens(), layout=TURNED).last_hidden_state
    assert torch.equal(model.lm_head(states), wanted)


REFUSED = {
    "none": ({}, "LlamaForCausalLM was attached without a layout, and is called without one"),
    "type": (dict(layout=N), "layout is 12, but must be a Layout"),
    "mask": (dict(layout=TURNED, mask=3), "mask is 3, but must be a Mask"),
    "ranks": (dict(layout=ra.zigzag(N, 2)), "layout is for 2 ranks, but the group has 1"),
    "tokens": (dict(layout=ra.contiguous(N + 1, 1)), "the input has 12 tokens, but rank 0 of contiguous"),
    "empty": (dict(layout=ra.Layout(0, ((),))), "leaves rank 0 without tokens"),
    "mask-too-long": (dict(layout=TURNED, mask=ra.documents([N + 1])), "needs at least 13 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_without_a_fitting_layout_are_refused(case):
    options, message = REFUSED[case]
    model = make()
    attach(model)
    with pytest.raises(ValueError, match=message):
        model(input_ids=tokens(), **options)
    assert model(input_ids=tokens(), layout=TURNED).logits.isfinite().all()


def test_a_layout_for_all_calls_leaves_none_to_a_call():
    model = make()
    attach(model, layout=TURNED)
    with pytest.raises(ValueError, match=r"but was attached with custom\(seq_len=12, world_size=1\) for all calls"):
        model(input_ids=tokens(), layout=ra.contiguous(N, 1))
    attach(model)
    with pytest.raises(ValueError, match="is called without one"):
        model(input_ids=tokens())


def test_models_with_a_layout_of_their_own_need_one_layout(monkeypatch):
    model = make()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids=None, layout=None: forward(input_ids))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has arguments of its own called \['layout'\]"):
        attach(model)


def test_a_layer_by_itself_knows_no_layout():
    model = make()
    attach(model)
    states, positions = torch.zeros(1, N, 16).double(), torch.arange(N)[None]
    with pytest.raises(ValueError, match="a part of it runs where the call's is unknown"):
        model.model.layers[0](states, position_embeddings=model.model.rotary_emb(states, positions))


VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=4)
SEEING = {
    "Gemma3": dict(
        text_config=dict(head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
        vision_config=dict(**VISION, image_size=8, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_index=30,
    ),
    "Gemma4": dict(
        text_config=dict(
            head_dim=8,
            global_head_dim=16,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
        ),
        vision_config=dict(**VISION, num_key_value_heads=2, head_dim=8),
        image_token_id=30,
    ),
}


def make_seeing(kind: str) -> nn.Module:
    """A model whose holder makes the masks of the language model within, with norms in fp64: transformers' own round to fp32."""
    given = {**SEEING[kind], "text_config": {**SIZES, **SEEING[kind]["text_config"]}}
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**given))
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x: F.rms_norm(x, x.shape[-1:])
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model.double().eval()


def texts_of_a_model_that_sees(group, kind: str) -> float:
    """How far logits and gradients of texts are from those of one process: as they are, padded on the right, and packed."""
    whole, rank, layout, worst = make_seeing(kind), group.rank(), ra.zigzag(N, 2), 0.0
    model = copy.deepcopy(whole)
    attach(model.model.language_model, layout=layout, group=group)
    ids, mask, lengths = torch.cat([tokens(), tokens(2)]).clamp(max=29), torch.ones(2, N, dtype=torch.int64), [5, N - 5]
    mask[1, 9:] = 0
    packed = torch.cat([torch.arange(n) for n in lengths])[None]
    bounds = torch.tensor([0, 5, N])
    cases = [
        (dict(input_ids=ids), dict(position_ids=torch.arange(N)[None]), {}),
        (dict(input_ids=ids, attention_mask=mask), dict(position_ids=torch.arange(N)[None]), {}),
        (dict(input_ids=ids[:1], position_ids=packed), {}, dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)),
    ]
    for batch, positions, extra in cases:
        live = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[..., None]
        expected, shard = whole(**batch).logits * live, {n: ra.shard(x, layout, rank) for n, x in {**batch, **positions}.items()}
        found = model(**shard, **extra).logits * ra.shard(live, layout, rank)
        worst = max(worst, float((found - ra.shard(expected, layout, rank)).detach().abs().max()))
        expected.square().sum().backward()
        found.square().sum().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            dist.all_reduce(mine.grad, group=group)
            worst = max(worst, float((mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(min=1.0)))
    return worst


@pytest.mark.parametrize("kind", [kind for kind in SEEING if hasattr(transformers, f"{kind}TextConfig")])
def test_the_language_model_within_one_that_makes_its_masks(gloo, kind):
    assert max(gloo.run(2, texts_of_a_model_that_sees, kind, timeout=60)) < 1e-10
