"""Whose turn it is to add to a block of sums, where the items of a launch do so in a fixed order.

Every block of `step` rows of the other axis has a counter for each head: the item that adds to it next. An item waits until the
counter is its own number, adds, waits until that is done, and writes the number of the next item that has the block among its steps.
Items so add to each block in the order in which they lie in the table.

Nobody waits for ever. An item waits for others of its head with lower numbers alone, and programs draw their items in the order of
the numbers: those it waits for run already, or are done. Of all items that are drawn and not done the one drawn first therefore waits
for nobody, and ends; then the same is true of the next. It takes one running program for that, not all of them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .table import TileTable


@gluon.jit
def look(counter_ptr):
    """Whose turn it is, for `wait_for_turn`: whatever is done in between hides the time that the answer takes."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_turn(counter_ptr, item, seen):
    """Until it is this item's turn, which it is for good if it was so when `seen`."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred %p;
            .reg .b32 %now;
            mov.b32 %now, $3;
            setp.eq.b32 %p, %now, $2;
            @%p bra come;
        again:
            ld.relaxed.gpu.global.b32 %now, [$1];
            setp.ne.b32 %p, %now, $2;
            @%p bra again;
        come:
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [counter_ptr, item, seen],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn(counter_ptr, successor):
    """Once all that the copy engine was told to add has been added, not only read; in a partition whose first warp tells it.

    Relaxed, as `look` is: nothing is read that another item wrote, but for the counter. The sums are added to where all multiprocessors
    meet, in the L2, and a finished addition is there. A release would wait for more, a tenth of the kernel's time.
    """
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred %p;
            .reg .b32 %thread;
            cp.async.bulk.wait_group 0;
            bar.warp.sync 0xffffffff;
            mov.u32 %thread, %tid.x;
            setp.eq.u32 %p, %thread, 0;
            @%p st.relaxed.gpu.global.b32 [$1], $2;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [counter_ptr, successor],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@dataclass(frozen=True)
class Turns:
    """The key blocks of a table for items that take turns.

    items, segments  as in `BlockTable`, with segments cut so that all steps of one have the same successor.
    successors       (m,) int32: for each segment the item that follows in all its steps; any number if there is none.
    first            (blocks,) int32: the item that comes first in each block, in whole `block`s of rows; any number if there is none.
    """

    items: torch.Tensor
    segments: torch.Tensor
    successors: torch.Tensor
    first: torch.Tensor


def key_turns(table: TileTable, block: int, step: int, device: torch.device) -> Turns:
    """Of items of `block` key rows, whose steps are blocks of `step` query rows; made once a table."""

    def build() -> Turns:
        blocks = table.key_blocks(block, 1, device)
        arrays = take_turns(blocks.items.cpu().numpy(), blocks.segments.cpu().numpy(), -(-table.q_rows // block) * block, step)
        return Turns(*(torch.from_numpy(array).to(device) for array in arrays))

    return table.derived(("turns", block, step, device), build)


def take_turns(items: np.ndarray, segments: np.ndarray, rows: int, step: int) -> tuple[np.ndarray, ...]:
    """The arrays of `Turns`. An item meets its segments from the last to the first."""
    first = np.full(-(-rows // step), -1)
    begin, end = segments[:, 0] // step, -(-segments[:, 3] // step)
    pieces, successors, bounds = [], [], np.zeros((len(items), 2), np.int64)
    for item in reversed(range(len(items))):
        bounds[item, 1] = len(pieces)
        # the last to come first, as what is known is who comes next
        for segment in range(items[item, 1], items[item, 2]):
            following = first[begin[segment] : end[segment]]
            known = np.flatnonzero(following >= 0)
            # where nobody follows any number will do: that which makes the fewest cuts
            numbers = following[known]
            cuts = known[1:][numbers[1:] != numbers[:-1]] + begin[segment]
            starts = [segments[segment, 0], *(cuts * step)]
            stops = [*(cuts * step), segments[segment, 3]]
            changed = np.flatnonzero(np.diff(numbers, prepend=-2)) if len(numbers) else []
            for start, stop, successor in zip(starts, stops, numbers[changed] if len(numbers) else [0]):
                pieces.append([start, *segments[segment, 1:3], stop, *segments[segment, 4:]])
                successors.append(successor)
            first[begin[segment] : end[segment]] = item
        bounds[item, 0], bounds[item, 1] = bounds[item, 1], len(pieces)
    items = items.copy()
    items[:, 1:3] = bounds
    return (
        items,
        np.array(pieces, dtype=np.int32).reshape(-1, 8),
        np.array(successors, dtype=np.int32),
        np.maximum(first, 0).astype(np.int32),
    )
