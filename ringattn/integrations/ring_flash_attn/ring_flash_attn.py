"""A chunk of the sequence on each rank. The functions are those of `ringattn.integrations.ring_flash_attn`."""

from . import ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func
from ._absent import absent_passes

__all__ = ["ring_flash_attn_func", "ring_flash_attn_kvpacked_func", "ring_flash_attn_qkvpacked_func"]

__getattr__ = absent_passes(__name__, "RingFlashAttnFunc")
