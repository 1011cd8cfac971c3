"""Heads that answer from one token of a sequence: `ForSequenceClassification`, such as reward models.

Decoders answer from the last token of each row that is no padding, BERT's kind from the first. Every rank runs the head on its own
shard, and the logits of the rank that holds the token go to all. Gradients flow on that rank alone. So if all ranks make the same loss
of the same logits, the sum of the ranks' gradients is the gradient of that one loss.

Shapes: b batch, s local tokens, c classes, P ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..collective import unshard
from ..geometry.layout import Layout, contiguous
from ..runtime.agree import Facts, agree, refusing
from ..training.causal_lm import forward_names
from ..transport import Ranks
from .huggingface_attachment import NAME, Attachment, not_compiled, running_call

# classes whose logits come from the first token of a sequence, by a pooler or by themselves
_FROM_FIRST = {
    f"{kind}ForSequenceClassification"
    for kind in (
        "Bert",
        "Albert",
        "DistilBert",
        "Electra",
        "Roberta",
        "XLMRoberta",
        "XLMRobertaXL",
        "Camembert",
        "RobertaPreLayerNorm",
    )
}
_FACTS = Facts({"function": "the tokens that a head for sequences answers from"})


def answers_from(model: nn.Module) -> str | None:
    """ "first" or "last": the token of a sequence from which a model's head answers; None for other models and heads."""
    kind = type(model)
    if not kind.__name__.endswith("ForSequenceClassification") or not kind.__module__.startswith("transformers.models."):
        return None
    if kind.__name__ in _FROM_FIRST:
        return "first"
    return "last" if {"pooled_logits", "last_non_pad_token", "score"} <= forward_names(model) else None


def put_in_head(model: nn.Module) -> None:
    """Let a head for sequences answer from the token of the whole sequence."""
    if not is_put_in(model):
        if "forward" in vars(model):
            raise ValueError(f"the forward of {type(model).__name__} is replaced already: restore it, and attach first")
        model.forward = MethodType(_forward_of(type(model)), model)


def take_out_head(model: nn.Module) -> None:
    """Undo `put_in_head`."""
    if is_put_in(model):
        del vars(model)["forward"]


def is_put_in(model: nn.Module) -> bool:
    """Whether a model's head answers from the token of the whole sequence."""
    return getattr(vars(model).get("forward"), "__func__", None) is _forward_of(type(model))


@functools.lru_cache(256)
def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward pass of a class of heads on shards. It takes the place of the class's own, as PEFT calls that around its hooks."""
    own = kind.forward

    @functools.wraps(own)
    def forward(model: Any, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        call = running_call()
        attachment: Attachment = getattr(model, NAME) if call is None or call.attachment is None else call.attachment
        layout = attachment.layout if attachment.fixed_layout is not None else kwargs["layout"]
        with refusing(attachment.ranks):
            _check(model, layout, attachment.rank, kwargs)
        output = own(model, *args, **kwargs)
        tokens = args[0] if args else kwargs.get("input_ids")
        holders = _holders(model, tokens, layout, attachment.ranks, len(output.logits))
        output.logits = _from_holders(output.logits, holders, attachment)
        if labels is not None:
            loss = getattr(model.loss_function, "loss", model.loss_function)
            output.loss = loss(logits=output.logits, labels=labels, pooled_logits=output.logits, config=model.config)
        return output

    return forward


def _check(model: Any, layout: Layout, rank: int, kwargs: dict[str, Any]) -> None:
    if kwargs.get("return_dict") is False or getattr(model.config, "return_dict", True) is False:
        raise ValueError(f"return_dict is False, but {type(model).__name__} on shards returns its logits by name: leave it out")
    if bool((layout.positions(rank).diff() < 0).any()):
        raise ValueError(
            f"{layout!r} holds tokens out of order on rank {rank}, where {type(model).__name__} would take another one for the last: use "
            "zigzag, contiguous or striped"
        )


@not_compiled
def _holders(model: Any, tokens: torch.Tensor | None, layout: Layout, ranks: Ranks, rows: int) -> torch.Tensor:
    """The rank of each row (b,) that holds the token from which the head answers. A collective for last tokens."""
    here = layout.positions(ranks.rank)
    config = model.config.get_text_config()
    if answers_from(model) == "first":
        found = torch.full((rows,), -int(here[0]))
    elif isinstance(tokens, torch.Tensor) and not tokens.is_floating_point() and config.pad_token_id is not None:
        # without any, the head takes the first token
        found = torch.where(tokens.cpu() != config.pad_token_id, here, -1 if here[0] else 0).amax(dim=1)
    else:
        found = torch.full((rows,), int(here[-1]))
    if ranks.size == 1:
        return torch.zeros(rows, dtype=torch.int64)
    counts = agree(ranks, _FACTS, rows)[0]
    with refusing(ranks):
        if len(set(counts)) > 1:
            raise ValueError(f"the batch has {', '.join(map(str, counts))} rows on the ranks: give all ranks one batch")
    records = ranks.all_gather_control(found.numpy().astype("<i8").tobytes())
    assert records is not None
    return torch.from_numpy(np.stack([np.frombuffer(record, dtype="<i8") for record in records]).argmax(axis=0))


def _from_holders(logits: torch.Tensor, holders: torch.Tensor, attachment: Attachment) -> torch.Tensor:
    """Each row's logits (b, c) from the rank that holds its token; gradients flow to those of this rank."""
    size = attachment.ranks.size
    if size == 1:
        return logits
    every = unshard(logits.detach()[:, None], contiguous(size, size), attachment.group)  # (b, P, c)
    holders = holders.to(logits.device)
    others = every[torch.arange(len(holders), device=logits.device), holders]
    return torch.where((holders == attachment.rank)[:, None], logits, others)
