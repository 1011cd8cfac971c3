"""Touches: a program that follows them finds the total of each block, however late the copy engine writes."""

import itertools

import numpy as np
import pytest

import ringattn_kernels as rk
from ringattn_kernels.hopper.touches import BEHIND, FIRST, LAST, LATE, NEAR, STEP, find_touches, touches
from ringattn_kernels.table import BEGIN, END
from tests.kernels import dense

ROWS, KEYS = 64, 128  # of a block


def walk(items, segments, found):
    """(segment, block, number) of each step, in order."""
    for _, begin, end, _ in items:
        for segment in range(begin, end):
            for block in range(segments[segment, BEGIN] // ROWS, -(-segments[segment, END] // ROWS)):
                yield segment, block, found.numbers[found.numbers[segment] + block]


def check(items, segments, found):
    """Blocks that steps touch, with how many; the copy engine writes what it was given only where a step waits for it."""
    total = dict[int, int]()  # of each block, how many steps are in its sums
    left = dict[int, int]()  # of each block, how many steps have left their dq
    pending = []  # blocks whose sums the copy engine was given
    for segment, block, number in walk(items, segments, found):
        assert number & STEP
        if number & (NEAR | BEHIND):
            written = len(pending) - (0 if number & NEAR else min(LATE, len(pending)))
            for earlier in pending[:written]:
                total[earlier] = total.get(earlier, 0) + 1
            del pending[:written]
        assert bool(number & FIRST) == (block not in left), (segment, block)
        if number & LAST:
            assert total.get(block, 0) == left.get(block, 0), (segment, block)
        else:
            # nobody adds to sums that are not stored yet
            assert number & FIRST or total.get(block, 0) > 0, (segment, block)
            pending.append(block)
        left[block] = left.get(block, 0) + 1
        if number & LAST:
            total[block] = -1
    assert all(total[block] == -1 for block in left)
    return left


def random_table(random):
    n, bounds = int(random.integers(1, 1500)), 6
    cuts = sorted({0, n, *random.integers(0, n + 1, bounds).tolist()})
    if random.random() < 0.3:  # packed documents, some of which touch a block of rows twice
        tiles = [(a, b, a, b, 0, b - a) for a, b in itertools.pairwise(cuts)]
    else:
        tiles = []
        for rows, keys in itertools.product(itertools.pairwise(cuts), itertools.pairwise(cuts)):
            lo, hi = np.sort(random.integers(-n, n, 2))
            if random.random() < 0.4:
                tiles.append((*rows, *keys, lo, hi + 1))
    return rk.TileTable(np.array(tiles).reshape(-1, 6), n, n)


def test_each_block_is_stored_first_and_read_last_when_all_is_there():
    random, waits = np.random.default_rng(0), set()
    for _ in range(300):
        table = random_table(random)
        if not len(table):
            continue
        items, segments = table.cut("k", KEYS, 1)
        found = touches(table, KEYS, ROWS)
        left = check(items, segments, found)
        assert found.steps == sum(left.values())
        assert found.touched == len(left) and found.untouched == (len(left) < -(-table.q_rows // ROWS))
        waits |= {number & (NEAR | BEHIND) for _, _, number in walk(items, segments, found)}
    assert waits == {0, NEAR, BEHIND}


@pytest.mark.parametrize(("rows", "met"), [(64, 1), (128, 1), (512, 2.5), (1024, 4.5)])
def test_steps_count_how_many_key_blocks_meet_a_block_of_queries(rows, met):
    found = touches(rk.TileTable(np.array(dense.causal(rows)), rows, rows), KEYS, ROWS)
    assert found.steps * ROWS == met * rows and not found.untouched


def test_a_block_that_one_step_touches_has_no_sums():
    items, segments = rk.TileTable(np.array([(0, 64, 0, 64, 0, 64)]), 200, 64).cut("k", KEYS, 1)
    found = find_touches(items, segments, 200, ROWS)
    assert [number for *_, number in walk(items, segments, found)] == [STEP + FIRST + LAST] and found.untouched
