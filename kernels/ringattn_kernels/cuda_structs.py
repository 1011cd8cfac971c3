"""Structures of the CUDA driver's interface (cuda.h), for what launches and what transports list or do. Imports without Triton."""

from __future__ import annotations

import ctypes
import struct

# CUstreamBatchMemOpParams, of a wait or a write: operation, address, value, flags; and where address and value begin
MEMORY_OPERATION = struct.Struct("=I4xQQI20x")
ADDRESS, VALUE = 8, 16


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_uint32),
        ("source_hint", ctypes.c_uint32 * 2),
        ("target_hint", ctypes.c_uint32 * 2),
        ("flags", ctypes.c_uint32),
    )

    STREAM_ORDER = 1
    PREFER_OVERLAP_WITH_COMPUTE = 1


def copy_options() -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
    """What cuMemcpyBatchAsync takes besides the copies: how they are done, from which copy on that holds, and where it leaves the one that
    failed. Sources are read in the stream's order, beside kernels."""
    beside = CopyAttributes(CopyAttributes.STREAM_ORDER, flags=CopyAttributes.PREFER_OVERLAP_WITH_COMPUTE)
    return (CopyAttributes * 1)(beside), (ctypes.c_size_t * 1)(0), (ctypes.c_size_t * 1)(0)
