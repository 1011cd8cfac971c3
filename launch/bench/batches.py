"""Times what a batch of packed documents that was never seen costs the host of one rank, part by part. It needs no GPU.

Each batch has other documents, of lengths drawn at random, and is used once. Milliseconds of the process's own CPU time, medians:

    mask      ra.documents of the lengths
    layout    ra.balanced, or what --layout names
    plan      the plan, and the rows that ranks need of each other
    schedule  the choice of the default schedule
    forward   the rank's instructions of a forward pass
    backward  those of a backward pass, which makes them itself
    tiles     the tiles of its launches that these did not need yet
    tables    what the Hopper kernels of an H200 read of them, and the choice of splits, for 32 query and 8 K/V heads of 128 in bf16,
              without the copy to the GPU
    all       the sum; this is what `ra.prepare` does ahead of a call, and the mask and the layout
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

import ringattn as ra
from ringattn.schedule.program import Program, compile_program
from ringattn_kernels import TensorKind, hopper
from ringattn_kernels.ahead import forward_queues
from ringattn_kernels.continued import continued_part
from ringattn_kernels.split_choice import choice

from .shared.cases import LAYOUTS

_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_PROCESSORS, _CPU = 132, torch.device("cpu")
_CASES = ("16:32768:4", "128:131072:8", "128:1048576:8", "2000:1048576:8", "500:1048576:64")
PARTS = ("mask", "layout", "plan", "schedule", "forward", "backward", "tiles", "tables")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", nargs="+", default=list(_CASES), metavar="DOCUMENTS:TOKENS:RANKS", help=f"(default: {' '.join(_CASES)})"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="balanced", help="(default: %(default)s)")
    parser.add_argument("--batches", type=int, default=30, help="batches of each case (default: %(default)s)")


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print(
        f"{'documents':>9} {'tokens':>9} {'ranks':>5}  " + " ".join(f"{part:>8}" for part in (*PARTS, "all")) + "  ms on the host"
    )
    for case in arguments.cases:
        documents, tokens, ranks = map(int, case.split(":"))
        generator = np.random.default_rng(0)
        make_layout = LAYOUTS[arguments.layout]
        batch(generator, documents, tokens, ranks, make_layout)  # the first one imports what is needed
        rows = [batch(generator, documents, tokens, ranks, make_layout) for _ in range(arguments.batches)]
        found = [*map(median, zip(*rows)), median(map(sum, rows))]
        print(f"{documents:>9} {tokens:>9} {ranks:>5}  " + " ".join(f"{1e3 * seconds:>8.3f}" for seconds in found), flush=True)


def batch(
    generator: np.random.Generator, documents: int, tokens: int, ranks: int, make_layout: Callable[[ra.Mask, int, int], ra.Layout]
) -> list[float]:
    """Seconds of each of PARTS for a new batch, on the rank in the middle."""
    cuts = np.sort(generator.choice(tokens - 1, documents - 1, replace=False)) + 1
    bounds, rank = [0, *cuts.tolist(), tokens], ranks // 2
    times = [time.process_time()]

    def done() -> None:
        times.append(time.process_time())

    mask = ra.documents(bounds)
    done()
    layout = make_layout(mask, tokens, ranks)
    done()
    plan = ra.make_plan(layout, mask)
    plan.needs(rank, 0)
    done()
    schedule = ra.default_schedule(plan, ranks, copy_engines=True)
    done()
    program = compile_program(schedule, plan, rank)
    done()
    both = program.forward, program.backward
    done()
    launches = [launch.tiles for one_pass in both for launch in one_pass.launches]
    done()
    make_tables(program)
    done()
    assert launches
    return [b - a for a, b in zip(times, times[1:])]


def make_tables(program: Program) -> None:
    """The arrays that the Hopper kernels read in both passes, and the choice of configurations and splits."""
    part = None
    for number, launch in enumerate(program.forward.launches):
        tiles = launch.tiles
        q, kv = (_kind(rows, heads) for rows, heads in ((tiles.q_rows, _HEADS), (tiles.k_rows, _KV_HEADS)))
        config = hopper.forward_config.config_for(q, kv, tiles, processors=_PROCESSORS)
        splits = choice(tiles, "q", config.block, config.step, _HEADS, 1, _PROCESSORS * config.programs).most
        if number == 0 and not launch.last and splits == 1:
            part = continued_part(program.forward.continued, q, q)
        forward_queues(q, kv, kv, tiles, config, splits, first=number == 0, final=launch.last, part=part)
    for launch in program.backward.launches:
        block, step = hopper.fused.block_and_step(_HEAD_DIM, _HEAD_DIM)
        splits = choice(launch.tiles, "k", block, step, _KV_HEADS, _HEADS // _KV_HEADS, _PROCESSORS).most
        hopper.backward.key_blocks_of(launch.tiles, _CPU, splits, hopper.fused.config_for(_HEAD_DIM))


def _kind(rows: int, heads: int) -> TensorKind:
    return TensorKind((1, rows, heads, _HEAD_DIM), torch.bfloat16, _CPU)
