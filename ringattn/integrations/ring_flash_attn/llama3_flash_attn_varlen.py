"""One chunk of all documents together on each rank. The functions are those of `ringattn.integrations.ring_flash_attn`."""

from . import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from ._absent import absent_passes

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
]

__getattr__ = absent_passes(__name__, "Llama3FlashAttnVarlenFunc")
