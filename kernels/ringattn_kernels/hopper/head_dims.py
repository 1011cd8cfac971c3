"""The head dims that the Hopper backward kernels are made for, and as which of them others are computed.

Others are computed as the next larger ones: the copy engine fills the columns between with zeros, and those of gradients are not stored.
"""

import functools

Dims = tuple[int, int]  # head dim of q and k, head dim of v

# of the kernel in one pass, and of those for dk and dv and for dq
IN_ONE: tuple[Dims, ...] = ((64, 64), (96, 96), (128, 128), (192, 128))
IN_TWO: tuple[Dims, ...] = ((64, 64), (128, 128), (256, 256))


@functools.cache
def in_one(d: int, v_dim: int) -> Dims | None:
    """As which head dims the kernel in one pass computes these; None where it does not."""
    return next((dims for dims in IN_ONE if d <= dims[0] and v_dim <= dims[1]), None)


@functools.cache
def in_two(d: int, v_dim: int) -> Dims | None:
    """The same of the kernels for dk and dv and for dq: those that they are made for, and what is too large for one pass."""
    if (d, v_dim) in IN_TWO:
        return d, v_dim
    return IN_TWO[-1] if in_one(d, v_dim) is None and max(d, v_dim) <= IN_TWO[-1][0] else None


def chosen_in_one(d: int, v_dim: int) -> Dims:
    """`in_one`, where that kernel was chosen because it computes them."""
    dims = in_one(d, v_dim)
    assert dims is not None
    return dims


def chosen_in_two(d: int, v_dim: int) -> Dims:
    """`in_two`, where those kernels were chosen because they compute them."""
    dims = in_two(d, v_dim)
    assert dims is not None
    return dims
