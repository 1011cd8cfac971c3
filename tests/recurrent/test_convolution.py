"""`ra.causal_conv1d` over gloo against a convolution step by step, in fp64: outputs and all gradients, on every rank."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import ringattn as ra
from ringattn.recurrent import local_convolution
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


def check_call(case, width, bias, found, tolerance=1e-12):
    x, weight, shift, dout = inputs(case, width, bias)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, shift) if leaf is not None]
    whole = steps(x, weight, shift, (case.n,) if case.documents is None else case.documents)
    wanted = [whole.detach(), *torch.autograd.grad((whole * dout).sum(), leaves, allow_unused=True)]
    wanted = [torch.zeros_like(like) if gradient is None else gradient for gradient, like in zip(wanted, (whole, *leaves))]
    layout = case.make_layout()
    for rank, of_rank in enumerate(found):
        for got, expected in zip(of_rank[:2], wanted[:2]):
            assert relative(got, ra.shard(expected, layout, rank), expected) < tolerance
    for parts, expected in zip(list(zip(*found))[2:], wanted[2:]):
        assert relative(sum(parts), expected, expected) < tolerance


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced", "one rank", "backwards"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.some(8)
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


def fla_stand_in(x, weight, bias, *, cu_seqlens):
    """fla's function, by itself: of sequences in one row, without cu_seqlens of whole rows."""
    assert weight.dtype == torch.float32 and (cu_seqlens is None or len(x) == 1)
    lengths = (x.shape[1],) if cu_seqlens is None else cu_seqlens.diff().tolist()
    return steps(x, weight.double(), None if bias is None else bias.double(), lengths), None


def run_stand_in(group, calls):
    with mock.patch.object(local_convolution, "_function", return_value=fla_stand_in):
        return run_all(group, calls)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_given_to_fla_and_made_of_it(gloo, world_size):
    """One segment a rank, two, documents, and rows after the last: all as before, but that fla gets weights in fp32."""
    cases = Case(9, world_size), Case(31, world_size, "zigzag", seed=1), Case(24, world_size, documents=(7, 1, 9), seed=2)
    calls = [(case, 4, bool(case.seed % 2)) for case in cases]
    for call, found in zip(calls, zip(*gloo.run(world_size, run_stand_in, calls))):
        check_call(*call, found, tolerance=1e-6)


def on_gpus(group, n, lengths):
    """Relative differences in bf16 from a convolution in fp64, of out and the gradients of x, weight and bias."""
    rank, world_size = group.rank(), group.size()
    draw = torch.Generator("cuda").manual_seed(0)
    x, dout = (torch.randn(2, n, 96, generator=draw, device="cuda").bfloat16() for _ in range(2))
    weight, bias = torch.randn(96, 4, generator=draw, device="cuda"), torch.randn(96, generator=draw, device="cuda")
    leaves = [each.double().requires_grad_() for each in (x, weight, bias)]
    parts = [F.pad(part.transpose(1, 2), (3, 0)) for part in leaves[0].split(lengths, dim=1)]
    whole = torch.cat([F.conv1d(part, leaves[1][:, None], leaves[2], groups=96) for part in parts], dim=2).transpose(1, 2)
    wanted = [whole.detach(), *torch.autograd.grad((whole * dout).sum(), leaves)]
    layout, mask = ra.zigzag(n, world_size), ra.documents(lengths=lengths)
    leaves = [ra.shard(x, layout, rank).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    out = ra.causal_conv1d(*leaves, layout=layout, mask=mask, group=group)
    dx, dweight, dbias = torch.autograd.grad((out * ra.shard(dout, layout, rank)).sum(), leaves)
    for gradient in (dweight, dbias):
        torch.distributed.all_reduce(gradient, group=group)
    wanted[:2] = [ra.shard(each, layout, rank) for each in wanted[:2]]
    return [relative(got.double(), each, each) for got, each in zip((out, dx, dweight, dbias), wanted)]


@pytest.mark.gpu
def test_gpus(nccl, world_size):
    """In bf16, by fla where it is installed: at most what rounding the result leaves, also where a segment begins and ends."""
    for errors in nccl.run(world_size, on_gpus, 300, (120, 1, 179)):
        assert max(errors[:2]) < 2**-7 and max(errors[2:]) < 1e-4, errors
