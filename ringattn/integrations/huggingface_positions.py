"""Positions of models that do not take them as they are: those that count tokens within their embeddings, and RoBERTa's kind.

BART's kind has embeddings that count the tokens they are given, and models that take no `position_ids`: these embeddings get the
positions of the call. RoBERTa's kind takes `position_ids` that start after `padding_idx`: the call's positions are moved there.

Shapes: b batch, s local tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .huggingface_attachment import NAME, not_compiled, running_call

# embeddings whose forward takes position_ids (s,) and counts without them
_COUNTING = {
    "BartLearnedPositionalEmbedding",
    "MBartLearnedPositionalEmbedding",
    "PLBartLearnedPositionalEmbedding",
    "MarianSinusoidalPositionalEmbedding",
    "PegasusSinusoidalPositionalEmbedding",
    "BlenderbotLearnedPositionalEmbedding",
    "BlenderbotSmallLearnedPositionalEmbedding",
    "TrOCRLearnedPositionalEmbedding",
    "WhisperPositionalEmbedding",
}


def counting_embeddings(model: nn.Module) -> list[nn.Module]:
    """The embeddings of a model that count the tokens which they are given."""
    return [
        module
        for module in model.modules()
        if type(module).__name__ in _COUNTING and type(module).__module__.startswith("transformers.models.")
    ]


def hook_counting(module: nn.Module) -> None:
    """Give an embedding the positions of the call."""
    module.register_forward_pre_hook(give_positions, with_kwargs=True)


@not_compiled
def give_positions(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before an embedding counts tokens: the positions of this rank's tokens, (s,)."""
    call = running_call()
    if call is None or call.positions is None:
        raise ValueError(
            f"{type(module).__name__} counts the tokens of the shard, and the positions of the sequence are known only within a call of "
            f"the attached model: call the model itself, or detach it ({NAME!r} is attached)"
        )
    # a row for all: rows of a batch have the same documents
    return args, {**kwargs, "position_ids": call.positions[0]}


def first_position(model: nn.Module) -> int:
    """The position of a sequence's first token in this model: 0, or after `padding_idx` in RoBERTa's kind.

    Raises ValueError where positions skip padding, but not by an embedding table.
    """
    found, others = set(), []
    for name, module in model.named_modules():
        padding: Any = getattr(module, "padding_idx", None)
        if "position_embeddings" in name and isinstance(module, nn.Embedding) and padding is not None:
            found.add(padding + 1)
        elif hasattr(module, "create_position_ids_from_input_ids") and not isinstance(
            getattr(module, "position_embeddings", None), nn.Embedding
        ):
            others.append((name, padding))
    if others or len(found) > 1:
        name, padding = others[0] if others else ("the model", sorted(found)[0] - 1)
        raise ValueError(
            f"{name} has positions that start after padding_idx {padding} and skip padding, but not by a table of position embeddings, "
            "where the ring's are global positions: this model cannot run on shards"
        )
    return found.pop() if found else 0


def check_unpadded(tokens: torch.Tensor | None, hidden: torch.Tensor | None, padding: int) -> None:
    """Raise ValueError if a model of RoBERTa's kind gets padding tokens (b, s) that are not hidden, whose positions it would skip.

    hidden: where the attention mask is 0, or None.
    """
    if not isinstance(tokens, torch.Tensor) or tokens.is_floating_point():
        return
    padded = tokens == padding
    if hidden is not None:
        padded &= ~hidden
    if bool(padded.any()):
        raise ValueError(
            f"input_ids hold the padding token {padding}, whose positions this model skips (RoBERTa's way), where the ring counts every "
            "token: leave padding out, or pad on the right and give attention_mask"
        )
