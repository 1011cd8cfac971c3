"""Splits: short problems fill the chip.

If there are too few blocks to give every multiprocessor an equal share, several programs share the steps of a block. Each leaves
partials of its own, in fp32. `merge_kernel` merges a query block's partials, and the state that came in: for partials p
of the same queries over disjoint keys, with m = row_max and l = row_sum (the block-merge formula),

    m = max_p m_p        l = sum_p l_p exp(m_p - m)        out = sum_p l_p exp(m_p - m) out_p / l

`sum_kernel` adds up the partials of a gradient, or of dk and dv. Both go in a fixed order.

Shapes: out (b, sq, h, dv), row_max and row_sum (b, h, sq), gradients (b, rows, heads, d); of partials, splits * b instead of b.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import launches
from .config import padded
from .continued import RowPart
from .launches import strides
from .sinks import with_sink
from .split_choice import choice
from .table import TileTable, on_device
from .units import LOG2_E, to_base2, to_natural

ROWS, TOGETHER, WARPS = 2, 4, 1  # a program that merges: its rows, the partials that it reads at a time, its warps

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)  # looked up in every launch, by identity
class Splits:
    """How the blocks of a table, of queries or of keys, are split.

    most     splits of the longest block; 1: none is split.
    blocks   (n, 2) int32: first row of a block, number of its splits; those with none last. None if no block is split: nobody merges.
    touched  how many blocks have a split; they come first.
    rows     rows of a block.
    """

    most: int
    blocks: torch.Tensor | None
    touched: int
    rows: int

    def merged(self, touched_only: bool) -> int:
        """How many blocks a launch merges."""
        assert self.blocks is not None, "no block is split"
        return self.touched if touched_only else len(self.blocks)


def query_splits(
    table: TileTable,
    block: int,
    step: int,
    heads: int,
    device: torch.device,
    most: int | None = None,
    part: RowPart | None = None,
    programs: int = 1,
) -> Splits:
    """Splits for `heads` heads of all batches, by programs of `block` queries that walk the keys by `step`; `most` overrides the choice.

    part: the rows that are merged, among them all that the table touches. programs: of a multiprocessor, side by side.
    """
    return _splits(table, "q", block, step, heads, 1, device, most, part, programs)


def key_splits(
    table: TileTable, block: int, step: int, heads: int, group: int, device: torch.device, most: int | None = None
) -> Splits:
    """Splits for `heads` key/value heads, by programs of `block` keys that walk the queries of `group` heads by `step`."""
    return _splits(table, "k", block, step, heads, group, device, most)


def _splits(
    table: TileTable,
    axis: str,
    block: int,
    step: int,
    heads: int,
    walks: int,
    device,
    most: int | None,
    part: RowPart | None = None,
    programs: int = 1,
) -> Splits:
    if most is not None and most < 1:
        raise ValueError(f"splits is {most}, but must be at least 1, or None for what suits the table")
    processors = programs * multiprocessors(device)

    def build() -> Splits:
        found = choice(table, axis, block, step, heads, walks, processors, most)
        blocks = found.blocks
        if blocks is not None:
            blocks = on_device((blocks if part is None else blocks[part.of(blocks[:, 0])],), device)[0]
        return Splits(found.most, blocks, found.touched, block)

    return table.derived(("splits", axis, block, step, heads, walks, processors, device, most, part), build)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU; 1 where Triton's interpreter runs one program after another."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def partials(splits: Splits, q: torch.Tensor, dv: int) -> State:
    """Memory for the partials of all splits of all query blocks."""
    b, sq, h, _ = q.shape
    out = torch.empty(splits.most * b, sq, h, dv, device=q.device, dtype=torch.float32)
    row_max, row_sum = torch.empty(2, splits.most * b, h, sq, device=q.device, dtype=torch.float32)
    return out, row_max, row_sum


def merge(
    splits: Splits,
    table: TileTable,
    partial: State,
    state: State | None,
    out: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    final: bool,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge the partials of every query block, and the state if there is one, into out, row_max and row_sum.

    sinks: (h,), which all rows count, if there are any.
    """
    # a block without a split must be written too, unless its state stays as it is
    count = splits.merged(state is not None and not final)
    if count * out.numel() > 0:
        launches.launch(
            merge_kernel,
            table,
            (splits, state is None, final),
            _merged(partial, state, out, row_max, row_sum, sinks),
            functools.partial(merge_arguments, splits, count, partial, state, out, row_max, row_sum, sinks),
            num_warps=WARPS,
        )


def _merged(
    partial: State, state: State | None, out: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor, sinks: torch.Tensor | None
) -> dict:
    given = dict(partial_ptr=partial[0], partial_max_ptr=partial[1], partial_sum_ptr=partial[2])
    return given | launches.results(out, row_max, row_sum, state, sinks)


def _rows(splits: Splits) -> int:
    """Rows of a program that merges: more where the interpreter runs one program after another."""
    rows = 16 if triton.knobs.runtime.interpret else ROWS
    assert splits.rows % rows == 0
    return rows


def _grid(splits: Splits, count: int, heads: int) -> tuple[int, int]:
    """The grid of programs that merge `count` blocks of each head."""
    return count * (splits.rows // _rows(splits)), heads


def merge_arguments(
    splits: Splits, count: int, partial: State, state: State | None, out, row_max, row_sum, sinks=None
) -> tuple[tuple, dict]:
    """The grid and keyword arguments of one launch of `merge_kernel`."""
    b, sq, h, dv = out.shape
    return _grid(splits, count, b * h), dict(
        **_merged(partial, state, out, row_max, row_sum, sinks),
        blocks_ptr=splits.blocks,
        heads=h,
        q_rows=sq,
        V_DIM=dv,
        BLOCK_DV=padded(dv),
        BLOCK_Q=splits.rows,
        ROWS=_rows(splits),
        TOGETHER=TOGETHER,
        HAS_STATE=state is not None,
    )


@triton.jit(do_not_specialize=["heads", "q_rows"])
def merge_kernel(
    partial_ptr, partial_max_ptr, partial_sum_ptr, state_ptr, out_ptr, row_max_ptr, row_sum_ptr, sinks_ptr, blocks_ptr, heads, q_rows,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """out, row_max and row_sum of ROWS rows of one head from the partials of their block; see the module's formula."""
    head_index = tl.program_id(1)
    batch = (head_index // heads).to(tl.int64)
    block_ptr = blocks_ptr + tl.program_id(0) // (BLOCK_Q // ROWS) * 2
    rows = tl.load(block_ptr) + tl.program_id(0) % (BLOCK_Q // ROWS) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < q_rows
    statistics = head_index.to(tl.int64) * q_rows + rows
    # [ROWS, BLOCK_DV]
    columns = tl.arange(0, BLOCK_DV)
    out_offsets = ((batch * q_rows + rows) * heads + head_index % heads)[:, None] * V_DIM + columns[None, :]
    out_mask = row_mask[:, None] & (columns < V_DIM)[None, :]
    if HAS_STATE:
        row_max, rest = to_base2(tl.load(row_max_ptr + statistics, mask=row_mask, other=float("-inf")))
        row_sum = tl.load(row_sum_ptr + statistics, mask=row_mask, other=0.0) * tl.math.exp2(rest)
        acc = tl.load(state_ptr + out_offsets, mask=out_mask, other=0.0) * row_sum[:, None]
    else:
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)

    splits = tl.load(block_ptr + 1)
    all_rows = tl.num_programs(1).to(tl.int64) * q_rows
    for first in range(0, splits, TOGETHER):
        # [TOGETHER, ROWS]
        split = first + tl.arange(0, TOGETHER)[:, None]
        there = (split < splits) & row_mask[None, :]
        offsets = split * all_rows + statistics[None, :]
        split_max, lost = to_base2(tl.load(partial_max_ptr + offsets, mask=there, other=float("-inf")))
        split_sum = tl.load(partial_sum_ptr + offsets, mask=there, other=0.0) * tl.math.exp2(lost)
        # [TOGETHER, ROWS, BLOCK_DV]
        offsets = (split * (all_rows * V_DIM))[:, :, None] + out_offsets[None, :, :]
        split_out = tl.load(partial_ptr + offsets, mask=there[:, :, None] & (columns < V_DIM)[None, None, :], other=0.0)
        # [ROWS]
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        # a row with no live pair yet has row_max = -inf: avoid inf - inf
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.math.exp2(row_max - pivot)
        weight = split_sum * tl.math.exp2(split_max - pivot[None, :])
        acc = acc * alpha[:, None] + tl.sum(split_out * weight[:, :, None], 0)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        row_max = new_max

    if sinks_ptr is not None:
        row_max, row_sum, alpha = with_sink(row_max, row_sum, tl.load(sinks_ptr + head_index % heads) * LOG2_E)
        acc *= alpha[:, None]
    out = acc * tl.where(row_sum > 0, 1.0 / row_sum, 0.0)[:, None]
    row_max, row_sum = to_natural(row_max, row_sum)
    if HAS_STATE:
        # several threads of a program have read the statistics of a row
        tl.debug_barrier()
    tl.store(row_max_ptr + statistics, row_max, mask=row_mask)
    tl.store(row_sum_ptr + statistics, row_sum, mask=row_mask)
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=out_mask)


def partial_gradients(splits: Splits, add: bool, *outputs: torch.Tensor) -> tuple[bool, tuple[torch.Tensor, ...]]:
    """(whether to add, tensors): where kernels put gradients that belong in `outputs` (b, rows, heads, d). If blocks are split, these are
    partials, which kernels overwrite and `add_partials` adds up; else they are `outputs`."""
    if splits.most == 1:
        return add, outputs
    shapes = [(splits.most * x.shape[0], *x.shape[1:]) for x in outputs]
    return False, tuple([x.new_empty(shape, dtype=torch.float32) for x, shape in zip(outputs, shapes)])


def add_partials(
    splits: Splits, table: TileTable, add: bool, partials: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]
) -> None:
    """Add up what was computed in the partials of one gradient, or of dk and dv, in a fixed order, in one launch."""
    if splits.most == 1:
        return
    # a block without a split must be written too, unless gradients are added
    count = splits.merged(add)
    if count * outputs[0].numel() > 0:
        launches.launch(
            sum_kernel,
            table,
            (splits, add),
            _moving(partials, outputs),
            functools.partial(sum_arguments, splits, count, partials, outputs, add),
            num_warps=WARPS,
        )


def _moving(partials: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> dict[str, launches.Moving]:
    names = "partial1_ptr", "out1_ptr", "partial2_ptr", "out2_ptr"
    return dict(zip(names, (partials[0], outputs[0], *(partials[1:] or (None,)), *(outputs[1:] or (None,)))))


def sum_arguments(
    splits: Splits, count: int, partials: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...], add: bool
) -> tuple[tuple, dict]:
    """The grid and keyword arguments of one launch of `sum_kernel`."""
    b, rows, heads, d = outputs[0].shape
    for partial, out in zip(partials, outputs, strict=True):
        assert partial.shape == (splits.most * b, rows, heads, out.shape[3]) and partial.is_contiguous()
        assert out.shape[:3] == (b, rows, heads) and out.stride(3) == 1
        assert not add or out.dtype == torch.float32
    # strides and columns of a second gradient that is not there: those of the first
    other = outputs[-1]
    return (*_grid(splits, count, b * heads), len(outputs)), dict(
        **_moving(partials, outputs),
        blocks_ptr=splits.blocks,
        **strides(o=outputs[0], p=other),
        heads=heads,
        rows=rows,
        DIM=d,
        OTHER_DIM=other.shape[3],
        BLOCK_DIM=padded(d),
        BLOCK_OTHER=padded(other.shape[3]),
        BLOCK=splits.rows,
        ROWS=_rows(splits),
        TOGETHER=TOGETHER,
        ADD=add,
    )


@triton.jit(do_not_specialize=["heads", "rows"])
def sum_kernel(
    partial1_ptr, partial2_ptr, out1_ptr, out2_ptr, blocks_ptr, stride_ob, stride_os, stride_oh, stride_pb, stride_ps, stride_ph,
    heads, rows, DIM: tl.constexpr, OTHER_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_OTHER: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head of a gradient, or of the second one if there are two: the sum of their block's partials."""
    if tl.program_id(2) == 0:
        _sum_rows(
            partial1_ptr, out1_ptr, blocks_ptr, stride_ob, stride_os, stride_oh, heads, rows,
            DIM, BLOCK_DIM, BLOCK, ROWS, TOGETHER, ADD,
        )  # fmt: skip
    else:
        if partial2_ptr is not None:
            _sum_rows(
                partial2_ptr, out2_ptr, blocks_ptr, stride_pb, stride_ps, stride_ph, heads, rows,
                OTHER_DIM, BLOCK_OTHER, BLOCK, ROWS, TOGETHER, ADD,
            )  # fmt: skip


@triton.jit
def _sum_rows(
    partial_ptr, out_ptr, blocks_ptr, stride_ob, stride_os, stride_oh, heads, rows,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    block_ptr = blocks_ptr + tl.program_id(0) // (BLOCK // ROWS) * 2
    row = tl.load(block_ptr) + tl.program_id(0) % (BLOCK // ROWS) * ROWS + tl.arange(0, ROWS)
    # [ROWS, BLOCK_DIM]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (row < rows)[:, None] & (columns < DIM)
    offsets = ((batch * rows + row) * heads + head)[:, None] * DIM + columns
    total = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    splits = tl.load(block_ptr + 1)
    stride = tl.num_programs(1).to(tl.int64) * rows * DIM
    for first in range(0, splits, TOGETHER):
        # [TOGETHER, ROWS, BLOCK_DIM]
        split = (first + tl.arange(0, TOGETHER))[:, None, None]
        there = (split < splits) & mask[None, :, :]
        total += tl.sum(tl.load(partial_ptr + (split * stride + offsets[None, :, :]), mask=there, other=0.0), 0)
    pointers = out_ptr + batch * stride_ob + head.to(tl.int64) * stride_oh + (row.to(tl.int64)[:, None] * stride_os + columns)
    if ADD:
        total += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=mask)
