"""Ranks that make a group's calls, or their backward passes, in different orders get an error on every rank before anything is sent."""

import re
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.runtime import order
from ringattn.runtime.groups import get_context
from ringattn.runtime.ulysses import Hybrid
from ringattn.transport import run_ranks
from tests.distributed import dense

N = 13


def inputs(rank, seed, heads=4):
    """This rank's shards of q, k and v of a sequence."""
    layout = ra.zigzag(N, 3)
    return [ra.shard(x[:, :, :heads], layout, rank).requires_grad_() for x in dense.inputs(N, seed)[:3]]


def attend(group, rank, seed=0, **options):
    return ra.ring_attention(*inputs(rank, seed), layout=ra.zigzag(N, 3), group=group, **options)


def in_order(calls, swapped):
    """The results of two calls, which run the other way round if `swapped`."""
    found = [call() for call in (reversed(calls) if swapped else calls)]
    return found[::-1] if swapped else found


def message_of(work, group, rank):
    try:
        work(group, rank)
    except ValueError as error:
        return str(error)
    return ""


def errors(work):
    """The error of `work(transport)` on each of three ranks, and whether the group works afterwards."""

    def run(transport):
        return message_of(work, transport, transport.rank), exact(transport, transport.rank)

    return run_ranks(3, run)


def exact(group, rank):
    """Whether a call and its backward pass have the reference's results."""
    q, k, v, dout, _ = dense.inputs(N, 5)
    layout = ra.zigzag(N, 3)
    leaves = [ra.shard(x, layout, rank).requires_grad_() for x in (q, k, v)]
    out = ra.ring_attention(*leaves, layout=layout, group=group)
    got = out, *torch.autograd.grad(out, leaves, ra.shard(dout, layout, rank))
    ref = [x.requires_grad_() for x in (q, k, v)]
    out = ra.reference.attention(*ref)
    wanted = out, *torch.autograd.grad(out, ref, dout)
    return all(bool((x - ra.shard(y, layout, rank)).abs().max() < 1e-12) for x, y in zip(got, wanted))


# programs in which rank 1 makes two calls of equal options, or their backward passes, the other way round


def two_lines(group, rank):
    for which in (1, 0) if rank == 1 else (0, 1):
        if which:
            attend(group, rank, 1)
        else:
            attend(group, rank, 0)


def two_lines_of_ring_attention(group, rank):
    q, k, v = inputs(rank, 0)
    for which in (1, 0) if rank == 1 else (0, 1):
        if which:
            ra.ring_attention(q, k, v, layout=ra.zigzag(N, 3), group=group)
        else:
            ra.ring_attention(q, k, v, layout=ra.zigzag(N, 3), group=group)


def two_names(group, rank):
    in_order([lambda: attend(group, rank, 0, name="layer 0"), lambda: attend(group, rank, 1, name="layer 1")], rank == 1)


def two_lines_of_unshard(group, rank):
    shard = inputs(rank, 0)[0]
    in_order(
        [
            lambda: ra.unshard(shard, ra.zigzag(N, 3), group),
            lambda: ra.unshard(shard + 1, ra.zigzag(N, 3), group),
        ],
        rank == 1,
    )


def backward(group, rank):
    outs = [attend(group, rank, seed).sum() for seed in (0, 1)]
    in_order([out.backward for out in outs], rank == 1)


def backward_of_other_shapes(group, rank):
    outs = [ra.ring_attention(*inputs(rank, 0, heads), layout=ra.zigzag(N, 3), group=group, name="one").sum() for heads in (4, 2)]
    in_order([out.backward for out in outs], rank == 1)


def backward_of_unshard(group, rank):
    wholes = [ra.unshard(inputs(rank, seed)[0], ra.zigzag(N, 3), group).sum() for seed in (0, 1)]
    in_order([whole.backward for whole in wholes], rank == 1)


def backward_of_two_functions(group, rank):
    out, whole = attend(group, rank), ra.unshard(inputs(rank, 1)[0], ra.zigzag(N, 3), group)
    in_order([out.sum().backward, whole.sum().backward], rank == 1)


def backward_before_forward(group, rank):
    out = attend(group, rank)
    in_order([lambda: attend(group, rank, 1), out.sum().backward], rank == 1)


def second_derivative(group, rank):
    q, k, v = inputs(rank, 0)
    out = ra.ring_attention(q, k, v, layout=ra.zigzag(N, 3), group=group)
    torch.autograd.grad(out.sum(), q, create_graph=rank == 1)


ONE, OTHERS = r"test_order.py:\d+ on rank 1", r"test_order.py:\d+ on ranks 0, 2: make the same calls in the same order"
SWAPS = {
    "two lines": (two_lines_of_ring_attention, f"^ranks disagree: line that calls is {ONE}, but {OTHERS}"),
    "two names": (two_names, "^ranks disagree: name is 'layer 1' on rank 1, but 'layer 0' on ranks 0, 2: make the same calls in"),
    "two lines of unshard": (two_lines_of_unshard, f"^ranks disagree: line that calls is {ONE}, but {OTHERS}"),
    "backward": (
        backward,
        r"^ranks disagree: its forward pass is call 2 \(test_order.py:\d+\) on rank 1, but call 1 \(test_order.py:\d+\) on ranks 0, 2:",
    ),
    "backward of other shapes": (
        backward_of_other_shapes,
        r"number of query heads is 2 on rank 1, but 4 on ranks 0, 2; .*its forward pass is call 2 \('one'\) on rank 1, but call 1",
    ),
    "backward of unshard": (backward_of_unshard, r"its forward pass is call 2 .* on rank 1, but call 1 .* on ranks 0, 2: make"),
    "backward of two functions": (
        backward_of_two_functions,
        "function is the backward pass of unshard on rank 1, but the backward pass of ring_attention on ranks 0, 2",
    ),
    "backward before forward": (
        backward_before_forward,
        "function is the backward pass of ring_attention on rank 1, but ring_attention on ranks 0, 2: make the same calls in the same",
    ),
    "second derivative": (second_derivative, "(rank 1 refused the input: rank 1: )?ring attention has no second derivative"),
}


@pytest.mark.parametrize(("work", "message"), SWAPS.values(), ids=SWAPS)
def test_every_rank_names_the_odd_one(work, message):
    for text, works in errors(work):
        with pytest.raises(ValueError, match=message):
            raise ValueError(text)
        assert works


def swapped_over_gloo(group):
    """This rank's errors if rank 1 runs two backward passes the other way round; how long they took; whether the group works."""
    rank, began = dist.get_rank(group), time.monotonic()
    found = [message_of(work, group, rank) for work in (backward, backward_of_other_shapes)]
    return found, time.monotonic() - began, exact(group, rank)


def test_swapped_backward_passes_over_gloo(gloo):
    for found, took, works in gloo.run(3, swapped_over_gloo):
        assert len(found) == 2
        for message in found:
            assert "its forward pass is call " in message
            assert "on rank 1, but call " in message
        assert took < 10
        assert works


def test_what_cannot_be_told_apart():
    """Documented in limits.md: two calls from one line, without names, whose order differs between ranks."""
    assert all(text == "" for text, _ in errors(two_lines))


# programs that are right


def branches_of_ranks(group, rank):
    """Ranks that reach one line in different ways, and one named call in different lines."""
    if rank == 1:
        attend(group, rank)
        out = ra.ring_attention(*inputs(rank, 0), layout=ra.zigzag(N, 3), group=group, name="call")
    else:
        attend(group, rank)
        out = ra.ring_attention(*inputs(rank, 0), layout=ra.zigzag(N, 3), group=group, name="call")
    out.sum().backward()


def several_losses(group, rank):
    outs = [attend(group, rank, seed) for seed in (0, 1, 2)]
    for out in (outs[1], outs[0], outs[1]):
        out.sum().backward(retain_graph=True)
    (outs[0] * outs[2]).sum().backward()


def recomputed(group, rank):
    leaves = inputs(rank, 0)
    for context in ({}, {"context_fn": ra.checkpoint_contexts}):
        for _ in range(2):
            out = checkpoint(
                lambda q, k, v: ra.ring_attention(q, k, v, layout=ra.zigzag(N, 3), group=group),
                *leaves, use_reentrant=False, **context,
            )  # fmt: skip
            out.sum().backward()


def unsharded_twice(group, rank):
    shard = inputs(rank, 0)[0]
    whole = ra.unshard(shard, ra.zigzag(N, 3), group)
    (first,) = torch.autograd.grad((whole**3).sum(), shard, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), shard)
    assert torch.allclose(second, 6 * 3 * shard.detach())


def mapped(group, rank):
    stacked = [torch.stack([x.detach(), 2 * x.detach()]).requires_grad_() for x in inputs(rank, 0)]
    torch.vmap(lambda q, k, v: ra.ring_attention(q, k, v, layout=ra.zigzag(N, 3), group=group))(*stacked).sum().backward()


@pytest.mark.parametrize("work", [branches_of_ranks, several_losses, recomputed, unsharded_twice, mapped])
def test_right_programs_stay_right(work):
    assert errors(work) == [("", True)] * 3


def test_a_grid_checks_the_order_too():
    def work(transport):
        ring, heads = transport.subgroup([transport.rank]), transport
        grid, layout = Hybrid(ring, heads, transport), ra.zigzag(12, 2)
        leaves = [torch.ones(1, 6, 2, 4, requires_grad=True) for _ in range(2)]
        outs = [ra.ring_attention(x, x, x, layout=layout, group=grid).sum() + ra.unshard(x, layout, grid).sum() for x in leaves]
        outs[0].backward(retain_graph=True)
        with pytest.raises(ValueError, match=r"its forward pass is call \d .* on rank 0, but call \d .* on rank 1"):
            in_order([out.backward for out in outs], transport.rank == 1)
        return float(leaves[0].grad.sum())

    assert run_ranks(2, work)[0] > 0


# threads


@contextmanager
def thread(work):
    """Run `work` in a thread meanwhile; yields its errors."""
    found = []

    def run():
        try:
            work()
        except ValueError as error:
            found.append(str(error))

    running = threading.Thread(target=run)
    running.start()
    yield found
    running.join()


def two_threads(transport):
    """Rank 0 makes two calls at once, and all ranks three in all. This rank's errors by call."""
    rank, state, found = transport.rank, get_context(transport).ranks.order, []
    refused = threading.Event() if rank else None
    if rank == 0:
        entered, check = threading.Event(), state.check
        state.check = lambda: entered.set() or check()
        with thread(lambda: attend(transport, rank)) as first:
            assert entered.wait(30)
            with thread(lambda: attend(transport, rank)) as second:
                while not state.two_threads:
                    time.sleep(0.001)
                ENTERED.set()
        found += [first, second]
    else:
        assert refused is not None
        assert ENTERED.wait(30)
        for _ in range(2):
            with thread(lambda: attend(transport, rank)) as messages:
                pass
            found.append(messages)
    with thread(lambda: attend(transport, rank)) as messages:
        pass
    return [*found, messages]


ENTERED = threading.Event()


def test_two_threads_at_once_are_refused_on_every_rank():
    ENTERED.clear()
    refusal = "two threads called with this group at once, so other ranks may have paired their calls differently"
    for rank, (first, second, third) in enumerate(run_ranks(3, two_threads)):
        assert first == []
        for (message,) in (second, third):
            assert message.startswith(refusal if rank == 0 else f"rank 0 refused the input: rank 0: {refusal}")


def one_thread_after_another(group, rank):
    for _ in range(3):
        with thread(lambda: attend(group, rank).sum().backward()) as found:
            pass
        assert found == []


def test_threads_may_take_turns():
    assert errors(one_thread_after_another) == [("", True)] * 3


def test_threads_without_a_group_may_call_at_once():
    x = torch.ones(1, 5, 2, 4)
    with thread(lambda: [ra.ring_attention(x, x, x) for _ in range(50)]) as found:
        for _ in range(50):
            ra.unshard(x, ra.zigzag(5, 1))
            ra.ring_attention(x, x, x)
    assert found == []


# labels


def test_a_line_is_known_without_its_folder():
    assert order._line("/home/a/train.py", 3) == order._line("C:\\b\\train.py", 3)
    assert order._line("/home/a/train.py", 3).text == "train.py:3"
    assert order._line("/home/a/train.py", 3) != order._line("/home/a/train.py", 4)
    # numbers of generated files differ between processes
    assert order._line("<eval_with_key>.7", 3) == order._line("<eval_with_key>.9", 3)


def test_lines_and_names_are_different_labels():
    assert order.label("x.py:1").kind != order._line("x.py", 1).kind
    assert order.label().text.startswith("test_order.py:")


def test_only_the_latest_calls_are_remembered():
    calls = order.CallOrder()
    for number in range(1, 2000):
        calls.add(number, order.label(f"call of layer {number}"))
    assert calls.describe(1999) == "call 1999 ('call of layer 1999')"
    assert calls.describe(5) == "call 5"


# compiled code


def compiled(group):
    """This rank's error if rank 1 swaps two backward passes of compiled code, and whether the group works afterwards."""
    rank = dist.get_rank(group)
    torch.compiler.reset()
    attention = torch.compile(
        lambda q, k, v: ra.ring_attention(q, k, v, layout=ra.zigzag(N, 3), group=group).sum(), fullgraph=True, backend="aot_eager"
    )
    outs = [attention(*inputs(rank, seed)) for seed in (0, 1)]
    found = message_of(lambda *_: in_order([out.backward for out in outs], rank == 1), group, rank)
    return found, exact(group, rank)


def test_swapped_backward_passes_of_compiled_code(gloo):
    for message, works in gloo.run(3, compiled, timeout=120):
        assert re.search(r"its forward pass is call \d+ \(test_order.py:\d+\) on rank 1, but call \d+", message)
        assert works
