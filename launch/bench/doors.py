"""Trains a Llama by each of the ways into a training loop, side by side: tokens a second, and the losses of all steps.

A step has one row of `--tokens` tokens for each rank, so that data parallelism without a ring, which gives each rank a row, does the same
work. Rings run its rows one after the other, as micro-batches. The rows of the case `packed` hold documents of log-normal lengths, each of
which sees itself only; those of `chapters` hold chapters of `--text`, whose bytes are the tokens; those of `whole` are one document each.
The ways (`doors_ways.py`):

    attach            `attach`, around a loop written by hand
    zigzag            the same, with the layout zigzag
    padded            the same, with documents as rows of one batch, padded to the longest, under zigzag
    accelerate        `attach` and accelerate's DDP, by `RingParallelismConfig`
    trainer           `attach` and transformers' Trainer, by `RingTrainer`
    trl               `attach` and trl's SFTTrainer, by `RingSFTTrainer`, which takes zigzag whatever `--layout` says
    replicas          no ring: data parallelism over all ranks, by the same kernels
    context_parallel  the same loop, around torch's own context parallelism (which accelerate's `cp_size` takes); rings need GPUs. It knows
                      no documents: they become rows of one batch, padded to the longest, with the same loss

Each run begins with the same weights. Ways take turns in each round; a time is the slowest rank's, from step to step, after `--warm-up`
steps of each run. `ratio` is to the first way. `loss` is the largest relative difference of a step's loss from the first way's. Rates
count tokens without padding. `trainer` and `trl` make a shard's logits whole, as transformers does; the others a few
tokens' at a time.

    python launch/bench doors --world-size 2 --tokens 65536 --cases whole --ways attach replicas context_parallel

compares a ring of two with two replicas at 64k tokens. With `--device cpu` the benchmark runs over gloo; take toy sizes there.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist

from .doors_ways import WAYS, Run, Setting, TrainedStep, make_steps
from .shared.cases import LAYOUTS
from .shared.ranks import add_ranks, slowest, start_ranks, write_record
from .shared.timing import spread

CASES = ("packed", "whole", "chapters")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["packed", "whole"], help="(default: packed whole)")
    parser.add_argument("--text", type=Path, help="for chapters: lines begin with a book, a chapter and a verse, such as `Ge1:3`")
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), help="(default: all that run here; ratios are to the first)")
    parser.add_argument("--tokens", type=int, default=32768, help="of a row (default: %(default)s)")
    parser.add_argument("--mean", type=int, default=4096, help="length of packed documents (default: %(default)s)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a length (default: 1)")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="placed", help="of the ring (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of a run, after the warm-up (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each run that do not count (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate of AdamW (default: %(default)s)")
    # the shape of Llama 3.2 1B
    for name, value in (("layers", 16), ("width", 2048), ("inner", 8192), ("heads", 32), ("kv-heads", 8), ("vocabulary", 128256)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    parser.add_argument("--checkpoint", action="store_true", help="checkpoint activations, layer by layer")
    add_ranks(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for doors.json")


def main(arguments: argparse.Namespace) -> None:
    if "chapters" in arguments.cases and (arguments.text is None or not arguments.text.is_file() or arguments.vocabulary < 256):
        raise SystemExit(
            f"--cases has chapters, --text is {arguments.text} and --vocabulary {arguments.vocabulary}: give a file, and 256 or more"
        )
    start_ranks(run_rank, arguments)


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure every case; rank 0 prints and writes the results after each."""
    setting = Setting(arguments)
    obstacles = {name: way.obstacle(setting.device, setting.size) for name, way in WAYS.items()}
    ways = arguments.ways or [name for name in WAYS if not obstacles[name]]
    for name in ways:
        if obstacles[name]:
            raise ValueError(f"{name} is among --ways, but {obstacles[name]}: leave it out")
    rows: list[dict] = []
    for case in arguments.cases:
        steps = make_steps(case, arguments, setting.size)
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name in ways:
                runs[name].append(measured(name, setting, steps))
        new = [row(case, name, runs, steps, arguments) for name in ways]
        rows += new
        if dist.get_rank() == 0:
            show(new, header=rows == new)
            write(rows, arguments)


def measured(name: str, setting: Setting, steps: list[TrainedStep]) -> Run:
    """A run of a way, from the first weights; nothing of it stays."""
    run = Run(setting.device)
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    WAYS[name].train(setting, steps, run)
    assert len(run.seconds) == len(run.losses) == len(steps)
    run.seconds = slowest(run.seconds, setting.device)
    if setting.device == "cuda":
        run.peak = int(slowest([torch.cuda.max_memory_allocated()], "cuda")[0])
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    return run


def row(case: str, name: str, runs: dict[str, list[Run]], steps: list[TrainedStep], arguments: argparse.Namespace) -> dict:
    """What is known of a way in a case."""
    kept = range(arguments.warm_up, len(steps))

    def rate(way: str):
        return spread([steps[i].tokens / run.seconds[i] for run in runs[way] for i in kept])

    first = next(iter(runs))
    found, reference = rate(name), rate(first)
    pairs = [(a, b) for run in runs[name] for a, b in zip(run.losses, runs[first][0].losses)]
    return {
        "case": case,
        "way": name,
        "tokens_per_second": found.median,
        "quartiles": [found.lower, found.upper],
        "ratio": found.median / reference.median,
        "ms": 1e3 * spread([run.seconds[i] for run in runs[name] for i in kept]).median,
        "loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        "last_loss": runs[name][0].losses[-1],
        "computed_tokens": WAYS[name].computed(steps, dist.get_world_size()),
        "peak_gib": max(run.peak for run in runs[name]) / 2**30,
    }


def show(rows: list[dict], header: bool) -> None:
    if header:
        print("| case | way | tokens/s (quartiles) | ratio | ms a step | computed / real tokens | GiB | loss |")
        print("|---" * 8 + "|")
    for each in rows:
        rate = f"{each['tokens_per_second']:,.0f} ({each['quartiles'][0]:,.0f} to {each['quartiles'][1]:,.0f})"
        figures = f"{each['ratio']:.3f} | {each['ms']:.1f} | {each['computed_tokens']:.2f} | {each['peak_gib']:.1f}"
        print(f"| {each['case']} | {each['way']} | {rate} | {figures} | {each['loss_difference']:.1e} |", flush=True)


def write(rows: list[dict], arguments: argparse.Namespace) -> None:
    """Write doors.json."""
    arguments.mask = f"documents, log-normal with mean {arguments.mean} and sigma {arguments.sigma}; or one document"
    names = (
        "tokens",
        "layout",
        "steps",
        "warm_up",
        "rounds",
        "layers",
        "width",
        "inner",
        "heads",
        "kv_heads",
        "vocabulary",
        "checkpoint",
    )
    shape = {name: getattr(arguments, name) for name in names}
    write_record("doors", arguments, **shape, time=time.strftime("%H:%M"), rows=rows)
