"""What launches make of slopes and biases, and of the gradients that they find: small sums and look-ups, each in one launch.

A bias has a number for each head and piece of distances. Hopper kernels read one for each distance, and find a gradient for each.

Shapes: b batch, h query heads, n pieces, m distances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launches


def spread(values: torch.Tensor, pieces: torch.Tensor) -> torch.Tensor:
    """values[:, pieces]: values (h, n) fp32, contiguous; pieces (m,) int32."""
    h, n = values.shape
    assert values.is_contiguous() and values.dtype == torch.float32
    found = values.new_empty(h, len(pieces))
    block = _block(values)
    moving = dict(values_ptr=values, pieces_ptr=pieces, found_ptr=found)

    def make() -> tuple[tuple[int, int], dict]:
        return (triton.cdiv(len(pieces), block), h), moving | dict(n=n, m=len(pieces), BLOCK=block)

    launches.launch(spread_kernel, None, (block,), moving, make, num_warps=4)
    return found


@triton.jit(do_not_specialize=["n", "m"])
def spread_kernel(values_ptr, pieces_ptr, found_ptr, n, m, BLOCK: tl.constexpr):
    """BLOCK distances of one head."""
    head = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < m
    values = tl.load(values_ptr + head * n + tl.load(pieces_ptr + places, mask=inside, other=0), mask=inside, other=0.0)
    tl.store(found_ptr + head * m + places, values, mask=inside)


def add_to_pieces(totals: torch.Tensor, found: torch.Tensor, firsts: torch.Tensor) -> None:
    """Add to each number of totals (h, n) those of found (h, m) at the distances of its piece, in a fixed order; both fp32, contiguous.

    firsts: (n + 1,) int32, where each piece begins; the last is m.
    """
    (h, n), m = totals.shape, found.shape[1]
    assert (
        totals.is_contiguous() and found.is_contiguous() and totals.dtype == found.dtype == torch.float32 and len(firsts) == n + 1
    )
    block = _block(totals)
    moving = dict(totals_ptr=totals, found_ptr=found, firsts_ptr=firsts)

    def make() -> tuple[tuple[int, int], dict]:
        return (n, h), moving | dict(m=m, BLOCK=block)

    launches.launch(add_to_pieces_kernel, None, (block,), moving, make, num_warps=4)


@triton.jit(do_not_specialize=["m"])
def add_to_pieces_kernel(totals_ptr, found_ptr, firsts_ptr, m, BLOCK: tl.constexpr):
    """One piece of one head."""
    piece = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    begin = tl.load(firsts_ptr + piece)
    end = tl.load(firsts_ptr + piece + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        total += tl.load(found_ptr + head * m + places, mask=places < end, other=0.0)
    pointer = totals_ptr + head * tl.num_programs(0) + piece
    tl.store(pointer, tl.load(pointer) + tl.sum(total, 0))


def subtract_distances(slopes: torch.Tensor, found: torch.Tensor) -> None:
    """Take sums of dS * |distance|, found (b, h, parts), from the gradients of slopes (b or 1, h), as `add_sums` adds."""
    b, h, parts = found.shape
    assert slopes.shape in ((b, h), (1, h))
    add_sums(slopes.view(-1, 1), found.view(-1, slopes.numel(), parts, 1), sign=-1)


def add_sums(totals: torch.Tensor, found: torch.Tensor, sign: int = 1) -> None:
    """Add to totals (h, n), or take from them, what was found for each, (b, h, parts, n), in a fixed order; both fp32, contiguous.

    Sums are fp64.
    """
    b, h, parts, n = found.shape
    assert totals.is_contiguous() and found.is_contiguous() and totals.dtype == found.dtype == torch.float32
    assert totals.shape == (h, n)
    columns = min(triton.next_power_of_2(n), 16)
    rows = _block(totals) // columns
    moving = dict(totals_ptr=totals, found_ptr=found)

    def make() -> tuple[tuple[int, int], dict]:
        return (h, triton.cdiv(n, columns)), moving | dict(batches=b, parts=parts, n=n, SIGN=sign, ROWS=rows, COLUMNS=columns)

    launches.launch(add_sums_kernel, None, (rows, sign), moving, make, num_warps=4)


@triton.jit(do_not_specialize=["batches", "parts", "n"])
def add_sums_kernel(
    totals_ptr, found_ptr, batches, parts, n, SIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """COLUMNS of one row of the totals."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    total = tl.zeros([ROWS, COLUMNS], tl.float64)
    for batch in range(batches):
        first = (batch * tl.num_programs(0) + head) * parts
        for start in range(0, parts, ROWS):
            rows = start + tl.arange(0, ROWS)
            places = (first + rows)[:, None] * n + columns[None, :]
            total += tl.load(found_ptr + places, mask=(rows < parts)[:, None] & inside[None, :], other=0.0)
    pointers = totals_ptr + head * n + columns
    before = tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, (before + SIGN * tl.sum(total, 0)).to(tl.float32), mask=inside)


def _block(x: torch.Tensor) -> int:
    return 16 if x.device.type == "cpu" else 256
