"""`tables.c` and its twins in NumPy give the same numbers; a launch uploads what it reads, in one copy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn_kernels as rk
from ringattn_kernels import hopper, native, split_choice, splits, table
from ringattn_kernels.hopper import turns, work_queue
from tests.compiler import needs_compiler
from tests.kernels import dense

CPU = torch.device("cpu")
COSTS = split_choice.SPLIT_COST, split_choice.MERGE_COST, split_choice.SHORTEST, split_choice.PER_PROCESSOR
SIZES = st.sampled_from([1, 2, 7, 16, 61, 64, 97, 128, 192])
USERS = table, split_choice, work_queue, turns  # modules that call `tables.c`


def without_c(monkeypatch):
    for module in USERS:
        monkeypatch.setattr(module, "tables", lambda: None)


def in_c(name, *given):
    """What a function of `tables.c` gives."""
    module = native.tables()
    assert module is not None, "tables.c does not compile"
    return getattr(module, name)(*given)


def assert_same(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(x, y)


def random_table(seed: int) -> rk.TileTable:
    """Any tiles, or documents in any order with any bands, some without a live pair; with places or without."""
    random = np.random.default_rng(seed)
    q_rows, k_rows = random.integers(1, 400, 2).tolist()
    if random.integers(2):
        tiles = np.array(dense.random_tiles(random, q_rows, k_rows)).reshape(-1, 6)
    else:
        rows = min(q_rows, k_rows)
        bounds = np.unique([0, *random.integers(0, rows + 1, 30), rows])
        bands = np.sort(random.integers(-300, 300, (len(bounds) - 1, 2)))
        tiles = random.permutation(np.column_stack([bounds[:-1], bounds[1:], bounds[:-1], bounds[1:], bands]))
    places = random.integers(-(2**40), 2**40, (len(tiles), 2)) if random.integers(2) else None
    return rk.TileTable(np.asfortranarray(tiles) if random.integers(2) else tiles, q_rows, k_rows, places)


def copy_of(tiles: rk.TileTable) -> rk.TileTable:
    """The same table, from which nothing was made."""
    return rk.TileTable(tiles.tiles, tiles.q_rows, tiles.k_rows, tiles.places, tiles.stride)


def in_numpy(tiles: rk.TileTable, axis: str, *given):
    """`tiles.cut` by its twin."""
    with pytest.MonkeyPatch.context() as patch:
        without_c(patch)
        return copy_of(tiles).cut(axis, *given)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from("qk"), SIZES, SIZES, st.sampled_from([1, 1, 16]), st.sampled_from([2, 3, 11, 10**6])
)
def test_tables_are_cut_and_split_as_in_numpy(seed, axis, block, step, align, count):
    tiles = random_table(seed)
    rows = tiles.q_rows if axis == "q" else tiles.k_rows
    whole, parts = (in_numpy(tiles, axis, block, step, align, n) for n in (1, count))
    assert_same(
        native.integers(in_c("cut", tiles.tiles, tiles.places, axis == "k", rows, block, step, align), 4, whole[1].shape[1]), whole
    )
    assert_same(native.integers(in_c("split", *whole, step, count), 4, whole[1].shape[1]), parts)
    assert_same(tiles.cut(axis, block, step, align), whole)
    assert_same(tiles.cut(axis, block, step, align, count), parts)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_works_and_turns_are_ordered_as_in_numpy(data):
    block, step, count = (data.draw(sizes) for sizes in (SIZES, SIZES, st.sampled_from([1, 1, 2, 5])))
    tiles = random_table(data.draw(st.integers(0, 2**32 - 1)))
    heads, together, processors = (data.draw(st.integers(1, most)) for most in (9, 12, 140))
    warpgroups = data.draw(st.integers(1, 3))
    given = *in_numpy(tiles, "q", block, step, 1, count), step, warpgroups, heads, together, data.draw(st.booleans()), processors
    assert_same(native.integers(in_c("order", *given), work_queue.WORK_COLUMNS, given[1].shape[1]), work_queue.order_works(*given))
    given = *in_numpy(tiles, "k", block, 1), -(-tiles.q_rows // block) * block, step
    *found, successors, first = native.integers(in_c("turns", *given), 4, given[1].shape[1], 1, 1)
    assert_same((*found, successors[:, 0], first[:, 0]), turns.take_turns(*given))


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_splits_are_chosen_as_in_numpy(data):
    block, step, axis = (data.draw(sizes) for sizes in (SIZES, SIZES, st.sampled_from("qk")))
    tiles = random_table(data.draw(st.integers(0, 2**32 - 1)))
    heads, walks, processors = (data.draw(st.sampled_from(sizes)) for sizes in ((1, 1, 2, 3, 8), (1, 2, 4, 7), (1, 2, 7, 31, 132)))
    wanted = data.draw(st.sampled_from([None, None, 1, 2, 9, 10**6]))
    rows = tiles.q_rows if axis == "q" else tiles.k_rows
    given = *in_numpy(tiles, axis, block, step), step, rows, block, heads, walks, processors
    found, twin = in_c("choose", *given, wanted or 0, COSTS), split_choice.choose(*given, wanted)
    assert found[:4] == twin[:4]
    assert (found[4] is None) == (twin.blocks is None) == (twin.most == 1)
    if twin.blocks is not None:
        assert_same(native.integers((found[4],), 2), (twin.blocks,))
    assert split_choice.choice(tiles, axis, block, step, heads, walks, processors, wanted)[:4] == twin[:4]


@needs_compiler
def test_most_of_what_a_new_table_asks_of_the_host_is_done_in_c(monkeypatch):
    called, module = [], native.tables()

    def noted(name):
        return lambda *given: called.append(name) or getattr(module, name)(*given)

    for user in USERS:
        monkeypatch.setattr(
            user, "tables", lambda: SimpleNamespace(**{n: noted(n) for n in ("cut", "split", "choose", "order", "turns")})
        )
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    tiles = rk.TileTable(np.array(dense.causal(4096)), 4096, 4096)
    how = splits.query_splits(tiles, 128, 64, 2, CPU)
    work_queue.ordered(*tiles.cut("q", 128, 64, splits=how.most), 64, 2, 2, 2, True, 132)
    turns.key_turns(tiles, 128, 64, CPU)
    assert called == ["cut", "choose", "split", "order", "cut", "turns"]


@needs_compiler
def test_long_tables_are_cut_as_in_numpy():
    """Two thousand documents of 4 million rows, while other threads may go on."""
    bounds = np.linspace(0, 1 << 22, 2001).astype(int)
    tiles = rk.TileTable(np.array(dense.documents(*np.diff(bounds))), 1 << 22, 1 << 22)
    for axis in "qk":
        assert_same(tiles.cut(axis, 64, 1), in_numpy(tiles, axis, 64, 1))


ITEMS, SEGMENTS = np.array([[0, 0, 1, 0]], np.int32), np.array([[0, 0, 0, 9, 0, 9, 0, 9]], np.int32)
FARTHEST = 2**31 - 1


@needs_compiler
@pytest.mark.parametrize(
    "tile",
    [
        (0, 9, 0, 4, 0, 4),
        (-1, 4, 0, 4, 0, 4),
        (4, 4, 0, 4, 0, 4),
        (0, 4, -1, 4, 0, 4),
        (0, 4, 0, 2**40, 0, 4),
        (0, 4, 0, 4, -(2**31), 4),
        (0, 4, 0, 4, 0, 2**62),
    ],
    ids=str,
)
def test_tiles_that_would_be_written_elsewhere_are_refused(tile):
    with pytest.raises(ValueError, match="a tile leaves the rows, or 32 bits"):
        in_c("cut", np.array([tile]), None, False, 8, 4, 4, 1)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("cut", (np.zeros((1, 5), int), None, False, 8, 4, 4, 1), "no table of integers of 8 bytes in 6 columns"),
        ("cut", (np.zeros((1, 6)), None, False, 8, 4, 4, 1), "no table of integers"),
        ("cut", (np.zeros((1, 6), np.int32), None, False, 8, 4, 4, 1), "no table of integers"),
        ("cut", (np.zeros((1, 6), int), np.zeros((2, 2), int), False, 8, 4, 4, 1), "each tile has its places"),
        ("cut", (np.zeros((0, 6), int), None, False, 8, 0, 4, 1), "block is 0, but must be within 1"),
        ("cut", (np.zeros((0, 6), int), None, False, 2**31, 4, 4, 1), "rows is 2147483648"),
        ("split", (ITEMS + np.int32(1), SEGMENTS, 4, 2), "item 0 has segments that are not there"),
        ("split", (ITEMS, SEGMENTS, 0, 2), "step is 0"),
        ("split", (ITEMS.astype(int), SEGMENTS, 4, 2), "no table of integers of 4 bytes"),
        ("order", (ITEMS, SEGMENTS, 4, 4, 1, 1, False, 1), "warpgroups is 4, not in \\[1, 3\\]"),
        ("order", (np.repeat(ITEMS, 3, 0), SEGMENTS, 4, 3, 2**30, 1, False, 1), "there are 2\\*\\*31 works or more"),
        ("turns", (ITEMS, SEGMENTS, 8, 4), "segment 0 leaves the rows"),
        ("choose", (ITEMS, SEGMENTS, 4, 8, 4, 1, 1, 0, 0, COSTS), "processors is 0"),
    ],
)
def test_what_would_be_read_elsewhere_is_refused(name, given, message):
    with pytest.raises(ValueError, match=message):
        in_c(name, *given)


@needs_compiler
def test_as_many_steps_as_32_bits_hold():
    given = ITEMS, SEGMENTS.copy(), 1
    given[1][0, 3] = FARTHEST
    parts = native.integers(in_c("split", *given, 3), 4, 8)
    assert_same(parts, table.split(*given, 3))
    assert parts[1][:, 3].tolist()[-1] == FARTHEST


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_where_nothing_can_be_compiled_numpy_does_it(compiler, monkeypatch, tmp_path, caplog):
    from triton.runtime import build

    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # from 3.8 on Triton keeps the compiler that it has found
    find = getattr(build, "_find_compiler", None)
    monkeypatch.setattr(build, "_find_compiler", getattr(find, "__wrapped__", find), raising=False)
    with caplog.at_level("INFO", logger=native.logger.name):
        assert native._compiled("tables", "new batches take the host longer", after="arrays") is None
    assert "new batches take the host longer, because tables.c could not be compiled" in caplog.text


def test_without_c_tables_are_made_by_numpy(monkeypatch):
    without_c(monkeypatch)
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    tiles = rk.TileTable(np.array(dense.causal(4096)), 4096, 4096, np.array([[3, 5]]))
    how = splits.query_splits(tiles, 128, 64, 2, CPU)
    assert how.most > 1 and how.blocks is not None
    blocks = tiles.query_blocks(128, 64, CPU, how.most)
    assert (blocks.places.numpy() == (3, 5)).all() and len(blocks) == how.blocks[:, 1].sum()
    q = rk.TensorKind((1, 4096, 2, 128), torch.bfloat16, CPU)
    config = hopper.forward_config.config_for(q, q, tiles, processors=132)
    works = hopper.forward.work_queue(q, q, q, tiles, config, 1, False).works
    assert len(works) == 2 * -(-4096 // config.block)
    assert len(turns.key_turns(tiles, 128, 64, CPU)) == 32


def test_blocks_to_merge_are_made_only_where_some_are_split(monkeypatch):
    def fail(arrays, device):
        raise AssertionError("something is uploaded")

    monkeypatch.setattr(splits, "on_device", fail)
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    tiles = rk.TileTable(np.array(dense.causal(512)), 512, 512)
    for how in (splits.query_splits(tiles, 128, 64, 132, CPU), splits.key_splits(tiles, 128, 64, 2, 4, CPU, 1)):
        assert (how.most, how.blocks, how.touched) == (1, None, 4)
    with pytest.raises(AssertionError, match="something is uploaded"):
        splits.query_splits(tiles, 128, 64, 132, CPU, 2)
