"""Every world_size-th token on each rank. The functions are those of `ringattn.integrations.ring_flash_attn`."""

from . import stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func
from ._absent import absent

__all__ = ["stripe_flash_attn_func", "stripe_flash_attn_kvpacked_func", "stripe_flash_attn_qkvpacked_func"]

__getattr__ = absent(
    __name__,
    dict.fromkeys(
        (
            "StripeFlashAttnFunc",
            "stripe_flash_attn_forward",
            "stripe_flash_attn_backward",
        ),
        "stripe_flash_attn_func, whose backward pass is autograd's",
    ),
)
