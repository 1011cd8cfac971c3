"""torch's scaled_dot_product_attention around a ring: the same results as over the whole sequence, or a refusal that says what to do."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

import ringattn as ra
from ringattn.integrations.sdpa import ring_sdpa, scaled_dot_product_attention

N = 21


def whole(heads=(4, 2)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, h, N, 4, dtype=torch.float64, generator=generator) for h in (heads[0], heads[1], heads[1])]


def compared(group, how, is_causal, striped):
    """The greatest difference of this rank's out and gradients from torch's own over the whole sequence."""
    rank, size = group.rank(), group.size()
    mask = ra.causal() if is_causal else ra.full()
    layout = ra.striped(N, size) if striped else ra.default_layout(mask, N, size)
    given = dict(is_causal=is_causal, scale=0.3, enable_gqa=True)
    leaves = [x.requires_grad_() for x in whole()]
    mine = [ra.shard(x.detach(), layout, rank, 2).requires_grad_() for x in leaves]
    wanted = F.scaled_dot_product_attention(*leaves, **given)
    options = dict(layout=layout if striped else None, group=group)
    if how == "function":
        found = scaled_dot_product_attention(*mine, **given, **options)
    else:
        with ring_sdpa(**options):
            found = F.scaled_dot_product_attention(*mine, **given)
    wanted.square().sum().backward()
    found.square().sum().backward()
    pairs = [(found, wanted), *((x.grad, y.grad) for x, y in zip(mine, leaves))]
    return max(float((x - ra.shard(y, layout, rank, 2)).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("how", ["function", "block"])
@pytest.mark.parametrize(("is_causal", "striped"), [(True, False), (False, False), (True, True)])
def test_a_ring_gives_the_results_of_torch(gloo, how, is_causal, striped):
    assert max(gloo.run(3, compared, how, is_causal, striped)) < 1e-10


def test_a_mask_and_a_score_are_honoured():
    q, k, v = whole((4, 4))
    live, score = ra.sliding_window(3, 3), ra.score(softcap=2.0, dropout=0.2, seed=3)
    wanted = ra.reference.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=live & ra.causal(), score=score).transpose(1, 2)
    assert torch.allclose(scaled_dot_product_attention(q, k, v, is_causal=True, mask=live, score=score), wanted)
    with ring_sdpa(mask=live, score=ra.score(softcap=2.0, seed=3)):
        assert torch.allclose(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True), wanted)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, is_causal=True), wanted)


REFUSED = {
    "bool mask": (
        dict(attn_mask=torch.ones(N, N, dtype=torch.bool)),
        "attn_mask is given, but around a ring what is live is said over",
    ),
    "bias": (dict(attn_mask=torch.zeros(N, N)), "attn_mask of torch.float32 is added to scores, but ringattn takes no dense bias"),
    "heads": (dict(enable_gqa=False), "key has 2 heads and query has 4: pass enable_gqa=True"),
    "dropout": (dict(dropout_p=1.5), "dropout is 1.5, but must be less than 1"),
    "dimensions": (
        dict(query=torch.zeros(4, N, 4), key=torch.zeros(2, N, 4), value=torch.zeros(2, N, 4)),
        "query has 3 dimensions, shape (4, 21, 4), but around a ring must have 4: (batch, heads, tokens, head_dim)",
    ),
    "no tensor": (dict(key=None), "key is None, but must be a tensor (batch, heads, tokens, head_dim)"),
    "mask": (dict(mask=torch.ones(N, N)), "mask is a tensor of shape (21, 21), but must be a Mask"),
}


def refused(group, change, on):
    query, key, value = whole()
    given = dict(query=query, key=key, value=value, enable_gqa=True, group=group) | (change if group.rank() == on else {})
    with pytest.raises(ValueError) as error:
        scaled_dot_product_attention(**given)
    return str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_reach_every_rank(gloo, name):
    change, message = REFUSED[name]
    assert all(message in error for error in gloo.run(2, refused, change, 1))


def test_the_block_refuses_torch_multihead_attention():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 5, 8)
    with ring_sdpa(), pytest.raises(ValueError, match=r"torch.nn.MultiheadAttention is called within ring_sdpa"):
        layer(x, x, x)
    layer(x, x, x)


def test_under_autocast_attention_runs_in_the_low_precision():
    q, k, v = (x.float() for x in whole((4, 4)))
    mixed = q, k, v.bfloat16()  # as where norms and rotary embeddings leave q and k in fp32
    with torch.autocast("cpu", torch.bfloat16):
        wanted = F.scaled_dot_product_attention(*mixed, is_causal=True)
        with ring_sdpa():
            found = F.scaled_dot_product_attention(*mixed, is_causal=True)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02)


def attend(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def attend_in_a_block(x):
    with ring_sdpa(score=ra.score(softcap=2.0)):
        return attend(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_in_a_block_is_an_error_and_around_it_is_right(reentrant):
    x, _, _ = whole()
    x.requires_grad_()
    with ring_sdpa(score=ra.score(softcap=2.0)), torch.no_grad():
        assert torch.equal(attend(x), attend_in_a_block(x))  # what has no gradients is not checkpointed
    error, message = (ValueError, "reentrant activation checkpointing") if reentrant else (CheckpointError, "different number")
    with pytest.raises(error, match=message), ring_sdpa(score=ra.score(softcap=2.0)):
        checkpoint(attend, x, use_reentrant=reentrant).sum().backward()
    wanted = torch.autograd.grad(attend_in_a_block(x).square().sum(), x)[0]
    x.grad = None
    checkpoint(attend_in_a_block, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, wanted)


def test_compiled_calls_give_the_same():
    q, k, v = whole((4, 4))
    live = ra.sliding_window(3)
    given = dict(mask=live), dict(is_causal=True), dict(mask=live, is_causal=True)
    for options in given:
        compiled = torch.compile(lambda *qkv, options=options: scaled_dot_product_attention(*qkv, **options), backend="eager")
        torch.testing.assert_close(compiled(q, k, v), scaled_dot_product_attention(q, k, v, **options))
    torch.compiler.reset()


def test_the_block_checks_its_arguments():
    with pytest.raises(ValueError, match="layout is 3, but must be a Layout"):
        ring_sdpa(layout=3)
