"""Fit the planner's machine to measured rings: `python launch/bench.py fit runs/bench/ring.json`.

Files that `bench.py ring` wrote become runs of docs/measurements.json, where a run of the same command takes an earlier one's place.
Then the figures in FITTED are chosen anew, by all runs, and written into ringattn/machine.py and docs/scaling.md, whose tables are made
anew, in a few minutes; each row is printed with what is predicted over what was measured. Without a file, the runs that are there are
fitted again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from bench_ring import parse_mask
from ring_methods import PEER_METHODS, make_layout, schedule

from ringattn.geometry.plan import make_plan
from ringattn.predict.machine import MACHINES, Machine
from ringattn.predict.simulation import Option, Simulation, Workload
from ringattn.schedule.schedules import default_schedule, ring

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS = ROOT / "docs" / "measurements.json"
MACHINE_FILE = ROOT / "ringattn" / "machine.py"
PAGE = ROOT / "docs" / "scaling.md"
COLUMNS = ["tokens", "method", "forward_ms", "forward_backward_ms", "peak_gib_beyond_inputs"]
# what is fitted: where the search begins, and what figures are rounded to
FITTED = {
    "forward_tflops": (600, 5),
    "backward_tflops": (600, 5),
    "nccl_latency_us": (100, 10),
    "nccl_slowdown": (0.2, 0.05),
}
_STEPS = 30  # of the search
_GPUS_PER_NODE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="*", metavar="ring.json")
    parser.add_argument(
        "--new-kernels",
        action="store_true",
        help="kernels have changed: the runs that are there keep the rates that were fitted to them, and still tell about transports",
    )


def main(given: argparse.Namespace) -> None:
    runs = json.loads(MEASUREMENTS.read_text())["runs"]
    new = [run_of(json.loads(path.read_text())) for path in given.files]
    machine = MACHINES[(new or runs)[-1]["machine"]]
    if given.new_kernels:
        runs = with_rates(runs, machine)
    for run in new:
        runs = joined(runs, run)
    rows = rows_of([run for run in runs if run["machine"] == machine.name])
    figures = fit(machine, rows)
    report(machine.with_rates(figures), rows)
    print(", ".join(f"{name}={value:g}" for name, value in figures.items()), flush=True)
    MEASUREMENTS.write_text(as_text(runs))
    MACHINE_FILE.write_text(with_figures(MACHINE_FILE.read_text(), machine, figures))
    PAGE.write_text(with_tables(with_accuracy(PAGE.read_text(), machine.with_rates(figures), rows)))


@dataclass(frozen=True)
class Row:
    """A measured method: milliseconds, and GiB of peak memory (None: not measured).

    `world` predicts its time, with `rates` where they are no longer the machine's, and `holds` its memory: of `local`, a single rank.
    """

    tokens: int
    method: str
    forward_ms: float
    both_ms: float
    peak_gib: float | None
    world: Simulation
    holds: Simulation
    rates: Mapping[str, float]

    def predicted_ms(self, machine: Machine) -> tuple[float, float]:
        """Of the forward pass, and of both."""
        world = self.world
        world.machine = machine.with_rates(self.rates)
        if self.method.startswith("local"):
            pairs = world.pairs.sum(axis=1)
            seconds = [float(world.kernel(pairs, backward).max()) for backward in (False, True)]
        else:
            seconds = [world.forward().seconds, world.backward().seconds]
        return 1e3 * seconds[0], 1e3 * sum(seconds)

    def errors(self, machine: Machine) -> tuple[float, float]:
        """Predicted over measured, of the forward pass and of both."""
        forward, both = self.predicted_ms(machine)
        return forward / self.forward_ms, both / self.both_ms

    @property
    def memory_error(self) -> float | None:
        """The same of peak memory, which has no fitted figure."""
        return None if self.peak_gib is None else self.holds.peak_bytes() / 2**30 / self.peak_gib


def rows_of(runs: Sequence[dict]) -> list[Row]:
    """All measured rows, with what predicts them."""
    found = []
    for run in runs:
        for tokens, method, *figures in run["rows"]:
            world = holds = _world(run, tokens, method)
            if method.startswith("local"):
                holds = _world(run | {"gpus": 1, "mask": "full"}, tokens // run["gpus"], "local")
            found.append(Row(tokens, method, *figures, world, holds, run.get("rates", {})))
    return found


def _world(run: dict, tokens: int, method: str) -> Simulation:
    gpus, (word, _, kind) = run["gpus"], method.partition("@")
    name, _, transport = word.partition("+")
    mask = parse_mask(run["mask"], tokens)
    layout = make_layout(kind, mask, tokens, gpus)
    chosen = ring() if name == "local" else schedule(name)
    if chosen is None:
        chosen = default_schedule(make_plan(layout, mask), copy_engines=transport == "symmetric")
    work = Workload(tokens, run["heads"], run["kv_heads"], run["head_dim"], mask)
    return Simulation(MACHINES[run["machine"]], work, gpus, _GPUS_PER_NODE, Option(chosen, nccl=not transport), layout)


def fit(machine: Machine, rows: Sequence[Row]) -> dict[str, float]:
    """The figures in FITTED by which rows are met best: the least squares of the errors' logarithms (Levenberg-Marquardt), rounded."""
    names, begins, units = zip(*((name, *figures) for name, figures in FITTED.items()))
    units = np.array(units)

    def misses(point: np.ndarray) -> np.ndarray:
        tried = machine.with_rates(dict(zip(names, (point * units).tolist())))
        return np.log([row.errors(tried) for row in rows]).ravel()

    point = np.array(begins) / units
    found, damping = misses(point), 1.0
    for _ in range(_STEPS):
        slopes = np.stack([misses(point + side) - found for side in np.eye(len(units))], axis=1)
        normal = slopes.T @ slopes
        towards = np.linalg.solve(normal + damping * np.diag(normal.diagonal() + 1e-12), -slopes.T @ found)
        tried = np.maximum(point + towards, 0)
        missed = misses(tried)
        if missed @ missed < found @ found:
            point, found, damping = tried, missed, damping / 5
        else:
            damping *= 5
    return dict(zip(names, (np.round(point) * units).round(2).tolist()))


def run_of(record: dict) -> dict:
    """A file of `bench.py ring` as a run: rows of ring attention and of local work. Raises ValueError for an unknown machine."""
    machine = next((name for name in MACHINES if name in record["device"].lower()), None)
    if machine is None:
        raise ValueError(f"the device is {record['device']!r}, but must be one of the machines {', '.join(MACHINES)}")
    rows = []
    for row in record["rows"]:
        if row["ranks"] != record["world_size"]:
            raise ValueError("rows have different numbers of ranks: a run is of one (leave out --scaling)")
        if row["method"] not in PEER_METHODS and "+graph" not in row["method"]:
            figures = row["forward_ms"], row["forward_backward_ms"], row["peak_bytes_beyond_inputs"] / 2**30
            rows.append([row["tokens"], row["method"], *(float(f"{figure:.5g}") for figure in figures)])
    command = re.sub(r" --out \S+", "", record["command"])
    shape = {key: record[key] for key in ("heads", "kv_heads", "head_dim", "mask")}
    return {"machine": machine, "gpus": record["world_size"], "date": str(date.today()), "command": command, **shape, "rows": rows}


def joined(runs: Sequence[dict], new: dict) -> list[dict]:
    """Runs and a new one, in the place of an earlier one of the same command and GPUs."""

    def same(run: dict) -> bool:
        return all(run[key] == new[key] for key in ("command", "machine", "gpus"))

    return [*(run for run in runs if not same(run)), new]


def with_rates(runs: Sequence[dict], machine: Machine) -> list[dict]:
    """Runs of kernels that are no longer: they keep a machine's rates, but for those that keep others."""
    rates = {name: getattr(machine, name) for name in ("forward_tflops", "backward_tflops")}
    return [run if "rates" in run else run | {"rates": rates} for run in runs]


def as_text(runs: Sequence[dict]) -> str:
    """docs/measurements.json, a line a row."""
    text = json.dumps({"columns": COLUMNS, "runs": runs}, indent=1)
    return re.sub(r"\[\n\s+([^][{}]*?)\n\s+\]", lambda found: "[" + re.sub(r"\n\s+", " ", found[1]) + "]", text) + "\n"


def with_figures(source: str, machine: Machine, figures: Mapping[str, float]) -> str:
    """machine.py with a machine's figures replaced."""
    begin = source.index(f'name="{machine.name}"')
    end = source.index(")", begin)
    block = source[begin:end]
    for name, value in figures.items():
        block, found = re.subn(rf"\b{name}=[^,]+,", f"{name}={value:g},", block)
        assert found == 1, name
    return source[:begin] + block + source[end:]


def with_accuracy(page: str, machine: Machine, rows: Sequence[Row]) -> str:
    """docs/scaling.md with the figures that were fitted, and how well they meet what was measured."""
    errors = sorted(abs(error - 1) for row in rows for error in row.errors(machine))
    for pattern, text in (
        (r"[\d.]+ / [\d.]+ TFLOP/s \| fitted", f"{machine.forward_tflops:g} / {machine.backward_tflops:g} TFLOP/s | fitted"),
        (r"[\d.]+ us, [\d.]+ % \| fitted", f"{machine.nccl_latency_us:g} us, {100 * machine.nccl_slowdown:g} % | fitted"),
        (r"worst within [\d.]+ %", f"worst within {errors[-1]:.1%}".replace("%", " %")),
        (r"half of them within [\d.]+ %", f"half of them within {errors[len(errors) // 2]:.1%}".replace("%", " %")),
    ):
        page, found = re.subn(pattern, text, page)
        assert found == 1, pattern
    return page


def with_tables(page: str) -> str:
    """A page with the table after each command of the planner made anew."""

    def again(found: re.Match) -> str:
        command, between = found[1], found[2]
        printed = subprocess.run([sys.executable, "-m", *command.split()[2:]], capture_output=True, text=True, check=True, cwd=ROOT)
        return f"`{command}`{between}" + "".join(line for line in printed.stdout.splitlines(keepends=True) if line.startswith("|"))

    return re.sub(r"`(python -m ringattn plan [^`]*)`(.*\n(?:[^|\n].*\n)*\n)(?:\|.*\n)+", again, page)


def report(machine: Machine, rows: Sequence[Row]) -> None:
    """Print each row's errors, and the worst."""
    print(f"{'GPUs':>4} {'tokens':>9} {'method':>24}  predicted over measured: forward, forward and backward, peak memory")
    worst = 0.0
    for row in rows:
        errors = row.errors(machine)
        worst = max(worst, *(abs(error - 1) for error in errors))
        said = " ".join("" if error is None else f"{error:.3f}" for error in (*errors, row.memory_error))
        print(f"{row.world.n:>4} {row.tokens:>9} {row.method:>24}  {said}")
    print(f"worst: {worst:.1%}")
