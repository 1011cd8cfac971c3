"""An encoder and a decoder of one model on shards, each attached with the layout of its own sequence.

    attach(model.encoder, layout=of_the_text)
    attach(model.decoder, layout=of_the_answer)
    logits = model(input_ids=shard_of_the_text, decoder_input_ids=shard_of_the_answer).logits

Attention to the encoder's states runs around the ring too: each rank makes keys and values of its own states, with the encoder's layout.
Shapes: b batch, t tokens of the encoder's sequence on this rank, n hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..runtime.agree import refusing
from .huggingface_attachment import NAME, Attachment, running_calls

_PARTS = ("encoder", "decoder")


def check_both_attached(holder: Any) -> None:
    """Raise ValueError if a model with an encoder and a decoder runs where only one of them is attached."""
    if not getattr(holder.config, "is_encoder_decoder", False):
        return
    parts = {name: getattr(holder, name, None) for name in _PARTS}
    left = [name for name, part in parts.items() if isinstance(part, nn.Module) and not hasattr(part, NAME)]
    if left:
        raise ValueError(
            f"{type(holder).__name__} runs, but only one of its parts is attached: attach its {left[0]} too, with the layout of that "
            "part's sequence"
        )


def with_states(
    decoder: nn.Module, kwargs: dict[str, Any], attachment: Attachment, packed: bool
) -> tuple[dict[str, Any], Attachment]:
    """A decoder's arguments, and its attachment with the layout of the encoder's states (b, t, n) among them, if there are any.

    Raises ValueError, on every rank, if it is unknown which tokens the states are of, or if documents are packed.
    """
    states: torch.Tensor | None = kwargs.get("encoder_hidden_states")
    if states is None:
        return kwargs, attachment
    with refusing(attachment.ranks):
        encoder = _encoder_of(decoder, attachment)
        if packed:
            raise ValueError(
                "packed documents are given to a model with an encoder and a decoder, whose tokens would see the states of other "
                "documents: give a row of the batch to each document"
            )
        here = encoder.layout.lengths[encoder.rank]
        if states.shape[1] != here:
            raise ValueError(
                f"the encoder's states have {states.shape[1]} tokens, but rank {encoder.rank} of {encoder.layout!r} holds {here}: give "
                "those of the attached encoder"
            )
    # padding was refused where the encoder ran
    return {**kwargs, "encoder_attention_mask": None}, replace(attachment, states=encoder.layout, of_call=attachment.attached)


def _encoder_of(decoder: nn.Module, attachment: Attachment) -> Attachment:
    """What the encoder was attached with whose states this decoder gets."""
    holder = next((call.model for call in running_calls() if call.live is None and call.holds(decoder)), None)
    encoder: Attachment | None = getattr(getattr(holder, "encoder", None), NAME, None)
    if encoder is None:
        raise ValueError(
            f"encoder_hidden_states are given to {type(decoder).__name__} itself, and it is unknown which tokens they are of: attach the "
            "encoder and the decoder, and call the model that holds both"
        )
    if encoder.ranks is not attachment.ranks:
        raise ValueError("the encoder and the decoder are attached to different groups: attach both to one")
    return encoder
