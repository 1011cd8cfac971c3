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
from .scores import ScoreMod, score, with_dropout
from .training.causal_lm import forward_names
from .training.data import tokens_of


class DenseCalls(TorchFunctionMode):
    """While it is on, calls of scaled_dot_product_attention run `reference.attention` with a mask and a score.

    What a call may ask for was checked in the step around the ring.
    """

    def __init__(self, mask: Mask | None, modified: ScoreMod) -> None:
        super().__init__()
        self.masks = {False: full() if mask is None else mask, True: causal() if mask is None else mask & causal()}
        self.score = modified

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
        modified = with_dropout(self.score, dropout_p) if dropout_p else self.score
        out = reference.attention(q, k, v, mask=self.masks[is_causal], softmax_scale=scale, score=modified)
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2)


class OwnAttention(TorchFunctionMode):
    """While it is on, a model's own attention drops the weights that the ring drops for a seed, and its softmax keeps fp64.

    Weights (b, h, s, s) are the only input of `dropout`: any other was refused in the step around the ring. wide: what asks for fp32 gets
    fp64.
    """

    def __init__(self, seed: int, wide: bool = False) -> None:
        super().__init__()
        self.seed, self.wide = seed, wide

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        replaced: dict[Any, Any] = {
            nn.functional.dropout: self._dropout,
            nn.functional.scaled_dot_product_attention: self._attention,
            nn.functional.softmax: self._softmax,
        }
        named: dict[str, Any] = kwargs or {}
        if self.wide:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            named = {key: torch.float64 if x is torch.float32 else x for key, x in named.items()}
        return replaced.get(func, func)(*args, **named)

    def _softmax(
        self, input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        # eager attention asks for fp32
        return nn.functional.softmax(input, dim, dtype=None if input.dtype == torch.float64 else dtype)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or not p:
            return input
        assert input.dim() == 4
        kept = reference.kept_pairs(score(dropout=p, seed=self.seed), input.shape)
        return input * kept.to(input.device) / (1 - p)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if not dropout_p:
            return nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value


def of_transformers(model: nn.Module) -> bool:
    """Whether it is a model of transformers, which takes another attention."""
    return hasattr(model, "set_attn_implementation")


def attached_part(model: nn.Module) -> Any:
    """The outermost attached transformers model in it, usually the model itself; None without one."""
    from .integrations.huggingface import NAME

    return next((module for module in model.modules() if NAME in vars(module)), None)


def has_mixers(model: nn.Module) -> bool:
    """Whether a model of transformers has layers with states or convolutions, which run around a ring."""
    from .integrations.huggingface_mixers import mixers

    return bool(mixers(model))


def hides_rounding(model: nn.Module, exact: nn.Module) -> bool:
    """Whether a copy in fp64 would round as the model itself does, so that it could not tell how far that is from the truth.

    Recurrences of transformers ask for fp32. The gradients of their decays then differ by 1e-4 and more from those of fp64.
    """
    dtypes = [next(each.parameters()).dtype for each in (model, exact)]
    return dtypes[1] == torch.float64 != dtypes[0] and has_mixers(model)


def dense_copy(model: Any) -> nn.Module:
    """A copy that uses transformers' own attention, if it is of transformers: SDPA, or eager attention where the model uses neither or caps
    scores, which SDPA cannot."""
    dense = copy.deepcopy(model)
    if not of_transformers(dense):
        return dense
    if attached_part(dense) is not None:
        from .integrations.huggingface import NAME, detach

        both = getattr(dense.config, "is_encoder_decoder", False) and NAME not in vars(dense)
        # an encoder and its decoder are attached each by itself
        for part in (dense.get_encoder(), dense.get_decoder()) if both else (dense,):
            if part is dense or NAME in vars(part):
                detach(part)
    caps = any(getattr(module, "attn_logit_softcapping", None) is not None for module in dense.modules())
    if dense.config._attn_implementation not in ("eager", *(() if caps else ("sdpa",))):
        dense.set_attn_implementation("eager")
    return dense


def in_fp64(model: Any) -> nn.Module:
    """A copy in fp64."""
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products do not take fp64
    return model


def score_of_copy(modified: ScoreMod, model: nn.Module, other: nn.Module) -> ScoreMod:
    """The score for a copy of the model: the copy's own parameters in the place of the model's, and other tensors in the copy's precision
    if that is fp64."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    copied = dict(other.named_parameters())
    wide = next(iter(copied.values())).dtype == torch.float64

    def change(x: torch.Tensor) -> torch.Tensor:
        if id(x) in names:
            return copied[names[id(x)]]
        return x.detach().to(torch.float64 if wide else x.dtype).requires_grad_(x.requires_grad)

    return modified.mapped(change)


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
        packed = documents(cu_seqlens=bounds[0], causal=mask is None and _is_causal(model))
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


def _is_causal(model: nn.Module) -> bool:
    """Whether the model's attention is, as its modules say; those that do not say are."""
    said = (getattr(part, "is_causal", None) for part in model.modules())
    return next((x for x in said if isinstance(x, bool)), True)


def takes_masks(model: nn.Module) -> bool:
    """Whether a model of transformers takes a mask of any pairs. BLOOM and Falcon make ALiBi of their mask, so it has two dimensions."""
    makers = (part for part in model.modules() if hasattr(part, "config") and "build_alibi_tensor" in forward_names(part))
    return not any(getattr(part.config, "alibi", True) for part in makers)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
