"""A chunk of each document on each rank. The functions are those of `ringattn.integrations.ring_flash_attn`."""

from . import ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func
from ._absent import absent

__all__ = ["ring_flash_attn_varlen_func", "ring_flash_attn_varlen_kvpacked_func", "ring_flash_attn_varlen_qkvpacked_func"]

__getattr__ = absent(
    __name__,
    dict.fromkeys(
        (
            "RingFlashAttnVarlenFunc",
            "ring_flash_attn_varlen_forward",
            "ring_flash_attn_varlen_backward",
        ),
        "ring_flash_attn_varlen_func, whose backward pass is autograd's",
    ),
)
