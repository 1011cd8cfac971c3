"""The picture of `bench kernels`: our speed relative to cuDNN in each case, as a bar, and other peers as marks beside it."""

from __future__ import annotations

from pathlib import Path

from .shared import drawing

DIRECTIONS = ("forward", "backward")
BASE = "cudnn"
# peer -> its name in the picture, its mark
MARKS = {
    "flash4": ("FlashAttention-4", "D"),
    "flex": ("FlexAttention", "s"),
    "flash2": ("FlashAttention-2", "v"),
}
TITLE = "Attention on one GPU, relative to cuDNN"


def plot(record: dict, path: Path) -> None:
    """Draw a record (see `kernels.measure_all`) as PNG. Cases that cuDNN did not compute are left out.

    `record["title"]`, if there is one, is the message above the picture. Raises ValueError if no case has a rate of cuDNN.
    """
    rows = [row for row in record["rows"] if row["rates"].get(BASE)]
    if not rows:
        raise ValueError("no case has a rate of cuDNN, which the picture compares with: measure with --peers cudnn")
    height = 0.42 * len(rows) + 2.2
    # an empty second line of the title leaves room for the legend
    figure = drawing.new_figure(10, height, record.get("title", TITLE) + "\n")
    directions = [direction for direction in DIRECTIONS if direction in rows[0]["rates"][BASE]]
    panels = figure.subplots(1, len(directions), sharey=True, sharex=True, squeeze=False)[0]
    longest = 0.0
    for axes, direction in zip(panels, directions):
        for at, row in enumerate(rows):
            rates = {name: rate[direction]["tflops"] for name, rate in row["rates"].items() if direction in rate}
            ratio = rates["ringattn"] / rates[BASE]
            axes.barh(at, ratio, height=0.62, color=drawing.OURS, label="ringattn" if at == 0 else None)
            unit = " TFLOP/s" if ratio > 0.4 else ""
            axes.text(0.02, at, f"{rates['ringattn']:.0f}{unit}", va="center", fontsize=9, color="white")
            ends = [ratio]
            for name, (label, mark) in MARKS.items():
                if name in rates:
                    ends.append(rates[name] / rates[BASE])
                    style = dict(marker=mark, s=42, color="white", edgecolors=drawing.INK, linewidths=1.3, zorder=3)
                    axes.scatter(ends[-1], at, label=label if at == 0 else None, **style)
            longest = max(longest, *ends)
            axes.text(max(*ends, 1.0) + 0.05, at, f"{ratio:.2f}", va="center", fontsize=10.5, weight="bold", color=drawing.OURS)
        axes.axvline(1, color=drawing.INK, linewidth=1.6, label="cuDNN (torch SDPA) = 1")
        axes.set_title(direction, fontsize=11.5, loc="left", color=drawing.INK, weight="bold")
        axes.set_xlabel("TFLOP/s relative to cuDNN in the same run", fontsize=10, color=drawing.INK)
        axes.grid(axis="x", alpha=0.25)
        drawing.clean(axes)
    panels[0].set_xlim(0, max(longest, 1.0) + 0.2)
    panels[0].set_yticks(range(len(rows)), [row["case"] for row in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    handles, labels = panels[-1].get_legend_handles_labels()
    order = [labels.index("ringattn"), *(n for n, label in enumerate(labels) if label != "ringattn")]
    shown = [handles[n] for n in order], [labels[n] for n in order]
    figure.legend(*shown, loc="upper left", bbox_to_anchor=(0.0, 1 - 0.25 / height), ncols=len(labels), frameon=False, fontsize=10)
    drawing.save(figure, path, record)
