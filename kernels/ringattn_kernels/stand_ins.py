"""Stand-ins: tensors that have an address, and no memory there. A pass that is rehearsed gets them in place of its inputs.

They are made through DLPack, by which libraries hand tensors to each other: torch takes shape, strides and address as they are told.
Whoever reads or writes a stand-in on a device breaks the program.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

_FIRST = 1 << 46  # where neither a GPU nor a CPU has memory
_APART = 512  # bytes: addresses are multiples of it
_DEVICES = {"cpu": 1, "cuda": 2}  # DLPack's numbers
_KINDS = {torch.bfloat16: 4, torch.uint8: 1, torch.bool: 6}
_FLOAT, _INTEGER = 2, 0


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dims", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_described: dict[int, tuple] = {}  # what torch reads until the stand-in is gone, by its address


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    _described.pop(address, None)


class StandIns:
    """Makes stand-ins on a device, each at an address of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = _FIRST

    def make(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A stand-in that looks like a tensor of this kind, at an aligned address."""
        dims, bits = len(shape), 8 * dtype.itemsize
        kind = _KINDS.get(dtype, _FLOAT if dtype.is_floating_point else _INTEGER)
        numbers = (ctypes.c_int64 * (2 * dims))(*shape, *strides)
        begin = ctypes.addressof(numbers)
        device = _Device(_DEVICES[self._device.type], self._device.index or 0)
        described = _Tensor(self._next, device, dims, _DataType(kind, bits, 1), begin, begin + 8 * dims, 0)
        managed = _Managed(described, None, ctypes.cast(_delete, ctypes.c_void_p))
        address = ctypes.addressof(managed)
        _described[address] = managed, numbers
        last = sum((size - 1) * stride for size, stride in zip(shape, strides))
        self._next += -(-max(1, last + 1) * dtype.itemsize // _APART) * _APART
        return torch.from_dlpack(_capsule(address, b"dltensor", None))
