"""The trainer of `finetune_long_document.py`: a step of a model on a sequence that its ranks share, whatever wraps the model."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss, shift_labels, sum_gradients
from ringattn.training.data import shard_batch
from ringattn.training.loss import MeanLoss, averaged, mean_loss, summed

from .model import wrap
from .peers import attach_peer
from .settings import Settings

LAYOUTS = {"zigzag": ra.zigzag, "striped": ra.striped, "contiguous": ra.contiguous}


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    # a parameter that ZeRO-3 has partitioned is empty between its uses, but remembers its shape
    dims = {p: len(getattr(p, "ds_shape", p.shape)) for p in model.parameters()}
    matrices = [p for p, dim in dims.items() if dim >= 2]
    vectors = [p for p, dim in dims.items() if dim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=settings.device == "cuda")


class Trainer:
    """A model, what is called for its loss, and the layout of the step: without wrapper, under DDP or FSDP2."""

    def __init__(self, settings: Settings, model: CausalLMLoss, device: torch.device) -> None:
        self.settings, self.model, self.device = settings, model, device
        self.run = wrap(settings, model, device)
        self.optimizer = make_optimizer(model, settings)
        self.reduction = summed() if settings.wrapper == "none" else averaged()

    def shards(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's rows of whole sequences, and the model attached to their layout."""
        tokens = batch["input_ids"].shape[1]
        layout = LAYOUTS[self.settings.layout](tokens, dist.get_world_size())
        if self.settings.attention == "ringattn":
            attach(self.model.model, layout=layout)
        else:
            attach_peer(self.model.model, self.settings.attention, tokens)
        return {name: value.to(self.device) for name, value in shard_batch(batch, layout, dist.get_rank()).items()}

    def loss(self, batch: dict[str, torch.Tensor]) -> MeanLoss:
        """This rank's part of the step's loss, for backward, and the mean over all ranks. `mean_loss` scales it: once, nowhere else."""
        batch = self.shards(batch)
        # FSDP2 and DeepSpeed cast by themselves
        low = self.settings.dtype == "bfloat16" and self.settings.wrapper in ("none", "ddp")
        with torch.autocast(self.device.type, torch.bfloat16, enabled=low):
            value = self.run(**batch)
        return mean_loss(value, batch["shift_labels"], reduction=self.reduction)

    def rehearse(self, batch: dict[str, torch.Tensor]) -> None:
        """A forward and backward pass without a step, so that kernels are compiled and ranks connected before the first one."""
        self.loss(batch).loss.backward()
        self.optimizer.zero_grad()

    def step(self, batch: dict[str, torch.Tensor], rate: float) -> tuple[float, float]:
        """One step; returns the mean loss over all tokens of all ranks, and the norm of the whole gradient."""
        loss = self.loss(batch)
        loss.loss.backward()
        if self.settings.wrapper == "none":
            sum_gradients(self.model.parameters())
        # the global norm: every rank holds the whole gradient, or DTensors that sum over FSDP2's shards
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.mean.item(), norm.item()

    @torch.no_grad()
    def perplexity(self, tail: torch.Tensor, seq_len: int) -> float:
        """exp of the mean loss over a held-out tail, in sequences of at most `seq_len` tokens."""
        self.run.eval()
        losses, counts = 0.0, 0.0
        for piece in tail.split(max(seq_len, 1)):
            if len(piece) >= 2 * self.settings.ranks:
                loss = self.loss(dict(input_ids=piece[None], shift_labels=shift_labels(piece[None])))
                losses += (loss.mean * loss.tokens).item()
                counts += loss.tokens.item()
        self.run.train()
        return math.exp(losses / counts) if counts else math.nan
