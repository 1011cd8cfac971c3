"""Exact attention over a tile table, forward, for Hopper (sm_90) in Gluon: the formula of `forward`, on asynchronous units.

In a program one partition has the copy engine (TMA) bring Q, K and V to shared memory, and two or three warpgroups compute 64 query rows
each. A warpgroup starts the scores of the next block of keys and the weighted values of the block before, waits for both, and computes a
softmax while the tensor cores work for others. Where three of them have no registers for both, it starts the scores once the values are
done: two others keep the tensor cores busy. Programs stay on their multiprocessor and take works (a query block of one head each) off a
queue; Q, K and V keep coming across the ends of segments and of works.

Shapes: q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), out (b, sq, h, dv), row_max and row_sum (b, h, sq).
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from . import launches
from .config import padded
from .gluon_words import async_load, barrier, halves_layout, reinterpret, swizzled_layout, wait_for_products
from .hopper_panels import part_panels, start_each, start_sum, zero_block, zeros
from .splits import best, multiprocessors, predicted
from .table import TileTable, split, steps_of
from .units import LOG2_E, to_base2, to_natural

WARPGROUP_ROWS = 64
# registers of a thread that computes, by the number of warpgroups that do; what remains suffices for those that copy
REGISTERS = {2: 240, 3: 160}
# base-2 units that a row's maximum may be above its pivot before the row is rescaled: the weights stay within 2^LAG
LAG = gl.constexpr(8.0)
# bytes of keys and values that the programs of an H200 may walk at a time
L2_SHARE = 24 << 20


@dataclass(frozen=True, eq=False)  # looked up in every launch, by identity
class HopperLaunch:
    """`warpgroups` compute 64 query rows each; `stages` blocks of `step` rows of K, and as many of V, are in shared memory at a time.

    q_stages: query blocks in shared memory. turns: warpgroups start their products one after another, in a fixed order.
    paired: a warpgroup has the next scores under way beside the values before them; else it waits for these first.
    step_time: of a step, relative to other launches for the same head dims.
    """

    step: int
    stages: int
    warpgroups: int
    q_stages: int
    turns: bool
    paired: bool = True
    step_time: float = 1.0

    @property
    def block(self) -> int:
        """Query rows of a program."""
        return self.warpgroups * WARPGROUP_ROWS


@dataclass(frozen=True)
class Schedule:
    """The works of a launch, in the order in which programs take them.

    works    (n, 4) int32: (split * b + batch) * h + head, first row of the query block, first segment, number of steps (at least 1).
    segments (m, 8) int32: as in `table.BlockTable`; the last one is empty, for query blocks without any.
    """

    works: torch.Tensor
    segments: torch.Tensor


def schedule(
    items: np.ndarray, segments: np.ndarray, step: int, heads: int, together: int, touched_only: bool, processors: int
) -> tuple[np.ndarray, np.ndarray]:
    """(works, segments): `together` heads at a time, so that their keys and values stay in the L2; of those, longest work first.

    Short works of all heads come at the end, so that all multiprocessors have something to do until the last long ones are done.
    items, segments: as in `table.BlockTable`.
    """
    steps = steps_of(items, segments, step)
    if touched_only:
        items, steps = items[steps > 0], steps[steps > 0]
    first = np.where(steps > 0, items[:, 1], len(segments))
    segments = np.concatenate([segments, np.array([[0, 0, 0, 1, 0, 0, 0, 0]], dtype=np.int32)])
    # [items, 3], longest first, as they come
    blocks = np.stack([items[:, 0], first, np.maximum(steps, 1)], axis=1)

    def works_of(part: slice, group: np.ndarray) -> np.ndarray:
        rows = np.repeat(blocks[part], len(group), axis=0)
        return np.concatenate([(items[part, 3:] * heads + group).reshape(-1, 1), rows], axis=1, dtype=np.int32, casting="same_kind")

    kept = len(items) - _held_back(steps, heads, processors)
    groups = [np.arange(max(0, end - together), end) for end in range(heads, 0, -together)][::-1]
    works = [works_of(slice(kept), group) for group in groups]
    return np.concatenate([*works, works_of(slice(kept, None), np.arange(heads))]), segments


def _held_back(steps: np.ndarray, heads: int, processors: int) -> int:
    """How many of the last items: as much as the longest for each multiprocessor, none longer than a quarter of it, 1/20 of all at most."""
    longest = steps.max(initial=0)
    enough = min(processors * longest / heads, steps.sum() / 20)
    return int(((np.cumsum(steps[::-1]) <= enough) & (steps[::-1] <= longest // 4)).sum())


@functools.cache
def stream_counter(device: torch.device, stream: int) -> torch.Tensor:
    """What the launches on one stream, which never run side by side, count works with; each leaves it at zero."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def work_counter(device: torch.device) -> torch.Tensor:
    """A zero that no launch which may run at the same time counts with."""
    if torch.cuda.is_current_stream_capturing():
        # a graph may be replayed on any stream: it has a counter of its own for each of its launches
        return torch.zeros(1, dtype=torch.int32, device=device)
    return stream_counter(device, driver.active.get_current_stream(device.index))


# head dims of Q and K and of V up to these -> launches, measured on an H200; of several the first is the fastest where all multiprocessors
# have much to do
LAUNCHES = {
    (64, 64): (HopperLaunch(step=128, stages=4, warpgroups=3, q_stages=2, turns=True),),
    (96, 96): (
        HopperLaunch(step=128, stages=2, warpgroups=3, q_stages=1, turns=True, paired=False, step_time=1.31),
        HopperLaunch(step=128, stages=2, warpgroups=2, q_stages=2, turns=False),
    ),
    (128, 128): (
        HopperLaunch(step=128, stages=2, warpgroups=3, q_stages=1, turns=True, paired=False, step_time=1.37),
        HopperLaunch(step=128, stages=2, warpgroups=2, q_stages=2, turns=False),
    ),
    (192, 128): (HopperLaunch(step=128, stages=2, warpgroups=2, q_stages=1, turns=False),),
    (256, 256): (HopperLaunch(step=64, stages=2, warpgroups=2, q_stages=1, turns=False),),
}
# blocks a multiprocessor that are so many that the last round does not matter
MANY = 16


@functools.cache
def launches_for(d: int, dv: int) -> tuple[HopperLaunch, ...]:
    """Those of the first entry that holds both head dims; an entry of two panels holds no others."""
    entries = (found for dims, found in LAUNCHES.items() if d <= dims[0] and dv <= dims[1] and panels(*dims) <= panels(d, dv))
    return next(entries)


def launch_for(q, v, table: TileTable, splits: int | None = None) -> HopperLaunch:
    """The one that should be done first with a table; `splits` as in `forward`."""
    dims, heads, processors = (q.shape[3], v.shape[3]), q.shape[0] * q.shape[2], multiprocessors(q.device)
    found = launches_for(*dims)
    if len(found) == 1 or heads * table.q_rows >= MANY * processors * found[0].block:
        return found[0]

    def time(how: HopperLaunch) -> float:
        steps = steps_of(*table.cut("q", how.block, how.step), how.step)
        steps = steps[steps > 0]
        return how.step_time * predicted(steps, splits or best(steps, heads, processors), heads, processors) if len(steps) else 0.0

    return table.derived(("hopper forward launch", dims, heads, processors, splits), lambda: min(found, key=time))


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
    q, k, v, table: TileTable, out, row_max, row_sum, softmax_scale: float, state, touched_only: bool, splits: int, how: HopperLaunch,
    programs: int | None = None,
) -> None:  # fmt: skip
    """Launch the kernel over tensors that `forward` made, by so many programs, if not by one a multiprocessor."""
    counter = work_counter(q.device)

    def make() -> tuple[int, dict]:
        (b, _, h, d), (_, sk, hk, dv) = q.shape, v.shape
        assert q.dtype == k.dtype == v.dtype and q.stride(3) == k.stride(3) == v.stride(3) == 1
        assert (q.shape[1], k.shape[1], sk) == (table.q_rows, table.k_rows, table.k_rows) and h % hk == 0 and k.shape[2:] == (hk, d)
        together = max(1, L2_SHARE // (sk * (d + dv) * k.element_size())) * (h // hk)

        def build() -> Schedule:
            items = split(*table.cut("q", how.block, how.step), how.step, splits)
            arrays = schedule(*items, how.step, b * h, together, touched_only, multiprocessors(q.device))
            return Schedule(*(torch.from_numpy(x).to(q.device) for x in arrays))

        plan = table.derived(("hopper forward", how.block, how.step, splits, b * h, together, touched_only, q.device), build)
        arguments = kernel_arguments(q, k, v, out, row_max, row_sum, plan, counter, softmax_scale, state, how)
        return min(programs or multiprocessors(q.device), len(plan.works)), arguments

    moving = dict(
        q_desc=q,
        k_desc=k,
        v_desc=v,
        out_ptr=out,
        state_ptr=out if state is None else state[0],
        row_max_ptr=row_max,
        row_sum_ptr=row_sum,
        counter_ptr=counter,
        scale=softmax_scale * LOG2_E.value,
    )
    facts = state is None, touched_only, splits, how, programs
    launches.launch(hopper_forward_kernel, table, facts, moving, make, num_warps=4)


def kernel_arguments(
    q, k, v, out, row_max, row_sum, plan: Schedule, counter, softmax_scale: float, state, config: HopperLaunch
) -> dict:
    """Keyword arguments of one launch of `hopper_forward_kernel`."""
    return dict(
        q_desc=descriptor(q, WARPGROUP_ROWS, chunks(q.shape[3])),
        k_desc=descriptor(k, config.step, chunks(q.shape[3])),
        v_desc=descriptor(v, config.step, panels=panels(q.shape[3], v.shape[3])),
        out_ptr=out,
        state_ptr=out if state is None else state[0],
        row_max_ptr=row_max,
        row_sum_ptr=row_sum,
        works_ptr=plan.works,
        segments_ptr=plan.segments,
        counter_ptr=counter,
        work_count=len(plan.works),
        batches=q.shape[0],
        heads=q.shape[2],
        group=q.shape[2] // k.shape[2],
        q_rows=q.shape[1],
        scale=softmax_scale * LOG2_E.value,
        CHUNKS=chunks(q.shape[3]),
        PANELS=panels(q.shape[3], v.shape[3]),
        WARPGROUPS=config.warpgroups,
        Q_STAGES=config.q_stages,
        STAGES=config.stages,
        V_DIM=v.shape[3],
        HAS_STATE=state is not None,
        TURNS=config.turns,
        PAIRED=config.paired,
        REGISTERS=REGISTERS[config.warpgroups],
    )


def block_dim(head_dim: int) -> int:
    """Columns of a block that holds a head dim; those past it come as zeros."""
    return max(64, padded(head_dim))


def chunks(head_dim: int) -> int:
    """Blocks side by side that hold Q's and K's head dim: three of 64 where one would hold 256."""
    return 3 if 128 < head_dim <= 192 else 1


def panels(d: int, dv: int) -> int:
    """Of columns that products take from a block: one, all of them, or two, 96 of 128."""
    return 2 if min(d, dv) > 64 and max(d, dv) <= 96 else 1


def descriptor(x: torch.Tensor, rows: int, chunks: int = 1, panels: int = 1) -> TensorDescriptor:
    """For blocks of `rows` rows of one head of x (b, s, h, d); panels: of values, whose columns a product may take 32 of."""
    shape = [1, rows, 1, block_dim(x.shape[3]) if chunks == 1 else 64]
    layout = swizzled_layout(*shape) if panels == 1 else halves_layout(4)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), shape, layout)


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


@gluon.constexpr_function
def rescale_assembly(count):
    """Multiply `count` registers by as many factors, in warps where one of these is not 1. A thread holds two columns of a row, two of
    another, and so on: the factors 0 and 2 are all that there are."""
    rows = f"setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return "{ .reg .pred p; " + rows + " vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; " + products + " DONE: }"


@gluon.constexpr_function
def in_place(count, others):
    """Constraints of inline assembly that changes `count` fp32 registers and reads `others`, a string of kinds, as many of each."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + [kind for kind in others for _ in range(count)])


@gluon.jit
def named_barrier(KIND: gl.constexpr, INDEX: gl.constexpr):
    """KIND sync: wait until another warpgroup has come; arrive: come, without waiting. Triton uses the barriers below 8."""
    ASM: gl.constexpr = f"bar.{KIND} {8 + INDEX}, 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


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
    """((split * b + batch) * h + head, first row of the query block, first segment, number of steps)."""
    ptr = works_ptr + work * 4
    return gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3)


@gluon.jit
def hand_out(work_smem, slot, work):
    """Leave the index of a work where the warpgroups read it, before a barrier tells them."""
    work_smem.index(slot).store(gl.full([1], work, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    barrier()


@gluon.jit
def take(work_smem, slot):
    """What `hand_out` left."""
    return gl.max(work_smem.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def load_copies(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, work_smem, q_full, q_empty, k_full, v_full, kv_empty, works_ptr, segments_ptr,
    counter_ptr, work_count, batches, heads, group,
    CHUNKS: gl.constexpr, WARPGROUPS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The partition that takes works and asks the copy engine for Q once a work and for K and V once a step, as soon as there is room."""
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[1]
    ROWS: gl.constexpr = q_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = k_desc.block_type.shape[3]
    block = 0
    taken = 0
    work = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    while work < work_count:
        head_index, block_begin, segment, steps = load_work(works_ptr, work)
        batch = head_index // heads % batches
        head = head_index % heads
        kv_head = head // group
        for i in gl.static_range(WARPGROUPS):
            mbarrier.wait(q_empty.index(taken % Q_STAGES * WARPGROUPS + i), ((taken // Q_STAGES) & 1) ^ 1)
        hand_out(work_smem, taken % 2, work)
        for i in gl.static_range(WARPGROUPS):
            place = taken % Q_STAGES * WARPGROUPS + i
            mbarrier.expect(q_full.index(place), CHUNKS * q_desc.block_type.nbytes)
            for c in gl.static_range(CHUNKS):
                corner = [batch, block_begin + i * ROWS, head, c * COLUMNS]
                async_load(q_desc, corner, q_full.index(place), q_smem.index(place * CHUNKS + c))
        start = gl.load(segments_ptr + segment * 8)
        end = gl.load(segments_ptr + segment * 8 + 3)
        for step in range(steps):
            if start >= end:
                segment += 1
                start = gl.load(segments_ptr + segment * 8)
                end = gl.load(segments_ptr + segment * 8 + 3)
            stage = block % STAGES
            # K's room is empty since V's block before this one was asked for
            mbarrier.expect(k_full.index(stage), CHUNKS * k_desc.block_type.nbytes)
            for c in gl.static_range(CHUNKS):
                corner = [batch, start, kv_head, c * COLUMNS]
                async_load(k_desc, corner, k_full.index(stage), k_smem.index(stage * CHUNKS + c))
            if step == steps - 1:
                # not earlier, so that a program holds no work that another could begin; not later, so that its copies run on
                work = gl.atomic_add(counter_ptr, 1, sem="relaxed")
            mbarrier.wait(kv_empty.index((block + 1) % STAGES), (((block + 1) // STAGES) & 1) ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            async_load(v_desc, [batch, start, kv_head, 0], v_full.index(stage), v_smem.index(stage))
            start += BLOCK_K
            block += 1
        taken += 1
    for i in gl.static_range(WARPGROUPS):
        mbarrier.wait(q_empty.index(taken % Q_STAGES * WARPGROUPS + i), ((taken // Q_STAGES) & 1) ^ 1)
    hand_out(work_smem, taken % 2, work)
    for i in gl.static_range(WARPGROUPS):
        mbarrier.arrive(q_full.index(taken % Q_STAGES * WARPGROUPS + i), count=1)
    # each program draws one number too many; the last to be drawn sets the counter back for the next launch
    if work == work_count + gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)


@gluon.jit
def load_segment(segments_ptr, segment):
    """(begin, full_begin, full_end, end): see `table.BlockTable`."""
    ptr = segments_ptr + segment * 8
    return gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3)


@gluon.constexpr_function
def mask_assembly(count):
    """-inf for scores whose column is not in [first, last] of their row, as one thread holds them: two columns of two rows, then again
    from 8 columns on. In one piece, so that the columns are constants and take no registers."""
    lines = ["{ .reg .pred p; .reg .b32 t, f<2>, l<2>; mov.u32 t, %laneid; and.b32 t, t, 3; shl.b32 t, t, 1;"]
    lines.extend(f"sub.s32 f{row}, ${2 * count + 2 * row}, t; sub.s32 l{row}, ${3 * count + 2 * row}, t;" for row in range(2))
    for i in range(count):
        row, column = i // 2 % 2, i % 2 + i // 4 * 8
        lines.append(
            f"setp.le.s32 p, f{row}, {column}; setp.ge.and.s32 p, l{row}, {column}, p; selp.f32 ${i}, ${i}, 0fFF800000, p;"
        )
    return " ".join([*lines, "}"])


@gluon.jit
def mask_edge(scores, start, end, segments_ptr, segment, first_row):
    """-inf for pairs of an edge block that are not live."""
    ROWS: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    COUNT: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    ASM: gl.constexpr = mask_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "rr")
    ptr = segments_ptr + segment * 8
    # rows and columns relative to the block's first ones
    rows = gl.arange(0, scores.shape[0], ROWS)
    shift = first_row - start
    first = rows + (shift - gl.load(ptr + 5))
    last = gl.minimum(rows + (shift - gl.load(ptr + 4)), end - 1 - start)
    inside = (rows >= gl.load(ptr + 6) - first_row) & (rows < gl.load(ptr + 7) - first_row)
    last = gl.where(inside, last, -1)
    first = gl.expand_dims(first, 1).broadcast_to(scores.shape)
    last = gl.expand_dims(last, 1).broadcast_to(scores.shape)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [scores, first, last], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def out_place(
    block_begin, head_index, heads, q_rows, V_DIM: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr,
    PANEL: gl.constexpr,
):  # fmt: skip
    """(offsets, mask) of rows of a panel, as many columns from 64 * PANEL on, of out and of the state, which are contiguous."""
    # [ROWS]
    rows = block_begin + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = PANEL * 64 + gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    offsets = ((head_index // heads).to(gl.int64) * q_rows + rows) * heads + head_index % heads
    mask = (gl.expand_dims(rows, 1) < q_rows) & (columns < V_DIM)
    return gl.expand_dims(offsets, 1) * V_DIM + columns, mask


@gluon.constexpr_function
def layout_to_store(columns):
    """Of [64, columns] numbers of 16 bits in a warpgroup: 8 columns of a thread side by side, and 32 of a row in one instruction."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 1 << i] for i in range(5, (columns - 1).bit_length()))]
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def store_out(out_ptr, out, first_row, head_index, heads, q_rows, V_DIM: gl.constexpr, STAGED: gl.constexpr, PANEL: gl.constexpr):
    """Rows of a panel of out. Of 16 bits a product leaves a thread 4 bytes side by side, half of what memory moves at the least; at d = 256
    there is no room to rearrange them."""
    ROWS: gl.constexpr = out.shape[0]
    COLUMNS: gl.constexpr = out.shape[1]
    if out.dtype.primitive_bitwidth == 16 and COLUMNS <= 128 and not STAGED:
        out = gl.convert_layout(out, layout_to_store(COLUMNS))
    LAYOUT: gl.constexpr = out.type.layout
    offsets, mask = out_place(first_row, head_index, heads, q_rows, V_DIM, ROWS, COLUMNS, LAYOUT, PANEL)
    gl.store(out_ptr + offsets, out, mask=mask)


@gluon.jit
def as_column(x, layout: gl.constexpr):
    """[rows] as [rows, 1] of a matrix in `layout`, whose rows the same threads hold."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def softmax_step(scores, pivot, row_sum, row_max, scale, dtype: gl.constexpr):
    """(p as packed pairs, alpha, pivot, row_sum, row_max) after a block of raw scores.

    pivot and row_max are in base-2 units: scores * scale is the exponent. The pivot follows the maximum only once that is LAG above it:
    alpha is 1 in nearly all steps. row_sum [rows, 4], relative to the pivot, is what each of a row's four threads has seen.
    """
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    block_max = gl.max(scores, axis=1) * scale
    row_max = gl.maximum(row_max, block_max)
    new_pivot = gl.where(block_max > pivot + LAG, block_max, pivot)
    # a row with no live pair yet has a pivot of -inf: avoid inf - inf
    finite = gl.where(new_pivot == float("-inf"), 0.0, new_pivot)
    p = gl.exp2(scores * scale - gl.expand_dims(finite, 1))
    alpha = gl.exp2(pivot - finite)
    even, odd = gl.split(p.reshape([ROWS, COLUMNS // 2, 2]))
    part = gl.convert_layout(
        gl.sum((even + odd).reshape([ROWS, COLUMNS // 8, 4]), axis=1), row_sum.type.layout, assert_trivial=True
    )
    SUMS: gl.constexpr = row_sum.type.layout
    row_sum = row_sum * as_column(alpha, SUMS) + part
    return pack(even, odd, dtype), alpha, new_pivot, row_sum, row_max


@gluon.jit
def rescale(acc, alpha):
    """acc * alpha [rows], left out by warps whose rows all have 1."""
    OUT: gl.constexpr = acc.type.layout
    COUNT: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    ASM: gl.constexpr = rescale_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "f")
    alpha = as_column(alpha, OUT).broadcast_to(acc.shape)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, alpha], dtype=gl.float32, is_pure=False, pack=COUNT)


@gluon.jit
def scaled(acc, factors):
    """acc * factors [rows]."""
    OUT: gl.constexpr = acc.type.layout
    return acc * as_column(factors, OUT)


@gluon.jit
def divided(acc, total, dtype: gl.constexpr):
    """acc / total [rows] in dtype, 0 where total is 0."""
    OUT: gl.constexpr = acc.type.layout
    # selected, not multiplied by 0: the values of pairs that are not live may be anything. A sum that is NaN stays
    return gl.where(as_column(total, OUT) == 0, 0.0, scaled(acc, 1.0 / total)).to(dtype)


@gluon.jit
def scores_product(
    q_smem, q_place, k_smem, k_full, s, block, more, CHUNKS: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Start the raw scores of a block of keys, once that is there."""
    stage = block % STAGES
    mbarrier.wait(k_full.index(stage), (block // STAGES) & 1, pred=more)
    for chunk in gl.static_range(CHUNKS):
        k = part_panels(k_smem.index(stage * CHUNKS + chunk), PANELS)
        s = start_sum(part_panels(q_smem.index(q_place * CHUNKS + chunk), PANELS), k, s, chunk > 0)
    return s


@gluon.jit
def start_values(pairs, v_smem, v_full, acc, block, STAGES: gl.constexpr):
    """Start the weighted values of a block, added to each panel's accumulator, once they are there."""
    P: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    stage = block % STAGES
    mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
    return start_each(unpack(pairs, v_smem.dtype, P), part_panels(v_smem.index(stage), len(acc)), acc)


@gluon.jit
def load_state(state_ptr, acc, old_sum, first_row, head_index, heads, q_rows, V_DIM: gl.constexpr, PANEL: gl.constexpr):
    """A panel of the state times the sums of its rows, in the shape and layout of acc."""
    OUT: gl.constexpr = acc.type.layout
    offsets, mask = out_place(first_row, head_index, heads, q_rows, V_DIM, acc.shape[0], acc.shape[1], OUT, PANEL)
    return scaled(gl.load(state_ptr + offsets, mask=mask, other=0.0), old_sum)


@gluon.jit
def attend_rows(
    q_smem, k_smem, v_smem, work_smem, q_full, q_empty, k_full, v_full, kv_empty, out_ptr, state_ptr, row_max_ptr, row_sum_ptr,
    works_ptr, segments_ptr, work_count, heads, q_rows, scale, WARPGROUP: gl.constexpr, CHUNKS: gl.constexpr, WARPGROUPS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, V_DIM: gl.constexpr, HAS_STATE: gl.constexpr, TURNS: gl.constexpr,
    PAIRED: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """The partition of one warpgroup: out, row_max and row_sum of its 64 rows of each query block."""
    ROWS: gl.constexpr = q_smem.shape[1]
    BLOCK_K: gl.constexpr = k_smem.shape[1]
    BLOCK_DV: gl.constexpr = v_smem.shape[2]
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16]))
    # [ROWS, 4]: a column for each of the four threads that share a row of scores
    SUMS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    NEXT: gl.constexpr = (WARPGROUP + 1) % WARPGROUPS
    # rows of 16 bits leave by way of their queries' place, where nobody waits for that
    STAGED: gl.constexpr = out_ptr.dtype.element_ty.primitive_bitwidth == 16 and Q_STAGES > 1 and q_smem.shape[2] == BLOCK_DV
    dtype: gl.constexpr = v_smem.dtype
    if TURNS and WARPGROUP == WARPGROUPS - 1:
        named_barrier("arrive", NEXT)
    block = 0
    taken = 0
    mbarrier.wait(q_full.index(WARPGROUP), 0)
    work = take(work_smem, 0)
    no_scores = zero_block(ROWS, BLOCK_K)
    s = scores_product(q_smem, WARPGROUP, k_smem, k_full, no_scores, 0, work < work_count, CHUNKS, PANELS, STAGES)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(kv_empty.index(0), count=1)
    # at its top the scores of a work's first block are there
    while work < work_count:
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
        else:
            row_max = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
            row_sum = gl.zeros([ROWS, 4], gl.float32, SUMS)
        pivot = row_max
        # [ROWS, columns] for each panel
        acc = zeros(ROWS, part_panels(v_smem.index(0), PANELS))
        if HAS_STATE:
            state = ()
            for panel in gl.static_range(PANELS):
                state += (load_state(state_ptr, acc[panel], old_sum, first_row, head_index, heads, q_rows, V_DIM, panel),)
            acc = state

        start, full_begin, full_end, end = load_segment(segments_ptr, segment)
        if (start < full_begin) | (start >= full_end):
            s = mask_edge(s, start, end, segments_ptr, segment, first_row)
        pairs, alpha, pivot, row_sum, row_max = softmax_step(s, pivot, row_sum, row_max, scale, dtype)
        if HAS_STATE:
            # pinned, or LLVM would merge this product with the loop's own and move it between the loop's matrix products
            acc = [pin(scaled(x, alpha)) for x in acc]
        q_place = taken % Q_STAGES * WARPGROUPS + WARPGROUP
        for _step in range(1, steps):
            start += BLOCK_K
            if start >= end:
                segment += 1
                start, full_begin, full_end, end = load_segment(segments_ptr, segment)
            # block is the one whose values are due, block + 1 the one whose scores are
            if TURNS:
                named_barrier("sync", WARPGROUP)
            if PAIRED:
                s_token = scores_product(q_smem, q_place, k_smem, k_full, s, block + 1, True, CHUNKS, PANELS, STAGES)
            acc_token = start_values(pairs, v_smem, v_full, acc, block, STAGES)
            if TURNS:
                named_barrier("arrive", NEXT)
            if PAIRED:
                # all but the values, of which each panel counts
                s = warpgroup_mma_wait(PANELS, deps=[s_token])
            else:
                acc = wait_for_products(0, acc_token)
                pairs = pin(pairs)
                s_token = scores_product(q_smem, q_place, k_smem, k_full, no_scores, block + 1, True, CHUNKS, PANELS, STAGES)
                s = warpgroup_mma_wait(0, deps=[s_token])
            if (start < full_begin) | (start >= full_end):
                s = mask_edge(s, start, end, segments_ptr, segment, first_row)
            block += 1
            if PAIRED:
                acc = wait_for_products(0, acc_token)
                pairs = pin(pairs)
            mbarrier.arrive(kv_empty.index(block % STAGES), count=1)
            pairs, alpha, pivot, row_sum, row_max = softmax_step(s, pivot, row_sum, row_max, scale, dtype)
            acc = [rescale(x, alpha) for x in acc]
        q_stored = q_place
        if not STAGED:
            mbarrier.arrive(q_empty.index(q_place), count=1)
        acc_token = start_values(pairs, v_smem, v_full, acc, block, STAGES)
        if not PAIRED:
            acc_token = wait_for_products(0, acc_token)

        # the first scores of the next work are under way while this one is written out; after the last work they are nobody's
        block += 1
        taken += 1
        q_place = taken % Q_STAGES * WARPGROUPS + WARPGROUP
        mbarrier.wait(q_full.index(q_place), (taken // Q_STAGES) & 1)
        next_work = take(work_smem, taken % 2)
        s_token = scores_product(
            q_smem, q_place, k_smem, k_full, s if PAIRED else no_scores, block, next_work < work_count, CHUNKS, PANELS, STAGES
        )
        total = gl.convert_layout(gl.sum(row_sum, axis=1), SCORE_ROWS, assert_trivial=True)
        acc = wait_for_products(PANELS, acc_token)
        pairs = pin(pairs)
        out = [divided(x, total, out_ptr.dtype.element_ty) for x in acc]
        s = warpgroup_mma_wait(0, deps=[s_token])
        # the last values of this work, and the next one's first keys
        mbarrier.arrive(kv_empty.index(block % STAGES), count=1)

        # read again rather than held in registers through the loop
        head_index, block_begin, segment, steps = load_work(works_ptr, work)
        first_row = block_begin + WARPGROUP * ROWS
        if STAGED:
            staging = part_panels(q_smem.index(q_stored), PANELS)
            for panel in gl.static_range(PANELS):
                staging[panel].store(out[panel])
            out = [x.load(layout_to_store(x.shape[1])) for x in staging]
        for panel in gl.static_range(PANELS):
            store_out(out_ptr, out[panel], first_row, head_index, heads, q_rows, V_DIM, STAGED, panel)
        if STAGED:
            fence_async_shared()
            barrier()
            mbarrier.arrive(q_empty.index(q_stored), count=1)
        total = gl.where(total == 0, 0.0, total * gl.exp2(pivot - row_max))
        row_max, total = to_natural(row_max, total)
        rows = first_row + gl.arange(0, ROWS, SCORE_ROWS)
        statistics = head_index.to(gl.int64) * q_rows + rows
        gl.store(row_max_ptr + statistics, row_max, mask=rows < q_rows)
        gl.store(row_sum_ptr + statistics, total, mask=rows < q_rows)
        work = next_work


@gluon.jit(do_not_specialize=["work_count", "batches", "heads", "group", "q_rows"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, state_ptr, row_max_ptr, row_sum_ptr, works_ptr, segments_ptr, counter_ptr, work_count, batches, heads,
    group, q_rows, scale, CHUNKS: gl.constexpr, PANELS: gl.constexpr, WARPGROUPS: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, V_DIM: gl.constexpr, HAS_STATE: gl.constexpr, TURNS: gl.constexpr, PAIRED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out, row_max, row_sum of the works of one program; see the module."""
    dtype: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES * WARPGROUPS * CHUNKS, 1, ROWS, 1, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, 1, BLOCK_K, 1, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_K, 1, BLOCK_DV], v_desc.layout)
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_D], dtype)
    V: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=v_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    # the same bytes as matrices
    q_matrices = reinterpret(q_smem, dtype, [Q_STAGES * WARPGROUPS * CHUNKS, ROWS, BLOCK_D], Q)
    k_matrices = reinterpret(k_smem, dtype, [STAGES * CHUNKS, BLOCK_K, BLOCK_D], K)
    v_matrices = reinterpret(v_smem, dtype, [STAGES, BLOCK_K, BLOCK_DV], V)
    # the work at hand and the one after it
    work_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * WARPGROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * WARPGROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # of a block: K has been read, and V of the block before it
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES * WARPGROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    # constants must stay in the calls' own tuples: a name for a tuple would turn them into run-time values
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (load_copies, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, work_smem, q_full, q_empty, k_full, v_full, kv_empty, works_ptr,
                segments_ptr, counter_ptr, work_count, batches, heads, group, CHUNKS, WARPGROUPS, Q_STAGES, STAGES,
            )),
            (attend_rows, (
                q_matrices, k_matrices, v_matrices, work_smem, q_full, q_empty, k_full, v_full, kv_empty, out_ptr, state_ptr,
                row_max_ptr, row_sum_ptr, works_ptr, segments_ptr, work_count, heads, q_rows, scale, 0, CHUNKS, WARPGROUPS, Q_STAGES,
                STAGES, V_DIM, HAS_STATE, TURNS, PAIRED, PANELS,
            )),
            (attend_rows, (
                q_matrices, k_matrices, v_matrices, work_smem, q_full, q_empty, k_full, v_full, kv_empty, out_ptr, state_ptr,
                row_max_ptr, row_sum_ptr, works_ptr, segments_ptr, work_count, heads, q_rows, scale, 1, CHUNKS, WARPGROUPS, Q_STAGES,
                STAGES, V_DIM, HAS_STATE, TURNS, PAIRED, PANELS,
            )),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (load_copies, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, work_smem, q_full, q_empty, k_full, v_full, kv_empty, works_ptr,
                segments_ptr, counter_ptr, work_count, batches, heads, group, CHUNKS, WARPGROUPS, Q_STAGES, STAGES,
            )),
            (attend_rows, (
                q_matrices, k_matrices, v_matrices, work_smem, q_full, q_empty, k_full, v_full, kv_empty, out_ptr, state_ptr,
                row_max_ptr, row_sum_ptr, works_ptr, segments_ptr, work_count, heads, q_rows, scale, 0, CHUNKS, WARPGROUPS, Q_STAGES,
                STAGES, V_DIM, HAS_STATE, TURNS, PAIRED, PANELS,
            )),
            (attend_rows, (
                q_matrices, k_matrices, v_matrices, work_smem, q_full, q_empty, k_full, v_full, kv_empty, out_ptr, state_ptr,
                row_max_ptr, row_sum_ptr, works_ptr, segments_ptr, work_count, heads, q_rows, scale, 1, CHUNKS, WARPGROUPS, Q_STAGES,
                STAGES, V_DIM, HAS_STATE, TURNS, PAIRED, PANELS,
            )),
            (attend_rows, (
                q_matrices, k_matrices, v_matrices, work_smem, q_full, q_empty, k_full, v_full, kv_empty, out_ptr, state_ptr,
                row_max_ptr, row_sum_ptr, works_ptr, segments_ptr, work_count, heads, q_rows, scale, 2, CHUNKS, WARPGROUPS, Q_STAGES,
                STAGES, V_DIM, HAS_STATE, TURNS, PAIRED, PANELS,
            )),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
