"""Heads and tails of segments: the rows that a state before a segment reaches, and that a call with tails computes the same."""

import contextlib
import importlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.recurrent import reach
from ringattn.recurrent.kernels import TorchKernels
from ringattn.recurrent.segments import make_segments
from tests.recurrent.fla_stand_in import errors, use_stand_in
from tests.recurrent.steps import Case, steps

linear_attention = importlib.import_module("ringattn.recurrent.linear_attention")
SHAPES = ((331, "contiguous", None), (403, "zigzag", None), (390, "backwards", (200, 0, 30, 160)))
FORGETTING = [(decays, beta) for decays in ("scalar", "vector", "constant") for beta in (False, True)]


class Forgetful(Case):
    """A case in which every token forgets some of each direction of the state."""

    def inputs(self):
        (q, k, v, decay, *others), *gradients = super().inputs()
        return (q, k, v, decay - 1, *others), *gradients


class Kept(TorchKernels):
    graphs_are_small = True


@contextlib.contextmanager
def short_heads():
    """Within the block segments of any length have tails; a factor of e^-40 counts as 0. Gives a list of the heads of each call."""
    found = []

    def noted(*args):
        found.append(reach.reaches(*args))
        return found[-1]

    with contextlib.ExitStack() as stack:
        for name, value in (("SHORTEST", 1), ("_STEP", 4), ("_ZERO", {torch.float64: -40.0})):
            stack.enter_context(mock.patch.object(reach, name, value))
        stack.enter_context(mock.patch.object(linear_attention, "reaches", noted))
        yield found


def run(group, cases, kernels):
    """What each case gives, and its heads."""
    with short_heads() as heads, contextlib.ExitStack() as stack:
        if kernels == "stand-in":
            stack.enter_context(use_stand_in())
        elif kernels == "kept":
            stack.enter_context(mock.patch("ringattn.recurrent.linear_attention.choose_kernels", return_value=Kept()))
        return [(case.run(group.rank(), group), heads[-1]) for case in cases]


@pytest.mark.parametrize(
    ("world_size", "kernels"),
    [
        (2, "torch"),
        *(
            pytest.param(*x, marks=pytest.mark.thorough)
            for x in ((3, "stand-in"), (2, "kept"), (2, "stand-in"), (3, "torch"), (3, "kept"))
        ),
    ],
)
def test_tails_give_the_same(gloo, request, world_size, kernels):
    """Out, last states and all gradients, against the recurrence step by step; some segments have tails, some none."""
    from strategies import is_thorough  # not where ranks import this file

    options = dict(world_size=world_size, initial=True, last=True)
    every = is_thorough(request.config)
    cases = [
        Case(n, layout=layout, documents=documents, decays=decays, beta=beta, copies=1 + seed % 2, seed=seed, **options)
        for seed, (decays, beta) in enumerate(FORGETTING)
        for at, (n, layout, documents) in enumerate(SHAPES)
        if every or at in (seed % 3, (seed + 1) % 3)  # each form in two shapes, each shape with each kind of decays
    ]
    cases += [Forgetful(331, layout="zigzag", decays=decays, beta=beta, seed=7, **options) for decays, beta in FORGETTING]
    by_rank = gloo.run(world_size, run, cases, kernels)
    for case, found in zip(cases, zip(*by_rank)):
        assert case.difference([result for result, _ in found]) < 1e-9, case
    cut = {(case.decays, case.beta) for case, found in zip(cases, zip(*by_rank)) if any(rows for _, rows in found)}
    assert cut == set(FORGETTING)
    assert not all(rows for found in by_rank for _, rows in found)


def test_one_checkpointed_call_on_two_ranks(gloo):
    """What is computed again has the same shapes, and gives the same gradients."""
    (wanted, *found), *_ = gloo.run(2, checkpointed)
    assert all(torch.equal(*pair) for each in found for pair in zip(wanted, each))


def checkpointed(group):
    case = Case(300, 2, decays="scalar", beta=True, seed=1)
    tensors, dout, _ = case.inputs()
    layout = case.make_layout()
    leaves = [ra.shard(x, layout, group.rank()).requires_grad_() for x in tensors if x is not None]

    def layer(q, k, v, decay, beta):
        return ra.linear_attention(q, k, v, decay=decay, beta=beta, layout=layout, group=group, kernels=Kept())

    gradient = ra.shard(dout, layout, group.rank())
    with short_heads() as heads:
        wanted = torch.autograd.grad(layer(*leaves), leaves, gradient)
        found = [
            torch.autograd.grad(checkpoint(layer, *leaves, use_reentrant=False, **options), leaves, gradient)
            for options in ({}, dict(context_fn=ra.checkpoint_contexts))
        ]
    assert group.rank() == 0 or all(heads)
    return wanted, *found


def heads_of(n, world_size, rank, decay, beta=None, k=None):
    own = make_segments(ra.contiguous(n, world_size), ra.causal()).of(rank)
    k = torch.ones(1, n // world_size, 1, 4) / 2 if k is None else k
    return reach.reaches(own, k, decay, beta)


def test_rows_that_a_state_reaches():
    n, size = 1 << 15, 1 << 14
    ones = torch.ones(1, size, 2)
    assert heads_of(n, 2, 0, -ones) == {}, "no segment follows another"
    assert heads_of(n, 2, 1, -ones) == {1: 128}, "e^-104 is less than fp32 holds: 104 rows, and one without it"
    assert heads_of(n, 2, 1, None) == {}, "nothing decays"
    assert heads_of(n, 2, 1, -ones * torch.tensor([1.0, 0.01])) == {}, "the slowest head counts: half of the segment"
    assert heads_of(n, 2, 1, -ones * torch.tensor([1.0, 0.02])) == {1: 5248}
    assert heads_of(8190, 2, 1, -torch.ones(1, 4095, 1)) == {}, "too short to wait for"
    vectors = torch.stack([-ones, -0.1 * ones], dim=3)
    assert heads_of(n, 2, 1, vectors) == {1: 1088}
    erased = -0.001 * ones
    erased[:, 500] = -torch.inf
    assert heads_of(n, 2, 1, erased) == {1: 512}
    broken = -ones
    broken[0, -1] = torch.nan
    assert heads_of(n, 2, 1, broken) == {}


def test_a_delta_rule_that_grows_is_not_forgotten():
    """Keys of norm 2 and betas of 1 multiply by -3 in a direction: decays of 1 do not outweigh it, those of 2 do."""
    n, size = 1 << 15, 1 << 14
    k, beta = torch.ones(1, size, 1, 4), torch.ones(1, size, 2)
    assert heads_of(n, 2, 1, -beta, beta, k) == {}
    rows = 64 * (int(104 / (2 - torch.tensor(3.0).log())) // 64 + 1)
    assert heads_of(n, 2, 1, -2 * beta, beta, k) == {1: rows}
    assert heads_of(n, 2, 1, -beta, beta) == {1: 128}, "with normalised keys only decays count"


@pytest.mark.thorough
def test_in_fp32_what_is_left_out_is_nothing():
    """In one process: the same bits with a state before the segment and without, after the head."""
    torch.manual_seed(0)
    size = 8192
    q, k, v = (torch.randn(1, size, 1, 8) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay, beta = -torch.rand(1, size, 1), torch.rand(1, size, 1)
    (rows,) = heads_of(2 * size, 2, 1, decay, beta, k).values()
    found = [steps(q, k, v, decay, beta, state)[0][:, rows:] for state in (torch.zeros(1, 1, 8, 8), 1e3 * torch.randn(1, 1, 8, 8))]
    assert torch.equal(*found)


def on_gpus(group, beta):
    """Relative differences of out and all gradients between a call with tails and one without, and the heads of the former."""
    rank, size, world = dist.get_rank(group), 1 << 13, dist.get_world_size(group)
    draw = torch.Generator("cuda").manual_seed(rank)
    q, k, v, dout = (torch.randn(1, size, 4, 64, generator=draw, device="cuda") for _ in range(4))
    decay, writes = (torch.rand(1, size, 4, generator=draw, device="cuda") for _ in range(2))
    q, k, v, dout = (x.bfloat16() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, dout))
    leaves = [x.requires_grad_() for x in (q, k, v, -decay, *([writes] if beta else []))]
    found, heads = [], []

    def noted(*args):
        heads.append(reach.reaches(*args))
        return heads[-1]

    for shortest in (1 << 12, 1 << 20):
        with mock.patch.object(reach, "SHORTEST", shortest), mock.patch.object(linear_attention, "reaches", noted):
            options = dict(decay=leaves[3], beta=leaves[4] if beta else None, layout=ra.zigzag(size * world, world), group=group)
            out = ra.linear_attention(*leaves[:3], **options)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    return errors(*found), heads[0]


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [False, True], ids=["linear", "delta"])
def test_tails_on_gpus(nccl, world_size, beta):
    """In bf16 tails differ from whole segments by rounding alone: fla's chunks begin at other rows."""
    by_rank = nccl.run(world_size, on_gpus, beta, timeout=300)
    assert max(max(differences) for differences, _ in by_rank) < 1e-2
    assert world_size == 1 or any(heads for _, heads in by_rank)
