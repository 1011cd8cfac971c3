"""What a batch that was never seen costs the host, counted."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import ringattn as ra
from ringattn.runtime.context import Context
from ringattn.transport import SilentTransport
from tests.counting import calls_of

# by layout, documents, tokens and ranks: the most function calls, Python's and built-in ones, of a layout and of what a rank does with it;
# and the most bytes of arrays at a time
NEW_BATCH = {
    (ra.balanced, 16, 1 << 15, 4): (495, 1890, 75000),
    (ra.balanced, 128, 1 << 17, 8): (1160, 2600, 175000),
    (ra.balanced, 2000, 1 << 20, 8): (3780, 2610, 760000),
    (ra.balanced, 2000, 1 << 20, 64): (13690, 7600, 1680000),
    (ra.placed, 128, 1 << 17, 8): (1340, 790, 60000),
    (ra.placed, 2000, 1 << 20, 8): (4100, 700, 840000),
}


def peak_of(function):
    """The most bytes that a function holds at a time, beside what was there before."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def first_use(group, layout, mask):
    """What the first call does with a layout and a mask besides the tables of its kernels."""
    found = Context(group).rank_attention(layout, mask, None)
    for one_pass in (found.program.forward, found.program.backward):
        for launch in one_pass.launches:
            assert launch.tiles is not None
    return found


@pytest.mark.parametrize("case", NEW_BATCH, ids=lambda case: "-".join([case[0].__name__, *map(str, case[1:])]))
def test_what_a_new_batch_costs_the_host(case):
    """It rises if a rank makes other ranks' part of a plan, compares all spans with all documents, or makes an object of each."""
    make_layout, documents, tokens, ranks = case
    generator = np.random.default_rng(0)
    group = SilentTransport(ranks // 2, ranks)

    def fresh():
        cuts = np.sort(generator.choice(tokens - 1, documents - 1, replace=False)) + 1
        return ra.documents([0, *cuts.tolist(), tokens])

    mask = fresh()
    first_use(group, make_layout(mask, tokens, ranks), mask)
    mask = fresh()
    of_layout, layout = calls_of(lambda: make_layout(mask, tokens, ranks))
    of_use, _ = calls_of(lambda: first_use(group, layout, mask))
    mask = fresh()
    peak = peak_of(lambda: first_use(group, make_layout(mask, tokens, ranks), mask))
    for found, most in zip((of_layout, of_use, peak), NEW_BATCH[case]):
        assert found <= most, (of_layout, of_use, peak)


@pytest.mark.parametrize("schedule", [None, ra.ring(), ra.waves(1), ra.double_ring(2)], ids=repr)
def test_a_forward_pass_alone_makes_no_backward_pass(schedule):
    """Neither does counting the bytes of what is kept."""
    mask = ra.documents(lengths=[300, 150, 62])
    found = Context(SilentTransport(2, 4)).rank_attention(ra.balanced(mask, 512, 4), mask, schedule)
    before = found.nbytes
    assert all(launch.tiles is not None for launch in found.program.forward.launches)
    assert found.nbytes > before
    assert found.program.made == (found.program.forward,)
    backward = found.program.backward
    assert found.program.made == (found.program.forward, backward)
    assert found.program.backward is backward
