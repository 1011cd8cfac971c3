"""Draw a ring of four GPUs: which chunks of the sequence each holds under a zigzag layout, and what moves around the ring.

    python examples/draw_ring.py --out runs/pictures

Writes `ring_of_gpus.png`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import ringattn as ra
from ringattn.geometry import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS = 4
INK, GREY = "#26262e", "#77787f"
MIDDLE, RADII = np.array([0.0, -0.3]), np.array([2.75, 1.5])  # of the ring
BOX = np.array([1.5, 0.98])  # width and height of a GPU
GAP = 0.14  # between a GPU and an arrow


def draw(path: Path) -> None:
    """Draw the sequence above the ring, and save the picture as PNG."""
    from matplotlib.figure import Figure

    # one position per chunk, two chunks per rank
    layout = ra.zigzag(2 * RANKS, RANKS)
    chunks = [[int(chunk) for chunk in layout.positions(rank)] for rank in range(RANKS)]
    colours = picture.rank_colours(RANKS)
    figure = Figure(figsize=(9, 5.8), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-4.5, 4.5), ylim=(-2.55, 3.25), aspect="equal")
    axes.axis("off")
    rule = "One sequence in chunks. Each GPU holds an early and a late one (zigzag), so that causal work is even."
    axes.text(-4.28, 3.0, rule, fontsize=11.5, color=INK, va="center")
    width = 8.6 / (2 * RANKS)
    for rank in range(RANKS):
        for chunk in chunks[rank]:
            _chunk(axes, chunk, colours[rank], np.array([-4.3 + chunk * width, 2.4]), width - 0.06, 0.36)
    angles = np.pi / 2 - 2 * np.pi * np.arange(RANKS + 1) / RANKS
    places = MIDDLE + RADII * np.stack([np.cos(angles[:-1]), np.sin(angles[:-1])], axis=1)
    for rank, place in enumerate(places):
        _arrow(axes, places, angles[rank], angles[rank + 1], chunks[rank], colours[rank])
        _gpu(axes, rank, place, chunks[rank], colours[rank])
    text = "In each step every GPU\ncomputes with the K/V it has,\nwhile the next K/V arrive."
    axes.text(*MIDDLE, text, ha="center", va="center", fontsize=12, color=INK, linespacing=1.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _chunk(axes: Axes, chunk: int, colour: np.ndarray, corner: np.ndarray, width: float, height: float) -> None:
    """A chunk of the sequence with its number, in the colour of the rank that holds it; `corner` is the lower left one."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(tuple(corner), width, height, facecolor=colour, edgecolor="white", zorder=4))
    middle = corner + np.array([width, height]) / 2 - np.array([0, 0.01])
    axes.text(*middle, str(chunk), ha="center", va="center", fontsize=11, color="white", weight="bold", zorder=5)


def _gpu(axes: Axes, rank: int, place: np.ndarray, chunks: list[int], colour: np.ndarray) -> None:
    """A box with the rank's chunks of Q, which stay, and of K/V, which move."""
    from matplotlib.patches import FancyBboxPatch

    left, bottom = place - BOX / 2
    style = dict(boxstyle="round,pad=0.02,rounding_size=0.1", facecolor="white", linewidth=2)
    axes.add_patch(FancyBboxPatch((left, bottom), *BOX, edgecolor=colour, zorder=3, **style))
    middle, right = place[0], left + BOX[0] - 0.05
    axes.text(middle, bottom + 0.82, f"GPU {rank}", ha="center", va="center", fontsize=11.5, color=INK, weight="bold", zorder=5)
    for y, name, fate in ((bottom + 0.4, "Q", "stays"), (bottom + 0.07, "K/V", "moves")):
        axes.text(left + 0.06, y + 0.12, name, va="center", fontsize=10, color=INK, zorder=5)
        for n, chunk in enumerate(chunks):
            _chunk(axes, chunk, colour, np.array([left + 0.42 + 0.28 * n, y]), 0.27, 0.25)
        axes.text(right, y + 0.12, fate, ha="right", va="center", fontsize=9, color=GREY, style="italic", zorder=5)


def _arrow(axes: Axes, places: np.ndarray, begin: float, end: float, chunks: list[int], colour: np.ndarray) -> None:
    """An arc of the ring from one GPU to the next, with the K/V chunks that move along it first."""
    angles = np.linspace(begin, end, 400)
    points = MIDDLE + RADII * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    # leave out what lies in a GPU's box or close to it
    inside = (np.abs(points[:, None] - places) < BOX / 2 + GAP).all(axis=2).any(axis=1)
    points = points[~inside]
    axes.plot(*points[:-12].T, color="#c3c5cc", linewidth=5, solid_capstyle="butt", zorder=1)
    head = dict(arrowstyle="-|>,head_width=0.7,head_length=1.1", color="#c3c5cc", linewidth=0)
    axes.annotate("", points[-1], points[-20], arrowprops=head, zorder=1)
    corner = points[len(points) // 2] - np.array([0.275, 0.125])
    for n, chunk in enumerate(chunks):
        _chunk(axes, chunk, colour, corner + np.array([0.28 * n, 0]), 0.27, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pictures"), help="folder to write (default: %(default)s)")
    args = parser.parse_args()
    draw(args.out / "ring_of_gpus.png")
    print(f"wrote {args.out}/ring_of_gpus.png")


if __name__ == "__main__":
    main()
