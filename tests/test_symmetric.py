"""When ranks can share memory, and what is said when they cannot."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.transport.cuda_memory import CudaMemory, unmap_kept
from ringattn.transport.symmetric import obstacle


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
        "budget": 1,
        **changes,
    }


OBSTACLES = {
    "none": ({}, None),
    "another host": ({2: {"host": "boot-2", "name": "node-2"}}, "rank 2 is on host node-2 and rank 0 on node-1, or in containers"),
    "an old driver": ({1: {"driver": False}}, "the driver of rank 1 has no batched copies: it is older than CUDA 12.8"),
    "one GPU for two": ({3: {"gpu": "GPU-1"}}, "ranks 1 and 3 share a GPU"),
    "a hidden GPU": ({1: {"visible": ["GPU-0", "GPU-1", "GPU-2"]}}, "rank 1 does not see rank 3's GPU"),
    "no way between": ({2: {"reached": ["GPU-1", "GPU-3"]}}, "rank 2's GPU does not reach rank 0's memory"),
    "different budgets": ({0: {"budget": 2}}, r"ranks have different budgets, \[2, 1, 1, 1\] bytes: pass the same on every rank"),
}


@pytest.mark.parametrize(("changes", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_keeps_ranks_from_sharing_memory(changes, reason):
    found = obstacle([facts(rank, **changes.get(rank, {})) for rank in range(4)])
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)


@pytest.mark.parametrize("make", [ra.symmetric, ra.process_group])
def test_without_a_group(make):
    with pytest.raises(ValueError, match=r"there is no default group: call torch\.distributed\.init_process_group first"):
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
    """What a rank hears whose tensors are on the CPU, and of a budget too small; and whether other transports work."""
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


def test_no_graph_captures_its_beginning(gloo):
    gloo.run(2, captured)


def test_on_cpus(gloo):
    for (device, budget), works in gloo.run(3, over_gloo):
        assert "q is on cpu, but the symmetric transport moves tensors between GPUs: use process_group() for these" in device
        assert budget == "budget is 1000 bytes, but 3 ranks need at least 131072: 64 KiB for each other rank"
        assert all(works)


def test_arenas_stay_mapped_while_a_graph_is_captured(monkeypatch):
    """Whose garbage is collected during a capture, which must not wait for the device."""
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
