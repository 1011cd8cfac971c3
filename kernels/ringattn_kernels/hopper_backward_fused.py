"""Exact attention over a tile table, backward, for Hopper, in one pass of five products: dq is added in no fixed order.

    P = exp2(scale Q K^T - pivot)        dV += P^T dout
    dS = P * (dout V^T - delta)          dK += softmax_scale dS^T Q      dQ += softmax_scale dS K

A program owns 128 key rows of one key/value head and meets blocks of queries of all heads of its group, as in
`hopper_backward.key_kernel`. Besides, dS goes through shared memory for the product with K, and the copy engine adds the result to
sums of dq in global memory, in fp32, to which any number of launches may add. `finish` scales the sums and adds them to dq, or writes it.
dk and dv are the same bits from the same inputs; dq is up to rounding, for which of two programs adds first is not fixed.

Shapes: as in `backward`.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gluon_words import async_add_shared_to_global, plain_layout
from .hopper_backward import (
    BLOCK,
    ROWS,
    Launch,
    allocate_queries,
    key_arguments,
    load_item,
    load_span,
    mask_scores,
    opaque,
    prepare,
    produce_queries,
    tile,
    whole_blocks,
    write_rows,
)
from .inputs import Inputs

WIDTH = gl.constexpr(64)  # rows and columns of the part of dq that a warpgroup computes
SUMS = gl.constexpr(256)  # sums of dq in a row of their buffer


@gluon.jit
def start_dq(k_s, ds_s, buffer, zero, HALF: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """This warpgroup's part of dS K: half of the rows if a step has 128, else half of the columns."""
    dq = zero
    for part in gl.static_range(2):
        ds = ds_s.index(buffer * 2 + part)
        k = tile(k_s, part, ROWS, HEAD_DIM)
        if STEP == 128:
            ds = ds.slice(HALF * WIDTH, WIDTH, dim=1)
        else:
            k = k.slice(HALF * WIDTH, WIDTH, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(sums_desc, staging, dq, row, HALF: gl.constexpr, STEP: gl.constexpr):
    """Have the copy engine add this warpgroup's part of dq to the sums, in the order in which its threads hold it."""
    tma.store_wait(0)
    # warp, half of its rows, row, group of columns, pair, column: a thread's four sums side by side, no two threads in one bank
    x = gl.reshape(dq, [4, 2, 8, 8, 4, 2])
    x = gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [WIDTH * WIDTH // SUMS, SUMS])
    staging.index(HALF).store(x)
    fence_async_shared()
    # STEP rows of dq are two parts of WIDTH**2 sums: 1 / 2 row of SUMS each where a step has 64, 1 / 4 where it has 128
    SHIFT: gl.constexpr = 1 if STEP == 64 else 2
    async_add_shared_to_global(sums_desc, [(row >> SHIFT) + HALF * (WIDTH * WIDTH // SUMS), 0], staging.index(HALF))


@gluon.jit
def consume_and_add(
    q_s, k_s, v_s, dout_s, pivot_s, delta_s, ds_s, staging, kv_full, q_full, dout_full, empty, ds_full,
    sums_desc, dk_ptr, dv_ptr, stride_dks, stride_dvs, segments_ptr, segment_begin, segment_end, steps,
    head_row, last_row, padded_rows, k_rows, block_begin, scale, softmax_scale,
    HALF: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, HEAD_DIM: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 key rows, and this warpgroup's part of each step's dq."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    # buffers of dS: one more than stages, so that room for the queries of a step means room for its dS
    BUFFERS: gl.constexpr = STAGES + 1
    dtype: gl.constexpr = q_s.dtype
    # [ROWS, HEAD_DIM]
    k = tile(k_s, HALF, ROWS, HEAD_DIM)
    v = tile(v_s, HALF, ROWS, HEAD_DIM)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, WIDE)
    zero = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    zero_part = gl.zeros([WIDTH, WIDTH], gl.float32, PART)
    row0 = block_begin + HALF * ROWS
    whole = block_begin + BLOCK <= k_rows
    segment = segment_begin
    start, full_begin, full_end, end = load_span(segments_ptr, segment_begin, whole, STEP)
    stage = 0
    phase = 0
    buffer = 0
    turn = 0
    # there is no step before the first: what that adds is past the end of the sums, and the copy engine leaves it out
    last_buffer = BUFFERS - 1
    last_turn = 1
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(q_full.index(0), 0, pred=steps > 0)
    s = warpgroup_mma(k, tile(q_s, 0, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    for n in range(steps):
        # [STEP, HEAD_DIM]
        q = tile(q_s, stage, STEP, HEAD_DIM)
        dout = tile(dout_s, stage, STEP, HEAD_DIM)
        mbarrier.wait(dout_full.index(stage), phase)
        # [ROWS, STEP]
        # what comes as delta is -delta
        dp = gl.expand_dims(delta_s.index(stage).load(COLUMNS), 0).broadcast_to([ROWS, STEP])
        dp = warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
        p = gl.exp2(s * scale - gl.expand_dims(pivot_s.index(stage).load(COLUMNS), 0))
        if (start < full_begin) | (start >= full_end):
            p = mask_scores(p, segments_ptr, segment, row0, start)
        p16 = gl.convert_layout(p.to(dtype), LEFT, assert_trivial=True)
        done = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        dv_next = warpgroup_mma(p16, dout, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        p16 = opaque(p16)
        shared_ds = (p * dp).to(dtype)
        ds = gl.convert_layout(shared_ds, LEFT, assert_trivial=True)
        # started first, so that the tensor cores have work while the two warpgroups exchange dS
        dk_next = warpgroup_mma(ds, q, dk, is_async=True)
        ds_s.index(buffer * 2 + HALF).store(shared_ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(buffer), count=1)
        # dq of the step before, so that neither warpgroup waits for the other
        mbarrier.wait(ds_full.index(last_buffer), last_turn, pred=n > 0)
        dq = start_dq(k_s, ds_s, last_buffer, zero_part, HALF, STEP, HEAD_DIM)
        this_row = head_row + start
        last_buffer = buffer
        last_turn = turn
        buffer += 1
        if buffer == BUFFERS:
            buffer = 0
            turn ^= 1
        start += STEP
        if start >= end:
            segment += 1
            if segment == segment_end:
                segment = segment_begin
                head_row += padded_rows
            start, full_begin, full_end, end = load_span(segments_ptr, segment, whole, STEP)
        dv, dk, dq = warpgroup_mma_wait(0, deps=[dv_next, dk_next, dq])
        p16 = opaque(p16)
        ds = opaque(ds)
        mbarrier.arrive(empty.index(done), count=1)
        mbarrier.wait(q_full.index(stage), phase, pred=(n + 1) < steps)
        s_next = warpgroup_mma(k, tile(q_s, stage, STEP, HEAD_DIM).permute((1, 0)), zero, use_acc=False, is_async=True)
        add_dq(sums_desc, staging, dq, last_row, HALF, STEP)
        last_row = this_row
        s = warpgroup_mma_wait(0, deps=[s_next])
    mbarrier.wait(ds_full.index(last_buffer), last_turn, pred=steps > 0)
    dq = start_dq(k_s, ds_s, last_buffer, zero_part, HALF, STEP, HEAD_DIM)
    dq = warpgroup_mma_wait(0, deps=[dq])
    add_dq(sums_desc, staging, dq, last_row, HALF, STEP)
    write_rows(dk_ptr, stride_dks, dk * softmax_scale, row0, k_rows, ADD)
    write_rows(dv_ptr, stride_dvs, dv, row0, k_rows, ADD)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["item_count", "chunk", "heads", "kv_heads", "group", "padded_rows", "k_rows"])
def fused_kernel(
    q_desc, k_desc, v_desc, dout_desc, pivot_desc, delta_desc, sums_desc, dk_ptr, dv_ptr, items_ptr, segments_ptr,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    item_count, chunk, heads, kv_heads, group, padded_rows, k_rows, scale, softmax_scale,
    HEAD_DIM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of one block of key rows of one key/value head over all query heads of its group, and what it adds to their dq."""
    BUFFERS: gl.constexpr = STAGES + 1
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STEP], q_desc.dtype)
    q_s, k_s, v_s, dout_s, pivot_s, delta_s, kv_full, q_full, dout_full, empty = allocate_queries(
        q_desc, k_desc, v_desc, dout_desc, pivot_desc, delta_desc, STAGES, STEP, HEAD_DIM, 2
    )
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS * 2, ROWS, STEP], DS)
    staging = gl.allocate_shared_memory(gl.float32, [2, WIDTH * WIDTH // SUMS, SUMS], sums_desc.layout)
    ds_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ds_full.index(i), count=2)
    fence_async_shared()

    # several heads side by side, their longest blocks first
    rest = gl.program_id(0) % (item_count * chunk)
    head_index = gl.program_id(0) // (item_count * chunk) * chunk
    here = gl.minimum(chunk, heads - head_index)
    head_index += rest % here
    item_ptr = items_ptr + (rest // here) * 4
    block_begin, segment_begin, segment_end, steps, batch, kv_head, dk_ptr, dv_ptr = load_item(
        item_ptr,
        item_count,
        head_index,
        segments_ptr,
        dk_ptr,
        dv_ptr,
        stride_dkb,
        stride_dkh,
        stride_dvb,
        stride_dvh,
        kv_heads,
        group,
        STEP,
    )
    gl.warp_specialize(
        [
            (produce_queries, (q_desc, k_desc, v_desc, dout_desc, pivot_desc, delta_desc, q_s, k_s, v_s, dout_s, pivot_s, delta_s,
                               kv_full, q_full, dout_full, empty, segments_ptr, segment_begin, segment_end, batch, kv_head, group,
                               head_index * group, padded_rows, block_begin, STAGES, STEP, 2)),
            (consume_and_add, (q_s, k_s, v_s, dout_s, pivot_s, delta_s, ds_s, staging, kv_full, q_full, dout_full, empty, ds_full,
                       sums_desc, dk_ptr, dv_ptr, stride_dks, stride_dvs, segments_ptr, segment_begin, segment_end, steps,
                       head_index * group * padded_rows, heads * group * padded_rows, padded_rows, k_rows, block_begin,
                       scale, softmax_scale, 0, STAGES, STEP, HEAD_DIM, ADD)),
            (consume_and_add, (q_s, k_s, v_s, dout_s, pivot_s, delta_s, ds_s, staging, kv_full, q_full, dout_full, empty, ds_full,
                       sums_desc, dk_ptr, dv_ptr, stride_dks, stride_dvs, segments_ptr, segment_begin, segment_end, steps,
                       head_index * group * padded_rows, heads * group * padded_rows, padded_rows, k_rows, block_begin,
                       scale, softmax_scale, 1, STAGES, STEP, HEAD_DIM, ADD)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "q_rows", "padded_rows"])
def finish_kernel(
    sums_ptr, dq_ptr, stride_b, stride_s, stride_h, heads, q_rows, padded_rows, softmax_scale,
    HEAD_DIM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq of 64 rows of one head from its sums, whose order is that of `add_dq`."""
    ROWS: tl.constexpr = 64
    blocks = padded_rows // ROWS
    head_index = tl.program_id(0) // blocks
    sums = tl.load(sums_ptr + tl.program_id(0).to(tl.int64) * (ROWS * HEAD_DIM) + tl.arange(0, ROWS * HEAD_DIM))
    # part, group of columns, warp, row, pair, half of a warp's rows, column
    sums = tl.reshape(sums, [HEAD_DIM // 64, 8, 4, 8, 4, 2, 2])
    # [ROWS, HEAD_DIM]
    dq = tl.reshape(tl.permute(sums, [2, 5, 3, 0, 1, 4, 6]), [ROWS, HEAD_DIM]) * softmax_scale
    rows = ((tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, HEAD_DIM)[None, :]
    inside = rows < q_rows
    dq_ptr += (head_index // heads).to(tl.int64) * stride_b + (head_index % heads).to(tl.int64) * stride_h
    pointers = dq_ptr + (rows.to(tl.int64) * stride_s + columns)
    if ADD:
        dq += tl.load(pointers, mask=inside)
    tl.store(pointers, dq.to(dq_ptr.dtype.element_ty), mask=inside)


# by head dim; measured on an H200
LAUNCHES = {64: Launch(128, 2), 128: Launch(64, 2)}
# programs at least of which the heads that run side by side have; measured on an H200
SIDE_BY_SIDE = 256


def block_and_step(head_dim: int) -> tuple[int, int]:
    """Key rows of a program, and query rows of its steps."""
    return BLOCK.value, LAUNCHES[head_dim].step


def zero_sums(q: torch.Tensor) -> torch.Tensor:
    """For launches with q to add dq to: fp32 (b * h, sq in whole blocks, d), each 64 x 64 part in the order of `add_dq`."""
    b, q_rows, h, d = q.shape
    return torch.zeros(b * h, whole_blocks(q_rows), d, device=q.device, dtype=torch.float32)


def finish(sums: torch.Tensor, dq: torch.Tensor, softmax_scale: float, add: bool) -> None:
    """Scale the sums, and add them to dq (b, sq, h, d), in fp32, or overwrite it, in any dtype."""
    b, q_rows, h, d = dq.shape
    assert sums.shape == (b * h, whole_blocks(q_rows), d) and dq.stride(3) == 1
    assert not add or dq.dtype == torch.float32
    finish_kernel[(sums.shape[0] * sums.shape[1] // ROWS.value,)](
        sums, dq, *dq.stride()[:3], h, q_rows, sums.shape[1], softmax_scale, HEAD_DIM=d, ADD=add
    )


def sums_descriptor(sums: torch.Tensor) -> TensorDescriptor:
    """For the copy engine to add one part of a step's dq."""
    shape, block = [sums.numel() // SUMS.value, SUMS.value], [WIDTH.value**2 // SUMS.value, SUMS.value]
    return TensorDescriptor(sums, shape, [SUMS.value, 1], block, plain_layout(2))


def backward(inputs: Inputs, *, sums: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, add: bool) -> None:
    """As `ringattn_kernels.backward`, of inputs in whose way there is no `hopper_backward.obstacle`, but dq is added to `sums`."""
    pivot, minus_delta = prepare(inputs, sign=-1)
    grid, arguments = fused_arguments(inputs, pivot, minus_delta, sums, dk, dv, add)
    fused_kernel[(grid,)](**arguments, num_warps=4)


def fused_arguments(inputs: Inputs, pivot, minus_delta, sums, dk, dv, add: bool) -> tuple[int, dict]:
    """How many programs of `fused_kernel`, and its arguments: those of `key_kernel`, the sums, and how heads run side by side."""
    b, q_rows, h, d = inputs.q.shape
    assert sums.shape == (b * h, whole_blocks(q_rows), d) and sums.is_contiguous()
    grid, arguments = key_arguments(inputs, pivot, minus_delta, dk, dv, add, LAUNCHES)
    return grid, arguments | dict(
        sums_desc=sums_descriptor(sums),
        chunk=max(2, SIDE_BY_SIDE // arguments["item_count"]),
        heads=b * inputs.k.shape[2],
    )
