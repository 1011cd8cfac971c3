"""The attention of one module of an attached model: what the module and its mask ask for, checked, and the call around the ring.

Shapes: b batch, s local tokens, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..attention import ring_attention
from ..geometry.mask import full
from ..runtime.agree import refusing
from ..runtime.op import in_one_dtype
from ..scores import ScoreMod, score
from ..training.checkpoint import runs_again_reentrantly
from .huggingface_attachment import NAME, Attachment, ChunkedWindow, LiveMask, Window, running_call
from .huggingface_checks import check_attention


@dataclass(frozen=True)
class Asked:
    """What a module asks of attention.

    scaling: None for 1/sqrt(d). window: as transformers counts it, with the token itself. is_causal: None if the module does not say.
    scores: arguments of `ringattn.score`.
    """

    scaling: float | None = None
    window: int | None = None
    is_causal: bool | None = None
    scores: dict[str, Any] = field(default_factory=dict)

    def score(self, seed: int | None) -> ScoreMod | None:
        """What happens to scores and weights; None if nothing does. seed: of dropout."""
        asked = {name: value for name, value in self.scores.items() if value is not None and (name != "dropout" or value)}
        return score(**asked, seed=seed) if asked else None


def attend_around_ring(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: LiveMask | None,
    asked: Asked,
    options: dict[str, Any],
) -> torch.Tensor:
    """A module's attention around the ring: q (b, s, h, d), k (b, s, hk, d), v (b, s, hk, d_v) -> (b, s, h, d_v).

    options: what else the model passes to its attention. Raises ValueError, on every rank, for what cannot be honoured.
    """
    attachment = attachment_of(module, mask)
    if torch.compiler.is_compiling():
        modified, sees_past_only, window = _request(module, attachment, q, k, mask, asked, options)
    else:
        with refusing(attachment.ranks):
            check_runs_once(module, mask)
            modified, sees_past_only, window = _request(module, attachment, q, k, mask, asked, options)
    if attachment.cached is not None:
        limit = attachment.cached.check_layer(module, sees_past_only, window)
        layer = attachment.cached.keep(module, k, v)
        if attachment.cached.layout is None or attachment.cached.continues:
            return attachment.cached.attend(layer, q, k, v, limit, asked.scaling, modified)
    live = attachment.live if mask is None or mask.live is None else mask.live
    return ring_attention(
        *in_one_dtype(q, k, v),
        layout=attachment.layout,
        mask=live.mask_for(sees_past_only, window),
        group=attachment.group,
        softmax_scale=asked.scaling,
        score=modified,
        name=call_name(module),
    )


def attend_to_states(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: LiveMask | None,
    asked: Asked,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of this rank's q (b, s, h, d) to all of an encoder's states, of which this rank has k (b, t, hk, d) and v: (b, s, h, d_v).

    Raises ValueError, on every rank, for what cannot be honoured.
    """
    attachment = attachment_of(module, mask)
    if torch.compiler.is_compiling():
        modified = _score_to_states(module, attachment, asked, options)
    else:
        with refusing(attachment.ranks):
            modified = _score_to_states(module, attachment, asked, options)
    return ring_attention(
        *in_one_dtype(q, k, v),
        layout=attachment.layout,
        kv_layout=attachment.states,
        mask=full(),
        group=attachment.group,
        softmax_scale=asked.scaling,
        score=modified,
        name=call_name(module),
    )


def _score_to_states(module: nn.Module, attachment: Attachment, asked: Asked, options: dict[str, Any]) -> ScoreMod | None:
    check_attention(options, attachment.ignored)
    if attachment.states is None:
        raise ValueError(
            f"{type(module).__name__} attends to an encoder's states without the mask that says which tokens they are of: the model does "
            "not pass it on in this version of transformers, use a newer one, such as 5.23; or the layer is called by itself"
        )
    return asked.score(attachment.seed)


def attachment_of(module: nn.Module, mask: LiveMask | None) -> Attachment:
    """The attachment of a module's call. Raises ValueError without one."""
    attachment: Attachment | None = getattr(module, NAME, None)
    if attachment is None:
        raise ValueError(
            f"{type(module).__name__} is set to {NAME!r} but has no layout: call ringattn.integrations.huggingface.attach"
        )
    # another one may be attached by the time a checkpointed layer runs again
    return mask.attachment if isinstance(mask, LiveMask) and mask.attachment is not None else attachment


def _request(
    module: nn.Module,
    attachment: Attachment,
    q: torch.Tensor,
    k: torch.Tensor,
    mask: LiveMask | None,
    asked: Asked,
    options: dict[str, Any],
) -> tuple[ScoreMod | None, bool, Window]:
    """The score, whether tokens see none after them, and the window. Raises ValueError for what cannot be honoured."""
    check_attention(options, attachment.ignored)
    modified = asked.score(attachment.seed)
    return modified, *_causality_and_window(module, attachment, q, k, mask, asked.window, asked.is_causal)


def check_runs_once(module: nn.Module, mask: LiveMask | None) -> None:
    """Raise ValueError if a module runs again in the backward pass without its mask."""
    if mask is None and runs_again_reentrantly():
        raise ValueError(
            f"{type(module).__name__} runs again in the backward pass under reentrant activation checkpointing, without the mask "
            'by which it would know its layout: call gradient_checkpointing_enable({"use_reentrant": False})'
        )


def call_name(module: nn.Module) -> str | None:
    """What tells a layer's calls from those of others: its number. None in compiled code, where it would be a graph for each layer."""
    number = None if torch.compiler.is_compiling() else getattr(module, "layer_idx", None)
    return None if number is None else f"{type(module).__name__} of layer {number}"


def _causality_and_window(
    module: nn.Module,
    attachment: Attachment,
    q: torch.Tensor,
    k: torch.Tensor,
    mask: LiveMask | None,
    window: int | None,
    is_causal: bool | None,
) -> tuple[bool, Window]:
    """Whether tokens see none after them, and the window. Raises ValueError if the module and its mask do not fit each other."""
    if mask is not None and not isinstance(mask, LiveMask):
        raise ValueError(
            "attention_mask is given, but ring attention takes its mask over global positions: pass it as attach(model, mask=...); if the "
            "model made it itself, as some do before transformers 5, install transformers 5"
        )
    # a mask holds the call's documents; without one look at the call, which torch.compile could not trace
    call = None if mask is not None else running_call()
    if call is not None and call.live is not None and (call.live.documents is not None or call.live.rows is not None):
        raise ValueError(
            f"{type(module).__name__} is called without the mask that says where packed documents end: the model does not pass it on, "
            "or a hook took it away, as accelerate's does with cp_size above 1: leave cp_size at 1"
        )
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"the keys have {k.shape[1]} tokens and the queries {q.shape[1]}: key/value caches and "
            "cross-attention are not supported; call the model with use_cache=False"
        )
    of_mask = None if mask is None else mask.is_causal
    of_module: Any = getattr(module, "is_causal", True)
    sees_past_only = next(known for known in (of_mask, is_causal, of_module) if known is not None)
    limit = _window(module, window, mask, sees_past_only)
    if of_mask and is_causal is None and not of_module and attachment.live.mask is None:
        raise ValueError(
            f"is_causal is False in {type(module).__name__}, but its mask is causal: attach(model, mask=...) the one you mean, "
            "ringattn.full() or ringattn.causal()"
        )
    if mask is not None and mask.live is None:
        raise ValueError(
            f"{type(module).__name__} runs in a model whose forward was called directly, without the hooks that fill in positions: "
            "call the model itself"
        )
    return sees_past_only, limit


def _window(module: nn.Module, given: int | None, mask: LiveMask | None, is_causal: bool) -> Window:
    """The module's window. What the module says and what the mask of its kind of layer says must agree."""
    of_mask = None if mask is None else mask.window
    if isinstance(of_mask, tuple):
        # modules with windows in both directions count the token itself
        if given is not None and (given - 1, given - 1) != of_mask:
            raise ValueError(f"sliding_window is {given} in {type(module).__name__}, but its mask was made for {of_mask}: give one")
        return of_mask
    if isinstance(of_mask, ChunkedWindow):
        return of_mask
    window = of_mask if given is None else given
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window is {window} in {type(module).__name__}, but a token sees itself at least: give 1 or more, or None"
        )
    if window is not None and not is_causal:
        raise ValueError(
            f"sliding_window is {window} on a module that is not causal, where transformers' models differ in its meaning: "
            "set the config's window to None and attach with mask=ringattn.sliding_window(left, right)"
        )
    if given is not None and of_mask is not None and given != of_mask:
        raise ValueError(f"sliding_window is {given} in {type(module).__name__}, but its mask was made for {of_mask}: give one")
    return window
