"""The whole step with which `verify` compares: a copy of the model that runs whole sequences with dense attention, and its inputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from . import reference
from .geometry.mask import Mask, causal, documents, full, sliding_window
from .scores import ScoreMod, with_dropout
from .training.data import tokens_of


class DenseCalls(TorchFunctionMode):
    """While it is on, calls of scaled_dot_product_attention run `reference.attention` with a mask and a score.

    What a call may ask for was checked in the step around the ring.
    """

    def __init__(self, mask: Mask | None, score: ScoreMod) -> None:
        super().__init__()
        self.masks = {False: full() if mask is None else mask, True: causal() if mask is None else mask & causal()}
        self.score = score

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        run = self._attention if func is nn.functional.scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        assert attn_mask is None
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        score = with_dropout(self.score, dropout_p) if dropout_p else self.score
        out = reference.attention(q, k, v, mask=self.masks[is_causal], softmax_scale=scale, score=score)
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2)


def of_transformers(model: nn.Module) -> bool:
    """Whether it is a model of transformers, which takes another attention."""
    return hasattr(model, "set_attn_implementation")


def attached_part(model: nn.Module) -> Any:
    """The outermost attached transformers model in it, usually the model itself; None without one."""
    from .integrations.huggingface import NAME

    return next((module for module in model.modules() if NAME in vars(module)), None)


def dense_copy(model: Any) -> nn.Module:
    """A copy that uses transformers' own attention, if it is of transformers."""
    dense = copy.deepcopy(model)
    if of_transformers(dense) and attached_part(dense) is not None:
        from .integrations.huggingface import detach

        detach(dense)
    return dense


def in_fp64(model: Any) -> nn.Module:
    """A copy in fp64."""
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products do not take fp64
    return model


def score_of_copy(score: ScoreMod, model: nn.Module, other: nn.Module) -> ScoreMod:
    """The score for a copy of the model: the copy's own parameters in the place of the model's, and other tensors in the copy's precision
    if that is fp64."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    copied = dict(other.named_parameters())
    wide = next(iter(copied.values())).dtype == torch.float64

    def change(x: torch.Tensor) -> torch.Tensor:
        if id(x) in names:
            return copied[names[id(x)]]
        return x.detach().to(torch.float64 if wide else x.dtype).requires_grad_(x.requires_grad)

    return score.mapped(change)


def whole_inputs(model: Any, batch: Mapping[str, Any], mask: Mask | None, *, add_mask: bool) -> dict[str, Any]:
    """The inputs of a dense model, on its device and in its precision; with `add_mask`, a tensor for the mask and packed documents."""
    parameter = next(model.parameters())
    inputs = {
        name: value.to(parameter.dtype) if _is_float(value) else value for name, value in on_device(batch, parameter.device).items()
    }
    return _masked(model, inputs, mask, tokens_of(batch).shape[1]) if add_mask else inputs


def on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch, with its tensors on a device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _masked(model: Any, inputs: Mapping[str, Any], mask: Mask | None, seq_len: int) -> dict[str, Any]:
    """The inputs with a mask tensor, unless there is neither a mask nor documents: then transformers makes its own masks."""
    inputs = {name: value for name, value in inputs.items() if not name.startswith("max_length_")}
    bounds = [inputs.pop(name, None) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if bounds[0] is not None:
        packed = documents(cu_seqlens=bounds[0], causal=mask is None)
        mask = packed if mask is None else mask & packed
    inputs["use_cache"] = False
    if mask is None:
        return inputs
    parameter = next(model.parameters())
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or ())

    def added(live: Mask) -> torch.Tensor:
        dense = live.dense(seq_len).to(parameter.device)[None, None]
        # transformers adds the mask to the scores
        return torch.zeros(dense.shape, dtype=parameter.dtype, device=parameter.device).masked_fill(
            ~dense, torch.finfo(parameter.dtype).min
        )

    within = mask if window is None else mask & sliding_window(window - 1, None)
    if kinds <= {"full_attention"} and "full_attention" in kinds:
        within = mask
    if "sliding_attention" in kinds:
        inputs["attention_mask"] = {"full_attention": added(mask), "sliding_attention": added(within)}
    else:
        inputs["attention_mask"] = added(within)
    return inputs


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
