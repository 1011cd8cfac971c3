"""Pictures of a mask under a layout: which rank computes which (query, key) pair.

Rows are queries from top to bottom, columns are keys from left to right. A live pair has the colour of the rank that
holds its query, since that rank computes it; a dead pair is light grey. The strip on the left shows which rank holds each
query. The strip on top shows which rank holds each key, and thus where keys and values come from.

Needs matplotlib, which is imported when something is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from ..check import BUILD_A_LAYOUT, integer, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TOKENS = 4096  # every pair is painted: a longer sequence would make a picture of gigabytes

_DEAD = (0.955, 0.955, 0.965)
_INK = (0.20, 0.20, 0.24)
# readers with any colour vision can tell these apart; neighbours also differ in lightness
_PALETTE = ("#2f6db5", "#e8873a", "#3a9a6b", "#c8497a", "#7fbbe3", "#8a6fc1", "#d9b73a", "#5b5f6b")


class Pairs(Protocol):
    """What a picture needs of a `Mask`."""

    def dense(self, seq_len: int) -> torch.Tensor: ...


@runtime_checkable
class Shards(Protocol):
    """What a picture needs of a `Layout`."""

    @property
    def seq_len(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def positions(self, rank: int) -> torch.Tensor: ...

    def work(self, mask: Any) -> np.ndarray: ...

    def balance(self, mask: Any) -> float: ...


def draw(mask: Pairs, seq_len: int, layout: Shards | None = None, path: str | Path | None = None) -> Figure:
    """A mask over `seq_len` positions, coloured by the rank that computes each pair, with each rank's share of the work.

    Args:
        mask: the mask.
        seq_len: tokens, at most 4096.
        layout: which rank holds which positions; None draws the mask alone, as one rank.
        path: where to save the picture, by its suffix (.png, .svg, .pdf); None saves nothing.

    Returns the matplotlib figure. Raises ValueError if the length is 0, too large, or not the layout's, and for other types.

    Example:
        >>> import ringattn as ra
        >>> figure = draw(ra.causal(), 64, ra.zigzag(64, 4), "causal.png")  # doctest: +SKIP
    """
    from matplotlib.figure import Figure

    if path is not None and not isinstance(path, (str, Path)):
        raise ValueError(f"path is {shown(path)}, but must be the name of a file, or None")
    if layout is not None and not isinstance(layout, Shards):
        raise ValueError(f"layout is {shown(layout)}, but must be a Layout: {BUILD_A_LAYOUT}")
    alone = layout is None or layout.world_size == 1
    figure = Figure(figsize=(6.4, 6.2) if alone else (9.6, 6.2), layout="constrained", facecolor="white")
    if alone:
        axes, bars = figure.subplots(), None
    else:
        axes, bars = figure.subplots(1, 2, width_ratios=(2.4, 1))
    paint(axes, mask, seq_len, layout)
    axes.set_xlabel("key position", color=_INK)
    axes.set_ylabel("query position", color=_INK)
    figure.suptitle(f"{mask!r}" if alone else f"{mask!r}   under   {layout!r}", color=_INK, fontsize=12)
    if bars is not None and layout is not None:
        _paint_work(bars, mask, layout)
    if path is not None:
        figure.savefig(path, dpi=160)
    return figure


def paint(axes: Axes, mask: Pairs, seq_len: int, layout: Shards | None) -> None:
    """Paint the pairs and the two strips of `draw` on given axes, for a figure of several masks. Raises ValueError like `draw`."""
    if integer("seq_len", seq_len) > MAX_TOKENS:
        raise ValueError(f"seq_len is {seq_len}, but a picture holds at most {MAX_TOKENS} tokens: draw a shorter sequence")
    if layout is not None and layout.seq_len != seq_len:
        raise ValueError(f"seq_len is {seq_len}, but {layout!r} is for {layout.seq_len}: draw with the layout's own length")
    if seq_len < 1:
        raise ValueError("seq_len is 0: there is nothing to draw")
    held = [np.arange(seq_len)] if layout is None else [layout.positions(rank).numpy() for rank in range(layout.world_size)]
    world_size = len(held)
    colours = rank_colours(world_size)
    holder = np.empty(seq_len, dtype=np.int64)
    for rank, positions in enumerate(held):
        holder[positions] = rank
    owner = colours[holder]  # (s, 3)
    live = mask.dense(seq_len).numpy()
    pairs = np.where(live[..., None], owner[:, None], np.array(_DEAD, dtype=np.float32))
    extent = (-0.5, seq_len - 0.5, seq_len - 0.5, -0.5)
    axes.imshow((pairs * 255).astype(np.uint8), extent=extent, interpolation=_interpolation(seq_len))
    width, gap = 0.028 * seq_len, 0.012 * seq_len
    if world_size > 1:
        left = (-0.5 - gap - width, -0.5 - gap, seq_len - 0.5, -0.5)
        top = (-0.5, seq_len - 0.5, -0.5 - gap, -0.5 - gap - width)
        axes.imshow(owner[:, None], extent=left, interpolation="nearest")
        axes.imshow(owner[None], extent=top, interpolation="nearest")
        axes.set_xlim(-0.5 - gap - width, seq_len - 0.5)
        axes.set_ylim(seq_len - 0.5, -0.5 - gap - width)
    axes.set_aspect("equal")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=_INK, labelsize=8)


def rank_colours(world_size: int) -> np.ndarray:
    """A colour for each rank: (world_size, 3) float32 red, green and blue in [0, 1]."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    if world_size <= len(_PALETTE):
        return np.array([to_rgb(colour) for colour in _PALETTE[:world_size]], dtype=np.float32)
    return colormaps["turbo"](np.linspace(0.05, 0.95, world_size))[:, :3].astype(np.float32)


def _interpolation(seq_len: int) -> Any:
    # draw few tokens as sharp squares; average many tokens, so that none is dropped
    return "nearest" if seq_len <= 512 else "antialiased"


def _paint_work(axes: Axes, mask: Pairs, layout: Shards) -> None:
    """Draw a bar for each rank: its share of the live pairs."""
    work = layout.work(mask)
    share = 100 * work / max(1, work.sum())
    ranks = np.arange(layout.world_size)
    axes.barh(ranks, share, color=rank_colours(layout.world_size), height=0.72)
    even = 100 / layout.world_size
    axes.axvline(even, color=_INK, linewidth=1, linestyle=(0, (2, 3)))
    if layout.world_size <= 16:
        for rank, value in enumerate(share):
            axes.text(0.03 * share.max(), rank, f"{value:.1f} %", va="center", fontsize=9, color="white", weight="bold")
    axes.set_xlim(0, 1.05 * max(float(share.max()), even))
    axes.set_ylim(layout.world_size - 0.4, -0.6)
    axes.set_yticks(ranks if layout.world_size <= 16 else ranks[:: layout.world_size // 8])
    axes.set_yticklabels([f"rank {rank}" for rank in axes.get_yticks()])
    axes.set_xticks([])
    axes.set_title(f"share of the live pairs\nbusiest / mean = {layout.balance(mask):.3f}", fontsize=10, color=_INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=_INK, labelsize=9)
