"""What `ra.linear_attention` and `ra.causal_conv1d` refuse, before any communication and on every rank."""

import importlib

import pytest
import torch

import ringattn as ra
from ringattn.runtime.ulysses import Hybrid
from ringattn.transport import Alone


def call(n=8, **options):
    """A call with tensors of 8 tokens; options replace its arguments."""
    q, k, v = torch.randn(3, 1, n, 2, 4).unbind()
    arguments = {"q": q, "k": k, "v": v, **options}
    return ra.linear_attention(**arguments)


def convolve(n=8, **options):
    return ra.causal_conv1d(**{"x": torch.randn(1, n, 3), "weight": torch.randn(3, 4), **options})


REFUSED = {
    "a vector of three dimensions": (call, {"q": torch.ones(1, 8, 4)}, "q has 3 dimensions"),
    "two dtypes": (call, {"k": torch.ones(1, 8, 2, 4).double()}, "cast all three to one dtype"),
    "another length": (call, {"v": torch.ones(1, 7, 2, 4)}, "batch and tokens must be equal"),
    "key heads": (call, {"v": torch.ones(1, 8, 3, 4)}, "so h % hk must be 0"),
    "a factor": (call, {"decay": torch.full((1, 8, 2), 0.5)}, "decay holds 0.5, but is a natural logarithm of at most 0"),
    "NaN": (call, {"decay": torch.full((1, 8, 2), torch.nan)}, "decay holds nan"),
    "a decay's shape": (call, {"decay": torch.zeros(1, 8)}, "one for each of v's heads"),
    "a decay's dtype": (call, {"decay": torch.zeros(1, 8, 2, dtype=torch.long)}, "decay has dtype torch.int64"),
    "a beta's shape": (call, {"beta": torch.zeros(1, 8, 2, 1)}, "a number for each of v's heads"),
    "a beta that is a number": (call, {"beta": 0.5}, "beta is a float, but must be a torch.Tensor"),
    "an initial state": (call, {"initial_state": torch.zeros(1, 2, 4, 3)}, "initial_state has shape"),
    "initial states of documents": (
        call,
        {"initial_state": torch.zeros(1, 2, 4, 4), "mask": ra.documents(lengths=[3, 5])},
        "one for each document",
    ),
    "a window": (call, {"mask": ra.sliding_window(3)}, "a recurrence sees all that came before"),
    "documents with a window": (call, {"mask": ra.documents(lengths=[8], window=(3, 0))}, "a recurrence sees all that came before"),
    "both directions": (convolve, {"mask": ra.documents(lengths=[8], causal=False)}, "a recurrence sees all that came before"),
    "documents that are longer": (call, {"mask": ra.documents(lengths=[9])}, "is longer than the sequence"),
    "a layout for others": (call, {"layout": ra.contiguous(8, 2)}, "is for 2 ranks, but the group has 1"),
    "a layout of another length": (convolve, {"layout": ra.contiguous(9, 1)}, "x has 8 tokens, but rank 0"),
    "a view that negates": (call, {"beta": torch._neg_view(torch.ones(1, 8, 2))}, "pass beta.resolve_neg()"),
    "a view that negates, of a convolution": (convolve, {"x": torch._neg_view(torch.ones(1, 8, 3))}, "pass x.resolve_neg()"),
    "strides": (
        call,
        {"layout": ra.Layout(8, ((ra.Span(0, 4, 2), ra.Span(1, 4, 2)),))},
        "positions 2 apart, but a state passes between runs of consecutive tokens",
    ),
    "a grid": (call, {"group": Hybrid(Alone(), Alone(), Alone())}, "but states pass between ranks in one row"),
    "a scale": (call, {"scale": torch.ones(())}, "scale is a tensor of shape"),
    "a flag": (call, {"return_final_state": 1}, "return_final_state is 1, but must be a bool"),
    "a name": (call, {"name": 1}, "name is 1, but must be a str"),
    "two dimensions": (convolve, {"x": torch.ones(8, 3)}, "(batch, tokens, channels)"),
    "a weight of nn.Conv1d": (convolve, {"weight": torch.ones(3, 1, 4)}, "pass conv.weight.squeeze(1)"),
    "a weight on another device": (convolve, {"weight": torch.ones(3, 4, device="meta")}, "weight is on meta and x is on cpu"),
    "a bias": (convolve, {"bias": torch.ones(4)}, "bias has shape (4,), but must have (3,)"),
    "integers": (convolve, {"x": torch.ones(1, 8, 3, dtype=torch.long)}, "x has dtype torch.int64"),
}


@pytest.mark.parametrize(("function", "options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused(function, options, message):
    with pytest.raises(ValueError) as error:
        function(**options)
    assert message in str(error.value)


def errors(group, name):
    """The error of a call whose input differs between ranks, and that a next call works."""
    torch.manual_seed(0)
    odd = group.rank() == 1
    layout = ra.contiguous(8, 2)
    options = {
        "decay": {"decay": torch.full((1, 4, 2), 0.5 if odd else -0.5)},
        "beta": {"beta": torch.ones(1, 4, 2)} if odd else {},
        "vector": {"decay": torch.zeros(1, 4, 2, 4) if odd else torch.zeros(1, 4, 2)},
        "layout": {"layout": ra.zigzag(8, 2) if odd else layout},
        "last": {"return_final_state": odd},
        "striped": {"layout": ra.striped(8, 2)},
        "function": {},
    }[name]
    try:
        if name == "function" and odd:
            convolve(4, layout=layout, group=group)
        call(4, **{"layout": layout, "group": group, "name": "odd", **options})
    except ValueError as error:
        call(4, layout=layout, group=group)
        return str(error)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decay", "decay holds 0.5"),
        ("beta", "beta is none on rank 0, but given on rank 1"),
        ("vector", "decay is a number a head on rank 0, but a vector over head_dim on rank 1"),
        ("layout", "layout is contiguous"),
        ("last", "return_final_state is False on rank 0, but True on rank 1"),
        ("striped", "take contiguous, zigzag or balanced"),
        ("function", "function is linear_attention on rank 0, but causal_conv1d on rank 1"),
    ],
)
def test_every_rank_gets_the_error(gloo, name, message):
    assert all(message in found for found in gloo.run(2, errors, name))


def overflow(group, sign):
    """Rank 0's keys grow its state beyond fp32; rank 1 hears of it in its next call."""
    layout = ra.contiguous(32, 2)
    large = {"k": torch.full((1, 16, 2, 4), 1e30), "v": torch.full((1, 16, 2, 4), sign * 1e30)} if group.rank() == 0 else {}
    try:
        call(16, layout=layout, group=group, name="first", **large)
        call(16, layout=layout, group=group, name="second")
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("sign", [1, -1], ids=["inf", "-inf"])
def test_a_state_that_overflows_is_an_error(gloo, sign):
    found = gloo.run(2, overflow, sign)
    assert all("overflows torch.float32 by position 15, although all input is finite" in message for message in found)
    with pytest.raises(ValueError, match=r"overflows torch\.float32"):
        call(k=torch.full((1, 8, 2, 4), 1e30), v=torch.full((1, 8, 2, 4), sign * 1e30), decay=torch.full((2,), -0.1))
    # totals of decays may be -inf
    assert call(decay=torch.full((1, 8, 2), -torch.inf)).isfinite().all()
    # what is not finite in the input may pass, as in attention
    assert not call(v=torch.full((1, 8, 2, 4), torch.inf)).isfinite().all()


@pytest.mark.parametrize(("function", "name", "shape"), [(call, "q", (1, 8, 2, 4)), (convolve, "x", (1, 8, 3))], ids=["q", "x"])
def test_gradients_that_are_views_that_negate_come_as_values(monkeypatch, function, name, shape):
    module = importlib.import_module(f"ringattn.recurrent.{'linear_attention' if name == 'q' else 'convolution'}")
    inner, seen = module._gradients, []
    monkeypatch.setattr(module, "_gradients", lambda *given: seen.extend(given) or inner(*given))
    out = function(**{name: torch.randn(shape, requires_grad=True)})
    out.backward(torch._neg_view(torch.ones_like(out)))
    given = [x for one in seen for x in (one if isinstance(one, tuple) else (one,)) if isinstance(x, torch.Tensor)]
    assert any(bool((x == -1).all()) for x in given)
    assert not any(x.is_neg() for x in given)


def test_second_derivatives_are_refused():
    for function, name in ((call, "q"), (convolve, "x")):
        x = torch.randn(1, 8, 2, 4) if name == "q" else torch.randn(1, 8, 3)
        out = function(**{name: x.requires_grad_()})
        with pytest.raises(ValueError, match="has no second derivative"):
            torch.autograd.grad(out.sum(), x, create_graph=True)


def test_autocast_rounds_nothing():
    q, k, v = torch.randn(3, 1, 8, 2, 4).unbind()
    plain = ra.linear_attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ra.linear_attention(q, k, v).equal(plain)


def test_half_precision_is_computed_in_fp32():
    q, k, v = torch.randn(3, 1, 50, 2, 4).bfloat16().unbind()
    out, last = ra.linear_attention(q, k, v, return_final_state=True)
    wanted, wanted_last = ra.linear_attention(q.float(), k.float(), v.float(), return_final_state=True)
    assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert out.equal(wanted.bfloat16())
    assert last.equal(wanted_last)
