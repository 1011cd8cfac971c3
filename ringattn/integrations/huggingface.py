"""Ring attention in Hugging Face transformers (4.57 and 5), through its `AttentionInterface` or a forward pass of our own.

    attach(model, layout=ra.zigzag(seq_len, world_size))            # once per layout
    logits = model(input_ids=ra.shard(tokens, layout, rank)).logits  # this rank's rows

`attach` switches a model's attention to "ringattn". Each attention module gets one frozen object that says which positions the ranks
hold, what is live and who the ranks are. Every rank then runs the model on its own shard of the sequence; everything but
attention is local to a token. Position ids default to the shard's global positions.

Models that make their scores themselves (BLOOM, MPT, Falcon, T5, mT5, UMT5) or have other attention modules of their own (BART's kind,
GPT-J, GPT-Neo) have no such interface: their attention modules get forward passes of ours, from `huggingface_scores.py` and
`huggingface_plain.py`. `huggingface_positions.py` gives positions to models that count them in other ways.

Layers that mix tokens by a convolution or a recurrence get our functions by `huggingface_mixers.py`.

Each option that a model passes to its attention is either honoured or refused by name (`huggingface_checks.py`). Honoured are
sliding windows, chunks, packed documents, padding on the right, attention sinks, a softcap and dropout. Other padding, a key/value cache
but for `RingCache`, position bias and attention weights as output raise ValueError, and so does any option that this module does not know.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import check
from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..recurrent.kernels import RecurrenceKernels
from ..runtime.groups import Group, get_context
from .huggingface_attachment import NAME, Attachment, LiveMask, LivePairs, check_layout
from .huggingface_checks import (
    check_head_dims,
    check_model,
    check_positions_taken,
    dynamic_rotary,
    models,
    models_around,
    takes_positions,
)
from .huggingface_forward import Asked, attend_around_ring
from .huggingface_heads import answers_from, put_in_head, take_out_head
from .huggingface_hooks import hook_holder, hook_model, hook_rotary, live_mask, unhook, unhook_holder
from .huggingface_labels import guard_loss, release_loss
from .huggingface_mixers import check_mixers, mixers, needs_mask, put_in_mixers, take_out_mixers
from .huggingface_positions import counting_embeddings, first_position, hook_counting
from .huggingface_scores import (
    check_forwards_of_own,
    check_mask_of_scores,
    counts_distances,
    forwards_of_own,
    put_in,
    take_out,
    takes_interface,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attach", "detach", "register", "ring_attention_forward"]

_ATTENTION = re.compile("Attention|MLA$")  # class names of modules that use AttentionInterface


def register() -> None:
    """Make "ringattn" known to transformers as an attention implementation. `attach` calls it; you may call it again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, ring_attention_forward)
    AttentionMaskInterface.register(NAME, live_mask)


def attach(
    model: PreTrainedModel,
    *,
    layout: Layout | None = None,
    mask: Mask | None = None,
    group: Group | None = None,
    ignore: Iterable[str] = (),
    recurrence_kernels: RecurrenceKernels | None = None,
) -> None:
    """Run a transformers model's attention around a ring, from the next forward on. Call it again to change the layout.

    Args:
        model: a `PreTrainedModel` whose attention goes through `AttentionInterface`; or one that has forward passes of ours, with
            transformers 5.23: BLOOM, MPT, Falcon, GPT-J, CodeGen, GPT-Neo, the encoder or the decoder of T5's and BART's kinds, and others
            (docs/entry-points.md).
        layout: which positions each rank holds; its world size is the group's. None: each call brings its own, as
            `model(**batch, layout=...)`, and may bring a `mask=`. They hold for this call and its backward pass, in all its layers.
        mask: which pairs are live, over global positions; None is causal for causal modules, full for the others.
            It is intersected with a module's own sliding window, and with the documents of a call. With ALiBi it must be causal.
        group: the ranks of the ring: a ProcessGroup, a DeviceMesh, a hybrid, or None for the default group.
        ignore: names of further options that the model passes to its attention and that, as you know, do not affect it.
        recurrence_kernels: of the recurrent layers of hybrid models, as `kernels` of `linear_attention`. None: fla's for layers in bf16 or
            fp16 on GPUs where it is installed, else plain torch in fp32.

    Call the model with this rank's rows: `input_ids` or `inputs_embeds` of `layout.lengths[rank]` tokens. Caches are off, but for
    `ringattn.integrations.generation.RingCache`, with which the model generates from whole prompts.

    - `position_ids` default to the layout's. If you give them without a mask, they must be the global positions, or restart at each
      packed document: then tokens see their own document only (the ranks compare them once per call).
    - `cu_seq_lens_q` and `cu_seq_lens_k`, the bounds of packed documents in the whole sequence, up to its end, have the same effect
      without a comparison, and `position_ids` then restart by default. `max_length_q` and `max_length_k` may come with them.
    - `position_ids` of RoBERTa's kind are the global ones, from 0, too: the model gets them from `padding_idx + 1` on.
    - `attention_mask` (b, s_local) may have padding on the right of its rows, whose labels must not count. The ranks compare it once per
      call.
    - A `ForSequenceClassification` of decoders, BERT's or RoBERTa's kind answers on every rank as on whole sequences, and takes `labels`.
      Its gradients are to be summed over the ranks.
    - Layers of hybrid models (Qwen3-Next, Mamba-2, LFM2 and others: docs/linear-attention.md) convolve and pass states over the shards.
      Their layout has no strides, and their mask is causal, or of documents.
    - Models that take no `position_ids`, as ALiBi and T5's bias are of distances, get none; if you give them, they only tell documents.
    - Attach an encoder and a decoder one by one, each with the layout of its own sequence, and call the model that holds both. Each rank
      then keeps the encoder's last states of the whole sequence, and computes attention to them by itself.
    - Shift labels before the sequence is split: a causal model's `labels` are refused without `shift_labels`. On several ranks they are
      also refused without `num_items_in_batch`, the number of tokens counted on all ranks, because a rank's own mean is not the
      mean of all; the ranks compare this number. Labels of other heads are refused on several ranks. The same holds for the
      head of a model that holds an attached model.

    Raises ValueError if the layout is for another number of ranks or leaves a rank without tokens, if the model cannot take another
    attention, and if it would take a shard for the whole sequence: it mixes tokens by other means too, pools them, or has its own
    positions.
    """
    attach_seeded(model, layout, mask, group, ignore, None, recurrence_kernels)


def attach_seeded(
    model: PreTrainedModel,
    layout: Layout | None,
    mask: Mask | None,
    group: Group | None,
    ignore: Iterable[str],
    seed: int | None,
    recurrence_kernels: RecurrenceKernels | None = None,
) -> None:
    """`attach`, with one seed for the dropout of all calls."""
    rank = _check_arguments(layout, mask, group, ignore)
    check.optional("recurrence_kernels", recurrence_kernels, RecurrenceKernels, "pass torch_kernels(), fla_kernels() or None")
    parts = model.modules() if isinstance(model, nn.Module) else ()
    mixing = mixers(model) if isinstance(model, nn.Module) else []
    modules = [module for module in parts if _ATTENTION.search(type(module).__name__) and not _holds(module, mixing)]
    says_so = bool(getattr(model, "_supports_attention_backend", False))
    own = forwards_of_own(modules, says_so)
    check_model(model, bool(own), says_so or (takes_interface(modules) if modules else bool(mixing)), mixing)
    if not modules and not mixing:
        raise ValueError(f"{type(model).__name__} has no module with Attention or MLA in its class name")
    check_head_dims(modules)
    check_mixers(mixing, group)
    if own:
        check_forwards_of_own(model, own)
    if layout is None:
        _check_taken_in_calls(model)
    else:
        check_mask_of_scores(model, mask, layout)
    counting = [] if takes_positions(model) else counting_embeddings(model)
    # states have an order, but no positions
    if modules and not counting and not (own and counts_distances(own)):
        check_positions_taken(model)
    first = first_position(model)
    register()
    rotary = dynamic_rotary(model)
    is_new = not hasattr(model, NAME)
    attachment = Attachment(
        layout,
        LivePairs(mask),
        group,
        rank,
        frozenset(ignore),
        _previous_attention(model),
        needs_last_position=bool(rotary),
        takes_positions=takes_positions(model),
        has_forwards=bool(own),
        says_so=says_so,
        mixes=bool(mixing),
        gives_mask=needs_mask(model, mixing),
        first_position=first,
        seed=seed,
        recurrence_kernels=recurrence_kernels,
    )
    _attach_models(model, attachment)
    for module in rotary:
        if not hasattr(module, NAME):
            hook_rotary(module)
    for module in counting:
        if not hasattr(module, NAME):
            hook_counting(module)
    if is_new:
        for holder in models_around(model):
            hook_holder(holder)
    for module in [*modules, *mixing, *rotary, *counting]:
        setattr(module, NAME, attachment)
    for module in own:
        put_in(module)
    put_in_mixers(model, mixing, models(model))
    if answers_from(model) is not None:
        put_in_head(model)
    _switch_attention(model, says_so)


def detach(model: PreTrainedModel, attn_implementation: str | None = None) -> None:
    """Undo `attach`: the model runs on whole sequences again.

    attn_implementation: the attention to use from now on. None for the one before `attach`, or "sdpa" if that was the ring's.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"{type(model).__name__} is not a model of transformers: give the one that was attached")
    before = _previous_attention(model)
    attachment: Attachment | None = getattr(model, NAME, None)
    own = models(model)
    for holder in models_around(model):
        if not any(hasattr(part, NAME) for part in models(holder) if part not in own):
            unhook_holder(holder)
    for module in model.modules():
        # not delattr: a wrapper such as PEFT's shows attributes that are not its own
        vars(module).pop(NAME, None)
        release_loss(module)
        unhook(module)
    take_out(model)
    take_out_mixers(model)
    take_out_head(model)
    if attachment is not None and not attachment.says_so:
        _set_directly(model, before or "eager")
        before = model.config._attn_implementation
    model.set_attn_implementation(attn_implementation or before or "sdpa")


def ring_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LiveMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: q (b, h, s, d), k (b, hk, s, d), v (b, hk, s, d_v) -> (b, s, h, d_v), None.

    `s_aux` (h,) are attention sinks, `softcap` caps scores, and `dropout` drops weights: see `ringattn.score`. Which weights are dropped
    follows from torch's generator for the CPU, which must be in the same state on all ranks.
    """
    out = attend_around_ring(
        module,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        Asked(scaling, sliding_window, is_causal, dict(sinks=s_aux, softcap=softcap, dropout=dropout)),
        options,
    )
    return out, None


def _check_arguments(layout: Layout | None, mask: Mask | None, group: Group | None, ignore: Iterable[str]) -> int:
    """This rank in the group. Raises ValueError for bad arguments of `attach`."""
    check.optional("mask", mask, Mask, check.BUILD_A_MASK)
    if isinstance(ignore, str):
        raise ValueError(f"ignore is {ignore!r}, but must be a list of names: give [{ignore!r}]")
    ranks = get_context(group).ranks
    if layout is not None:
        check_layout(layout, mask, ranks)
    return ranks.rank


def _check_taken_in_calls(model: nn.Module) -> None:
    """Raise ValueError if calls of a model cannot bring its layout."""
    taken = {"layout", "mask"} & inspect.signature(model.forward).parameters.keys()
    if taken:
        raise ValueError(
            f"{type(model).__name__} has arguments of its own called {sorted(taken)}, so that calls cannot bring theirs: "
            "attach(model, layout=...), again for another one"
        )


def _previous_attention(model: Any) -> str | None:
    """The attention implementation that a model had before `attach`; None if it was loaded with the ring's."""
    attachment: Attachment | None = getattr(model, NAME, None)
    before = model.config._attn_implementation if attachment is None else attachment.previous_attention
    return None if before == NAME else before


def _attach_models(model: nn.Module, attachment: Attachment) -> None:
    """Attach and hook a model and the models in it: a model with a head holds one without, and users may call either."""
    for part in models(model):
        if not hasattr(part, NAME):
            hook_model(part)
        setattr(part, NAME, attachment)
        guard_loss(part, attachment.ranks.size)


def _holds(module: nn.Module, others: Iterable[nn.Module]) -> bool:
    """Whether a module is one of these, or has one within."""
    return any(part in others for part in module.modules())


def _switch_attention(model: PreTrainedModel, says_so: bool) -> None:
    if not says_so:
        _set_directly(model, NAME)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    # transformers only warns if parts keep their own attention, such as vision towers
    if model.config._attn_implementation != NAME:
        kept = model.config._attn_implementation
        detach(model, kept)
        raise ValueError(
            f"{type(model).__name__} keeps its attention, {kept!r}, as parts of it take none from AttentionInterface: attach the text "
            "model inside it, or another model"
        )


def _set_directly(model: nn.Module, name: str) -> None:
    """Set the attention by which models ask for masks, where transformers would not change it."""
    for part in models(model):
        part.config._attn_implementation = name  # pyrefly: ignore[missing-attribute, bad-argument-type]
