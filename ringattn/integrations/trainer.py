"""transformers' Trainer on shards: an exact `evaluate`, and no training of ranks by themselves.

    class RingTrainer(TrainerOnShards, Trainer):
        def get_train_dataloader(self): ...

A rank's loss of a batch is S_r * ranks / N_b, with S_r its summed loss and N_b the valid tokens of the batch on all ranks. Their mean over
the ranks is the batch's mean loss. `Trainer.evaluate` takes the mean of these over batches, whatever their numbers of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..training.causal_lm import IGNORE


class TrainerOnShards:
    """A mixin, before `transformers.Trainer` among the bases, for a model that is attached to rings of the Trainer's ranks.

    - The loss of `evaluate` and `predict` is the mean over all valid tokens of all batches and ranks.
    - `train` raises ValueError if the model is not wrapped, as after an `evaluate` before `train` (transformers 5.23 with accelerate
      1.15): each rank would train on its shard alone.

    Leave `average_tokens_across_devices` on. The batches' labels are called `labels`, as `Trainer` wants.
    """

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        trainer: Any = super()
        self._evaluated = torch.zeros(2, dtype=torch.float64)  # the summed loss of all ranks, and its tokens
        output = trainer.evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, tokens = self._evaluated.tolist()
        if tokens:
            output.metrics[f"{metric_key_prefix}_loss"] = total / tokens
        return output

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        trainer: Any = super()
        labels = inputs.get("labels")
        loss, *rest = trainer.prediction_step(model, inputs, *args, **kwargs)
        if loss is not None and labels is not None:
            tokens = _sum(loss.new_tensor(int((labels != IGNORE).sum()), dtype=torch.float64))
            mean = _sum(loss.double()) / _ranks()
            self._evaluated += torch.stack([mean * tokens, tokens]).cpu()
        return loss, *rest

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import FSDPModule  # here, because its import takes a second

        trainer: Any = super()
        if _ranks() > 1 and model is vars(self)["model"] and not isinstance(model, FSDPModule):
            raise ValueError(
                f"{type(model).__name__} is not wrapped, so that each of {_ranks()} ranks would train on its shard alone; that is so if "
                "evaluate was called before train: call it after, or by another Trainer of another copy of the model"
            )
        return trainer.training_step(model, *args, **kwargs)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _sum(value: torch.Tensor) -> torch.Tensor:
    if _ranks() > 1:
        dist.all_reduce(value)
    return value
