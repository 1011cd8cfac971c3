"""Every world_size-th token on each rank. The functions are those of `ringattn.integrations.ring_flash_attn`."""

from . import stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func
from ._absent import absent_passes

__all__ = ["stripe_flash_attn_func", "stripe_flash_attn_kvpacked_func", "stripe_flash_attn_qkvpacked_func"]

__getattr__ = absent_passes(__name__, "StripeFlashAttnFunc")
