"""The Hopper forward: what the compiler makes of it and how its work is shared out, without a GPU; on one, accuracy over random tables."""

import heapq
import itertools
import re
import time

import numpy as np
import pytest
import torch

import ringattn_kernels as rk
from ringattn.device import blocked
from ringattn_kernels import hopper
from ringattn_kernels.dispatch import Kernels, choose_forward
from ringattn_kernels.hopper import forward_config
from ringattn_kernels.hopper.forward_kernel import hopper_forward_kernel
from ringattn_kernels.hopper.work_queue import AFTER, BEFORE, IDLE_BITS, WorkQueue, order_works
from ringattn_kernels.table import cut, split
from tests.clock import one_sort
from tests.kernels import dense
from tests.kernels.test_hopper_backward import RELEASE, compile_for_hopper

# bytes that a thread spills at most under later versions of Triton
SPILLS = {(3, 7): 24, (3, 8): 48, (3, 9): 112}
# the same with sinks, of three warpgroups at 128 that begin without a state
SPILLS_OF_SINKS = {(3, 6): 48, (3, 7): 24, (3, 8): 76, (3, 9): 308}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")
LAUNCHES = [(*dims, how) for dims, found in forward_config.CONFIGS.items() for how in found]
NAMES = [f"{d}-{dv}-{how.programs} of {how.block} rows" for d, dv, how in LAUNCHES]
SQUARE = [(d, how) for d, dv, how in LAUNCHES if d == dv <= 128]


# (dtype, has_state, final)
FORMS = {
    "bf16": (torch.bfloat16, False, True),
    "bf16 from state to state": (torch.bfloat16, True, False),
    "fp16 from state": (torch.float16, True, True),
}


def forms():
    """Two programs of a multiprocessor, and three warpgroups that begin with a state; all others are thorough."""
    for (at, launch), (number, form) in itertools.product(enumerate(LAUNCHES), enumerate(FORMS)):
        from_state = launch[:2] == (128, 128) and not launch[2].paired
        chosen = number == (2 if from_state else at % 3) and (from_state or launch[2].programs == 2)
        yield pytest.param(*launch, *FORMS[form], id=f"{NAMES[at]}-{form}", marks=() if chosen else pytest.mark.thorough)


@pytest.mark.parametrize(("d", "dv", "how", "dtype", "has_state", "final"), list(forms()))
def test_the_compiler_keeps_products_asynchronous_and_registers_unspilled(d, dv, how, dtype, has_state, final, tmp_path):
    q, k, v = (torch.empty(1, 256, heads, dim, dtype=dtype) for heads, dim in ((4, d), (2, d), (2, dv)))
    out = torch.empty(1, 256, 4, dv, dtype=dtype if final else torch.float32)
    statistics = torch.empty(1, 4, 256)
    state = (out.float(), statistics, statistics) if has_state else None
    queue = WorkQueue(*torch.empty(2, 6, dtype=torch.int32))
    counter = torch.empty(1, dtype=torch.int32)
    arguments = hopper.forward.kernel_arguments(q, k, v, out, statistics, statistics, queue, counter, 0.1, state, how)
    compiled = compile_for_hopper(hopper_forward_kernel, arguments, tmp_path, maxnreg=how.maxnreg)
    assert not compiled.warnings
    assert compiled.spills <= SPILLS.get(RELEASE, 0)
    # of 228 KB, each program takes one besides its own
    assert (compiled.shared + 1024) * how.programs <= 228 * 1024
    assert compiled.registers * 128 * (how.warpgroups + 1) * how.programs <= 1 << 16
    sass = compiled.sass
    # either product is as many as there are panels, and a wait for all but those of one product is a "1"
    panels = forward_config.panels(d, dv)
    some = f"WARPGROUP.DEPBAR.LE gsb0, 0x{panels}"
    letters = {"HGMMA": "H", "MUFU.EX2": "E", "WARPGROUP.DEPBAR.LE gsb0, 0x0": "0", some: "1"}
    operations = re.findall(rf"\b(HGMMA|MUFU\.EX2|WARPGROUP\.DEPBAR\.LE gsb0, 0x[0{panels}])", sass)
    order = "".join(letters[name] for name, _ in itertools.groupby(operations))
    # in each warpgroup, before its loop: the first scores, exponentials; in it: both products, the waits for them, all exponentials; after
    # it: the last values, the next work's first scores, and the statistics' exponentials
    # (which newer versions of Triton let begin a little earlier)
    loop, behind = "H10E" if how.paired else "H0H0E", "H0H(E0|0E)E?" if RELEASE == (3, 6) else "H0[HE]+0E?"
    if how.q_stages == 1 and not how.turns:
        # the next work's queries come while this one is written
        behind = "H0EH0"
    assert re.fullmatch(f"(H0E{loop}{behind}){{{how.warpgroups}}}", order), order
    # exponentials that wait for no maximum begin among its first instructions, of more than 60; with a state, or in some later versions of
    # Triton, the compiler chooses otherwise
    begins = [len(re.findall("FMNMX", step.partition("MUFU.EX2")[0])) for step in sass.split(some)[1:]]
    if how.ahead and not has_state and RELEASE == (3, 6):
        assert len(begins) == how.warpgroups and max(begins) < 10
    in_loop = re.search(r"10(E+)" if how.paired else r"0H+0(E+)", "".join(letters[name] for name in operations))[1]
    assert len(in_loop) >= how.step // 2
    # descriptors stay in uniform registers: ptxas is sure that warps do not diverge; beyond d = 128 Q's, of two registers each, may not fit
    # up to the second wait of the loop
    _, _, wait = itertools.islice(re.finditer("WARPGROUP.DEPBAR", sass), 3)
    products = sass[: wait.start()].rpartition("MUFU.EX2")[2]
    assert products.count("R2UR") <= (36 if d > 128 else 16)
    assert sass.count("VOTE.ANY") == how.warpgroups * (panels + how.ahead)
    # three times scores, by 16 columns, and twice values, by 16 keys: no columns but those of the head dims
    assert operations.count("HGMMA") == how.warpgroups * (3 * d // 16 + 2 * panels * how.step // 16)
    assert set(re.findall(r"HGMMA\.64x(\d+)x16", sass)) == {str(how.step), *(("64", "32") if panels == 2 else [str(dv)])}
    # 64 rows of 2 dv bytes, by the copy engine or by 128 threads
    by_copy = final and (how.q_stages > 1 or how.out_room)
    assert sass.count("UTMASTG") == (how.warpgroups * (2 if how.out_room else 1) if by_copy else 0)
    assert sass.count("STG.E.128") == (how.warpgroups * dv // 16 if final and dv <= 128 and not by_copy else 0)


def sunk_forms():
    """Two programs of a multiprocessor; all others are thorough."""
    for (d, dv, how), has_state in itertools.product(LAUNCHES, (False, True)):
        name = f"{d}-{dv}-{how.block} rows{' from state' if has_state else ''}"
        marks = () if how.programs == 2 and not has_state else pytest.mark.thorough
        yield pytest.param(d, dv, how, has_state, id=name, marks=marks)


@pytest.mark.parametrize(("d", "dv", "how", "has_state"), list(sunk_forms()))
def test_the_compiler_leaves_the_loop_as_it_is_with_sinks(d, dv, how, has_state, tmp_path):
    q, k, v = (torch.empty(1, 256, heads, dim, dtype=torch.bfloat16) for heads, dim in ((4, d), (2, d), (2, dv)))
    out, rows = torch.empty(1, 256, 4, dv, dtype=torch.bfloat16), torch.empty(1, 4, 256)
    queue, counter = WorkQueue(*torch.empty(2, 6, dtype=torch.int32)), torch.empty(1, dtype=torch.int32)
    state = (out.float(), rows, rows) if has_state else None
    arguments = hopper.forward.kernel_arguments(q, k, v, out, rows, rows, queue, counter, 0.1, state, how, torch.empty(4))
    compiled = compile_for_hopper(hopper_forward_kernel, arguments, tmp_path, maxnreg=how.maxnreg)
    assert not compiled.warnings
    # three warpgroups at 128 have no register to spare; under 3.6 what spills is for a work, not for a step
    tight = (d, how.block) == (128, 192) and not has_state
    assert compiled.spills <= (SPILLS_OF_SINKS if tight else SPILLS).get(RELEASE, 0)
    panels = forward_config.panels(d, dv)
    assert compiled.sass.count("HGMMA") == how.warpgroups * (3 * d // 16 + 2 * panels * how.step // 16)
    assert compiled.sass.count("VOTE.ANY") == how.warpgroups * (panels + how.ahead)


def test_head_dims_from_65_to_96_are_multiplied_as_96_where_both_are():
    for dims in ((96, 96), (65, 96), (80, 72)):
        assert forward_config.configs_for(*dims) == forward_config.CONFIGS[96, 96]
    for dims in ((96, 64), (40, 96), (96, 97), (128, 80)):
        assert forward_config.configs_for(*dims) == forward_config.CONFIGS[128, 128]
    assert forward_config.configs_for(64, 64) == forward_config.CONFIGS[64, 64]


def test_columns_of_queries_stay_in_registers_where_one_block_holds_the_head_dim():
    """The kernel takes no other launch, whichever head dims meet."""
    queue, counter = WorkQueue(*torch.empty(2, 6, dtype=torch.int32)), torch.empty(1, dtype=torch.int32)
    kept = {}
    for d, dv in itertools.product(range(8, 257, 8), repeat=2):
        q, v = (torch.empty(1, 1, 1, dim, dtype=torch.bfloat16) for dim in (d, dv))
        for how in forward_config.configs_for(d, dv):
            arguments = hopper.forward.kernel_arguments(q, q, v, v, v, v, queue, counter, 0.1, None, how)
            assert arguments["KEPT"] == 0 or arguments["CHUNKS"] == arguments["PANELS"] == 1
            kept[d, dv] = arguments["KEPT"]
    assert kept[256, 256] == kept[200, 192] == 64 and kept[160, 192] == kept[192, 256] == 0


@pytest.mark.parametrize("tiles", [dense.causal(5000), dense.full(5000, 5000), dense.documents(1, 2999, 1000, 999)], ids=len)
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("config", forward_config.CONFIGS[128, 128], ids=lambda how: f"{how.block} rows")
def test_the_queue_holds_each_query_block_once_longest_first_in_turns_of_heads(tiles, heads, config):
    together = 4
    items = cut(np.array(tiles), 5000, config.block, config.step)
    works, segments = order_works(*items, config.step, config.warpgroups, heads, together, False, 132)
    expected = [(head, row) for head in range(heads) for row in range(0, 5000, config.block)]
    assert sorted(map(tuple, works[:, :2].tolist())) == expected
    for segment, steps in works[:, 2:4]:
        while steps > 0:
            steps -= -(-(segments[segment, 3] - segments[segment, 0]) // config.step)
            segment += 1
        assert steps == 0
    # up to the short ones at the end, a twentieth at most
    turn, steps = (works[:, 0] + -heads % together) // together, works[:, 3]
    end = np.append(np.flatnonzero(np.diff(turn) < 0) + 1, len(works))[0] if heads > together else len(works)
    assert (np.diff(steps)[: end - 1][np.diff(turn)[: end - 1] == 0] <= 0).all() and (np.diff(steps[end:]) <= 0).all()
    assert steps[end:].sum() <= steps.sum() / 20 and steps[end:].max(initial=0) <= steps.max() / 4


@pytest.mark.parametrize("seq_len", [4096, 8192, 16384])
def test_multiprocessors_end_together(seq_len):
    """Each takes the next work when it is done with one; 32 heads, of whose keys the L2 holds few."""
    how, together = forward_config.CONFIGS[128, 128][0], hopper.forward.L2_SHARE // (seq_len * 256 * 2)
    items = cut(np.array(dense.causal(seq_len)), seq_len, how.block, how.step)
    works, _ = order_works(*items, how.step, how.warpgroups, 32, together, False, 132)
    ends = [0.0] * 132
    for steps in works[:, 3] + 1:
        heapq.heapreplace(ends, ends[0] + steps)
    assert max(ends) < 1.03 * sum(ends) / 132


def test_a_long_queue_takes_less_than_a_sort():
    tiles, config = np.array(dense.causal(1 << 17)), forward_config.CONFIGS[128, 128][0]
    best, sort = float("inf"), float("inf")
    for _ in range(5):
        sort = min(sort, one_sort())
        start = time.thread_time()
        works, _ = order_works(*cut(tiles, 1 << 17, config.block, config.step), config.step, config.warpgroups, 32, 4, False, 132)
        best = min(best, time.thread_time() - start)
        assert len(works) == 32 * -(-(1 << 17) // config.block)
    assert best < sort


@pytest.mark.parametrize("number", range(8))
def test_a_warpgroup_steps_from_its_first_live_pair_to_its_last(number):
    """Of the steps of its program. Tiles come in any order, and no row of a warpgroup may be in some of them."""
    random = np.random.default_rng(number)
    rows, step, warpgroups = int(random.integers(1, 700)), int(random.choice([64, 128])), int(random.integers(1, 4))
    tables = (
        dense.causal(rows),
        dense.documents(*random.integers(1, 250, 5)),
        dense.window(rows, 90, 40),
        dense.random_tiles(random, rows, rows),
    )
    tiles = np.array(tables[number % 4])
    rows = max(rows, tiles[:, 1].max())
    live = dense.live_pairs(tiles, rows, rows)
    block = 64 * warpgroups
    works, segments = order_works(*cut(tiles, rows, block, step), step, warpgroups, 1, 1, False, 132)
    for _, row, segment, steps, before, after in works.tolist():
        # the live pairs of each step
        walked = []
        while len(walked) < steps:
            begin, _, _, end, lo, hi, row_begin, row_end = segments[segment].tolist()
            i, j = np.arange(row, row + block)[:, None], np.arange(begin, end)
            part = (i >= row_begin) & (i < row_end) & (i - j >= lo) & (i - j <= hi)
            walked += [part[:, at : at + step] for at in range(0, end - begin, step)]
            segment += 1
        assert sum(part.sum() for part in walked) == live[row : row + block].sum()
        for warpgroup in range(warpgroups):
            rows_of = slice(64 * warpgroup, 64 * (warpgroup + 1))
            found = [n for n, part in enumerate(walked) if part[rows_of].any()] or [0]
            idle = [x >> (IDLE_BITS * warpgroup) & ((1 << IDLE_BITS) - 1) for x in (before, after)]
            assert idle == [found[0], steps - 1 - found[-1]]


def test_more_idle_steps_than_there_are_bits_are_walked():
    """A document of 200,000 rows, and a warpgroup of the last block that has another one."""
    tiles = np.array(dense.documents(200_000, 64))
    items, segments = cut(tiles, 200_064, 192, 64)
    works, _ = order_works(items, segments, 64, 3, 1, 1, False, 132)
    last = works[works[:, 1] == 199_872][0]
    assert last[3] == 3126 and (last[BEFORE] >> (2 * IDLE_BITS), last[AFTER]) == (1023, 2 | 1 << IDLE_BITS)


def test_query_blocks_without_pairs_are_left_out_where_only_the_others_change():
    items = cut(np.array([(300, 310, 0, 5, -5, 310)]), 1000, 128, 128)
    works, _ = order_works(*items, 128, 2, 2, 1, True, 132)
    assert works[:, :2].tolist() == [[0, 256], [1, 256]]
    works, segments = order_works(*items, 128, 2, 1, 1, False, 132)
    assert len(works) == 8
    empty = segments[works[works[:, 1] != 256, 2]]
    assert (works[:, 3] == 1).all() and (empty[:, 6] >= empty[:, 7]).all()
    works, _ = order_works(*cut(np.empty((0, 6), np.int64), 1000, 128, 128), 128, 2, 1, 1, True, 132)
    assert len(works) == 0


def test_splits_are_works_of_further_batches():
    items = split(*cut(np.array(dense.full(256, 1024)), 256, 128, 128), 128, 3)
    works, segments = order_works(*items, 128, 2, 2, 2, True, 132)
    begins, steps = segments[works[:, 2], 0], works[:, 3]
    # head, first row, first key and keys; heads 2 and 3 are those of the second split
    expected = [(head + 2 * n, row, a, b - a) for head in (0, 1) for row in (0, 128)
                for n, (a, b) in enumerate([(0, 256), (256, 640), (640, 1024)])]  # fmt: skip
    assert sorted(zip(works[:, 0].tolist(), works[:, 1].tolist(), begins.tolist(), (steps * 128).tolist())) == sorted(expected)


def run_on_one(recorded, queries, keys, heads, tiles, state=None, final=True):
    """What one forward launches: (the forward's arguments, the merge's or None, out)."""
    q, k = (torch.empty(1, rows, heads, 64, dtype=torch.bfloat16) for rows in (queries, keys))
    table = rk.TileTable(np.array(tiles), queries, keys)
    out, *_ = rk.forward(q, k, k, table, softmax_scale=0.1, state=state, final=final)
    ((grid, arguments),), merges = (kernel.calls for kernel in recorded)
    assert grid == (min(132 * (2 if arguments["WARPGROUPS"] == 2 else 1), arguments["work_count"]),)
    return arguments, merges[0][1] if merges else None, out


@pytest.mark.parametrize("tiles", [dense.causal(6000), dense.full(6000, 6000)], ids=["causal", "full"])
def test_long_problems_are_launched_in_whole_blocks_straight_to_out(tiles, recorded):
    arguments, merge, out = run_on_one(recorded, 6000, 6000, 16, tiles)
    items = cut(np.array(tiles), 6000, 192, 128)
    works, segments = order_works(*items, 128, 3, 16, 16, False, 132)
    np.testing.assert_array_equal(arguments["works_ptr"], works)
    np.testing.assert_array_equal(arguments["segments_ptr"], segments)
    assert arguments["out_ptr"] is out and out.dtype == torch.bfloat16 and merge is None


def test_short_problems_are_launched_in_splits_and_merged_with_the_state(recorded):
    state = torch.zeros(1, 200, 2, 64), torch.zeros(1, 2, 200), torch.zeros(1, 2, 200)
    arguments, merge, out = run_on_one(recorded, 200, 30000, 2, dense.full(200, 30000), state)
    count = arguments["work_count"] // 4
    assert 200 <= arguments["work_count"] <= 2 * 132
    assert arguments["out_ptr"].shape == (count, 200, 2, 64) and arguments["out_ptr"].dtype == torch.float32
    assert not arguments["HAS_STATE"]
    assert merge["HAS_STATE"] and merge["state_ptr"] is state[0] and merge["out_ptr"] is out and out.dtype == torch.bfloat16
    assert merge["blocks_ptr"].tolist() == [[0, count], [128, count]]


def test_the_copy_engine_stores_out_where_it_can():
    q = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16)
    several, single = forward_config.CONFIGS[64, 64][0], forward_config.CONFIGS[128, 128][0]
    assert several.q_stages > 1 == single.q_stages
    assert hopper.forward.stores_by_copy(q, torch.empty_like(q), several)
    obstacles = {
        "one place for queries": (torch.empty_like(q), single),
        "a state": (q.float(), several),
        "a place of queries of another size": (q.new_empty(1, 256, 2, 128), several),
        "rows that are no multiple of 16 bytes": (q.new_empty(1, 256, 2, 60), several),
        "an address that is none": (q.new_empty(q.numel() + 1)[1:].view(q.shape), several),
    }
    for why, (out, config) in obstacles.items():
        assert not hopper.forward.stores_by_copy(q, out, config), why
    # in halves, from a place of its own, whatever the queries' head dim
    (own,) = forward_config.CONFIGS[256, 256]
    for dv, columns in ((256, 128), (136, 128), (128, 64), (8, 32)):
        out = q.new_empty(1, 256, 2, dv)
        assert hopper.forward.stores_by_copy(q, out, own)
        assert hopper.forward.out_descriptor(out, own).block_shape == [1, 64, 1, columns]


def test_blocks_are_as_large_as_multiprocessors_have_many(recorded):
    """The larger are faster, but where there are few works, more of the smaller ones fill the last round."""

    def rows(queries, keys, heads, tiles, splits=None, d=128):
        q, v = (torch.empty(1, n, heads, d, dtype=torch.bfloat16) for n in (queries, keys))
        return forward_config.config_for(q, v, rk.TileTable(np.array(tiles), queries, keys), splits).block

    assert [rows(n, n, 32, dense.causal(n)) for n in (8192, 16384, 65536)] == [192] * 3
    # 384 works in three rounds, or 256 in two that take 1.35 times as long
    assert rows(1536, 8192, 32, dense.full(1536, 8192)) == 192
    # at 4k, where blocks of 192 make 6 rounds and those of 128 make 8, or at head dim 64 4 with two programs
    assert [rows(4096, 4096, 32, dense.full(4096, 4096), d=d) for d in (64, 96, 128)] == [192, 192, 128]
    # a work for each multiprocessor
    assert rows(4224, 8192, 4, dense.full(4224, 8192)) == 128
    assert [rows(128, 8192, 8, dense.full(128, 8192), d=d) for d in (96, 128)] == [128, 128]
    # as many splits as fill the chip, or just two
    assert [rows(192, 65536, 8, dense.full(192, 65536), splits) for splits in (None, 2)] == [192, 128]
    assert rows(300, 300, 2, []) == 192

    # many short sequences: the time of a block beside its steps
    def many(n, d):
        return rows(n, n, 16 * 65536 // n, dense.causal(n), d=d)

    expected = {64: [128, 128, 128, 192], 96: [128, 128, 192, 192], 128: [128, 128, 128, 192]}
    assert {d: [many(n, d) for n in (512, 1024, 2048, 4096)] for d in (64, 96, 128)} == expected


def test_a_choice_can_be_overridden_and_has_a_reason():
    q = torch.empty(1, 8, 2, 128, dtype=torch.bfloat16)
    assert choose_forward(q, q, q, 1.0, Kernels.PLAIN).kernels == Kernels.PLAIN
    assert hopper.forward.obstacle(q, q, q, 1.0) == ""
    assert "16 bytes" in hopper.forward.obstacle(torch.empty(1, 8, 2, 132, dtype=torch.bfloat16)[..., :128], q, q, 1.0)
    assert "float32" in hopper.forward.obstacle(q.float(), q.float(), q.float(), 1.0)
    assert "positive" in hopper.forward.obstacle(q, q, q, 0.0)
    assert "empty" in hopper.forward.obstacle(q, q[:, :0], q[:, :0], 1.0)
    assert "512" in hopper.forward.obstacle(torch.empty(1, 8, 2, 512, dtype=torch.bfloat16), q, q, 1.0)


def attend(q, k, v, tables, softmax_scale, how, programs=None):
    """One launch for each table, over outputs that hold NaN before."""
    b, sq, h, _ = q.shape
    state = None
    for n, table in enumerate(tables):
        final = n == len(tables) - 1
        old = state
        if state is None:
            state = tuple(torch.full((b, h, sq), float("nan"), device="cuda") for _ in range(2))
            state = (torch.empty(0), *state)
        if old is None or final:
            dtype = q.dtype if final else torch.float32
            state = (torch.full((b, sq, h, v.shape[3]), float("nan"), device="cuda", dtype=dtype), *state[1:])
        hopper.forward.launch(q, k, v, table, *state, softmax_scale, old, old is not None and not final, 1, how, programs)
    return state


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("d", "dv", "how"),
    [
        *LAUNCHES,
        *((96, 40, how) for how in forward_config.configs_for(96, 40)),
        (72, 88, forward_config.configs_for(72, 88)[0]),
        (160, 192, forward_config.configs_for(160, 192)[0]),
        (256, 40, forward_config.configs_for(256, 40)[0]),
    ],
    ids=[*NAMES, "96-40-192 rows", "96-40-128 rows", "72-88", "160-192", "256-40"],
)
def test_random_tables_against_dense_attention(d, dv, how):
    """40 tables of every head dim: odd lengths, grouped heads, strided keys and values, one launch or two, few programs or many."""
    generator = np.random.default_rng(d + dv)
    for case in range(40):
        torch.manual_seed(case)
        dtype = (torch.bfloat16, torch.float16)[case % 2]
        sq, sk = (int(n) for n in generator.integers(1, 700, 2))
        h, hk = ((4, 4), (4, 2), (6, 1))[case % 3]
        tiles = dense.random_tiles(generator, sq, sk)
        q = torch.randn(2, sq, h, d, device="cuda").to(dtype)
        k, v = (torch.randn(sk, 2, hk, dim, device="cuda").to(dtype).transpose(0, 1) for dim in (d, dv))
        live = dense.live_pairs(tiles, sq, sk).cuda()
        dout = torch.zeros(2, sq, h, dv, device="cuda", dtype=dtype)
        exact = dense.attention(q, k, v, dout, live, d**-0.5, torch.float64)
        same = dense.attention(q, k, v, dout, live, d**-0.5, dtype)
        whole = np.array(tiles, dtype=np.int64).reshape(-1, 6)
        parts = [whole] if case % 4 == 0 else [whole[::2], whole[1::2]]
        tables = [rk.TileTable(part, sq, sk) for part in parts]
        out, row_max, row_sum = attend(q, k, v, tables, d**-0.5, how, programs=None if case % 5 else 3)
        assert (out.double() - exact.out).norm() <= 2 * (same.out.double() - exact.out).norm() + 1e-6 * exact.out.norm(), case
        torch.testing.assert_close(row_max.double(), exact.row_max, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(row_sum.double(), exact.row_sum, rtol=2e-5, atol=1e-6)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kernels", [Kernels.HOPPER, Kernels.PLAIN], ids=str)
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_sinks_against_plain_torch_on_the_cpu(d, dv, kernels):
    """One launch or two, whole blocks or splits; heads whose sink is far above all scores, far below, or none; rows without a pair."""
    generator = np.random.default_rng(d)
    sinks = torch.tensor([0.3, 40.0, -60.0, -torch.inf, 4.0, -2.0])
    for case in range(16):
        torch.manual_seed(case)
        dtype, (sq, sk) = (torch.bfloat16, torch.float16)[case % 2], (int(n) for n in generator.integers(1, 700, 2))
        whole = np.array(dense.random_tiles(generator, sq, sk), dtype=np.int64).reshape(-1, 6)
        q, k, v = (torch.randn(2, n, heads, dim).to(dtype) for n, heads, dim in ((sq, 6, d), (sk, 2, d), (sk, 2, dv)))
        state, parts = None, [whole] if case % 4 == 0 else [whole[::2], whole[1::2]]
        for n, part in enumerate(parts):
            options = dict(state=state, final=n == len(parts) - 1, splits=(1, 3)[case // 2 % 2], kernels=kernels)
            given = [x.cuda() for x in (q, k, v)]
            state = rk.forward(*given, rk.TileTable(part, sq, sk), softmax_scale=d**-0.5, sinks=sinks.cuda(), **options)
        exact = [x.double() for x in (q, k, v)]
        wanted = blocked.forward(*exact, rk.TileTable(whole, sq, sk), softmax_scale=d**-0.5, sinks=sinks)
        out, row_max, row_sum = (x.cpu().double() for x in state)
        assert (out - wanted[0]).norm() <= 5e-3 * wanted[0].norm(), case
        torch.testing.assert_close(row_max, wanted[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(row_sum, wanted[2], rtol=2e-5, atol=1e-6)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("d", "dv", "how"), LAUNCHES, ids=NAMES)
def test_maxima_that_rise_from_step_to_step(d, dv, how):
    """The pivots of every second row move in each step, by 2^8 and more; those of the others hardly do."""
    n, dtype = 900, torch.bfloat16
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, heads, dim, device="cuda").to(dtype) for heads, dim in ((4, d), (2, d), (2, dv)))
    # in base-2 units, after scaling, from 0 to 120 along the keys
    q[..., 0] = (torch.arange(n, device="cuda") % 2 * 8 * d**0.5)[None, :, None]
    k[..., 0] = (torch.arange(n, device="cuda") / n * 15 * np.log(2))[None, :, None]
    tiles, dout = dense.full(n, n), torch.zeros(1, n, 4, dv, device="cuda", dtype=dtype)
    exact = dense.attention(q, k, v, dout, dense.live_pairs(tiles, n, n).cuda(), d**-0.5, torch.float64)
    out, row_max, row_sum = attend(q, k, v, [rk.TileTable(np.array(tiles), n, n)], d**-0.5, how)
    # weights and out are rounded to 16 bits
    assert (out.double() - exact.out).norm() <= 5e-3 * exact.out.norm()
    torch.testing.assert_close(row_max.double(), exact.row_max, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row_sum.double(), exact.row_sum, rtol=2e-4, atol=1e-6)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("tiles", [dense.causal(2000), dense.later(2000)], ids=["earlier keys", "later keys"])
@pytest.mark.parametrize(("d", "how"), SQUARE, ids=NAMES[: len(SQUARE)])
def test_a_thousand_launches_end_and_give_the_same_bits(d, how, tiles):
    """With later keys warpgroups have idle steps before the others, of the last work too."""
    q, k, v = (torch.randn(1, 2000, heads, d, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    table = rk.TileTable(np.array(tiles), 2000, 2000)
    assert choose_forward(q, k, v, d**-0.5).kernels == Kernels.HOPPER
    first = attend(q, k, v, [table], d**-0.5, how)
    for run in range(1000):
        again = attend(q, k, v, [table], d**-0.5, how, programs=(None, 5, 64)[run % 3])
        if run % 50 == 0:
            assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("d", "how"), SQUARE, ids=NAMES[: len(SQUARE)])
def test_launches_on_several_streams_and_graphs_replayed_side_by_side_take_each_work_once(d, how):
    q, k, v = (torch.randn(1, 3000, heads, d, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    table = rk.TileTable(np.array(dense.causal(3000)), 3000, 3000)
    expected = attend(q, k, v, [table], d**-0.5, how)
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append([attend(q, k, v, [table], d**-0.5, how) for _ in range(2)])
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams[2:]:
            with torch.cuda.stream(stream):
                results.append([attend(q, k, v, [table], d**-0.5, how)])
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for result in results for state in result for a, b in zip(expected, state))
