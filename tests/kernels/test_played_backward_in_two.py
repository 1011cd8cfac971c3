"""The backward in two kernels, played on a CPU: its partitions end, overwrite nothing that is read, and meet each live pair once."""

import numpy as np
import pytest
import torch

import ringattn_kernels as rk
from ringattn_kernels.hopper import backward, blocks, key_kernel, loads, query_kernel, tables, wide_key_kernel
from tests.kernels import dense, played
from tests.kernels.played import NOTHING, Block, Descriptor, Machine, Nothing, Pointer, Sum

HEADS, KV_HEADS, BATCH = 4, 2, 1
GROUP = HEADS // KV_HEADS
BLOCK, ROWS = blocks.BLOCK.value, blocks.ROWS.value
DIMS = {"key": (64, 128), "wide key": (256,), "query": (64, 128, 256)}


class Handed(Block):
    """A block of P, which keeps what it is of."""

    def load(self, *_):
        content = self.read()
        self.release()
        return content


class Score:
    """Something is done to scores; what it is does not matter."""

    into_cap = NOTHING


def checked(s, _score, head, q_position, k_position, direction, edge, _segments, segment, row0, start):
    """Scores are modified as those of their head and rows, and masked as those of their block."""
    queries, keys = (s.left, s.right) if direction == 1 else (s.right, s.left)
    assert head == queries[3], "scores of another head"
    (of_q, row), (of_k, key) = q_position, k_position
    assert of_q == of_k == segment and (row, key) == (queries[2], keys[2]), "positions of another block"
    assert not edge or (s.left[2], s.right[2]) == (row0, start), "a mask of another block"
    return s, s


def named(machine: Machine, module, programs: int, found: list[tuple]):
    """The source of a module of kernels. found: (name, first row, sum) of what its threads write."""

    def multiply(left, right, acc, use_acc=True, is_async=False):
        assert is_async
        if isinstance(left, Block):
            return machine.start_sum((left,), (right,), NOTHING, False)
        if isinstance(left, Nothing):
            # of scores that nobody uses
            return machine.start_over([], lambda: acc)
        return machine.start_each(left, (right,), (Sum() if isinstance(acc, Nothing) else acc,))[0]

    def write_rows(name, _stride, total, first, *_, **__):
        found.append((name, first, Sum() if isinstance(total, Nothing) else total))

    names = machine.names(programs) | dict(
        warpgroup_mma=multiply,
        tile=lambda buffer, index, *_: buffer[index],
        hide=lambda x: x,
        drop_dead=lambda dp, _: dp,
        mask_scores=played.mask_scores,
        modified_and_masked=checked,
        with_slope=lambda p, _: p,
        load_head=lambda _, head_index: head_index,
        load_places=lambda _, segment: (segment, segment),
        position=lambda _, place, row: (place, row),
        write_rows=write_rows,
    )
    return played.source(module, names)


def play_keys(kernel: str, d: int, table: rk.TileTable, seed: int, modified: bool) -> list[tuple]:
    """(name, head, first row, sum) of dk and dv, over all programs of the kernel for these."""
    wide, config = kernel == "wide key", backward.KEY_CONFIGS[d]
    rows, parts, step, stages = ROWS if wide else BLOCK, 1 if wide else 2, config.step, config.stages
    keys = backward.key_blocks_of(table, torch.device("cpu"), 1, config, rows)
    segments, results = Pointer(keys.segments.numpy()), []
    for number, (block_begin, first, last, _) in enumerate(keys.items.tolist()):
        for kv_head in range(KV_HEADS):
            found, machine = [], Machine(seed + 7 * number + kv_head)
            module = named(machine, wide_key_kernel if wide else key_kernel, 1, found)
            steps = GROUP * steps_of(keys.segments.numpy(), first, last, step, step)
            walk = tables.Walk(segments, *((first, last) if steps else (0, 0)), steps)
            shapes = dict(Q=step, K=ROWS, V=ROWS, dout=step)
            inputs = loads.Inputs(
                *[(Descriptor(name, (1, n, 1, d)),) for name, n in shapes.items()],
                *[Descriptor(x, (step,)) for x in ("pivot", "delta")],
            )
            counts = dict(Q=stages, K=parts, V=parts, dout=stages)
            tiles = loads.LoadedTiles(
                *[(played.blocks(name, n),) for name, n in counts.items()], *[played.blocks(x, stages) for x in ("pivot", "delta")]
            )
            barriers = loads.Barriers(played.Barrier(1), *(played.barriers(stages, n) for n in (1, 1, 2)))
            head0, sizes = kv_head * GROUP, dict(STAGES=stages, STEP=step)
            load = inputs, tiles, barriers, walk, 0, kv_head, GROUP, head0, table.q_rows, block_begin
            machine.add("loads", 0, module.produce_queries, *load, PARTS=parts, **sizes)
            sizes |= dict(HEAD_DIM=d, ADD=False)
            if wide:
                p_s = played.Blocks(Handed(f"P[{i}]") for i in range(2))
                handover = p_s, barriers, played.barriers(2), played.barriers(2)
                first_part = tiles, *handover, "dv", NOTHING, walk, table.k_rows, block_begin, NOTHING, Score(), head0
                machine.add("values", 0, module.consume_values, *first_part, **sizes, MODIFIED=modified, COLUMNS=d)
                second_part = tiles, *handover, "dk", NOTHING, steps, table.k_rows, block_begin, NOTHING
                machine.add("scores", 0, module.consume_scores, *second_part, **sizes, COLUMNS=d)
            else:
                gradients = blocks.Gradients("dk", "dv", NOTHING, NOTHING)
                rest = tiles, barriers, gradients, walk, table.k_rows, block_begin, NOTHING, NOTHING, Score(), head0
                for half in range(2):
                    ways = dict(HALF=half, MODIFIED=modified, QK_COLUMNS=d, V_COLUMNS=d)
                    machine.add(f"warpgroup {half}", 0, module.consume_queries, *rest, **sizes, **ways)
            machine.run()
            results += [(name, kv_head, row, total) for name, row, total in found]
    return results


def steps_of(segments: np.ndarray, first: int, last: int, step: int, align: int) -> int:
    """How many steps segments take, which begin at multiples of `align`."""
    return sum(
        -(-(end - begin // align * align) // step) for begin, end in segments[first:last, [tables.BEGIN.value, tables.END.value]]
    )


def play_queries(d: int, table: rk.TileTable, seed: int, modified: bool) -> list[tuple]:
    """The same of dq."""
    config, cpu = backward.QUERY_CONFIGS[d], torch.device("cpu")
    step, stages, v_stages = config.step, config.stages, config.v_stages or config.stages
    queries, results = table.query_blocks(BLOCK, step, cpu), []
    segments = Pointer(queries.segments.numpy())
    for number, (block_begin, first, last, _) in enumerate(queries.items.tolist()):
        for head in range(HEADS):
            found, machine = [], Machine(seed + 7 * number + head)
            module = named(machine, query_kernel, 1, found)
            steps = steps_of(queries.segments.numpy(), first, last, step, 1)
            walk = (first, last) if steps else (0, 0)
            descriptors = [Descriptor(name, (1, n, 1, d)) for name, n in (("Q", ROWS), ("K", step), ("V", step), ("dout", ROWS))]
            shared = [played.blocks(name, n) for name, n in (("Q", 2), ("K", stages), ("V", v_stages), ("dout", 2))]
            barriers = (
                played.Barrier(1),
                *(played.barriers(*x) for x in ((stages,), (v_stages,), (stages, 2), (v_stages, 2))),
            )
            ways = dict(STAGES=stages, V_STAGES=v_stages, STEP=step)
            loading = *descriptors, *shared, *barriers, segments, *walk, 0, head, head // GROUP, block_begin
            machine.add("loads", 0, module.produce_keys, *loading, **ways)
            rest = *shared, *barriers, NOTHING, NOTHING, "dq", NOTHING, segments, *walk, steps, table.q_rows, block_begin
            ways |= dict(HEAD_DIM=d, ADD=False, MODIFIED=modified, QK_COLUMNS=d)
            for half in range(2):
                machine.add(f"warpgroup {half}", 0, module.consume_keys, *rest, NOTHING, NOTHING, Score(), head, HALF=half, **ways)
            machine.run()
            results += [("dq", head, row, total) for name, row, total in found]
    return results


def check(results: list[tuple], table: rk.TileTable, tiles, step: int) -> None:
    """Each gradient has met each live pair of its rows; with a single tile, each step once."""
    live = dense.live_pairs(tiles, table.q_rows, table.k_rows).numpy()
    for name, head, row, total in results:
        of_queries = name == "dq"
        mine = live[row : row + ROWS] if of_queries else live[:, row : row + ROWS].T
        for other in [head // GROUP] if of_queries else range(head * GROUP, (head + 1) * GROUP):
            met = []
            for scores in total.parts:
                assert scores.left[2:4] == (row, head), "rows of another block"
                if scores.right[3] == other:
                    met.append(scores.right[2])
            seen = np.zeros(mine.shape[1] + step, dtype=bool)
            for start in met:
                seen[start : start + step] = True
            assert seen[: mine.shape[1]][mine.any(0)].all(), f"{name} leaves out rows"
            assert len(met) == len(set(met)) or len(tiles) > 1, f"{name} meets rows twice"


@pytest.mark.parametrize("modified", [False, True], ids=["", "modified"])
@pytest.mark.parametrize(("kernel", "d"), [(kernel, d) for kernel, dims in DIMS.items() for d in dims], ids=str)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 30), marks=pytest.mark.thorough)], ids=["few", "many"])
def test_partitions_end_and_meet_each_live_pair(kernel, d, modified, seeds):
    for seed in seeds:
        random = np.random.default_rng(seed)
        rows = int(random.integers(1, 500))
        tiles = (dense.causal(rows), dense.window(rows, 90, 40), dense.random_tiles(random, rows, rows))[seed % 3]
        table = rk.TileTable(np.array(tiles), rows, rows)
        if kernel == "query":
            results, step = play_queries(d, table, seed, modified), backward.QUERY_CONFIGS[d].step
            blocks_of_rows = -(-rows // BLOCK) * 2 * HEADS
        else:
            results, step = play_keys(kernel, d, table, seed, modified), backward.KEY_CONFIGS[d].step
            block = ROWS if kernel == "wide key" else BLOCK
            blocks_of_rows = -(-rows // block) * block // ROWS * KV_HEADS * 2
        assert len(results) == blocks_of_rows
        check(results, table, tiles, step)
