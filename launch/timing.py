"""Device timing that the benchmarks share."""

import random
import statistics
import time
from collections.abc import Callable

import torch

_REST = 0.02  # seconds
_AHEAD = 2_000_000  # clock cycles, about a millisecond


def milliseconds(function: Callable[[], object], repeats: int = 10, warmup: int = 2) -> float:
    """Median time of one call on the device, by CUDA events."""
    return interleaved({"": function}, repeats, warmup)[""]


def interleaved(functions: dict[str, Callable[[], object]], repeats: int = 10, warmup: int = 2) -> dict[str, float]:
    """Median milliseconds of each function.

    They take turns, in another order each round and from rest: after one that heats the chip the next runs at lower clocks.
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    events = {name: [] for name in functions}
    order, shuffler = list(functions), random.Random(0)
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name in order:
            function = functions[name]
            torch.cuda.synchronize()
            time.sleep(_REST)
            # the device is kept busy until the host has queued all of the call, or launches would be timed too
            torch.cuda._sleep(_AHEAD)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}
