"""How the benchmarks' pictures look: our figures in one strong colour, peers in greys, and a caption with machine and date."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "#1f6fc4"
OURS_LIGHT = "#8db8e8"
INK = "#26262e"
GREYS = ("#4a4b50", "#77787f", "#999aa0")


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure with a bold title on the left; width and height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold", color=INK)
    return figure


def clean(axes: Axes) -> None:
    """Remove the frame of a pair of axes and lighten its lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8b8be")
    axes.tick_params(colors=INK, length=0, labelsize=10)
    axes.set_axisbelow(True)


def caption(record: dict) -> str:
    """Machine, date and versions in one line, the setting in another, as far as a record holds them."""
    machine = f"{record['world_size']} x {record['device']}" if "world_size" in record else record["device"]
    versions = [f"{name} {record[name]}" for name in ("torch", "triton", "FlashAttention-4") if name in record]
    lines = [", ".join(filter(None, [machine, record.get("date"), *versions])), record.get("setting")]
    return "\n".join(filter(None, lines))


def save(figure: Figure, path: Path, record: dict) -> None:
    """Add the caption and write the PNG, in 128 colours: a third of the size of full colour."""
    import numpy as np
    from PIL import Image

    figure.supxlabel(caption(record), x=0.01, ha="left", fontsize=8.5, color=GREYS[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.set_dpi(100)
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
