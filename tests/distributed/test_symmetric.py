"""The symmetric transport on GPUs: it gives the bits of the process group's transport, whatever is slow; the host does not wait, and
copies run beside kernels that fill the GPU."""

import gc
import itertools
import logging
import time
from statistics import median
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import ringattn as ra
from ringattn.device import local
from ringattn.device.streams import InOrder, SideBySide
from ringattn.runtime.groups import get_context
from ringattn.schedule.program import compile_program
from ringattn.transport import Peer
from ringattn.transport.cuda_memory import CudaQueue
from ringattn.transport.staged import StagedTransport
from ringattn.transport.symmetric import SymmetricTransport

pytestmark = pytest.mark.gpu

SMALL = 1 << 20  # a budget so small that messages go in many pieces
CYCLES = 2_000_000  # about a millisecond


@pytest.fixture(params=[2, 4, 8], ids="{}gpus".format)
def world_size(request):
    return request.param


@triton.jit
def spin(target, STEPS):
    """Keep a multiprocessor busy: enough programs of 32 warps leave no room for another kernel."""
    x = tl.arange(0, 1024).to(tl.float32)
    for _ in range(STEPS):
        x = x * 0.999 + 0.001
    tl.store(target + tl.program_id(0) * 1024 + tl.arange(0, 1024), x)


def beside_a_full_gpu(group):
    """Milliseconds of an exchange of 64 MiB, of a later kernel that fills every multiprocessor, and of the host; whether data are right."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    symmetric = ra.symmetric(group)
    device = torch.device("cuda", torch.cuda.current_device())
    symmetric.connect(device)
    # two programs per multiprocessor, side by side or one after the other
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    target = torch.empty(programs * 1024, device=device)
    spin[programs,](target, 160, num_warps=32)
    sent = torch.full((64 << 20,), rank, dtype=torch.uint8, device=device)
    came = torch.full_like(sent, 255)
    torch.cuda.synchronize()
    dist.barrier(group)
    torch.cuda.synchronize()
    began = time.monotonic()
    handle = symmetric.exchange([Peer((rank + 1) % world_size, sent)], [Peer((rank - 1) % world_size, came)])
    host = time.monotonic() - began
    spin[programs,](target, 16_000_000, num_warps=32)
    over = torch.cuda.current_stream().record_event()
    while not all(mark.query() for mark in handle._marks):
        time.sleep(0.0005)
    exchange = time.monotonic() - began
    over.synchronize()
    kernel = time.monotonic() - began
    handle.wait()
    right = bool((came == (rank - 1) % world_size).all())
    return 1e3 * exchange, 1e3 * kernel, 1e3 * host, right


def test_copies_run_beside_a_full_gpu(nccl, world_size):
    for exchange, kernel, host, right in nccl.run(world_size, beside_a_full_gpu):
        assert right
        assert exchange < kernel / 10
        assert host < 10


def results(group, layout, schedule, seed=0, dtype=torch.bfloat16, deterministic=True):
    """(out, dq, dk, dv) of this rank's shard of random inputs."""
    generator = torch.Generator("cuda").manual_seed(100 * seed + dist.get_rank())
    s = layout.lengths[dist.get_rank()]
    shapes = (1, s, 4, 64), (1, s, 2, 64), (1, s, 2, 64), (1, s, 4, 64)
    *leaves, dout = (torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes)
    leaves = [x.requires_grad_() for x in leaves]
    # otherwise dq differs in its last bits from run to run
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        out = ra.ring_attention(*leaves, layout=layout, group=group, schedule=schedule)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    finally:
        torch.use_deterministic_algorithms(False)


def layouts(world_size):
    """Layouts of growing and shrinking lengths, with equal and unequal shards."""
    yield from (ra.zigzag(n, world_size) for n in (2048, 515, 8192, 16))
    ends = [0, 1, *range(900, 900 * world_size - 900, 900), 900 * world_size]
    yield ra.Layout(ends[-1], tuple((ra.Span(begin, end - begin),) for begin, end in zip(ends, ends[1:])))


def same(group, budget):
    """The cases in which the symmetric transport gives other bits than the process group's, in several calls in a row."""
    over_process_group, symmetric = ra.process_group(group), ra.symmetric(group, budget=budget)
    wrong = []
    for dtype in (torch.bfloat16, torch.float32):
        for schedule in (ra.ring(), ra.gather()):
            for number, layout in enumerate(layouts(dist.get_world_size(group))):
                expected = results(over_process_group, layout, schedule, number, dtype)
                for _ in range(2):
                    got = results(symmetric, layout, schedule, number, dtype)
                    bad = [name for name, x, y in zip(("out", "dq", "dk", "dv"), got, expected) if not torch.equal(x, y)]
                    wrong += [(str(dtype), repr(schedule), number, bad)] if bad else []
    return wrong


@pytest.mark.parametrize("budget", [SMALL, 256 << 20], ids=["in pieces", "whole"])
def test_same_bits_as_over_the_process_group(nccl, world_size, budget):
    assert nccl.run(world_size, same, budget, timeout=200) == [[]] * world_size


def overlapping(group):
    """Whether ranks can share memory after the first two of them shared memory in a smaller group."""
    rank, device = dist.get_rank(group), torch.device("cuda", torch.cuda.current_device())
    if rank < 2:
        pair = dist.new_group([0, 1], use_local_synchronization=True)
        ra.symmetric(pair, budget=SMALL).connect(device)
    symmetric = ra.symmetric(group, budget=SMALL)
    symmetric.connect(device)
    sent, came = (torch.full((1000,), fill, device=device) for fill in (rank, -1))
    peers = (rank + 1) % 3, (rank - 1) % 3
    symmetric.exchange([Peer(peers[0], sent)], [Peer(peers[1], came)]).wait()
    return bool((came == peers[1]).all())


def test_a_larger_group_after_a_smaller_one(nccl):
    assert all(nccl.run(3, overlapping))


def messages(group, budget, seed):
    """Whether messages of random sizes arrive whole. Two exchanges are under way at once; sent tensors are overwritten after the wait."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    symmetric = ra.symmetric(group, budget=budget)
    symmetric.connect(torch.device("cuda", torch.cuda.current_device()))
    generator = torch.Generator().manual_seed(seed)
    right, waiting = torch.ones((), dtype=torch.bool, device="cuda"), []

    def finish():
        handle, received, sent = waiting.pop(0)
        handle.wait()
        for tensor, value in received:
            right.logical_and_((tensor == value).all())
        for tensor in sent:
            tensor.fill_(255)

    for _ in range(12):
        sends, receives = [], []
        for src in range(world_size):
            for dst in range(world_size):
                for _ in range(int(torch.randint(0, 3, (), generator=generator)) if src != dst else 0):
                    nbytes = int(2 ** (22 * torch.rand((), generator=generator)))
                    value = int(torch.randint(0, 250, (), generator=generator))
                    if rank == src:
                        sends.append(Peer(dst, torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")))
                    if rank == dst:
                        receives.append((Peer(src, torch.full((nbytes,), 254, dtype=torch.uint8, device="cuda")), value))
        handle = symmetric.exchange(sends, [peer for peer, _ in receives])
        waiting.append((handle, [(peer.tensor, value) for peer, value in receives], [peer.tensor for peer in sends]))
        if len(waiting) == 2:
            finish()
    while waiting:
        finish()
    return bool(right)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [SMALL, 256 << 20], ids=["in pieces", "whole"])
def test_messages_arrive_whole(nccl, world_size, budget, seed):
    assert all(nccl.run(world_size, messages, budget, seed))


def as_they_are():
    """Passes are not replayed, so that what a test puts in their way is met in each."""
    return mock.patch.object(StagedTransport, "recorded_with", None)


def delayed(group, where, wait_for_readers, cycles=CYCLES):
    """Whether bits stay the same if some ranks' copies, or computations, are late."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    layout = ra.zigzag(1024 * world_size, world_size)
    symmetric = ra.symmetric(group, budget=SMALL)
    schedule = ra.ring()
    expected = [results(ra.process_group(group), layout, schedule, seed) for seed in range(3)]
    kept = CudaQueue.stage, CudaQueue.pull, CudaQueue.wait
    stage, pull, wait = kept

    def late(operation):
        def run(queue, *args):
            with torch.cuda.stream(queue.stream):
                torch.cuda._sleep(cycles)
            operation(queue, *args)

        return run

    if where == "stage" and rank % 2:
        CudaQueue.stage = late(stage)
    if where == "pull" and rank % 2:
        CudaQueue.pull = late(pull)
    if not wait_for_readers:
        CudaQueue.wait = lambda queue, values: wait(queue, ready) if (ready := [one for one in values if one[0].ready]) else None
    try:
        got = []
        with as_they_are():
            for seed in range(3):
                if where == "compute" and rank % 2:
                    torch.cuda._sleep(20 * cycles)
                got.append(results(symmetric, layout, schedule, seed))
        torch.cuda.synchronize()
    finally:
        CudaQueue.stage, CudaQueue.pull, CudaQueue.wait = kept
    return all(torch.equal(x, y) for a, b in zip(got, expected) for x, y in zip(a, b))


@pytest.mark.parametrize("where", ["stage", "pull", "compute"])
def test_delays_change_nothing(nccl, world_size, where):
    assert nccl.run(world_size, delayed, where, True) == [True] * world_size


def test_a_delay_changes_bits_if_nobody_waits_for_readers(nccl, world_size):
    """So the test above can fail."""
    # a delay longer than any that a busy host causes
    assert not all(nccl.run(world_size, delayed, "pull", False, 20 * CYCLES))


def replayed(group, budget, schedule):
    """Where replayed passes have other bits than those over the process group, however late queues are; and how many recordings there are.

    dq is summed in no fixed order.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    layout, symmetric = ra.zigzag(1024 * world_size, world_size), ra.symmetric(group, budget=budget)
    generator = torch.Generator().manual_seed(rank)
    wrong = []
    for seed in range(10):
        expected = results(ra.process_group(group), layout, schedule, seed, deterministic=False)
        for queue in (symmetric._stages, symmetric._near, *symmetric._pulls, None) if seed else ():
            if torch.rand((), generator=generator) < 0.4:
                with torch.cuda.stream(torch.cuda.current_stream() if queue is None else queue.stream):
                    torch.cuda._sleep(5 * CYCLES)
        got = results(symmetric, layout, schedule, seed, deterministic=False)
        # between them, calls of other sizes, and some that are not recorded
        if seed % 3 == 2:
            with as_they_are():
                results(symmetric, layout, schedule, seed)
            results(symmetric, ra.zigzag(300 * world_size, world_size), schedule, seed, deterministic=False)
        far = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(got, expected)]
        wrong += [(seed, far)] if far[0] or far[1] > 1e-3 or far[2] or far[3] else []
    kept = [type(x).__name__ for one in get_context(symmetric)._attentions.values() for x in one.replays.values()]
    return wrong, kept.count("Recording")


@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather()], ids=repr)
@pytest.mark.parametrize("budget", [SMALL, 256 << 20], ids=["in pieces", "whole"])
def test_replays_have_the_bits_of_other_passes(nccl, world_size, budget, schedule):
    for wrong, recordings in nccl.run(world_size, replayed, budget, schedule):
        assert wrong == []
        assert recordings == 4


def beside(group, schedule):
    """The relative differences of dq, dk and dv between launches side by side, some of them late, and launches one after another."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    layout = ra.zigzag(2048 * world_size, world_size)
    symmetric = ra.symmetric(group)
    generator = torch.Generator("cuda").manual_seed(rank)
    shapes = ((1, 2048, h, 128) for h in (8, 2, 2, 8))
    *leaves, dout = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    leaves = [x.requires_grad_() for x in leaves]
    make_streams, compute = local.streams, local.backward
    launches, kinds = itertools.count(), set()

    def gradients(make):
        out = ra.ring_attention(*leaves, layout=layout, group=symmetric, schedule=schedule)
        with as_they_are(), mock.patch.object(local, "streams", make), mock.patch.object(local, "backward", late):
            return torch.autograd.grad(out, leaves, dout)

    def late(*arguments, **options):
        if next(launches) % 3 == rank % 3:
            torch.cuda._sleep(CYCLES)
        compute(*arguments, **options)

    def seen(*arguments):
        made = make_streams(*arguments)
        kinds.add(type(made))
        return made

    expected = gradients(lambda *arguments: InOrder())
    worst = [0.0, 0.0, 0.0]
    for _ in range(5):
        got = gradients(seen)
        worst = [max(w, float((x - y).norm() / y.norm())) for w, x, y in zip(worst, got, expected)]
    return worst, kinds


@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather(), ra.waves(1)], ids=repr)
def test_launches_side_by_side(nccl, world_size, schedule):
    """dk and dv have the same bits; dq is always summed in no fixed order."""
    plan = ra.make_plan(ra.zigzag(2048 * world_size, world_size), ra.causal())
    wanted = compile_program(schedule, plan, 0).backward.side_by_side
    for (dq, dk, dv), kinds in nccl.run(world_size, beside, schedule):
        assert kinds == {SideBySide if wanted else InOrder}
        assert (dk, dv) == (0, 0)
        assert dq < 1e-3


def steps(group, count):
    """Bytes used on the GPU after 20 and after all steps: (by torch's tensors, reserved by torch, by all)."""
    symmetric = ra.symmetric(group)
    layout = ra.zigzag(4096, dist.get_world_size(group))
    used = []
    for step in range(count):
        results(symmetric, layout, ra.ring())
        if step + 1 in (20, count):
            torch.cuda.synchronize()
            gc.collect()
            free, total = torch.cuda.mem_get_info()
            used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free))
    return used, len(symmetric._outstanding)


def test_memory_is_flat(nccl, world_size):
    for (early, late), outstanding in nccl.run(world_size, steps, 300, timeout=200):
        assert early[:2] == late[:2]
        # other tests' processes may have freed GPU memory meanwhile
        assert late[2] <= early[2] + (8 << 20)
        assert outstanding == 0


def come_and_go(group):
    """GPU bytes that stay in use after a transport was freed: the median of five."""
    layout = ra.zigzag(512, dist.get_world_size(group))

    def free_bytes():
        torch.cuda.synchronize()
        gc.collect()
        # an arena is freed when no rank maps it any more
        dist.barrier(group)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    free = []
    for _ in range(6):
        results(ra.symmetric(group, budget=1 << 30), layout, ra.ring())
        free.append(free_bytes())
    # other tests' processes take and free GPU memory meanwhile
    return median(before - after for before, after in itertools.pairwise(free))


def test_arenas_are_freed_with_their_transports(nccl, world_size):
    assert max(nccl.run(world_size, come_and_go)) < 512 << 20


def choice(group):
    """Whether a group chooses the symmetric transport, what it logs, and whether bits are those of the process group's transport."""
    # a group that has not chosen yet
    group, lines = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ringattn")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    layout = ra.zigzag(777, dist.get_world_size(group))
    chosen = [results(group, layout, ra.ring()) for _ in range(2)]
    logger.removeHandler(handler)
    expected = results(ra.process_group(group), layout, ra.ring())
    equal = all(torch.equal(x, y) for got in chosen for x, y in zip(got, expected))
    return isinstance(get_context(group).transport._gpu, SymmetricTransport), lines, equal


def test_a_group_on_one_host_uses_it_by_itself(nccl, world_size):
    found = nccl.run(world_size, choice)
    assert all(symmetric and equal for symmetric, _, equal in found)
    for rank, (_, lines, _) in enumerate(found):
        assert len(lines) == (rank == 0)
    assert f"all {world_size} ranks are on one host and reach each other's memory" in found[0][1][0]


def different_budgets(group):
    message = ""
    try:
        results(ra.symmetric(group, budget=(1 + dist.get_rank(group)) << 20), ra.zigzag(64, dist.get_world_size(group)), None)
    except ValueError as error:
        message = str(error)
    return message


def test_budgets_must_be_equal(nccl, world_size):
    for message in nccl.run(world_size, different_budgets):
        assert "ranks have different budgets" in message
