"""Launches of the Hopper backward in two kernels: one for dK and dV, one for dQ.

Neither kernel adds with atomics, so that the same inputs give the same bits.

Shapes: as in `attention.backward`.
"""

from dataclasses import dataclass

import torch

from .. import launches
from ..modifiers import Modifiers
from ..queries import Queries
from ..score_arguments import facts_of, fixed_arguments, moving_arguments
from ..table import BlockTable, TileTable
from ..units import LOG2_E
from . import head_dims, statistics
from .blocks import BLOCK, ROWS
from .descriptors import is_aligned, main_descriptor, row_descriptor
from .key_kernel import key_kernel
from .query_kernel import query_kernel
from .statistics import PaddedStatistics
from .turns import Turns
from .wide_key_kernel import wide_key_kernel


@dataclass(frozen=True)
class BackwardConfig:
    """How a backward kernel steps.

    step: rows of a step. stages: steps that are loaded ahead. v_stages: the same for V in `query_kernel`, if not `stages`.
    overlap: of the kernel in one pass, what begins before a step's dq is done: 0 nothing, 1 loads to the place of its queries, 2 also the
    next scores.
    registers: of a thread that multiplies.
    """

    step: int
    stages: int
    v_stages: int | None = None
    overlap: int = 0
    registers: int = 240


# by head dim; measured on an H200
KEY_CONFIGS = {64: BackwardConfig(64, 4), 128: BackwardConfig(64, 4), 256: BackwardConfig(64, 2)}
QUERY_CONFIGS = {64: BackwardConfig(128, 3), 128: BackwardConfig(128, 2), 256: BackwardConfig(64, 2, v_stages=1)}
# heads run side by side while together they have at most so many programs; measured on an H200
SIDE_BY_SIDE = 128


def obstacle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, table: TileTable) -> str:
    """Why no Hopper backward takes these inputs, whatever the head dims; empty where they do, on a GPU of compute capability 9.0."""
    b, _, h, _ = q.shape
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} is not a 16-bit type"
    if not all(is_aligned(x) for x in (q, k, v, dout)):
        return "rows are not aligned to 16 bytes"
    if b * h * (table.q_rows + BLOCK.value) >= 2**31:
        return "too many rows for 32-bit coordinates"
    return "" if len(table.tiles) > 0 else "there are no pairs"


def backward(
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    table: TileTable,
    softmax_scale: float,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    add_q: bool,
    add_kv: bool,
    modifiers: Modifiers | None = None,
) -> None:
    """`ringattn_kernels.backward` for inputs to which `obstacle` and `modified_obstacle` have no objection. add_q is for dq, add_kv for
    dk and dv."""
    rows = statistics.prepare(queries.statistics)
    score = moving_arguments(modifiers, table, softmax_scale, k.device)
    shared = dict(q_desc=queries.q, k_desc=k, v_desc=v, dout_desc=queries.dout, softmax_scale=softmax_scale, **score)
    facts = facts_of(modifiers)
    wide = head_dims.chosen_in_two(queries.q.shape[3], v.shape[3])[0] == 256

    def of_keys() -> tuple[int, dict]:
        make = wide_key_arguments if wide else key_arguments
        programs, arguments = make(queries, k, v, table, softmax_scale, rows, dk, dv, add_kv, modifiers)
        return programs, arguments | score

    def of_queries() -> tuple[int, dict]:
        programs, arguments = query_arguments(queries, k, v, table, softmax_scale, rows, dq, add_q, modifiers)
        return programs, arguments | score

    moving = shared | dict(pivot_desc=rows.pivot, delta_desc=rows.delta, dk_ptr=dk, dv_ptr=dv)
    launches.launch(wide_key_kernel if wide else key_kernel, table, (add_kv, *facts), moving, of_keys, num_warps=4)
    moving = shared | dict(pivot_ptr=rows.pivot, delta_ptr=rows.delta, dq_ptr=dq)
    # its programs fill the places that the last programs of the kernel before it leave
    launches.launch(query_kernel, table, (add_q, *facts), moving, of_queries, num_warps=4, launch_pdl=True)


def modified_obstacle(modifiers: Modifiers, sums: bool) -> str:
    """Why the two kernels do not modify scores; empty where they do. sums: whether gradients of slopes or biases are asked for."""
    if modifiers.dropout is not None:
        return "Hopper kernels in two passes drop no weights"
    return "Hopper kernels in two passes find no gradients of slopes and biases" if sums else ""


def key_arguments(
    queries: Queries, k, v, table: TileTable, softmax_scale: float, rows: PaddedStatistics, dk, dv, add: bool,
    modifiers: Modifiers | None = None, config: BackwardConfig | None = None, block: int = BLOCK.value,
    blocks: BlockTable | Turns | None = None, dims: head_dims.Dims | None = None,
) -> tuple[int, dict]:  # fmt: skip
    """The number of programs of `key_kernel`, with `block` key rows each, and its arguments; those for modified scores that move come on
    top. blocks: by default those of `key_blocks_of`.

    dims: as which head dims are computed, by default those of `head_dims.in_two`.

    dk and dv with n times as many batches as k hold the partials of n splits.
    """
    q, dout = queries.q, queries.dout
    assert q.dtype == k.dtype == v.dtype == dout.dtype and q.shape[:3] == dout.shape[:3] and k.shape[:3] == v.shape[:3]
    assert (q.shape[1], k.shape[1]) == (table.q_rows, table.k_rows) and len(table.tiles) > 0
    assert (k.shape[1:], v.shape[1:]) == (dk.shape[1:], dv.shape[1:]) and dk.shape[0] == dv.shape[0]
    assert dk.stride(3) == dv.stride(3) == 1
    assert not add or dk.dtype == dv.dtype == torch.float32
    (b, _, h, d), (hk, v_dim) = q.shape, v.shape[2:]
    head_dim, v_head_dim = dims or head_dims.chosen_in_two(d, v_dim)
    config = config or KEY_CONFIGS[head_dim]
    if blocks is None:
        blocks = key_blocks_of(table, k.device, dk.shape[0] // k.shape[0], config, block)
    count = blocks.touched if add else len(blocks)
    return b * hk * count, dict(
        q_desc=main_descriptor(q, config.step, head_dim),
        k_desc=main_descriptor(k, ROWS.value, head_dim),
        v_desc=main_descriptor(v, ROWS.value, v_head_dim),
        dout_desc=main_descriptor(dout, config.step, v_head_dim),
        pivot_desc=row_descriptor(rows.pivot, config.step),
        delta_desc=row_descriptor(rows.delta, config.step),
        dk_ptr=dk,
        dv_ptr=dv,
        items_ptr=blocks.items,
        segments_ptr=blocks.segments,
        **launches.strides(dk=dk, dv=dv),
        item_count=count,
        kv_heads=hk,
        group=h // hk,
        padded_rows=rows.pivot.shape[1],
        k_rows=table.k_rows,
        scale=softmax_scale * LOG2_E.value,
        softmax_scale=softmax_scale,
        HEAD_DIM=head_dim,
        STEP=config.step,
        STAGES=config.stages,
        ADD=add,
        REGISTERS=config.registers,
        QK_COLUMNS=d,
        V_COLUMNS=v_dim,
        **fixed_arguments(modifiers, table, blocks.places),
    )


def key_blocks_of(
    table: TileTable, device: torch.device, splits: int, config: BackwardConfig, block: int = BLOCK.value
) -> BlockTable:
    """The blocks of `block` key rows of a launch, the longest in so many splits."""
    # in steps of one row: the kernel aligns its steps itself, and wants to know exactly which queries need no mask
    return table.key_blocks(block, 1 if splits == 1 else config.step, device, splits)


def make_blocks(table: TileTable, d: int, v_dim: int, device: torch.device) -> None:
    """Make the blocks that `backward` takes from a table."""
    head_dim, _ = head_dims.chosen_in_two(d, v_dim)
    key_blocks_of(table, device, 1, KEY_CONFIGS[head_dim], ROWS.value if head_dim == 256 else BLOCK.value)
    table.query_blocks(BLOCK.value, QUERY_CONFIGS[head_dim].step, device)


def wide_key_arguments(
    queries: Queries, k, v, table: TileTable, softmax_scale: float, rows: PaddedStatistics, dk, dv, add: bool,
    modifiers: Modifiers | None = None,
) -> tuple[int, dict]:  # fmt: skip
    """As `key_arguments`, of `wide_key_kernel`: and how heads run side by side."""
    grid, arguments = key_arguments(queries, k, v, table, softmax_scale, rows, dk, dv, add, modifiers, block=ROWS.value)
    chunk = max(1, SIDE_BY_SIDE // arguments["item_count"])
    return grid, arguments | dict(chunk=chunk, heads=k.shape[0] * k.shape[2])


def query_arguments(
    queries: Queries, k, v, table: TileTable, softmax_scale: float, rows: PaddedStatistics, dq, add: bool,
    modifiers: Modifiers | None = None,
) -> tuple[int, dict]:  # fmt: skip
    """As `key_arguments`, of `query_kernel`."""
    q, dout = queries.q, queries.dout
    assert q.shape == dq.shape and dq.stride(3) == 1
    assert not add or dq.dtype == torch.float32
    b, _, h, d = q.shape
    head_dim, _ = head_dims.chosen_in_two(d, v.shape[3])
    config = QUERY_CONFIGS[head_dim]
    blocks = table.query_blocks(BLOCK.value, config.step, q.device)
    count = blocks.touched if add else len(blocks)
    return b * h * count, dict(
        q_desc=main_descriptor(q, ROWS.value, head_dim),
        k_desc=main_descriptor(k, config.step, head_dim),
        v_desc=main_descriptor(v, config.step, head_dim),
        dout_desc=main_descriptor(dout, ROWS.value, head_dim),
        pivot_ptr=rows.pivot,
        delta_ptr=rows.delta,
        dq_ptr=dq,
        items_ptr=blocks.items,
        segments_ptr=blocks.segments,
        **launches.strides(dq=dq),
        item_count=count,
        heads=h,
        group=h // k.shape[2],
        padded_rows=rows.pivot.shape[1],
        q_rows=table.q_rows,
        scale=softmax_scale * LOG2_E.value,
        softmax_scale=softmax_scale,
        HEAD_DIM=head_dim,
        STEP=config.step,
        STAGES=config.stages,
        V_STAGES=config.v_stages or config.stages,
        ADD=add,
        REGISTERS=config.registers,
        QK_COLUMNS=d,
        **fixed_arguments(modifiers, table, blocks.places),
    )
