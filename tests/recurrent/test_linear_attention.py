"""`ra.linear_attention` over gloo against a recurrence step by step, in fp64: outputs, last states and all gradients, on every rank."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings

import ringattn as ra
from tests.recurrent.steps import KINDS, Case, cases, relative, steps


def run(group, cases):
    return [case.run(group.rank(), group) for case in cases]


def check(gloo, *cases):
    by_rank = gloo.run(cases[0].world_size, run, cases)
    for case, found in zip(cases, zip(*by_rank)):
        assert case.difference(found) < 1e-9, case


@pytest.mark.parametrize("beta", [False, True], ids=["linear", "delta"])
@pytest.mark.parametrize("decays", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.some(10)
def test_every_rank_agrees_with_the_recurrence(gloo, world_size, decays, beta):
    layouts = "contiguous", "zigzag", "balanced", "one rank", "backwards"
    options = dict(world_size=world_size, decays=decays, beta=beta, copies=1 + world_size % 2)
    lengths = (1, 2, 17, 31, 97)
    cases = [
        Case(n, layout=layout, seed=seed, initial=seed % 3 == 0, last=seed % 2 == 0, **options)
        for seed, (layout, n) in enumerate(zip(layouts, lengths[world_size - 1 :] + lengths[: world_size - 1]))
    ]
    check(gloo, *cases)


def test_segments_of_several_chunks(gloo):
    kinds = [(decays, beta) for decays in KINDS for beta in (False, True)]
    check(gloo, *(Case(211, 2, decays=decays, beta=beta, initial=True, last=True) for decays, beta in kinds))


@settings(max_examples=40)
@given(case=cases())
def test_any_spans_and_documents(gloo, case):
    check(gloo, case)


def on_gpus(group, decays, beta):
    """The greatest relative difference in fp32 from the recurrence in fp64, token by token: out and the gradients of q, k, v."""
    rank, n = dist.get_rank(group), 1200
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = (1, n, 2, 64), (1, n, 2, 64), (1, n, 4, 64), (1, n, 4, 64)
    q, k, v, dout = (torch.randn(size, generator=draw, device="cuda") for size in sizes)
    k = F.normalize(k, dim=-1)
    shape = {"none": None, "scalar": (1, n, 4), "vector": (1, n, 4, 64)}[decays]
    decay = None if shape is None else -0.1 * torch.rand(shape, generator=draw, device="cuda")
    writes = torch.rand(1, n, 4, generator=draw, device="cuda") if beta else None
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = steps(*leaves, *(x if x is None else x.double() for x in (decay, writes)), None, (n // 3, n - n // 3))[0]
    wanted = [wanted.detach(), *torch.autograd.grad(wanted, leaves, dout.double())]
    layout = ra.zigzag(n, dist.get_world_size(group))
    shards = [ra.shard(x, layout, rank).requires_grad_() for x in (q, k, v)]
    options = dict(zip(("decay", "beta"), (x if x is None else ra.shard(x, layout, rank) for x in (decay, writes))))
    mask = ra.documents(lengths=[n // 3, n - n // 3])
    out = ra.linear_attention(*shards, **options, layout=layout, mask=mask, group=group)
    found = [out.detach(), *torch.autograd.grad(out, shards, ra.shard(dout, layout, rank))]
    return max(relative(x.double(), ra.shard(y, layout, rank), y) for x, y in zip(found, wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [False, True], ids=["linear", "delta"])
@pytest.mark.parametrize("decays", KINDS)
def test_gpus(nccl, world_size, decays, beta):
    assert max(nccl.run(world_size, on_gpus, decays, beta, timeout=120)) < 1e-5
