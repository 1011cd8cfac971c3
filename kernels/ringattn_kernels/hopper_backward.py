"""Exact attention over a tile table, backward, for Hopper: the two kernels of `gradients`, in Gluon.

    P = exp2(scale Q K^T - pivot)        dV += P^T dout
    dS = P * (dout V^T - delta)          dQ += softmax_scale dS K      dK += softmax_scale dS^T Q

In each kernel one partition has the copy engine (TMA) bring blocks of rows to shared memory, and two warpgroups of 64 rows each
multiply; while one of them exponentiates, the other keeps the tensor cores busy. Nothing is added with atomics, so that the same
inputs give the same bits.

`key_kernel`: a program owns 128 key rows of one key/value head and meets blocks of queries of all heads of its group. Scores are
held transposed, so that P^T and dS^T are left operands as they are in registers, and dK and dV never leave them. `query_kernel`: a
program owns 128 query rows of one head and meets blocks of keys; dS is the left operand of dQ from registers.

Shapes: as in `backward`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import launches
from .gluon_words import async_load, plain_layout, reinterpret
from .hopper_panels import allocate_panels, load_panels, main_descriptor, panel_bytes
from .inputs import Inputs, Statistics
from .launches import strides
from .table import TileTable
from .units import LOG2_E, to_base2

ROWS = gl.constexpr(64)  # of a warpgroup
BLOCK = gl.constexpr(128)  # of a program


@gluon.jit
def opaque(x):
    """x, behind the compiler's back: an operand in registers must stay where it is until its product is done."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def advance(index, phase, COUNT: gl.constexpr):
    """The next of COUNT buffers in a ring, and the phase of its barrier."""
    index += 1
    if index == COUNT:
        index = 0
        phase ^= 1
    return index, phase


@gluon.jit
def let_next_kernel_start():
    """Programs of a kernel launched with `launch_pdl` may take the places that this kernel's last programs leave empty."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_kernel_before():
    """Until the kernel before this one is done and what it wrote is visible: what follows in the stream waits for this kernel alone."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_span(segments_ptr, segment, whole, ALIGN: gl.constexpr):
    """(start, full_begin, full_end, end) of a segment, in steps from multiples of ALIGN; those in [full_begin, full_end) need no mask."""
    ptr = segments_ptr + segment * 8
    start = gl.load(ptr) // ALIGN * ALIGN
    full_begin = gl.cdiv(gl.load(ptr + 1), ALIGN) * ALIGN
    full_end = gl.load(ptr + 2) // ALIGN * ALIGN
    return start, full_begin, gl.where(whole, full_end, 0), gl.load(ptr + 3)


@gluon.jit
def count_steps(segments_ptr, segment_begin, segment_end, STEP: gl.constexpr, ALIGN: gl.constexpr):
    """How many blocks the segments have."""
    steps = 0
    for segment in range(segment_begin, segment_end):
        start = gl.load(segments_ptr + segment * 8) // ALIGN * ALIGN
        steps += gl.cdiv(gl.load(segments_ptr + segment * 8 + 3) - start, STEP)
    return steps


@gluon.jit
def mask_scores(p, segments_ptr, segment, row0, start):
    """p with zeros outside of the segment; its first row is row0 and its first column is start."""
    L: gl.constexpr = p.type.layout
    ptr = segments_ptr + segment * 8
    begin = gl.load(ptr)
    end = gl.load(ptr + 3)
    lo = gl.load(ptr + 4)
    hi = gl.load(ptr + 5)
    row_begin = gl.load(ptr + 6)
    row_end = gl.load(ptr + 7)
    rows = row0 + gl.arange(0, p.type.shape[0], gl.SliceLayout(1, L))
    columns = gl.expand_dims(start + gl.arange(0, p.type.shape[1], gl.SliceLayout(0, L)), 0)
    first = gl.maximum(rows - hi, begin)
    last = gl.minimum(rows - lo, end - 1)
    last = gl.where((rows >= row_begin) & (rows < row_end), last, -1)
    live = (columns >= gl.expand_dims(first, 1)) & (columns <= gl.expand_dims(last, 1))
    return gl.where(live, p, 0.0)


@gluon.jit
def tile(buffer, index, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """One [ROWS, COLUMNS] block of a buffer that the copy engine fills in its four dimensions."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], buffer.dtype)
    return reinterpret(buffer.index(index), buffer.dtype, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def write_rows(ptr, stride, value, row0, row_count, ADD: gl.constexpr):
    """Add a block of rows to a matrix with contiguous columns, or store it."""
    L: gl.constexpr = value.type.layout
    rows = row0 + gl.arange(0, value.type.shape[0], gl.SliceLayout(1, L))
    columns = gl.arange(0, value.type.shape[1], gl.SliceLayout(0, L))
    pointers = ptr + (gl.expand_dims(rows, 1).to(gl.int64) * stride + gl.expand_dims(columns, 0))
    inside = gl.expand_dims(rows < row_count, 1)
    if ADD:
        value += gl.load(pointers, mask=inside, other=0.0)
    gl.store(pointers, value.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def load_keys(k_descs, v_descs, k_s, v_s, kv_full, batch, kv_head, block_begin, PARTS: gl.constexpr):
    """Have the copy engine bring PARTS blocks of K and of V."""
    mbarrier.expect(kv_full, PARTS * (panel_bytes(k_descs) + panel_bytes(v_descs)))
    for half in gl.static_range(PARTS):
        load_panels(k_descs, batch, block_begin + half * ROWS, kv_head, kv_full, k_s, half)
        load_panels(v_descs, batch, block_begin + half * ROWS, kv_head, kv_full, v_s, half)


@gluon.jit
def load_queries(descs, row_desc, tiles_s, rows_s, full, stage, batch, head, start, statistics):
    """Have the copy engine bring a block of Q and its pivots, or of dout and its deltas, to a stage."""
    full = full.index(stage)
    mbarrier.expect(full, panel_bytes(descs) + row_desc.block_type.nbytes)
    load_panels(descs, batch, start, head, full, tiles_s, stage)
    async_load(row_desc, [statistics + start], full, rows_s.index(stage))


@gluon.jit
def produce_queries(
    q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc,
    q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty,
    segments_ptr, segment_begin, segment_end, batch, kv_head, group, head0, padded_rows, block_begin,
    STAGES: gl.constexpr, STEP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Bring PARTS blocks of K and of V once, then Q, dout, pivot and delta block by block."""
    load_keys(k_descs, v_descs, k_s, v_s, kv_full, batch, kv_head, block_begin, PARTS)
    stage = 0
    phase = 0
    for member in range(group):
        head = kv_head * group + member
        statistics = (head0 + member) * padded_rows
        for segment in range(segment_begin, segment_end):
            begin = gl.load(segments_ptr + segment * 8) // STEP * STEP
            end = gl.load(segments_ptr + segment * 8 + 3)
            for start in range(begin, end, STEP):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                load_queries(q_descs, pivot_desc, q_s, pivot_s, q_full, stage, batch, head, start, statistics)
                load_queries(dout_descs, delta_desc, dout_s, delta_s, dout_full, stage, batch, head, start, statistics)
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def consume_queries(
    q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty,
    dk_ptr, dv_ptr, stride_dks, stride_dvs, segments_ptr, segment_begin, segment_end, steps, k_rows, block_begin, scale, softmax_scale,
    HALF: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 key rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = q_s[0].dtype
    # [ROWS, HEAD_DIM]
    k = tile(k_s[0], HALF, ROWS, HEAD_DIM)
    v = tile(v_s[0], HALF, ROWS, HEAD_DIM)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    zero = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    row0 = block_begin + HALF * ROWS
    whole = block_begin + BLOCK <= k_rows
    segment = segment_begin
    start, full_begin, full_end, end = load_span(segments_ptr, segment_begin, whole, STEP)
    stage = 0
    phase = 0
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(q_full.index(0), 0, pred=steps > 0)
    s = warpgroup_mma(k, tile(q_s[0], 0, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    for n in range(steps):
        # [STEP, HEAD_DIM]
        q = tile(q_s[0], stage, STEP, HEAD_DIM)
        dout = tile(dout_s[0], stage, STEP, HEAD_DIM)
        mbarrier.wait(dout_full.index(stage), phase)
        # [ROWS, STEP]
        dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        p = gl.exp2(s * scale - gl.expand_dims(pivot_s.index(stage).load(COLUMNS), 0))
        if (start < full_begin) | (start >= full_end):
            p = mask_scores(p, segments_ptr, segment, row0, start)
        p16 = gl.convert_layout(p.to(dtype), LEFT, assert_trivial=True)
        done = stage
        this_delta = delta_s.index(stage)
        stage, phase = advance(stage, phase, STAGES)
        dv_next = warpgroup_mma(p16, dout, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        p16 = opaque(p16)
        ds = (p * (dp - gl.expand_dims(this_delta.load(COLUMNS), 0))).to(dtype)
        ds = gl.convert_layout(ds, LEFT, assert_trivial=True)
        dk_next = warpgroup_mma(ds, q, dk, is_async=True)
        start += STEP
        if start >= end:
            segment += 1
            if segment == segment_end:
                segment = segment_begin
            start, full_begin, full_end, end = load_span(segments_ptr, segment, whole, STEP)
        # the next scores queue behind dk, so that the tensor cores have work while this warpgroup turns to the next step
        mbarrier.wait(q_full.index(stage), phase, pred=(n + 1) < steps)
        s_next = warpgroup_mma(k, tile(q_s[0], stage, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
        dv, dk = warpgroup_mma_wait(1, deps=[dv_next, dk_next])
        p16 = opaque(p16)
        ds = opaque(ds)
        mbarrier.arrive(empty.index(done), count=1)
        s = warpgroup_mma_wait(0, deps=[s_next])
    write_rows(dk_ptr, stride_dks, dk * softmax_scale, row0, k_rows, ADD)
    write_rows(dv_ptr, stride_dvs, dv, row0, k_rows, ADD)


@gluon.jit
def allocate_queries(
    q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, STAGES: gl.constexpr, STEP: gl.constexpr, PARTS: gl.constexpr
):
    """Shared memory for what `produce_queries` brings, and the barriers, which a fence has to follow."""
    q_s = allocate_panels(q_descs, STAGES)
    dout_s = allocate_panels(dout_descs, STAGES)
    k_s = allocate_panels(k_descs, PARTS)
    v_s = allocate_panels(v_descs, PARTS)
    pivot_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], pivot_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty


@gluon.jit
def side_by_side(program, item_count, chunk, heads):
    """(item, head) of the program of that number: `chunk` heads are gone through side by side, their longest blocks first."""
    rest = program % (item_count * chunk)
    head_index = program // (item_count * chunk) * chunk
    here = gl.minimum(chunk, heads - head_index)
    head_index += rest % here
    return rest // here, head_index


@gluon.jit
def load_item(
    item_ptr, item_count, head_index, segments_ptr, dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dvb, stride_dvh, kv_heads, group,
    STEP: gl.constexpr,
):  # fmt: skip
    """A program's block of key rows, its segments and steps; its batch and head, and where dk and dv of these begin."""
    block_begin = gl.load(item_ptr)
    segment_begin = gl.load(item_ptr + 1)
    segment_end = gl.load(item_ptr + 2)
    batch = head_index // kv_heads
    kv_head = head_index % kv_heads
    # partials of splits are those of further batches
    batches = gl.num_programs(0) // (item_count * kv_heads)
    place = (gl.load(item_ptr + 3) * batches + batch).to(gl.int64)
    dk_ptr += place * stride_dkb + kv_head.to(gl.int64) * stride_dkh
    dv_ptr += place * stride_dvb + kv_head.to(gl.int64) * stride_dvh
    steps = count_steps(segments_ptr, segment_begin, segment_end, STEP, STEP) * group
    # a block without a segment is written as zeros: it reads a segment, any one, and has no step
    segment_begin = gl.where(steps > 0, segment_begin, 0)
    segment_end = gl.where(steps > 0, segment_end, 0)
    return block_begin, segment_begin, segment_end, steps, batch, kv_head, dk_ptr, dv_ptr


@gluon.jit(do_not_specialize=["item_count", "kv_heads", "group", "padded_rows", "k_rows"])
def key_kernel(
    q_desc, k_desc, v_desc, dout_desc, pivot_desc, delta_desc, dk_ptr, dv_ptr, items_ptr, segments_ptr,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    item_count, kv_heads, group, padded_rows, k_rows, scale, softmax_scale,
    HEAD_DIM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of one block of key rows of one key/value head, over all query heads of its group."""
    q_descs, k_descs, v_descs, dout_descs = (q_desc,), (k_desc,), (v_desc,), (dout_desc,)
    q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty = allocate_queries(
        q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, STAGES, STEP, 2
    )
    fence_async_shared()
    let_next_kernel_start()

    head_index = gl.program_id(0) // item_count
    item_ptr = items_ptr + (gl.program_id(0) % item_count) * 4
    block_begin, segment_begin, segment_end, steps, batch, kv_head, dk_ptr, dv_ptr = load_item(
        item_ptr, item_count, head_index, segments_ptr, dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dvb, stride_dvh, kv_heads, group,
        STEP,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (produce_queries, (q_descs, k_descs, v_descs, dout_descs, pivot_desc, delta_desc, q_s, k_s, v_s, dout_s, pivot_s, delta_s,
                               kv_full, q_full, dout_full, empty, segments_ptr, segment_begin, segment_end, batch, kv_head, group,
                               head_index * group, padded_rows, block_begin, STAGES, STEP, 2)),
            (consume_queries, (q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty,
                               dk_ptr, dv_ptr, stride_dks, stride_dvs, segments_ptr, segment_begin, segment_end, steps,
                               k_rows, block_begin, scale, softmax_scale, 0, STAGES, STEP, HEAD_DIM, ADD)),
            (consume_queries, (q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty,
                               dk_ptr, dv_ptr, stride_dks, stride_dvs, segments_ptr, segment_begin, segment_end, steps,
                               k_rows, block_begin, scale, softmax_scale, 1, STAGES, STEP, HEAD_DIM, ADD)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@gluon.jit
def here(x):
    """x, an integer, computed anew where this stands, with the addresses that follow from it, which otherwise would take registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def stage_of_v(stage, phase, n, STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """Where V of step n is, with its barriers' phase: beside K if there are as many blocks of it, else there is one."""
    if V_STAGES == STAGES:
        return stage, phase
    else:
        return 0, n & 1


@gluon.jit
def produce_keys(
    q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty,
    segments_ptr, segment_begin, segment_end, batch, head, kv_head, block_begin,
    STAGES: gl.constexpr, V_STAGES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Bring Q and dout once, then K and V block by block."""
    mbarrier.expect(q_full, 2 * (q_desc.block_type.nbytes + dout_desc.block_type.nbytes))
    for half in gl.static_range(2):
        async_load(q_desc, [batch, block_begin + half * ROWS, head, 0], q_full, q_s.index(half))
        async_load(dout_desc, [batch, block_begin + half * ROWS, head, 0], q_full, dout_s.index(half))
    n = 0
    stage = 0
    phase = 0
    for segment in range(segment_begin, segment_end):
        begin = gl.load(segments_ptr + segment * 8)
        end = gl.load(segments_ptr + segment * 8 + 3)
        for start in range(begin, end, STEP):
            full = k_full.index(stage)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(full, k_desc.block_type.nbytes)
            async_load(k_desc, [batch, start, kv_head, 0], full, k_s.index(stage))
            v_stage, v_phase = stage_of_v(stage, phase, n, STAGES, V_STAGES)
            full = v_full.index(v_stage)
            mbarrier.wait(v_empty.index(v_stage), v_phase ^ 1)
            mbarrier.expect(full, v_desc.block_type.nbytes)
            async_load(v_desc, [batch, start, kv_head, 0], full, v_s.index(v_stage))
            n += 1
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def consume_keys(
    q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty, pivot_ptr, delta_ptr, dq_ptr, stride_dqs,
    segments_ptr, segment_begin, segment_end, steps, q_rows, block_begin, scale, softmax_scale,
    HALF: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """dq of 64 query rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dtype: gl.constexpr = q_s.dtype
    row0 = block_begin + HALF * ROWS
    # pivot and delta are padded to whole blocks: (inf, 0)
    rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    pivot = gl.load(pivot_ptr + rows)
    delta = gl.load(delta_ptr + rows)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    zero = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    segment = segment_begin
    start, full_begin, full_end, end = load_span(segments_ptr, segment_begin, True, 1)
    stage = 0
    phase = 0
    mbarrier.wait(q_full, 0)
    for n in range(steps):
        # [ROWS, HEAD_DIM]
        half = here(HALF) if HEAD_DIM > 128 else HALF
        q = tile(q_s, half, ROWS, HEAD_DIM)
        dout = tile(dout_s, half, ROWS, HEAD_DIM)
        # [STEP, HEAD_DIM]
        v_stage, v_phase = stage_of_v(stage, phase, n, STAGES, V_STAGES)
        k = tile(k_s, stage, STEP, HEAD_DIM)
        v = tile(v_s, v_stage, STEP, HEAD_DIM)
        # [ROWS, STEP]
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        dp = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s * scale - gl.expand_dims(pivot, 1))
        if (start < full_begin) | (start >= full_end):
            p = mask_scores(p, segments_ptr, segment, row0, start)
        done = stage
        stage, phase = advance(stage, phase, STAGES)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        ds = (p * (dp - gl.expand_dims(delta, 1))).to(dtype)
        ds = gl.convert_layout(ds, gl.DotOperandLayout(0, WIDE, 2), assert_trivial=True)
        dq_next = warpgroup_mma(ds, k, dq, is_async=True)
        start += STEP
        if start >= end:
            segment += 1
            if segment == segment_end:
                segment = segment_begin
            start, full_begin, full_end, end = load_span(segments_ptr, segment, True, 1)
        dq = warpgroup_mma_wait(0, deps=[dq_next])
        ds = opaque(ds)
        mbarrier.arrive(k_empty.index(done), count=1)
    write_rows(dq_ptr, stride_dqs, dq * softmax_scale, row0, q_rows, ADD)


@gluon.jit(do_not_specialize=["item_count", "heads", "group", "padded_rows", "q_rows"])
def query_kernel(
    q_desc, k_desc, v_desc, dout_desc, pivot_ptr, delta_ptr, dq_ptr, items_ptr, segments_ptr, stride_dqb, stride_dqs, stride_dqh,
    item_count, heads, group, padded_rows, q_rows, scale, softmax_scale,
    HEAD_DIM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, ADD: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq of one block of query rows of one head."""
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, ROWS, 1, HEAD_DIM], q_desc.layout)
    dout_s = gl.allocate_shared_memory(dtype, [2, 1, ROWS, 1, HEAD_DIM], dout_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, STEP, 1, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [V_STAGES, 1, STEP, 1, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        if i < V_STAGES:
            mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        if i < V_STAGES:
            mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()

    head_index = gl.program_id(0) // item_count
    item_ptr = items_ptr + (gl.program_id(0) % item_count) * 4
    block_begin = gl.load(item_ptr)
    segment_begin = gl.load(item_ptr + 1)
    segment_end = gl.load(item_ptr + 2)
    batch = head_index // heads
    head = head_index % heads
    dq_ptr += batch.to(gl.int64) * stride_dqb + head.to(gl.int64) * stride_dqh
    pivot_ptr += head_index.to(gl.int64) * padded_rows
    delta_ptr += head_index.to(gl.int64) * padded_rows
    steps = count_steps(segments_ptr, segment_begin, segment_end, STEP, 1)
    segment_begin = gl.where(steps > 0, segment_begin, 0)
    segment_end = gl.where(steps > 0, segment_end, 0)
    gl.warp_specialize(
        [
            (produce_keys, (q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty,
                            segments_ptr, segment_begin, segment_end, batch, head, head // group, block_begin, STAGES, V_STAGES, STEP)),
            (consume_keys, (q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty, pivot_ptr, delta_ptr, dq_ptr, stride_dqs,
                            segments_ptr, segment_begin, segment_end, steps, q_rows, block_begin, scale, softmax_scale,
                            0, STAGES, V_STAGES, STEP, HEAD_DIM, ADD)),
            (consume_keys, (q_s, k_s, v_s, dout_s, q_full, k_full, v_full, k_empty, v_empty, pivot_ptr, delta_ptr, dq_ptr, stride_dqs,
                            segments_ptr, segment_begin, segment_end, steps, q_rows, block_begin, scale, softmax_scale,
                            1, STAGES, V_STAGES, STEP, HEAD_DIM, ADD)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
    wait_for_kernel_before()


@triton.jit(do_not_specialize=["q_rows", "padded_rows"])
def prepare_kernel(
    row_max_ptr, row_sum_ptr, delta_ptr, pivot_ptr, padded_delta_ptr, first_ptr, counters_ptr, q_rows, padded_rows,
    ROWS: tl.constexpr, SIGN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """pivot, as in `backward.pivots`, and SIGN delta of ROWS rows of one head, padded to whole blocks with (inf, 0).

    Where turns are taken, also the counters of these rows, and behind all of them a zero.
    """
    blocks = padded_rows // ROWS
    head_index = (tl.program_id(0) // blocks).to(tl.int64)
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    inside = rows < q_rows
    row_max = tl.load(row_max_ptr + head_index * q_rows + rows, mask=inside, other=0.0)
    row_sum = tl.load(row_sum_ptr + head_index * q_rows + rows, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + head_index * q_rows + rows, mask=inside, other=0.0)
    pivot, rest = to_base2(row_max)
    empty = row_sum == 0
    pivot += rest + tl.math.log2(tl.where(empty, 1.0, row_sum))
    tl.store(pivot_ptr + head_index * padded_rows + rows, tl.where(empty, float("inf"), pivot))
    tl.store(padded_delta_ptr + head_index * padded_rows + rows, delta * SIGN)
    if counters_ptr is not None:
        COUNT: tl.constexpr = ROWS // STEP
        counters = tl.arange(0, COUNT)
        first = tl.load(first_ptr + (tl.program_id(0) % blocks) * COUNT + counters)
        tl.store(counters_ptr + tl.program_id(0) * COUNT + counters, first)
        if tl.program_id(0) == 0:
            tl.store(counters_ptr + tl.num_programs(0) * COUNT, 0)


@dataclass(frozen=True)
class Launch:
    """Rows of a step, how many steps are loaded ahead, of V (`query_kernel`) if not as many, and a multiplying thread's registers."""

    step: int
    stages: int
    v_stages: int | None = None
    registers: int = 240


# of q and k, and of v: those that this module and `hopper_backward_wide` have kernels for
HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
# by head dim; measured on an H200
KEY_LAUNCHES = {64: Launch(64, 4), 128: Launch(64, 4)}
QUERY_LAUNCHES = {64: Launch(128, 3), 128: Launch(128, 2), 256: Launch(64, 2, v_stages=1)}


def row_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """For the copy engine to load `rows` numbers of x, flat."""
    return TensorDescriptor(x, [x.numel()], [1], [rows], plain_layout(1))


def obstacle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, table: TileTable) -> str:
    """Why the Hopper kernels do not take these inputs, of whatever head dims; empty where they do, on a GPU of compute capability 9.0."""
    b, _, h, _ = q.shape
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} is not a 16-bit type"
    if not all(x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:3]) for x in (q, k, v, dout)):
        return "rows are not aligned to 16 bytes"
    if b * h * (table.q_rows + BLOCK.value) >= 2**31:
        return "too many rows for 32-bit coordinates"
    return "" if len(table.tiles) > 0 else "there are no pairs"


def backward(
    inputs: Inputs, *, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, add_q: bool, add_kv: bool
) -> None:  # fmt: skip
    """As `ringattn_kernels.backward`, of inputs in whose way there is no `obstacle`; whether to add is said of dq apart."""
    rows = prepare(inputs.statistics)
    launch_both(key_kernel, *key_arguments(inputs, *rows, dk, dv, add_kv), query_kernel, *query_arguments(inputs, *rows, dq, add_q))


def launch_both(keys, key_programs: int, key_options: dict, queries, query_programs: int, query_options: dict) -> None:
    """Launch a kernel for dk and dv and one for dq, whose programs fill the chip while the last of the former's run."""
    keys[(key_programs,)](**key_options, num_warps=4, launch_pdl=False)
    queries[(query_programs,)](**query_options, num_warps=4, launch_pdl=True)


def prepare(
    statistics: Statistics, sign: int = 1, step: int = BLOCK.value, first: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """pivot and sign * delta of whole blocks, (b * h, rows), and the counters of steps, if there are any; see `prepare_kernel`."""
    row_max, row_sum, delta = statistics
    assert row_max.is_contiguous() and row_sum.is_contiguous() and delta.is_contiguous()
    b, h, q_rows = row_max.shape
    padded_rows = whole_blocks(q_rows)
    pivot, padded_delta = torch.empty(2, b * h, padded_rows, device=row_max.device, dtype=torch.float32).unbind()
    moving = dict(
        row_max_ptr=row_max,
        row_sum_ptr=row_sum,
        delta_ptr=delta,
        pivot_ptr=pivot,
        padded_delta_ptr=padded_delta,
        first_ptr=first,
        counters_ptr=counters,
    )

    def make() -> tuple[int, dict]:
        sizes = dict(q_rows=q_rows, padded_rows=padded_rows, ROWS=BLOCK.value, SIGN=sign, STEP=step)
        return b * h * padded_rows // BLOCK.value, moving | sizes

    launches.launch(prepare_kernel, None, (sign, step), moving, make, num_warps=4)
    return pivot, padded_delta


def whole_blocks(rows: int) -> int:
    """The rows and those that fill their last block."""
    return -(-rows // BLOCK.value) * BLOCK.value


def key_arguments(
    inputs: Inputs, pivot, delta, dk, dv, add: bool, launches: dict[int, Launch] = KEY_LAUNCHES, block: int = BLOCK.value
) -> tuple[int, dict]:  # fmt: skip
    """How many programs of `key_kernel`, of `block` key rows each, and its arguments.

    dk and dv of several times the batches are partials of as many splits.
    """
    q, k, v, dout, table = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.table
    assert q.dtype == k.dtype == v.dtype == dout.dtype and q.shape[:3] == dout.shape[:3] and k.shape[:3] == v.shape[:3]
    assert (q.shape[1], k.shape[1]) == (table.q_rows, table.k_rows) and len(table.tiles) > 0
    assert (k.shape[1:], v.shape[1:]) == (dk.shape[1:], dv.shape[1:]) and dk.shape[0] == dv.shape[0]
    assert dk.stride(3) == dv.stride(3) == 1
    assert not add or dk.dtype == dv.dtype == torch.float32
    (b, _, h, d), hk = q.shape, k.shape[2]
    launch, splits = launches[d], dk.shape[0] // b
    # whole blocks in steps of one row: the kernel aligns its steps itself, and wants to know exactly which queries need no mask
    blocks = table.key_blocks(block, 1 if splits == 1 else launch.step, q.device, splits)
    count = blocks.touched if add else len(blocks)
    return b * hk * count, dict(
        q_desc=main_descriptor(q, launch.step),
        k_desc=main_descriptor(k, ROWS.value),
        v_desc=main_descriptor(v, ROWS.value),
        dout_desc=main_descriptor(dout, launch.step),
        pivot_desc=row_descriptor(pivot, launch.step),
        delta_desc=row_descriptor(delta, launch.step),
        dk_ptr=dk,
        dv_ptr=dv,
        items_ptr=blocks.items,
        segments_ptr=blocks.segments,
        **strides(dk=dk, dv=dv),
        item_count=count,
        kv_heads=hk,
        group=h // hk,
        padded_rows=pivot.shape[1],
        k_rows=table.k_rows,
        scale=inputs.softmax_scale * LOG2_E.value,
        softmax_scale=inputs.softmax_scale,
        HEAD_DIM=d,
        STEP=launch.step,
        STAGES=launch.stages,
        ADD=add,
        REGISTERS=launch.registers,
    )


def query_arguments(inputs: Inputs, pivot, delta, dq, add: bool) -> tuple[int, dict]:
    """How many programs of `query_kernel`, and its arguments."""
    q, k, v, dout, table = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.table
    assert q.shape == dq.shape and dq.stride(3) == 1
    assert not add or dq.dtype == torch.float32
    b, _, h, d = q.shape
    launch = QUERY_LAUNCHES[d]
    blocks = table.query_blocks(BLOCK.value, launch.step, q.device)
    count = blocks.touched if add else len(blocks)
    return b * h * count, dict(
        q_desc=main_descriptor(q, ROWS.value),
        k_desc=main_descriptor(k, launch.step),
        v_desc=main_descriptor(v, launch.step),
        dout_desc=main_descriptor(dout, ROWS.value),
        pivot_ptr=pivot,
        delta_ptr=delta,
        dq_ptr=dq,
        items_ptr=blocks.items,
        segments_ptr=blocks.segments,
        **strides(dq=dq),
        item_count=count,
        heads=h,
        group=h // k.shape[2],
        padded_rows=pivot.shape[1],
        q_rows=table.q_rows,
        scale=inputs.softmax_scale * LOG2_E.value,
        softmax_scale=inputs.softmax_scale,
        HEAD_DIM=d,
        STEP=launch.step,
        STAGES=launch.stages,
        V_STAGES=launch.v_stages or launch.stages,
        ADD=add,
        REGISTERS=launch.registers,
    )
