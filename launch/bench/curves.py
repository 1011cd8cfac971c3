"""Trains one model three times, with ring attention on many ranks, on one, and with dense attention, and compares the loss curves.

    python launch/bench curves                                                       # all GPUs, or 8 ranks on a CPU
    python launch/bench curves --device cpu --tokens 512 -- --hidden 64 --layers 2   # after --: options of the example

`examples/finetune_long_document.py` trains each time with the same seed, windows and settings. On GPUs the two runs of one rank go side
by side, each on its own GPU. The command writes `curves.json`, `curves.png` and a folder per run to `--out`. The difference of curves a
and b at a step is |a - b| / |b|. Training magnifies rounding, so this difference grows over the steps even between two exact methods:
judge the curve of many ranks by the difference between the two curves of one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
DENSE = ("--attention", "ulysses-sdpa", "--layout", "contiguous")  # on one rank: torch's attention over the whole sequence
# options that the command sets itself, or that would keep a run from training
FIXED = ("--device", "--tokens", "--steps", "--ranks", "--attention", "--layout", "--out", "--generate", "--resume", "--verify")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gpus = torch.cuda.device_count()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu")
    parser.add_argument("--ranks", type=int, help="ranks of the first run (default: all GPUs, or 8 on a CPU)")
    parser.add_argument("--tokens", type=int, help="tokens per step (default: the example's)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/curves"), metavar="DIR", help="folder to write (default: %(default)s)"
    )
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="further options of the example, for all three runs")


def main(arguments: argparse.Namespace) -> None:
    ranks = arguments.ranks or (torch.cuda.device_count() if arguments.device == "cuda" else 8)
    check(ranks, arguments.options)
    runs = {f"ring, {ranks} ranks": (ranks, ()), "ring, 1 rank": (1, ()), "dense, 1 rank": (1, DENSE)}
    common = ["--device", arguments.device, "--steps", str(arguments.steps), "--generate", "0", *arguments.options]
    if arguments.tokens is not None:
        common += ["--tokens", str(arguments.tokens)]
    folders = {name: arguments.out / name.replace(", ", "-").replace(" ", "-") for name in runs}
    options = {
        name: [*common, "--ranks", str(number), *attention, "--out", str(folders[name])]
        for name, (number, attention) in runs.items()
    }
    ring, *alone = runs
    for together in [[ring], alone] if arguments.device == "cuda" else [[name] for name in runs]:
        train({name: options[name] for name in together})
    curves = {
        name: [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()] for name, out in folders.items()
    }
    figures = json.loads((folders[ring] / "figures.json").read_text())
    differences = compare(curves)
    for pair, by_step in differences.items():
        print(f"{pair}: largest relative difference {max(by_step):.1e}, in step {int(np.argmax(by_step)) + 1} of {len(by_step)}")
    record = dict(
        machine=figures["machine"], settings=figures["settings"], tokens_a_step=figures["tokens_a_step"],
        parameters=figures["parameters"], curves=curves, differences=differences,
    )  # fmt: skip
    (arguments.out / "curves.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(record, arguments.out / "curves.png")
    print(f"wrote {arguments.out}/curves.json and curves.png")


def check(ranks: int, options: list[str]) -> None:
    """Exit, before any run, if the three curves could not be compared."""
    if "RANK" in os.environ:
        sys.exit("bench curves starts its own ranks: run it with python, not torchrun")
    if ranks < 2:
        sys.exit(f"ring attention would run on {ranks} rank twice: pass --ranks 2 or more, or --device cpu")
    for option in options:
        for fixed in FIXED:
            # the example's parser accepts the beginning of a name for the name
            if option.startswith("--") and fixed.startswith(option.partition("=")[0]):
                sys.exit(f"{option} follows --, but {fixed} is set by this program or would keep a run from training: leave it out")


def train(runs: dict[str, list[str]]) -> None:
    """Run the example once per item, with its options; several runs go side by side, each on its own GPU. Exit if one fails."""
    print(f"{' | '.join(runs)}:", flush=True)
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(len(runs))] if visible is None else visible.split(",")
    with contextlib.ExitStack() as stack:
        started = {}
        for index, (name, options) in enumerate(runs.items()):
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            if len(runs) > 1:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[index]
            command = [sys.executable, str(ROOT / "examples/finetune_long_document.py"), *options]
            started[name] = stack.enter_context(subprocess.Popen(command, env=environment))
    for name, run in started.items():
        if run.returncode:
            sys.exit(f"the run of {name} ended with exit code {run.returncode}")


def compare(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    """For each pair of curves, the relative difference of their losses in every step."""
    lengths = {name: len(losses) for name, losses in curves.items()}
    assert len(set(lengths.values())) == 1, lengths
    arrays = {name: np.array(losses) for name, losses in curves.items()}
    return {f"{a} / {b}": (np.abs(arrays[a] - arrays[b]) / np.abs(arrays[b])).tolist() for a, b in combinations(arrays, 2)}


def plot(record: dict, path: Path) -> None:
    """Draw the curves, and their differences below them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 6.4), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = range(1, 1 + len(next(iter(record["curves"].values()))))
    # the curves lie on each other: draw the lower ones wider
    styles = (("#b9d3f0", 6, "-"), ("#2f6db5", 2.5, "-"), ("black", 1, "--"))
    for (name, losses), (color, width, style) in zip(record["curves"].items(), styles):
        above.plot(steps, losses, style, label=name, linewidth=width, color=color)
    for pair, by_step in record["differences"].items():
        # a logarithmic axis cannot show zero
        below.semilogy(steps, [value or np.nan for value in by_step], ".-", label=pair, linewidth=0.6, markersize=3)
    above.set_ylabel("loss, mean over all tokens (nats)")
    below.set(xlabel="step", ylabel="relative difference")
    settings, machine = record["settings"], record["machine"]
    title = f"{record['parameters'] / 1e6:.1f}M parameters, {record['tokens_a_step']:,} tokens per step, {settings['dtype']}"
    above.set_title(f"{title}, {machine['device']}, torch {machine['torch']}", fontsize=9)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
