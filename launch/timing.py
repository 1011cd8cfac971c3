"""Device timing that the benchmarks share."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REST = 0.02  # seconds
_AHEAD = 2_000_000  # clock cycles, about a millisecond


def milliseconds(function: Callable[[], object], repeats: int = 10, warmup: int = 2) -> float:
    """Median time of one call on the device, by CUDA events."""
    return interleaved({"": function}, repeats, warmup)[""]


def interleaved(functions: dict[str, Callable[[], object]], repeats: int = 10, warmup: int = 2) -> dict[str, float]:
    """Median milliseconds of each function, as `spreads` measures them."""
    return {name: spread.median for name, spread in spreads(functions, repeats, warmup).items()}


@dataclass(frozen=True)
class Spread:
    """Milliseconds: the median and both quartiles."""

    lower: float
    median: float
    upper: float


def spreads(functions: dict[str, Callable[[], object]], repeats: int = 10, warmup: int = 2) -> dict[str, Spread]:
    """How long each function takes.

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
            time.sleep(REST)
            # the device is kept busy until the host has queued all of the call, or launches would be timed too
            torch.cuda._sleep(_AHEAD)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: spread([start.elapsed_time(end) for start, end in pairs]) for name, pairs in events.items()}


def spread(times: list[float]) -> Spread:
    """Of all times; of a single one, that."""
    if len(times) == 1:
        times = times * 2
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(lower, median, upper)
