"""Calls of `ra.linear_attention` and `ra.causal_conv1d` where torch does not just run them: compiled code, meta and fake tensors."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ringattn as ra

N = 24


def layer(q, k, v, layout, mask, group=None):
    """A convolution and a recurrence, between sums that can be compiled."""
    x = ra.causal_conv1d(q.flatten(2) + 1, torch.ones(8, 3), layout=layout, mask=mask, group=group).view_as(q)
    return ra.linear_attention(x * 2, k, v, layout=layout, mask=mask, group=group) + 1


def results_of(function, *args):
    q, k, v = torch.randn(3, 1, N // 2, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()
    out = function(q.requires_grad_(), k, v, *args)
    return out.detach(), *torch.autograd.grad(out.square().sum(), q)


def compiled(group):
    """Equal results, with as many graphs whatever the documents; the label of a call's line is that of the compiled code's."""
    torch.set_num_threads(1)
    graphs, layout = [], ra.contiguous(N, 2)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    run = torch.compile(layer, backend=backend, dynamic=False)
    for mask in (ra.causal(), *(ra.documents(lengths=[n, N - n]) for n in range(1, 10))):
        wanted, found = (results_of(function, layout, mask, group) for function in (layer, run))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(graphs) < 7
    q = torch.randn(1, N // 2, 2, 4)
    lines = [
        lambda: ra.linear_attention(q, q, q, layout=layout, group=group),
        lambda: ra.linear_attention(q, q, q, layout=layout, group=group),
    ]
    with pytest.raises(ValueError, match=r"line that calls is test_calls\.py:\d+ on rank 0, but test_calls\.py:\d+ on rank 1"):
        lines[group.rank()]()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(layer, backend=backend, fullgraph=True)(q, q, q, layout, ra.causal(), group)


def test_compiled_code_breaks_around_calls(gloo):
    gloo.run(2, compiled, timeout=60)


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("beta", [False, True], ids=["linear", "delta"])
def test_tensors_without_values_have_the_shapes_of_results(kind, beta):
    with FakeTensorMode() if kind == "fake" else nullcontext():
        device = "meta" if kind == "meta" else "cpu"
        q, k, v, x = (torch.randn(1, 150, *tail, device=device, requires_grad=True) for tail in ((2, 4), (2, 4), (4, 3), (6,)))
        decay = -torch.rand(1, 150, 4, device=device)
        out, last = ra.linear_attention(q, k, v, decay=decay, beta=decay.exp() if beta else None, return_final_state=True)
        convolved = ra.causal_conv1d(x, torch.randn(6, 4, device=device))
        (out.sum() + last.sum() + convolved.sum()).backward()
    assert out.shape == v.grad.shape == (1, 150, 4, 3)
    assert (last.shape, convolved.shape, q.grad.shape) == ((1, 4, 4, 3), (1, 150, 6), (1, 150, 2, 4))
    assert {y.device.type for y in (out, last, convolved)} == {device}


def without_values(group):
    layout = ra.contiguous(N, 2)
    with FakeTensorMode():
        fake = torch.randn(1, N // 2, 2, 4)
    with pytest.raises(ValueError, match="q is a fake tensor, so it has no values to pass on"):
        ra.linear_attention(fake, fake, fake, layout=layout, group=group)
    with pytest.raises(ValueError, match="x is on meta, so it has no values to pass on"):
        ra.causal_conv1d(torch.ones(1, N // 2, 3, device="meta"), torch.ones(3, 2, device="meta"), layout=layout, group=group)


def test_tensors_without_values_are_refused_on_several_ranks(gloo):
    gloo.run(2, without_values)
