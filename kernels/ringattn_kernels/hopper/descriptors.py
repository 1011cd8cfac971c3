"""Tensor descriptors: what the copy engine (TMA) loads or adds, made on the host."""

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..direct import mover
from .panels import main_columns_of

_KEPT = 1024  # kinds of descriptors


@functools.cache
def swizzled_layout(*block: int) -> gl.NVMMASharedLayout:
    """The layout of a block of 16-bit elements in shared memory, as the tensor cores read it."""
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


@functools.cache
def halves_layout(rank: int) -> gl.NVMMASharedLayout:
    """The layout of a block of 16-bit elements in groups of 32 columns, so that a product may take half of 64."""
    return gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=rank)


@functools.cache
def plain_layout(rank: int) -> gl.NVMMASharedLayout:
    """The layout of a block of 32-bit elements in shared memory, row after row."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether rows of x (b, s, h, d), in 16 bits, lie at multiples of 16 bytes, as the copy engine needs them."""
    return x.data_ptr() % 16 == 0 and not any(stride % 8 for stride in x.stride()[:3])


def described(
    x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """A descriptor of blocks of x. Triton checks the first of each kind, which takes longer than all else here."""
    assert x.data_ptr() % 16 == 0, "the copy engine needs an address that is a multiple of 16"
    makers = _makers(x.dtype, shape, strides, block, layout)
    if not makers:
        makers.append(mover(TensorDescriptor(x, list(shape), list(strides), list(block), layout)))
    return makers[0](x)


@functools.lru_cache(_KEPT)
def _makers(*kind: object) -> list:
    return []


def main_descriptor(x: torch.Tensor, rows: int, head_dim: int) -> TensorDescriptor:
    """The descriptor by which the copy engine loads the main panel of `rows` rows of a head of x (b, s, h, d), with zeros past the end.

    head_dim: as which d is computed, d or more.
    """
    block = 1, rows, 1, main_columns_of(head_dim)
    return described(x, x.shape, x.stride(), block, swizzled_layout(*block))


def rest_descriptor(x: torch.Tensor, rows: int, head_dim: int) -> TensorDescriptor | None:
    """The same for the rest, if there is one. A product may take half of its columns."""
    rest = head_dim - main_columns_of(head_dim)
    return described(x, x.shape, x.stride(), (1, rows, 1, rest), halves_layout(4)) if rest else None


def row_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """The descriptor by which the copy engine loads `rows` numbers of x, flat."""
    return described(x, (x.numel(),), (1,), (rows,), plain_layout(1))
