"""Touches: how each step of a program that has whole heads for itself meets the sums of its block of queries, planned on the host.

The first step that touches a block stores its dq where the block's sums lie. Others have theirs added. The last one reads the total, adds
its own part and writes dq. The copy engine stores and adds behind the program's back, so some steps wait for what it was given before.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..table import BEGIN, END, FIRST_SEGMENT, LAST_SEGMENT, TileTable, on_device

# bits of a step's number. It is a step; nothing has come before on its block, or comes after; it waits for all that the copy engine was
# given before, but for the last `LATE` times, or for all of it
STEP, FIRST, LAST, BEHIND, NEAR = (1 << bit for bit in range(5))
LATE = 3


@dataclass(frozen=True)
class Touches:
    """The steps of items that are taken in order.

    numbers: int32, for each segment the place of its first step's number, less its first block; behind these the number of each step.
    steps: how many these are. touched: blocks of queries that they meet. untouched: whether there are others.
    """

    numbers: np.ndarray
    steps: int
    touched: int
    untouched: bool


def find_touches(items: np.ndarray, segments: np.ndarray, rows: int, step: int) -> Touches:
    """The `Touches` of items over so many query rows, in blocks of `step`. items, segments: as in `table.BlockTable`."""
    count = items[:, LAST_SEGMENT] - items[:, FIRST_SEGMENT]
    # the segments of all items, one after another
    order = np.arange(count.sum()) + np.repeat(items[:, FIRST_SEGMENT] - (np.cumsum(count) - count), count)
    begin, steps = segments[order, BEGIN] // step, _steps(segments[order], step)
    before = np.cumsum(steps) - steps
    places = np.zeros(len(segments), dtype=np.int32)
    places[order] = len(segments) + before - begin
    # all steps, one after another, and for each the one before it on the same block
    block = np.arange(steps.sum()) + np.repeat(begin - before, steps)
    by_block = block.argsort(kind="stable")
    again = np.flatnonzero(block[by_block[1:]] == block[by_block[:-1]])
    previous = np.full(len(block), -1)
    previous[by_block[again + 1]] = by_block[again]
    first, last = previous < 0, np.ones(len(block), dtype=bool)
    last[by_block[again]] = False
    # how often the copy engine was given something since: a block's last step gives it nothing
    given = np.cumsum(~last) - ~last
    since = given - given[previous] - 1
    waits = ~first & (last | first[previous])
    numbers = STEP + first * FIRST + last * LAST + waits * np.where(since < LATE, NEAR, BEHIND)
    touched = int(np.count_nonzero(first))
    return Touches(np.concatenate([places, numbers.astype(np.int32)]), len(block), touched, touched < -(-rows // step))


def _steps(segments: np.ndarray, step: int) -> np.ndarray:
    """How many blocks of `step` query rows each segment meets."""
    return -(-segments[:, END] // step) - segments[:, BEGIN] // step


def step_count(table: TileTable, block: int, step: int) -> int:
    """The steps of `touches`, without these."""
    return int(_steps(table.cut("k", block, 1)[1], step).sum())


def touches(table: TileTable, block: int, step: int) -> Touches:
    """The touches of a table's blocks of `block` keys; made once."""
    return table.derived(("touches", block, step), lambda: find_touches(*table.cut("k", block, 1), table.q_rows, step))


def touches_on(table: TileTable, block: int, step: int, device: torch.device) -> torch.Tensor:
    """The numbers of `touches` on a device; made once."""
    return table.derived(("touches", block, step, device), lambda: on_device([touches(table, block, step).numbers], device)[0])
