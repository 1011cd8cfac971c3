"""What each thread of a warpgroup holds of a product [64, columns]: of two rows, two neighbouring columns of every eight.

Four threads of a warp share a row. A thread's second row is 8 below its first. 16-bit results are rearranged among them to be stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# of [64, 4]: for each row of a product, a number of each of the four threads that share it
THREADS_OF_ROWS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)

# PTX that leaves the first column of a thread in its register t, of .b32
FIRST_COLUMN = "mov.u32 t, %laneid; and.b32 t, t, 3; shl.b32 t, t, 1;"


@gluon.constexpr_function
def layout_to_store(columns):
    """The layout of [64, columns] 16-bit numbers: a thread has 8 columns side by side, and one instruction stores 32 columns of a row."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 1 << i] for i in range(5, (columns - 1).bit_length()))]
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns])


def exchange_assembly() -> str:
    """PTX that transposes: four threads that share a row hold four registers of it each. Of two rows: those of even and of odd number."""
    lines = ["{ .reg .pred one; .reg .pred two; .reg .b32 lane; .reg .b32 sent; .reg .b32 got; mov.u32 lane, %laneid;"]
    lines += ["and.b32 sent, lane, 1; setp.gt.u32 one, sent, 0; and.b32 sent, lane, 2; setp.gt.u32 two, sent, 0;"]
    # across the diagonal of each 2 x 2 block, then of the blocks
    for lane, odd, pairs in ((1, "one", ((0, 1), (2, 3))), (2, "two", ((0, 2), (1, 3)))):
        for low, high in [(2 * low + row, 2 * high + row) for low, high in pairs for row in (0, 1)]:
            lines += [
                f"selp.b32 sent, ${low}, ${high}, {odd};",
                f"shfl.sync.bfly.b32 got, sent, {lane}, 0x1f, 0xffffffff;",
                f"selp.b32 ${low}, got, ${low}, {odd};",
                f"selp.b32 ${high}, ${high}, got, {odd};",
            ]
    return "\n".join([*lines, "}"])


EXCHANGE = gl.constexpr(exchange_assembly())
IN_PLACE = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,0,1,2,3,4,5,6,7")


@gluon.jit
def wide_rows(x):
    """A product's [64, columns] in 16 bits, in the layout of `layout_to_store`. Threads that share a row exchange what they hold."""
    COLUMNS: gl.constexpr = x.type.shape[1]
    # a thread's 16 numbers: two columns, of two rows, of four groups of eight columns
    x = gl.inline_asm_elementwise(EXCHANGE, IN_PLACE, [x], dtype=x.dtype, is_pure=False, pack=16)
    # groups and threads have changed places
    x = gl.permute(gl.reshape(x, [64, COLUMNS // 32, 4, 4, 2]), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(x, [64, COLUMNS]), layout_to_store(COLUMNS))
