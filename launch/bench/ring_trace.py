"""Traces of `bench ring --trace`: one profiled pass of each method, and how much of its transfers no computation hides."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from .ring_measure import Entry

Intervals = list[tuple[float, float]]  # (begin, end) of each
_TRANSFERS = ("nccl", "Memcpy PtoP", "Memcpy DtoD")  # words in the names of kernels and copies that move data


def trace(entries: list[Entry], folder: Path, rows: list[dict]) -> None:
    """Profile a forward and backward pass of each method; rank 0 writes a trace and adds the share of exposed transfers to the row."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry, row in zip(entries, rows):
        on_gpu = entry.case.device == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
        method = entry.make()
        dist.barrier()
        if method is None:
            continue
        with torch.profiler.profile(activities=activities) as profile:
            method.forward()
            method.backward()
            if on_gpu:
                torch.cuda.synchronize()
        if dist.get_rank() == 0:
            path = folder / f"trace-{entry.name}-{entry.case.tokens}.json"
            profile.export_chrome_trace(str(path))
            moving, busy = device_intervals(json.loads(path.read_text())["traceEvents"])
            alone = length(moving) - overlap(moving, busy)
            row |= {"transfer_ms": length(moving) / 1e3, "exposed": alone / length(moving) if moving else 0.0}


def device_intervals(events: list[dict]) -> tuple[Intervals, Intervals]:
    """(transfers, computation) on the device, each as disjoint ascending intervals in microseconds."""
    moving, busy = [], []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        interval = event["ts"], event["ts"] + event["dur"]
        transfer = any(word.lower() in event["name"].lower() for word in _TRANSFERS)
        (moving if transfer else busy).append(interval)
    return union(moving), union(busy)


def union(intervals: Intervals) -> Intervals:
    """The same points, as disjoint ascending intervals."""
    joined: Intervals = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Intervals) -> float:
    """The total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def overlap(a: Intervals, b: Intervals) -> float:
    """The length that two lists of disjoint intervals have in common."""
    return length(a) + length(b) - length(union([*a, *b]))
