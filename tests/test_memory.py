"""Memory: a rank's peak is linear in its tokens, and a thousand steps leave nothing behind."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.runtime import context
from ringattn.runtime.groups import get_context
from ringattn.transport import Alone, SilentTransport, run_ranks
from tests.allocation import Peak, WithoutCopies

pytestmark = pytest.mark.usefixtures("one_thread")


SIZES = [640, 768, 896, 1024, 1280, 1536]


@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather(), ra.waves(1)], ids=repr)
@pytest.mark.some(1)
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
    """What a step might leave behind: objects, blocks of Python's memory, bytes of the process, threads, descriptors, maps of memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(os.listdir("/proc/self/fd"))
    shared = Path("/proc/self/maps").read_text().count("ringattn-")
    process = pages * os.sysconf("SC_PAGE_SIZE")
    return np.array([len(gc.get_objects()), sys.getallocatedblocks(), process, threading.active_count(), descriptors, shared])


def step(group, number):
    """Forward and backward of one of many calls. Of five numbers, one is of a call in which rows move between two ranks."""
    mask = ra.documents(lengths=[6, 6], causal=False, window=(number, 1)) if number % 5 else ra.sliding_window(number, 1)
    layout = ra.contiguous(12, dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else group.size)
    q, k, v = (torch.ones(1, layout.lengths[0], heads, 4, requires_grad=True) for heads in (2, 1, 1))
    schedule = (ra.ring(), ra.gather(), None)[number % 3]
    out, stats = ra.ring_attention(q, k, v, layout=layout, mask=mask, group=group, schedule=schedule, return_stats=True)
    (out.sum() + stats.lse.sum()).backward()


def left_behind(group, calls, rounds):
    """How the state changes from the first round of calls to the last."""
    if group is None:
        group = Alone()
    states = []
    for turn in range(1 + rounds):
        for number in range(calls):
            step(group, number)
        if turn in (0, rounds):
            states.append(state())
    return states[1] - states[0]


def changes(group):
    """Of 1,000 steps of 20 calls on these ranks; and of 300 steps of 100 calls, more than caches keep, on this rank alone."""
    return left_behind(group, 20, 50), left_behind(None, 100, 3)


@pytest.mark.thorough
def test_a_thousand_steps_leave_nothing_behind(gloo):
    for objects, blocks, process, *counts in itertools.chain(*gloo.run(2, changes, timeout=280)):
        assert objects <= 20
        # one or two blocks of 65 bytes a step stay allocated, inside torch and NumPy, but no object of Python; a step has 20 calls or more
        assert blocks <= 4000
        assert process < 4 << 20
        assert counts == [0, 0, 0]


@pytest.mark.thorough
def test_hundreds_of_new_batches_leave_nothing_behind(monkeypatch):
    """Each step has other documents, so that nothing is used again. Bytes are those of Python and NumPy."""
    monkeypatch.setattr(context, "_KEPT_BYTES", 1 << 17)
    generator, group = np.random.default_rng(0), SilentTransport(1, 4)
    q, k, v = (torch.ones(1, 32, heads, 4, requires_grad=True) for heads in (2, 1, 1))

    def steps(count):
        for _ in range(count):
            cuts = np.sort(generator.choice(127, 12, replace=False)) + 1
            mask = ra.documents([0, *cuts.tolist(), 128])
            layout = ra.balanced(mask, 128, 4)
            ra.prepare(layout, mask, like=(q, k, v), group=group)
            ra.ring_attention(q, k, v, layout=layout, mask=mask, group=group).sum().backward()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        # facts of calls are kept for 64 batches
        before = steps(70)
        kept = get_context(group)._attentions
        assert 8 <= len(kept) < 40
        of_a_batch = sum(one.nbytes for one in kept.values()) / len(kept)
        # batches differ in size; all of these together would take four times as much
        assert steps(80) - before < 20 * of_a_batch
    finally:
        tracemalloc.stop()
