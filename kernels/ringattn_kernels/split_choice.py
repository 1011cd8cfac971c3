"""How many splits: those with which the multiprocessors should be done first, by a prediction in steps."""

from typing import NamedTuple

import numpy as np

from .native import integers, tables
from .table import ROW, TileTable, steps_of

# the cost, in steps, of a split beside its own steps, and of a launch that merges; measured on an H200
SPLIT_COST = 4.0
MERGE_COST = 5.0
SHORTEST = 4  # steps of a split, at least
PER_PROCESSOR = 8  # splits, at most; one takes 64 KB where a program has 128 rows and dv is 128


class SplitChoice(NamedTuple):
    """How the blocks of a table are to be split: as `splits.Splits`, on the host. steps: of all blocks. time: that they should take, in
    steps."""

    most: int
    touched: int
    steps: int
    time: float
    blocks: np.ndarray | None


def choice(
    table: TileTable, axis: str, block: int, step: int, heads: int, walks: int, processors: int, most: int | None = None
) -> SplitChoice:
    """The choice for blocks along the rows of q ("q") or of k ("k"), kept with the table; arguments as in `best`, or `most` splits."""

    def build() -> SplitChoice:
        native, given = tables(), (*table.cut(axis, block, step), step, table.q_rows if axis == "q" else table.k_rows, block)
        if native is None:
            return choose(*given, heads, walks, processors, most)
        costs = SPLIT_COST, MERGE_COST, SHORTEST, PER_PROCESSOR
        *found, blocks = native.choose(*given, heads, walks, processors, most or 0, costs)
        return SplitChoice(*found, None if blocks is None else integers((blocks,), 2)[0])

    return table.derived(("choice", axis, block, step, heads, walks, processors, most), build)


def choose(
    items: np.ndarray, segments: np.ndarray, step: int, rows: int, block: int, heads: int, walks: int, processors: int, most: int | None
) -> SplitChoice:  # fmt: skip
    """`choice` for the items and segments of `rows` rows, in NumPy."""
    steps = steps_of(items, segments, step)
    items, steps = items[steps > 0], steps[steps > 0]
    if not len(steps):
        return SplitChoice(1, 0, 0, 0.0, None)
    splits = most or best(steps, heads, processors, walks)
    time = float(predicted(steps, splits, heads, processors, walks))
    count = -(-steps // -(-steps.max() // splits))
    if count.max() == 1:
        return SplitChoice(1, len(items), int(steps.sum()), time, None)
    first_rows = np.arange(0, rows, block)
    found = np.bincount(items[:, ROW] // block, weights=count, minlength=len(first_rows))
    blocks = np.array([first_rows, found], dtype=np.int32).T[(found == 0).argsort(kind="stable")]
    return SplitChoice(int(count.max()), len(items), int(steps.sum()), time, blocks)


def best(steps: np.ndarray, heads: int, processors: int, walks: int = 1) -> int:
    """The number of splits of the longest item with which the multiprocessors should be done first. steps: of each item, in each head.

    It is 1 if there are enough items: the more items, the less is lost at the end. walks: how often a program goes through its steps.
    """
    steps = steps[steps > 0]
    longest = steps.max(initial=0)
    most = min(longest, longest * walks // SHORTEST, PER_PROCESSOR * processors // max(1, heads * len(steps)))
    return 1 + int(np.argmin([predicted(steps, splits, heads, processors, walks) for splits in range(1, most + 1)] or [0]))


def predicted(steps: np.ndarray, splits: int, heads: int, processors: int, walks: int = 1) -> float:
    """The time, in steps, for all items of all heads, the longest in `splits`. A multiprocessor that is done takes the next item."""
    count = -(-steps // -(-steps.max() // splits))
    times = np.sort(np.repeat(steps * walks / count + (SPLIT_COST if splits > 1 else 0.0), count * heads))[::-1]
    # rounds of one item a multiprocessor; whoever took the longest item of a round takes the shortest of the next
    rounds = np.pad(times, (0, -len(times) % processors)).reshape(-1, processors)
    rounds[1::2] = rounds[1::2, ::-1]
    # round after round, as `tables.c`: `sum` would add those of a single multiprocessor in pairs, and round otherwise
    return rounds.cumsum(0)[-1:].max(initial=0.0) + (MERGE_COST if splits > 1 else 0.0)
