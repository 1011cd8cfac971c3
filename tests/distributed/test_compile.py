"""Compiled attention over gloo: agreement, exchanges and gradients happen inside the operators."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.runtime import passes
from tests.distributed import dense

N = 37


def compiled_gradients(group, mesh, layout, mask):
    """The greatest summed difference of this rank's compiled out and gradients from the reference's."""
    rank = dist.get_rank(group)
    held = ra.default_layout(mask, N, dist.get_world_size(group)) if layout is None else layout
    q, k, v, dout, _ = dense.inputs(N, 0)
    ring = DeviceMesh.from_group(group, "cpu") if mesh else group

    def attention(q, k, v):
        return checkpoint(
            lambda q, k, v: ra.ring_attention(2 * q, k, v, layout=layout, mask=mask, group=ring),
            q, k, v, use_reentrant=False, context_fn=ra.checkpoint_contexts,
        )  # fmt: skip

    torch.compiler.reset()
    leaves = [ra.shard(x, held, rank).requires_grad_() for x in (q, k, v)]
    out = torch.compile(attention, fullgraph=True, backend="aot_eager")(*leaves)
    got = out, *torch.autograd.grad(out, leaves, ra.shard(dout, held, rank))
    ref = [x.requires_grad_() for x in (q, k, v)]
    out = ra.reference.attention(2 * ref[0], *ref[1:], mask=mask)
    wanted = out, *torch.autograd.grad(out, ref, dout)
    return max(float((x - ra.shard(y, held, rank)).abs().sum()) for x, y in zip(got, wanted))


AXES = "ring", "heads"
HYBRIDS = {
    "mesh": lambda mesh: mesh,
    "hybrid": lambda mesh: ra.hybrid(mesh, *AXES),
    # the hybrid's axes, too, are found by their names
    "a mesh of other names": lambda mesh: ra.hybrid(mesh, "up", "across"),
}


def compiled_grid(group, name, made_within):
    """The launches of each pass by the whole graph on a 2 x 2 grid, with the checkpoint policy, and the greatest summed difference of
    this rank's out, lse and gradients from the reference's. Ranks 4 to 7 only take part in making groups."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("up", "across") if "other" in name else AXES)
    rank = dist.get_rank(group)
    if rank >= 4:
        return None
    layout = ra.Layout(N, ((ra.Span(20, 17),), (), (ra.Span(1, 19),), (ra.Span(0, 1),)))
    mask = ra.dilated_window((4, 2), 3) | ra.sliding_window(2)
    q, k, v, dout, _ = dense.inputs(N, 0)
    ready = None if made_within else HYBRIDS[name](mesh)

    def block(q, k, v):
        grid = HYBRIDS[name](mesh) if made_within else ready
        out, stats = ra.ring_attention(2 * q, k, v, layout=layout, mask=mask, group=grid, return_stats=True)
        return out, stats.lse

    def attention(*inputs):
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=ra.checkpoint_contexts)

    torch.compiler.reset()
    leaves = [ra.shard(x, layout, rank).requires_grad_() for x in (q, k, v)]
    with (
        patch.object(passes, "forward", side_effect=passes.forward) as forward,
        patch.object(passes, "backward", side_effect=passes.backward) as backward,
    ):
        out, lse = torch.compile(attention, fullgraph=True, backend="aot_eager")(*leaves)
        loss = (out * ra.shard(dout, layout, rank)).sum() + lse.sin().sum()
        got = out, lse, *torch.autograd.grad(loss, leaves)
    ref = [x.requires_grad_() for x in (q, k, v)]
    out, stats = ra.reference.attention(2 * ref[0], *ref[1:], mask=mask, return_stats=True)
    lse = stats.lse
    wanted = out, lse, *torch.autograd.grad((out * dout).sum() + lse.sin().sum(), ref)
    pairs = [(x, ra.shard(y, layout, rank, dim=2 if y is lse else 1)) for x, y in zip(got, wanted, strict=True)]
    return forward.call_count, backward.call_count, max(float((x - y).abs().sum()) for x, y in pairs)


def disagree(group):
    """The error of a compiled call with another mask on rank 1, and whether the next call works."""
    rank = dist.get_rank(group)
    q, k, v = (ra.shard(x, ra.zigzag(N, 3), rank) for x in dense.inputs(N, 0)[:3])
    run = torch.compile(
        lambda q, k, v, mask: ra.ring_attention(q, k, v, mask=mask, group=group), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ValueError) as caught:
        run(q, k, v, ra.prefix(5) if rank == 1 else ra.causal())
    return str(caught.value), run(q, k, v, ra.causal()).shape == (*q.shape[:3], v.shape[3])


def compiled_on_gpus(group, on_grid):
    """Whether torch.compile, with its default backend and no graph break, gives the bits of eager mode for this rank's out and
    gradients. All GPUs form a ring, or (on_grid) a ring of pairs."""
    where = init_device_mesh("cuda", (group.size() // 2, 2), mesh_dim_names=AXES) if on_grid else group
    rank = ra.hybrid(where).rank if on_grid else group.rank()
    layout = ra.zigzag(1000, group.size())
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (1, 1000, 4, 64), (1, 1000, 2, 64), (1, 1000, 2, 64), (1, 1000, 4, 64)
    whole = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    *leaves, dout = (ra.shard(x, layout, rank).requires_grad_() for x in whole)

    def attention(q, k, v):
        # doubling and halving are exact in any precision of fused code
        return ra.ring_attention(2 * q, k, v, layout=layout, mask=ra.sliding_window(300), group=where) / 2

    torch.compiler.reset()
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for run in (attention, torch.compile(attention, fullgraph=True)):
        out = run(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, dout)])
    torch.use_deterministic_algorithms(False)
    return [torch.equal(x, y) for x, y in zip(*found, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("on_grid", [False, True], ids=["ring", "grid"])
def test_compiled_attention_on_gpus_has_the_bits_of_eager_mode(nccl, on_grid):
    count = nccl.size
    if on_grid and count % 2:
        pytest.skip("needs an even number of GPUs")
    assert nccl.run(count, compiled_on_gpus, on_grid, timeout=120) == [[True] * 4] * count


@pytest.mark.parametrize(
    ("world_size", "mesh", "layout", "mask"),
    [
        (3, False, None, ra.causal()),
        pytest.param(2, True, ra.striped(N, 2), ra.sliding_window(9), marks=pytest.mark.thorough),
        (3, False, ra.Layout(N, ((ra.Span(20, 17),), (), (ra.Span(0, 20),))), ra.dilated_window((4, 2), 3)),
    ],
    ids=["default layout", "mesh", "an empty shard and another order"],
)
def test_compiled_attention_is_exact_on_every_rank(gloo, world_size, mesh, layout, mask):
    assert max(gloo.run(world_size, compiled_gradients, mesh, layout, mask, timeout=120)) < 1e-12


@pytest.mark.parametrize(
    ("name", "made_within"),
    [
        ("mesh", False),
        ("a mesh of other names", True),
        *(pytest.param("hybrid", within, marks=pytest.mark.thorough) for within in (False, True)),
    ],
)
def test_a_compiled_grid_is_exact_and_runs_once(gloo, name, made_within):
    for forwards, backwards, difference in gloo.run(8, compiled_grid, name, made_within, timeout=120)[:4]:
        assert (forwards, backwards) == (1, 1)
        assert difference < 1e-12


def test_a_disagreement_in_compiled_code_is_an_error_on_every_rank(gloo):
    for message, works in gloo.run(3, disagree, timeout=120):
        assert "mask is prefix(5)" in message
        assert "on rank 1, but causal()" in message
        assert works


def compiled_cross_attention(group):
    """The greatest difference of two compiled calls with keys of their own layout, which differ in their offset, and of gradients."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    layout, kv_layout = ra.zigzag(7, size), ra.striped(12, size)
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, h, 4, generator=draw, dtype=torch.float64).requires_grad_() for n, h in ((7, 4), (12, 2), (12, 2))]

    def attention(q, k, v):
        options = dict(layout=layout, kv_layout=kv_layout, group=group)
        return ra.ring_attention(q, k, v, q_offset=5, **options) + ra.ring_attention(q, k, v, q_offset=1, **options)

    torch.compiler.reset()
    leaves = [ra.shard(x.detach(), one, rank).requires_grad_() for x, one in zip(whole, (layout, kv_layout, kv_layout))]
    out = torch.compile(attention, fullgraph=True, backend="aot_eager")(*leaves)
    got = out, *torch.autograd.grad(out.sum(), leaves)
    out = sum(ra.reference.attention(*whole, q_offset=offset) for offset in (5, 1))
    wanted = out, *torch.autograd.grad(out.sum(), whole)
    parts = zip(got, wanted, (layout, layout, kv_layout, kv_layout))
    return max(dense.difference(x.detach(), ra.shard(y.detach(), one, rank)) for x, y, one in parts)


def test_keys_of_their_own_layout(gloo):
    assert max(gloo.run(2, compiled_cross_attention)) < 1e-10
