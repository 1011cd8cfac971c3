"""Compiler fences: assembly without an effect of its own, which tells the compiler where a value must be computed or kept."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pin(x):
    """x, at a place that the compiler cannot move: a left operand in registers must live until the product that reads it is done."""
    constraints: gl.constexpr = "=f,0" if x.dtype == gl.float32 else "=r,0"
    return gl.inline_asm_elementwise("", constraints, [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def opaque(x):
    """x, behind the compiler's back: an operand in registers must stay where it is until its product is done."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def here(x):
    """x, an integer, computed anew where this stands, with the addresses that follow from it, which otherwise would take registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def anew(x, size):
    """x, an integer, in a way that keeps the compiler from knowing it before it is used: of addresses that follow from it, it would keep
    dozens over a loop, and spill them. size >= 0 is an argument of the kernel, so that they follow in uniform registers.
    """
    return x + gl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [size], dtype=gl.int32, is_pure=False, pack=1)
