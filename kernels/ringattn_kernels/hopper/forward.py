"""Launches of the Hopper forward.

Shapes: q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), out (b, sq, h, dv), row_max and row_sum (b, h, sq).
"""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import launches
from ..continued import RowPart
from ..modifiers import Modifiers
from ..score_arguments import ALIGNED, facts_of, fixed_arguments, moving_arguments, unmodified
from ..splits import multiprocessors
from ..table import ROW, TileTable, on_device
from ..units import LOG2_E
from .descriptors import described, halves_layout, is_aligned, swizzled_layout
from .forward_config import WARPGROUP_ROWS, ForwardConfig, block_dim, chunks, panels
from .forward_kernel import hopper_forward_kernel
from .forward_softcap import caps_late
from .work_queue import WorkQueue, ordered, work_counter

# keys and values that the programs of an H200 may walk at a time, in bytes
L2_SHARE = 24 << 20


def obstacle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> str:
    """Why `launch` does not take these inputs; empty where it does, on a GPU of compute capability 9.0."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} is not a 16-bit type"
    if max(q.shape[3], v.shape[3]) > 256:
        return f"head dims {q.shape[3]} and {v.shape[3]} are not both within 256"
    if not softmax_scale > 0:
        return "the maximum of raw products is that of the scores only if the scale is positive"
    for x in (q, k, v):
        if x.numel() == 0:
            return "the copy engine takes no empty tensor"
        if not is_aligned(x) or min(x.stride()[:3]) <= 0:
            return "the copy engine needs rows at positive multiples of 16 bytes"
    return ""


def launch(
    q, k, v, table: TileTable, out, row_max, row_sum, softmax_scale: float, state, touched_only: bool, splits: int, config: ForwardConfig,
    programs: int | None = None, modifiers: Modifiers | None = None, part: RowPart | None = None, sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel over tensors that `attention.forward` made. part: of the rows. sinks: (h,), which all rows count.

    programs: how many; None is `config.programs` for each multiprocessor.
    """
    counter = work_counter(q.device)
    score, late = moving_arguments(modifiers, table, softmax_scale, q.device), caps_late(modifiers)

    def make() -> tuple[int, dict]:
        (_, _, h, d), (_, sk, hk, _) = q.shape, v.shape
        assert q.dtype == k.dtype == v.dtype and q.stride(3) == k.stride(3) == v.stride(3) == 1
        assert (q.shape[1], k.shape[1], sk) == (table.q_rows, table.k_rows, table.k_rows) and h % hk == 0 and k.shape[2:] == (hk, d)
        queue = work_queue(q, k, v, table, config, splits, touched_only, modifiers, part)
        arguments = kernel_arguments(q, k, v, out, row_max, row_sum, queue, counter, softmax_scale, state, config, sinks)
        arguments |= fixed_arguments(modifiers, table, queue.places) | score | dict(LATE_CAP=late)
        return min(programs or config.programs * multiprocessors(q.device), len(queue.works)), arguments

    moving = dict(
        q_desc=q,
        k_desc=k,
        v_desc=v,
        counter_ptr=counter,
        **launches.results(out, row_max, row_sum, state, sinks),
        **score,
    )
    if stores_by_copy(q, out, config):
        moving["out_desc"] = out
    facts = state is None, touched_only, splits, config, programs, part, late, *facts_of(modifiers)
    launches.launch(hopper_forward_kernel, table, facts, moving, make, num_warps=4, maxnreg=config.maxnreg)


def work_queue(
    q, k, v, table: TileTable, config: ForwardConfig, splits: int, touched_only: bool, modifiers: Modifiers | None = None,
    part: RowPart | None = None,
) -> WorkQueue:  # fmt: skip
    """The works of a launch, made once a table. Of q, k and v shapes, dtypes and the device count. part: of the rows."""
    (b, _, h, d), (_, sk, hk, dv) = q.shape, v.shape
    together = max(1, L2_SHARE // (sk * (d + dv) * k.element_size())) * (h // hk)
    align = ALIGNED if modifiers is not None and modifiers.dropout is not None else 1

    def build() -> WorkQueue:
        items, segments = table.cut("q", config.block, config.step, align, splits)
        items = items if part is None else items[part.of(items[:, ROW])]
        processors = config.programs * multiprocessors(q.device)
        works, segments = ordered(items, segments, config.step, config.warpgroups, b * h, together, touched_only, processors)
        return WorkQueue(*on_device((works, *table.parts_of(segments)), q.device))

    key = ("hopper forward", config.block, config.step, align, splits, b * h, together, touched_only, part, q.device)
    return table.derived(key, build)


def kernel_arguments(
    q, k, v, out, row_max, row_sum, queue: WorkQueue, counter, softmax_scale: float, state, config: ForwardConfig, sinks=None
) -> dict:
    """Keyword arguments of one launch of `hopper_forward_kernel` that modifies no scores."""
    return dict(
        q_desc=descriptor(q, WARPGROUP_ROWS, chunks(q.shape[3])),
        k_desc=descriptor(k, config.step, chunks(q.shape[3])),
        v_desc=descriptor(v, config.step, panels=panels(q.shape[3], v.shape[3])),
        out_desc=out_descriptor(out, config) if stores_by_copy(q, out, config) else None,
        **launches.results(out, row_max, row_sum, state, sinks),
        works_ptr=queue.works,
        segments_ptr=queue.segments,
        counter_ptr=counter,
        work_count=len(queue.works),
        batches=q.shape[0],
        heads=q.shape[2],
        group=q.shape[2] // k.shape[2],
        q_rows=q.shape[1],
        scale=softmax_scale * LOG2_E.value,
        **unmodified(),
        CHUNKS=chunks(q.shape[3]),
        PANELS=panels(q.shape[3], v.shape[3]),
        WARPGROUPS=config.warpgroups,
        Q_STAGES=config.q_stages,
        STAGES=config.stages,
        V_DIM=v.shape[3],
        HAS_STATE=state is not None,
        TURNS=config.turns,
        PAIRED=config.paired,
        KEPT=config.kept if chunks(q.shape[3]) == 1 else 0,
        AHEAD=config.ahead,
        REGISTERS=config.registers,
        LATE_CAP=False,
    )


def stores_by_copy(q: torch.Tensor, out: torch.Tensor, config: ForwardConfig) -> bool:
    """Whether the copy engine stores out: from the place of its queries, or from one of its own."""
    fits = config.out_room or (config.q_stages > 1 and block_dim(out.shape[3]) == block_dim(q.shape[3]))
    return fits and out.dtype == q.dtype and is_aligned(out)


def out_descriptor(out: torch.Tensor, config: ForwardConfig) -> TensorDescriptor:
    """The descriptor of 64 rows of a head of out, of half of the columns where a place of its own holds no more."""
    block = 1, WARPGROUP_ROWS, 1, block_dim(out.shape[3]) // (2 if config.out_room else 1)
    return described(out, out.shape, out.stride(), block, swizzled_layout(*block))


def descriptor(x: torch.Tensor, rows: int, chunks: int = 1, panels: int = 1) -> TensorDescriptor:
    """The descriptor of `rows` rows of one head of x (b, s, h, d). With two panels a product may take 32 of the columns."""
    block = 1, rows, 1, block_dim(x.shape[3]) if chunks == 1 else 64
    layout = swizzled_layout(*block) if panels == 1 else halves_layout(4)
    return described(x, x.shape, x.stride(), block, layout)
