"""Errors and bits where they are most at risk: many layers, long offsets, window edges on shard edges, ranks that run at any pace."""

from __future__ import annotations

import contextlib
import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import ringattn as ra
from ringattn.device import local
from ringattn.geometry import plan as plan_module
from ringattn.transport import ProcessGroupTransport, run_ranks
from ringattn.transport.loopback import LoopbackTransport
from tests.transport.simulated import SimulatedTransport, World
from tests.transport.test_staged import policy

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = (ra.ring(), ra.gather(), ra.waves(1), ra.double_ring(2))


def whole(seq_len, dtype, h=2, hk=1, d=8, seed=0):
    """q, k, v and dout of a whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, seq_len, n, d, dtype=torch.float64, generator=generator).to(dtype) for n in (h, hk, hk, h)]


def step(tensors, layout, group, rank, mask=None, schedule=None):
    """A rank's out, row_max, row_sum, dq, dk, dv."""
    *leaves, dout = (ra.shard(x, layout, rank) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out, stats = ra.ring_attention(*leaves, layout=layout, mask=mask, group=group, schedule=schedule, return_stats=True)
    return [out.detach(), stats.row_max, stats.row_sum.detach(), *torch.autograd.grad(out, leaves, dout)]


# many layers


def gradient_norm(x, weights, layout, group, rank):
    """A rank's part of the gradient of each residual layer's weights; the loss is the sum of squares of the output."""
    x = ra.shard(x, layout, rank)
    leaves = [w.detach().requires_grad_() for w in weights]
    for w in leaves:
        q, k, v = (torch.nn.functional.rms_norm(x, x.shape[-1:]) @ w[:, :48]).unflatten(-1, (6, 8)).split(2, dim=2)
        x = x + ra.ring_attention(q, k, v, layout=layout, group=group).flatten(2) @ w[:, 48:].T
    return torch.autograd.grad(x.float().square().sum(), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.thorough
def test_the_gradient_norm_of_64_layers_is_that_of_one_rank(dtype):
    torch.manual_seed(0)
    x = torch.randn(1, 63, 16).to(dtype)
    weights = [(torch.randn(16, 64) / 4).to(dtype) for _ in range(64)]
    norms = []
    for world_size in (1, 4):
        layout = ra.zigzag(63, world_size)
        ranks = run_ranks(world_size, lambda t, layout=layout: gradient_norm(x, weights, layout, t, t.rank))
        norms.append(torch.stack([sum(g.double() for g in of_layer) for of_layer in zip(*ranks)]).norm().item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-2 if dtype == torch.bfloat16 else 1e-5)


# offsets


def test_views_of_more_than_two_to_the_31_elements(tmp_path):
    """Tokens lie so far apart that offsets exceed 32 bits; the file has holes between them."""
    tokens, h, d = 9, 2, 8
    layout = ra.zigzag(2 * tokens, 2)
    tensors = whole(2 * tokens, torch.bfloat16, h, h, d)
    stride = -(-(2**31) // (tokens - 1))
    size = stride * (tokens - 1) + h * d
    assert size > 2**31

    def work(transport):
        near = step(tensors, layout, transport, transport.rank)
        far = []
        for number, x in enumerate(tensors):
            path = tmp_path / f"{transport.rank}-{number}"
            view = torch.from_file(str(path), shared=True, size=size, dtype=x.dtype).as_strided(
                (1, tokens, h, d), (size, stride, d, 1)
            )
            far.append(view.copy_(ra.shard(x, layout, transport.rank)))
            path.unlink()
        *leaves, dout = far
        for x in leaves:
            x.requires_grad_()
        out = ra.ring_attention(*leaves, layout=layout, group=transport)
        return near[:1] + near[3:], [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    for near, far in run_ranks(2, work):
        assert all(torch.equal(x, y) for x, y in zip(near, far, strict=True))


@pytest.mark.parametrize("base", [2**31 - 20, 2**32 + 1, 2**47])
@pytest.mark.parametrize("mask", [ra.causal(), ra.sliding_window(7, 2), ra.dilated_window((3, 1), 3)], ids=repr)
def test_positions_beyond_32_bits(mask, base):
    q, k, v, _ = whole(40, torch.float32)
    positions = 3 * torch.arange(40)
    near, far = (
        ra.attend(q, k, v, mask=mask, q_positions=positions + start, k_positions=positions + start) for start in (0, base // 3 * 3)
    )
    for name in ("out", "row_max", "row_sum"):
        assert torch.equal(getattr(near, name), getattr(far, name))


def test_sequences_beyond_two_to_the_31_tokens(tmp_path):
    """Pairs and rows are counted exactly, and the last rows of a long tensor come into the last shard."""
    n, world_size = 2**31 + 77, 4096
    layout = ra.zigzag(n, 8)
    pairs = ra.make_plan(layout, ra.causal()).pairs()
    assert int(pairs.sum()) == n * (n + 1) // 2
    assert ra.make_plan(ra.contiguous(n, 8), ra.sliding_window(5)).needs(7, 6).ranges.tolist() == [
        [n * 7 // 8 - n * 6 // 8 - 5, n * 7 // 8 - n * 6 // 8]
    ]
    x = torch.from_file(str(tmp_path / "x"), shared=True, size=n, dtype=torch.uint8)
    x[-3:] = torch.tensor([7, 8, 9])
    last = ra.shard(x[None], ra.contiguous(n, world_size), world_size - 1)
    assert last[0, -4:].tolist() == [0, 7, 8, 9]


# windows


@pytest.mark.parametrize("layout", [ra.contiguous(64, 4), ra.zigzag(64, 4), ra.contiguous(67, 4)], ids=repr)
@pytest.mark.some(1)
def test_windows_whose_edges_are_shard_edges(monkeypatch, layout):
    """Each side of the window ends at the last row of a shard, one row before, or one row after."""
    monkeypatch.setattr(plan_module, "_GAP", 0)
    shard = layout.spans[0][0].length
    sides = [side for edge in (shard, 2 * shard) for side in (edge - 1, edge, edge + 1)]
    others = [0, 1, shard - 1, shard, shard + 1]
    masks = [ra.sliding_window(left, others[(n + turn) % 5]) for n, left in enumerate(sides) for turn in (0, 2)]
    tensors = whole(layout.seq_len, torch.float64)

    def work(transport):
        return [step(tensors, layout, transport, transport.rank, mask, SCHEDULES[n % 3]) for n, mask in enumerate(masks)]

    found = run_ranks(layout.world_size, work)
    for number, mask in enumerate(masks):
        live = mask.dense(layout.seq_len)
        plan = ra.make_plan(layout, mask)
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        out = ra.reference.attention(*leaves, mask=mask)
        wanted = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
        for rank, results in enumerate(found):
            for x, y in zip((results[number][at] for at in (0, 3, 4, 5)), wanted, strict=True):
                torch.testing.assert_close(x, ra.shard(y, layout, rank), rtol=0, atol=1e-12)
            seen = live[layout.positions(rank)].any(0)
            for owner in range(layout.world_size):
                rows = plan.needs(rank, owner).index(torch.device("cpu"))
                assert torch.equal(rows, seen[layout.positions(owner)].nonzero()[:, 0]), (mask, rank, owner)


# bits


LAYOUT = ra.zigzag(59, 4)


@contextlib.contextmanager
def jitter(seed):
    """Ranks sleep, now and then, before they exchange, wait or compute."""
    generator = random.Random(seed)

    def late(function):
        def call(*args, **kwargs):
            if generator.random() < 0.1:
                time.sleep(generator.random() / 1000)
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for place in (LoopbackTransport, ProcessGroupTransport, SimulatedTransport):
            for name in ("exchange", "all_gather_control"):
                stack.enter_context(mock.patch.object(place, name, late(getattr(place, name))))
        for name in ("forward", "backward"):
            stack.enter_context(mock.patch.object(local, name, late(getattr(local, name))))
        yield


def steps(group, rank, runs):
    """Many steps, of all schedules in turn: the first of each schedule, and the numbers of the others with other bits."""
    tensors = whole(59, torch.float32)
    firsts, odd = [], []
    for run in range(runs):
        found = step(tensors, LAYOUT, group, rank, ra.causal(), SCHEDULES[run % 4])
        if run < 4:
            firsts.append(found)
        elif any(not torch.equal(x, y) for x, y in zip(firsts[run % 4], found, strict=True)):
            odd.append(run)
    return firsts, odd


def steps_of_member(group, runs):
    rank = dist.get_rank(group)
    with jitter(rank):
        return steps(group, rank, runs)


@pytest.mark.parametrize("runs", [8, pytest.param(100, marks=pytest.mark.thorough)])
def test_many_runs_have_the_same_bits_over_every_transport(gloo, runs):
    """Whatever the pace of the ranks: as threads, as processes over gloo, and over simulated copy engines in random orders."""
    world = World(4, 4096, policy(0))
    with jitter(0):
        threads = run_ranks(4, lambda t: steps(t, t.rank, runs))
        staged = run_ranks(4, lambda t: steps(SimulatedTransport(t, world, on_host=True), t.rank, runs))
    for ranks in zip(threads, staged, gloo.run(4, steps_of_member, runs), strict=True):
        assert [odd for _, odd in ranks] == [[], [], []]
        wanted, *others = [tree_leaves(firsts) for firsts, _ in ranks]
        for found in others:
            assert all(torch.equal(x, y) for x, y in zip(wanted, found, strict=True))
