"""Which weights of a block dropout keeps, on Hopper: the pairs of `ringattn.device.philox`, as bits.

One draw of the generator decides eight pairs: those of queries q and q + 8 with keys k, k + 1, k + 8 and k + 9. A thread's part of a matrix
product is made of such pairs, if the positions of blocks are multiples of 16. Where columns are keys a thread draws just what it needs.
Where columns are queries it holds one key of a pair, and its neighbour by 4 lanes the other: each draws for every other query, and they
exchange what they find.

A thread has 32 bits for each of its two rows: 16 for its even columns and above them 16 for its odd ones. After a shift to the left the
highest bits of both halves say whether two neighbours are kept, and `prmt` makes masks of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..modifiers import LEVELS, ROUNDS
from .forward_softmax import in_place
from .threads import THREADS_OF_ROWS

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@gluon.constexpr_function
def _philox(q_group, k_group):
    """Leaves the four words of one draw in c0 to c3. The key is 0, so that the keys of all rounds are constants."""
    lines = [f"mov.b32 c0, {q_group}; mov.b32 c1, {k_group}; mov.b32 c2, $6; mov.b32 c3, $8;"]
    for i in range(ROUNDS):
        lines.append(f"mul.wide.u32 first, c0, {_MULTIPLIERS[0]:#x}; mul.wide.u32 second, c2, {_MULTIPLIERS[1]:#x};")
        lines.append("mov.b64 {lo0, hi0}, first; mov.b64 {lo1, hi1}, second;")
        for target, high, other, low, weyl in (("c0", "hi1", "c1", "lo1", _WEYL[0]), ("c2", "hi0", "c3", "lo0", _WEYL[1])):
            # 0x96: the exclusive or of three
            lines.append(f"lop3.b32 {target}, {high}, {other}, {i * weyl % 2**32:#x}, 0x96; mov.b32 {other}, {low};")
    return " ".join(lines)


@gluon.constexpr_function
def draw_assembly(columns, direction):
    """Bits of two rows, $0 and $1, of `columns` columns. From $2 on, in pairs: the position of the block's first query, halved, and of its
    first key, quartered; the two words of a stream; of LEVELS numbers, those that drop a pair."""
    lines = [
        "{ .reg .pred p; .reg .b64 first, second; .reg .b32 lo0, hi0, lo1, hi1, c<4>, g, base, limit;",
        ".reg .b32 lane, warp, row, col, odd, got, pick;",
        f"sub.s32 limit, {LEVELS}, $10; mul.lo.s32 limit, limit, 0x10001;",
        "mov.u32 lane, %laneid; mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; and.b32 warp, warp, 3;",
        "shr.u32 row, lane, 2; and.b32 col, lane, 3; mov.b32 $0, 0; mov.b32 $1, 0;",
    ]
    if direction == 1:
        lines.append("shl.b32 g, warp, 3; add.s32 base, $2, g; add.s32 base, base, row; add.s32 col, $4, col;")
        groups, step, rows = ("base", "g"), 4, (0, 0, 1, 1)
    else:
        # rows are keys; an odd row draws for odd queries
        lines.append("and.b32 odd, row, 1; shl.b32 col, col, 1; add.s32 col, col, $2; add.s32 col, col, odd;")
        lines.append("shr.u32 row, row, 1; shl.b32 g, warp, 2; add.s32 base, $4, g; add.s32 base, base, row;")
        groups, step, rows = ("g", "base"), 8, (0, 1, 0, 1)
    for m in range(columns // 16):
        lines.append(f"add.s32 g, col, {step * m};")
        lines.append(_philox(*groups))
        for word, row in enumerate(rows):
            # the highest bits of both halves: whether 15 bits are at least the limit. They go on top of the bits so far (0xd8: select)
            lines.append(f"and.b32 c{word}, c{word}, 0x7fff7fff; add.s32 c{word}, c{word}, limit;")
            lines.append(f"shr.u32 ${row}, ${row}, 1; lop3.b32 ${row}, ${row}, c{word}, 0x80008000, 0xd8;")
    if direction == -1:
        # halves are of even and of odd keys; each thread needs its own key's, of the even queries and of the odd ones
        lines.append("setp.eq.s32 p, odd, 1; selp.b32 pick, 0x3276, 0x5410, p;")
        lines.extend(f"shfl.sync.bfly.b32 got, ${i}, 4, 31, 0xffffffff; prmt.b32 ${i}, ${i}, got, pick;" for i in range(2))
    return " ".join([*lines, "}"])


@gluon.jit
def kept_bits(stream, dropped, q_position, k_position, COLUMNS: gl.constexpr, DIRECTION: gl.constexpr):
    """[64, 4] int32: for each row, and each of the four threads that share it, whether its pairs are kept.

    stream: the two words of `score_steps.stream_of`. dropped: of LEVELS numbers, those that drop a pair. q_position and k_position: of the
    block's first query and key, multiples of 16.
    """
    ASM: gl.constexpr = draw_assembly(COLUMNS, DIRECTION)
    numbers = (q_position >> 1, k_position >> 2, stream[0], stream[1], dropped)
    arguments = ()
    for i in gl.static_range(5):
        arguments += (gl.full([64, 4], numbers[i], gl.int32, THREADS_OF_ROWS),)
    CONSTRAINTS: gl.constexpr = "=&r,=&r" + ",r" * 10
    # not pure: the compiler would move it to where the bits are used, where registers are few
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, arguments, dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def of_columns(bits, x, NEIGHBOURS: gl.constexpr):
    """[64, 4] in the shape of x [64, columns]: the same register for all columns of a thread's row. NEIGHBOURS: of x, in a thread."""
    parts = x.reshape([64, x.shape[1] // (4 * NEIGHBOURS), 4, NEIGHBOURS])
    PARTS: gl.constexpr = parts.type.layout
    bits = gl.convert_layout(bits, gl.SliceLayout(1, gl.SliceLayout(3, PARTS)), assert_trivial=True)
    bits = gl.expand_dims(gl.expand_dims(bits, 1), 3).broadcast_to(parts.shape).reshape(x.shape)
    return gl.convert_layout(bits, x.type.layout, assert_trivial=True)


@gluon.constexpr_function
def pairs_assembly(count, bits):
    """Zeros for what is dropped, in `count` registers of two neighbours each, of two rows in turn. bits: the registers of rows' bits."""
    # all bits of a neighbour are the highest bit of its half
    masks = (f"shl.b32 m, ${bits[i % 2]}, {(count - 1) // 2 - i // 2}; prmt.b32 m, m, 0, 0xbb99;" for i in range(count))
    return " ".join(["{ .reg .b32 m;", *(f"{mask} and.b32 ${i}, ${i}, m;" for i, mask in enumerate(masks)), "}"])


@gluon.jit
def drop_pairs(pairs, bits):
    """pairs [64, columns / 2], of 16-bit numbers each, with zeros for those that are dropped."""
    COUNT: gl.constexpr = pairs.shape[1] // 2
    ASM: gl.constexpr = pairs_assembly(COUNT, (2 * COUNT, 2 * COUNT + 1))
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "r", "r")
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [pairs, of_columns(bits, pairs, 1)], dtype=gl.int32, is_pure=True, pack=COUNT
    )


@gluon.jit
def drop_halves(x, bits):
    """x [64, columns], 16 bits an element, with zeros for those that are dropped."""
    COUNT: gl.constexpr = x.shape[1] // 2
    ASM: gl.constexpr = pairs_assembly(COUNT // 2, (COUNT, COUNT + 2))
    CONSTRAINTS: gl.constexpr = in_place(COUNT // 2, "rr", "r")
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, of_columns(bits, x, 2)], dtype=x.dtype, is_pure=True, pack=COUNT)


@gluon.constexpr_function
def values_assembly(count, bits):
    """Zeros for what is dropped, in `count` registers of fp32: two neighbours of a row, two of another, and so on. bits: of both rows."""
    lines = ["{ .reg .b32 m, n, x;"]
    for i in range(0, count, 2):
        lines.append(f"shl.b32 m, ${bits[i // 2 % 2]}, {(count // 2 - 1) // 2 - i // 4};")
        lines.append("prmt.b32 n, m, 0, 0xbbbb; prmt.b32 m, m, 0, 0x9999;")
        for mask, at in (("m", i), ("n", i + 1)):
            lines.append(f"mov.b32 x, ${at}; and.b32 x, x, {mask}; mov.b32 ${at}, x;")
    return " ".join([*lines, "}"])


@gluon.jit
def drop_values(x, bits):
    """x [64, columns], fp32, with zeros for those that are dropped."""
    COUNT: gl.constexpr = x.shape[1] // 2
    ASM: gl.constexpr = values_assembly(COUNT, (2 * COUNT, 2 * COUNT + 2))
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "r")
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, of_columns(bits, x, 2)], dtype=gl.float32, is_pure=True, pack=COUNT)
