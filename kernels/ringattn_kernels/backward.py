"""Exact attention over a tile table, backward.

    P = exp(S - row_max) / row_sum        dV += P^T dout
    dS = P * (dout V^T - delta)           dQ += softmax_scale dS K      dK += softmax_scale dS^T Q

(Dao et al. 2022, algorithm 4), from the statistics of the whole row, whichever launches they were merged from. One kernel owns
blocks of key rows and adds to dk and dv once, another owns blocks of query rows and adds to dq, so that the same inputs give the
same bits. Where that is faster one kernel does both, and adds to dq in no fixed order, or, if deterministic results are asked for, in one.

Shapes: q, dq (b, sq, h, d), k, dk (b, sk, hk, d), v, dv (b, sk, hk, dv), dout (b, sq, h, dv), row_max, row_sum, delta (b, h, sq).
"""

import torch
import triton
import triton.language as tl

from . import hopper, launches
from .bands import load_rows
from .config import Launch, architecture, descriptor, launch_for, padded, precision
from .dispatch import Kernels, look_up_backward
from .forward import LOG2_E
from .gradients import dkdv_kernel, dq_kernel
from .inputs import Inputs
from .launches import strides
from .query_sums import QuerySums
from .splits import add_partials, key_splits, partial_gradients, query_splits
from .table import BlockTable, TileTable
from .units import to_base2


def delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """rowsum(dout * out), fp32 (b, h, sq), of out and dout (b, sq, h, dv)."""
    b, sq, h, dv = out.shape
    result = torch.empty(b, h, sq, device=out.device, dtype=torch.float32)
    assert out.shape == dout.shape and out.stride(3) == dout.stride(3) == 1
    block = 16 if out.device.type == "cpu" else 64
    moving = dict(out_ptr=out, dout_ptr=dout, delta_ptr=result)

    def make() -> tuple[int, dict]:
        sizes = dict(heads=h, q_rows=sq, V_DIM=dv, BLOCK_DV=padded(dv), BLOCK_Q=block)
        return b * h * triton.cdiv(sq, block), moving | strides(o=out, g=dout) | sizes

    if result.numel() > 0:
        launches.launch(delta_kernel, None, (block,), moving, make, num_warps=4)
    return result


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    delta: torch.Tensor,
    table: TileTable,
    *,
    softmax_scale: float,
    dq: torch.Tensor | QuerySums,
    dk: torch.Tensor,
    dv: torch.Tensor,
    add: bool = True,
    kernels: Kernels | None = None,
    deterministic: bool | None = None,
    splits: int | None = None,
) -> None:
    """Add the gradients of the table's pairs to fp32 dq, dk and dv, in place; any strides, last dim contiguous.

    row_max, row_sum: merged over all launches of the forward. delta: `delta(out, dout)`, less the gradient of the log-sum-exp
    if it has one. add=False overwrites all of dq, dk and dv instead, whatever they held, and takes them in any floating-point
    dtype: for a table that holds all pairs of its queries and keys this saves the zeroing, the reading and a cast.

    dq may be `QuerySums` instead, which are for several launches with one q. They are always added to, and `add` is said of dk and
    dv: of several launches, those that first meet their keys may overwrite.

    kernels: which to run, instead of what `dispatch.choose_backward` would choose.
    splits: among how many programs the longest block's steps are split, instead of what `splits.best` would choose.
    deterministic: whether the same inputs must give the same bits, at some cost in speed; dk and dv always do. By default what
    `torch.use_deterministic_algorithms` has been told.
    """
    chosen = look_up_backward(q, k, v, dout, table, kernels, deterministic)
    inputs = Inputs(q, k, v, dout, row_max, row_sum, delta, table, softmax_scale)
    if isinstance(dq, QuerySums):
        assert dq.q.shape == q.shape and dq.softmax_scale == softmax_scale
    if chosen in (Kernels.HOPPER, Kernels.HOPPER_ORDERED) and splits not in (None, 1):
        raise ValueError(f"splits is {splits}, but {chosen} splits no block: pass 1 or none")
    if chosen in (Kernels.HOPPER_FUSED, Kernels.HOPPER_ORDERED):
        ordered = chosen == Kernels.HOPPER_ORDERED
        sums = dq.permuted() if isinstance(dq, QuerySums) else hopper.fused.zero_sums(q)
        how = key_splits(
            table,
            *hopper.fused.block_and_step(q.shape[3]),
            k.shape[0] * k.shape[2],
            q.shape[2] // k.shape[2],
            q.device,
            1 if ordered else splits,
        )
        prepared = dq.prepared(inputs.statistics) if isinstance(dq, QuerySums) and not ordered else None
        add_kv, (dk_part, dv_part) = partial_gradients(how, add, dk, dv)
        hopper.fused.backward(inputs, prepared=prepared, sums=sums, dk=dk_part, dv=dv_part, add=add_kv, ordered=ordered)
        add_partials(how, table, add, (dk_part, dv_part), (dk, dv))
        if isinstance(dq, torch.Tensor):
            hopper.fused.finish(sums, dq, softmax_scale, add)
        return
    rows, add_q = dq.rows() if isinstance(dq, QuerySums) else (dq, add)
    if chosen == Kernels.PLAIN:
        _plain_backward(inputs, dq=rows, dk=dk, dv=dv, add_q=add_q, add_kv=add, splits=splits)
        return
    run = hopper.wide.backward if q.shape[3] in hopper.wide.KEY_LAUNCHES else hopper.backward.backward
    run(inputs, dq=rows, dk=dk, dv=dv, add_q=add_q, add_kv=add)


def _plain_backward(
    inputs: Inputs, *, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, add_q: bool, add_kv: bool, splits: int | None
) -> None:  # fmt: skip
    """`backward` by the kernels of `gradients`; whether to add is said of dq apart."""
    q, table = inputs.q, inputs.table
    b, _, h, d = q.shape
    hk, v_dim = inputs.v.shape[2:]
    arch = architecture(q.device)
    head_dim = max(d, v_dim)
    rows = pivots(inputs.row_max, inputs.row_sum, weighted=q.dtype == torch.float32)
    launch = launch_for("dkdv", arch, head_dim, q.dtype)
    how = key_splits(table, launch.block, launch.step, b * hk, h // hk, q.device, splits)
    blocks = table.key_blocks(launch.block, launch.step, q.device, how.most)
    add, parts = partial_gradients(how, add_kv, dk, dv)
    count = blocks.touched if add else len(blocks)
    if b * hk * count > 0:
        dkdv_kernel[(b * hk * count,)](**dkdv_arguments(inputs, *rows, blocks, count, *parts, add, launch, arch))
    add_partials(how, table, add_kv, parts, (dk, dv))
    launch = launch_for("dq", arch, head_dim, q.dtype)
    how = query_splits(table, launch.block, launch.step, b * h, q.device, splits)
    blocks = table.query_blocks(launch.block, launch.step, q.device, how.most)
    add, parts = partial_gradients(how, add_q, dq)
    count = blocks.touched if add else len(blocks)
    if b * h * count > 0:
        dq_kernel[(b * h * count,)](**dq_arguments(inputs, *rows, blocks, count, *parts, add, launch, arch))
    add_partials(how, table, add_q, parts, (dq,))


def pivots(row_max: torch.Tensor, row_sum: torch.Tensor, weighted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(pivot, weight), shaped as the statistics, with P = exp2(scores * scale - pivot) * weight; an empty row has pivot inf.

    Not weighted: log2(row_sum) goes into the pivot and the weight is None, which saves a multiplication for each pair and costs
    half an ulp of the pivot. That is below the rounding of P to 16 bits unless logits exceed 1e4.
    """
    assert row_max.is_contiguous()
    assert row_sum.is_contiguous()
    pivot = torch.empty_like(row_max)
    weight = torch.empty_like(row_sum) if weighted else None
    count, block = row_max.numel(), 1024
    if count > 0:
        pivot_kernel[(triton.cdiv(count, block),)](row_max, row_sum, pivot, weight, count, BLOCK=block)
    return pivot, weight


def _shared_arguments(
    inputs: Inputs, pivot, weight, blocks: BlockTable, count: int, add: bool, launch: Launch, arch: str
) -> dict:  # fmt: skip
    """Keyword arguments that both gradient kernels take."""
    q, k, v, dout, delta, table = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.delta, inputs.table
    d, (hk, v_dim) = q.shape[3], v.shape[2:]
    assert q.dtype == k.dtype == v.dtype == dout.dtype
    assert q.stride(3) == k.stride(3) == v.stride(3) == dout.stride(3) == 1 and delta.is_contiguous()
    assert (q.shape[1], k.shape[1], v.shape[1]) == (table.q_rows, table.k_rows, table.k_rows)
    return dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        dout_ptr=dout,
        pivot_ptr=pivot,
        weight_ptr=weight,
        delta_ptr=delta,
        items_ptr=blocks.items,
        segments_ptr=blocks.segments,
        **strides(q=q, k=k, v=v, o=dout),
        item_count=count,
        group=q.shape[2] // hk,
        q_rows=table.q_rows,
        scale=inputs.softmax_scale * LOG2_E,
        softmax_scale=inputs.softmax_scale,
        HEAD_DIM=d,
        V_DIM=v_dim,
        BLOCK_D=padded(d),
        BLOCK_DV=padded(v_dim),
        ADD=add,
        WEIGHTED=weight is not None,
        PRECISION=precision(q.dtype, arch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def dkdv_arguments(
    inputs: Inputs, pivot, weight, blocks: BlockTable, count: int, dk, dv, add: bool, launch: Launch, arch: str
) -> dict:  # fmt: skip
    """Keyword arguments of one launch of `dkdv_kernel`."""
    assert not add or dk.dtype == dv.dtype == torch.float32
    # of splits, they have several times the batches
    assert dk.shape[1:] == inputs.k.shape[1:]
    assert dv.shape[1:] == inputs.v.shape[1:]
    assert dk.stride(3) == dv.stride(3) == 1
    return _shared_arguments(inputs, pivot, weight, blocks, count, add, launch, arch) | dict(
        q_desc=descriptor(inputs.q, launch.step, arch),
        dout_desc=descriptor(inputs.dout, launch.step, arch),
        dk_ptr=dk,
        dv_ptr=dv,
        **strides(dk=dk, dv=dv),
        kv_heads=inputs.k.shape[2],
        k_rows=inputs.table.k_rows,
        BLOCK_K=launch.block,
        BLOCK_Q=launch.step,
    )


def dq_arguments(
    inputs: Inputs, pivot, weight, blocks: BlockTable, count: int, dq, add: bool, launch: Launch, arch: str
) -> dict:  # fmt: skip
    """Keyword arguments of one launch of `dq_kernel`."""
    assert not add or dq.dtype == torch.float32
    # of splits, it has several times the batches
    assert dq.shape[1:] == inputs.q.shape[1:]
    assert dq.stride(3) == 1
    return _shared_arguments(inputs, pivot, weight, blocks, count, add, launch, arch) | dict(
        k_desc=descriptor(inputs.k, launch.step, arch),
        v_desc=descriptor(inputs.v, launch.step, arch),
        dq_ptr=dq,
        **strides(dq=dq),
        heads=inputs.q.shape[2],
        BLOCK_Q=launch.block,
        BLOCK_K=launch.step,
    )


@triton.jit(do_not_specialize=["heads", "q_rows"])
def delta_kernel(
    out_ptr, dout_ptr, delta_ptr, stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, heads, q_rows,
    V_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """delta_i = sum_c out_ic dout_ic of one block of rows of one head."""
    blocks = tl.cdiv(q_rows, BLOCK_Q)
    head_index = tl.program_id(0) // blocks
    start = (tl.program_id(0) % blocks) * BLOCK_Q
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    # [BLOCK_Q, BLOCK_DV]
    out = load_rows(out_ptr + batch * stride_ob + head * stride_oh, start, stride_os, q_rows, BLOCK_Q, V_DIM, BLOCK_DV, True)
    dout = load_rows(dout_ptr + batch * stride_gb + head * stride_gh, start, stride_gs, q_rows, BLOCK_Q, V_DIM, BLOCK_DV, True)
    rows = start + tl.arange(0, BLOCK_Q)
    total = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + head_index.to(tl.int64) * q_rows + rows, total, mask=rows < q_rows)


@triton.jit
def pivot_kernel(row_max_ptr, row_sum_ptr, pivot_ptr, weight_ptr, count, BLOCK: tl.constexpr):
    """(pivot, weight) of the statistics; see `pivots`."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    row_max = tl.load(row_max_ptr + offsets, mask=mask, other=0.0)
    row_sum = tl.load(row_sum_ptr + offsets, mask=mask, other=0.0)
    pivot, rest = to_base2(row_max)
    empty = row_sum == 0
    if weight_ptr is None:
        pivot += rest + tl.math.log2(tl.where(empty, 1.0, row_sum))
    else:
        weight = tl.where(empty, 0.0, tl.math.exp2(-rest) / row_sum)
        tl.store(weight_ptr + offsets, weight, mask=mask)
    tl.store(pivot_ptr + offsets, tl.where(empty, float("inf"), pivot), mask=mask)
