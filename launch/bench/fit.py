"""Fits the figures of the planner's machine to rings that `bench ring` measured.

    python launch/bench fit runs/bench/ring.json     # add this run, then fit
    python launch/bench fit                          # fit the recorded runs again

The files become runs of docs/measurements.json; a run replaces an earlier one of the same command. Then the figures in `FITTED` are
fitted to all runs and written into ringattn/predict/machine.py and docs/scaling.md, whose tables are made again. This takes a few minutes.
Each row is printed with its predicted over its measured time.
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

from ringattn.geometry.plan import make_plan
from ringattn.predict.machine import MACHINES, Machine
from ringattn.predict.simulation import Option, Simulation, Workload
from ringattn.schedule.schedules import default_schedule, ring

from .shared.cases import make_layout, parse_mask
from .shared.methods import schedule
from .shared.peers import PEER_METHODS

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements.json"
MACHINE_FILE = ROOT / "ringattn" / "predict" / "machine.py"
PAGE = ROOT / "docs" / "scaling.md"
COLUMNS = ["tokens", "method", "forward_ms", "forward_backward_ms", "peak_gib_beyond_inputs"]
_ROUNDED = COLUMNS[2:]  # to five digits
_STEPS = 30  # of the search
_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Parameter:
    """A figure to fit: where the search begins, and the unit that the result is rounded to."""

    begin: float
    unit: float


FITTED = {
    "forward_tflops": Parameter(600, 5),
    "backward_tflops": Parameter(600, 5),
    "nccl_latency_us": Parameter(100, 10),
    "nccl_slowdown": Parameter(0.2, 0.05),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="*", metavar="ring.json", help="what `bench ring` wrote")
    parser.add_argument(
        "--new-kernels",
        action="store_true",
        help="the kernels have changed: recorded runs keep the rates that were fitted to them, and still count for the transports",
    )


def main(given: argparse.Namespace) -> None:
    """Read the runs, fit, and rewrite the three files."""
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
class MeasuredRow:
    """A measured method: milliseconds, and GiB of peak memory (None: not measured).

    `world` predicts its time, at the machine's rates or at `rates` if the kernels have changed since. `holds` predicts its memory: the
    same, but a single rank for `local`.
    """

    tokens: int
    method: str
    forward_ms: float
    forward_backward_ms: float
    peak_gib_beyond_inputs: float | None
    world: Simulation
    holds: Simulation
    rates: Mapping[str, float]

    def predicted_ms(self, machine: Machine) -> tuple[float, float]:
        """Milliseconds of the forward pass, and of both passes."""
        world = self.world
        world.machine = machine.with_rates(self.rates)
        if self.method.startswith("local"):
            pairs = world.pairs.sum(axis=1)
            seconds = [float(world.kernel(pairs, backward).max()) for backward in (False, True)]
        else:
            seconds = [world.forward().seconds, world.backward().seconds]
        return 1e3 * seconds[0], 1e3 * sum(seconds)

    def errors(self, machine: Machine) -> tuple[float, float]:
        """Predicted over measured time, of the forward pass and of both passes."""
        forward, both = self.predicted_ms(machine)
        return forward / self.forward_ms, both / self.forward_backward_ms

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak memory. No fitted figure changes it."""
        return None if self.peak_gib_beyond_inputs is None else self.holds.peak_bytes() / 2**30 / self.peak_gib_beyond_inputs


def rows_of(runs: Sequence[dict]) -> list[MeasuredRow]:
    """All measured rows, with the simulations that predict them."""
    found = []
    for run in runs:
        for values in run["rows"]:
            row = dict(zip(COLUMNS, values))
            world = holds = _world(run, row["tokens"], row["method"])
            if row["method"].startswith("local"):
                holds = _world(run | {"gpus": 1, "mask": "full"}, row["tokens"] // run["gpus"], "local")
            found.append(MeasuredRow(**row, world=world, holds=holds, rates=run.get("rates", {})))
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


def fit(machine: Machine, rows: Sequence[MeasuredRow]) -> dict[str, float]:
    """The values of FITTED that predict the rows best, rounded: least squares of the logarithms of the errors (Levenberg-Marquardt)."""
    units = np.array([parameter.unit for parameter in FITTED.values()])

    def misses(point: np.ndarray) -> np.ndarray:
        tried = machine.with_rates(dict(zip(FITTED, (point * units).tolist())))
        return np.log([row.errors(tried) for row in rows]).ravel()

    point = np.array([parameter.begin for parameter in FITTED.values()]) / units
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
    return dict(zip(FITTED, (np.round(point) * units).round(2).tolist()))


def run_of(record: dict) -> dict:
    """A file of `bench ring` as a run: rows of ring attention and of local work. Raises ValueError for an unknown machine."""
    machine = next((name for name in MACHINES if name in record["device"].lower()), None)
    if machine is None:
        raise ValueError(f"the device is {record['device']!r}, but must be one of the machines {', '.join(MACHINES)}")
    rows = []
    for row in record["rows"]:
        if row["ranks"] != record["world_size"]:
            raise ValueError("the rows have different numbers of ranks, but a run has one number: measure without --scaling")
        if row["method"] not in PEER_METHODS and "+graph" not in row["method"]:
            named = row | {"peak_gib_beyond_inputs": row["peak_bytes_beyond_inputs"] / 2**30}
            rows.append([float(f"{named[name]:.5g}") if name in _ROUNDED else named[name] for name in COLUMNS])
    command = re.sub(r" --out \S+", "", record["command"])
    shape = {key: record[key] for key in ("heads", "kv_heads", "head_dim", "mask")}
    return {
        "machine": machine,
        "gpus": record["world_size"],
        "date": record.get("date", str(date.today())),
        "command": command,
        **shape,
        "rows": rows,
    }


def joined(runs: Sequence[dict], new: dict) -> list[dict]:
    """The runs with a new one, which replaces an earlier one of the same command on as many GPUs."""

    def same(run: dict) -> bool:
        return all(run[key] == new[key] for key in ("command", "machine", "gpus"))

    return [*(run for run in runs if not same(run)), new]


def with_rates(runs: Sequence[dict], machine: Machine) -> list[dict]:
    """Runs of earlier kernels: each keeps the machine's present rates, unless it keeps older ones already."""
    rates = {name: getattr(machine, name) for name in ("forward_tflops", "backward_tflops")}
    return [run if "rates" in run else run | {"rates": rates} for run in runs]


def as_text(runs: Sequence[dict]) -> str:
    """docs/measurements.json, with one line per row."""
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


def with_accuracy(page: str, machine: Machine, rows: Sequence[MeasuredRow]) -> str:
    """docs/scaling.md with the fitted figures, and how far their predictions are from the measurements."""
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
    """A page with the table after each command of the planner made again, and that of packed documents on several layouts."""

    def again(found: re.Match) -> str:
        command, between = found[1], found[2]
        lines = _planned(command).splitlines(keepends=True)
        return f"`{command}`{between}" + "".join(line for line in lines if line.startswith("|"))

    of_a_command = r"`(python -m ringattn plan [^`]*)`(?!, and the like)(.*\n(?:[^|\n].*\n)*\n)(?:\|.*\n)+"
    of_layouts = r"(\| GPUs \| tokens a GPU \| mean length \|)(.*\n)(.*\n)((?:\|.*\n)+)"
    return re.sub(of_layouts, _of_layouts, re.sub(of_a_command, again, page), count=1)


def _of_layouts(found: re.Match) -> str:
    """The table of predictions for packed documents: a column for each layout that its head names."""
    begin, head, rule, rows = found.groups()
    layouts = re.findall(r"\w+", head)
    lines = []
    for row in rows.splitlines():
        gpus, tokens, mean = (int(cell.replace(",", "")) for cell in row.split("|")[1:4])
        cells = f"{gpus}", f"{tokens:,}", f"{mean:,}", *(_of_layout(gpus, tokens, mean, layout) for layout in layouts)
        lines.append(f"| {' | '.join(cells)} |\n")
    return begin + head + rule + "".join(lines)


def _of_layout(gpus: int, tokens: int, mean: int, layout: str) -> str:
    """TFLOP/s, and the GiB that the busiest GPU sends, of the schedule that the planner recommends."""
    plan = f"python -m ringattn plan --gpus {gpus} --tokens {gpus * tokens} --heads 64 --mask documents:{mean} --layout {layout} --json"
    (found,) = json.loads(_planned(plan))
    best = next(x for x in found["schedules"] if x["schedule"] == found["recommended"])
    return f"{best['tflops']:.0f}, {best['sent'] / 2**30:.2f}"


def _planned(command: str) -> str:
    return subprocess.run([sys.executable, "-m", *command.split()[2:]], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def report(machine: Machine, rows: Sequence[MeasuredRow]) -> None:
    """Print each row's errors, and the worst of all."""
    print(f"{'GPUs':>4} {'tokens':>9} {'method':>24}  predicted over measured: forward, forward and backward, peak memory")
    worst = 0.0
    for row in rows:
        errors = row.errors(machine)
        worst = max(worst, *(abs(error - 1) for error in errors))
        said = " ".join("" if error is None else f"{error:.3f}" for error in (*errors, row.memory_error))
        print(f"{row.world.n:>4} {row.tokens:>9} {row.method:>24}  {said}")
    print(f"worst: {worst:.1%}")
