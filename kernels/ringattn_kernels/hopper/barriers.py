"""Waiting: of warpgroups for each other, of one kernel for another, and of programs for their turn."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .language import barrier


@gluon.jit
def advance(index, phase, COUNT: gl.constexpr):
    """The next of COUNT buffers in a ring, and the phase of its barrier."""
    index += 1
    if index == COUNT:
        index = 0
        phase ^= 1
    return index, phase


@gluon.jit
def named_barrier(KIND: gl.constexpr, index, some=1):
    """KIND sync: wait until another warpgroup has arrived; arrive: arrive without waiting. Where `some` is 0, do nothing.

    index: up to 7. Triton uses the multiprocessor's first eight barriers, this one the others.
    """
    gl.inline_asm_elementwise(
        f"""
        {{
            .reg .pred %p;
            .reg .b32 %number;
            setp.ne.b32 %p, $2, 0;
            add.u32 %number, $1, 8;
            @%p bar.{KIND} %number, 256;
            mov.b32 $0, 0;
        }}
        """,
        "=r,r,r",
        [index, some],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def let_next_kernel_start():
    """Let programs of the next kernel, if launched with `launch_pdl`, take the places that the last programs of this kernel leave empty."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_kernel_before():
    """Wait until the kernel before this one is done and its writes are visible. Later work in the stream waits only for this kernel."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def look(counter_ptr):
    """Ask whose turn it is, for `wait_for_turn`. Work between the two hides the time that the answer takes."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_turn(counter_ptr, item, seen):
    """Wait until it is this item's turn. If it was its turn when `seen` was read, it still is."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred %p;
            .reg .b32 %now;
            mov.b32 %now, $3;
            setp.eq.b32 %p, %now, $2;
            @%p bra come;
        again:
            ld.relaxed.gpu.global.b32 %now, [$1];
            setp.ne.b32 %p, %now, $2;
            @%p bra again;
        come:
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [counter_ptr, item, seen],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_until_stored(LEFT: gl.constexpr):
    """Wait until the copy engine has written what this partition gave it, but for the last LEFT times; then all its threads see that."""
    ASM: gl.constexpr = f"cp.async.bulk.wait_group {LEFT}; // $0"
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    barrier()


@gluon.jit
def pass_turn(counter_ptr, successor):
    """Write the successor's number once the copy engine has added everything, not only read it. The partition's first warp gives it orders.

    Relaxed, like `look`: items read nothing that another item wrote, except the counter. Sums are added where all multiprocessors
    meet, in the L2, and a finished addition is there. A release would wait for more, and take a tenth of the kernel's time.
    """
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred %p;
            .reg .b32 %thread;
            cp.async.bulk.wait_group 0;
            bar.warp.sync 0xffffffff;
            mov.u32 %thread, %tid.x;
            setp.eq.u32 %p, %thread, 0;
            @%p st.relaxed.gpu.global.b32 [$1], $2;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [counter_ptr, successor],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
