"""Draw every mask under every layout as one page, and one pair of them large.

    python examples/draw_layouts_and_masks.py --seq-len 384 --ranks 4 --out runs/pictures

Writes `layouts_and_masks.png` and `documents_balanced.png`. In the first, rows are masks and columns are layouts; a pair has the colour of
the rank that computes it, and the number above a panel is the busiest rank's work over the mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ringattn as ra
from ringattn.geometry import picture

EVEN = 1.05  # a balance up to this counts as even


def masks(seq_len: int) -> dict[str, ra.Mask]:
    """One of each kind, in proportion to the sequence."""
    n = seq_len
    lengths = [n // 3, n // 16, n // 5, 1, n // 10]
    return {
        "full": ra.full(),
        "causal": ra.causal(),
        "sliding window": ra.sliding_window(n // 6),
        "documents": ra.documents(lengths=[*lengths, n - sum(lengths)]),
        "prefix": ra.prefix(n // 4),
        "global + window": ra.global_tokens(n // 24) | ra.sliding_window(n // 12, n // 12),
        "dilated window": ra.dilated_window((n // 16, 0), 4),
        "BigBird": ra.bigbird(n, max(1, n // 24), seed=1),
    }


def layouts(mask: ra.Mask, seq_len: int, ranks: int) -> dict[str, ra.Layout]:
    return {
        "contiguous": ra.contiguous(seq_len, ranks),
        "zigzag": ra.zigzag(seq_len, ranks),
        "striped": ra.striped(seq_len, ranks),
        "balanced": ra.balanced(mask, seq_len, ranks),
    }


def draw_page(seq_len: int, ranks: int, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = masks(seq_len)
    figure = Figure(figsize=(9, 2.2 * len(rows) + 0.7), layout="constrained", facecolor="white")
    grid = figure.subplots(len(rows), 4)
    for row, (mask_name, mask) in zip(grid, rows.items(), strict=True):
        for axes, (layout_name, layout) in zip(row, layouts(mask, seq_len, ranks).items(), strict=True):
            picture.paint(axes, mask, seq_len, layout)
            axes.set_xticks([])
            axes.set_yticks([])
            balance = layout.balance(mask)
            even = dict(color="#1d7a45", weight="bold") if round(balance, 2) <= EVEN else dict(color="#6a6a72")
            axes.set_title(f"{balance:.2f}", fontsize=11, pad=3, **even)
            if axes in grid[0]:
                axes.annotate(layout_name, (0.5, 1.16), xycoords="axes fraction", ha="center", fontsize=13, weight="bold")
        row[0].set_ylabel(mask_name, fontsize=12)
    if ranks <= 8:
        colours = [Patch(color=colour, label=f"rank {rank}") for rank, colour in enumerate(picture.rank_colours(ranks))]
        figure.legend(handles=colours, loc="outside upper center", ncols=ranks, frameon=False, fontsize=11)
    caption = f"Number: work of the busiest rank over the mean; green is at most {EVEN:.2f}. Rows are queries, columns keys."
    figure.supxlabel(caption, fontsize=10.5, color="#6a6a72")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=384, help="tokens drawn (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks drawn (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/pictures"), help="folder to write (default: %(default)s)")
    args = parser.parse_args()
    if not 48 <= args.seq_len <= picture.MAX_TOKENS:
        parser.error(f"--seq-len is {args.seq_len}, but must be 48 to {picture.MAX_TOKENS}")
    if not 1 <= args.ranks <= args.seq_len:
        parser.error(f"--ranks is {args.ranks}, but must be 1 to --seq-len")
    args.out.mkdir(parents=True, exist_ok=True)
    draw_page(args.seq_len, args.ranks, args.out / "layouts_and_masks.png")
    packed = masks(args.seq_len)["documents"]
    picture.draw(packed, args.seq_len, ra.balanced(packed, args.seq_len, args.ranks), args.out / "documents_balanced.png")
    print(f"wrote {args.out}/layouts_and_masks.png and {args.out}/documents_balanced.png")


if __name__ == "__main__":
    main()
