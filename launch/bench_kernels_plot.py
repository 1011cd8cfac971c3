"""The picture of `bench.py kernels`: a line a case, a dot a contestant with its quartiles, the measured directions beside each other."""

from __future__ import annotations

from pathlib import Path

DIRECTIONS = ("forward", "backward")


def plot(record: dict, path: Path) -> None:
    """Draw a record (see `bench_kernels.measure_all`) as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = record["rows"]
    names = [name for name in dict.fromkeys(name for row in rows for name in row["rates"]) if name != "matmul"]
    figure = Figure(figsize=(11, 0.19 * len(rows) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    directions = [direction for direction in DIRECTIONS if direction in rows[0]["rates"]["matmul"]]
    axes = figure.subplots(1, len(directions), sharey=True, sharex=True, squeeze=False)[0]
    for axis, direction in zip(axes, directions):
        for n, name in enumerate(names):
            found = [(at, row["rates"][name][direction]) for at, row in enumerate(rows) if direction in row["rates"].get(name, {})]
            if not found:
                continue
            rates = [rate["tflops"] for _, rate in found]
            spread = [[rate["tflops"] - rate["low"] for _, rate in found], [rate["high"] - rate["tflops"] for _, rate in found]]
            style = dict(fmt="o", markersize=4, color=f"C{n}", linewidth=1, zorder=len(names) - n + 2)
            axis.errorbar(rates, [at for at, _ in found], xerr=spread, label=name, **style)
        ceilings = [row["rates"]["matmul"][direction]["tflops"] for row in rows]
        axis.plot(ceilings, range(len(rows)), color="black", linewidth=0.8, linestyle=":", label="matmul 8192³ in the same run")
        axis.set_xlabel(f"{direction}, TFLOP/s")
        axis.set_xlim(0, None)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=7)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(labels), loc="outside upper center", fontsize=8)
    figure.supxlabel(f"{record['device']}, bf16, torch {record['torch']}, triton {record['triton']}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
