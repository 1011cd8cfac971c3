"""Checks of transformers models, of their input and of the options they pass to attention.

Each option is either honoured in `huggingface.py` or refused here by name. Labels have checks of their own (`huggingface_labels.py`).
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .. import check
from ..geometry.layout import Layout, contiguous
from ..geometry.mask import Documents
from ..training.data import packed_documents
from .huggingface_attachment import ChunkedWindow, ModelCall, Window
from .huggingface_heads import answers_from
from .huggingface_inputs import CACHES
from .token_mixers import check_token_mixers

# layers that see other tokens only through attention, and only in the two ways that are honoured
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# layers that see them by a convolution or a recurrence, too, or not at all, in models whose layers have our functions
# (`huggingface_mixers.py`)
_MIXED_TYPES = {"linear_attention", "conv", "hybrid", "mlp", "moe"}

# options of attention that cannot be honoured, and why; None and False ask for nothing
_REFUSED = {
    "head_mask": "masking heads is not supported",
    "output_attentions": "attention weights are never formed",
    "position_bias": "biased scores are not supported",
    **dict.fromkeys((*CACHES, "past_key_value"), "key/value caches are not supported"),
    "seq_idx": "cu_seq_lens_q and cu_seq_lens_k say where packed documents end: give these, and leave seq_idx out",
    "token_type_ids": "this model's layers do not take it, or take it for the places of images: leave it out",
    "indices": "sparse selections of keys are not supported",
    "deterministic": "the order of sums follows PyTorch's switch: call torch.use_deterministic_algorithms(True), and leave it out",
}

# options that do not affect attention
_HARMLESS = frozenset(
    {
        "position_ids",  # rotary embeddings have used them already
        "cache_position",
        "use_cache",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "num_logits_to_keep",
        "num_items_in_batch",
        "shift_labels",
    }
)

# heads that pool over tokens
_POOLED = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")

# outputs that models make from one token of the sequence, without a module that shows it
_OF_ONE_TOKEN = ("pooler_output", "text_embeds", "mc_logits")

# how inputs with images, video or sound are called
_IMAGES = ("pixel_values", "image_", "video_", "mm_", "audio_", "input_features")  # mm_token_type_ids are 0 for text

_CACHES = (
    "a shard's cache is of no use: to generate, give past_key_values=RingCache(model, tokens=...) of "
    "ringattn.integrations.generation; to train or score, leave it out"
)


def models(model: nn.Module) -> list[nn.Module]:
    """The transformers models within, itself included."""
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def models_around(model: nn.Module) -> list[nn.Module]:
    """The transformers models that hold this one, as a model with a head holds the one without.

    A module does not know its holders, so this searches all of Python's objects.
    """
    from transformers import PreTrainedModel

    # type() instead of isinstance, because some objects run their own code in isinstance
    found = [x for x in gc.get_objects() if issubclass(type(x), PreTrainedModel) and x is not model]
    return [x for x in found if any(part is model for part in x.modules())]


def dynamic_rotary(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings whose frequencies depend on the largest position of a call: dynamic NTK scaling and LongRoPE."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            found.append(module)
    return found


def check_model(
    model: nn.Module, has_forwards: bool = False, takes_interface: bool = False, mixers: Sequence[nn.Module] = ()
) -> None:
    """Raise ValueError if a model cannot take another attention, or if its layers see other tokens by other means too.

    has_forwards: whether its attention has forward passes of our own (`huggingface_scores.py`). takes_interface: whether it comes from
    `AttentionInterface`. mixers: its layers with convolutions and recurrences of ours.
    """
    if not has_forwards and not (takes_interface and hasattr(model, "set_attn_implementation")):
        raise ValueError(
            f"{type(model).__name__} does not take its attention from AttentionInterface: "
            + (
                "choose a model that does (docs/lab/models.md lists each class), or write its attention anew with ringattn.ring_attention"
                if isinstance(model, nn.Module) and models(model)
                else "for a module of your own call ringattn.replace_attention"
            )
        )
    for within in models(model):
        _check_config(within, has_forwards, model, bool(mixers))
    check_token_mixers(model, mixers)
    pools = answers_from(model) == "first"
    for name, module in model.named_modules():
        if not pools:
            _check_module(name, module)


def _check_config(model: Any, has_forwards: bool, attached: nn.Module, has_mixers: bool) -> None:
    config = model.config
    has_two_sequences = not has_forwards or "decoder_input_ids" in inspect.signature(type(model).forward).parameters
    if getattr(config, "is_encoder_decoder", False) and has_two_sequences:
        raise ValueError(
            f"{type(model).__name__} is an encoder and a decoder, whose sequences differ: "
            + (
                "attach its encoder and its decoder, each with a layout of its own"
                if has_forwards
                else "choose one of T5's or BART's kind, whose two parts run on shards, or a model of one sequence"
            )
        )
    check_head(model, model is attached)
    if getattr(config, "trigram_input", False):
        raise ValueError("trigram_input is True, by which each token reads its neighbours: it would not see past the shard's ends")
    if getattr(config, "token_dropout", False):
        raise ValueError(
            "token_dropout is True, by which embeddings are scaled by the share of masked tokens in the sequence (ESM's way): on "
            "shards it would be the share of each shard; set it to False before the model is made"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and not has_forwards:
        raise ValueError(
            f"attention_chunk_size is {chunk}, but attention in chunks is supported in Llama 4's text model alone: attach that, or "
            "another model"
        )
    known = _LAYER_TYPES | _MIXED_TYPES if has_mixers else _LAYER_TYPES
    other = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if other:
        raise ValueError(
            f"the config's layer_types have {', '.join(map(repr, other))}, but only layers that see other tokens through full, "
            "sliding or chunked attention can run on shards"
        )


def _check_module(name: str, module: nn.Module) -> None:
    if name.rpartition(".")[2] == "pooler":
        raise ValueError(
            f"{name} looks at one token of the sequence, and would take one of each shard: make the model with "
            "add_pooling_layer=False, or set it to None, and pool after ringattn.unshard"
        )


def check_head_dims(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError for attention modules with wider heads than the kernels take."""
    for module in modules:
        for name in ("head_dim", "qk_head_dim", "v_head_dim", "key_value_proj_dim"):
            width = getattr(module, name, None)
            if isinstance(width, int) and width > check.MAX_HEAD_DIM:
                raise ValueError(
                    f"{type(module).__name__} has a {name} of {width}, but it must be 1 to {check.MAX_HEAD_DIM}: no kernel takes wider ones"
                )


def takes_positions(model: nn.Module) -> bool:
    """Whether global positions can be given to a model."""
    return any("position_ids" in inspect.signature(type(part).forward).parameters for part in models(model))


def check_positions_taken(model: nn.Module) -> None:
    """Raise ValueError for a model to which global positions cannot be given."""
    if not takes_positions(model):
        raise ValueError(
            f"{type(model).__name__} takes no position_ids, and would count positions within the shard: it cannot run on shards"
        )
    own = inspect.signature(type(model).forward).parameters
    if "position_ids" not in own and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
        raise ValueError(
            f"{type(model).__name__} hands no position_ids to the model within in this version of transformers: install transformers 5, "
            "or attach the model within"
        )


def check_head(model: nn.Module, is_attached: bool = False) -> None:
    """Raise ValueError for a head that pools over tokens, unless it is attached itself and known."""
    if is_attached and answers_from(model) is not None:
        return
    if type(model).__name__.endswith(_POOLED):
        raise ValueError(
            f"{type(model).__name__} answers from one token of the sequence, and would take one of each shard: "
            "attach its base model, call that, and pool after ringattn.unshard; heads of decoders, BERT's and RoBERTa's kind run on "
            "shards where they are attached themselves"
        )


def check_attention(options: dict[str, Any], ignored: frozenset[str]) -> None:
    """Raise ValueError, with its name, for an option of attention that is neither honoured nor harmless."""
    for name, value in options.items():
        if value is None or value is False or name in _HARMLESS or name in ignored:
            continue
        if name == "deterministic" and torch.are_deterministic_algorithms_enabled():
            continue
        why = _REFUSED.get(
            name,
            "the ring does not know what that asks of attention: leave it out, or, if it asks nothing, attach(model, "
            f"ignore=[{name!r}])",
        )
        raise ValueError(f"{name} is {_shown(value)}, but {why}")


def check_mask(
    *,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    mask_function: Callable[..., Any] | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    q_length: int = 0,
    is_padded: bool = False,
    **options: Any,
) -> bool | None:
    """Whether the mask that transformers asks for is causal; None if that is unknown. is_padded: padding is taken care of.

    Raises ValueError if the mask hides tokens, or is anything else than causal or full, with or without a window and packed documents.
    """
    if attention_mask is not None and not is_padded and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask hides tokens, but not those that the model was called with: ring attention takes its mask over global "
            "positions, as attach(model, mask=...)"
        )
    # older versions give the positions of the queries, newer ones their number
    positions = options.get("cache_position")
    tokens = len(positions) if isinstance(positions, torch.Tensor) else q_length
    some = 1 if allow_is_causal_skip else tokens - 1
    ahead = None if mask_function is None or tokens < 2 else _sees_ahead(mask_function, options.get("batch_size", 1), some)
    # unless the mask should be full, a token that sees the next one means image blocks or the like
    is_known = not use_vmap or getattr(options.get("config"), "use_bidirectional_attention", None) is True
    if not is_known or (ahead and not use_vmap and not allow_is_causal_skip and not allow_is_bidirectional_skip):
        raise ValueError(
            "this model adds a mask function of its own, such as Gemma's for blocks of images, which the ring does not know: without "
            "images leave token_type_ids and mm_token_type_ids out; with images this model cannot run on shards"
        )
    return None if ahead is None else not ahead


def mask_window(local_size: int | None, is_causal: bool | None, seq_len: int, **options: Any) -> Window:
    """The window or the chunks of the mask that transformers asks for, of a sequence of `seq_len` tokens."""
    config, mask_function = options.get("config"), options.get("mask_function")
    if local_size is None:
        return None
    if local_size == getattr(config, "attention_chunk_size", None) and getattr(config, "sliding_window", None) is None:
        return ChunkedWindow(local_size, seq_len)
    if is_causal is not False or mask_function is None:
        return local_size
    if getattr(config, "use_bidirectional_attention", None) is True:
        return local_size - 1, local_size - 1  # Gemma 3, whose function also tells packed documents, by indices within the shard
    # in both directions models differ in whether the window's end is in it: ask the function
    query, key = torch.tensor(local_size + 1), torch.arange(2 * local_size + 3)
    zero = torch.zeros((), dtype=torch.int64)
    live = torch.as_tensor([bool(mask_function(zero, zero, query, at)) for at in key])
    reach = int(live.sum()) // 2
    if not torch.equal(live, (key - query).abs() <= reach):
        raise ValueError(
            f"this model's window of {local_size} tokens is none of as many on each side: this model cannot run on shards"
        )
    return reach, reach


def check_inputs(model: nn.Module, args: tuple, kwargs: dict[str, Any], layout: Layout, rank: int) -> torch.Tensor:
    """The tokens of a model's call. Raises ValueError if they, or other arguments, do not fit this rank's shard."""
    takes = inspect.signature(type(model).forward).parameters
    if not {"input_ids", "inputs_embeds"} & takes.keys() and all(x.kind != x.VAR_POSITIONAL for x in takes.values()):
        raise ValueError(
            f"{type(model).__name__} is part of an attached model but takes no tokens, as parts for images and sound do, and would attend "
            "around the ring: attach the language model inside, and it alone"
        )
    tokens = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    tokens = args[0] if tokens is None and args else tokens
    if not isinstance(tokens, torch.Tensor):
        raise ValueError("the model is called without input_ids and inputs_embeds: give this rank's shard of one of them")
    here = layout.lengths[rank]
    if tokens.shape[1] != here:
        if tokens.shape[1] == layout.seq_len:
            raise ValueError(
                f"the input has {tokens.shape[1]} tokens, but rank {rank} of {layout!r} holds {here}: "
                "cut the whole sequence with ringattn.shard"
            )
        raise ValueError(
            f"the input has {tokens.shape[1]} tokens, but rank {rank} of {layout!r} holds {here}: for a sequence of another length "
            "attach again, with its layout, or attach(model) once, and give layout= to each call"
        )
    _check_model_options(model, kwargs)
    _check_padding(kwargs.get("attention_mask"), here)
    return tokens


def check_positions(model: Any, kwargs: dict[str, Any], layout: Layout, holders: Sequence[ModelCall] = ()) -> None:
    """Raise ValueError for positions that were, or would be, made from a shard, and for flat ones beside images.

    holders: the calls under way of models that hold this one.
    """
    positions = kwargs.get("position_ids")
    made_by = [holder.model for holder in holders if "position_ids" not in holder.given]
    if made_by and positions is not None and layout != contiguous(layout.seq_len, 1):
        raise ValueError(
            f"{type(made_by[0]).__name__} was called without position_ids and made them from this rank's shard: make them from the "
            "whole sequence (Qwen-VL models: get_rope_index), cut them with shard_batch, and give them"
        )
    images = [name for name, value in kwargs.items() if name.startswith(_IMAGES) and _is_given(value)]
    images += [name for name in ("inputs_embeds",) if kwargs.get(name) is not None and not holders]
    if not images or not _has_axes(model) or (isinstance(positions, torch.Tensor) and positions.dim() == 3):
        return
    raise ValueError(
        f"{images[0]} is given to {type(model).__name__}, whose positions have several axes where there are images, but position_ids "
        "are flat or missing: give those of get_rope_index for the whole sequence, (3, batch, tokens), cut by shard_batch, and "
        "attach(model, mask=ringattn.causal())"
    )


def check_documents_arrive(model: nn.Module, kwargs: dict[str, Any], holders: Sequence[ModelCall]) -> None:
    """Raise ValueError if a model that holds this one was told documents, and has kept them to itself, as Mamba's heads do."""
    for holder in holders:
        kept = [name for name in ("cu_seq_lens_q", "seq_idx") if name in holder.given and kwargs.get(name) is None]
        if kept:
            raise ValueError(
                f"{kept[0]} is given to {type(holder.model).__name__}, which does not hand it on to the {type(model).__name__} within: "
                f"attach the {type(holder.model).__name__} itself"
            )


def check_options(model: nn.Module, kwargs: dict[str, Any], ignored: frozenset[str]) -> None:
    """Raise ValueError, with its name, for an option that a model takes but hands to none of its layers (Mamba)."""
    takes = {*inspect.signature(type(model).forward).parameters, *CACHES}
    check_attention({name: value for name, value in kwargs.items() if name not in takes}, ignored)


def _is_given(value: Any) -> bool:
    return bool(value.any()) if isinstance(value, torch.Tensor) and not value.is_floating_point() else value is not None


def _has_axes(model: nn.Module) -> bool:
    """Whether a model's rotary positions have an axis for time, height and width (M-RoPE)."""
    return any(getattr(module, "mrope_section", None) or hasattr(module, "get_rope_index") for module in model.modules())


def check_caches(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for a key/value cache, which a call on shards cannot have."""
    for name in (*CACHES, "use_cache"):
        given = kwargs.get(name)
        if given is not None and given is not False:
            shown = f"a {type(given).__name__}" if hasattr(given, "get_seq_length") else _shown(given)
            raise ValueError(f"{name} is {shown}, but key/value caches are not supported: {_CACHES}")


def _check_model_options(model: Any, kwargs: dict[str, Any]) -> None:
    check_caches(kwargs)
    if kwargs.get("head_mask") is not None:  # BLOOM and others ignore it
        check_attention({"head_mask": kwargs["head_mask"]}, frozenset())
    asked = kwargs.get("output_attentions")
    if getattr(model.config, "output_attentions", False) if asked is None else asked:
        raise ValueError("output_attentions is True, but attention weights are never formed: leave it out")
    for name in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
        if model.training and getattr(model.config, name, 0):
            raise ValueError(f"{name} is {getattr(model.config, name)}, by which ranks would skip different layers: set it to 0.0")


def _check_padding(attention_mask: Any, here: int) -> None:
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        if attention_mask.shape[1] != here:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but this rank holds {here} tokens: cut it with shard_batch"
            )
        most = int(attention_mask.amax())
        if most > 1:
            raise ValueError(
                f"attention_mask counts to {most}, as for packed documents: give cu_seq_lens_q and cu_seq_lens_k instead"
            )


def check_output(model: nn.Module, output: Any, layout: Layout) -> None:
    """Raise ValueError for outputs made from one token of a shard."""
    for name in _OF_ONE_TOKEN:
        if layout.world_size > 1 and getattr(output, name, None) is not None:
            raise ValueError(
                f"{type(model).__name__} makes its {name} from one token of the sequence, and took one of this rank's shard: use a "
                "model without it, and pool after ringattn.unshard"
            )


def take_documents(kwargs: dict[str, Any], layout: Layout) -> tuple[Documents | None, dict[str, Any]]:
    """The packed documents among a call's arguments, under flash attention's names, and the other arguments.

    Raises ValueError for bounds that end before the sequence, as those counted within a shard do.
    """
    packed = packed_documents(kwargs)
    if packed is not None and packed.cu_seqlens[-1] < layout.seq_len:
        raise ValueError(
            f"cu_seq_lens_q ends with {packed.cu_seqlens[-1]}, but the sequence has {layout.seq_len} tokens: give the bounds within the "
            "whole sequence, not within a shard; padding behind the last document is one more document, as shard_batch and pack(..., to=) "
            "make it"
        )
    names = ("max_length_q", "max_length_k")
    if packed is None:
        for name in names:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is {_shown(kwargs[name])}, but cu_seq_lens_q and cu_seq_lens_k, which it belongs to, are not given"
                )
    return packed, {name: value for name, value in kwargs.items() if name not in {"cu_seq_lens_q", "cu_seq_lens_k", *names}}


def _sees_ahead(mask_function: Callable[..., Any], rows: int, tokens: int) -> bool:
    """Whether any of a row's first `tokens` tokens sees the next one, or the function indexes more tokens than a shard has."""
    row, query, head = torch.arange(rows)[:, None], torch.arange(tokens), torch.zeros((), dtype=torch.int64)
    try:
        return bool(torch.as_tensor(mask_function(row, head, query, query + 1)).any())
    except IndexError:  # it indexes by positions in the whole sequence
        return True


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
