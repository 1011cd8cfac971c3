"""Two chunks of the sequence on each rank. The functions are those of `ringattn.integrations.ring_flash_attn`."""

from . import zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func
from ._absent import absent

__all__ = ["zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_kvpacked_func", "zigzag_ring_flash_attn_qkvpacked_func"]

__getattr__ = absent(
    __name__,
    dict.fromkeys(
        (
            "ZigZagRingFlashAttnFunc",
            "zigzag_ring_flash_attn_forward",
            "zigzag_ring_flash_attn_backward",
        ),
        "zigzag_ring_flash_attn_func, whose backward pass is autograd's",
    ),
)
