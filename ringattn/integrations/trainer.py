"""transformers' Trainer around a ring: what it would do wrong on shards is done right here, or refused.

    attach(model, group=mesh["ring"])
    RingTrainer(model, arguments, train_dataset=rows, data_collator=collator).train()

Every rank of a ring trains on the same sequences, of which it holds its rows; replicas, that is other rings, get other sequences.
It needs accelerate, as transformers' Trainer does (`pip install accelerate`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ..geometry.layout import Layout, zigzag
from ..runtime.agree import refusing
from ..training.causal_lm import IGNORE
from ..training.data import packed_documents, shard_batch, tokens_of
from ..training.loss import count_tokens
from .huggingface_attachment import NAME, Attachment
from .imports import cannot_import
from .trainer_parts import InTurn, check_wrapped, left_unprepared, loader_options, replica_of
from .trainer_settings import check_trainer

try:
    import accelerate  # noqa: F401  transformers says so only when a Trainer is made
    from transformers import Trainer
except ImportError as error:
    raise cannot_import(__name__, "transformers and accelerate", ["transformers", "accelerate"], error) from error


class RingTrainer(Trainer):
    """A Trainer of an attached causal model, whose steps, losses and evaluations are those of one process.

    Its loaders deal the rows of `train_dataset` and `eval_dataset` to the rings, shuffled anew in each epoch of training. They make
    batches with `data_collator` and cut them with `shard_batch`: padding on the right and packed documents are possible. A model that was
    attached without a layout gets one a batch, from `layouts`; a batch of fewer tokens than ranks is padded first. Override
    `get_train_dataloader`, `get_eval_dataloader` and `get_test_dataloader` for loaders of your own. They give this rank's rows of whole
    sequences, whose shifted labels are called labels, too. A sampler may deal sequences to replicas, never to the ranks of a ring.
    `examples/train_trainer.py` is a complete program.

    Args, beside those of transformers' Trainer:
        layouts: returns the layout for a number of tokens; by default zigzag over the model's ring.

    `evaluate` gives the exact mean loss over all tokens of all batches and ranks, where transformers' own takes the mean of the batches'
    means; so does `predict`, with `prediction_loss_only`. `label_smoothing_factor` is honoured, of the labels as shifted over the whole
    sequence. A batch has `per_device_train_batch_size` sequences a ring.

    Raises ValueError, before anything is sent, for `average_tokens_across_devices=False`, for what would need logits of whole sequences
    (`compute_metrics`), and for each setting that cannot be honoured, by its name; in `predict` unless `prediction_loss_only` is set; if
    the model is not attached, if a dataset has no length, and in a step of `train` if the model is not wrapped, so that ranks would train
    each by itself.
    """

    def __init__(self, *args: Any, layouts: Callable[[int], Layout] | None = None, **kwargs: Any) -> None:
        given = {**dict(zip(list(inspect.signature(Trainer.__init__).parameters)[1:], args, strict=False)), **kwargs}
        attachment: Attachment | None = getattr(given.get("model"), NAME, None)
        with nullcontext() if attachment is None else refusing(attachment.ranks):
            check_trainer(given)
        super().__init__(*args, **kwargs)
        self._layouts = layouts
        self._replica: tuple[int, int] | None = None

    def get_train_dataloader(self) -> DataLoader:
        """This rank's rows of the batches of its ring, shuffled."""
        return self._dealt("train_dataset", self.train_dataset, self._train_batch_size, "training")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """This rank's rows of the batches of its ring, in order; rows that fill up the last batches of some rings do not count."""
        sets: Any = self.eval_dataset
        named = sets[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        found = sets if named is None else named
        return self._dealt("eval_dataset", found, self.args.eval_batch_size, "evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As for evaluation."""
        return self._dealt("test_dataset", test_dataset, self.args.eval_batch_size, "test")

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's own loss, or that of smoothed labels."""
        if self.label_smoother is None or self.compute_loss_func is not None or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")})
        count = count_tokens(labels) if num_items_in_batch is None else num_items_in_batch
        loss = _smoothed(outputs["logits"], labels, self.label_smoother.epsilon) / count
        # as transformers does for losses of models, because gradients are averaged over the ranks
        loss = loss * self.args.world_size
        return (loss, outputs) if return_outputs else loss

    def get_total_train_batch_size(self, args: Any) -> int:
        """Sequences of a step: ranks of a ring share theirs."""
        attachment = self._attachment()
        return super().get_total_train_batch_size(args) // (1 if attachment is None else attachment.ranks.size)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_wrapped(self, model)
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

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        *args: Any,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> Any:
        only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not only:
            raise ValueError(
                "prediction_loss_only is False, but each rank has logits of its shard alone, which would be gathered as rows: for the loss "
                "set prediction_loss_only=True, or call evaluate; for logits call the model on shards, and ringattn.unshard them"
            )
        self._losses: list[tuple[float, float]] = []  # of batches: the mean over all ranks' tokens, and their number
        with left_unprepared(self):
            output = super().evaluation_loop(dataloader, description, only, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        total = sum(tokens for _, tokens in self._losses)
        if total and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = sum(mean * tokens for mean, tokens in self._losses) / total
        return output

    def _attachment(self) -> Attachment | None:
        return getattr(self.accelerator.unwrap_model(self.model), NAME, None)

    def _dealt(self, name: str, dataset: Any, rows: int, description: str) -> DataLoader:
        attachment = self._attachment()
        if attachment is None:
            raise ValueError(f"{type(self.model).__name__} is not attached: attach(model, group=...) before the Trainer gets it")
        if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"{name} is {type(dataset).__name__}, but must have a length and rows by number, to be dealt to rings: override "
                f"get_{name.split('_')[0]}_dataloader for others"
            )
        if self._replica is None:
            self._replica = replica_of(attachment)
        collate = _Cut(
            self._get_collator_with_removed_columns(self.data_collator, description=description), attachment, self._layouts
        )
        options: dict[str, Any] = {**loader_options(self.args, rows), "collate_fn": collate}
        index, count = self._replica
        if description != "training":
            return DataLoader(InTurn(dataset, count, index), **options)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        shuffled = getattr(self.args, "train_sampling_strategy", "random") == "random"
        sampler = DistributedSampler(dataset, count, index, shuffle=shuffled, seed=seed, drop_last=options["drop_last"])
        return _EpochLoader(dataset, sampler=sampler, **options)


class _EpochLoader(DataLoader):
    """A loader that shuffles anew in each epoch: transformers' Trainer calls `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        assert isinstance(self.sampler, DistributedSampler)
        self.sampler.set_epoch(epoch)


class _Cut:
    """Makes a batch of rows with a collator, and cuts it to this rank's columns."""

    def __init__(self, collator: Callable[[list], Any], attachment: Attachment, layouts: Callable[[int], Layout] | None) -> None:
        self.collator, self.layouts = collator, layouts
        self.fixed, self.rank, self.size = attachment.fixed_layout, attachment.rank, attachment.ranks.size

    def __call__(self, rows: list) -> dict[str, Any]:
        counted = [row[1] if isinstance(row, tuple) else True for row in rows]
        batch: Mapping[str, Any] = self.collator([row[0] if isinstance(row, tuple) else row for row in rows])
        batch = dict(batch)
        for name in ("labels", "shift_labels"):
            if isinstance(batch.get(name), torch.Tensor) and not all(counted):
                batch[name] = batch[name].where(torch.tensor(counted)[:, None], IGNORE)
        tokens = tokens_of(batch).shape[1]
        layout = self.fixed or self._layout(tokens)
        if self.fixed is None and 0 in layout.lengths and tokens < 2 * self.size:
            batch = _lengthened(batch, tokens, 2 * self.size)
            layout = self._layout(2 * self.size)
        shards: dict[str, Any] = dict(shard_batch(batch, layout, self.rank))
        if shards.get("shift_labels") is not None:
            shards["labels"] = shards["shift_labels"]  # the Trainer counts what is called labels
        return shards if self.fixed is not None else {**shards, "layout": layout}

    def _layout(self, tokens: int) -> Layout:
        return zigzag(tokens, self.size) if self.layouts is None else self.layouts(tokens)


def _lengthened(batch: dict[str, Any], tokens: int, columns: int) -> dict[str, Any]:
    """A batch of fewer tokens than ranks with padding at the end of its rows, so that each rank holds a token."""
    if batch.get("attention_mask") is None and batch.get("position_ids") is None and packed_documents(batch) is None:
        batch = {**batch, "attention_mask": torch.ones(tokens_of(batch).shape[:2], dtype=torch.int64)}
    fill = {"labels": IGNORE, "shift_labels": IGNORE}
    return {
        name: F.pad(value, (0, columns - tokens), value=fill.get(name, 0))
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == tokens
        else value
        for name, value in batch.items()
    }


def _smoothed(logits: torch.Tensor, labels: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The sum over tokens of the cross-entropy of smoothed labels (Szegedy et al. 2016, section 7): logits (b, s, v), labels (b, s)."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=epsilon
    )
