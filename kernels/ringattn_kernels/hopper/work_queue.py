"""The queue of works of a Hopper forward: their order, and the counter by which programs take them."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from triton.runtime import driver

from ..native import integers, tables
from ..recorder import aside
from ..table import BEGIN, END, FIRST_SEGMENT, HI, LAST_SEGMENT, LO, ROW, ROW_BEGIN, ROW_END, SPLIT, steps_before, steps_of

# query rows of a warpgroup
WARPGROUP_ROWS = 64
# of a work
WORK_COLUMNS = 6
BEFORE, AFTER = 4, 5
# numbers of warpgroups side by side in one column
IDLE_BITS = 10


@dataclass(frozen=True)
class WorkQueue:
    """The works of a launch, in the order in which programs take them.

    works    (n, 6) int32: (split * b + batch) * h + head, first row of the query block, first segment, number of steps (at least 1), and
             `idle_steps` before and after the others.
    segments (m, 8) int32: as in `table.BlockTable`; the last one is empty, for query blocks without any.
    places   (m, 2) int32: as in `table.BlockTable`.
    """

    works: torch.Tensor
    segments: torch.Tensor
    places: torch.Tensor | None = None


def ordered(items: np.ndarray, segments: np.ndarray, *given: int) -> tuple[np.ndarray, np.ndarray]:
    """`order_works`, in C where that can be compiled."""
    native = tables()
    if native is None:
        return order_works(items, segments, *given)
    return integers(native.order(items, segments, *given), WORK_COLUMNS, segments.shape[1])


def order_works(
    items: np.ndarray,
    segments: np.ndarray,
    step: int,
    warpgroups: int,
    heads: int,
    together: int,
    touched_only: bool,
    processors: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(works, segments and an empty one), in NumPy.

    `together` heads come at a time, so that their keys and values stay in the L2; within these, longest work first.
    Short works of all heads come at the end, so that all multiprocessors have something to do until the last long ones are done.
    items, segments: as in `table.BlockTable`.
    """
    steps = steps_of(items, segments, step)
    if touched_only:
        touched = steps > 0
        items, steps = items[touched], steps[touched]
    blocks = np.empty((len(items), WORK_COLUMNS), dtype=np.int32)
    blocks[:, 0] = items[:, SPLIT] * heads
    blocks[:, 1] = items[:, ROW]
    blocks[:, 2] = np.where(steps > 0, items[:, FIRST_SEGMENT], len(segments))
    blocks[:, 3] = np.maximum(steps, 1)
    blocks[:, BEFORE], blocks[:, AFTER] = idle_steps(items, segments, step, warpgroups)
    # (items, heads, columns); longest first, as they come
    found = blocks.repeat(heads, axis=0).reshape(-1, heads, WORK_COLUMNS)
    found[:, :, 0] += np.arange(heads, dtype=np.int32)
    kept = len(items) - _held_back(steps, heads, processors)
    works, begin = np.empty((len(items) * heads, WORK_COLUMNS), dtype=np.int32), 0
    for end in [*range(heads, 0, -together)][::-1]:
        group = found[:kept, max(0, end - together) : end]
        works[begin : begin + group.size // WORK_COLUMNS].reshape(group.shape)[:] = group
        begin += group.size // WORK_COLUMNS
    works[begin:] = found[kept:].reshape(-1, WORK_COLUMNS)
    empty = np.zeros((1, segments.shape[1]), dtype=np.int32)
    empty[0, END] = 1
    return works, np.concatenate([segments, empty])


def idle_steps(items: np.ndarray, segments: np.ndarray, step: int, warpgroups: int) -> tuple[np.ndarray, np.ndarray]:
    """(before, after): how many of an item's first and last steps hold no live pair of a warpgroup's rows; in `IDLE_BITS` each.

    One step is left of any item, and of longer ones the steps beyond what `IDLE_BITS` hold.
    """
    first_segment, count = items[:, FIRST_SEGMENT], items[:, LAST_SEGMENT] - items[:, FIRST_SEGMENT]
    item = np.repeat(np.arange(len(items)), count)
    segment = np.arange(len(item)) + np.repeat(first_segment - (np.cumsum(count) - count), count)
    begin, end, lo, hi, row_begin, row_end = segments[:, [BEGIN, END, LO, HI, ROW_BEGIN, ROW_END]][segment].T.astype(np.int64)
    steps = steps_of(items, segments, step)
    # of the item, before each of its segments
    passed = steps_before(segments, step)
    passed = passed[segment] - passed[first_segment][item]
    before, after = np.zeros((2, len(items)), dtype=np.int64)
    for warpgroup in range(warpgroups):
        row = items[item, ROW] + warpgroup * WARPGROUP_ROWS
        first_row, last_row = np.maximum(row, row_begin), np.minimum(row + WARPGROUP_ROWS, row_end) - 1
        left, right = np.maximum(begin, first_row - hi), np.minimum(end - 1, last_row - lo)
        live = (first_row <= last_row) & (left <= right)
        first, last = np.copy(steps), np.full(len(items), -1)
        np.minimum.at(first, item[live], (passed + (left - begin) // step)[live])
        np.maximum.at(last, item[live], (passed + (right - begin) // step)[live])
        first[last < 0] = last[last < 0] = 0
        for found, idle in ((before, first), (after, np.maximum(steps - 1 - last, 0))):
            found |= np.minimum(idle, (1 << IDLE_BITS) - 1) << (warpgroup * IDLE_BITS)
    return before, after


def _held_back(steps: np.ndarray, heads: int, processors: int) -> int:
    """How many of the last items follow the works of all heads.

    Each is at most a quarter as long as the longest item. Together they have at most the steps of one longest item for each
    multiprocessor, and at most 1/20 of all steps.
    """
    longest = steps.max(initial=0)
    enough = min(processors * longest / heads, steps.sum() / 20)
    last_first = steps[::-1]
    return int(np.count_nonzero((last_first.cumsum() <= enough) & (last_first <= longest // 4)))


@functools.cache
def stream_counter(device: torch.device, stream: int) -> torch.Tensor:
    """The counters of the launches on one stream, which never run side by side; each leaves them at zero."""
    with aside:
        return torch.zeros(3, dtype=torch.int32, device=device)


def work_counter(device: torch.device) -> torch.Tensor:
    """Three counters at zero, which no launch that may run at the same time uses."""
    if torch.cuda.is_current_stream_capturing():
        # a graph may be replayed on any stream, so each of its launches has counters of its own
        return torch.zeros(3, dtype=torch.int32, device=device)
    return stream_counter(device, driver.active.get_current_stream(device.index))
