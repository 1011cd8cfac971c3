"""`plans.c` and its twins in NumPy give the same numbers."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.geometry import layout, plan, region, span
from ringattn.geometry.rows import Rows, joined
from ringattn_kernels import native, table
from tests.compiler import needs_compiler

USERS = layout, plan, region, span, table  # modules that call `plans.c`
SEEDS = st.integers(0, 2**32 - 1)

pytestmark = needs_compiler


@pytest.fixture(scope="module", autouse=True)
def compiled():
    import triton  # noqa: F401

    native._plans.cache_clear()  # a test may have replaced Triton when it was asked
    assert native.plans() is not None, "plans.c does not compile"


def assert_same(function, *given):
    """A function gives the same with `plans.c` and without it."""
    found = function(*given)
    with pytest.MonkeyPatch.context() as patch:
        for module in USERS:
            patch.setattr(module, "plans", lambda: None)
        wanted = function(*given)
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
    for x, y in zip(found, wanted, strict=True):
        assert type(x) is type(y)
        np.testing.assert_array_equal(x, y, strict=True)


def random_tiles(random: np.random.Generator, columns: int = 6) -> tuple[np.ndarray, int, int]:
    """Disjoint tiles in a grid of boxes, most of them wholly live; some with bands that the rows do not reach."""
    sizes = [np.unique([0, *random.integers(1, 200, random.integers(1, 7))]) for _ in range(2)]
    (q, k), (q_rows, k_rows) = sizes, [int(bounds[-1]) for bounds in sizes]
    boxes = [(a, b, c, d) for a, b in zip(q, q[1:]) for c, d in zip(k, k[1:]) if random.random() < 0.8]
    table = np.zeros((len(boxes), columns), dtype=np.int64)
    for row, (a, b, c, d) in zip(table, boxes):
        least, most = a - d + 1, b - 1 - c
        spare = int(random.choice([0, 0, 1, 500, 2**40]))
        band = (least - spare, most + spare) if random.random() < 0.8 else np.sort(random.integers(least, most + 1, 2))
        row[:6] = a, b, c, d, *band
    # few places: boxes join only where they have the same
    table[:, 6:] = random.integers(0, 2, (len(boxes), columns - 6))
    table = random.permutation(table)
    return (
        (np.asfortranarray(table) if random.integers(2) else table),
        q_rows + int(random.integers(3)),
        k_rows + int(random.integers(3)),
    )


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS, columns=st.sampled_from([6, 8]))
def test_neighbours_are_joined_and_tiles_settled(seed, columns):
    tiles, q_rows, k_rows = random_tiles(np.random.default_rng(seed), columns)
    assert_same(plan.merge_full, tiles)
    # bands beside the rows, too
    tiles[:, 4:6] += np.random.default_rng(seed).choice([0, 0, 150, -150, 2**35], len(tiles))[:, None]
    assert_same(table.settle, tiles[:, :6], q_rows, k_rows)


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS, block=st.sampled_from([1, 2, 7, 16, 128, 10**6]))
def test_pairs_are_counted_and_halved(seed, block):
    random = np.random.default_rng(seed)
    tiles, q_rows, k_rows = random_tiles(random)
    assert_same(region.pairs_of, tiles)
    assert_same(plan.half_of_pairs, table.TileTable(tiles, q_rows, k_rows), block)
    # any numbers, boxes without a pair among them
    assert_same(region.pairs_of, random.integers(-20, 20, (50, 6)))
    assert_same(region.pairs_of, random.integers(-(2**31), 2**31, (50, 6)))


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS, ranks=st.integers(1, 9), each=st.integers(1, 20), parts=st.integers(1, 4), largest=st.sampled_from([0, 1, 5, 2**50])
)
def test_chunks_are_dealt(seed, ranks, each, parts, largest):
    random = np.random.default_rng(seed)
    assert_same(layout._deal, random.integers(0, largest + 1, ranks * each * parts), ranks * each, ranks)
    tokens = int(random.integers(1, 300))
    regions = ra.documents(np.unique([0, *random.integers(0, tokens, 9), tokens]).tolist(), causal=bool(seed % 2)).regions(tokens)
    assert_same(layout._work_of_chunks, layout._edges(tokens, ranks, each), np.asfortranarray(regions), tokens)


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS, ranks=st.integers(1, 6), keys_of_their_own=st.booleans())
def test_tiles_and_needed_rows(seed, ranks, keys_of_their_own):
    """Shards of any pieces, in any order, some empty; documents and windows whose rows lie close to each other or not."""
    random = np.random.default_rng(seed)
    tokens = int(random.integers(1, 1500))

    def pieces(tokens):
        bounds = np.unique([0, *random.integers(0, tokens + 1, random.integers(1, 12)), tokens]).tolist()
        shards = [[] for _ in range(ranks)]
        for i in random.permutation(len(bounds) - 1):
            shards[random.integers(ranks)].append(ra.Span(bounds[i], bounds[i + 1] - bounds[i]))
        return ra.Layout(tokens, shards)

    mask = ra.documents(np.unique([0, *random.integers(0, tokens, 9), tokens]).tolist(), causal=bool(random.integers(2)))
    if random.integers(2):
        mask &= ra.sliding_window(int(random.integers(0, 200)))
    if random.integers(4) == 0:
        mask = ra.full()
    of = plan.make_plan(pieces(tokens), mask)
    if keys_of_their_own:
        keys = tokens + int(random.integers(300))
        of = plan.make_plan(pieces(tokens), ra.causal(), pieces(keys), int(random.integers(keys - tokens + 1)))

    assert_same(lambda *given: tuple(vars(span.look(*given)).values()), of.queries, of.regions)

    def needs():
        of.__dict__.pop("_needs", None)
        return of._needs

    assert_same(needs)
    first = int(random.integers(ranks))

    def tiles(*ranks):
        return tuple(vars(of._make_tiles(*ranks)).values())

    assert_same(tiles, 0, ranks)
    assert_same(tiles, first, first + 1)


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS, columns=st.sampled_from([6, 8]))
def test_tiles_of_some_keys_and_of_keys_that_moved(seed, columns):
    random = np.random.default_rng(seed)
    tiles, _, k_rows = random_tiles(random, columns)
    assert_same(plan._parts_of, tiles[:, :6], *np.sort(random.integers(0, k_rows + 1, 2)).tolist())
    # keys of two owners lie apart, and other rows are held, too
    apart = 1000 * random.integers(0, 2, len(tiles))
    more = random.integers(0, 2000, 5)[:, None] + np.array([0, 3])
    rows = Rows(joined(np.concatenate([tiles[:, 2:4] + apart[:, None], more])))
    base, stride = int(random.integers(9)), int(random.integers(1, 4))
    assert_same(plan.move_keys, tiles, rows, base, stride, apart)
    if len(tiles):
        assert_same(plan.move_keys, tiles[:1], Rows(joined(tiles[:, 2:4].copy())), base)


TILES, WORK = np.array([[0, 4, 0, 4, -3, 3]]), np.arange(4)
ZEROS, ONES = np.zeros(2, dtype=np.int64), np.ones(2, dtype=np.int64)
# arrays of two sights and two spans: k_min, k_max, order, start, last, row, shard; rank, or query, region and those of spans
SEEN = ZEROS, ZEROS, *[np.arange(2)] * 5
NEEDS = *SEEN, ZEROS
FOLD = *SEEN, ZEROS, ZEROS, *[np.arange(2)] * 6


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("count", (TILES[:, :5],), "no table of integers of 8 bytes in 6 columns"),
        ("join", (TILES.astype(float),), "no table of integers"),
        ("settle", (TILES.astype(np.int32), 4, 4), "no table of integers"),
        ("half", (TILES, 0, 4), "block is 0, but must be within 1"),
        ("half", (TILES[0], 1, 4), "no table of integers"),
        ("deal", (WORK, 4, 3), "there are 4 chunks, of 4 parts, for 3 ranks"),
        ("deal", (WORK, 3, 3), "there are 3 chunks, of 4 parts, for 3 ranks"),
        ("deal", (WORK, 4, 0), "ranks is 0"),
        ("deal", (WORK, 0, 2), "chunks is 0"),
        ("deal", (WORK.astype(np.int32), 4, 2), "no array of integers of 8 bytes"),
        ("deal", (WORK[None], 4, 2), "no array of integers of 8 bytes"),
        ("work", (WORK.astype(float), TILES), "no array of integers of 8 bytes"),
        ("work", (WORK, TILES[:, :5]), "no table of integers"),
        ("needs", (*NEEDS, 2, -1), "gap is -1"),
        ("needs", (*NEEDS, 0, 64), "ranks is 0"),
        ("needs", (*NEEDS, 1, 64), "a rank or a span is not among these"),
        ("needs", (*SEEN, ZEROS - 1, 2, 64), "a rank or a span is not among these"),
        ("needs", (*SEEN[:2], SEEN[2] + 1, *NEEDS[3:], 2, 64), "a rank or a span is not among these"),
        ("needs", (*SEEN[:2], WORK, *NEEDS[3:], 2, 64), "these arrays are not of one length"),
        ("needs", (*SEEN, WORK.astype(float), 2, 64), "no array of integers of 8 bytes"),
        ("look", (*[ZEROS] * 5, TILES[:, :5]), "no table of integers"),
        ("look", (*[ZEROS] * 4, WORK, TILES), "these arrays are not of one length"),
        ("look", (ZEROS + 2, *[ZEROS] * 4, TILES), "a span is not among these"),
        ("part", (TILES, 3, 2), "end is 2, but must be within 3"),
        ("part", (TILES, -1, 2), "begin is -1"),
        ("part", (TILES[:, :5], 0, 2), "no table of integers"),
        ("move", (TILES, ZEROS, TILES[:, 2:4], 0, 1), "these arrays are not of one length"),
        ("move", (TILES, ZEROS[:1], TILES[:, 2:4] + 1, 0, 1), "a tile's keys are not in these ranges"),
        ("move", (TILES, ZEROS[:1], TILES[:0, 2:4], 0, 1), "a tile's keys are not in these ranges"),
        ("move", (TILES, ZEROS[:1], TILES[:, 2:4], -1, 1), "base is -1"),
        ("move", (TILES, ZEROS[:1], TILES[:, 2:4], 0, 0), "stride is 0"),
        ("fold", (*FOLD, TILES, 0, 0), "ranks is 0"),
        ("fold", (*FOLD, TILES[:, :5], 0, 2), "no table of integers"),
        ("fold", (*SEEN, ONES + 1, *FOLD[8:], TILES, 0, 2), "a span or a region is not among these"),
        ("fold", (*SEEN, ZEROS, ONES, *FOLD[9:], TILES, 0, 2), "a span or a region is not among these"),
        ("fold", (*SEEN[:2], SEEN[2] - 1, *FOLD[3:], TILES, 0, 2), "a rank or a span is not among these"),
        ("fold", (*SEEN[:6], SEEN[6] + 2, *FOLD[7:], TILES, 0, 2), "a rank or a span is not among these"),
        ("fold", (*FOLD, TILES, 1, 2), "a rank or a span is not among these"),
        ("fold", (*FOLD[:10], WORK, *FOLD[11:], TILES, 0, 2), "these arrays are not of one length"),
        ("fold", (*FOLD[:14], WORK[:2].astype(float), TILES, 0, 2), "no array of integers of 8 bytes"),
    ],
)
def test_what_would_be_read_elsewhere_is_refused(name, given, message):
    with pytest.raises(ValueError, match=message):
        getattr(native.plans(), name)(*given)


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ((-1, 4, 0, 4, -3, 3), "a tile leaves the 4 query rows or the 5 key rows"),
        ((0, 5, 0, 4, -3, 3), "a tile leaves"),
        ((0, 4, 0, 6, -3, 3), "a tile leaves"),
        ((4, 4, 0, 4, -3, 3), "a tile or its band is empty"),
        ((0, 4, 0, 4, 1, 0), "a tile or its band is empty"),
    ],
    ids=str,
)
def test_bad_tiles_fail_as_in_numpy(monkeypatch, tile, message):
    for _ in range(2):
        with pytest.raises(AssertionError, match=message):
            table.TileTable(np.array([tile]), 4, 5)
        monkeypatch.setattr(table, "plans", lambda: None)


def test_long_tables_are_the_same_while_other_threads_go_on():
    bounds = np.linspace(0, 1 << 22, 20_001).astype(int)
    mask = ra.documents(bounds.tolist())
    tiles = np.column_stack([bounds[:-1], bounds[1:]] * 2 + [0 * bounds[1:], np.diff(bounds)])
    assert_same(region.pairs_of, tiles)
    assert_same(plan.merge_full, tiles)
    assert_same(layout._work_of_chunks, layout._edges(1 << 22, 8, 64), mask.regions(1 << 22), 1 << 22)
    assert_same(layout._deal, np.random.default_rng(0).integers(0, 99, 1 << 15), 1 << 14, 64)


def test_nothing_is_compiled_where_triton_was_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton")
    assert native.plans() is None
