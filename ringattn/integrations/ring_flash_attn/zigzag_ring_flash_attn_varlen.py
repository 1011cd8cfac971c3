"""Two chunks of each document on each rank. The functions are those of `ringattn.integrations.ring_flash_attn`."""

from . import (
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)
from ._absent import absent_passes

__all__ = [
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

__getattr__ = absent_passes(__name__, "ZigZagRingFlashAttnVarlenFunc", "get_half_index", "get_half_lse")
