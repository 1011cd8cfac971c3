"""transformers' Trainer around a ring: what it would do wrong on shards is done right here, or refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer

from ..training.loss import count_tokens


class RingTrainer(Trainer):
    """A Trainer of an attached model, whose `evaluate` and `predict` give the exact mean loss over all tokens of all batches and ranks.

    transformers' own takes the mean of the batches' means, whatever their numbers of tokens. Override `get_train_dataloader`, and
    `get_eval_dataloader` or `get_test_dataloader` if you use them: they give this rank's rows of whole sequences
    (`ringattn.training.data.shard_batch`), whose shifted labels are called labels, too. A sampler may deal sequences to replicas, never
    to the ranks of a ring. `examples/train_trainer.py` is a complete program.

    Raises ValueError if a loader is not overridden, and in the first step of `train` if the model is not wrapped, because `evaluate` was
    called before: ranks would train each by itself. `TrainingArguments(eval_on_start=True)` evaluates before the first step.
    """

    def get_train_dataloader(self) -> DataLoader:
        raise ValueError(_DEALS.format("get_train_dataloader"))

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        raise ValueError(_DEALS.format("get_eval_dataloader"))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        raise ValueError(_DEALS.format("get_test_dataloader"))

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        wrapped = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.args.world_size > 1 and not wrapped and not any(isinstance(m, DistributedDataParallel) for m in model.modules()):
            raise ValueError(
                "the model is not wrapped in DDP, because evaluate or predict was called before train, so each rank would train by "
                "itself: for a loss before the first step give TrainingArguments(eval_on_start=True)"
            )
        return super().training_step(model, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = super().prediction_step(model, inputs, *args, **kwargs)
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if result[0] is not None and labels is not None:
            # a rank's loss is its part of the batch's mean over all tokens, times the number of ranks
            loss = result[0].detach().double()
            if self.args.world_size > 1:
                dist.all_reduce(loss)
            tokens = count_tokens(labels.to(loss.device)).item()
            if tokens:
                self._losses.append((loss.item() / self.args.world_size, tokens))
        return result

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._losses: list[tuple[float, float]] = []  # of batches: the mean over all ranks' tokens, and their number
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total = sum(tokens for _, tokens in self._losses)
        if total and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = sum(mean * tokens for mean, tokens in self._losses) / total
        return output


_DEALS = (
    "{0} of transformers' Trainer would deal sequences to the ranks of a ring, which must share them: override it with a loader that gives "
    "this rank's rows, as examples/train_trainer.py does"
)
