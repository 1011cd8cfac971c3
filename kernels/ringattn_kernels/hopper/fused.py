"""Launches of the Hopper backward in one kernel, and the sums of dq that it adds to.

`finish` scales the sums, and adds them to dq or writes dq.

Shapes: as in `attention.backward`.
"""

import numpy as np
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import launches
from ..config import architecture, padded
from ..distances import add_to_pieces, subtract_distances
from ..modifiers import Modifiers, ModifierSums
from ..pairs import zero
from ..queries import Queries, Statistics
from ..score_arguments import biases_count, facts_of, moving_arguments, pieces_of_distances
from ..split_choice import choice
from ..splits import multiprocessors
from ..table import TileTable, steps_of, touched_in
from . import head_dims, statistics
from .backward import BackwardConfig, key_arguments, key_blocks_of
from .blocks import BLOCK, ROWS
from .descriptors import described, is_aligned, main_descriptor, plain_layout, rest_descriptor
from .dq_sums import SUMS, WIDTH, dq_part_of, finish_kernel
from .fused_kernel import fused_kernel, is_wide
from .panels import has_rest, main_columns_of
from .statistics import PaddedStatistics, whole_blocks
from .touches import step_count, touches, touches_on
from .turns import Turns, key_turns
from .work_queue import work_counter

# by head dim; measured on an H200
CONFIGS = {
    64: BackwardConfig(128, 2, overlap=2),
    96: BackwardConfig(64, 3, overlap=1),
    128: BackwardConfig(64, 2),
    192: BackwardConfig(64, 2),
}
# where a longer step takes too many registers: beside a softcap, and where programs have whole heads for themselves
ROOMY = {64: BackwardConfig(64, 3, overlap=2)}
# heads run side by side until together they have at least so many programs; measured on an H200
SIDE_BY_SIDE = 256
# the same by head dim where items take turns
ORDERED_SIDE_BY_SIDE = {64: 1024, 96: 512, 128: 512, 192: 512}
# steps after which a program ends, so that other kernels, such as those of an exchange, find a multiprocessor; measured on an H200
TOGETHER = 128
# works of equal length that each multiprocessor takes until programs wait for one another; measured on an H100
ROUNDS = 16
# long heads of these head dims run one by one: the L2 does not hold the queries, dout and sums that programs of two heads meet
ONE_BY_ONE = (128, 192)

# programs have whole heads for themselves where these leave no more than this share of the multiprocessors' time unused, ...
UNUSED = 0.05
# ... and where so many blocks of keys, by head dim, meet a block of queries in the mean: each block after the first then reads queries that
# the L2 may have let go of, because all multiprocessors have heads of their own; measured on an H200
MET = {64: 4.5, 96: 3.25, 128: 2.6}

# the copy engine stores dk and dv, by head dim, where works have at most so many steps in the mean; with others it was slower on an H200
LONG = {128: 32}


def config_for(head_dim: int, modifiers: Modifiers | None = None, owned: bool = False) -> BackwardConfig:
    """The configuration that runs. owned: see `owns_heads`."""
    roomy = owned or (modifiers is not None and modifiers.softcap is not None)
    return (ROOMY if roomy and head_dim in ROOMY else CONFIGS)[head_dim]


def block_and_step(d: int, v_dim: int, modifiers: Modifiers | None = None) -> tuple[int, int]:
    """Key rows of a program, and query rows of each of its steps."""
    return BLOCK.value, config_for(head_dims.chosen_in_one(d, v_dim)[0], modifiers).step


def has_items_for_turns(k: torch.Tensor, table: TileTable) -> bool:
    """Whether there are enough items for turns to be fastest. The items of one head, if they are few, wait for one another."""
    items, _ = table.cut("k", BLOCK.value, 1)
    return k.shape[0] * k.shape[2] * touched_in(items) >= SIDE_BY_SIDE


def owns_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: TileTable) -> bool:
    """Whether the programs of a launch that finds all of dq have whole heads, and the sums of their dq, for themselves.

    Then nobody zeroes sums of all heads before, or rounds them after. For heads that are many and short.
    """
    (b, _, h, d), (hk, v_dim) = q.shape, v.shape[2:]
    heads, processors = b * hk, multiprocessors(q.device)
    if (d, v_dim) not in head_dims.IN_ONE or is_wide(d, v_dim) or len(table) == 0:
        return False
    if heads < (1 - UNUSED) * -(-heads // processors) * processors:
        return False
    if min(heads, processors) * (h // hk) * whole_blocks(table.q_rows) * d >= 2**31:
        return False  # places of sums are int32
    step = config_for(d, owned=True).step
    # first by all blocks, because the touches of a long sequence are many
    if step_count(table, BLOCK.value, step) > MET[d] * -(-table.q_rows // step):
        return False
    found = touches(table, BLOCK.value, step)
    return found.steps <= MET[d] * found.touched


def own_sums(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Room for the sums of the heads that programs have at work: fp32 (programs * group, sq in whole blocks, d)."""
    (b, q_rows, h, d), hk = q.shape, k.shape[2]
    programs = min(b * hk, multiprocessors(q.device))
    return torch.empty(programs * (h // hk), whole_blocks(q_rows), d, device=q.device, dtype=torch.float32)


def may_run(q: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a backward pass with these rows may choose this kernel, adding in no fixed order. It may still choose another."""
    return (
        head_dims.in_one(q.shape[3], out.shape[3]) is not None
        and q.numel() > 0
        and q.dtype in (torch.bfloat16, torch.float16)
        and architecture(q.device) == "sm_90"
        and not torch.are_deterministic_algorithms_enabled()
    )


def modified_obstacle(q: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, sums: bool, deterministic: bool) -> str:
    """Why the kernel does not modify scores of head dims that it computes; empty where it does. sums: whether gradients of slopes or
    biases are asked for."""
    d, v_dim = q.shape[3], v.shape[3]
    dims = head_dims.in_one(d, v_dim)
    if dims is not None and is_wide(*dims):
        return f"Hopper kernels modify no scores of head dims {d} and {v_dim}"
    if sums and deterministic:
        return "Hopper kernels find gradients of slopes and biases in no fixed order"
    return (
        "Hopper kernels find no gradients of slopes and biases behind a softcap" if sums and modifiers.softcap is not None else ""
    )


def gradient_sums(sums: ModifierSums | None, modifiers: Modifiers | None, b: int) -> dict:
    """Memory for the sums that a launch adds to (see `score_sums.SumPointers`), as its keyword arguments."""
    slopes = biases = None
    if modifiers is not None and sums is not None:
        if sums.slopes is not None:
            slopes = sums.slopes.new_empty(b, sums.slopes.shape[1])
        if sums.values is not None and modifiers.bias is not None:
            biases = sums.values.new_empty(len(sums.values), biases_count(modifiers.bias))
    return dict(slope_sums_ptr=slopes, bias_sums_ptr=biases)


def shape_of_sums(q: torch.Tensor, v_dim: int) -> tuple[int, int, int]:
    """Of those to which launches with q add dq: b * h, sq in whole blocks, and d as it is computed."""
    b, q_rows, h, d = q.shape
    return b * h, whole_blocks(q_rows), head_dims.chosen_in_one(d, v_dim)[0]


def zero_sums(q: torch.Tensor, v_dim: int) -> torch.Tensor:
    """Zeros to which launches with q add dq: fp32, each 64 x 64 part in the order of `add_dq`."""
    sums = torch.empty(shape_of_sums(q, v_dim), device=q.device, dtype=torch.float32)
    zero(sums)
    return sums


def finish(sums: torch.Tensor, dq: torch.Tensor, softmax_scale: float, add: bool) -> None:
    """Scale the sums, and add them to dq (b, sq, h, d), in fp32, or overwrite it, in any dtype."""
    b, q_rows, h, d = dq.shape
    head_dim = sums.shape[2]
    assert sums.shape == (b * h, whole_blocks(q_rows), head_dim) and head_dim >= d and dq.stride(3) == 1
    assert not add or dq.dtype == torch.float32
    moving = dict(sums_ptr=sums, dq_ptr=dq, softmax_scale=softmax_scale)

    def make() -> tuple[int, dict]:
        strides = dict(zip(("stride_b", "stride_s", "stride_h"), dq.stride()))
        sizes = dict(heads=h, q_rows=q_rows, padded_rows=sums.shape[1], HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), COLUMNS=d)
        return sums.shape[0] * sums.shape[1] // ROWS.value, moving | strides | sizes | dict(ADD=add)

    launches.launch(finish_kernel, None, (add,), moving, make, num_warps=4)


def sums_descriptor(sums: torch.Tensor, columns: int) -> TensorDescriptor:
    """The descriptor by which the copy engine adds this number of columns of 64 rows of dq."""
    shape, block = (sums.numel() // SUMS.value, SUMS.value), (WIDTH.value * columns // SUMS.value, SUMS.value)
    return described(sums, shape, (SUMS.value, 1), block, plain_layout(2))


def prepare(of_queries: Statistics) -> PaddedStatistics:
    """What all launches with the same queries read of the statistics: pivot and -delta."""
    return statistics.prepare(of_queries, -1)


def backward(
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    table: TileTable,
    softmax_scale: float,
    *,
    prepared: PaddedStatistics | None,
    sums: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    add: bool,
    ordered: bool,
    dq: torch.Tensor | None = None,
    modifiers: Modifiers | None = None,
    modifier_sums: ModifierSums | None = None,
) -> None:
    """`ringattn_kernels.backward` for inputs to which `backward.obstacle` has no objection, except that dq is added to `sums`.

    prepared: what `prepare` made of the statistics, if it has been called.
    ordered: add in a fixed order, so that the same inputs give the same bits.
    dq: where `owns_heads` says so, dq (b, sq, h, d) itself, which is overwritten; sums are those of `own_sums`.
    """
    q, dout = queries.q, queries.dout
    b, q_rows, h, _ = q.shape
    d, v_dim = head_dims.chosen_in_one(q.shape[3], v.shape[3])
    turns, counters, drawn = None, None, work_counter(q.device)
    found = gradient_sums(modifier_sums, modifiers, b)
    zero(*[x for x in found.values() if x is not None])
    score = moving_arguments(modifiers, table, softmax_scale, q.device) | found
    if ordered:
        step = config_for(d, modifiers).step
        turns = key_turns(table, BLOCK.value, step, sums.device)
        # one for each step
        counters = torch.empty(b * h * (whole_blocks(q_rows) // step), device=sums.device, dtype=torch.int32)
        rows = statistics.prepare(queries.statistics, -1, step, turns.first, counters)
    else:
        rows = prepared or prepare(queries.statistics)
    moving = dict(
        q_desc=q,
        k_desc=k,
        v_desc=v,
        dout_desc=dout,
        pivot_desc=rows.pivot,
        delta_desc=rows.delta,
        sums_desc=sums,
        dk_ptr=dk,
        dv_ptr=dv,
        counters_ptr=counters,
        drawn_ptr=drawn,
        softmax_scale=softmax_scale,
        **score,
    )
    if dq is not None:
        moving |= dict(sums_ptr=sums, dq_ptr=dq)
        if touches(table, BLOCK.value, config_for(d, owned=True).step).untouched:
            zero(dq)
    # second panels, where there are
    if has_rest(d):
        moving |= dict(q_rest=q, k_rest=k, sums_rest=sums)
    if has_rest(v_dim):
        moving |= dict(v_rest=v, dout_rest=dout)
    if not ordered and stores_by_copy(q, dk, dv, table, add, modifiers):
        moving |= dict(dk_desc=dk, dv_desc=dv)

    def make() -> tuple[int, dict]:
        grid, arguments = fused_arguments(
            queries, k, v, table, softmax_scale, rows, sums, dk, dv, add, drawn, turns, counters, modifiers, dq
        )
        return grid, arguments | score

    asked = tuple(x is not None for x in found.values())
    facts = add, ordered, dq is not None, *asked, *facts_of(modifiers)
    launches.launch(fused_kernel, table, facts, moving, make, num_warps=4)
    if modifier_sums is not None and modifiers is not None:
        _add(modifier_sums, *found.values(), modifiers, table)


def stores_by_copy(
    q: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, table: TileTable, add: bool, modifiers: Modifiers | None
) -> bool:
    """Whether the copy engine stores dk and dv where there are no turns: rows in 16 bits, of one panel, of works that are not `LONG`.

    It is no faster with two panels, and where scores are modified, threads lack registers for it.
    """
    d, v_dim = head_dims.chosen_in_one(q.shape[3], dv.shape[3])
    fits = not add and modifiers is None and d == v_dim == main_columns_of(d)
    fits = fits and all(x.dtype == q.dtype and is_aligned(x) for x in (dk, dv))
    if not fits or d not in LONG:
        return fits
    step = CONFIGS[d].step
    steps = table.derived(
        ("mean steps", BLOCK.value, step), lambda: step_count(table, BLOCK.value, step) * BLOCK.value / table.k_rows
    )
    return steps * (q.shape[2] // dk.shape[2]) <= LONG[d]


def _add(
    sums: ModifierSums, slopes: torch.Tensor | None, biases: torch.Tensor | None, modifiers: Modifiers, table: TileTable
) -> None:
    """Add what a launch has found (see `gradient_sums`)."""
    if slopes is not None:
        assert sums.slopes is not None
        subtract_distances(sums.slopes, slopes[..., None])
    if biases is not None:
        assert sums.values is not None and modifiers.bias is not None
        add_to_pieces(sums.values, biases, pieces_of_distances(modifiers.bias, table, biases.device)[1])


def programs_for(table: TileTable, config: BackwardConfig, works: int, heads: int, group: int, device: torch.device) -> int:
    """How many programs share the works of a launch: so many that each takes about `TOGETHER` steps, or a single work that has more."""
    processors = multiprocessors(device)
    time = choice(table, "k", BLOCK.value, config.step, heads, group, processors, None).time
    return min(works, processors * max(1, round(time / TOGETHER)))


def pace_of(table: TileTable, step: int, works: int, device: torch.device) -> int:
    """After how many works programs wait for one another; 0 for never. For a launch whose programs take a single, long work each.

    Programs that begin together meet the same queries at the same time, and memory gives them once for all. Where works are equally long,
    as in a ring's launches over other ranks' keys, programs come apart, and nothing brings them together again: in the end each reads for
    itself. Where lengths vary, programs that wait would idle for half a work.
    """
    processors = multiprocessors(device)
    if works <= ROUNDS * processors:
        return 0
    steps = steps_of(*table.cut("k", BLOCK.value, step), step)
    equal = len(np.unique(steps)) <= 1 + len(steps) // (ROUNDS // 2 * processors)
    return ROUNDS * processors if equal else 0


def fused_arguments(
    queries: Queries, k, v, table: TileTable, softmax_scale: float, rows: PaddedStatistics, sums, dk, dv, add: bool,
    drawn: torch.Tensor, turns: Turns | None = None, counters: torch.Tensor | None = None, modifiers: Modifiers | None = None,
    dq: torch.Tensor | None = None,
) -> tuple[int, dict]:  # fmt: skip
    """The number of programs of `fused_kernel`, and its arguments: those of `key_kernel`, the sums, and how heads run side by side.

    dq: as in `backward`. Arguments for modified scores that move come on top.
    """
    q, dout = queries.q, queries.dout
    b, _, h, _ = q.shape
    dims = d, v_dim = head_dims.chosen_in_one(q.shape[3], v.shape[3])
    assert dq is not None or sums.shape == shape_of_sums(q, v_dim)
    assert sums.is_contiguous()
    config = config_for(d, modifiers, dq is not None)
    blocks = key_blocks_of(table, k.device, dk.shape[0] // k.shape[0], config) if turns is None else turns
    inputs = queries, k, v, table, softmax_scale, rows, dk, dv, add
    works, arguments = key_arguments(*inputs, modifiers, config, blocks=blocks, dims=dims)
    arguments |= gradient_sums(None, None, b)
    step, main, heads = config.step, main_columns_of(d), b * k.shape[2]
    if dq is None:
        programs = programs_for(table, config, works, heads, h // k.shape[2], q.device)
        pace = pace_of(table, step, works, q.device) if turns is None and programs == works else 0
        items = SIDE_BY_SIDE if turns is None else ORDERED_SIDE_BY_SIDE[d]
        chunk = max(1 if turns is None and d in ONE_BY_ONE else 2, items // arguments["item_count"])
        drawing = dict(count=works, most=-(-works // max(1, programs)), pace=pace, chunk=chunk)
        own = dict.fromkeys(("sums_ptr", "touches_ptr", "dq_ptr", "stride_dqb", "stride_dqs", "stride_dqh", "q_rows"))
    else:
        assert turns is None and modifiers is None and not add and dk.shape[0] == b and dq.shape == q.shape and dq.stride(3) == 1
        programs = sums.shape[0] // (h // k.shape[2])
        drawing = dict(count=heads, most=heads, pace=0, chunk=1)
        own = dict(sums_ptr=sums, touches_ptr=touches_on(table, BLOCK.value, step, q.device), dq_ptr=dq, q_rows=q.shape[1])
        own |= launches.strides(dq=dq)
    copied = turns is None and stores_by_copy(q, dk, dv, table, add, modifiers)
    return programs, arguments | dict(
        dk_desc=main_descriptor(dk, ROWS.value, d) if copied else None,
        dv_desc=main_descriptor(dv, ROWS.value, v_dim) if copied else None,
        q_rest=rest_descriptor(q, step, d),
        k_rest=rest_descriptor(k, ROWS.value, d),
        v_rest=rest_descriptor(v, ROWS.value, v_dim),
        dout_rest=rest_descriptor(dout, step, v_dim),
        sums_desc=sums_descriptor(sums, dq_part_of(d, step, 0, 0)[2] if turns is None else main * step // WIDTH.value),
        sums_rest=sums_descriptor(sums, 32 if turns is None else d - main) if d > main else None,
        V_DIM=v_dim,
        OVERLAP=config.overlap if turns is None else 0,  # in turns it was slower on an H200
        heads=heads,
        successors_ptr=None if turns is None else turns.successors,
        counters_ptr=counters,
        drawn_ptr=drawn,
        ORDERED=turns is not None,
        OWNED=dq is not None,
        **drawing,
        **own,
    )
