"""Device functions of the fused backward for the gradients of slopes and biases: sums of dS over pairs.

The gradient of a slope is the sum of -dS * |distance| over all pairs of its head. That of a bias is the sum of dS over the pairs that it is
added to: where all pairs of a block have one bias, a thread sums them up in registers; the others are added to memory one by one, each
at its distance. Which of two additions to memory comes first is not fixed.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fences import hide_uniform
from .score_steps import hexadecimal
from .threads import FIRST_COLUMN, THREADS_OF_ROWS


class SumPointers(NamedTuple):
    """fp32, each None if nobody asks for it. slopes: (b, h), of dS * |distance|. biases: as `score_steps.ScoreSteps.biases_ptr`, of dS."""

    slopes: gl.tensor
    biases: gl.tensor


class ThreadSums(NamedTuple):
    """Of the threads of a warpgroup, [64, 4] fp32; 0 where nobody asks. nearest and farthest: of pairs with the first and last bias."""

    distances: gl.tensor
    nearest: gl.tensor
    farthest: gl.tensor


@gluon.constexpr_function
def _operands(count, outputs, arguments):
    """(constraints of assembly that adds to `outputs` sums, the first register of each operand): two registers of each, for two rows.

    Operands are the sums, then `arguments`, kinds of registers, then `count` columns of numbers, as `columns_of_threads` gives them.
    """
    kinds = [*arguments, *"f" * count]
    firsts = [2 * (2 * outputs + i) for i in range(len(kinds))]
    tied = [str(i) for i in range(2 * outputs)]
    return ",".join(["=f"] * 2 * outputs + tied + [kind for kind in kinds for _ in range(2)]), firsts


@gluon.constexpr_function
def _constraints(count, outputs, arguments):
    return _operands(count, outputs, arguments)[0]


@gluon.constexpr_function
def _pairs(count, first):
    """(register, row, column) of each number that a thread holds of `count` columns: two neighbours, then again from 8 columns on."""
    return [(first + 2 * i + row, row, i % 2 + i // 2 * 8) for i in range(count) for row in range(2)]


@gluon.constexpr_function
def distances_assembly(count):
    """$0 and $1 plus numbers times their |distance|. Arguments: the distance of column 0, and what a column adds, in fp32."""
    registers = _operands(count, 1, "ff")[1]
    base, step, first = registers[0], registers[1], registers[2]
    lines = ["{ .reg .f32 d, f, b<2>; .reg .b32 t;", FIRST_COLUMN, "cvt.rn.f32.u32 f, t;"]
    lines.extend(f"fma.rn.f32 b{row}, ${step}, f, ${base + row};" for row in range(2))
    for register, row, column in _pairs(count, first):
        lines.append(f"fma.rn.f32 d, ${step}, {hexadecimal(column)}, b{row}; abs.f32 d, d;")
        lines.append(f"fma.rn.f32 ${row}, ${register}, d, ${row};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def scatter_assembly(count):
    """Add numbers to memory at their distances, but those with the first bias to $0 and $1 and those with the last one to $2 and $3.

    Arguments: the distance of column 0, as an index of biases; what a column adds to it; the last index; the address of index 0.
    """
    registers = _operands(count, 2, "rrrl")[1]
    base, step, last, address, first = registers[0], registers[1], registers[2], registers[3], registers[4]
    lines = ["{ .reg .pred near, far; .reg .b64 at; .reg .b32 n, t, b<2>;", FIRST_COLUMN]
    lines.extend(f"mad.lo.s32 b{row}, ${step}, t, ${base + row};" for row in range(2))
    for register, row, column in _pairs(count, first):
        lines.append(f"mad.lo.s32 n, ${step}, {column}, b{row}; setp.le.s32 near, n, 0; setp.ge.and.s32 far, n, ${last}, !near;")
        lines.append(f"@near add.f32 ${row}, ${row}, ${register}; @far add.f32 ${2 + row}, ${2 + row}, ${register};")
        lines.append(f"or.pred near, near, far; mad.wide.s32 at, n, 4, ${address}; @!near red.global.add.f32 [at], ${register};")
    return " ".join([*lines, "}"])


@gluon.jit
def columns_of_threads(x):
    """The columns / 4 tensors [64, 4] that x [64, columns] is made of: what each thread holds of one of its columns, in their order."""
    COLUMNS: gl.constexpr = x.shape[1] // 4
    found = (x.reshape([64, COLUMNS // 2, 4, 2]).permute(0, 2, 1, 3).reshape([64, 4, COLUMNS]),)
    for i in gl.static_range(_log2(COLUMNS)):
        halves = ()
        for j in gl.static_range(len(found)):
            halves += gl.split(found[j].reshape([64, 4, 2, COLUMNS >> (i + 1)]).permute(0, 1, 3, 2))
        found = halves
    columns = ()
    for j in gl.static_range(len(found)):
        columns += (gl.convert_layout(found[j].reshape([64, 4]), THREADS_OF_ROWS, assert_trivial=True),)
    return columns


@gluon.constexpr_function
def _log2(number):
    return number.bit_length() - 1


@gluon.jit
def no_sums(pointers):
    """Zeros for what is asked for."""
    zero = gl.zeros([64, 4], gl.float32, THREADS_OF_ROWS)
    distances = 0
    biases = 0
    if pointers.slopes is not None:
        distances = zero
    if pointers.biases is not None:
        biases = zero
    return ThreadSums(distances, biases, biases)


@gluon.jit
def add_to_sums(sums, pointers, ds, score, head_index, q_position, k_position, k_rows):
    """`sums` with those of dS [keys, queries], fp32. head_index: batch * h + head. Positions: of the block's first query and key."""
    COUNT: gl.constexpr = ds.shape[1] // 4
    columns = columns_of_threads(ds)
    distances = sums.distances
    nearest = sums.nearest
    farthest = sums.farthest
    # hidden, so that distances found for the scores are not held until here
    away = hide_uniform(k_position - q_position, k_rows)
    stride = score.place_stride
    rows = gl.expand_dims(stride * gl.arange(0, 64, gl.SliceLayout(1, THREADS_OF_ROWS)), 1)
    if pointers.slopes is not None:
        start = (away + rows).to(gl.float32).broadcast_to([64, 4])
        step = gl.full([64, 4], (-stride).to(gl.float32), gl.float32, THREADS_OF_ROWS)
        DISTANCES: gl.constexpr = distances_assembly(COUNT)
        OF_DISTANCES: gl.constexpr = _constraints(COUNT, 1, "ff")
        of_distances = (distances, start, step) + columns  # noqa: RUF005, which Triton does not know
        distances = gl.inline_asm_elementwise(DISTANCES, OF_DISTANCES, of_distances, dtype=gl.float32, is_pure=True, pack=2)
    if pointers.biases is not None:
        least = away - (ds.shape[1] - 1) * stride
        most = away + (ds.shape[0] - 1) * stride
        if most <= score.nearest:
            for i in gl.static_range(COUNT):
                nearest += columns[i]
        elif least >= score.nearest + score.biases_count - 1:
            for i in gl.static_range(COUNT):
                farthest += columns[i]
        else:
            index = (away - score.nearest + rows).broadcast_to([64, 4])
            addend = gl.full([64, 4], -stride, gl.int32, THREADS_OF_ROWS)
            most_index = gl.full([64, 4], score.biases_count - 1, gl.int32, THREADS_OF_ROWS)
            of_head = pointers.biases + head_index % score.heads * score.biases_count
            to = gl.full([64, 4], of_head.to(gl.int64), gl.int64, THREADS_OF_ROWS)
            SCATTER: gl.constexpr = scatter_assembly(COUNT)
            OF_SCATTER: gl.constexpr = _constraints(COUNT, 2, "rrrl")
            of_scatter = (nearest, farthest, index, addend, most_index, to) + columns  # noqa: RUF005
            nearest, farthest = gl.inline_asm_elementwise(
                SCATTER, OF_SCATTER, of_scatter, dtype=(gl.float32, gl.float32), is_pure=False, pack=2
            )
    return ThreadSums(distances, nearest, farthest)


@gluon.jit
def _to_memory(ptr, sums):
    """Add the sums of all threads to a number."""
    of_warps = gl.sum(gl.sum(sums.reshape([4, 16, 4]), 2), 1)
    WARPS: gl.constexpr = of_warps.type.layout
    gl.atomic_add(ptr + gl.zeros([4], gl.int32, WARPS), of_warps, sem="relaxed")


@gluon.jit
def leave_head(sums, pointers, score, head_index):
    """Add the sums of a head, batch * h + head, to memory, and begin again with zeros."""
    if pointers.slopes is not None:
        _to_memory(pointers.slopes + head_index, sums.distances)
    if pointers.biases is not None:
        of_head = pointers.biases + head_index % score.heads * score.biases_count
        _to_memory(of_head, sums.nearest)
        _to_memory(of_head + score.biases_count - 1, sums.farthest)
    return no_sums(pointers)
