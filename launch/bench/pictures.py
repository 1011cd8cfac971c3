"""Draws the pictures of docs/performance.md from the figures recorded in docs/performance.json.

    python launch/bench pictures                          # docs/images/performance_kernels.png and performance_ring.png
    python launch/bench pictures --out runs/pictures

The file holds two records, `kernels` and `ring`, with the keys of the files that `bench kernels --json` and `bench ring` write. To show a
new run, replace the rows, the machine, the versions, the date and the title of its record, then draw.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import kernels_picture, ring_picture

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "performance.json"
IMAGES = ROOT / "docs" / "images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", type=Path, default=FIGURES, help="the recorded figures (default: docs/performance.json)")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures (default: docs/images)")


def main(arguments: argparse.Namespace) -> None:
    records = json.loads(arguments.figures.read_text())
    kernels_picture.plot(records["kernels"], arguments.out / "performance_kernels.png")
    ring_picture.plot(records["ring"], arguments.out / "performance_ring.png", ring_picture.BOTH_PASSES)
    print(f"wrote performance_kernels.png and performance_ring.png into {arguments.out}")
