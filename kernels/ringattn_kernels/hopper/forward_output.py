"""How the Hopper forward reads a state and writes its output: places and masks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .forward_softmax import scaled
from .language import async_store, barrier, reinterpret
from .panels import part_panels
from .threads import wide_rows


@gluon.jit
def out_place(
    block_begin, head_index, heads, q_rows, V_DIM: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr,
    PANEL: gl.constexpr,
):  # fmt: skip
    """(offsets, mask) of ROWS rows and COLUMNS columns, from column 64 * PANEL on, of out and of the state; both are contiguous."""
    # [ROWS]
    rows = block_begin + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = PANEL * 64 + gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    offsets = ((head_index // heads).to(gl.int64) * q_rows + rows) * heads + head_index % heads
    mask = (gl.expand_dims(rows, 1) < q_rows) & (columns < V_DIM)
    return gl.expand_dims(offsets, 1) * V_DIM + columns, mask


@gluon.jit
def store_out(out_ptr, out, first_row, head_index, heads, q_rows, V_DIM: gl.constexpr, PANEL: gl.constexpr):
    """Store rows of a panel of out. In 16 bits a product leaves a thread 4 bytes side by side, half of the least that memory moves.
    At d = 256 there is no room to rearrange them."""
    ROWS: gl.constexpr = out.shape[0]
    COLUMNS: gl.constexpr = out.shape[1]
    if out.dtype.primitive_bitwidth == 16 and COLUMNS <= 128:
        out = wide_rows(out)
    LAYOUT: gl.constexpr = out.type.layout
    offsets, mask = out_place(first_row, head_index, heads, q_rows, V_DIM, ROWS, COLUMNS, LAYOUT, PANEL)
    gl.store(out_ptr + offsets, out, mask=mask)


@gluon.jit
def copy_out(out_desc, place, out, first_row, head_index, heads, PART: gl.constexpr):
    """Have the copy engine store rows of out, in panels, from a place in shared memory that is free. PART: of blocks side by side."""
    BLOCK: gl.constexpr = out_desc.block_type.shape
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK[1], BLOCK[3]], out_desc.dtype)
    panels = part_panels(reinterpret(place, out_desc.dtype, [BLOCK[1], BLOCK[3]], LAYOUT), len(out))
    for panel in gl.static_range(len(out)):
        panels[panel].store(out[panel])
    fence_async_shared()
    barrier()
    block = reinterpret(place, out_desc.dtype, BLOCK, out_desc.layout)
    async_store(out_desc, [head_index // heads, first_row, head_index % heads, PART * BLOCK[3]], block)


@gluon.jit
def load_state(state_ptr, acc, old_sum, first_row, head_index, heads, q_rows, V_DIM: gl.constexpr, PANEL: gl.constexpr):
    """A panel of the state times the sums of its rows, in the shape and layout of acc."""
    OUT: gl.constexpr = acc.type.layout
    offsets, mask = out_place(first_row, head_index, heads, q_rows, V_DIM, acc.shape[0], acc.shape[1], OUT, PANEL)
    return scaled(gl.load(state_ptr + offsets, mask=mask, other=0.0), old_sum)
