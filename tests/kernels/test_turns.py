"""Turns: items meet every step of the table once, in their order, and the oldest running item waits for no other."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn_kernels import TileTable
from ringattn_kernels.hopper.turns import key_turns
from tests.kernels import dense

CPU = torch.device("cpu")
BLOCK = 32


def visits(turns, step: int) -> list[list[tuple[int, int]]]:
    """For each item the (block of sums, successor) of its steps, as a program meets them."""
    segments, successors = turns.segments.tolist(), turns.successors.tolist()
    return [
        [
            (block, successors[segment])
            for segment in reversed(range(begin, end))
            for block in reversed(range(segments[segment][0] // step, -(-segments[segment][3] // step)))
        ]
        for _, begin, end, _ in turns.items.tolist()
    ]


def run(turns, step: int, programs: int, random: np.random.Generator) -> dict[int, list[int]]:
    """Which items add to each block, in order, with so many programs at a time that proceed at random; all of them end."""
    waiting = list(enumerate(visits(turns, step)))
    counters, running = turns.first.tolist(), []
    added = {block: [] for block in range(len(counters))}
    while waiting or running:
        while waiting and len(running) < programs:
            running.append((waiting[0][0], iter(waiting[0][1]), None))
            waiting.pop(0)
        ready = []
        for place, (item, steps, at) in enumerate(running):
            at = at or next(steps, None)
            running[place] = (item, steps, at)
            if at is None or counters[at[0]] == item:
                ready.append(place)
        # the oldest program never waits
        assert 0 in ready
        place = int(random.choice(ready))
        item, steps, at = running[place]
        if at is None:
            running.pop(place)
        else:
            block, successor = at
            added[block].append(item)
            counters[block] = successor
            running[place] = (item, steps, None)
    return added


def check(tiles, q_rows: int, k_rows: int, step: int, seed: int) -> None:
    table = TileTable(np.array(tiles).reshape(-1, 6), q_rows, k_rows)
    turns, blocks = key_turns(table, BLOCK, step, CPU), table.key_blocks(BLOCK, 1, CPU)
    assert torch.equal(turns.items[:, 0], blocks.items[:, 0])
    expected = {block: [] for block in range(len(turns.first))}
    for item, (_, begin, end, _) in enumerate(blocks.items.tolist()):
        for first, _, _, stop, *_ in blocks.segments[begin:end].tolist():
            for block in range(first // step, -(-stop // step)):
                expected[block].append(item)
    random = np.random.default_rng(seed)
    for programs in (1, 2, 7, len(turns.items)):
        assert run(turns, step, programs, random) == expected
    # the pairs are those of the table, cut at multiples of a step alone
    live = np.zeros((q_rows, k_rows), dtype=int)
    i = np.arange(q_rows)[:, None]
    for first_row, begin, end, _ in turns.items.tolist():
        for first, full_begin, full_end, stop, lo, hi, row_begin, row_end in turns.segments[begin:end].tolist():
            j = np.arange(first_row, min(first_row + BLOCK, k_rows))
            band = (i >= first) & (i < stop) & (j >= row_begin) & (j < row_end) & (j - i >= lo) & (j - i <= hi)
            live[:, j] += band
            inside = (i >= max(first, full_begin)) & (i < min(stop, full_end))
            assert (band | ~inside).all()
    np.testing.assert_array_equal(live, dense.live_pairs(tiles, q_rows, k_rows).numpy())


@pytest.mark.parametrize("n", [1, 17, 64, 97, 129, 500])
@pytest.mark.parametrize("step", [16, 64])
def test_known_masks(n, step):
    for tiles in (dense.causal(n), dense.full(n, n), dense.window(n, n // 3, 2), dense.documents(n // 3, 1, n - n // 3 - 1)):
        check(tiles, n, n, step, n)


@given(seed=st.integers(0, 2**32 - 1), sq=st.integers(1, 200), sk=st.integers(1, 200), step=st.sampled_from([8, 32]))
def test_random_tables(seed, sq, sk, step):
    check(dense.random_tiles(np.random.default_rng(seed), sq, sk), sq, sk, step, seed)


def test_common_masks_are_not_cut_into_more_segments():
    n, step = 4096, 64
    for tiles in (dense.causal(n), dense.full(n, n), dense.documents(1000, 2000, 1096), dense.window(n, 1000)):
        table = TileTable(np.array(tiles), n, n)
        turns, blocks = key_turns(table, 128, step, CPU), table.key_blocks(128, 1, CPU)
        assert len(turns.segments) <= 1.1 * len(blocks.segments), tiles
