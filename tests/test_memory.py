"""Memory: a rank's peak is linear in its tokens, and a thousand steps leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.transport import run_ranks
from tests.allocation import Peak, WithoutCopies

pytestmark = pytest.mark.usefixtures("one_thread")


SIZES = [640, 768, 896, 1024, 1280, 1536]


@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather(), ra.waves(1)], ids=repr)
def test_the_peak_is_linear_in_tokens(schedule):
    """Forward and backward on each of 3 ranks, for six numbers of tokens a rank."""

    def peak(transport, tokens):
        transport.__class__ = WithoutCopies
        q, k, v = (torch.zeros(1, tokens, heads, 16) for heads in (2, 1, 1))
        with Peak(q, k, v) as counted:
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = ra.ring_attention(*leaves, layout=ra.zigzag(3 * tokens, 3), group=transport, schedule=schedule)
            torch.autograd.grad(out, leaves, out.detach())
        return counted.peak

    peaks = np.array([run_ranks(3, lambda t, tokens=tokens: peak(t, tokens)) for tokens in SIZES]).T
    for of_rank in peaks:
        slope, start = np.polyfit(SIZES, of_rank, 1)
        rest = of_rank - (slope * np.array(SIZES) + start)
        assert 1 - rest.var() / of_rank.var() > 0.999, of_rank
        # what does not grow is no more than a few blocks of scores
        assert abs(start) < 8 * 2 * 256 * 512 * 4


def state():
    """What a step might leave behind: objects, bytes of Python, bytes of the process, threads, descriptors, files of shared memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(os.listdir("/proc/self/fd"))
    files = len([name for name in os.listdir("/dev/shm") if name.startswith("ringattn")])
    python = tracemalloc.get_traced_memory()[0]
    return np.array(
        [len(gc.get_objects()), python, pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), descriptors, files]
    )


def many_steps(group):
    """The state after 150 steps, and after a thousand more. The first 100 fill all caches; later one call in twenty is a new one.

    In one step of five, rows move between the ranks; in each step, the ranks agree.
    """
    layout = ra.contiguous(12, 2)

    def step(number):
        window = number if number < 100 or number % 20 == 0 else number % 7
        mask = ra.sliding_window(window, 1) if number % 5 == 0 else ra.documents(lengths=[6, 6], causal=False, window=(window, 1))
        q, k, v = (torch.ones(1, 6, heads, 4, requires_grad=True) for heads in (2, 1, 1))
        schedule = (ra.ring(), ra.gather(), None)[number % 3]
        out, stats = ra.ring_attention(q, k, v, layout=layout, mask=mask, group=group, schedule=schedule, return_stats=True)
        (out.sum() + stats.lse.sum()).backward()

    states = []
    tracemalloc.start()
    for number in range(1150):
        step(number)
        if number in (149, 1149):
            states.append(state())
    tracemalloc.stop()
    return states


def test_a_thousand_steps_leave_nothing_behind(gloo):
    for before, after in gloo.run(2, many_steps, timeout=280):
        objects, python, process, *counts = after - before
        print(after - before)
        assert objects <= 20
        assert python < 32 * 1024
        assert process < 4 << 20
        assert counts == [0, 0, 0]
