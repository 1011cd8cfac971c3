"""Device timing that the benchmarks share."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REST = 0.02  # seconds of idle GPU before each timed call
_AHEAD = 2_000_000  # clock cycles, about a millisecond


@dataclass(frozen=True)
class Spread:
    """Milliseconds: the median and both quartiles."""

    lower: float
    median: float
    upper: float


def spread(times: list[float]) -> Spread:
    """The spread of some times; a single time is its own median and quartiles."""
    if len(times) == 1:
        times = times * 2
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(lower, median, upper)


def spreads(functions: dict[str, Callable[[], object]], repeats: int = 10, warmup: int = 2) -> dict[str, Spread]:
    """How long each function takes on the device, by CUDA events.

    The functions take turns, in another order each round, and each starts on an idle GPU: a call that heats the chip lowers the clocks
    of the next one.
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
            time.sleep(REST)
            # keep the device busy until the host has queued the whole call, else launches would be timed too
            torch.cuda._sleep(_AHEAD)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: spread([start.elapsed_time(end) for start, end in pairs]) for name, pairs in events.items()}


def milliseconds(function: Callable[[], object], repeats: int = 10, warmup: int = 2) -> float:
    """The median time of one call on the device."""
    return spreads({"": function}, repeats, warmup)[""].median
