"""trl's trainers around a ring: fine-tuning (SFT), preferences (DPO) and rewards (GRPO) on sequences longer than one device holds.

    attach(model, group=mesh["ring"])
    RingSFTTrainer(model, args=SFTConfig(..., packing=True), train_dataset=rows, processing_class=tokenizer).train()

Every rank of a ring loads the same whole batches, and other rings load others. The model runs on shards; its log-probabilities, one a
token, are then swapped, so trl makes its losses and figures of whole sequences as in one process (`huggingface_whole.py`). A
rank's logits exist in tiles only. It needs trl 1.16, which has a fused head (`add_fused_lm_head`), and accelerate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ..geometry.layout import Layout
from ..runtime.agree import refusing
from ..training.causal_lm import IGNORE
from ..transport import Ranks
from .huggingface import attach
from .huggingface_attachment import NAME, Attachment
from .huggingface_whole import WholeCalls
from .imports import cannot_import
from .trainer_parts import InTurn, check_wrapped, left_unprepared, loader_options, replica_of
from .trl_rollouts import generated, of_first_rank
from .trl_settings import check_arguments, check_groups, kind, on_rings

try:
    from transformers import Trainer, set_seed
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer
    from trl.trainer.utils import FusedCausalLMOutput  # noqa: F401  older versions have no fused head
except ImportError as error:
    raise cannot_import(__name__, "trl 1.16 or later, and accelerate", ["trl", "accelerate"], error) from error

__all__ = ["RingDPOTrainer", "RingGRPOTrainer", "RingSFTTrainer"]


class _OnRing(Trainer):
    """What a trainer of trl, the next class, needs around a ring."""

    _config: type = object
    _metrics: Any  # trl's figures, by name, of training and of evaluation

    def __init__(self, model: Any, *args: Any, layouts: Callable[[int], Layout] | None = None, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(model, *args, **kwargs).arguments
        attachment: Attachment | None = getattr(model, NAME, None)
        if not isinstance(attachment, Attachment):
            raise ValueError(f"{kind(model)} is not attached: load it, and attach(model, group=...) before the trainer gets it")
        ranks = attachment.ranks
        with refusing(ranks):
            if attachment.fixed_layout is not None:
                raise ValueError(
                    f"{kind(model)} was attached with {attachment.fixed_layout!r}, but batches have lengths of their own: "
                    "attach(model, group=...) without a layout"
                )
            self._check(given, ranks)
        replica = replica_of(attachment)
        with refusing(ranks):
            given["args"] = on_rings(given["args"], ranks, replica)
        self._replica, self._ring_size, self._tokens = replica, ranks.size, 0
        super().__init__(**given)
        if ranks.size > 1 and self.accelerator.parallelism_config is not given["args"].parallelism_config:
            raise ValueError(
                "an Accelerator was made before this trainer, whose loaders would deal rows to the ranks of a ring: make none, or give it "
                f"the trainer's parallelism_config, RingParallelismConfig(ring_size={ranks.size})"
            )
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise ValueError(
                "fsdp is of version 1, which is not tried around a ring: set fsdp_version to 2 in fsdp_config, or use DDP"
            )
        policy: Any = self.model
        inner: Any = self.accelerator.unwrap_model(policy)
        WholeCalls(inner, attachment, layouts)
        reference = getattr(self, "ref_model", None)
        if reference is not None:
            inner = cast(Any, self.accelerator.unwrap_model(reference))
            attach(inner, mask=attachment.live.mask, group=attachment.group, ignore=attachment.ignored)
            WholeCalls(inner, getattr(inner, NAME), layouts)

    def _check(self, given: dict[str, Any], ranks: Ranks) -> None:
        """Raise ValueError for arguments and settings that cannot be honoured."""
        check_arguments(given, self._config)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Sequences of a step: ranks of a ring share theirs."""
        return super().get_total_train_batch_size(args) // self._ring_size

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_wrapped(self, model)
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with left_unprepared(self):
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        policy: Any = self.model
        figures = self._metrics["train" if policy.training else "eval"]
        if "num_tokens" in figures:  # trl counts those of each rank
            figures["num_tokens"] = [self._tokens_seen()]
        super().log(logs, start_time)

    def _tokens_seen(self) -> float:
        """The tokens of all rings in training so far."""
        raise NotImplementedError


class _OnBatches(_OnRing):
    """Trainers of rows that are there: evaluations give the exact mean over all tokens, or pairs, of all batches and rings."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        self._tokens += inputs["input_ids"].numel() if mask is None else int(mask.sum())
        return super().training_step(model, inputs, *args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """This ring's batches, in order; rows that fill up the last batches of some rings do not count."""
        index, count = self._replica
        if count == 1:
            return super().get_eval_dataloader(eval_dataset)
        sets: Any = self.eval_dataset
        named = sets[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        rows: Any = sets if named is None else named
        if rows is None or isinstance(rows, IterableDataset) or not hasattr(rows, "__len__"):
            raise ValueError(f"eval_dataset is {kind(rows)}, but must have a length, to be dealt to {count} rings: give a Dataset")
        self._check_rows(len(rows), count)
        return DataLoader(
            InTurn(rows, count, index),
            collate_fn=_Counted(self.data_collator),
            **loader_options(self.args, self.args.eval_batch_size),
        )

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = super().prediction_step(model, inputs, *args, **kwargs)
        if result[0] is not None:
            self._means.append((float(result[0]), self._counted(inputs)))
        return result

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._means: list[tuple[float, int]] = []  # of this ring's batches: the mean, and of how many
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, count = self._over_rings(sum(mean * count for mean, count in self._means), sum(count for _, count in self._means))
        if output.metrics is not None and count:
            output.metrics[f"{metric_key_prefix}_loss"] = total / count
        return output

    def _tokens_seen(self) -> float:
        return self._over_rings(self._tokens)[0]

    def _over_rings(self, *values: float) -> list[float]:
        """Sums over the rings, of numbers that all ranks of a ring have; a collective."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.args.device)
        if self.args.world_size > 1:
            dist.all_reduce(sums)
        return (sums / self._ring_size).tolist()

    def _check_rows(self, rows: int, rings: int) -> None:
        """Raise ValueError for a dataset that cannot be dealt so that each row counts once."""

    def _counted(self, inputs: dict[str, Any]) -> int:
        """Of how many tokens, or pairs, the loss of a batch is the mean."""
        raise NotImplementedError


class RingSFTTrainer(_OnBatches, SFTTrainer):
    """trl's SFTTrainer of an attached causal model, whose steps, losses and figures are those of one process.

    Rows are padded on the right or packed (`packing=True`: documents see themselves only; `padding_free=True`). Completion-only and
    assistant-only losses, `loss_type="dft"`, `label_smoothing_factor` and gradient accumulation are honoured. A batch has
    `per_device_train_batch_size` sequences a ring. `evaluate` gives the mean over all tokens, where trl gives the mean of batches' means.

    Args, beside those of trl's, of which `args` must be an SFTConfig and `processing_class` a tokenizer:
        model: attached without a layout, `attach(model, group=...)`, over consecutive ranks.
        layouts: returns the layout for a number of tokens; by default zigzag over the model's ring.

    Raises ValueError, before the trainer is made and on every rank, for what would need logits of whole sequences (`compute_metrics`,
    `compute_loss_func`), for experts' losses, images, DeepSpeed, and for each setting that cannot be honoured, by its name.
    """

    _config = SFTConfig

    def _check(self, given: dict[str, Any], ranks: Ranks) -> None:
        super()._check(given, ranks)
        settings = given["args"]
        if settings.label_smoothing_factor and settings.loss_type != "nll":
            raise ValueError(
                f"label_smoothing_factor is {settings.label_smoothing_factor} and loss_type {settings.loss_type!r}, but trl smooths labels "
                "for 'nll' alone: leave one out"
            )

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """trl's loss, or that of smoothed labels."""
        smoother = self.label_smoother
        if smoother is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        losses = model(**{**inputs, "use_cache": False}, label_smoothing=smoother.epsilon)["losses"]
        self.label_smoother = None
        try:
            with torch.no_grad():  # for trl's figures of the batch
                super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.label_smoother = smoother
        count = self._counted(inputs) if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / torch.as_tensor(count).clamp(min=1)
        # as trl does, because gradients are averaged over the ranks
        shared = self.args.average_tokens_across_devices and num_items_in_batch is not None
        return loss * self.accelerator.num_processes if shared else loss

    def _counted(self, inputs: dict[str, Any]) -> int:
        return int((inputs["labels"][:, 1:] != IGNORE).sum())


class RingDPOTrainer(_OnBatches, DPOTrainer):
    """trl's DPOTrainer of an attached causal model, whose steps, losses and figures are those of one process.

    All losses and divergences of trl are honoured, and so are gradient accumulation and `sync_ref_model`. The reference model, given or
    made by trl, is attached to the same ring. A batch has `per_device_train_batch_size` pairs a ring. `evaluate` gives the mean over all
    pairs; with several rings their number must divide that of pairs.

    Args, beside those of trl's, of which `args` must be a DPOConfig and `processing_class` a tokenizer:
        model: attached without a layout, `attach(model, group=...)`, over consecutive ranks.
        layouts: returns the layout for a number of tokens; by default zigzag over the model's ring.

    Raises ValueError, before the trainer is made and on every rank, for `precompute_ref_log_probs`, `compute_metrics`, experts' losses,
    images, DeepSpeed, and for each setting that cannot be honoured, by its name.
    """

    _config = DPOConfig

    def _check_rows(self, rows: int, rings: int) -> None:
        if rows % rings:
            raise ValueError(
                f"eval_dataset has {rows} pairs for {rings} rings, some of which would count a pair twice: give a multiple of {rings}"
            )

    def _counted(self, inputs: dict[str, Any]) -> int:
        return inputs["input_ids"].shape[0] // 2


class RingGRPOTrainer(_OnRing, GRPOTrainer):
    """trl's GRPOTrainer of an attached causal model: log-probabilities of policy and reference around the ring, on the same completions.

    Without a `rollout_func`, the model generates around the ring with a `RingCache`: prompts may be long. A `rollout_func` is called on
    every rank, and what a ring's first rank returns counts; it must be JSON's values: lists, numbers, texts, None. Prompts are padded
    on the left, completions on the right.

    Args, beside those of trl's, of which `args` must be a GRPOConfig and `processing_class` a tokenizer:
        model: attached without a layout, `attach(model, group=...)`, over consecutive ranks.
        layouts: returns the layout for a number of tokens; by default zigzag over the model's ring.

    A batch has `per_device_train_batch_size` completions a ring; with `steps_per_generation` it must hold whole groups of
    `num_generations`. Losses and gradients are those of one process; logged deviations of rewards (`reward_std`) are over rewards that
    each rank of a ring has once more, and so a little smaller. Raises ValueError, before the trainer is made and on every rank, for groups
    spread over rings, rewards scaled over the batch, vLLM within the trainer, tools and environments, and for each setting that cannot be
    honoured, by its name.
    """

    _config = GRPOConfig

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        # trl draws other numbers on each rank, but ranks of a ring must sample and shuffle alike
        set_seed(self.args.seed + self._replica[0])
        self._ring: Ranks = getattr(model, NAME).ranks
        self._made_by: Callable[..., dict[str, Any]] = self.rollout_func or generated
        self.rollout_func: Any = self._rollout

    def _check(self, given: dict[str, Any], ranks: Ranks) -> None:
        super()._check(given, ranks)
        check_groups(given["args"], ranks.size)

    def _rollout(self, prompts: list, trainer: Any) -> dict[str, Any]:
        """Completions of this ring's prompts: those of its first rank on every rank."""
        made = self._made_by(prompts, trainer)
        if self._ring.size == 1:
            return made
        return of_first_rank(self._ring, made)

    def _tokens_seen(self) -> float:
        return self.state.num_input_tokens_seen / self._ring_size


class _Counted:
    """Makes a batch of rows with a collator; rows that do not count have no labels that do."""

    def __init__(self, collator: Callable[[list], Any]) -> None:
        self.collator = collator

    def __call__(self, rows: list[tuple[dict[str, Any], bool]]) -> Any:
        return self.collator([row if counts else _without_labels(row) for row, counts in rows])


def _without_labels(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "labels": [IGNORE] * len(row["input_ids"])}
