"""Block tables: every live pair in exactly one step, unmasked only where the whole step is live."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn_kernels import TileTable
from ringattn_kernels.table import BEGIN, BlockTable, steps_of
from tests.kernels import dense

CPU = torch.device("cpu")


def walk(blocks, rows: int, columns: int, block: int, step: int) -> np.ndarray:
    """How often a kernel that walks this table attends to each pair; asserts what the kernels rely on."""
    items, segments = blocks.items.numpy(), blocks.segments.numpy()
    count = np.zeros((rows, columns), dtype=int)
    j = np.arange(columns)
    for first_row, segment_begin, segment_end, _ in items:
        i = np.arange(first_row, min(first_row + block, rows))[:, None]
        for begin, full_begin, full_end, end, lo, hi, row_begin, row_end in segments[segment_begin:segment_end]:
            assert 0 <= begin <= full_begin <= full_end <= end <= columns
            assert begin < end
            assert (full_begin - begin) % step == 0
            assert (full_end - full_begin) % step == 0
            band = (i >= row_begin) & (i < row_end) & (j >= begin) & (j < end) & (i - j >= lo) & (i - j <= hi)
            full = np.broadcast_to((j >= full_begin) & (j < full_end), band.shape)
            assert band[full].all(), "a pair of a full step is dead"
            # every edge step has a live pair, unless the band leaves a gap narrower than the step
            count[i[:, 0]] += band
    return count


def check(tiles, q_rows: int, k_rows: int, block: int, step: int) -> None:
    table = TileTable(np.array(tiles).reshape(-1, 6), q_rows, k_rows)
    live = dense.live_pairs(tiles, q_rows, k_rows).numpy()
    queries = table.query_blocks(block, step, CPU)
    keys = table.key_blocks(block, step, CPU)
    np.testing.assert_array_equal(walk(queries, q_rows, k_rows, block, step), live)
    np.testing.assert_array_equal(walk(keys, k_rows, q_rows, block, step), live.T)
    for splits in (2, 3, 7):
        check_splits(table, live, block, step, splits)
    for blocks, rows, axis in ((queries, q_rows, 1), (keys, k_rows, 0)):
        starts = blocks.items[:, 0].tolist()
        assert sorted(starts) == list(range(0, rows, block))
        any_live = np.array([live.any(axis)[start : start + block].any() for start in starts], dtype=bool)
        assert any_live[: blocks.touched].all()
        assert not any_live[blocks.touched :].any()


def check_splits(table: TileTable, live: np.ndarray, block: int, step: int, splits: int) -> None:
    """The splits of each block are numbered from 0, hold its pairs once, and are as even as steps allow."""
    whole, cut = (table.query_blocks(block, step, CPU, n) for n in (1, splits))
    np.testing.assert_array_equal(walk(cut, table.q_rows, table.k_rows, block, step), live)
    assert cut.touched == len(cut)
    sizes, longest = {}, 0
    for blocks in (whole, cut):
        steps = steps_of(blocks.items.numpy(), blocks.segments.numpy(), step)
        assert (np.diff(steps) <= 0).all()
        longest = longest or -(-steps.max(initial=1) // splits)
        for first_row, number, n in zip(blocks.items[:, 0].tolist(), blocks.items[:, 3].tolist(), steps.tolist()):
            sizes.setdefault(first_row, []).append((number, n))
    for (_, all_steps), *found in sizes.values():
        numbers, steps = zip(*sorted(found), strict=True) if found else ((), ())
        assert numbers == tuple(range(-(-all_steps // longest)))
        assert sum(steps) == all_steps and max(steps, default=0) - min(steps, default=0) <= 1


@pytest.mark.parametrize("n", [1, 2, 17, 63, 97, 127, 129, 1025])
@pytest.mark.parametrize("block_step", [(64, 32), (128, 64), (16, 128)], ids=str)
@pytest.mark.some(10)
def test_known_masks_are_covered_exactly(n, block_step):
    for tiles in (dense.causal(n), dense.full(n, n // 2 + 1), dense.window(n, n // 7, 2), dense.documents(n // 3, 1, 1, n)):
        q_rows = max(tile[1] for tile in tiles)
        k_rows = max(tile[3] for tile in tiles)
        check(tiles, q_rows, k_rows, *block_step)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sq=st.integers(1, 150), sk=st.integers(1, 150), block=st.sampled_from([16, 32, 64]))
def test_random_tiles_are_covered_exactly(seed, sq, sk, block):
    check(dense.random_tiles(np.random.default_rng(seed), sq, sk), sq, sk, block, 32)


@pytest.mark.parametrize("step", [32, 48])
def test_aligned_steps_cover_the_same_pairs(step):
    """Where a window ends elsewhere than at a multiple, its first step begins before it, and masks it."""
    tiles = [(0, 90, 16, 300, -40, 21), (90, 200, 32, 300, -7, 100)]
    table = TileTable(np.array(tiles), 200, 300)
    items, segments = table.cut("q", 64, step, 16)
    assert (segments[:, BEGIN] % 16 == 0).all() and not np.array_equal(segments, table.cut("q", 64, step)[1])
    blocks = BlockTable(torch.from_numpy(items), torch.from_numpy(segments), 0)
    assert np.array_equal(walk(blocks, 200, 300, 64, step), dense.live_pairs(tiles, 200, 300).numpy())


@pytest.mark.parametrize(
    ("places", "stride", "tile", "aligned"),
    [
        ((64, 16), 1, (0, 40, 16, 40, 0, 9), True),
        ((64, 8), 1, (0, 40, 16, 40, 0, 9), False),
        ((64, 16), 2, (0, 40, 16, 40, 0, 9), False),
        ((64, 16), 1, (0, 40, 8, 40, 0, 9), False),
    ],
)
def test_a_table_is_aligned_if_places_and_keys_are(places, stride, tile, aligned):
    assert TileTable(np.array([tile]), 40, 40, np.array([places]), stride).aligned(16) == aligned


def test_no_tiles_and_no_rows():
    check([], 70, 5, 32, 16)
    check([], 0, 0, 32, 16)


def test_tiles_without_a_live_pair_are_left_out():
    dead, alive = [(2, 6, 1, 4, 5, 9), (2, 6, 1, 4, -9, -2)], [(2, 6, 1, 4, 4, 9), (2, 6, 1, 4, -9, -1)]
    assert TileTable(np.array(dead + alive), 8, 8).tiles.shape == (2, 6)
    assert len(TileTable(np.array(dead + alive), 8, 8)) == 2
    for tile in dead:
        check([tile], 8, 8, 16, 16)
        assert not len(TileTable(np.array([tile]), 8, 8).tiles)
    for tile in alive:
        check([tile], 8, 8, 16, 16)


def test_causal_masks_only_the_diagonal():
    blocks = TileTable(np.array(dense.causal(1024)), 1024, 1024).query_blocks(128, 64, CPU)
    masked = blocks.segments[:, 3] - blocks.segments[:, 2] + blocks.segments[:, 1] - blocks.segments[:, 0]
    assert (masked == 128).all()


def test_longest_work_comes_first():
    blocks = TileTable(np.array(dense.causal(1024)), 1024, 1024).query_blocks(128, 64, CPU)
    assert blocks.items[:, 0].tolist() == list(range(896, -1, -128))


def test_a_table_is_built_once_and_never_changes():
    tiles = np.array(dense.causal(64))
    table = TileTable(tiles, 64, 64)
    blocks = table.query_blocks(32, 16, CPU)
    tiles[:] = 0
    assert table.query_blocks(32, 16, CPU) is blocks
    assert table.tiles[0, 1] == 64
    with pytest.raises(ValueError, match="read-only"):
        table.tiles[0, 0] = 1


def test_thousands_of_documents_are_cut_without_a_loop_over_them():
    lengths = np.full(100_000, 10)
    table = TileTable(np.array(dense.documents(*lengths)), 1_000_000, 1_000_000)
    blocks = table.query_blocks(128, 64, CPU)
    assert blocks.touched == -(-1_000_000 // 128)


@pytest.mark.parametrize(
    "tile",
    [(0, 0, 0, 4, 0, 4), (0, 9, 0, 4, 0, 4), (-1, 4, 0, 4, 0, 4), (0, 4, 2, 2, 0, 4), (0, 4, 0, 9, 0, 4), (0, 4, 0, 4, 1, 0)],
    ids=str,
)
def test_a_malformed_tile_is_refused(tile):
    with pytest.raises(AssertionError):
        TileTable(np.array([tile]), 8, 8)
