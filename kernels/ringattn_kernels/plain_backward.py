"""The backward in plain Triton: the launches of the two kernels of `gradients`.

Shapes: as in `attention.backward`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import launches
from .config import BlockConfig, architecture, described, descriptor, launch_for, padded, precision
from .distances import add_sums, subtract_distances
from .gradients import dkdv_kernel, dq_kernel
from .launches import Moving
from .modifiers import Modifiers, ModifierSums
from .pairs import zero
from .queries import Queries
from .score_arguments import facts_of, moving_score_arguments, score_arguments
from .splits import add_partials, key_splits, partial_gradients, query_splits
from .statistics import pivots
from .table import BlockTable, TileTable
from .units import LOG2_E


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
    splits: int | None,
    modifiers: Modifiers | None = None,
    sums: ModifierSums | None = None,
) -> None:
    """`ringattn_kernels.backward` by the kernels of `gradients`. add_q is for dq, add_kv for dk and dv."""
    q = queries.q
    b, _, h, d = q.shape
    hk, v_dim = v.shape[2:]
    arch = architecture(q.device)
    head_dim = max(d, v_dim)
    rows = pivots(queries.row_max, queries.row_sum, weighted=q.dtype == torch.float32)
    shared = _shared_moving(queries, k, v, *rows, softmax_scale, modifiers)
    config = launch_for("dkdv", arch, head_dim, q.dtype)
    how = key_splits(table, config.block, config.step, b * hk, h // hk, q.device, splits)
    blocks = table.key_blocks(config.block, config.step, q.device, how.most)
    add, parts = partial_gradients(how, add_kv, dk, dv)
    count = blocks.touched if add else len(blocks)
    common = queries, k, v, table, softmax_scale, *rows, blocks, count, *parts, add, config, arch, modifiers
    moving = shared | described(arch, q_desc=q, dout_desc=queries.dout) | dict(dk_ptr=parts[0], dv_ptr=parts[1])
    facts = add, how.most, config, *facts_of(modifiers)
    for gradients in launches_of(config):
        make = functools.partial(_grid_and_arguments, b * hk * count, dkdv_arguments, *common, gradients=gradients)
        launches.launch(dkdv_kernel, table, (gradients, *facts), moving, make, **config.options)
    add_partials(how, table, add_kv, parts, (dk, dv))
    config = launch_for("dq", arch, head_dim, q.dtype)
    how = query_splits(table, config.block, config.step, b * h, q.device, splits)
    blocks = table.query_blocks(config.block, config.step, q.device, how.most)
    add, parts = partial_gradients(how, add_q, dq)
    count = blocks.touched if add else len(blocks)
    slopes, values = _partial_sums(sums, b * h * count, q.device)
    common = queries, k, v, table, softmax_scale, *rows, blocks, count, *parts, add, config, arch, modifiers
    moving = shared | described(arch, k_desc=k, v_desc=v) | dict(dq_ptr=parts[0], dslopes_ptr=slopes, dvalues_ptr=values)
    make = functools.partial(_grid_and_arguments, b * h * count, dq_arguments, *common, slopes, values)
    launches.launch(dq_kernel, table, (add, how.most, config, *facts_of(modifiers)), moving, make, **config.options)
    if sums is not None and b * h * count > 0:
        _add_partial_sums(sums, b, h, slopes, values)
    add_partials(how, table, add_q, parts, (dq,))


def _grid_and_arguments(programs: int, arguments: Callable[..., dict], *inputs: Any, **options: Any) -> tuple[int, dict]:
    return programs, arguments(*inputs, **options)


def _shared_moving(queries: Queries, k, v, pivot, weight, softmax_scale: float, modifiers: Modifiers | None) -> dict[str, Moving]:
    """Of the arguments of both kernels, those that may differ between launches of a kind."""
    return dict(
        q_ptr=queries.q,
        k_ptr=k,
        v_ptr=v,
        dout_ptr=queries.dout,
        pivot_ptr=pivot,
        weight_ptr=weight,
        delta_ptr=queries.delta,
        scale=softmax_scale * LOG2_E.value,
        softmax_scale=softmax_scale,
        **moving_score_arguments(modifiers),
    )


def launches_of(config: BlockConfig) -> tuple[str, ...]:
    """What each launch of `dkdv_kernel` computes."""
    return ("dk", "dv") if config.apart else ("both",)


def _partial_sums(
    sums: ModifierSums | None, programs: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for what each program of `dq_kernel` finds for the gradients of slopes and values: (programs,) and (programs, pieces)."""
    slopes = values = None
    if sums is not None and sums.slopes is not None:
        slopes = torch.empty(programs, device=device, dtype=torch.float32)
    if sums is not None and sums.values is not None:
        values = torch.empty(programs, sums.values.shape[1], device=device, dtype=torch.float32)
        zero(values)
    return slopes, values


def _add_partial_sums(sums: ModifierSums, b: int, h: int, slopes: torch.Tensor | None, values: torch.Tensor | None) -> None:
    """Add what the programs found, in a fixed order."""
    if slopes is not None:
        subtract_distances(sums.slopes, slopes.view(b, h, -1))
    if values is not None:
        add_sums(sums.values, values.view(b, h, -1, values.shape[1]))


def _shared_arguments(
    queries: Queries, k, v, table: TileTable, softmax_scale: float, pivot, weight, blocks: BlockTable, count: int, add: bool,
    config: BlockConfig, arch: str, modifiers: Modifiers | None,
) -> dict:  # fmt: skip
    """Keyword arguments that both gradient kernels take."""
    q, dout, delta = queries.q, queries.dout, queries.delta
    d, (hk, v_dim) = q.shape[3], v.shape[2:]
    assert q.dtype == k.dtype == v.dtype == dout.dtype
    assert q.stride(3) == k.stride(3) == v.stride(3) == dout.stride(3) == 1 and delta.is_contiguous()
    assert (q.shape[1], k.shape[1], v.shape[1]) == (table.q_rows, table.k_rows, table.k_rows)
    return _shared_moving(queries, k, v, pivot, weight, softmax_scale, modifiers) | dict(
        items_ptr=blocks.items,
        segments_ptr=blocks.segments,
        **launches.strides(q=q, k=k, v=v, o=dout),
        item_count=count,
        group=q.shape[2] // hk,
        q_rows=table.q_rows,
        HEAD_DIM=d,
        V_DIM=v_dim,
        BLOCK_D=padded(d),
        BLOCK_DV=padded(v_dim),
        ADD=add,
        WEIGHTED=weight is not None,
        PRECISION=precision(q.dtype, arch, max(d, v_dim)),
        **score_arguments(modifiers, blocks, table, q.device),
    )


def dkdv_arguments(
    queries: Queries, k, v, table: TileTable, softmax_scale: float, pivot, weight, blocks: BlockTable, count: int, dk, dv, add: bool,
    config: BlockConfig, arch: str, modifiers: Modifiers | None = None, gradients: str = "both",
) -> dict:  # fmt: skip
    """Keyword arguments of one launch of `dkdv_kernel`."""
    assert not add or dk.dtype == dv.dtype == torch.float32
    # the partials of n splits have n times as many batches
    assert dk.shape[1:] == k.shape[1:]
    assert dv.shape[1:] == v.shape[1:]
    assert dk.stride(3) == dv.stride(3) == 1
    return _shared_arguments(
        queries, k, v, table, softmax_scale, pivot, weight, blocks, count, add, config, arch, modifiers
    ) | dict(
        q_desc=descriptor(queries.q, config.step, arch),
        dout_desc=descriptor(queries.dout, config.step, arch),
        dk_ptr=dk,
        dv_ptr=dv,
        **launches.strides(dk=dk, dv=dv),
        kv_heads=k.shape[2],
        k_rows=table.k_rows,
        BLOCK_K=config.block,
        BLOCK_Q=config.step,
        GRADIENTS=gradients,
    )


def dq_arguments(
    queries: Queries, k, v, table: TileTable, softmax_scale: float, pivot, weight, blocks: BlockTable, count: int, dq, add: bool,
    config: BlockConfig, arch: str, modifiers: Modifiers | None = None, dslopes: torch.Tensor | None = None,
    dvalues: torch.Tensor | None = None,
) -> dict:  # fmt: skip
    """Keyword arguments of one launch of `dq_kernel`."""
    assert not add or dq.dtype == torch.float32
    # the partials of n splits have n times as many batches
    assert dq.shape[1:] == queries.q.shape[1:]
    assert dq.stride(3) == 1
    return _shared_arguments(
        queries, k, v, table, softmax_scale, pivot, weight, blocks, count, add, config, arch, modifiers
    ) | dict(
        k_desc=descriptor(k, config.step, arch),
        v_desc=descriptor(v, config.step, arch),
        dq_ptr=dq,
        dslopes_ptr=dslopes,
        dvalues_ptr=dvalues,
        **launches.strides(dq=dq),
        heads=queries.q.shape[2],
        BLOCK_Q=config.block,
        BLOCK_K=config.step,
    )
