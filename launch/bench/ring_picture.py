"""The picture of `bench ring`: a line per method. Ours are blue, the first of them heavy; peers are grey and named beside their lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .shared import drawing
from .shared.peers import PEER_METHODS

# method -> its name in the picture
NAMES = {
    "default+symmetric": "ringattn",
    "default": "ringattn over NCCL",
    "ulysses": "Ulysses over cuDNN",
    "ulysses+flash4": "Ulysses over FlashAttention-4",
    "cp-alltoall": "torch context_parallel (all-to-all)",
    "cp-allgather": "torch context_parallel (all-gather)",
    "ring_flash_attn": "ring-flash-attention",
    "local": "one GPU's kernels alone",
}
_MARKS = "Ds^vPX"


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the keys of a row for x and y, and y's label and unit."""

    x: str
    y: str
    label: str
    unit: float = 1.0


_FORWARD = "forward, TFLOP/s per GPU"
_BOTH = "forward + backward, TFLOP/s per GPU"
SPEED = (Panel("tokens", "forward_tflops", _FORWARD), Panel("tokens", "forward_backward_tflops", _BOTH))
SCALING = (Panel("ranks", "forward_tflops", _FORWARD), Panel("ranks", "forward_backward_tflops", _BOTH))
MEMORY = (Panel("tokens", "peak_bytes_beyond_inputs", "peak memory beyond inputs and results, GiB", 2**30),)
BOTH_PASSES = SPEED[1:]


def plot(record: dict, path: Path, panels: Sequence[Panel] = SPEED) -> None:
    """Draw a record (see `ring_report.write`) as PNG. `record["title"]`, if there is one, is the message above the picture."""
    rows = record["rows"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = drawing.new_figure(9 if len(panels) == 1 else 14, 4.9, record.get("title", "Attention around several GPUs"))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        lines: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
        for row in rows:
            lines[row["method"]].append((row[panel.x], row[panel.y] / panel.unit))
        ticks = sorted({row[panel.x] for row in rows})
        heights = [y for points in lines.values() for _, y in points]
        # the axis of memory begins at zero; that of speed does not, so that close lines can be told apart
        axes.set_ylim(0 if panel in MEMORY else 0.75 * min(heights), 1.05 * max(heights) or 1)
        _draw_lines(axes, lines)
        if panel in MEMORY:
            axes.set_xticks(ticks, list(map(_short, ticks)))
        else:
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, list(map(_short, ticks)))
            axes.minorticks_off()
        axes.set_xlabel("GPUs" if panel.x == "ranks" else "tokens in the whole sequence", fontsize=10.5, color=drawing.INK)
        axes.set_ylabel(panel.label, fontsize=10.5, color=drawing.INK)
        axes.grid(axis="y", alpha=0.25)
        drawing.clean(axes)
    drawing.save(figure, path, record)


def _draw_lines(axes, lines: dict[str, list[tuple[float, float]]]) -> None:
    """Draw the lines and write their names at the right end, moved apart where names would overlap."""
    ours, peers, ends = 0, 0, []
    for method, points in lines.items():
        if method in PEER_METHODS or method.startswith("local"):
            colour = drawing.GREYS[peers % 3]
            style = dict(color=colour, linewidth=1.4, marker=_MARKS[peers % len(_MARKS)], markersize=5.5, markerfacecolor="white")
            peers += 1
        else:
            colour = drawing.OURS if ours == 0 else drawing.OURS_LIGHT
            width, size = (3.6, 7.0) if ours == 0 else (1.6, 4.5)
            style = dict(color=colour, linewidth=width, marker="o", markersize=size, zorder=4 - ours)
            ours += 1
        axes.plot(*zip(*points), **style)
        name = NAMES.get(method, f"ringattn: {method}")
        ends.append((points[-1][1], name, colour, "bold" if method == next(iter(lines)) else "normal"))
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    # from the top: each name at its line's end, or one gap below the name above it
    at = float("inf")
    for y, name, colour, weight in sorted(ends, reverse=True):
        at = min(y, at - gap)
        place = dict(xycoords=("axes fraction", "data"), va="center", annotation_clip=False)
        axes.annotate(name, (1.015, at), fontsize=10, color=colour, weight=weight, **place)


def _short(number: int) -> str:
    """65536 as 64k, 1048576 as 1M."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if number >= unit and number % unit == 0:
            return f"{number // unit}{letter}"
    return str(number)
