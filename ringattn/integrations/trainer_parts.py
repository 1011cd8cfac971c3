"""What our trainers share: which ring a rank is of, rows of a dataset for each ring, and mends of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ..runtime.groups import get_context
from .huggingface_attachment import Attachment

if TYPE_CHECKING:
    from transformers import Trainer


class InTurn(Dataset):
    """Each ring's rows of a dataset in turn, with whether they count: all rings have as many, so the last ones may be there twice."""

    def __init__(self, dataset: Any, count: int, index: int) -> None:
        self.dataset, self.count, self.index = dataset, count, index

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.count)

    def __getitem__(self, index: int) -> tuple[Any, bool]:
        at = index * self.count + self.index
        return self.dataset[min(at, len(self.dataset) - 1)], at < len(self.dataset)


def loader_options(settings: Any, rows: int) -> dict[str, Any]:
    """Options of a DataLoader of `rows` rows a batch, as transformers' Trainer takes them from its TrainingArguments."""
    return dict(
        batch_size=rows,
        num_workers=settings.dataloader_num_workers,
        pin_memory=settings.dataloader_pin_memory,
        drop_last=settings.dataloader_drop_last,  # of evaluations, too
        persistent_workers=settings.dataloader_persistent_workers,
        prefetch_factor=settings.dataloader_prefetch_factor,
        multiprocessing_context=getattr(settings, "dataloader_multiprocessing_context", None),  # not in older versions
    )


def check_wrapped(trainer: Trainer, model: nn.Module) -> None:
    """Raise ValueError in a step of a model that nothing wraps, so that ranks would train each by itself."""
    wrapped = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if trainer.args.world_size > 1 and not wrapped and not any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        raise ValueError(
            "the model is not wrapped in DDP, so each rank would train by itself: give TrainingArguments a distributed set-up, and "
            "the Trainer a model that nothing else has prepared"
        )


@contextmanager
def left_unprepared(trainer: Trainer) -> Iterator[None]:
    """An evaluation before training: accelerate would take the model for prepared in train, and leave it without DDP."""
    is_first = not trainer.accelerator._models and not trainer.is_in_train
    yield
    if is_first and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        trainer.accelerator._models.clear()
        vars(trainer.model).pop("_is_accelerate_prepared", None)


def replica_of(attachment: Attachment) -> tuple[int, int]:
    """The number of this rank's ring among all rings, and how many there are; a collective of all ranks."""
    if not dist.is_initialized():
        return 0, 1
    records = attachment.ranks.all_gather_control(dist.get_rank().to_bytes(8, "little")) if attachment.ranks.size > 1 else None
    first = dist.get_rank() if records is None else min(int.from_bytes(record, "little") for record in records)
    every = get_context(None).ranks.all_gather_control(first.to_bytes(8, "little")) if dist.get_world_size() > 1 else None
    rings = sorted({first} if every is None else {int.from_bytes(record, "little") for record in every})
    return rings.index(first), len(rings)
