"""Compiler fences: inline assembly that tells the compiler to keep a value in place, or hides what the value is.

The compiler is free to move, merge and reuse values as long as each thread computes the same numbers. It does not know that a matrix
product still reads its operands after it was started, nor that an address held in a register for a whole loop costs a spill. Each fence
below is assembly that the compiler may neither remove nor look into.

`pin`, `pin_pairs`    An asynchronous product reads its left operand from registers until it is done. Used behind the wait for a product,
                      a pin makes the operand live until there: else the compiler may give its registers to other values while the
                      product still reads them, and ptxas would serialise all products to prevent that. A pin also stops LLVM from
                      merging the value with another computation and moving it between the products of a loop.
`hide`                The value is the same in each step of a loop. The compiler would compute all addresses that follow from it before the
                      loop, hold them in registers, and spill. Hidden, they are computed where they are used.
`hide_uniform`        As `hide`, but addresses that follow from it stay in uniform registers, which a warp shares and of which there are
                      plenty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pin(x):
    """x, 32 bits an element, kept in its registers up to this place."""
    constraints: gl.constexpr = "=f,0" if x.dtype == gl.float32 else "=r,0"
    return gl.inline_asm_elementwise("", constraints, [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def pin_pairs(x):
    """x, 16 bits an element and two elements a register, kept in its registers up to this place."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def hide(x):
    """x, an integer that the compiler does not know: what follows from it is computed anew at each use."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hide_uniform(x, size):
    """x, an integer that the compiler does not know, in uniform registers: it adds size >> 31, which is 0.

    size: an argument of the kernel, at least 0. It is the same in all threads, so the sum is too.
    """
    return x + gl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [size], dtype=gl.int32, is_pure=False, pack=1)
