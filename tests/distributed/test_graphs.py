"""Attention in CUDA graphs: replays give the bits of other calls, however ranks are delayed, and ranks that differ raise errors."""

import gc
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra

pytestmark = pytest.mark.gpu

SMALL = 1 << 20  # a budget so small that messages go in many pieces
CYCLES = 2_000_000  # about a millisecond
SCHEDULES = [ra.ring(), ra.waves(1), ra.waves(2), ra.gather(), None]


@pytest.fixture(params=[2, 4, 8], ids="{}gpus".format)
def world_size(request):
    return request.param


@contextmanager
def deterministic():
    """Without it, dq differs in its last bits from run to run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Call:
    """Ring attention of this rank's shard, whose inputs change in place."""

    def __init__(self, group, ranks, schedule, tokens=1024):
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.options = dict(layout=ra.zigzag(tokens * size, size), group=ranks, schedule=schedule)
        shapes = ((1, tokens, h, 64) for h in (4, 2, 2, 4))
        *leaves, self.dout = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        self.leaves = [x.requires_grad_() for x in leaves]
        self.change(0)

    def change(self, seed):
        """Write other numbers into the same inputs."""
        generator = torch.Generator("cuda").manual_seed(100 * seed + self.rank)
        with torch.no_grad():
            for x in (*self.leaves, self.dout):
                x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))

    def forward(self):
        self.out = ra.ring_attention(*self.leaves, **self.options)
        return self.out.detach()

    def backward(self):
        return torch.autograd.grad(self.out, self.leaves, self.dout)

    def both(self):
        return self.forward(), *self.backward()

    def expected(self, count):
        """Results without a capture, for inputs 0, 1, ...; on a side stream, as torch asks for before a capture."""
        found = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for seed in range(count):
                self.change(seed)
                found.append([x.clone() for x in self.both()])
        torch.cuda.current_stream().wait_stream(stream)
        # collect graphs of earlier tests: no graph may be freed while another is captured
        gc.collect()
        return found


def capture(function, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        results = function()
    return graph, results


def same(got, expected):
    return all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@deterministic()
def replayed(group, budget, schedule, apart):
    """Whether replays give the bits of other calls. Both passes are in one graph or, `apart`, in two. Inputs change each time, and other
    calls run between replays."""
    call = Call(group, group if budget is None else ra.symmetric(group, budget=budget), schedule)
    expected = call.expected(6)
    if apart:
        first, out = capture(call.forward)
        second, grads = capture(call.backward, pool=first.pool())
        graphs, results = (first, second), (out, *grads)
    else:
        graph, results = capture(call.both)
        graphs = (graph,)
    right = []
    for seed in (0, 1, 2, 3, 3, 4, 5, 0):
        call.change(seed)
        for graph in graphs:
            graph.replay()
        right.append(same(results, expected[seed]))
        if seed % 2:
            call.change(5 - seed)
            right.append(same(call.both(), expected[5 - seed]))
    return right


@pytest.mark.parametrize("apart", [False, True], ids=["one graph", "two graphs"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("budget", [None, 256 << 20, SMALL], ids=["the group's own", "whole", "in pieces"])
def test_replays_have_the_bits_of_other_calls(nccl, world_size, budget, schedule, apart):
    assert nccl.run(world_size, replayed, budget, schedule, apart) == [[True] * 12] * world_size


def beside(group, schedule):
    """Whether replays give the same bits of out, dk and dv if launches run side by side, and the greatest difference of dq."""
    call = Call(group, ra.symmetric(group), schedule, tokens=2048)
    expected = call.expected(3)
    graph, results = capture(call.both)
    right, worst = [], 0.0
    for seed in (0, 1, 2, 0):
        call.change(seed)
        graph.replay()
        (out, dq, dk, dv), (_, wanted, *_) = results, expected[seed]
        right.append(same((out, dk, dv), [expected[seed][i] for i in (0, 2, 3)]))
        worst = max(worst, float((dq - wanted).norm() / wanted.norm()))
    return right, worst


@pytest.mark.parametrize("schedule", [ra.waves(1), ra.gather()], ids=repr)
def test_launches_side_by_side(nccl, world_size, schedule):
    for right, worst in nccl.run(world_size, beside, schedule):
        assert all(right)
        assert worst < 1e-2


@deterministic()
def delayed(group, schedule, budget):
    """How many results of 100 replays are wrong if ranks are delayed at random and other calls run between replays."""
    call = Call(group, ra.symmetric(group, budget=budget), schedule)
    expected = call.expected(4)
    graph, results = capture(call.both)
    generator = torch.Generator().manual_seed(call.rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(100):
        call.change(number * 7 % 4)
        delay = float(torch.rand((), generator=generator))
        if delay < 0.3:
            torch.cuda._sleep(int(10 * CYCLES * delay))
        if number % 9 == 4:
            got = call.both()
        else:
            graph.replay()
            got = results
        for x, y in zip(got, expected[number * 7 % 4], strict=True):
            wrong += (x != y).any()
    return int(wrong)


@pytest.mark.parametrize("budget", [SMALL, 256 << 20], ids=["in pieces", "whole"])
@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather()], ids=repr)
def test_delays_change_nothing(nccl, world_size, schedule, budget):
    assert nccl.run(world_size, delayed, schedule, budget) == [0] * world_size


@deterministic()
def graphed_callable(group):
    """Whether torch.cuda.make_graphed_callables gives the same bits of out and gradients."""
    call = Call(group, ra.symmetric(group), ra.gather())
    expected = call.expected(3)
    graphed = torch.cuda.make_graphed_callables(lambda q, k, v: ra.ring_attention(q, k, v, **call.options), tuple(call.leaves))
    right = []
    for seed in (0, 1, 2):
        call.change(seed)
        out = graphed(*call.leaves)
        right.append(same((out, *torch.autograd.grad(out, call.leaves, call.dout)), expected[seed]))
    return right


def test_graphed_callables(nccl, world_size):
    assert nccl.run(world_size, graphed_callable) == [[True] * 3] * world_size


@deterministic()
def collected(group):
    """Whether replays are right if an arena was garbage-collected during the capture, and the GPU bytes that it left behind."""
    call = Call(group, ra.symmetric(group), ra.ring())
    expected = call.expected(2)
    dist.barrier(group)  # NCCL allocates memory at its first call
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    gone = ra.symmetric(group, budget=1 << 30)
    Call(group, gone, ra.ring()).both()
    torch.cuda.synchronize()
    del gone

    def work():
        results = call.forward()
        gc.collect()
        return results, *call.backward()

    graph, results = capture(work)
    right = []
    for seed in (0, 1):
        call.change(seed)
        graph.replay()
        right.append(same(results, expected[seed]))
    right.append(same(call.both(), expected[1]))
    # an arena is freed when no rank maps it any more
    torch.cuda.synchronize()
    dist.barrier(group)
    return right, before - torch.cuda.mem_get_info()[0]


def test_a_transport_may_go_during_a_capture(nccl, world_size):
    for right, left in nccl.run(world_size, collected):
        assert right == [True] * 3
        assert left < 512 << 20


@deterministic()
def grid(group):
    """Whether graphs of both passes over a ring of pairs, and of `unshard`, are right."""
    mesh = init_device_mesh("cuda", (group.size() // 2, 2), mesh_dim_names=("ring", "heads"))
    call = Call(group, mesh, None)
    expected = call.expected(2)
    layout = call.options["layout"]

    def work():
        out, *grads = call.both()
        return ra.unshard(out, layout, mesh), out, *grads

    graph, (whole, *results) = capture(work)
    right = []
    for seed in (0, 1, 0):
        call.change(seed)
        graph.replay()
        right += [same(results, expected[seed]), torch.equal(ra.shard(whole, layout, call.rank), results[0])]
    return right


def test_a_grid(nccl):
    count = nccl.size
    if count % 2:
        pytest.skip("needs an even number of GPUs")
    assert nccl.run(count, grid) == [[True] * 6] * count


def refusal(work):
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


@deterministic()
def refused(group):
    """This rank's errors if a call is captured that was not made before, if one rank alone captures, and if one pass alone is captured;
    and whether calls are right afterwards, captured or not."""
    call = Call(group, ra.symmetric(group), ra.ring())
    messages = [refusal(lambda: capture(call.both))]
    expected = call.expected(1)[0]
    messages.append(refusal((lambda: capture(call.both)) if call.rank == 1 else call.both))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call.forward()
    messages.append(refusal(lambda: capture(call.backward, stream=stream)))
    kept, _ = capture(call.forward)
    messages.append(refusal(call.backward))
    graph, results = capture(call.both)
    graph.replay()
    kept.replay()
    return messages, same(results, expected), same(call.both(), expected)


def test_wrong_captures_are_refused_on_every_rank(nccl, world_size):
    others = ", ".join(str(rank) for rank in range(world_size) if rank != 1)
    for (first, odd, backward, forward), *right in nccl.run(world_size, refused):
        assert "this call is captured in a CUDA graph, and the first of its kind: make the same call once before" in first
        assert "captured in a CUDA graph is" in odd
        assert "True on rank 1" in odd
        assert f"False on rank{'s' * (world_size > 2)} {others}" in odd
        assert "the backward pass is captured in a CUDA graph, but the forward pass was not: capture both, or neither" in backward
        assert "the forward pass is captured in a CUDA graph, but the backward pass was not: capture both, or neither" in forward
        assert right == [True, True]


@deterministic()
def reduced_overhead(group):
    """Whether torch.compile with CUDA graphs gives the same bits, in inference and in training."""
    call = Call(group, group, ra.gather())
    torch.compiler.reset()

    def attention(q, k, v):
        # doubling is exact in any precision of fused code
        return 2 * ra.ring_attention(2 * q, k, v, **call.options)

    compiled = torch.compile(attention, mode="reduce-overhead", fullgraph=True)
    right = []
    for seed in (0, 1, 2, 3, 0):
        call.change(seed)
        out = attention(*call.leaves)
        expected = out, *torch.autograd.grad(out, call.leaves, call.dout)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            right.append(torch.equal(compiled(*call.leaves), out))
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*call.leaves)
        right.append(same((out, *torch.autograd.grad(out, call.leaves, call.dout)), expected))
    return right


def test_reduce_overhead(nccl, world_size):
    assert nccl.run(world_size, reduced_overhead, timeout=120) == [[True] * 10] * world_size
