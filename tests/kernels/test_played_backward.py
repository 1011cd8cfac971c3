"""The fused backward's partitions, played on a CPU: they end, overwrite nothing that is read, and meet each live pair once."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ringattn_kernels as rk
from ringattn_kernels.hopper import blocks, dq_sums, fused, fused_kernel, gradient_rows, head_dims, loads, owned_dq, works
from ringattn_kernels.hopper.ordered_loads import DeviceTurns
from ringattn_kernels.hopper.panels import has_rest, main_columns
from ringattn_kernels.hopper.score_sums import SumPointers
from ringattn_kernels.hopper.statistics import whole_blocks
from ringattn_kernels.hopper.touches import find_touches
from ringattn_kernels.hopper.turns import key_turns
from tests.kernels import dense, played
from tests.kernels.played import NOTHING, Block, Descriptor, Machine, Pointer, Product, Scores, Sum

HEADS, KV_HEADS = 4, 2
GROUP = HEADS // KV_HEADS
BLOCK, ROWS, SUMS = blocks.BLOCK.value, blocks.ROWS.value, dq_sums.SUMS.value


class Place:
    """Where a gradient begins: a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __add__(self, _):
        return self


class Room:
    """Shared memory for a panel of dq, of which each warpgroup fills a part."""

    def __init__(self, name: str, rows: int) -> None:
        self.type = SimpleNamespace(shape=(rows, SUMS))
        self._name, self._parts = name, dict[int, Block]()

    def slice(self, first: int, *_, **__) -> Block:
        return self._parts.setdefault(first, Block(f"{self._name} from {first}"))

    def read(self) -> Sum:
        return Sum(tuple(scores for part in self._parts.values() for scores in part.read().parts))

    def release(self) -> None:
        for part in self._parts.values():
            part.release()


class Rest(Scores):
    """The right half of the columns of scores, whose products are counted with those of the left."""


def panels_of(d: int) -> int:
    return 1 + has_rest(d)


def v_dim(d: int) -> int:
    return dict(head_dims.IN_ONE)[d]


def play(d: int, table: rk.TileTable, seed: int, programs: int, by_copy: bool, way: str) -> list[tuple]:
    """(name, place, sum) of all rows and sums that a launch over a table leaves."""
    owned, ordered = way == "own heads", way == "in turns"
    machine, config = Machine(seed), fused.config_for(d, owned=owned)
    by_threads, step, wide = [], config.step, fused_kernel.is_wide(d, v_dim(d))

    def total_of_dq(sums, dq, some):
        found = machine.memory[("sums", (sums.offset // SUMS, 0))].parts if some else ()
        return Sum((*found, *dq.parts))

    def write_rows(place, _stride, total, first, *_, **__):
        by_threads.append((place.name, (first,), total))

    def weights(scores, pivots, _scale, edge, segments, segment, row0, start, _dtype):
        """The right half of a step's columns begins at its middle."""
        pivots.load()
        return played.mask_scores(scores, segments, segment, row0, start - isinstance(scores, Rest) * step // 2) if edge else scores

    def start_each(scores, right, accumulators):
        before = tuple(x.result if isinstance(x, Product) else x for x in accumulators)
        products = machine.start_each(scores, right, before)
        if isinstance(scores, Rest):
            for product, total in zip(products, before):
                product.result = total
        return products

    def start_dq(keys, ds, buffer, *places):
        """Both halves of dS times both halves of K: of the panel of a part, if dq has two parts. Else panels hold the same."""
        panel = keys[places[-1]] if wide else keys[0]
        read = [ds[2 * buffer], ds[2 * buffer + 1], panel[0], panel[1]]

        def result(first, second, *halves):
            for scores, (_, *corner) in zip((first, second), halves):
                assert scores.left[1:4] == tuple(corner[:3]), "dS of other keys"
            assert first.right == second.right, "halves of dS of different steps"
            return Sum((first,))

        return machine.start_over(read, result, dq_sums.DQ_PRODUCTS.value)

    def turn_of(pointer):
        return pointer.array[pointer.offset]

    def pass_turn(pointer, successor):
        machine.wait_until_stored(0)
        pointer.array[pointer.offset] = successor

    names = machine.names(programs) | dict(
        look=turn_of,
        wait_for_turn=lambda pointer, item, _: machine.pause(lambda: turn_of(pointer) == item),
        pass_turn=pass_turn,
        drop_dead=lambda dp, _: dp,
        mask_scores=played.mask_scores,
        matrices=lambda buffers, index: tuple(buffer[index] for buffer in buffers),
        matrix=lambda buffer, index: buffer.index(index),
        zeros=lambda _rows, panels: (Sum(),) * len(panels),
        in_order_of_sums=lambda dq: dq,
        split_columns=lambda scores: (scores, Rest(scores.left, scores.right)),
        join_columns=lambda left, _: left,
        some_rows=lambda panels, *_: panels,
        score_gradient=lambda p, dp, *_: p * dp,
        weights=weights,
        start_each=start_each,
        start_dq=start_dq,
        total_of_dq=total_of_dq,
        write_rows=write_rows,
        write_panels=lambda place, _stride, values, _factor, row, *_: by_threads.extend((place.name, (row,), x) for x in values),
    )
    kernel = played.source(fused_kernel, names)
    cpu, padded = torch.device("cpu"), whole_blocks(table.q_rows)
    keys = key_turns(table, BLOCK, step, cpu) if ordered else table.key_blocks(BLOCK, 1, cpu, 1)
    items, segments = keys.items.numpy(), keys.segments.numpy()
    drawn, count = np.zeros(3, dtype=np.int64), KV_HEADS if owned else len(items) * KV_HEADS
    most, chunk = (count, 1) if owned else (-(-count // programs), 2)
    pointers = Pointer(items), Pointer(segments), Pointer(drawn)
    queue = works.KeyWorks(*pointers, count, most, len(items), chunk, KV_HEADS, KV_HEADS, GROUP)
    widths = {dim: [main_columns(dim), dim - main_columns(dim)][: panels_of(dim)] for dim in (d, v_dim(d))}
    dims = dict(Q=d, K=d, V=v_dim(d), dout=v_dim(d))
    rows = dict(Q=step, K=ROWS, V=ROWS, dout=step)
    loaded = [tuple(Descriptor(name, (1, count, 1, columns)) for columns in widths[dims[name]]) for name, count in rows.items()]
    inputs = loads.Inputs(*loaded, Descriptor("pivot", (step,)), Descriptor("delta", (step,)))
    sums = tuple(Descriptor("sums", (1, SUMS)) for _ in widths[d])
    stored = [Descriptor(name, (1, ROWS, 1, d)) if by_copy else None for name in ("dk", "dv")]
    gradients = gradient_rows.GradientRows(*stored, Place("dk"), Place("dv"), *[NOTHING] * 6)
    stages, turns = config.stages, None
    if ordered:
        # the first turns, of the blocks of each query head
        turns = DeviceTurns(Pointer(keys.successors.numpy()), Pointer(np.tile(keys.first.numpy()[: padded // step], HEADS)))
    touches = Pointer(find_touches(items, segments, table.q_rows, step).numbers)
    own = owned_dq.OwnRows(Pointer(np.zeros(0)), touches, Place("dq"), NOTHING, NOTHING, NOTHING, table.q_rows, padded, 1)
    sizes = dict(STAGES=stages, STEP=step, HEAD_DIM=d, ORDERED=ordered, OWNED=owned)
    ways = dict(V_DIM=v_dim(d), OVERLAP=config.overlap, ADD=False, MODIFIED=False, QK_COLUMNS=d, V_COLUMNS=v_dim(d))
    for program in range(programs):
        counts = dict(Q=stages, K=2, V=2, dout=stages)
        panels = [
            tuple(played.blocks(f"{name} {columns}", count) for columns in widths[dims[name]]) for name, count in counts.items()
        ]
        tiles = loads.LoadedTiles(*panels, played.blocks("pivot", stages), played.blocks("delta", stages))
        barriers = loads.Barriers(played.Barrier(1), *(played.barriers(stages, count) for count in (1, 1, 2)))
        buffers = stages if wide else stages + 1
        rooms = tuple(Room(f"dQ {columns}", step * columns // SUMS) for columns in widths[d]) if ordered else played.blocks("dQ", 2)
        staging = dq_sums.Staging(played.blocks("dS", 2 * buffers, ROWS, step), rooms, [None] * stages)
        ds_full, ds_empty = (played.barriers(buffers, 2) for _ in range(2))
        handover = dq_sums.Handover(ds_full, ds_empty, played.Barrier(2), played.Barrier(1))
        of_works = works.WorkPlaces([None] * (2 * kernel.NUMBERS), played.barriers(2), played.Barrier(2))
        loading = inputs, sums, tiles, staging, barriers, handover, of_works, queue, own, 0, turns, padded
        machine.add(f"loads of {program}", program, kernel.produce, *loading, PARTS=1, **sizes)
        rest = tiles, staging, barriers, handover, of_works, queue, sums, own, gradients, NOTHING, SumPointers(None, None), padded
        for half in range(2):
            name = f"warpgroup {half} of {program}"
            machine.add(name, program, kernel.consume_and_add, *rest, table.k_rows, NOTHING, NOTHING, half, **sizes, **ways)
    machine.run()
    assert not drawn.any(), "the next launch would begin elsewhere"
    return [(*place, total) for place, total in machine.memory.items()] + by_threads


def check(results: list[tuple], table: rk.TileTable, tiles, d: int, step: int, owned: bool) -> None:
    """dk, dv and dq have met each live pair of their rows; with a single tile, each step once."""
    live = dense.live_pairs(tiles, table.q_rows, table.k_rows).numpy()
    padded = whole_blocks(table.q_rows)
    steps = {name: [scores for found, _, total in results if found == name for scores in total.parts] for name in ("dk", "dv")}
    steps["dq"] = []
    for name, place, total in results:
        for scores in total.parts if name == ("dq" if owned else "sums") else ():
            row, head = scores.right[2:4]
            begin = row if owned else (head * padded + row) * d // SUMS
            assert begin <= place[0] < begin + (1 if owned else step * d // SUMS), "dq of other rows"
            # of both warpgroups' keys
            keys = [(*scores.left[:2], scores.left[2] + ROWS * i, *scores.left[3:]) for i in range(2)]
            steps["dq"] += [Scores(left, scores.right) for left in keys]
    for name, met in steps.items():
        seen = np.zeros((HEADS, table.q_rows + step, table.k_rows + BLOCK), dtype=bool)
        for scores in met:
            (_, _, k_row, kv_head, _), (_, _, q_row, head, _) = scores.left, scores.right
            assert kv_head == head // GROUP
            seen[head, q_row : q_row + step, k_row : k_row + ROWS] = True
        assert seen[:, : table.q_rows, : table.k_rows][:, live].all(), f"{name} lacks pairs"
        # each warpgroup has half of each dq, or of both its parts; dk and dv are as many as there are panels
        parts = 2 * (1 + fused_kernel.is_wide(d, v_dim(d))) if name == "dq" else panels_of(v_dim(d) if name == "dv" else d)
        assert len(met) == parts * len(set(met)) or len(tiles) > 1, f"{name} has a step twice"


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.thorough)], ids=["few", "many"])
@pytest.mark.parametrize(
    ("d", "way"), [*itertools.product((64, 96, 128), ("as they come", "in turns", "own heads")), (192, "as they come")]
)
def test_partitions_end_and_meet_each_live_pair(d, way, seeds):
    """Programs add to dq as they come, or in turns, which give the same order every time, or have heads for themselves."""
    owned = way == "own heads"
    for seed in seeds:
        random = np.random.default_rng(seed)
        rows = int(random.integers(1, 700))
        tables = dense.causal(rows), dense.window(rows, 90, 40), dense.random_tiles(random, rows, rows), dense.later(rows)
        number = (seed + d // 32) % 4
        tiles = tables[number]
        table = rk.TileTable(np.array(tiles), rows, rows)
        programs = 1 + seed % (KV_HEADS if owned else 3)
        by_copy = d in (64, 128) and number > 0 and way != "in turns"
        results = play(d, table, seed, programs, by_copy, way)
        check(results, table, tiles, d, fused.config_for(d, owned=owned).step, owned)
        if way == "in turns":
            again = play(d, table, seed + 1000, 3, by_copy, way)
            orders = [{place: total.parts for name, place, total in found if name == "sums"} for found in (results, again)]
            assert orders[0] == orders[1]
