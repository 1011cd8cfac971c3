"""Who computes a rank's own segments: plain torch or flash-linear-attention; how the choice is made, and that both compute the same."""

import importlib
import itertools
import logging
import sys
import threading
import types
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.recurrent import kernels, recomputed
from ringattn.recurrent.calls import CheckedCall
from ringattn.recurrent.kernels import FlaKernels, TorchKernels, choose_kernels
from ringattn.recurrent.segments import make_segments
from ringattn.runtime.context import Context
from ringattn.transport import run_ranks
from tests.recurrent.fla_stand_in import errors, random_inputs, take_one_configuration, use_stand_in
from tests.recurrent.steps import KINDS, Case, steps

linear_attention = importlib.import_module("ringattn.recurrent.linear_attention")
ALL = list(itertools.product(KINDS, [False, True]))


def run_stand_in(group, cases):
    """Of this rank, or in this process if group is None."""
    with use_stand_in():
        return [case.run(0 if group is None else group.rank(), group) for case in cases]


def stand_in_cases(world_size, n, documents):
    options = dict(world_size=world_size, initial=True, last=True)
    return [
        Case(n, layout=layout, documents=packed, decays=decays, beta=beta, copies=1 + seed % 2, seed=seed, **options)
        for seed, (decays, beta) in enumerate(ALL)
        for layout, packed in (("zigzag", None), ("contiguous", documents))
    ]


def test_what_is_given_to_fla_and_made_of_it():
    """Heads, logarithms, bounds and states, by a stand-in of fla in fp64: out, last states and all gradients."""
    cases = stand_in_cases(1, 9, (0, 3, 1, 4))
    for case, found in zip(cases, run_stand_in(None, cases)):
        assert case.difference([found]) < 1e-9, case


@pytest.mark.parametrize("decays", ["scalar", "vector"])
def test_a_decay_that_erases_is_finite_for_fla(decays):
    """Logarithms of -inf: results and gradients are as those of plain torch, within what a factor of 2e-35 leaves."""
    *tensors, _ = random_inputs(20, decays, True, "cpu", d_k=4, d_v=3)
    *leaves, initial = (x.double().requires_grad_() for x in tensors)
    found = []
    for chosen in (FlaKernels(), TorchKernels()):
        with use_stand_in():
            ran = chosen.run(*leaves, initial.transpose(0, 1), [12, 8], 0.5)
        out = ran.read()
        grads = torch.autograd.grad(out.sum() + ran.finals.sum(), leaves)
        found.append([out.detach(), ran.finals.detach(), *(grad.nan_to_num() for grad in grads)])
    assert max(errors(*found)) < 1e-12


class _Counted(TorchKernels):
    graphs_are_small = True

    def run(self, *arguments, **options):
        _Counted.ran += bool(arguments[6])
        return super().run(*arguments, **options)


def test_what_begins_a_document_runs_once():
    """The backward pass finds its graph; a second one through the same call runs it again, with the same bits."""
    *tensors, _, _ = random_inputs(20, "scalar", True, "cpu", d_k=4, d_v=3)
    leaves = [x.double().requires_grad_() for x in tensors]
    q, k, v, decay, beta = leaves
    _Counted.ran = 0
    out = ra.linear_attention(q, k, v, decay=decay, beta=beta, kernels=_Counted())
    once = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert _Counted.ran == 1
    again = torch.autograd.grad(out.sum(), leaves)
    assert _Counted.ran == 2 and all(torch.equal(*pair) for pair in zip(once, again))


@pytest.mark.parametrize("beta", [False, True], ids=["linear", "delta"])
def test_checkpointing_computes_a_call_twice_in_all(beta):
    """A graph that is kept within a call would have it computed a third time, on some ranks alone."""
    *tensors, _, _ = random_inputs(20, "scalar", beta, "cpu", d_k=4, d_v=3)
    leaves = [x.double().requires_grad_() for x in tensors if x is not None]
    calls = []

    def layer(q, k, v, decay, beta=None):
        calls.append(len(calls))
        return ra.linear_attention(q, k, v, decay=decay, beta=beta, kernels=_Counted())

    wanted = torch.autograd.grad(layer(*leaves).sum(), leaves)
    calls.clear()
    found = torch.autograd.grad(checkpoint(layer, *leaves, use_reentrant=False).sum(), leaves)
    assert len(calls) == 2 and all(torch.equal(*pair) for pair in zip(wanted, found))


def test_numbers_run_as_vectors_where_fla_lacks_them(monkeypatch):
    monkeypatch.setattr(kernels, "runs_vectors", lambda decay, beta, device: decay is not None or beta is not None)
    cases = [Case(9, 1, decays=decays, beta=beta, initial=True, seed=3) for decays, beta in ALL]
    for case, found in zip(cases, run_stand_in(None, cases)):
        assert case.difference([found]) < 1e-9, case


@pytest.mark.parametrize(
    ("version", "capability", "lacks"),
    [
        ("3.3.1", 9, False),
        ("3.4.0", 9, True),
        ("3.7.0+git1", 9, True),
        ("3.7.1", 9, False),
        ("3.10.0", 9, False),
        ("3.6.0", 10, False),
    ],
)
def test_where_fla_lacks_numbers(monkeypatch, version, capability, lacks):
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert kernels._lacks_numbers.__wrapped__(torch.device("cuda")) == lacks
    assert not kernels.runs_vectors(None, None, torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not kernels._lacks_numbers.__wrapped__(torch.device("cuda"))


@pytest.mark.thorough
def test_what_is_given_to_fla_on_several_ranks(gloo):
    cases = stand_in_cases(3, 41, (0, 13, 1, 20))
    for case, found in zip(cases, zip(*gloo.run(3, run_stand_in, cases))):
        assert case.difference(found) < 1e-9, case


@pytest.fixture
def no_choice_yet(monkeypatch):
    """No choice is remembered, before the test or after it, and the GPU is none that needs vectors."""
    monkeypatch.setattr(kernels, "_lacks_numbers", lambda device: False)
    for remembered in (kernels._function, kernels._say):
        remembered.cache_clear()
    yield
    for remembered in (kernels._function, kernels._say):
        remembered.cache_clear()


def put_fla(monkeypatch, version="0.6.0", **functions):
    """An installed package with these functions."""
    for name in ("fla", "fla.ops", *(module for module, _ in kernels._FUNCTIONS.values())):
        module = types.ModuleType(name)
        vars(module).update({f: x for f, x in functions.items() if (name, f) in kernels._FUNCTIONS.values()})
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["fla"].__version__ = version


def on_gpu(dtype=torch.bfloat16, d=64):
    """What a choice looks at of a tensor on a GPU."""
    x = mock.Mock(spec=torch.Tensor, dtype=dtype, device=torch.device("cuda"), shape=(1, 8, 2, d))
    x.dim = lambda: 4
    return x


def whole(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    """Takes what fla's functions take."""


@pytest.mark.parametrize(
    ("dtype", "d", "chosen"),
    [
        (torch.bfloat16, 64, FlaKernels),
        (torch.float16, 256, FlaKernels),
        (torch.float32, 64, TorchKernels),
        (torch.bfloat16, 8, TorchKernels),
    ],
)
def test_fla_is_chosen_for_half_precision_on_gpus(monkeypatch, no_choice_yet, caplog, dtype, d, chosen):
    put_fla(monkeypatch, chunk_kda=whole, chunk_gla=whole, chunk_simple_gla=whole, chunk_gated_delta_rule=whole)
    with caplog.at_level(logging.INFO, logger="ringattn.recurrent.kernels"):
        x = on_gpu(dtype, d)
        for decay, beta in ((x, x), (None, x), (x, None), (None, None)):
            assert isinstance(choose_kernels(x, x, decay, beta), chosen)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (dtype != torch.float32)
    assert all(chosen().__repr__() in line for line in lines)


def test_a_cpu_has_plain_torch():
    x = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    assert isinstance(choose_kernels(x, x, None, None), TorchKernels)
    a, b = (ra.linear_attention(x + 1, x + 2, x + 3, kernels=chosen) for chosen in (None, ra.torch_kernels()))
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"kernels is fla_kernels\(\), but fla computes on GPUs, but q is on cpu"):
        ra.linear_attention(x, x, x, kernels=ra.fla_kernels())
    with pytest.raises(ValueError, match="kernels is 'fla', but must be"):
        ra.linear_attention(x, x, x, kernels="fla")


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ({}, "fla 0.1 has no fla.ops.gated_delta_rule.chunk_gated_delta_rule, as 0.6 has"),
        (
            {"chunk_gated_delta_rule": lambda q, k, v, g, beta, scale: None},
            "takes no cu_seqlens and no initial_state and no output_final",
        ),
    ],
    ids=["function", "argument"],
)
def test_another_version_of_fla(monkeypatch, no_choice_yet, functions, reason):
    """It is an error if fla was asked for, and plain torch if nothing was."""
    put_fla(monkeypatch, "0.1", **functions)
    x = on_gpu()
    assert isinstance(choose_kernels(x, x, None, x), TorchKernels)
    with pytest.raises(ValueError, match=reason):
        kernels.check_kernels(ra.fla_kernels(), x, x, None, x)


def test_no_fla(monkeypatch, no_choice_yet):
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    x = on_gpu()
    with pytest.raises(ValueError, match="cannot be imported"):
        kernels.check_kernels(ra.fla_kernels(), x, x, x, x)
    for wrong, reason in (
        (on_gpu(d=24), "multiples of 16"),
        (on_gpu(d=272), "multiples of 16"),
        (on_gpu(torch.float64), "float64"),
    ):
        with pytest.raises(ValueError, match=reason):
            kernels.check_kernels(ra.fla_kernels(), wrong, wrong, None, None)


def results_of_threads(kernels, world_size, tensors, dout, lengths):
    """out, last states and all gradients, of ranks that are threads of this process and share its GPU, put together.

    torch runs all backward passes of a GPU in one thread, in which ranks must not wait for each other: so they call it themselves.
    """
    n = sum(lengths)
    layout, mask, one_at_a_time = ra.zigzag(n, world_size), ra.documents(lengths=lengths), threading.Lock()
    segments = make_segments(layout, mask)

    class Locked(type(kernels)):
        def run(self, *args):
            with one_at_a_time:
                return super().run(*args)

    def locked(*args):
        with one_at_a_time:
            return recomputed.gradients_of(*args)

    def work(transport):
        rank, ctx = transport.rank, types.SimpleNamespace()
        cut = [x if x is None or i == 5 else ra.shard(x, layout, rank) for i, x in enumerate(tensors)]
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        ctx.needs_input_grad = [False, *(x is not None for x in cut)]
        checked = CheckedCall(Context(transport), segments, None)
        call = linear_attention._LinearCall(checked, 0.125, True, Locked(), needs_grad=True)
        with torch.no_grad():
            out, last = linear_attention._LinearAttention.forward(ctx, call, *cut)
            dlast = last if rank == 0 else torch.zeros_like(last)
            _, *grads = linear_attention._LinearAttention.backward(ctx, ra.shard(dout, layout, rank), dlast)
        return out, last, grads

    with mock.patch.object(linear_attention, "gradients_of", locked):
        found = run_ranks(world_size, work)
    outs, lasts, grads = zip(*found)
    whole = [join(parts, layout) for parts in (outs, *zip(*(each[:5] for each in grads))) if parts[0] is not None]
    assert all(torch.equal(last, lasts[0]) for last in lasts)
    return [whole[0], lasts[0], *whole[1:], sum(each[5] for each in grads)]


def join(parts, layout):
    """Shards to the whole."""
    whole = torch.empty_like(torch.cat(parts, dim=1))
    for rank, part in enumerate(parts):
        whole[:, layout.positions(rank).to(whole.device)] = part
    return whole


@pytest.mark.gpu
@pytest.mark.parametrize(("decays", "beta"), ALL, ids=[f"{decays}-{'delta' if beta else 'linear'}" for decays, beta in ALL])
def test_fla_computes_what_plain_torch_does(decays, beta):
    """On one GPU, with states that pass between ranks: root mean squares of differences from the recurrence in fp64."""
    pytest.importorskip("fla.ops", reason="no flash-linear-attention here")
    take_one_configuration()
    n, lengths = 300, (100, 200)
    *tensors, dout = random_inputs(n, decays, beta, "cuda")
    tensors = [x if x is None or i > 2 else x.bfloat16() for i, x in enumerate(tensors)]
    leaves = [x if x is None else x.double().requires_grad_() for x in tensors]
    out, last = steps(*leaves, lengths)
    live = [x for x in leaves if x is not None]
    wanted = [out.detach(), last.detach(), *torch.autograd.grad((out, last), live, (dout.double(), last.detach()))]
    results = (results_of_threads(x, 3, tensors, dout.bfloat16(), lengths) for x in (ra.torch_kernels(), ra.fla_kernels()))
    exact, found = (errors(result, wanted) for result in results)
    assert max(exact) < 5e-3  # bf16 results of fp32 computation
    assert max(found) < 2e-2


def on_gpus(group):
    """The greatest difference in bf16 between fla's kernels and plain torch."""
    take_one_configuration()
    rank, layout = group.rank(), ra.zigzag(700, group.size())
    *tensors, dout = random_inputs(700, "scalar", True, "cuda")
    found = []
    for chosen in (ra.fla_kernels(), ra.torch_kernels()):
        q, k, v, decay, writes = (ra.shard(x, layout, rank).clone() for x in tensors[:5])
        shards = [x.requires_grad_() for x in (q.bfloat16(), k.bfloat16(), v.bfloat16(), decay, writes)]
        out = ra.linear_attention(*shards[:3], decay=shards[3], beta=shards[4], layout=layout, group=group, kernels=chosen)
        found.append([out.detach(), *torch.autograd.grad(out, shards, ra.shard(dout, layout, rank).bfloat16())])
    return max(errors(found[0], [x.double() for x in found[1]]))


@pytest.mark.gpu
def test_fla_on_several_gpus(nccl, world_size):
    pytest.importorskip("fla.ops", reason="no flash-linear-attention here")
    assert max(nccl.run(world_size, on_gpus, timeout=300)) < 2e-2
