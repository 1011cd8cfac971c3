"""A picture of one layer's predicted steps: what a GPU computes and what its links move, over time. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .simulation import Prediction

_COMPUTE, _TRANSFER, _WAIT, _INK = "#2f6db5", "#e8873a", "#c8497a", "#33333d"


def need_figures() -> Any:
    """matplotlib's Figure. Raises ValueError if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a timeline needs matplotlib, which is not installed: pip install matplotlib") from None
    return Figure


def draw(prediction: Prediction, path: str | Path) -> None:
    """Draw the steps of a forward and a backward pass, on the rank that ends last. The path's suffix chooses the format; default PNG.

    Raises ValueError if matplotlib is not installed, or does not support the suffix.
    """
    Figure = need_figures()
    figure = Figure(figsize=(11, 4.8), layout="constrained", facecolor="white")
    passes = ("forward", prediction.forward_steps), ("backward", prediction.backward_steps)
    both = figure.subplots(2)
    for axes, (name, steps) in zip(both, passes):
        begin = 0.0
        for step in steps:
            ms = [1e3 * x for x in (begin, step.compute, step.transfer, step.total)]
            axes.broken_barh([(ms[0], ms[1])], (1.1, 0.8), color=_COMPUTE, edgecolor="white", linewidth=0.5)
            axes.broken_barh([(ms[0] + ms[1], ms[3] - ms[1])], (1.1, 0.8), color=_WAIT, alpha=0.35, linewidth=0)
            axes.broken_barh([(ms[0], ms[2])], (0.1, 0.8), color=_TRANSFER, edgecolor="white", linewidth=0.5)
            begin += step.total
        axes.set(xlim=(0, 1e3 * begin), ylim=(0, 2), yticks=(0.5, 1.5), yticklabels=("messages", "launches"))
        axes.set_title(f"{name} pass, {1e3 * begin:.1f} ms", loc="left", color=_INK, fontsize=10)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0, colors=_INK, labelsize=9)
    both[-1].set_xlabel("milliseconds since the pass began, on the GPU that ends last", color=_INK)
    figure.suptitle(_title(prediction), color=_INK, fontsize=12)
    figure.legend(
        handles=[_patch(_COMPUTE, "computes"), _patch(_TRANSFER, "moves"), _patch(_WAIT, "waits for messages", alpha=0.35)],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=140, format=Path(path).suffix[1:] or "png")


def _title(prediction: Prediction) -> str:
    """The schedule, the GPUs, the tokens and the mask."""
    gpus, work = prediction.gpus, prediction.work
    return f"{prediction.option}: {gpus:,} GPU{'s' * (gpus > 1)}, {work.tokens:,} token{'s' * (work.tokens > 1)}, {work.mask!r} (predicted)"


def _patch(colour: str, label: str, alpha: float = 1.0) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label, alpha=alpha, linewidth=0)
