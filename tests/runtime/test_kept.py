"""Recurrences in checkpointed code: how often they run and exchange, what is kept for it, and that nothing else changes."""

import collections
import contextlib
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.recurrent import halos, kernels, state_passing
from ringattn.runtime import kept
from ringattn.training import offload
from ringattn.transport import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

N, WIDTH = 23, 12


class Layer(nn.Module):
    """A convolution, a delta rule, and a recurrence without one that returns its last states."""

    def __init__(self, group, mask):
        super().__init__()
        self.taps = nn.Parameter(torch.empty(3 * WIDTH, 3))
        self.enter, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.options = dict(group=group, mask=mask, layout=ra.contiguous(N, 1 if group is None else group.size))

    def forward(self, x):
        q, k, v = ra.causal_conv1d(self.enter(x), self.taps, **self.options).unflatten(2, (3, 2, -1)).unbind(2)
        k, decay = F.normalize(k, dim=3), F.logsigmoid(q[..., 0])
        read = ra.linear_attention(q, k, v, decay=decay, beta=decay.exp(), **self.options)
        read, last = ra.linear_attention(q, read.sin(), v, decay=decay, return_final_state=True, **self.options)
        return x + self.leave(read.flatten(2).tanh()) * last.sin().mean()


def build(group, count=2):
    """With the same weights on all ranks, which are threads."""
    layers = nn.ModuleList(Layer(group, ra.documents(lengths=[3, N - 3])) for _ in range(count)).double()
    draw = torch.Generator().manual_seed(0)
    for x in layers.parameters():
        x.data.normal_(std=0.2, generator=draw)
    return layers


def shard_of(group):
    x = torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x if group is None else ra.shard(x, ra.contiguous(N, group.size), group.rank)


def loss_of(group, way, count=2):
    """The parameters, and the loss of layers that are checkpointed in a way."""
    layers = build(group, count)
    if way in ("layers", "offload"):
        ra.checkpoint_layers(layers, offload=count if way == "offload" else 0)
    run = {
        "contexts": functools.partial(checkpoint, use_reentrant=False, context_fn=ra.checkpoint_contexts),
        "torch": functools.partial(checkpoint, use_reentrant=False),
    }.get(way, lambda layer, x: layer(x))
    x = shard_of(group)
    for layer in layers:
        x = run(layer, x)
    return list(layers.parameters()), x.square().sum()


def gradients(group, way, passes=1):
    parameters, loss = loss_of(group, way)
    for left in reversed(range(passes)):
        found = torch.autograd.grad(loss, parameters, retain_graph=left > 0)
    return found


def on_ranks(size, work):
    """What `work(group)` returns on each rank: on one by itself, or on several threads."""
    return [work(None)] if size == 1 else run_ranks(size, work)


def same(found, wanted):
    return all(torch.equal(*pair) for ranks in zip(found, wanted, strict=True) for pair in zip(*ranks, strict=True))


@pytest.fixture
def counts(monkeypatch):
    """Runs of kernels, and exchanges of states and of halos, of all ranks."""
    found = collections.Counter()

    def count(owner, name, what, counted=lambda *args: True):
        function = getattr(owner, name)

        def counting(*args):
            found[what] += counted(*args)
            return function(*args)

        monkeypatch.setattr(owner, name, counting)

    count(kernels.TorchKernels, "run", "runs", lambda *args: bool(args[7]))
    count(state_passing.StatePassing, "_start", "states")
    count(halos.PendingHalos, "start", "halos")
    return found


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(("way", "times"), [("torch", 3), ("contexts", 2), ("layers", 2), ("offload", 2)])
@pytest.mark.some(3)
def test_recurrences_run_once_forward_and_once_backward(counts, way, times, size):
    """The gradients are the same bits as without checkpoints. On each rank a call runs segments of one kind or two: the first
    document's, which one rank holds, and the second's."""
    wanted = on_ranks(size, lambda group: gradients(group, None))
    plain = dict(counts)
    calls = 2 * 2 * size
    assert plain["states"] == 2 * calls
    counts.clear()
    assert same(on_ranks(size, lambda group: gradients(group, way)), wanted)
    assert counts == {"runs": plain["runs"] * times // 2, "states": times * calls, "halos": times * calls // 2}


@pytest.mark.parametrize("way", ["layers", "offload"])
def test_a_second_backward_pass_takes_the_same_results(counts, way):
    wanted = on_ranks(2, lambda group: gradients(group, None))
    counts.clear()
    assert same(on_ranks(2, lambda group: gradients(group, way, passes=2)), wanted)
    assert counts["states"] == (1 + 2) * 2 * 2 * 2


@pytest.mark.parametrize(
    ("outer", "inner", "states"),
    [(ra.checkpoint_contexts, ra.checkpoint_contexts, 2), (ra.checkpoint_contexts, None, 3), (None, ra.checkpoint_contexts, 3)],
    ids=["both", "outer", "inner"],
)
def test_nested_checkpoints(counts, outer, inner, states):
    """A recomputation within another takes what the first forward pass has kept. Plain checkpoints run what they contain again."""

    def under(context_fn, function, x):
        return checkpoint(function, x, use_reentrant=False, **({} if context_fn is None else dict(context_fn=context_fn)))

    def nested(group):
        first, second = build(group)
        out = under(outer, lambda x: second(under(inner, first, x)), shard_of(group))
        return torch.autograd.grad(out.square().sum(), list(first.parameters()))

    def plain(group):
        first, second = build(group)
        return torch.autograd.grad(second(first(shard_of(group))).square().sum(), list(first.parameters()))

    wanted = on_ranks(2, plain)
    counts.clear()
    assert same(on_ranks(2, nested), wanted)
    # two calls on two ranks, in the inner and in the outer layer
    assert counts["states"] == 4 * states + 4 * (3 if outer is None else 2)


@pytest.fixture
def tensors(monkeypatch):
    """Weak references to what keeps a tensor, on the device or on the host."""
    found = []

    class HeldTensor(kept.HeldTensor):
        def __init__(self, x):
            super().__init__(x)
            found.append(weakref.ref(self))

    park = offload.HostMemory.park

    def noted(self, x, place):
        parked = park(self, x, place)
        found.append(weakref.ref(parked))
        return parked

    monkeypatch.setattr(kept, "HeldTensor", HeldTensor)
    monkeypatch.setattr(offload.HostMemory, "park", noted)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("way", ["contexts", "layers", "offload"])
def test_nothing_is_kept_after_the_backward_pass(tensors, way):
    _, loss = loss_of(None, way)
    # two layers: halos; out, queries, totals and states; out, last states, totals and states; when offloaded the second's input
    assert len(tensors) == 2 * (1 + 4 + 4) + (way == "offload")
    assert all(x() is not None for x in tensors)
    loss.backward()
    assert loss.grad_fn is not None
    assert not any(x() is not None for x in tensors)


def test_what_an_early_stop_leaves_goes_with_the_rest(tensors, counts):
    """A recomputation ends with the last tensor that is needed: here before a call without gradients."""
    layer = build(None, 1)[0]

    def stops(x):
        out = layer(x)
        with torch.no_grad():
            layer(out)
        return out

    out = checkpoint(stops, shard_of(None), use_reentrant=False, context_fn=ra.checkpoint_contexts)
    assert len(tensors) == 2 * (1 + 4 + 4)
    out.sum().backward()
    assert counts["states"] == 2 + 2 + 2
    assert not any(x() is not None for x in tensors)


def test_ranks_that_checkpoint_differently_are_told():
    """One would take its results, while the other waited for its states."""

    def work(group):
        with pytest.raises(ValueError, match="results") as error:
            gradients(group, ("contexts", "torch")[group.rank])
        return str(error.value)

    for message in run_ranks(2, work):
        assert "kept by a checkpoint" in message and "computed" in message


def test_another_call_in_the_recomputation_is_refused():
    layer = build(None, 1)[0]
    out = checkpoint(layer, shard_of(None), use_reentrant=False, context_fn=ra.checkpoint_contexts)
    layer.options["mask"] = ra.documents(lengths=[5, N - 5])
    with pytest.raises(ValueError, match="called linear_attention or causal_conv1d in the backward pass with another"):
        out.sum().backward()


class Changing(nn.Module):
    def forward(self, x):
        out = ra.linear_attention(x * 1, x, x)
        out *= 2
        return out.sin()


@pytest.mark.parametrize("offloaded", [0, 1])
def test_an_output_that_is_changed_in_place_is_refused(offloaded):
    layers = nn.ModuleList([Changing()])
    ra.checkpoint_layers(layers, offload=offloaded)
    # of half precision, which is a copy: torch refuses to change a view
    x = torch.randn(1, 9, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="changed in place"):
        layers[0](x * 1).sum().backward()


def test_a_call_that_fails_leaves_its_place_empty():
    """A recomputation in which it fails again takes the next call's results for the next call, and may be run again."""
    block, x, nothing_else = kept.KeptCalls(), torch.ones(2), contextlib.nullcontext()
    with block.storing(nothing_else):
        kept.next_call()
        kept.next_call().keep(("of",), (x, None), "rest")
    taking = block.taking(nothing_else)
    for _ in range(2):
        with taking:
            assert not kept.next_call().takes
            (found, nothing), rest = kept.next_call().take()
            assert torch.equal(found, x) and nothing is None and rest == "rest"
            assert not kept.next_call().takes
    assert not kept.next_call().takes


def test_a_block_within_a_recomputation_keeps_what_that_takes():
    """It may be recomputed in turn, by a backward pass within the outer block."""
    outer, inner, nothing_else = kept.KeptCalls(), kept.KeptCalls(), contextlib.nullcontext()
    with outer.storing(nothing_else):
        kept.next_call().keep(("of",), (torch.ones(2),))
    with outer.taking(nothing_else), inner.storing(nothing_else):
        kept.next_call().take()
        assert not kept.next_call().takes
    with inner.taking(nothing_else):
        assert kept.next_call().takes
