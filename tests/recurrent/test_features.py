"""`ra.favor_features`: softmax attention approximated by random features, on shards as in one process."""

import pytest
import torch
import torch.nn.functional as F

import ringattn as ra

N, D, D_V = 40, 16, 8


def inputs():
    """q, k, v (1, N, 2, d) in fp64, short; keys grow with their position, so that those of a rank have another maximum."""
    q, k, v = torch.randn(3, 1, N, 2, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    return 0.5 * q, k * torch.linspace(0.1, 0.75, N)[:, None, None], v[..., :D_V]


def attention(q, k, v, projection, layout=None, group=None):
    q, k = ra.favor_features(q, projection, is_query=True), ra.favor_features(k, projection)
    wide = torch.cat([v, F.pad(v.new_ones(*v.shape[:3], 1), (0, 15))], dim=3)
    out = ra.linear_attention(q, k, wide, scale=1.0, layout=layout, group=group)
    return out[..., :D_V] / out[..., D_V : D_V + 1]


def test_products_of_features_are_exponentials_on_average():
    q, k, _ = inputs()
    wanted = (torch.einsum("bshd,bthd->bhst", q, k) / D**0.5).exp()
    found = torch.zeros_like(wanted)
    for seed in range(200):
        projection = ra.favor_projection(D, 64, seed=seed)
        found += torch.einsum("bshd,bthd->bhst", *(ra.favor_features(x, projection) for x in (q, k))) / 200
    assert (found / wanted - 1).abs().mean() < 0.02
    assert (found / wanted - 1).mean().abs() < 0.005


def test_more_features_are_closer_to_softmax_attention():
    q, k, v = inputs()
    wanted = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    errors = {}
    for features in (16, 64, 256):
        seeds = range(4096 // features)  # as many directions of each kind
        found = (attention(q, k, v, ra.favor_projection(D, features, seed=seed)) for seed in seeds)
        errors[features] = torch.stack([(out - wanted).square().mean() for out in found]).mean().sqrt().item()
    assert errors[256] < 0.65 * errors[64] < 0.65**2 * errors[16]
    assert errors[256] < 0.08 * wanted.square().mean().sqrt()


def test_blocks_are_orthogonal_with_the_lengths_of_normal_vectors():
    projection = torch.cat([ra.favor_projection(8, 512, seed=seed) for seed in range(8)]).double()
    products = projection[:8] @ projection[:8].T
    assert (products - products.diagonal().diag()).abs().max() < 1e-5
    assert (projection[8:16] @ projection[:8].T).abs().max() > 0.1, "another block has other directions"
    assert abs(projection.square().sum(1).mean().item() / 8 - 1) < 0.05
    assert projection.mean(0).abs().max() < 0.1


def on_shards(group):
    torch.manual_seed(group.rank())
    state = torch.get_rng_state()
    projection = ra.favor_projection(D, 24, seed=3)
    assert torch.get_rng_state().equal(state), "ranks would draw other dropout afterwards"
    layout = ra.zigzag(N, group.size())
    shards = [ra.shard(x, layout, group.rank()).requires_grad_() for x in inputs()]
    return projection, results(shards, projection, layout, group)


def results(tensors, *args):
    """out and the gradients of q, k and v."""
    out = attention(*tensors, *args)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


def test_shards_equal_one_process_with_one_projection(gloo):
    wanted = results([x.requires_grad_() for x in inputs()], ra.favor_projection(D, 24, seed=3))
    for rank, (projection, found) in enumerate(gloo.run(2, on_shards)):
        assert projection.equal(ra.favor_projection(D, 24, seed=3))
        for x, whole in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, ra.shard(whole, ra.zigzag(N, 2), rank), rtol=1e-9, atol=1e-9)
    assert not projection.equal(ra.favor_projection(D, 24, seed=4))


def test_no_row_depends_on_others_and_queries_cannot_overflow():
    q = 200 * inputs()[0].float()
    projection = ra.favor_projection(D, 24)
    features = ra.favor_features(q, projection, is_query=True)
    assert features.isfinite().all()
    torch.testing.assert_close(features.amax(3), torch.full((1, N, 2), 24**-0.5))
    assert ra.favor_features(q[:, 7:9], projection, is_query=True).equal(features[:, 7:9])
    assert ra.favor_features(q.bfloat16(), projection, is_query=True).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: ra.favor_features(x.half(), ra.favor_projection(4, 8)), "x has dtype torch.float16, but must be bfloat16"),
        (lambda x: ra.favor_features(x[0], ra.favor_projection(4, 8)), r"x has shape \(3, 2, 4\), but must be \(batch"),
        (lambda x: ra.favor_features(x[..., :0], torch.ones(8, 0)), "with a head_dim of at least 1"),
        (
            lambda x: ra.favor_features(x, ra.favor_projection(5, 8)),
            r"projection has shape \(8, 5\) .* but must be \(features, 4\)",
        ),
        (lambda x: ra.favor_features(x, torch.ones(0, 4)), r"projection has shape \(0, 4\)"),
        (lambda x: ra.favor_features(x, ra.favor_projection(4, 8), scale=-1.0), "scale is -1.0, but must be at least 0"),
        (lambda x: ra.favor_features(x, ra.favor_projection(4, 8), is_query=1), "is_query is 1, but must be a bool"),
        (lambda x: ra.favor_projection(4, 0), "features is 0, but must be at least 1"),
        (lambda x: ra.favor_projection(4, 8, seed=0.5), "seed is 0.5, but must be an integer"),
    ],
    ids=["fp16", "three dimensions", "no head_dim", "another head_dim", "no features", "scale", "a flag", "features", "seed"],
)
def test_bad_input_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run(torch.ones(1, 3, 2, 4))
