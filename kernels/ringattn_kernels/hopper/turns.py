"""Turns: the fixed order in which items of a launch add to each block of sums, planned on the host.

Every block of `step` rows of the other axis has a counter for each head: the item that adds to it next. An item waits until the
counter holds its own number, adds, waits until the addition is done, and writes the number of the next item that has the block among its
steps. Items therefore add to each block in the order in which they lie in the table.

No item waits for ever. An item waits only for items of its head with lower numbers, and programs draw their items in the order of
the numbers, so the items it waits for run already or are done. Take all items that are drawn and not done: the one drawn first waits for
nobody, and ends; then the same holds for the next one. This needs one running program, not all of them. A program draws an item when it
has added all of the one before.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..native import integers, tables
from ..table import BEGIN, END, FIRST_SEGMENT, FULL_BEGIN, LAST_SEGMENT, LO, ROW_END, SPLIT, TileTable, on_device, touched_in


@dataclass(frozen=True)
class Turns:
    """The key blocks of a table for items that take turns.

    items, segments, places  as in `BlockTable`, with segments cut so that all steps of one have the same successor. Places are
                     (m, 0) for a table without any.
    successors       (m,) int32: for each segment the item that follows in all its steps; any number if there is none.
    first            (blocks,) int32: the item that comes first in each block, in whole `block`s of rows; any number if there is none.
    touched          how many items have a segment; they come first.
    """

    items: torch.Tensor
    segments: torch.Tensor
    places: torch.Tensor
    successors: torch.Tensor
    first: torch.Tensor
    touched: int

    def __len__(self) -> int:
        return self.items.shape[0]


def key_turns(table: TileTable, block: int, step: int, device: torch.device) -> Turns:
    """The turns of items of `block` key rows, with steps of `step` query rows; made once a table."""

    def build() -> Turns:
        given = *table.cut("k", block, 1), -(-table.q_rows // block) * block, step
        native, width = tables(), given[1].shape[1]
        found = take_turns(*given) if native is None else integers(native.turns(*given), SPLIT + 1, width, 1, 1)
        items, segments, successors, first = found
        places = segments[:, ROW_END + 1 :]
        arrays = items, segments[:, : ROW_END + 1], places, successors.ravel(), first.ravel()
        return Turns(*on_device(arrays, device), touched=touched_in(items))

    return table.derived(("turns", block, step, device), build)


def take_turns(items: np.ndarray, segments: np.ndarray, rows: int, step: int) -> tuple[np.ndarray, ...]:
    """The arrays of `Turns`, in NumPy, with places as further columns of segments.

    An item meets its segments from the last to the first.
    """
    first = np.full(-(-rows // step), -1)
    begin, end = segments[:, BEGIN] // step, -(-segments[:, END] // step)
    pieces, successors, items = [], [], items.copy()
    for item in reversed(range(len(items))):
        first_piece = len(pieces)
        # from the last to the first: what is known so far is which item comes next
        for segment in range(items[item, FIRST_SEGMENT], items[item, LAST_SEGMENT]):
            following = first[begin[segment] : end[segment]]
            known = np.flatnonzero(following >= 0)
            # where no item follows, any number will do; take the one that makes the fewest cuts
            numbers = following[known]
            cuts = known[1:][numbers[1:] != numbers[:-1]] + begin[segment]
            starts = [segments[segment, BEGIN], *(cuts * step)]
            stops = [*(cuts * step), segments[segment, END]]
            changed = np.flatnonzero(np.diff(numbers, prepend=-2)) if len(numbers) else []
            for start, stop, successor in zip(starts, stops, numbers[changed] if len(numbers) else [0]):
                pieces.append([start, *segments[segment, FULL_BEGIN:END], stop, *segments[segment, LO:]])
                successors.append(successor)
            first[begin[segment] : end[segment]] = item
        items[item, FIRST_SEGMENT], items[item, LAST_SEGMENT] = first_piece, len(pieces)
    return (
        items,
        np.array(pieces, dtype=np.int32).reshape(-1, segments.shape[1]),
        np.array(successors, dtype=np.int32),
        np.maximum(first, 0).astype(np.int32),
    )
