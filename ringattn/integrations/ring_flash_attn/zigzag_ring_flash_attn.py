"""Two chunks of the sequence on each rank. The functions are those of `ringattn.integrations.ring_flash_attn`."""

from . import zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func
from ._absent import absent_passes

__all__ = ["zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_kvpacked_func", "zigzag_ring_flash_attn_qkvpacked_func"]

__getattr__ = absent_passes(__name__, "ZigZagRingFlashAttnFunc")
