"""When ranks can share memory, what they say if they cannot, and what a call costs the host."""

import ctypes
import gc
import weakref
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.device import local
from ringattn.device.streams import SideBySide
from ringattn.runtime.groups import get_context
from ringattn.transport import SilentTransport, cuda_memory
from ringattn.transport.cuda_memory import CudaMemory, unmap_kept
from ringattn.transport.symmetric import SymmetricTransport, obstacle
from ringattn_kernels import direct, recordings, submission
from tests.counting import calls_of


def facts(rank, **changes):
    gpus = [f"GPU-{i}" for i in range(4)]
    reached = [gpu for gpu in gpus if gpu != f"GPU-{rank}"]
    return {
        "host": "boot-1 mnt:[1]",
        "name": "node-1",
        "driver": True,
        "gpu": f"GPU-{rank}",
        "visible": gpus,
        "reached": reached,
        "shares": False,
        "budget": 1,
        **changes,
    }


OBSTACLES = {
    "none": ({}, None),
    "another host": ({2: {"host": "boot-2", "name": "node-2"}}, "rank 2 is on host node-2 and rank 0 on node-1, or in containers"),
    "an old driver": ({1: {"driver": False}}, "the driver of rank 1 has no batched copies: it is older than CUDA 12.8"),
    "one GPU for two": ({3: {"gpu": "GPU-1"}}, "ranks 1 and 3 share a GPU, which only TORCH_SYMM_MEM_.*=1 on every rank allows"),
    "one GPU for two, of which one may": ({1: {"shares": True}, 3: {"gpu": "GPU-1"}}, "ranks 1 and 3 share a GPU"),
    "one GPU for two, which may": (
        {1: {"shares": True}, 3: {"gpu": "GPU-1", "shares": True, "reached": ["GPU-0", "GPU-2", "GPU-3"]}},
        None,
    ),
    "a hidden GPU": ({1: {"visible": ["GPU-0", "GPU-1", "GPU-2"]}}, "rank 1 does not see rank 3's GPU"),
    "no way between": ({2: {"reached": ["GPU-1", "GPU-3"]}}, "rank 2's GPU does not reach rank 0's memory"),
    "different budgets": ({0: {"budget": 2}}, r"ranks have different budgets, \[2, 1, 1, 1\] bytes: pass the same on every rank"),
}


@pytest.mark.parametrize(("changes", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_obstacles_to_sharing_memory(changes, reason):
    found = obstacle([facts(rank, **changes.get(rank, {})) for rank in range(4)])
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)


@pytest.mark.parametrize("make", [ra.symmetric, ra.process_group])
def test_without_a_group(make):
    with pytest.raises(ValueError, match="there is no default group: start the program with torchrun"):
        make()


@pytest.mark.parametrize("budget", [1.5, True, "1 GiB"], ids=str)
def test_a_budget_is_a_number_of_bytes(budget):
    with pytest.raises(ValueError, match=r"budget is a .*, but must be a number of bytes"):
        ra.symmetric(budget=budget)


def refusal(make):
    q = torch.ones(1, 5, 2, 4)
    with pytest.raises(ValueError) as caught:
        ra.ring_attention(q, q, q, group=make())
    return str(caught.value)


def over_gloo(group):
    """The errors for tensors on the CPU and for a budget that is too small, and whether other transports work."""
    messages = refusal(lambda: ra.symmetric(group)), refusal(lambda: ra.symmetric(group, budget=1000))
    over = ra.process_group(group)
    alone = ra.symmetric(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    q = torch.ones(1, 5, 2, 4)
    return messages, [
        bool((ra.ring_attention(q, q, q, group=ranks) - 1).abs().max() < 1e-6) for ranks in (group, over, over, alone)
    ]


def captured(group):
    transport = ra.symmetric(group)
    torch.cuda.is_current_stream_capturing, kept = (lambda: True), torch.cuda.is_current_stream_capturing
    try:
        with pytest.raises(ValueError, match="cannot map memory while a CUDA graph is captured: make the same call once before"):
            transport.connect(torch.device("cuda", 0))
    finally:
        torch.cuda.is_current_stream_capturing = kept


def test_memory_cannot_be_mapped_during_a_capture(gloo):
    gloo.run(2, captured)


def test_on_cpus(gloo):
    size = gloo.size  # groups of single ranks are made by all of them, because torch counts these too
    least = 65536 * (size - 1)
    for (device, budget), works in gloo.run(size, over_gloo):
        assert "q is on cpu, but the symmetric transport moves tensors between GPUs: use process_group() for these" in device
        assert budget == f"budget is 1000 bytes, but {size} ranks need at least {least}: 64 KiB for each other rank"
        assert all(works)


def test_arenas_stay_mapped_while_a_graph_is_captured(monkeypatch):
    """A capture must not wait for the device, so memory collected as garbage meanwhile is unmapped later."""
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    memory, arena = object.__new__(CudaMemory), torch.empty(1)
    memory._arena, there = arena, weakref.ref(arena)
    del memory, arena
    gc.collect()
    unmap_kept()
    assert there() is not None
    capturing = False
    unmap_kept()
    assert there() is None


class Driver:
    """Streams, events and driver functions that do nothing and count their calls."""

    def __init__(self):
        driver, self.called = self, Counter()

        class Stream:
            cuda_stream = 7

            def __init__(self, *arguments, **options):
                pass

            def record_event(self):
                event = Event()
                event.record(self)
                return event

            def wait_event(self, event):
                event.wait(self)

        class Event:
            cuda_event = 1

            def record(self, stream):
                driver.called["record"] += 1

            def wait(self, stream):
                driver.called["wait"] += 1

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device):
        self.called["current_stream"] += 1
        return self.Stream()

    def __getattr__(self, name):
        def function(*arguments):
            self.called[name] += 1
            return 0

        setattr(self, name, function)
        return function


class Arenas:
    """A `_SymmetricMemory` that gives every rank the same arena."""

    def __init__(self, arena):
        self.arena = arena

    @staticmethod
    def empty_strided_p2p(shape, *how):
        return torch.empty(shape, dtype=torch.uint8)

    @classmethod
    def rendezvous(cls, arena, name):
        return cls(arena)

    def get_buffer(self, *which):
        return self.arena


class OnNoDevice(SymmetricTransport):
    """The symmetric transport of a rank, for tensors on the CPU; nothing is copied."""

    def check_device(self, device):
        pass

    def connect(self, device):
        if self._device is None:
            memory = self._allocate(device)
            memory.meet(None)
            self._use(memory)
            self._device = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    """A CUDA driver without a GPU, for the transport."""
    driver = Driver()
    monkeypatch.setattr(cuda_memory.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(cuda_memory, "load_driver", cuda_memory.Driver)
    monkeypatch.setattr(cuda_memory, "as_group", lambda *arguments: nullcontext("name"))
    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", Arenas)
    for name, value in {
        "Stream": driver.Stream,
        "Event": driver.Event,
        "current_stream": driver.current_stream,
        "set_stream": lambda stream: None,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device: None,
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(recordings, "_is_capturing", lambda: False)
    yield driver
    # free the memory here: it asks whether a graph is captured
    gc.collect()


COUNTED = ("current_stream", "record", "wait", "cuMemcpyBatchAsync", "cuStreamBatchMemOp_v2")
# by number of ranks, for a forward and a backward pass: the most functions called, and the calls of those counted
OVERHEAD = {
    2: [(289, 1, 3, 4, 2, 3), (600, 3, 16, 18, 4, 6)],
    8: [(1104, 7, 21, 28, 14, 21), (1888, 10, 49, 58, 18, 27)],
}


@pytest.mark.parametrize("size", OVERHEAD)
def test_what_a_call_costs_the_host(size, driver, monkeypatch):
    """Counted in function calls, without kernels. It rises if a call repeats work that an earlier call with the same plan has done."""
    tokens, layout, group = 256, ra.zigzag(256 * size, size), OnNoDevice(None, control=SilentTransport(0, size))
    q, k, v, dout = (torch.randn(1, tokens, h, 8) for h in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    statistic = torch.ones(1, 4, tokens)
    monkeypatch.setattr(local, "forward", lambda *_, state, **__: state or (torch.zeros_like(dout), statistic + 1, statistic + 2))
    monkeypatch.setattr(local, "backward", lambda *_, **__: None)
    monkeypatch.setattr(local, "streams", lambda *_: SideBySide(torch.device("cuda", 0)))
    mask, schedule, outs = ra.causal(), ra.ring(), []

    def forward():
        outs.append(ra.ring_attention(*leaves, layout=layout, mask=mask, group=group, schedule=schedule))

    def backward():
        torch.autograd.grad(outs.pop(), leaves, dout)

    for _ in range(3):
        forward()
        backward()
    for one_pass, (most, *counts) in zip((forward, backward), OVERHEAD[size]):
        driver.called.clear()
        calls, _ = calls_of(one_pass)
        assert [driver.called[name] for name in COUNTED] == counts
        assert calls <= most


# a function in C that takes nothing, and returns 0 as a driver's function does
DOES_NOTHING = ctypes.CDLL(None).sched_yield


@pytest.fixture
def replaying(driver, monkeypatch):
    """Passes on the CPU are recorded and replayed, with no kernels among what they queue."""
    address = ctypes.cast(DOES_NOTHING, ctypes.c_void_p).value
    functions = submission.Functions((*[address] * 6, 0, 0, 0))
    monkeypatch.setattr(submission, "driver_functions", lambda: functions)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 7)
    for module in (recordings, direct):
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: 0)

    def empty(x, dtype=None):
        return torch.empty(x.shape, dtype=dtype or x.dtype)

    stubs = {
        "replayed": recordings.replay,
        "recorded": recordings.recorded,
        "state_of_replays": recordings.state,
        "forward": lambda q, *_, state, **__: state or (empty(q), empty(q[..., 0].mT), empty(q[..., 0].mT)),
        "backward": lambda *_, **__: None,
        "contiguous": lambda pair: tuple(map(empty, pair)),
        "queries": lambda q, out, dout, row_max, row_sum, *_, **__: local.Queries(q, dout, row_max, row_sum, row_sum),
        "query_sums": lambda queries, *_: SimpleNamespace(finish=lambda dtype: empty(queries.q, dtype)),
        "add": lambda *_: None,
        "rounded": lambda pair, dtype: tuple(empty(x, dtype) for x in pair),
        "streams": lambda *_: SideBySide(torch.device("cuda", 0)),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(local, name, stub)


def replayed_calls(size, schedule):
    """How many functions the forward and the backward pass of a replayed call take on rank 0."""
    group, layout, outs = OnNoDevice(None, control=SilentTransport(0, size)), ra.zigzag(64 * size, size), []
    q, k, v, dout = (torch.randn(1, 64, h, 8) for h in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(6):
        forward, _ = calls_of(lambda: outs.append(ra.ring_attention(*leaves, layout=layout, group=group, schedule=schedule)))
        backward, _ = calls_of(lambda: torch.autograd.grad(outs.pop(), leaves, dout))
    (ready,) = get_context(group).ready.values()
    assert ready._backward is not None
    return forward, backward


@pytest.mark.parametrize("schedule", [None, ra.ring(), ra.gather()], ids=str)
def test_a_replayed_call_of_eight_ranks_costs_little_more_than_one_of_four(schedule, replaying):
    """Each pass takes at most 1.3 times as many functions: its launches and messages are queued by one of them, in C."""
    of_four, of_eight = replayed_calls(4, schedule), replayed_calls(8, schedule)
    assert all(eight <= 1.3 * four for four, eight in zip(of_four, of_eight)), (of_four, of_eight)


class MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of cuda.h, for a wait or a write; its union holds six numbers of 64 bits."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


def test_arguments_of_the_driver(driver, monkeypatch):
    """Counts of 32 bits in the driver's own structure, and copies as targets, sources and sizes."""
    given = []
    for name in ("cuStreamBatchMemOp_v2", "cuMemcpyBatchAsync"):
        monkeypatch.setattr(driver, name, lambda *arguments: given.append(arguments) or 0)
    made = cuda_memory.Driver()
    made.operate(7, cuda_memory.WAIT, [(1 << 47, 3), (128, (1 << 32) + 5)])
    made.copy(7, [(1 << 47, 2, 3), (4, 5, 6)])
    wanted = bytes(MemoryOperation(1, 1 << 47, 3)) + bytes(MemoryOperation(1, 128, 5))
    assert given[0] == (7, 2, wanted, 0)
    targets, sources, sizes, count, *_, stream = given[1]
    columns = [list((ctypes.c_uint64 * 2).from_buffer_copy(column)) for column in (targets, sources, sizes)]
    assert (columns, count, stream) == ([[1 << 47, 4], [2, 5], [3, 6]], 2, 7)
    assert (cuda_memory.WAIT, cuda_memory.WRITE) == (1, 2)
