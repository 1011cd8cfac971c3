"""Device timing that the benchmarks share."""

import statistics
from collections.abc import Callable

import torch


def milliseconds(function: Callable[[], object], repeats: int = 10, warmup: int = 2) -> float:
    """Median time of one call on the device, by CUDA events."""
    return interleaved({"": function}, repeats, warmup)[""]


def interleaved(functions: dict[str, Callable[[], object]], repeats: int = 10, warmup: int = 2) -> dict[str, float]:
    """Median milliseconds of each function; they take turns, so that clocks and neighbours touch all alike."""
    for function in functions.values():
        for _ in range(warmup):
            function()
    events = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}
