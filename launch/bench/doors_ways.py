"""The ways into a training loop that `bench doors` compares: each trains a new model on the same steps, and notes times and losses."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import IGNORE, CausalLMLoss, shift_labels, sum_gradients, token_loss
from ringattn.training.data import pack, shard_batch

from .packed import make_batch, wait
from .shared.cases import LAYOUTS

Batch = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Documents that are trained on together, each of token ids."""

    documents: list[torch.Tensor]

    @property
    def lengths(self) -> list[int]:
        return list(map(len, self.documents))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def packed(self) -> Batch:
        return pack(self.documents)

    def padded(self, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and shifted labels of the documents as rows (documents, s), filled up on the right to a multiple of `multiple`."""
        width = -(-max(self.lengths) // multiple) * multiple
        fill = [width - n for n in self.lengths]
        ids = torch.stack([F.pad(x, (0, n)) for x, n in zip(self.documents, fill)])
        labels = torch.stack([F.pad(shift_labels(x[None])[0], (0, n), value=IGNORE) for x, n in zip(self.documents, fill)])
        return ids, labels


@dataclass(frozen=True)
class Step:
    """The rows of a step of the optimizer, one for each rank of the job."""

    rows: list[Row]

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @cached_property
    def counted(self) -> int:
        """Labels that count: the last token of a document predicts nothing."""
        return sum(row.tokens - len(row.documents) for row in self.rows)


def make_steps(case: str, arguments: argparse.Namespace, ranks: int) -> list[Step]:
    """The same random steps on every rank."""

    def row(seed: int) -> Row:
        n = arguments.tokens
        lengths = make_batch(arguments.mean, arguments.sigma, n, seed).lengths if case == "packed" else [n]
        ids = torch.randint(arguments.vocabulary, (n,), generator=torch.Generator().manual_seed(seed))
        return Row(list(ids.split(lengths)))

    count = arguments.warm_up + arguments.steps
    return [Step([row(number * ranks + i) for i in range(ranks)]) for number in range(count)]


@dataclass
class Run:
    """Seconds of each step on this rank, from the end of the one before, and the steps' mean losses over all ranks' tokens."""

    device: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0  # bytes

    def start(self) -> None:
        wait(self.device)
        dist.barrier()
        self._since = time.perf_counter()

    def done(self, loss: torch.Tensor | None) -> None:
        """The end of a step. loss: this rank's part of the mean, or None if it is noted elsewhere."""
        wait(self.device)
        self.seconds.append(time.perf_counter() - self._since)
        if loss is not None:
            total = loss.detach().double().reshape(1)
            dist.all_reduce(total)
            self.losses.append(total.item())
        self._since = time.perf_counter()


class Setting:
    """What all ways share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, arguments.device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        # groups of one rank: every rank makes all of them
        self.alone = [dist.new_group([i]) for i in range(self.size)][self.rank]

    def model(self) -> nn.Module:
        """A new model, with the same weights every time."""
        from transformers import LlamaConfig, LlamaForCausalLM

        given = self.arguments
        config = LlamaConfig(
            vocab_size=given.vocabulary,
            hidden_size=given.width,
            intermediate_size=given.inner,
            num_hidden_layers=given.layers,
            num_attention_heads=given.heads,
            num_key_value_heads=given.kv_heads,
            max_position_embeddings=max(given.tokens, 2048),
            tie_word_embeddings=True,
            use_cache=False,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            model: nn.Module = LlamaForCausalLM(config)
        model.to(self.dtype)
        if given.checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.arguments.rate, weight_decay=0.0, fused=self.device == "cuda")

    def shard(self, row: Row, rank: int, size: int) -> Batch:
        """A rank's part of a row, with the ring's layout."""
        layout = LAYOUTS[self.arguments.layout](ra.documents(lengths=row.lengths), row.tokens, size)
        parts = shard_batch(row.packed, layout, rank)
        # bounds of documents are read on the host
        moved = {name: x if name.startswith("cu_seq_lens") else x.to(self.device) for name, x in parts.items()}
        return {**moved, "layout": layout}


def by_hand(
    setting: Setting, model: nn.Module, steps: list[Step], run: Run, rows_of: Callable, backward: Callable[[Row, int], torch.Tensor]
) -> None:
    """Train: `backward` runs both passes of a row, and returns this rank's part of the loss, divided by the labels that count."""
    optimizer = setting.optimizer(model.parameters())
    run.start()
    for step in steps:
        total = sum(backward(row, step.counted) for row in rows_of(step))
        sum_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        run.done(total)


def around_ring(setting: Setting, steps: list[Step], run: Run) -> None:
    model = setting.model()
    attach(model)
    _train_attached(setting, model, steps, run, lambda step: step.rows, setting.rank, setting.size)


def replicas(setting: Setting, steps: list[Step], run: Run) -> None:
    model = setting.model()
    attach(model, group=setting.alone)
    _train_attached(setting, model, steps, run, lambda step: [step.rows[setting.rank]], 0, 1)


def _train_attached(
    setting: Setting, model: nn.Module, steps: list[Step], run: Run, rows_of: Callable, rank: int, size: int
) -> None:
    losses = CausalLMLoss(model)

    def backward(row: Row, counted: int) -> torch.Tensor:
        loss = losses(**setting.shard(row, rank, size)) / counted
        loss.backward()
        return loss.detach()

    by_hand(setting, model, steps, run, rows_of, backward)


def context_parallel(setting: Setting, steps: list[Step], run: Run) -> None:
    from torch.distributed.tensor.experimental import context_parallel as around

    model: Any = setting.model()
    mesh = init_device_mesh(setting.device, (setting.size,), mesh_dim_names=("cp",))
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(_without_mask, with_kwargs=True)
    # a mask in four dimensions is left as it is, where transformers would make one of all pairs; the hook takes it away
    unused = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=setting.device)

    def backward(row: Row, counted: int) -> torch.Tensor:
        # torch cuts each row into two chunks a rank
        ids, labels = (x.to(setting.device) for x in row.padded(2 * setting.size))
        positions = torch.arange(ids.shape[1], device=setting.device).expand(ids.shape).contiguous()
        buffers = [ids, labels, positions]
        with around(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
            hidden = model.model(input_ids=ids, position_ids=positions, attention_mask=unused).last_hidden_state
            loss = token_loss(hidden, model.lm_head.weight, labels) / counted
            loss.backward()
        return loss.detach()

    by_hand(setting, model, steps, run, lambda step: step.rows, backward)


def _without_mask(module: nn.Module, arguments: tuple, given: Batch) -> tuple[tuple, Batch]:
    """What accelerate does to attention under its `cp_size`."""
    return arguments, {**given, "attention_mask": None, "is_causal": True}


def accelerated(setting: Setting, steps: list[Step], run: Run) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from ringattn.integrations.accelerate import RingParallelismConfig

    _tell_ranks()
    parallel, micro = RingParallelismConfig(ring_size=setting.size), setting.size
    accelerator = Accelerator(cpu=setting.device == "cpu", gradient_accumulation_steps=micro, parallelism_config=parallel)
    model = setting.model()
    attach(model, group=parallel.ring)
    losses = CausalLMLoss(model)
    losses, optimizer = accelerator.prepare(losses, setting.optimizer(losses.parameters()))
    run.start()
    for step in steps:
        total = torch.zeros((), device=setting.device)
        for row in step.rows:
            with accelerator.accumulate(losses):
                loss = losses(**setting.shard(row, setting.rank, setting.size)) / step.counted
                # DDP divides by the ranks, and accelerator.backward by the micro-batches
                accelerator.backward(loss * (setting.size * micro))
                total += loss.detach()
                optimizer.step()
                optimizer.zero_grad()
        run.done(total)
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(setting: Setting, steps: list[Step], run: Run) -> None:
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader
    from transformers import TrainerCallback, TrainingArguments

    from ringattn.integrations.trainer import RingTrainer

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.done(None)

        def on_log(self, arguments: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
            if logs is not None and "loss" in logs:
                run.losses.append(logs["loss"])

    class InOrder(RingTrainer):
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(self.train_dataset, 1, shuffle=False, collate_fn=cut)

    def cut(rows: list[Row]) -> Batch:
        # the Trainer counts what is called labels, and moves tensors itself
        found = setting.shard(rows[0], setting.rank, setting.size)
        return {**found, "labels": found["shift_labels"]}

    _tell_ranks()
    on_cpu = setting.device == "cpu"
    arguments = TrainingArguments(
        str(setting.arguments.out / "trainer"),
        max_steps=len(steps),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=setting.size,
        learning_rate=setting.arguments.rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="adamw_torch" if on_cpu else "adamw_torch_fused",
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = setting.model()
    attach(model)
    rows: Any = [row for step in steps for row in step.rows]
    trainer = InOrder(model, arguments, train_dataset=rows, callbacks=[Clock()])
    trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)


def _tell_ranks() -> None:
    """accelerate reads from the environment which rank this is."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    for name, value in dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size).items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Way:
    """How to train, and on which devices it can."""

    train: Callable[[Setting, list[Step], Run], None]
    devices: tuple[str, ...] = ("cuda", "cpu")
    pads: bool = False

    def computed(self, steps: list[Step], ranks: int) -> float:
        """Tokens that are computed, over those that are there."""
        if not self.pads:
            return 1.0
        rows = [row for step in steps for row in step.rows]
        return sum(row.padded(2 * ranks)[0].numel() for row in rows) / sum(row.tokens for row in rows)


WAYS = {
    "attach": Way(around_ring),
    "accelerate": Way(accelerated),
    "trainer": Way(trained),
    "replicas": Way(replicas),
    # on CPUs torch's ring takes no attention
    "context_parallel": Way(context_parallel, ("cuda",), pads=True),
}
