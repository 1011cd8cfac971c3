"""Measures the methods of `bench ring`: rounds in which all take turns, their times, peak memory and bytes sent."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from .shared.cases import RingCase
from .shared.methods import Method, count_sent, make_method
from .shared.ranks import slowest
from .shared.timing import REST, spread

_LONG = 15.0  # seconds; a round that takes longer is not repeated
_IN_A_ROW = 5  # calls of a turn in which nothing is queued ahead, as the layers of a model make them
_AHEAD = 24_000_000  # clock cycles, about twelve milliseconds


class Times(NamedTuple):
    """Seconds of one turn: of the forward pass, of both passes, and of the host for both."""

    forward: float
    both: float
    host: float


@dataclass
class Entry:
    """A method on a case, and what this rank measured of it.

    ahead: let the host queue a turn while its GPU is still busy; else a turn is some calls one after another, and each starts on an idle
    GPU, and waits for the host. A rank that takes no part records zeros, which the maximum over ranks ignores.
    """

    name: str
    case: RingCase
    ahead: bool = True
    method: Method | None = None
    times: list[Times] = field(default_factory=list)
    memory: int = 0
    sent: int = 0

    def turn(self, calls: int = 1) -> None:
        """Forward and backward so many times, each on an idle GPU; the ranks start together."""
        rest(self.case.device)
        for call in range(calls):
            if call:
                start_together(self.case.device)
            self.times.append(Times(0.0, 0.0, 0.0) if self.method is None else once(self.method, self.case.device, self.ahead))

    @property
    def calls(self) -> int:
        """Of a turn, behind the first one."""
        return 1 if self.ahead else _IN_A_ROW

    def make(self) -> Method | None:
        """The method, on ranks that take part."""
        return make_method(self.name, self.case) if self.case.ranks.takes_part else None

    def first_turn(self) -> None:
        """Make the method, and measure its memory and messages as well."""
        self.method = self.make()
        before = _reset_peak(self.case.device)
        if self.method is None:
            self.turn()
            return
        with count_sent(self.method) as sent:
            self.turn()
        self.sent = sum(sent)
        if self.case.device == "cuda":
            self.memory = torch.cuda.max_memory_allocated() - before - self.method.results_bytes


def measure(entries: list[Entry], seconds: float | None) -> list[dict]:
    """A row for each entry, with peak memory and messages of the first round.

    The first round warms up, and so does another one, in which passes are recorded. The first one's times count only if no other round
    follows: if it took too long, or with `seconds` None.
    """
    device = entries[0].case.device
    for entry in entries:
        entry.first_turn()
    rounds = rounds_after([entry.times[0] for entry in entries], seconds, device)
    order, shuffler = list(entries), random.Random(0)
    for _ in range(rounds + 1 if rounds else 0):
        shuffler.shuffle(order)
        for entry in order:
            entry.turn(entry.calls)
    rows = [_row(entry, entry.times[1 + entry.calls :] if rounds else entry.times) for entry in entries]
    for entry in entries:
        entry.method = None
    return rows


def rounds_after(first: Sequence[Times], seconds: float | None, device: str) -> int:
    """How many more rounds fit into about `seconds`, from the times of the first; 0 if the first took the GPUs more than `_LONG` seconds.

    Only the time that a GPU takes beyond its host counts as long: a GPU that is as slow as its host has waited for kernels to compile.
    """
    both, host = sum(one.both for one in first), sum(one.host for one in first)
    total, computed = slowest([both + REST * len(first), both - host * (device == "cuda")], device)
    return 0 if seconds is None or computed > _LONG else min(10, max(2, int(seconds / total)))


def _row(entry: Entry, times: Sequence[Times]) -> dict:
    case = entry.case
    found = [Times(*slowest(one, case.device)) for one in times]
    forward = spread([1e3 * one.forward for one in found])
    both = spread([1e3 * one.both for one in found])
    host = spread([1e3 * one.host for one in found])
    memory, sent = slowest([entry.memory, entry.sent], case.device)
    flop = case.forward_flop
    return {
        "method": entry.name,
        "ranks": case.ranks.size,
        "tokens": case.tokens,
        "tokens_per_gpu": case.tokens // case.ranks.size,
        "rounds": len(times),
        "forward_ms": forward.median,
        "forward_ms_quartiles": [forward.lower, forward.upper],
        "forward_backward_ms": both.median,
        "forward_backward_ms_quartiles": [both.lower, both.upper],
        "host_ms": host.median,
        "forward_tflops": flop / forward.median / 1e9,
        "forward_backward_tflops": 3.5 * flop / both.median / 1e9,
        "peak_bytes_beyond_inputs": int(memory),
        "sent_bytes": int(sent) if sent else None,
    }


def once(method: Method, device: str, ahead: bool = True) -> Times:
    """One turn. On a GPU the host is `ahead` of it, as in training, or the GPU waits for its host."""
    if device == "cpu":
        began = time.perf_counter()
        method.forward()
        middle = time.perf_counter()
        method.backward()
        end = time.perf_counter()
        return Times(middle - began, end - began, end - began)
    start, turned, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    if ahead:
        torch.cuda._sleep(_AHEAD)
    start.record()
    began = time.perf_counter()
    method.forward()
    turned.record()
    method.backward()
    host = time.perf_counter() - began
    done.record()
    torch.cuda.synchronize()
    return Times(start.elapsed_time(turned) / 1e3, start.elapsed_time(done) / 1e3, host)


def rest(device: str) -> None:
    """Let all ranks idle for a moment and leave together, so that earlier work does not lower the clocks of the next turn."""
    if device == "cpu":
        dist.barrier()
        return
    start_together(device)
    torch.cuda.synchronize()
    time.sleep(REST)
    start_together(device)


def start_together(device: str) -> None:
    """Let all ranks' hosts come to an idle GPU, and every GPU wait for the last one."""
    if device == "cpu":
        dist.barrier()
        return
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device="cuda"))


def _reset_peak(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
