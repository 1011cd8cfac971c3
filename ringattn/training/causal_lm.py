"""What training a causal language model on a sharded sequence needs besides ring attention.

Labels are shifted over the whole sequence, before it is split, because the token after a shard's last one is on another rank.
Each rank sums its tokens' losses and divides by the number of tokens on all ranks. The sum of these over the ranks is then the
mean over all tokens, however uneven the shards; so it is for gradients.

Shapes: b batch, s local tokens, n features, vocab tokens of the vocabulary.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import check
from ..runtime.groups import Group, process_groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORE = -100  # the label of a token that does not count

# settings by which heads of transformers 5.23 change logits, or the output embedding's input
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def forward_names(model: nn.Module) -> set[str]:
    """The names that a model's own forward pass uses: attributes, strings and variables."""
    function = inspect.unwrap(model.forward)
    code = (function if hasattr(function, "__code__") else inspect.unwrap(type(model).forward)).__code__
    return {name for name in (*code.co_names, *code.co_varnames, *code.co_consts) if isinstance(name, str)}


def shift_labels(tokens: torch.Tensor) -> torch.Tensor:
    """Whole sequences' labels: for each token the next one, for the last `IGNORE`: (b, s) -> (b, s) int64."""
    check.instance("tokens", tokens, torch.Tensor, "pass whole sequences (b, s)")
    if not tokens.dim() or tokens.is_floating_point() or tokens.is_complex() or tokens.layout != torch.strided:
        raise ValueError(
            f"tokens is a tensor of shape {tuple(tokens.shape)} and {tokens.dtype}, but must hold integers (b, s), one per token"
        )
    return F.pad(tokens[..., 1:].to(torch.int64), (0, 1), value=IGNORE)


@dataclass(frozen=True)
class Head:
    """How hidden states become logits, besides the weight: softcap * tanh(x / softcap) with x = scale * hidden @ weight.T + bias.

    bias: (vocab,) or None. softcap: None for none. The scale does not apply to the bias, because it applies to hidden.
    """

    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(..., n), (vocab, n) -> (..., vocab), fp32 or wider."""
        logits = F.linear(hidden if self.scale == 1.0 else hidden * self.scale, weight, self.bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


def token_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int = 512, *, head: Head | None = None
) -> torch.Tensor:
    """Summed cross-entropy of local tokens under logits `hidden @ weight.T`, `chunk` tokens at a time, fp32 or wider.

    A chunk's logits are formed, reduced and dropped, and formed again in the backward pass. So a long shard's logits never exist whole.

    Args:
        hidden: (b, s, n), the model's last hidden states.
        weight: (vocab, n), the output embedding.
        labels: (b, s) int64, `IGNORE` where a token does not count.
        chunk: tokens whose logits exist at a time.
        head: a bias, a scale and a softcap of the logits; none of them by default.

    Returns a scalar, for an empty shard 0 with zero gradients. Divide it by the number of tokens that count on all ranks.
    Raises ValueError if the shapes do not fit.
    """
    head = Head() if head is None else head
    _check(hidden, weight, labels, head)
    chunk = check.integer("chunk", chunk, least=1)
    total = _nothing(hidden, weight, head) if not labels.numel() else None
    for rows, targets in zip(hidden.flatten(0, -2).split(chunk), labels.flatten().split(chunk), strict=True):
        part = checkpoint(_chunk_loss, rows, weight, targets, head, use_reentrant=False)
        total = part if total is None else total + part
    assert isinstance(total, torch.Tensor)
    return total


def fused_token_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int = 512, *, head: Head | None = None
) -> torch.Tensor:
    """`token_loss` by Liger's fused kernel, on a GPU and if `liger_kernel` is installed; otherwise `token_loss` itself.

    It has the same arguments and result. The kernel forms gradients in the forward pass and sums the weight's gradient in fp32 ("Liger
    Kernel", Hsu et al. 2024, section 3.2), so no logits are formed twice. The kernel chooses its own `chunk`.
    """
    check.instance("hidden", hidden, torch.Tensor, "pass the model's last hidden states (b, s, n)")
    if not hidden.is_cuda or not hidden.numel() or importlib.util.find_spec("liger_kernel") is None:
        return token_loss(hidden, weight, labels, chunk, head=head)
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    head = Head() if head is None else head
    _check(hidden, weight, labels, head)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    rows = hidden.flatten(0, -2)
    bias = None if head.bias is None else head.bias.to(rows.dtype)
    loss = liger_fused_linear_cross_entropy(
        rows if head.scale == 1.0 else rows * head.scale,
        weight,
        labels.flatten(),
        bias,
        ignore_index=IGNORE,
        reduction="sum",
        softcap=head.softcap,
        accum_dtype=torch.float32,
    )
    assert isinstance(loss, torch.Tensor)
    return loss.float()


class CausalLMLoss(nn.Module):
    """A transformers causal model whose output is its summed loss: wrap this, not the model, in FSDP2, DDP or DeepSpeed.

    A shard's logits never exist whole. The output embedding is used within the wrapper's forward pass, where a sharded one is gathered.

        summed = CausalLMLoss(model)(**shard_batch(batch, layout, rank))

    Args:
        model: a causal model of transformers, attached or not, inside PEFT's adapters or not, and not yet wrapped or compiled: wrap or
            compile this instead. Its config says how logits are made: a final softcap (Gemma 2, RecurrentGemma, xLSTM), a factor (Cohere,
            Falcon-H1) and a divisor (Granite, Inkling) apply if the model's forward pass uses them. Refused are other numbers of the
            config that the forward pass uses, a vocabulary cut after the output embedding (`unpadded_vocab_size`), heads with further
            layers (BERT's), adapters on the output embedding (PEFT's `modules_to_save` is honoured), routers' losses
            (`output_router_logits`) and Bamba's `z_loss_coefficient`. `ringattn.verify` makes its loss from the model's own logits, and
            does not run this loss: to check a model whose code is not transformers', compare the two on one short sequence.
        loss: `fused_token_loss` (the default) or `token_loss`.

    A call returns the cross-entropy summed over this rank's tokens: a scalar in fp32 (fp64 for fp64), for `mean_loss`.
    """

    def __init__(self, model: PreTrainedModel, loss: Callable[..., torch.Tensor] = fused_token_loss) -> None:
        super().__init__()
        # wrappers pass on the attributes of their model, whose parts this loss would call without them; PEFT's has its adapters in these
        if not any(hasattr(type(model), name) for name in ("get_output_embeddings", "get_base_model")):
            raise ValueError(
                f"{type(model).__name__} is not a model of transformers: give one before it is wrapped, and wrap this instead; for "
                "your own model see token_loss"
            )
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{type(model).__name__} was compiled by itself, but this loss calls its parts alone, which would run uncompiled: call "
                "CausalLMLoss(model).compile() instead"
            )
        output = _output_embedding(model)
        if not isinstance(output, nn.Linear) and isinstance(getattr(output, "base_layer", None), nn.Linear):
            raise ValueError(
                f"{type(model).__name__} has an adapter on its output embedding, which this loss would leave out: take it out of "
                "target_modules, train the whole embedding by modules_to_save, or make the loss from the logits"
            )
        if not isinstance(output, nn.Linear) or _without_head(model) is model:
            raise ValueError(
                f"{type(model).__name__} has no linear output embedding on a model without head: give a causal language model"
            )
        parts: list[Any] = [_without_head(model), model.get_output_embeddings()]
        used = {id(parameter) for part in parts for parameter in part.parameters()}
        for name, parameter in model.named_parameters():
            if id(parameter) not in used:
                raise ValueError(
                    f"{type(model).__name__} has {name} beside its output embedding and the model without head; this loss "
                    "would leave it out, like any further layer of a head (BERT's): make the loss from the logits"
                )
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                f"{type(model).__name__} puts learned tokens before each sequence, which this loss would leave out: use LoRA"
            )
        self.model = model
        self.loss = loss
        check_z_loss(model)
        _check_unknown(model)
        config: Any = model.config.get_text_config()
        divisor = math.prod(float(_setting(model, config, name) or 1.0) for name in _DIVISORS)
        if config.model_type == "hyperclovax":  # it multiplies by the number by which Granite divides
            divisor = 1 / divisor
        self._scale = math.prod(float(_setting(model, config, name) or 1.0) for name in _FACTORS) / divisor
        caps = [cap for name in _SOFTCAPS if (cap := _setting(model, config, name, neutral=None)) is not None]
        self._softcap = caps[0] if caps else None

    def forward(self, shift_labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        asked = getattr(self.model.config.get_text_config(), "output_router_logits", False)
        if inputs.get("output_router_logits", asked):
            raise ValueError(
                "output_router_logits is True, but this loss is of the logits alone: set it to False, or make both losses from the "
                "model's outputs"
            )
        output = _output_embedding(self.model)
        # fully_shard makes a class of this name, and its weights whole within a call of the model, which this loss does not make
        if type(self.model).__name__.startswith("FSDP") and check.is_dtensor(output.weight):
            raise ValueError(
                f"{type(self.model).__name__} was sharded by itself, and its weights are sharded still, because this loss calls its "
                "parts alone: call fully_shard(CausalLMLoss(model)) instead of fully_shard(model)"
            )
        hidden = _without_head(self.model)(**inputs)[0]
        if check.is_dtensor(output.weight) and not check.is_dtensor(hidden):
            raise ValueError(
                "the output embedding was sharded by itself, and its weight is sharded still, because this loss does not call it: leave "
                "it to fully_shard(CausalLMLoss(model))"
            )
        return self.loss(hidden, output.weight, shift_labels, head=Head(output.bias, self._scale, self._softcap))


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Group | None = None) -> None:
    """Replace each gradient by its sum over the ranks: the gradient of the summed loss. A collective; on one rank it does nothing.

    group: a process group, a mesh of any dimensions, a hybrid, or None for all ranks. Every rank must call it with all trainable
    parameters. A parameter without a gradient on this rank counts as zero; one without a gradient on any rank keeps none, so that
    optimizers leave it as it is.
    """
    axes = process_groups(group)
    # each parameter once, even if two modules share it
    trained = list(dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad)) if axes else []
    trained = _used(trained, axes)
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for axis in axes:
        pending = [dist.all_reduce(parameter.grad, group=axis, async_op=True) for parameter in trained]
        for work in pending:
            assert work is not None
            work.wait()


def _used(parameters: list[torch.nn.Parameter], axes: list[dist.ProcessGroup]) -> list[torch.nn.Parameter]:
    """The parameters that have a gradient on some rank."""
    if not parameters:
        return []
    here = [parameter.grad is not None for parameter in parameters]
    anywhere = torch.tensor(here, dtype=torch.uint8, device=parameters[0].device)
    for axis in axes:
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=axis)
    # a rank with all gradients knows the answer, and does not wait for its device
    return parameters if all(here) else [parameter for parameter, used in zip(parameters, anywhere.tolist(), strict=True) if used]


def _without_head(model: Any) -> Any:
    """The model inside that returns hidden states; itself if there is none. Models name it base model or decoder."""
    model = _without_adapters(model)
    inner = model.get_decoder() if model.base_model is model else model.base_model
    # Llama 4's class of texts has its base model under the usual name, not under the one that it gives
    return getattr(model, "model", model) if inner is model else inner


def _output_embedding(model: Any) -> Any:
    """The module that makes logits; if PEFT trains copies of it (`modules_to_save`), the one in use."""
    output = model.get_output_embeddings()
    copies = getattr(output, "modules_to_save", None)
    if copies is None:
        return output
    return output.original_module if output.disable_adapters else copies[output.active_adapters[0]]


def _without_adapters(model: Any) -> Any:
    """The model within PEFT's, whose adapters are in the model's own layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_z_loss(model: Any) -> None:
    """Raise ValueError for a model that adds the squares of its logits' normalisers to its loss, a mean over a rank's tokens."""
    name = "z_loss_coefficient"
    value = getattr(model, name, getattr(model.config.get_text_config(), name, None))
    if value:
        raise ValueError(
            f"{name} is {value}, but the z-loss is a mean over this rank's tokens that only the model's own head makes: set {name} to 0.0 "
            "in the config that the model is made from, or make both losses from the logits"
        )


def _check_unknown(model: Any) -> None:
    """Raise ValueError for a number in the config that the model's forward pass uses, and of which it is unknown how."""
    whole = _without_adapters(model)
    config, names = whole.config.get_text_config(), forward_names(whole)
    cut = getattr(config, "unpadded_vocab_size", None)
    found = [] if cut in (None, config.vocab_size) or "unpadded_vocab_size" not in names else ["unpadded_vocab_size"]
    for name in sorted(names - {*_FACTORS, *_DIVISORS, *_SOFTCAPS}):
        value = getattr(config, name, None)
        # coefficients of losses say nothing about logits
        if isinstance(value, float) and value not in (0.0, 1.0) and "loss" not in name:
            found.append(name)
    if found:
        raise ValueError(
            f"{found[0]} is {getattr(config, found[0])} in the config, and {type(whole).__name__} uses it where it makes its logits, in a "
            "way that this loss does not know: make the loss from the logits"
        )


def _setting(model: Any, config: Any, name: str, neutral: float | None = 1.0) -> Any:
    """A setting of the config that changes logits. Raises ValueError if it is set and the model's forward pass does not use it."""
    value = getattr(config, name, None)
    whole = _without_adapters(model)
    if value not in (None, neutral) and name not in forward_names(whole):
        raise ValueError(
            f"{name} is {value} in the config, but {type(whole).__name__} does not use it where it makes its logits: make the loss from "
            "the logits"
        )
    return value


def _check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: Head) -> None:
    check.instance("head", head, Head, "make one with Head(bias, scale, softcap), or leave it out")
    for name, x in (("hidden", hidden), ("weight", weight)):
        check.instance(name, x, torch.Tensor, "pass floating-point numbers")
        if not x.is_floating_point() or x.layout != torch.strided:
            raise ValueError(f"{name} is a tensor of {x.dtype} and {x.layout}, but must be dense, of floating-point numbers")
    check.instance("labels", labels, torch.Tensor, "give one label per token")
    if labels.dtype != torch.int64 or labels.layout != torch.strided:
        raise ValueError(f"labels are of {labels.dtype} and {labels.layout}, but must be dense, of torch.int64")
    if not hidden.device == weight.device == labels.device:
        raise ValueError(
            f"hidden is on {hidden.device}, weight on {weight.device} and labels on {labels.device}: move them to one device"
        )
    if hidden.dim() < 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}, but must be (b, s, n)")
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden has the tokens {tuple(hidden.shape[:-1])} and labels {tuple(labels.shape)}: give one label per token"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, but must be (vocab, {hidden.shape[-1]}), hidden's features")


def _nothing(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
    """0, with zero gradients for all tensors that a loss depends on."""
    zero = (hidden.sum() + weight.sum()) * 0
    return zero if head.bias is None else zero + head.bias.sum() * 0


def _chunk_loss(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
    return F.cross_entropy(head.logits(rows, weight), targets, ignore_index=IGNORE, reduction="sum")
