"""Exact attention over a tile table: `forward` and `backward` choose kernels, split long blocks, and launch.

Forward, by the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022):

    out = sum_j exp(s_ij - row_max_i) v_j / row_sum_i,   s_ij = softmax_scale * q_i . k_j

Backward (Dao et al. 2022, algorithm 4), from the statistics of the whole row, whichever launches they were merged from:

    P = exp(S - row_max) / row_sum        dV += P^T dout
    dS = P * (dout V^T - delta)           dQ += softmax_scale dS K      dK += softmax_scale dS^T Q

Shapes: q, dq (b, sq, h, d), k, dk (b, sk, hk, d), v, dv (b, sk, hk, dv), out and dout (b, sq, h, dv), row_max, row_sum, delta (b, h, sq).
"""

from typing import Any

import numpy as np
import torch

from . import dispatch, hopper, plain_backward, plain_forward
from .config import architecture, launch_for
from .continued import ContinuedRows, RowPart, continued_part
from .dispatch import Kernels
from .modifiers import Modifiers, ModifierSums
from .queries import Queries
from .query_sums import QuerySums
from .splits import Splits, State, add_partials, key_splits, merge, partial_gradients, partials, query_splits
from .table import TileTable


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: TileTable,
    *,
    softmax_scale: float,
    modifiers: Modifiers | None = None,
    sinks: torch.Tensor | None = None,
    state: State | None = None,
    final: bool = True,
    continued: ContinuedRows | None = None,
    kernels: Kernels | None = None,
    splits: int | None = None,
) -> State:
    """Attend to the table's pairs; returns (out, row_max, row_sum) of all rows.

    A running state of earlier launches may come in and leave, so that no separate pass merges the hops of a ring.

    state: (out, row_max, row_sum) of earlier launches over other pairs, fp32 and contiguous, updated in place. final: out leaves
    in q.dtype, a fresh tensor; otherwise it is the fp32 state. row_max is in natural-log units after scaling, and row_sum is
    relative to exactly it; a row with no live pair so far is (0, -inf, 0).

    continued: the same for all launches of a pass, of `continued_rows`. Other rows than those that go on are then done with the first
    launch. In the state they are undefined, except for their statistics.

    modifiers: what else is done to scores and weights; those that depend on positions need a table with places. sinks: (h,), fp32, one
    more score a row, for rows that leave as final.

    kernels: which kernels to run, instead of the choice of `dispatch.choose_forward`.
    splits: the number of programs that share the keys of the longest query block, instead of the choice of `split_choice.best`.
    """
    b, sq, h, _ = q.shape
    if state is None:
        out = torch.empty(b, sq, h, v.shape[3], device=q.device, dtype=q.dtype if final else torch.float32)
        row_max = torch.empty(b, h, sq, device=q.device, dtype=torch.float32)
        row_sum = torch.empty_like(row_max)
    else:
        out, row_max, row_sum = state
        assert out.dtype == torch.float32 and out.is_contiguous() and row_max.is_contiguous() and row_sum.is_contiguous()
        if final:
            out = torch.empty(out.shape, device=q.device, dtype=q.dtype) if continued is None else continued.out
    _check_places(modifiers, table)
    assert sinks is None or (sinks.shape == (h,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
    counted = sinks if final else None
    part = continued.part if continued is not None and final else None
    on_hopper, config, how = forward_choice(q, k, v, table, softmax_scale, kernels, splits, modifiers, part)
    launch = hopper.forward.launch if on_hopper else plain_forward.launch
    if continued is not None and (state is None or (final and how.most == 1)):
        assert on_hopper and how.most == 1 and modifiers is None and final is (state is not None)
        goes_on = q, k, v, table, out, row_max, row_sum, softmax_scale, state, False, 1, config
        launch(*goes_on, part=continued.part, sinks=counted)
        if state is None:
            done = q, k, v, table, continued.out, row_max, row_sum, softmax_scale, None, False, 1, config
            launch(*done, part=continued.part.others, sinks=sinks)
    elif how.most > 1:
        # the state is merged with the splits' partials
        partial = partials(how, q, v.shape[3])
        launch(q, k, v, table, *partial, softmax_scale, None, True, how.most, config, modifiers=modifiers)
        merge(how, table, partial, state, out, row_max, row_sum, final, counted)
    else:
        # a block without a segment must be written too, unless its state stays as it is
        touched_only = state is not None and not final
        given = q, k, v, table, out, row_max, row_sum, softmax_scale, state, touched_only, 1, config
        launch(*given, modifiers=modifiers, sinks=counted)
    return out, row_max, row_sum


def forward_choice(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: TileTable,
    softmax_scale: float,
    kernels: Kernels | None = None,
    splits: int | None = None,
    modifiers: Modifiers | None = None,
    part: RowPart | None = None,
) -> tuple[bool, Any, Splits]:
    """Whether the Hopper kernel runs, its configuration or that of the plain one, and how blocks are split. part: the rows to write."""
    on_hopper = dispatch.forward_kernels(q, k, v, table, softmax_scale, kernels, modifiers) == Kernels.HOPPER
    if on_hopper:
        config = hopper.forward_config.config_for(q, v, table, splits, modifiers)
        programs = config.programs
    else:
        dropping = modifiers is not None and modifiers.dropout is not None
        config, programs = launch_for("forward", architecture(q.device), max(q.shape[3], v.shape[3]), q.dtype, dropping), 1
    heads = q.shape[0] * q.shape[2]
    return on_hopper, config, query_splits(table, config.block, config.step, heads, q.device, splits, part, programs)


def continued_rows(q: Any, k: Any, v: Any, table: TileTable, later: np.ndarray, softmax_scale: float) -> RowPart | None:
    """The rows of a pass that launches after the first go on with; None if all rows do, or if it is not worth to tell them apart.

    q, k, v, table: of the first launch; tensors, or `TensorKind`. later: (n, 2), ranges of rows that the other launches touch. For a pass
    whose scores are not modified, and whose K and V are all alike but for the number of rows.
    """
    part = continued_part(later, q, v)
    if part is None or dispatch.forward_kernels(q, k, v, table, softmax_scale, None) != Kernels.HOPPER:
        return None
    return part if forward_choice(q, k, v, table, softmax_scale)[2].most == 1 else None


def backward(
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
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
    modifiers: Modifiers | None = None,
    sums: ModifierSums | None = None,
) -> None:
    """Add the gradients of the table's pairs to fp32 dq, dk and dv, in place; any strides, last dim contiguous.

    add=False overwrites all of dq, dk and dv instead, whatever they held, and takes them in any floating-point dtype. For a table that
    holds all pairs of its queries and keys this saves the zeroing, the reading and a cast.

    dq may be `QuerySums` instead, for several launches with one q. Launches always add to these, and `add` then applies to dk and
    dv only: of several launches, those that first meet their keys may overwrite.

    kernels: which kernels to run, instead of the choice of `dispatch.choose_backward`.
    splits: the number of programs that share the steps of the longest block, instead of the choice of `split_choice.best`.
    deterministic: whether the same inputs must give the same bits of dq, at some cost in speed; dk and dv always have the same bits.
    None follows `torch.use_deterministic_algorithms`.
    modifiers: as in `forward`. sums: to which the gradients of slopes and of a bias's values are added.
    """
    q, query_sums = queries.q, dq if isinstance(dq, QuerySums) else None
    _check_places(modifiers, table)
    wanted = sums is not None and sums.wanted
    chosen = dispatch.backward_kernels(queries, k, v, table, softmax_scale, kernels, deterministic, modifiers, wanted)
    assert query_sums is None or (query_sums.q.shape == q.shape and query_sums.softmax_scale == softmax_scale)
    if chosen in (Kernels.HOPPER, Kernels.HOPPER_ORDERED) and splits not in (None, 1):
        raise ValueError(f"splits is {splits}, but {chosen} splits no block: pass 1 or none")
    if chosen in (Kernels.HOPPER_FUSED, Kernels.HOPPER_ORDERED):
        ordered = chosen == Kernels.HOPPER_ORDERED
        _fused_backward(queries, k, v, table, softmax_scale, dq, dk, dv, add, ordered, 1 if ordered else splits, modifiers, sums)
        return
    rows, add_q = (dq, add) if query_sums is None else query_sums.rows()
    outputs = dict(dq=rows, dk=dk, dv=dv, add_q=add_q, add_kv=add)
    if chosen == Kernels.PLAIN:
        plain_backward.backward(queries, k, v, table, softmax_scale, **outputs, splits=splits, modifiers=modifiers, sums=sums)
    else:
        hopper.backward.backward(queries, k, v, table, softmax_scale, **outputs, modifiers=modifiers)


def _check_places(modifiers: Modifiers | None, table: TileTable) -> None:
    assert modifiers is None or table.places is not None or not modifiers.placed, "scores that depend on positions need places"


def _fused_backward(
    queries: Queries, k, v, table: TileTable, softmax_scale: float, dq: torch.Tensor | QuerySums, dk, dv, add: bool, ordered: bool,
    splits: int | None, modifiers: Modifiers | None, modifier_sums: ModifierSums | None,
) -> None:  # fmt: skip
    """`backward` by the fused kernel, which adds dq to sums in an order of their own."""
    fused, q = hopper.fused, queries.q
    own = dq.own() if isinstance(dq, QuerySums) else None
    if own is not None:
        assert not add and not ordered and modifiers is None
        prepared, sums = dq.prepared(queries.statistics), fused.own_sums(q, k)
        outputs = dict(sums=sums, dk=dk, dv=dv, add=False, ordered=False, dq=own)
        fused.backward(queries, k, v, table, softmax_scale, prepared=prepared, **outputs)
        return
    block, step = fused.block_and_step(q.shape[3], v.shape[3], modifiers)
    how = key_splits(table, block, step, k.shape[0] * k.shape[2], q.shape[2] // k.shape[2], q.device, splits)
    sums = dq.permuted(v.shape[3]) if isinstance(dq, QuerySums) else fused.zero_sums(q, v.shape[3])
    prepared = dq.prepared(queries.statistics) if isinstance(dq, QuerySums) and not ordered else None
    add_kv, parts = partial_gradients(how, add, dk, dv)
    outputs = dict(sums=sums, dk=parts[0], dv=parts[1], add=add_kv)
    score = dict(modifiers=modifiers, modifier_sums=modifier_sums)
    fused.backward(queries, k, v, table, softmax_scale, prepared=prepared, **outputs, ordered=ordered, **score)
    add_partials(how, table, add, parts, (dk, dv))
    if isinstance(dq, torch.Tensor):
        fused.finish(sums, dq, softmax_scale, add)
