"""Splits: how many, for what tables; `interpreter_cases.py` and `test_gpu.py` run them."""

import numpy as np
import pytest
import torch

from ringattn_kernels import TileTable, split_choice, splits
from tests.kernels import dense

CPU = torch.device("cpu")
H200 = 132


def best(blocks: int, steps: int, heads: int = 1) -> int:
    return split_choice.best(np.full(blocks, steps), heads, H200)


@pytest.mark.parametrize(("blocks", "steps", "heads"), [(1, 1024, 4), (16, 1024, 4), (1, 4096, 1), (3, 500, 7)])
def test_few_blocks_are_split_until_every_multiprocessor_has_work(blocks, steps, heads):
    count = best(blocks, steps, heads)
    before, after = (split_choice.predicted(np.full(blocks, steps), n, heads, H200) for n in (1, count))
    floor = blocks * steps * heads / H200
    assert after < 1.25 * floor + split_choice.SPLIT_COST + split_choice.MERGE_COST < before
    assert count * blocks * heads <= split_choice.PER_PROCESSOR * H200


def test_one_block_a_multiprocessor_is_left_alone():
    assert best(1, 1024, H200) == best(16, 1024, 8) == best(H200, 64) == 1


def test_what_takes_a_few_steps_is_not_worth_it():
    assert best(1, 1) == best(1, 7) == best(64, 4) == 1


def test_long_blocks_alone_are_split():
    steps = np.array([256] * 8 + [16] * 60)
    assert split_choice.best(steps, 1, H200) > 4
    assert split_choice.best(steps[8:], 2, H200) == 1


def test_a_program_that_goes_through_its_steps_for_several_heads_has_as_many_times_the_work():
    assert split_choice.best(np.full(8, 8), 2, H200, walks=4) == split_choice.best(np.full(8, 32), 2, H200) == 8
    # but no fewer steps than one
    assert split_choice.best(np.full(1, 2), 1, H200, walks=64) == 2


def test_less_than_one_split_is_refused():
    table = TileTable(np.array(dense.full(100, 100)), 100, 100)
    with pytest.raises(ValueError, match="splits is 0, but must be at least 1"):
        splits.query_splits(table, 64, 64, 1, CPU, 0)


def test_nothing_to_split():
    assert split_choice.best(np.array([], dtype=int), 8, H200) == split_choice.best(np.zeros(4, int), 8, H200) == 1


@pytest.mark.parametrize("tiles", [dense.causal(8192), dense.full(8192, 4096), dense.documents(*[512] * 16)], ids=len)
@pytest.mark.parametrize("heads", [8, 32])
def test_blocks_enough_for_the_chip_are_left_as_they_are(monkeypatch, tiles, heads):
    monkeypatch.setattr(splits, "multiprocessors", lambda device: H200)
    table = TileTable(np.array(tiles), 8192, max(tile[3] for tile in tiles))
    how = splits.query_splits(table, 128, 128, heads, CPU)
    assert how.most == 1
    assert torch.equal(table.query_blocks(128, 128, CPU, how.most).items, table.query_blocks(128, 128, CPU).items)
    assert splits.key_splits(table, 128, 64, heads, 1, CPU).most == 1


def test_the_blocks_to_merge_come_with_their_splits_and_those_with_none_last(monkeypatch):
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 8)
    table = TileTable(np.array([(64, 128, 0, 400, -400, 128), (130, 200, 0, 2000, -2000, 200)]), 260, 2000)
    how = splits.query_splits(table, 64, 16, 1, CPU)
    items = table.query_blocks(64, 16, CPU, how.most).items
    assert how.most > 1 and how.touched == 3
    assert sorted(how.blocks[:, 0].tolist()) == [0, 64, 128, 192, 256]
    assert how.blocks[3:].tolist() == [[0, 0], [256, 0]]
    for first_row, count in how.blocks.tolist():
        assert sorted(items[items[:, 0] == first_row, 3].tolist()) == list(range(count))
