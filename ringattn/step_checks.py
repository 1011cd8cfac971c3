"""What `verify` refuses: arguments of a wrong type, and steps that cannot be compared. Each is a ValueError on every rank."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import check
from .geometry.layout import Layout
from .geometry.mask import Mask
from .integrations.replace import attention_modules
from .scores import ScoreMod
from .whole_step import has_mixers, of_transformers, takes_masks


def check_arguments(
    model: Any, batch: Any, layout: Any, kv_layout: Any, of_keys: Any, mask: Any, loss: Any, whole: Any, score: Any
) -> None:
    check.instance("model", model, nn.Module, "pass the model itself")
    check.instance("batch", batch, Mapping, "give a dict of whole sequences, such as {'input_ids': ...}")
    check.optional("layout", layout, Layout, check.BUILD_A_LAYOUT)
    check.optional("kv_layout", kv_layout, Layout, check.BUILD_A_LAYOUT)
    for name in check.listed("of_keys", of_keys, "the names of the batch's tensors that are of the keys' tokens"):
        check.instance("of_keys", name, str, "give names of the batch's tensors")
    check.optional("mask", mask, Mask, check.BUILD_A_MASK)
    check.optional("whole", whole, nn.Module, "pass a copy of the model that runs whole sequences")
    if loss is not None:
        check.function("loss", loss, "of a model and its inputs")
    check.optional("score", score, ScoreMod, check.BUILD_A_SCORE)


def check_comparable(
    model: nn.Module,
    batch: Mapping[str, Any],
    mask: Mask | None,
    whole: nn.Module | None,
    score: ScoreMod | None,
    autocast: torch.dtype | None,
) -> None:
    """Raise ValueError if this model's steps cannot be compared."""
    if score is not None and not is_replaced(model, whole):
        raise ValueError(
            f"score is given, but {type(model).__name__} brings its own attention, which says by itself what happens to scores: "
            "leave score out"
        )
    if is_replaced(model, whole) and not attention_modules(model):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model and calls no scaled_dot_product_attention, so it is unknown how it "
            "runs whole sequences: give whole=, a copy of it with dense attention"
        )
    if whole is None and of_transformers(model):
        _check_own_attention(model, batch, mask)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires gradients: there is nothing to compare but the loss"
        )
    if not torch.is_grad_enabled():
        raise ValueError(
            "gradients are off, and they are what is compared: call verify outside of torch.no_grad and inference_mode"
        )
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast is {autocast!r}, but must be torch.bfloat16 or torch.float16")


def _check_own_attention(model: Any, batch: Mapping[str, Any], mask: Mask | None) -> None:
    """Raise ValueError if a model of transformers cannot run whole sequences with its own attention."""
    name = type(model).__name__
    if has_encoder_and_decoder(model):
        if mask is not None:
            raise ValueError(f"mask is given, but {name} has an encoder and a decoder, which have masks of their own: leave it out")
        return
    if (mask is not None or batch.get("cu_seq_lens_q") is not None) and not takes_masks(model):
        raise ValueError(
            f"{name} makes ALiBi from its own mask, so its whole step takes no other: verify it without mask= and without packed "
            "documents"
        )
    if (mask is not None or _has_documents(batch)) and has_mixers(model):
        raise ValueError(
            f"{name} has layers with states or convolutions, which transformers runs across packed documents: verify it without mask= and "
            "without packed documents"
        )


def _has_documents(batch: Mapping[str, Any]) -> bool:
    """Whether a batch is packed, by bounds or by positions that restart."""
    positions = batch.get("position_ids")
    restarts = isinstance(positions, torch.Tensor) and bool((positions.diff() < 0).any())
    return restarts or batch.get("cu_seq_lens_q") is not None


def has_encoder_and_decoder(model: nn.Module) -> bool:
    """Whether it is a model of transformers that answers a text."""
    return of_transformers(model) and "decoder_input_ids" in inspect.signature(type(model).forward).parameters


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError if a wrapper holds the weights."""
    from torch.distributed.tensor import DTensor  # here, because its import takes a second

    if isinstance(model, DistributedDataParallel):
        raise ValueError("the model is wrapped in DistributedDataParallel: verify it before, or pass its .module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or hasattr(parameter, "ds_id"):
            raise ValueError(f"the weights are sharded, for one {name}: verify the model before FSDP2 or DeepSpeed shards it")


@contextlib.contextmanager
def refusing_dropout(model: nn.Module):
    """Refuse by name a dropout module that drops anything within the block. Attention reads the probability of its own, and calls none."""

    def refuse(name: str, module: nn.Dropout, args: Any) -> None:
        if module.training and module.p:
            raise ValueError(
                f"{name} drops {module.p} of its input at random, so no two steps are alike: set its p to 0, or call model.eval() first"
            )

    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    hooks = [module.register_forward_pre_hook(functools.partial(refuse, name)) for name, module in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_replaced(model: nn.Module, whole: nn.Module | None) -> bool:
    """Whether verify replaces the attention of the model."""
    return whole is None and not of_transformers(model)
