"""Tensor descriptors: what the copy engine (TMA) loads or adds, made on the host."""

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .panels import main_columns


@functools.cache
def swizzled_layout(*block: int) -> gl.NVMMASharedLayout:
    """Of a block of 16-bit elements in shared memory, as the tensor cores read it."""
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


@functools.cache
def halves_layout(rank: int) -> gl.NVMMASharedLayout:
    """Of a block of 16-bit elements in groups of 32 columns, so that of 64 a product may take half."""
    return gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=rank)


@functools.cache
def plain_layout(rank: int) -> gl.NVMMASharedLayout:
    """Of a block of 32-bit elements in shared memory, row after row."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


def main_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """For the copy engine to load the main panel of `rows` rows of one head of x (b, s, h, d); rows past the end are zeros."""
    block = [1, rows, 1, main_columns(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, swizzled_layout(*block))


def rest_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor | None:
    """The same for the rest, if there is one, of which a product may take half of the columns."""
    rest = x.shape[3] - main_columns(x.shape[3])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, rest], halves_layout(4)) if rest else None


def row_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """For the copy engine to load `rows` numbers of x, flat."""
    return TensorDescriptor(x, [x.numel()], [1], [rows], plain_layout(1))
