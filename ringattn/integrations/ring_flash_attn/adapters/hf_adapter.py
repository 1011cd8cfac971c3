"""Models of transformers whose FlashAttention runs around a ring; the functions are those of `ringattn.integrations.ring_flash_attn`."""

from ...ring_flash_attn_models import (
    DATA_PARAMS,
    check_params,
    flash_attention_forward,
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
    use_ring_attn,
)
from .._absent import absent

__all__ = [
    "DATA_PARAMS",
    "check_params",
    "create_ring_flash_attention_forward",
    "flash_attention_forward",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "use_ring_attn",
]


def create_ring_flash_attention_forward(process_group: object, heads_k_stride: int) -> None:
    """Only a name, which some programs import and replace: `substitute_hf_flash_attn` asks for no such functions. Raises ValueError."""
    raise ValueError(
        "create_ring_flash_attention_forward makes functions of old versions of transformers: call substitute_hf_flash_attn"
    )


__getattr__ = absent(__name__, {"RING_ATTN_SWITCH": "use_ring_attn(True or False)"})
