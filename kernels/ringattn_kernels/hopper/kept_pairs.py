"""Which weights of a block dropout keeps, on Hopper: the pairs of `ringattn.device.philox`.

One draw of the generator decides eight pairs: those of queries q and q + 8 with keys k, k + 1, k + 8 and k + 9. A thread's part of a matrix
product is made of such pairs, if the positions of blocks are multiples of 16.

In the forward columns are keys. A thread draws just what it needs, beside its exponentials, and sets weights to 0 at once. In the backward
columns are queries. A thread holds one key of a pair, and its neighbour by 4 lanes the other: each draws for every other query, and they
exchange what they find. It draws while a product runs, and holds 32 bits for each of its two rows: 16 for its even columns and above them
16 for its odd ones. After a shift to the left the highest bits of both halves say whether two neighbours are kept, and `prmt` makes masks
of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..modifiers import ROUNDS
from .forward_softmax import in_place
from .threads import THREADS_OF_ROWS

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@gluon.constexpr_function
def _philox(q_group, k_group, stream):
    """Leaves the four words of one draw in c0 to c3. The key is 0, so that the keys of all rounds are constants."""
    lines = [f"mov.b32 c0, {q_group}; mov.b32 c1, {k_group}; mov.b32 c2, {stream[0]}; mov.b32 c3, {stream[1]};"]
    for i in range(ROUNDS):
        lines.append(f"mul.wide.u32 first, c0, {_MULTIPLIERS[0]:#x}; mul.wide.u32 second, c2, {_MULTIPLIERS[1]:#x};")
        lines.append("mov.b64 {lo0, hi0}, first; mov.b64 {lo1, hi1}, second;")
        for target, high, other, low, weyl in (("c0", "hi1", "c1", "lo1", _WEYL[0]), ("c2", "hi0", "c3", "lo0", _WEYL[1])):
            # 0x96: the exclusive or of three
            lines.append(f"lop3.b32 {target}, {high}, {other}, {i * weyl % 2**32:#x}, 0x96; mov.b32 {other}, {low};")
    return " ".join(lines)


@gluon.constexpr_function
def _compare(word):
    """Sets all bits of each half of a word if the half's lower 15 bits are at least the limit's, and none if not.

    One instruction compares both halves as fp16: numbers without signs have the order of their bits, and "not less" holds of what is no
    number, whose bits are above all others. The limit itself is a number, or infinity (see `score_arguments.hopper_obstacle`).
    """
    return f"abs.f16x2 {word}, {word}; set.geu.u32.f16x2 {word}, {word}, limit;"


@gluon.constexpr_function
def draw_assembly(columns):
    """Bits of two rows of keys, $0 and $1, for `columns` queries. From $2 on, in pairs: the rows' groups of keys; the position of the
    block's first query, halved; the two words of a stream; of LEVELS numbers, those that drop a pair."""
    lines = [
        "{ .reg .pred p; .reg .b64 first, second; .reg .b32 lo0, hi0, lo1, hi1, c<4>, g, limit, odd, col, got, pick;",
        "mul.lo.s32 limit, $10, 0x10001; mov.u32 col, %laneid; shr.u32 odd, col, 2; and.b32 odd, odd, 1; and.b32 col, col, 3;",
        # an odd row draws for odd queries
        "shl.b32 col, col, 1; add.s32 col, col, $4; add.s32 col, col, odd; mov.b32 $0, 0; mov.b32 $1, 0;",
    ]
    for m in range(columns // 16):
        lines.append(f"add.s32 g, col, {8 * m};")
        lines.append(_philox("g", "$2", ("$6", "$8")))
        for word, row in enumerate((0, 1, 0, 1)):
            # the bit of the second of two columns is the higher one (0xea: and, or)
            at = 16 - columns // 8 + 2 * m + word // 2
            lines.append(f"{_compare(f'c{word}')} lop3.b32 ${row}, c{word}, {0x10001 << at:#x}, ${row}, 0xea;")
    # halves are of even and of odd keys; each thread needs its own key's, of the even queries and of the odd ones
    lines.append("setp.eq.s32 p, odd, 1; selp.b32 pick, 0x3276, 0x5410, p;")
    lines.extend(f"shfl.sync.bfly.b32 got, ${i}, 4, 31, 0xffffffff; prmt.b32 ${i}, ${i}, got, pick;" for i in range(2))
    return " ".join([*lines, "}"])


@gluon.jit
def kept_bits(stream, dropped, q_position, k_position, COLUMNS: gl.constexpr):
    """[64, 4] int32: for each row of keys, and each of the four threads that share it, whether its pairs are kept.

    stream: the two words of `score_steps.stream_of`. dropped: of LEVELS numbers, those that drop a pair. q_position and k_position: of the
    block's first query and key, multiples of 16.
    """
    ASM: gl.constexpr = draw_assembly(COLUMNS)
    # of the layout's rows, not of %tid in assembly: ptxas would take the descriptors of products for numbers that differ between warps
    rows = gl.arange(0, 64, gl.SliceLayout(1, THREADS_OF_ROWS))
    groups = (k_position >> 2) + ((rows >> 4 << 2) | (rows >> 1 & 3))
    numbers = (q_position >> 1, stream[0], stream[1], dropped)
    arguments = (gl.expand_dims(groups, 1).broadcast_to([64, 4]),)
    for i in gl.static_range(4):
        arguments += (gl.full([64, 4], numbers[i], gl.int32, THREADS_OF_ROWS),)
    CONSTRAINTS: gl.constexpr = "=&r,=&r" + ",r" * 10
    # not pure: the compiler would move it to where the bits are used, where registers are few
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, arguments, dtype=gl.int32, is_pure=False, pack=2)


@gluon.constexpr_function
def drop_assembly(count):
    """Zeros for what is dropped, in `count` registers of two neighbouring keys each, of two rows of queries in turn.

    After these and their values before, in `count` registers each: the rows' groups of queries; the position of the block's first key,
    quartered; the two words of a stream; of LEVELS numbers, those that drop a pair.
    """
    groups, first, low, high, dropped = (f"${n * count}" for n in range(2, 7))
    lines = ["{ .reg .b64 first, second; .reg .b32 lo0, hi0, lo1, hi1, c<4>, g, limit, col;"]
    lines.append(f"mul.lo.s32 limit, {dropped}, 0x10001; mov.u32 col, %laneid; and.b32 col, col, 3; add.s32 col, {first}, col;")
    for m in range(count // 4):
        lines.append(f"add.s32 g, col, {4 * m};")
        lines.append(_philox(groups, "g", (low, high)))
        for word, at in enumerate((0, 2, 1, 3)):
            lines.append(f"{_compare(f'c{word}')} and.b32 ${4 * m + at}, ${4 * m + at}, c{word};")
    return " ".join([*lines, "}"])


@gluon.jit
def drop_drawn(pairs, stream, dropped, q_position, k_position):
    """pairs [64 queries, keys / 2], of 16-bit numbers each, with zeros for those that are dropped. Other arguments as of `kept_bits`.

    It holds no bits and has no branch, so that draws for some weights run beside exponentials of others.
    """
    COUNT: gl.constexpr = pairs.shape[1] // 2
    ASM: gl.constexpr = drop_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "rrrrr", "r")
    rows = gl.arange(0, 64, gl.SliceLayout(1, pairs.type.layout))
    groups = (q_position >> 1) + ((rows >> 4 << 3) | (rows & 7))
    numbers = (k_position >> 2, stream[0], stream[1], dropped)
    arguments = (pairs, gl.expand_dims(groups, 1).broadcast_to(pairs.shape))
    for i in gl.static_range(4):
        arguments += (gl.full(pairs.shape, numbers[i], gl.int32, pairs.type.layout),)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, arguments, dtype=gl.int32, is_pure=True, pack=COUNT)


@gluon.jit
def of_columns(bits, x):
    """[64, 4] in the shape of x [64, columns]: the same register for all columns of a thread's row, of which two are neighbours."""
    parts = x.reshape([64, x.shape[1] // 8, 4, 2])
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
def drop_halves(x, bits):
    """x [64, columns], 16 bits an element, with zeros for those that are dropped."""
    COUNT: gl.constexpr = x.shape[1] // 2
    ASM: gl.constexpr = pairs_assembly(COUNT // 2, (COUNT, COUNT + 2))
    CONSTRAINTS: gl.constexpr = in_place(COUNT // 2, "rr", "r")
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, of_columns(bits, x)], dtype=x.dtype, is_pure=True, pack=COUNT)


@gluon.constexpr_function
def values_assembly(count):
    """Zeros in `count` registers of fp32 where a number of 16 bits, of two in each register from 2 * $count on, is 0."""
    lines = ["{ .reg .pred p, q; .reg .b32 none; mov.b32 none, 0;"]
    for i in range(0, count, 2):
        # as fp16, whatever they are: "not equal" holds of all bits but those of 0 and -0
        lines.append(f"setp.neu.f16x2 p|q, ${2 * count + i // 2}, none;")
        lines.append(f"selp.f32 ${i}, ${i}, 0f00000000, p; selp.f32 ${i + 1}, ${i + 1}, 0f00000000, q;")
    return " ".join([*lines, "}"])


@gluon.jit
def where_kept(x, weights):
    """x [64, columns], fp32, with zeros where weights, of 16 bits, are 0: dropped, or less than 16 bits hold."""
    COUNT: gl.constexpr = x.shape[1] // 2
    ASM: gl.constexpr = values_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place(COUNT, "") + ",r" * (COUNT // 2)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, weights], dtype=gl.float32, is_pure=True, pack=COUNT)
