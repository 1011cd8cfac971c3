"""Labels given to a transformers model on shards: refused where the head would make a loss of the shard alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..runtime.agree import Facts, agree
from ..training.causal_lm import check_z_loss, forward_names
from ..transport import Ranks
from .huggingface_heads import is_put_in

# arguments of which heads make losses: means over a rank's own tokens, or over positions in its shard
_TARGETS = ("labels", "start_positions", "end_positions", "next_sentence_label", "sentence_order_label")


def check_targets(model: nn.Module, kwargs: dict[str, Any], ranks: int, ignored: frozenset[str] = frozenset()) -> None:
    """Raise ValueError for labels whose loss would be of the shard alone, and if only the shard's last logits would be kept."""
    on_shards = ranks > 1
    if on_shards:
        _check_kept_logits(kwargs)
    given = [name for name in _TARGETS if kwargs.get(name) is not None]
    if given == ["labels"] and is_put_in(model):
        return  # made of logits that all ranks have
    if given:
        makes_loss = _check_labels(model, kwargs, given, on_shards)
    else:
        makes_loss = kwargs.get("shift_labels") is not None and _makes_loss_of_shift_labels(model, kwargs, ignored)
    if makes_loss and on_shards:
        _check_mean(model, kwargs, given[0] if given else "shift_labels")


def agree_on_count(ranks: Ranks, kwargs: dict[str, Any]) -> None:
    """Raise ValueError, on every rank, if ranks divide their losses by different numbers of tokens, such as those of their shards."""
    count = kwargs.get("num_items_in_batch")
    if count is None or ranks.size == 1 or all(kwargs.get(name) is None for name in ("labels", "shift_labels")):
        return
    agree(ranks, Facts({"function": "the loss of a model's head", "num_items_in_batch": int(count)}), 0)


class GuardedLoss:
    """A head's own loss function after `check_targets`, because PEFT before 0.21 calls a head's forward around its hooks."""

    def __init__(self, model: Any, loss: Callable[..., Any], ranks: int) -> None:
        self.model, self.loss, self.ranks = model, loss, ranks
        self.__name__ = getattr(loss, "__name__", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            check_targets(self.model, {**dict(zip(("logits", "labels"), args, strict=False)), **kwargs}, self.ranks)
        return self.loss(*args, **kwargs)


def guard_loss(model: Any, ranks: int) -> None:
    """Replace a model's loss function, if it has one, by a `GuardedLoss`."""
    release_loss(model)
    if "loss_function" in forward_names(model):
        model.loss_function = GuardedLoss(model, model.loss_function, ranks)


def release_loss(model: Any) -> None:
    """Undo `guard_loss`."""
    guarded = vars(model).get("_loss_function")
    if isinstance(guarded, GuardedLoss):
        model.loss_function = guarded.loss


def _check_kept_logits(kwargs: dict[str, Any]) -> None:
    for name in ("logits_to_keep", "num_logits_to_keep"):
        kept = kwargs.get(name)
        if isinstance(kept, int) and kept > 0:
            raise ValueError(
                f"{name} is {kept}, but would keep the last tokens of each shard: leave it out, or give a tensor of this rank's rows"
            )


def _check_labels(model: nn.Module, kwargs: dict[str, Any], given: list[str], on_shards: bool) -> bool:
    """Whether the model makes a loss of labels that are shifted already. Raises ValueError if it makes one of others."""
    if given != ["labels"] or not {"loss_function", "ForCausalLMLoss"} <= {*forward_names(model), _loss_name(model)}:
        if on_shards:
            raise ValueError(
                f"{given[0]} is given to {type(model).__name__}, whose loss would be of this rank's tokens alone: leave it out, and "
                "make the loss from the logits, see ringattn.training.loss"
            )
        return False
    if kwargs.get("shift_labels") is None:
        raise ValueError(
            "labels would be shifted within the shard, which loses the token after its end: shift them before sharding, "
            "see ringattn.training.causal_lm"
        )
    return True


def _makes_loss_of_shift_labels(model: nn.Module, kwargs: dict[str, Any], ignored: frozenset[str]) -> bool:
    """Whether the model makes a loss of shift_labels without labels. Raises ValueError if transformers' Trainer would."""
    names = forward_names(model)
    # transformers' own heads ignore shift_labels without labels, but Liger's make a loss of them
    if "shift_labels" in names:
        return True
    is_counted = kwargs.get("num_items_in_batch") is not None and "num_items_in_batch" not in ignored
    if is_counted and "labels" in names:
        raise ValueError(
            "shift_labels and num_items_in_batch are given without labels, as transformers' Trainer does with "
            "label_smoothing_factor, by which it shifts the labels once more, within the shard: leave it at 0; for a loss of "
            "your own (compute_loss_func), attach(model, ignore=['num_items_in_batch'])"
        )
    return False


def _check_mean(model: nn.Module, kwargs: dict[str, Any], given: str) -> None:
    """Raise ValueError if a loss would be a mean over this rank's tokens."""
    if kwargs.get("num_items_in_batch") is None:
        raise ValueError(
            f"{given} are given without num_items_in_batch, so the loss would be the mean over this rank's tokens, not over "
            "all: give the number of tokens counted on all ranks, see ringattn.training.loss"
        )
    config: Any = model.config
    asked = kwargs.get("output_router_logits")
    if getattr(config.get_text_config(), "output_router_logits", False) if asked is None else asked:
        raise ValueError(
            "output_router_logits is True, and the routers' loss would be a mean over this rank's tokens, added once per rank: leave the "
            "labels out, and make both losses from the outputs"
        )
    check_z_loss(model)


def _loss_name(model: nn.Module) -> str:
    return getattr(getattr(model, "loss_function", None), "__name__", "")
