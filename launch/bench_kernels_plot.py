"""The picture of `bench.py kernels`: bars with their quartiles, forward above backward, and the matmul's rate as a line."""

from __future__ import annotations

from pathlib import Path

DIRECTIONS = ("forward", "backward")


def plot(record: dict, path: Path) -> None:
    """Draw a record (see `bench_kernels.measure_all`) as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = record["rows"]
    names = [name for name in dict.fromkeys(name for row in rows for name in row["rates"]) if name != "matmul"]
    figure = Figure(figsize=(max(8, 0.16 * len(rows) * len(names) + 3), 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True)
    width = 0.8 / len(names)
    for axis, direction in zip(axes, DIRECTIONS):
        for n, name in enumerate(names):
            found = [(at, row["rates"][name][direction]) for at, row in enumerate(rows) if direction in row["rates"].get(name, {})]
            if not found:
                continue
            heights = [rate["tflops"] for _, rate in found]
            errors = [[rate["tflops"] - rate["low"] for _, rate in found], [rate["high"] - rate["tflops"] for _, rate in found]]
            places = [at + (n - (len(names) - 1) / 2) * width for at, _ in found]
            axis.bar(places, heights, width, yerr=errors, label=name, color=f"C{n}", error_kw={"linewidth": 0.8})
        ceilings = [row["rates"]["matmul"][direction]["tflops"] for row in rows]
        label = "matmul 8192³ in the same run"
        axis.step(range(len(rows)), ceilings, where="mid", color="black", linewidth=0.8, linestyle=":", label=label)
        axis.set_ylabel(f"{direction}, TFLOP/s")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.02))
    axes[1].set_xticks(range(len(rows)), [row["case"] for row in rows], rotation=60, ha="right", fontsize=7)
    figure.supxlabel(f"{record['device']}, bf16, torch {record['torch']}, triton {record['triton']}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
