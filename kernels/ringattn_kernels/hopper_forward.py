"""Exact attention over a tile table, forward, for Hopper (sm_90) in Gluon: the formula of `forward`, on asynchronous units.

In a program one partition has the copy engine (TMA) bring Q, K and V to shared memory, and two warpgroups compute 64 query rows each. A
warpgroup starts the scores of the next block of keys, then the weighted values of the block before, and computes a softmax while the
tensor cores work. Programs stay on their multiprocessor and walk a list of works made on the host; K and V keep coming across the ends
of segments and of works.

Shapes: q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), out (b, sq, h, dv), row_max and row_sum (b, h, sq).
"""

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .config import padded
from .table import TileTable, cut
from .units import LOG2_E, to_base2, to_natural

# query rows of a program: two warpgroups of 64
BLOCK_Q = 128
WARPGROUP_ROWS = 64
# registers of a thread that computes; what remains suffices for those that copy
REGISTERS = 240
# bytes of keys and values that the programs of an H200 may walk at a time
L2_SHARE = 24 << 20
# what a query block costs beside its steps, in steps: loading Q, filling the pipeline, writing out
WORK_OVERHEAD = 2


@dataclass(frozen=True)
class HopperLaunch:
    """`stages` blocks of `step` rows of K, and as many of V, are in shared memory at a time."""

    step: int
    stages: int


@dataclass(frozen=True)
class Schedule:
    """What each program does, in order.

    works    (n, 4) int32: b * h + head, first row of the query block, first segment, number of steps (at least 1).
    bounds   (programs + 1,) int32: program p does works[bounds[p]:bounds[p + 1]].
    segments (m, 8) int32: as in `table.BlockTable`; the last one is empty, for query blocks without any.
    """

    works: torch.Tensor
    bounds: torch.Tensor
    segments: torch.Tensor


def schedule(
    tiles: np.ndarray, q_rows: int, launch: HopperLaunch, heads: int, together: int, touched_only: bool, programs: int
) -> tuple[np.ndarray, ...]:
    """(works, bounds, segments) by list scheduling.

    `together` heads at a time, so that their keys and values stay in the L2; of those the longest work comes first; each goes to the
    program that has had the least so far.
    """
    items, segments = cut(tiles, q_rows, BLOCK_Q, launch.step)
    steps = -(-(segments[:, 3] - segments[:, 0]) // launch.step)
    total = np.concatenate([[0], np.cumsum(steps)])
    steps = total[items[:, 2]] - total[items[:, 1]]
    if touched_only:
        items, steps = items[steps > 0], steps[steps > 0]
    first = np.where(steps > 0, items[:, 1], len(segments))
    segments = np.concatenate([segments, np.array([[0, 0, 0, 1, 0, 0, 0, 0]], dtype=np.int32)])
    head = np.repeat(np.arange(heads), len(items))
    per_head = np.stack([items[:, 0], first, np.maximum(steps, 1)], axis=1)
    works = np.column_stack([head, np.tile(per_head, (heads, 1))])
    works = works[np.lexsort((head, -works[:, 3], head // together))]

    programs = min(programs, len(works))
    loads = [(0, program) for program in range(programs)]
    owner = np.empty(len(works), dtype=np.int64)
    for index, cost in enumerate((works[:, 3] + WORK_OVERHEAD).tolist()):
        load, program = loads[0]
        heapq.heapreplace(loads, (load + cost, program))
        owner[index] = program
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(programs + 1))
    return works[order].astype(np.int32), bounds.astype(np.int32), segments


# head-dim bucket -> HopperLaunch, measured on an H200; the bucket is the larger of the two padded head dims
LAUNCHES = {64: HopperLaunch(128, 3), 128: HopperLaunch(128, 2), 256: HopperLaunch(64, 2)}


def obstacle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> str:
    """Why `launch` here does not take these inputs; empty where it does, on a GPU of compute capability 9.0."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} is not a 16-bit type"
    if max(q.shape[3], v.shape[3]) > 256:
        return f"head dims {q.shape[3]} and {v.shape[3]} are not both within 256"
    if not softmax_scale > 0:
        return "the maximum of raw products is that of the scores only if the scale is positive"
    for x in (q, k, v):
        if x.numel() == 0:
            return "the copy engine takes no empty tensor"
        strides = [stride * x.element_size() for stride in x.stride()[:3]]
        if x.data_ptr() % 16 or any(stride <= 0 or stride % 16 for stride in strides):
            return "the copy engine needs rows at positive multiples of 16 bytes"
    return ""


def launch(
    q, k, v, table: TileTable, out, row_max, row_sum, softmax_scale: float, state, final: bool,
    config: HopperLaunch | None = None, programs: int | None = None,
) -> None:  # fmt: skip
    """Launch the kernel over tensors that `forward` made. `config` and `programs` replace the defaults."""
    b, sq, h, d = q.shape
    hk, dv = v.shape[2:]
    assert q.dtype == k.dtype == v.dtype and q.stride(3) == k.stride(3) == v.stride(3) == 1
    assert (sq, k.shape[1], v.shape[1]) == (table.q_rows, table.k_rows, table.k_rows) and h % hk == 0 and k.shape[2:] == (hk, d)
    config = config or LAUNCHES[max(block_dim(d), block_dim(dv))]
    programs = programs or torch.cuda.get_device_properties(q.device).multi_processor_count
    touched_only = state is not None and not final
    together = max(1, L2_SHARE // (k.shape[1] * (d + dv) * k.element_size())) * (h // hk)

    def build() -> Schedule:
        arrays = schedule(table.tiles, sq, config, b * h, together, touched_only, programs)
        return Schedule(*(torch.from_numpy(x).to(q.device) for x in arrays))

    plan = table.derived(("hopper forward", config.step, b * h, together, touched_only, programs, q.device), build)
    if len(plan.works):
        arguments = kernel_arguments(q, k, v, out, row_max, row_sum, plan, softmax_scale, state, config)
        hopper_forward_kernel[(len(plan.bounds) - 1,)](**arguments, num_warps=4)


def kernel_arguments(q, k, v, out, row_max, row_sum, plan: Schedule, softmax_scale: float, state, config: HopperLaunch) -> dict:
    """Keyword arguments of one launch of `hopper_forward_kernel`."""
    return dict(
        q_desc=descriptor(q, WARPGROUP_ROWS),
        k_desc=descriptor(k, config.step),
        v_desc=descriptor(v, config.step),
        out_ptr=out,
        state_ptr=out if state is None else state[0],
        row_max_ptr=row_max,
        row_sum_ptr=row_sum,
        works_ptr=plan.works,
        bounds_ptr=plan.bounds,
        segments_ptr=plan.segments,
        heads=q.shape[2],
        group=q.shape[2] // k.shape[2],
        q_rows=q.shape[1],
        scale=softmax_scale * LOG2_E.value,
        STAGES=config.stages,
        V_DIM=v.shape[3],
        HAS_STATE=state is not None,
        REGISTERS=REGISTERS,
    )


def block_dim(head_dim: int) -> int:
    """Columns of a block that holds a head dim; those past it come as zeros."""
    return max(64, padded(head_dim))


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """For blocks of `rows` rows of one head of x (b, s, h, d)."""
    shape = [1, rows, 1, block_dim(x.shape[3])]
    element = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(x, list(x.shape), list(x.stride()), shape, gl.NVMMASharedLayout.get_default_for(shape, element))


@gluon.jit
def pin(x):
    """x, at a place that the compiler cannot move: a left operand in registers must live until the product that reads it is done."""
    constraints: gl.constexpr = "=f,0" if x.dtype == gl.float32 else "=r,0"
    return gl.inline_asm_elementwise("", constraints, [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def pack(even, odd, dtype: gl.constexpr):
    """Two fp32 rounded to 16 bits each, in one int32: held from step to step, so that they take one register and no permutation."""
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(convert, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """[rows, columns] of `dtype` from [rows, columns / 2] pairs, as a left operand."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    both = gl.join(even, odd).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(both.to(dtype, bitcast=True), layout, assert_trivial=True)


@gluon.jit
def load_work(works_ptr, work):
    """(b * h + head, first row of the query block, first segment, number of steps)."""
    ptr = works_ptr + work * 4
    return gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3)


@gluon.jit
def load_copies(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, v_full, kv_empty, works_ptr, segments_ptr,
    work_begin, work_end, heads, group, STAGES: gl.constexpr,
):  # fmt: skip
    """The partition that asks the copy engine for Q once a work and for K and V once a step, as soon as there is room."""
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[1]
    ROWS: gl.constexpr = q_desc.block_type.shape[1]
    block = 0
    for work in range(work_begin, work_end):
        head_index, block_begin, segment, steps = load_work(works_ptr, work)
        batch = head_index // heads
        head = head_index % heads
        kv_head = head // group
        for i in gl.static_range(2):
            mbarrier.wait(q_empty.index(i), ((work - work_begin) & 1) ^ 1)
            mbarrier.expect(q_full.index(i), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [batch, block_begin + i * ROWS, head, 0], q_full.index(i), q_smem.index(i))
        start = gl.load(segments_ptr + segment * 8)
        end = gl.load(segments_ptr + segment * 8 + 3)
        for _step in range(steps):
            if start >= end:
                segment += 1
                start = gl.load(segments_ptr + segment * 8)
                end = gl.load(segments_ptr + segment * 8 + 3)
            stage = block % STAGES
            # K's room is empty since V's block before this one was asked for
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [batch, start, kv_head, 0], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(kv_empty.index((block + 1) % STAGES), (((block + 1) // STAGES) & 1) ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [batch, start, kv_head, 0], v_full.index(stage), v_smem.index(stage))
            start += BLOCK_K
            block += 1


@gluon.jit
def load_segment(segments_ptr, segment):
    """(begin, full_begin, full_end, end): see `table.BlockTable`."""
    ptr = segments_ptr + segment * 8
    return gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3)


@gluon.jit
def mask_edge(scores, start, end, segments_ptr, segment, first_row):
    """-inf for pairs of an edge block that are not live."""
    ROWS: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    ptr = segments_ptr + segment * 8
    # rows and columns relative to the block's first ones, so that the columns are constants
    rows = gl.arange(0, scores.shape[0], ROWS)
    shift = first_row - start
    first = rows + (shift - gl.load(ptr + 5))
    last = gl.minimum(rows + (shift - gl.load(ptr + 4)), end - 1 - start)
    inside = (rows >= gl.load(ptr + 6) - first_row) & (rows < gl.load(ptr + 7) - first_row)
    last = gl.where(inside, last, -1)
    columns = gl.expand_dims(gl.arange(0, scores.shape[1], COLUMNS), 0)
    live = (columns >= gl.expand_dims(first, 1)) & (columns <= gl.expand_dims(last, 1))
    return gl.where(live, scores, float("-inf"))


@gluon.jit
def out_place(
    block_begin, head_index, heads, q_rows, V_DIM: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr
):
    """(offsets, mask) of rows of out and of the state, which are contiguous."""
    # [ROWS]
    rows = block_begin + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    offsets = ((head_index // heads).to(gl.int64) * q_rows + rows) * heads + head_index % heads
    mask = (gl.expand_dims(rows, 1) < q_rows) & (columns < V_DIM)
    return gl.expand_dims(offsets, 1) * V_DIM + columns, mask


@gluon.jit
def as_column(x, layout: gl.constexpr):
    """[rows] as [rows, 1] of a matrix in `layout`, whose rows the same threads hold."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def softmax_step(scores, row_max, row_sum, scale, dtype: gl.constexpr):
    """(p as packed pairs, alpha, row_max, row_sum) after a block of raw scores; row_max is in base-2 units: scores * scale is the exponent.

    row_sum [rows, 4] is what each of a row's four threads has seen.
    """
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    row_max_new = gl.maximum(row_max, gl.max(scores, axis=1) * scale)
    # a row with no live pair yet has row_max = -inf: avoid inf - inf
    pivot = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    p = gl.exp2(scores * scale - gl.expand_dims(pivot, 1))
    alpha = gl.exp2(row_max - pivot)
    even, odd = gl.split(p.reshape([ROWS, COLUMNS // 2, 2]))
    part = gl.convert_layout(
        gl.sum((even + odd).reshape([ROWS, COLUMNS // 8, 4]), axis=1), row_sum.type.layout, assert_trivial=True
    )
    SUMS: gl.constexpr = row_sum.type.layout
    row_sum = row_sum * as_column(alpha, SUMS) + part
    return pack(even, odd, dtype), alpha, row_max_new, row_sum


@gluon.jit
def attend_rows(
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, v_full, kv_empty, out_ptr, state_ptr, row_max_ptr, row_sum_ptr, works_ptr,
    segments_ptr, work_begin, work_end, heads, q_rows, scale, WARPGROUP: gl.constexpr, STAGES: gl.constexpr, V_DIM: gl.constexpr,
    HAS_STATE: gl.constexpr,
):  # fmt: skip
    """The partition of one warpgroup: out, row_max and row_sum of its 64 rows of each query block."""
    ROWS: gl.constexpr = q_smem.shape[1]
    BLOCK_K: gl.constexpr = k_smem.shape[1]
    BLOCK_DV: gl.constexpr = v_smem.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    # [ROWS, 4]: a column for each of the four threads that share a row of scores
    SUMS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    dtype: gl.constexpr = v_smem.dtype
    block = 0
    for work in range(work_begin, work_end):
        head_index, block_begin, segment, steps = load_work(works_ptr, work)
        first_row = block_begin + WARPGROUP * ROWS
        if HAS_STATE:
            # [ROWS]
            rows = first_row + gl.arange(0, ROWS, SCORE_ROWS)
            statistics = head_index.to(gl.int64) * q_rows + rows
            row_max, rest = to_base2(gl.load(row_max_ptr + statistics, mask=rows < q_rows, other=float("-inf")))
            old_sum = gl.load(row_sum_ptr + statistics, mask=rows < q_rows, other=0.0) * gl.exp2(rest)
            thread = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, SUMS)), 0)
            row_sum = gl.where(thread == 0, as_column(old_sum, SUMS), 0.0)
            # [ROWS, BLOCK_DV]
            offsets, mask = out_place(first_row, head_index, heads, q_rows, V_DIM, ROWS, BLOCK_DV, OUT)
            acc = gl.load(state_ptr + offsets, mask=mask, other=0.0) * as_column(old_sum, OUT)
        else:
            row_max = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
            row_sum = gl.zeros([ROWS, 4], gl.float32, SUMS)
            acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, OUT)

        start, full_begin, full_end, end = load_segment(segments_ptr, segment)
        mbarrier.wait(q_full.index(WARPGROUP), (work - work_begin) & 1)
        q = q_smem.index(WARPGROUP)
        stage = block % STAGES
        mbarrier.wait(k_full.index(stage), (block // STAGES) & 1)
        zeros = gl.zeros([ROWS, BLOCK_K], gl.float32, SCORES)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        # the last values of the work before, and these keys
        mbarrier.arrive(kv_empty.index(stage), count=1)
        if (start < full_begin) | (start >= full_end):
            s = mask_edge(s, start, end, segments_ptr, segment, first_row)
        pairs, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum, scale, dtype)
        if HAS_STATE:
            # pinned, or LLVM would merge this product with the loop's own and move it between the loop's matrix products
            acc = pin(acc * as_column(alpha, OUT))
        mbarrier.wait(k_full.index((block + 1) % STAGES), ((block + 1) // STAGES) & 1, pred=steps > 1)
        for step in range(1, steps):
            start += BLOCK_K
            if start >= end:
                segment += 1
                start, full_begin, full_end, end = load_segment(segments_ptr, segment)
            # block is the one whose values are due, block + 1 the one whose scores are
            k_stage = (block + 1) % STAGES
            s_token = warpgroup_mma(q, k_smem.index(k_stage).permute((1, 0)), s, use_acc=False, is_async=True)
            v_stage = block % STAGES
            mbarrier.wait(v_full.index(v_stage), (block // STAGES) & 1)
            acc_token = warpgroup_mma(unpack(pairs, dtype, P), v_smem.index(v_stage), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_token])
            if (start < full_begin) | (start >= full_end):
                s = mask_edge(s, start, end, segments_ptr, segment, first_row)
            next_pairs, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum, scale, dtype)
            next_pairs = pin(next_pairs)
            # this wait for the next keys ends a basic block: ptxas cannot move the softmax below it, past the wait for the tensor cores
            next_block = block + 2
            mbarrier.wait(k_full.index(next_block % STAGES), (next_block // STAGES) & 1, pred=step + 1 < steps)
            acc = warpgroup_mma_wait(0, deps=[acc_token])
            pairs = pin(pairs)
            mbarrier.arrive(kv_empty.index(k_stage), count=1)
            pairs = next_pairs
            acc = acc * as_column(alpha, OUT)
            block += 1
        mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
        v_stage = block % STAGES
        mbarrier.wait(v_full.index(v_stage), (block // STAGES) & 1)
        acc_token = warpgroup_mma(unpack(pairs, dtype, P), v_smem.index(v_stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        pairs = pin(pairs)
        block += 1

        # read again rather than held in registers through the loop
        head_index, block_begin, segment, steps = load_work(works_ptr, work)
        first_row = block_begin + WARPGROUP * ROWS
        total = gl.convert_layout(gl.sum(row_sum, axis=1), SCORE_ROWS, assert_trivial=True)
        # selected, not multiplied by 0: the values of pairs that are not live may be anything
        acc = gl.where(as_column(total, OUT) > 0, acc * as_column(1.0 / total, OUT), 0.0)
        offsets, mask = out_place(first_row, head_index, heads, q_rows, V_DIM, ROWS, BLOCK_DV, OUT)
        gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
        row_max, total = to_natural(row_max, total)
        rows = first_row + gl.arange(0, ROWS, SCORE_ROWS)
        statistics = head_index.to(gl.int64) * q_rows + rows
        gl.store(row_max_ptr + statistics, row_max, mask=rows < q_rows)
        gl.store(row_sum_ptr + statistics, total, mask=rows < q_rows)


@gluon.jit(do_not_specialize=["heads", "group", "q_rows"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, state_ptr, row_max_ptr, row_sum_ptr, works_ptr, bounds_ptr, segments_ptr, heads, group, q_rows, scale,
    STAGES: gl.constexpr, V_DIM: gl.constexpr, HAS_STATE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out, row_max, row_sum of the works of one program; see the module."""
    dtype: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, ROWS, 1, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_K, 1, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_K, 1, BLOCK_DV], v_desc.layout)
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_D], dtype)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_DV], dtype)
    # the same bytes as matrices
    q_matrices = q_smem._reinterpret(dtype, [2, ROWS, BLOCK_D], Q)
    k_matrices = k_smem._reinterpret(dtype, [STAGES, BLOCK_K, BLOCK_D], K)
    v_matrices = v_smem._reinterpret(dtype, [STAGES, BLOCK_K, BLOCK_DV], V)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # of a block: K has been read, and V of the block before it
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    fence_async_shared()
    program = gl.program_id(0)
    work_begin = gl.load(bounds_ptr + program)
    work_end = gl.load(bounds_ptr + program + 1)
    # constants must stay in the calls' own tuples: a name for a tuple would turn them into run-time values
    gl.warp_specialize([
        (load_copies, (
            q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, v_full, kv_empty, works_ptr, segments_ptr, work_begin,
            work_end, heads, group, STAGES,
        )),
        (attend_rows, (
            q_matrices, k_matrices, v_matrices, q_full, q_empty, k_full, v_full, kv_empty, out_ptr, state_ptr, row_max_ptr,
            row_sum_ptr, works_ptr, segments_ptr, work_begin, work_end, heads, q_rows, scale, 0, STAGES, V_DIM, HAS_STATE,
        )),
        (attend_rows, (
            q_matrices, k_matrices, v_matrices, q_full, q_empty, k_full, v_full, kv_empty, out_ptr, state_ptr, row_max_ptr,
            row_sum_ptr, works_ptr, segments_ptr, work_begin, work_end, heads, q_rows, scale, 1, STAGES, V_DIM, HAS_STATE,
        )),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
