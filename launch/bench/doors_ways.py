"""The ways into a training loop that `bench doors` compares: each trains a new model on the same steps, and notes times and losses."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import IGNORE, CausalLMLoss, shift_labels, sum_gradients, token_loss
from ringattn.training.data import pack, shard_batch

from .packed import make_batch, wait
from .shared.cases import LAYOUTS

Batch = dict[str, Any]


@dataclass(frozen=True)
class TrainedRow:
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
class TrainedStep:
    """The rows of a step of the optimizer, one for each rank of the job."""

    rows: list[TrainedRow]

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @cached_property
    def counted(self) -> int:
        """Labels that count: the last token of a document predicts nothing."""
        return sum(row.tokens - len(row.documents) for row in self.rows)


def make_steps(case: str, arguments: argparse.Namespace, ranks: int) -> list[TrainedStep]:
    """The same steps on every rank: random ones, or those of a text."""
    text = iter_chapters(arguments.text) if case == "chapters" else None

    def row(seed: int) -> TrainedRow:
        n = arguments.tokens
        if text is not None:
            return row_of_chapters(text, n)
        lengths = make_batch(arguments.mean, arguments.sigma, n, seed).lengths if case == "packed" else [n]
        ids = torch.randint(arguments.vocabulary, (n,), generator=torch.Generator().manual_seed(seed))
        return TrainedRow(list(ids.split(lengths)))

    count = arguments.warm_up + arguments.steps
    return [TrainedStep([row(number * ranks + i) for i in range(ranks)]) for number in range(count)]


def iter_chapters(text: Path) -> Iterator[torch.Tensor]:
    """The chapters of a text, in the same random order each time, over and over; a token is a byte.

    A verse is a line that begins with a book, a chapter, a colon and a verse, such as `Ge1:3`. Raises ValueError for another text.
    """
    verses = [line for line in text.read_bytes().splitlines(keepends=True) if re.match(rb"\w+:\d+ ", line)]
    chapters = [b"".join(found) for _, found in itertools.groupby(verses, lambda line: line.split(b":", 1)[0])]
    if not chapters:
        raise ValueError(f"--text {text} has no line that begins like `Ge1:3 `: give a text of chapters and verses")
    order = torch.randperm(len(chapters), generator=torch.Generator().manual_seed(0)).tolist()
    return (torch.frombuffer(bytearray(chapters[i]), dtype=torch.uint8).long() for i in itertools.cycle(order))


def row_of_chapters(chapters: Iterator[torch.Tensor], tokens: int) -> TrainedRow:
    """The next chapters, of which the last is cut."""
    found, left = [], tokens
    while left:
        found.append(next(chapters)[:left])
        left -= len(found[-1])
    return TrainedRow(found)


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

    def shard(self, row: TrainedRow, rank: int, size: int, name: str = "") -> Batch:
        """A rank's part of a row, with the ring's layout, or the one of this name."""
        layout = LAYOUTS[name or self.arguments.layout](ra.documents(lengths=row.lengths), row.tokens, size)
        parts = shard_batch(row.packed, layout, rank)
        # bounds of documents are read on the host
        moved = {name: x if name.startswith("cu_seq_lens") else x.to(self.device) for name, x in parts.items()}
        return {**moved, "layout": layout}

    def shard_padded(self, row: TrainedRow, rank: int, size: int) -> Batch:
        """A rank's part of a row whose documents are rows of a batch, padded to the longest: zigzag."""
        ids, labels = row.padded(1)
        layout = ra.zigzag(ids.shape[1], size)
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        given = dict(input_ids=ids, shift_labels=labels, position_ids=positions)
        return {**{name: ra.shard(x, layout, rank).to(self.device) for name, x in given.items()}, "layout": layout}


def by_hand(
    setting: Setting,
    model: nn.Module,
    steps: list[TrainedStep],
    run: Run,
    rows_of: Callable,
    backward: Callable[[TrainedRow, int], torch.Tensor],
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


def around_ring(setting: Setting, steps: list[TrainedStep], run: Run) -> None:
    _train_attached(setting, steps, run, setting.shard)


def around_zigzag(setting: Setting, steps: list[TrainedStep], run: Run) -> None:
    _train_attached(setting, steps, run, partial(setting.shard, name="zigzag"))


def around_padded(setting: Setting, steps: list[TrainedStep], run: Run) -> None:
    _train_attached(setting, steps, run, setting.shard_padded)


def replicas(setting: Setting, steps: list[TrainedStep], run: Run) -> None:
    _train_attached(setting, steps, run, setting.shard, alone=True)


def _train_attached(
    setting: Setting, steps: list[TrainedStep], run: Run, shard: Callable[[TrainedRow, int, int], Batch], alone: bool = False
) -> None:
    """Train on all rows around a ring, or `alone` on this rank's row."""
    model = setting.model()
    attach(model, group=setting.alone if alone else None)
    losses, place = CausalLMLoss(model), (0, 1) if alone else (setting.rank, setting.size)

    def backward(row: TrainedRow, counted: int) -> torch.Tensor:
        loss = losses(**shard(row, *place)) / counted
        loss.backward()
        return loss.detach()

    by_hand(setting, model, steps, run, lambda step: [step.rows[setting.rank]] if alone else step.rows, backward)


def context_parallel(setting: Setting, steps: list[TrainedStep], run: Run) -> None:
    from torch.distributed.tensor.experimental import context_parallel as around
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    model: Any = setting.model()
    # every mask is causal, and torch's ring takes none
    AttentionInterface.register("torchs_ring", torchs_attention)
    AttentionMaskInterface.register("torchs_ring", lambda *_, **__: None)
    model.set_attn_implementation("torchs_ring")
    mesh = init_device_mesh(setting.device, (setting.size,), mesh_dim_names=("cp",))

    def backward(row: TrainedRow, counted: int) -> torch.Tensor:
        # torch cuts each row into two chunks a rank
        ids, labels = (x.to(setting.device) for x in row.padded(2 * setting.size))
        positions = torch.arange(ids.shape[1], device=setting.device).expand(ids.shape).contiguous()
        buffers = [ids, labels, positions]
        cut = dict(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers))
        with around(mesh, **cut) if setting.size > 1 else nullcontext():
            hidden = model.model(input_ids=ids, position_ids=positions).last_hidden_state
            loss = token_loss(hidden, model.lm_head.weight, labels) / counted
            loss.backward()
        return loss.detach()

    by_hand(setting, model, steps, run, lambda step: step.rows, backward)


def torchs_attention(module: nn.Module, query, key, value, attention_mask, scaling=None, **unused):
    """q (b, h, s, d), k and v (b, hk, s, d) -> (b, s, h, d), None: cuDNN's on a GPU, causal."""
    # torch's ring has no grouped-query attention: repeat K and V
    k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scaling).transpose(1, 2), None


def accelerated(setting: Setting, steps: list[TrainedStep], run: Run) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from ringattn.integrations.accelerate import RingParallelismConfig

    _tell_ranks(setting.device)
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


def trained(setting: Setting, steps: list[TrainedStep], run: Run) -> None:
    from torch.utils.data import DataLoader
    from transformers import TrainingArguments

    from ringattn.integrations.trainer import RingTrainer

    class InOrderTrainer(RingTrainer):
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(self.train_dataset, 1, shuffle=False, collate_fn=cut)

    def cut(rows: list[TrainedRow]) -> Batch:
        # the Trainer counts what is called labels, and moves tensors itself
        found = setting.shard(rows[0], setting.rank, setting.size)
        return {**found, "labels": found["shift_labels"]}

    def make(model: nn.Module, callbacks: list) -> RingTrainer:
        rows: Any = [row for step in steps for row in step.rows]
        return InOrderTrainer(model, _settings(TrainingArguments, setting, steps), train_dataset=rows, callbacks=callbacks)

    _run_trainer(make, setting, run)


def trained_by_trl(setting: Setting, steps: list[TrainedStep], run: Run) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig

    from ringattn.integrations.trl import RingSFTTrainer

    def make(model: nn.Module, callbacks: list) -> RingSFTTrainer:
        # rows are packed already, and trl tells documents apart by seq_lengths
        ready = dict(padding_free=True, max_length=None, dataset_kwargs={"skip_prepare_dataset": True}, bf16=False)
        ready |= dict(gradient_checkpointing=False)  # the model does as `--checkpoint` says
        arguments = _settings(SFTConfig, setting, steps, train_sampling_strategy="sequential", **ready)
        rows = [dict(input_ids=torch.cat(row.documents).tolist(), seq_lengths=row.lengths) for step in steps for row in step.rows]
        # no text is read
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
        found = Dataset.from_list(rows)
        return RingSFTTrainer(model, args=arguments, train_dataset=found, processing_class=tokenizer, callbacks=callbacks)

    _run_trainer(make, setting, run)


def _settings(kind: Any, setting: Setting, steps: list[TrainedStep], **more: Any) -> Any:
    """A Trainer's settings: each step of the optimizer takes a row for each rank, one after the other."""
    on_cpu = setting.device == "cpu"
    _tell_ranks(setting.device)
    return kind(
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
        **more,
    )


def _run_trainer(make: Callable[[nn.Module, list], Any], setting: Setting, run: Run) -> None:
    from accelerate.state import AcceleratorState
    from transformers import PrinterCallback, TrainerCallback

    class StepClock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.done(None)

        def on_log(self, arguments: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
            if logs is not None and "loss" in logs:
                run.losses.append(float(logs["loss"]))

    model = setting.model()
    attach(model)
    trainer = make(model, [StepClock()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)


def _tell_ranks(device: str) -> None:
    """accelerate reads from the environment which rank this is, and as LOCAL_RANK the number of its GPU, which ranks may share."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    local_rank = str(torch.cuda.current_device()) if device == "cuda" else rank
    for name, value in dict(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size).items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Way:
    """How to train. most_on_cpus: ranks with which it can on CPUs; None: any number. needs: a package.

    pads: documents are padded to the longest; 2: and to a multiple of twice the ranks.
    """

    train: Callable[[Setting, list[TrainedStep], Run], None]
    most_on_cpus: int | None = None
    pads: int = 0
    needs: str = "transformers"

    def obstacle(self, device: str, ranks: int) -> str:
        """Why it cannot train here; empty where it can."""
        if device == "cpu" and self.most_on_cpus is not None and ranks > self.most_on_cpus:
            return f"on CPUs it runs with {self.most_on_cpus} rank only"
        return "" if importlib.util.find_spec(self.needs) else f"the package {self.needs} is not installed"

    def computed(self, steps: list[TrainedStep], ranks: int) -> float:
        """Tokens that are computed, over those that are there."""
        if not self.pads:
            return 1.0
        rows = [row for step in steps for row in step.rows]
        multiple = 2 * ranks if self.pads == 2 else 1
        return sum(row.padded(multiple)[0].numel() for row in rows) / sum(row.tokens for row in rows)


WAYS = {
    "attach": Way(around_ring),
    "zigzag": Way(around_zigzag),
    "padded": Way(around_padded, pads=1),
    "accelerate": Way(accelerated, needs="accelerate"),
    "trainer": Way(trained, needs="accelerate"),
    "trl": Way(trained_by_trl, needs="trl"),
    "replicas": Way(replicas),
    # on CPUs torch's ring takes no attention
    "context_parallel": Way(context_parallel, most_on_cpus=1, pads=2),
}
