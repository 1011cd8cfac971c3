"""Stand-ins: tensors that have an address, and no memory there. A pass that is rehearsed gets them in place of its inputs.

They are made through DLPack, by which libraries hand tensors to each other: torch takes shape, strides and address as they are told.
Whoever reads or writes a stand-in on a device breaks the program.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import torch

_FIRST = 1 << 46  # where neither a GPU nor a CPU has memory
_APART = 512  # bytes: addresses are multiples of it
_DEVICES = {"cpu": 1, "cuda": 2}  # DLPack's numbers
_KINDS = {torch.bfloat16: 4, torch.uint8: 1, torch.bool: 6}
_FLOAT, _INTEGER = 2, 0
# a managed tensor of DLPack: address, device (type, number), dims, dtype (kind, bits, lanes), where shape and strides are, offset; then the
# owner's own, and the function that deletes it. Behind it lie shape and strides
_MANAGED = "@PiiiBBHPPQPP"
_MANAGED_BYTES = struct.calcsize(_MANAGED)

_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_described: dict[int, ctypes.Array] = {}  # what torch reads until the stand-in is gone, by its address


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    _described.pop(address, None)


_deleter = ctypes.cast(_delete, ctypes.c_void_p).value


@functools.cache
def _form(dims: int) -> struct.Struct:
    return struct.Struct(f"{_MANAGED}{2 * dims}q")


class StandIns:
    """Makes stand-ins on a device, each at an address of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = _DEVICES[device.type], device.index or 0
        self._next = _FIRST

    def make(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A stand-in that looks like a tensor of this kind, at an aligned address."""
        dims, bits = len(shape), 8 * dtype.itemsize
        kind = _KINDS.get(dtype, _FLOAT if dtype.is_floating_point else _INTEGER)
        form = _form(dims)
        memory = ctypes.create_string_buffer(form.size)
        address = ctypes.addressof(memory)
        begin = address + _MANAGED_BYTES
        form.pack_into(
            memory, 0, self._next, *self._device, dims, kind, bits, 1, begin, begin + 8 * dims, 0, 0, _deleter, *shape, *strides
        )
        _described[address] = memory
        last = sum((size - 1) * stride for size, stride in zip(shape, strides))
        self._next += -(-max(1, last + 1) * dtype.itemsize // _APART) * _APART
        return torch.from_dlpack(_capsule(address, b"dltensor", None))
