"""The Hopper forward's partitions, played on a CPU: they end, overwrite nothing that is read, and meet each live pair once."""

import numpy as np
import pytest

from ringattn_kernels.hopper import forward_config, forward_kernel
from ringattn_kernels.hopper.forward_config import ForwardConfig
from ringattn_kernels.hopper.work_queue import WORK_COLUMNS, order_works
from ringattn_kernels.table import cut
from tests.kernels import dense, played
from tests.kernels.played import NOTHING, Descriptor, Machine, Pointer, Sum

ROWS, HEADS, KV_HEADS = 64, 2, 1
CONFIGS = {
    f"{d}-{dv}-{how.programs} of {how.block} rows": (d, dv, how)
    for (d, dv), found in forward_config.CONFIGS.items()
    for how in found
}


def mask_edge(scores, start, _end, _segments, _segment, first_row):
    assert (scores.left[2], scores.right[2]) == (first_row, start), "a mask of another block"
    return scores


# what changes numbers alone
NUMBERS = dict(
    mask_edge=mask_edge,
    softmax_step=lambda scores, *_: (scores, *[NOTHING] * 4),
    softmax_step_ahead=lambda scores, *_: (scores, *[NOTHING] * 4),
    unpack=lambda pairs, *_: pairs,
    rescale=lambda x, _: x,
    scaled=lambda x, _: x,
    divided=lambda x, *_: x,
    load_state=lambda *_: Sum(),
    zeros=lambda _rows, blocks: (Sum(),) * len(blocks),
    zero_block=lambda *_: NOTHING,
    as_column=lambda *_: NOTHING,
    split_columns=lambda x: (x, x),
    to_base2=lambda *_: (NOTHING,) * 2,
    to_natural=lambda *_: (NOTHING,) * 2,
)


def kept_queries(block, kept, _layout):
    """Columns in registers stay when the block gets others."""
    if not kept:
        return ()
    columns = played.Block(f"columns of {block.name}", block.read())
    block.release()
    return (columns,)


def sizes_of(d: int, how: ForwardConfig) -> dict[str, int]:
    """What all partitions have to know."""
    chunks = forward_config.chunks(d)
    return dict(CHUNKS=chunks, WARPGROUPS=how.warpgroups, Q_STAGES=how.q_stages, STAGES=how.stages)


def add_loads(machine: Machine, program: int, kernel, d: int, dv: int, how: ForwardConfig, queue, counter) -> tuple:
    """Add a program's loading partition. Returns the blocks that it fills, and the barriers."""
    chunks, queries = forward_config.chunks(d), how.q_stages * how.warpgroups
    shapes = (ROWS, d // chunks), (how.step, d // chunks), (how.step, dv)
    copied = [Descriptor(name, (1, n, 1, columns)) for name, (n, columns) in zip("QKV", shapes)]
    counts = queries * chunks, how.stages * chunks, how.stages
    shared = [played.blocks(name, count, *shape) for name, count, shape in zip("QKV", counts, shapes)]
    out = played.blocks("out", how.warpgroups, ROWS, dv // 2)
    blocks = forward_kernel.Blocks(*shared, [None] * (kernel.WORK_PLACES * WORK_COLUMNS), out)
    full = [played.barriers(count) for count in (queries, queries, how.stages, how.stages)]
    barriers = forward_kernel.ForwardBarriers(*full, played.barriers(how.stages, how.warpgroups))
    loading = *copied, blocks, barriers, queue, Pointer(counter), 1, HEADS, HEADS // KV_HEADS
    machine.add(f"loads of {program}", program, kernel.load_copies, *loading, **sizes_of(d, how), TURNS=how.turns)
    return blocks, barriers


def play(
    d: int, dv: int, how: ForwardConfig, works, segments, rows: int, seed: int, programs: int, state: bool
) -> tuple[list[tuple], list[int]]:
    """From a launch over these works of one batch: (name, corner of out, its sum) of each part of a warpgroup's rows that is stored, and
    the columns of these corners."""
    by_threads = []

    def store_out(_ptr, out, first_row, head_index, heads, _rows, _dim, _panel):
        by_threads.append(("out", (head_index // heads, first_row, head_index % heads, 0), out))

    machine = Machine(seed)
    parts = dict(kept_queries=kept_queries, later_columns=lambda block, _: (block,))
    kernel = played.source(forward_kernel, machine.names(programs) | NUMBERS | parts | dict(store_out=store_out))
    counter = np.zeros(1, dtype=np.int64)
    queue = forward_kernel.DeviceWorkQueue(Pointer(works), Pointer(segments), len(works))
    by_copy = (how.q_stages > 1 or how.out_room) and not state
    width, panels = dv // 2 if how.out_room else dv, 2 if d == 96 else 1
    result = forward_kernel.Result(Descriptor("out", (1, ROWS, 1, width)) if by_copy else None, *[NOTHING] * 4, None)
    ways = dict(V_DIM=dv, HAS_STATE=state, TURNS=how.turns, PAIRED=how.paired, PANELS=panels)
    ways |= dict(KEPT=how.kept, AHEAD=how.ahead, MODIFIED=False, LATE_CAP=False)
    for program in range(programs):
        blocks, barriers = add_loads(machine, program, kernel, d, dv, how, queue, counter)
        rest = blocks, barriers, result, queue, NOTHING, HEADS, rows, NOTHING
        for number in range(how.warpgroups):
            machine.add(f"warpgroup {number} of {program}", program, kernel.attend_rows, *rest, number, **sizes_of(d, how), **ways)
    machine.run()
    assert counter == 0, "the next launch would begin elsewhere"
    assert not (by_threads if by_copy else machine.memory)
    stored = [(*place, out) for place, out in machine.memory.items()]
    return stored + by_threads, [*range(0, dv, width)] if by_copy else [0] * panels


def check(results: list[tuple], columns: list[int], how: ForwardConfig, works, tiles, rows: int) -> None:
    """Each part of a warpgroup's rows leaves once, and has met all blocks of keys in which they have a live pair."""
    live = dense.live_pairs(tiles, rows, rows).numpy()
    expected = [(0, row + ROWS * i, head, c) for head, row, *_ in works.tolist() for i in range(how.warpgroups) for c in columns]
    assert sorted(corner for _, corner, _ in results) == sorted(expected)
    for _, (_, row, head, _), total in results:
        met = []
        for scores in total.parts:
            (_, _, q_row, q_head, _), (_, _, key, kv_head, _) = scores.left, scores.right
            assert (q_row, q_head, kv_head) == (row, head, head * KV_HEADS // HEADS), "queries or keys of another work"
            met.append(key)
        seen = np.zeros(rows + how.step, dtype=bool)
        for key in met:
            seen[key : key + how.step] = True
        assert seen[:rows][live[row : row + ROWS].any(0)].all(), "keys are left out"
        assert len(met) == len(set(met)) or len(tiles) > 1, "keys are met twice"


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.thorough)], ids=["few", "many"])
@pytest.mark.parametrize("name", CONFIGS)
def test_partitions_end_and_meet_each_live_pair(name, seeds):
    """Works of a few steps, some idle for a warpgroup, in random turns of all partitions; some begin with a state."""
    d, dv, how = CONFIGS[name]
    for seed in seeds:
        random = np.random.default_rng(seed)
        rows = int(random.integers(1, 900))
        tiles = (dense.causal(rows), dense.later(rows), dense.window(rows, 90, 40), dense.random_tiles(random, rows, rows))[
            seed % 4
        ]
        found = cut(np.array(tiles), rows, how.block, how.step)
        works, segments = order_works(*found, how.step, how.warpgroups, HEADS, HEADS, False, 4)
        results, columns = play(d, dv, how, works, segments, rows, seed, programs=1 + seed % 2, state=seed % 3 == 0)
        check(results, columns, how, works, tiles, rows)


@pytest.mark.parametrize("name", [name for name, (*_, how) in CONFIGS.items() if how.q_stages == 1 and not how.turns])
def test_the_next_works_first_keys_come_while_there_is_no_room_for_its_queries(name):
    """Else a program would wait for one after the other."""
    d, dv, how = CONFIGS[name]
    machine, counter, steps = Machine(0), np.zeros(1, dtype=np.int64), (3, 1, 2)
    # (head, first row, segment, steps, idle before, idle after), and segments of as many keys
    works = np.array([(0, 0, i, n, 0, 0) for i, n in enumerate(steps)])
    segments = np.array([(0, 0, 0, n * how.step, 0, 0, 0, 0) for n in steps])
    queue = forward_kernel.DeviceWorkQueue(Pointer(works), Pointer(segments), len(works))
    kernel = played.source(forward_kernel, machine.names(1) | NUMBERS)
    blocks, barriers = add_loads(machine, 0, kernel, d, dv, how, queue, counter)
    came = []

    def wait(places, number):
        machine.wait(places[number % how.stages], (number // how.stages) & 1)

    def take_queries(taken):
        for empty in barriers.q_empty:
            machine.arrive(empty, pred=taken > 0)
        for full in barriers.q_full:
            machine.wait(full, taken & 1)

    def multiply():
        block = 0
        for taken, n in enumerate(steps):
            for step in range(n):
                wait(barriers.k_full, block)
                came.append(blocks.k[block % how.stages * forward_config.chunks(d)].content[2])
                if block > 0:
                    wait(barriers.v_full, block - 1)
                if step == 0:
                    # only now is there room for these queries
                    take_queries(taken)
                machine.arrive(barriers.kv_empty[block % how.stages], how.warpgroups)
                block += 1
        wait(barriers.v_full, block - 1)
        take_queries(len(steps))

    machine.add("products", 0, multiply)
    machine.run()
    assert came == [step * how.step for n in steps for step in range(n)]
