"""`ra.causal_conv1d` over gloo against a convolution step by step, in fp64: outputs and all gradients, on every rank."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import ringattn as ra
from tests.recurrent.steps import Case, cases, relative


def inputs(case, width, bias):
    """x, weight, bias (or None) and the gradient of out, of the whole sequence."""
    generator = torch.Generator().manual_seed(case.seed)
    shapes = (2, case.n, 3), (3, width), (3,), (2, case.n, 3)
    x, weight, shift, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, weight, shift if bias else None, dout


def steps(x, weight, bias, lengths):
    """The convolution of each document by itself; 0 after the last."""
    width, out, token = weight.shape[1], [], 0
    for length in lengths:
        part = F.pad(x[:, token : token + length], (0, 0, width - 1, 0))
        out += [(part[:, t : t + width] * weight.T).sum(1) + (0 if bias is None else bias) for t in range(length)]
        token += length
    out += [0 * x[:, 0]] * (x.shape[1] - token)
    return torch.stack(out, dim=1)


def run(group, case, width, bias):
    layout, rank = case.make_layout(), group.rank()
    x, weight, shift, dout = inputs(case, width, bias)
    leaves = [ra.shard(x, layout, rank), weight, shift] if bias else [ra.shard(x, layout, rank), weight]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = ra.causal_conv1d(*leaves, layout=layout, mask=case.make_mask(), group=group)
    return [out.detach(), *torch.autograd.grad((out * ra.shard(dout, layout, rank)).sum(), leaves)]


def run_all(group, calls):
    return [run(group, *call) for call in calls]


def check(gloo, *calls):
    """Each call is a (case, width, bias), all of one number of ranks."""
    by_rank = gloo.run(calls[0][0].world_size, run_all, calls)
    for call, found in zip(calls, zip(*by_rank)):
        check_call(*call, found)


def check_call(case, width, bias, found):
    x, weight, shift, dout = inputs(case, width, bias)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, shift) if leaf is not None]
    whole = steps(x, weight, shift, (case.n,) if case.documents is None else case.documents)
    wanted = [whole.detach(), *torch.autograd.grad((whole * dout).sum(), leaves, allow_unused=True)]
    wanted = [torch.zeros_like(like) if gradient is None else gradient for gradient, like in zip(wanted, (whole, *leaves))]
    layout = case.make_layout()
    for rank, of_rank in enumerate(found):
        for got, expected in zip(of_rank[:2], wanted[:2]):
            assert relative(got, ra.shard(expected, layout, rank), expected) < 1e-12
    for parts, expected in zip(list(zip(*found))[2:], wanted[2:]):
        assert relative(sum(parts), expected, expected) < 1e-12


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced", "one rank", "backwards"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_agrees_with_the_convolution(gloo, world_size, layout):
    calls = (1, 4, True), (7, 4, False), (31, 4, True), (13, 1, False), (11, 20, True)
    check(gloo, *((Case(n, world_size, layout, seed=n), width, bias) for n, width, bias in calls))


def test_halos_end_where_their_document_begins(gloo):
    """Documents begin one and two tokens before a shard ends, within the four that a convolution sees."""
    check(gloo, *((Case(24, 3, documents=lengths, seed=1), 4, True) for lengths in ((7, 9, 8), (6, 8, 9), (7, 1, 7, 1, 8))))


@settings(max_examples=30)
@given(case=cases())
def test_any_spans_and_documents(gloo, case):
    check(gloo, (case, (4, 2, 7)[case.seed % 3], bool(case.seed % 2)))
