"""What each thread of a warpgroup holds of a product [64, columns]: of two rows, two neighbouring columns of every eight.

Four threads of a warp share a row. A thread's second row is 8 below its first.
"""

from triton.experimental.gluon import language as gl

# of [64, 4]: for each row of a product, a number of each of the four threads that share it
THREADS_OF_ROWS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)

# PTX that leaves the first column of a thread in its register t, of .b32
FIRST_COLUMN = "mov.u32 t, %laneid; and.b32 t, t, 3; shl.b32 t, t, 1;"
