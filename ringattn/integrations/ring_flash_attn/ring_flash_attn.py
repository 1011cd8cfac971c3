"""A chunk of the sequence on each rank. The functions are those of `ringattn.integrations.ring_flash_attn`."""

from . import ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func
from ._absent import absent

__all__ = ["ring_flash_attn_func", "ring_flash_attn_kvpacked_func", "ring_flash_attn_qkvpacked_func"]

__getattr__ = absent(
    __name__,
    dict.fromkeys(
        (
            "RingFlashAttnFunc",
            "ring_flash_attn_forward",
            "ring_flash_attn_backward",
        ),
        "ring_flash_attn_func, whose backward pass is autograd's",
    ),
)
