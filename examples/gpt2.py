"""Train GPT-2 on a text with dropout 0.1, as FlashAttention's paper does, and compare three implementations of attention.

python examples/gpt2.py --text kjv.txt                                               # the table, on one GPU
torchrun --nproc-per-node 2 examples/gpt2.py --text kjv.txt                          # its column of the ring, on two
python examples/gpt2.py --text kjv.txt --size small --context 1024 --seconds 200 --out losses.json  # 300 steps each
python examples/gpt2.py --size tiny --context 64 --tokens 128 --steps 8              # a try on the CPU

A cell of the table is a model, a length of sequences and an attention. It trains for `--steps` steps, or until `--seconds` are over. The
same seed gives the same weights and batches to each attention. Dropout draws differ, except between rings of different sizes: weights
of attention are dropped alike there, but what MLPs and embeddings drop follows from each rank's own generator.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss, sum_gradients
from ringattn.training.data import shard_batch
from ringattn.training.loss import mean_loss, summed

# layers, heads, width (Radford et al. 2019, table 2)
SIZES = {"tiny": (2, 2, 32), "small": (12, 12, 768), "medium": (24, 16, 1024)}
VOCAB = 256  # bytes of the text
UNTIMED = 5  # steps in which kernels are compiled and memory is found
LATEST = 20  # steps whose mean loss is printed


@dataclass
class Cell:
    """What a model did; without steps, because a GPU ran out of memory."""

    size: str
    context: int
    attention: str
    ranks: int
    batch: int
    losses: list[float]
    steps_a_second: float = 0.0

    def __str__(self) -> str:
        name = f"{self.size}, {self.batch} x {self.context} tokens, {self.attention}"
        if not self.losses:
            return f"{name}: out of memory"
        latest = self.losses[-LATEST:]
        loss = f"mean loss of the last {len(latest)} {mean(latest):.4f}"
        return f"{name}: {self.steps_a_second:.2f} steps/s, {len(self.losses)} steps, {loss}"


def arguments(ranks: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of_one_gpu = ["ring", "sdpa", "eager"]
    attentions = of_one_gpu if ranks == 1 else ["ring"]
    parser.add_argument("--attention", nargs="+", choices=of_one_gpu, default=attentions, help="(default: %(default)s)")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["small", "medium"], help="(default: %(default)s)")
    parser.add_argument(
        "--context", nargs="+", type=int, default=[1024, 4096, 16384], help="tokens of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=8192, help="of a step, which has one sequence at least (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=300, help="of a cell, at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8, help=f"of a cell after {UNTIMED} steps, at most (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="of attention, MLPs and embeddings (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--text", type=Path, help="default: a text made of numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the cells, with all losses")
    given = parser.parse_args()
    if ranks > 1 and given.attention != ["ring"]:
        raise SystemExit(f"{ranks} ranks were started, but sdpa and eager run on one GPU: give --attention ring")
    return given


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    given = arguments(ranks)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    cells = []
    for size, context, attention in itertools.product(given.size, given.context, given.attention):
        cells.append(Cell(size, context, attention, ranks, max(1, given.tokens // context), []))
        try:
            train(cells[-1], given, device)
        except torch.OutOfMemoryError:
            if ranks > 1:  # the others wait for this rank
                raise
            cells[-1].losses.clear()
        gc.collect()
        torch.cuda.empty_cache()
        if rank == 0:
            print(cells[-1], flush=True)
    if rank == 0:
        print(table(cells))
        if given.out is not None:
            given.out.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def train(cell: Cell, given: argparse.Namespace, device: torch.device) -> None:
    """Train a model with random weights, and note its losses and its speed in the cell."""
    rank = dist.get_rank() if cell.ranks > 1 else 0
    model, layout = make_model(cell, given, device)
    summed_loss = CausalLMLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, betas=(0.9, 0.95), weight_decay=0.1)
    batches = Batches(cell, given)
    seconds: list[float] = []
    while len(seconds) < given.steps and not over(sum(seconds[UNTIMED:]) > given.seconds, cell, device):
        began = time.perf_counter()
        batch = shard_batch(batches.next(), layout, rank)
        batch = {name: x.to(device) for name, x in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = mean_loss(summed_loss(**batch), batch["shift_labels"], reduction=summed())
        loss.loss.backward()
        if cell.ranks > 1:
            sum_gradients(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        cell.losses.append(loss.mean.item())  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    cell.steps_a_second = 1 / median(seconds[UNTIMED:] or seconds)


def make_model(cell: Cell, given: argparse.Namespace, device: torch.device) -> tuple[GPT2LMHeadModel, ra.Layout]:
    """GPT-2 with random weights, and which positions each rank holds."""
    torch.manual_seed(given.seed)
    layers, heads, width = SIZES[cell.size]
    options = dict(
        attn_pdrop=given.dropout, resid_pdrop=given.dropout, embd_pdrop=given.dropout, bos_token_id=None, eos_token_id=None
    )
    config = GPT2Config(vocab_size=VOCAB, n_positions=cell.context, n_layer=layers, n_head=heads, n_embd=width, **options)
    config._attn_implementation = "sdpa" if cell.attention == "ring" else cell.attention
    model = GPT2LMHeadModel(config).to(device).train()
    layout = ra.zigzag(cell.context, cell.ranks)
    if cell.attention == "ring":
        attach(model, layout=layout)
    return model, layout


def over(here: bool, cell: Cell, device: torch.device) -> bool:
    """Whether the time is over on rank 0, whose clock counts for all."""
    if cell.ranks == 1:
        return here
    said = torch.tensor(here, device=device, dtype=torch.int32)
    dist.broadcast(said, 0)
    return bool(said)


class Batches:
    """Random pieces of the text: the same on every rank, and for every attention."""

    def __init__(self, cell: Cell, given: argparse.Namespace) -> None:
        text = " ".join(map(str, range(100_000))).encode() if given.text is None else given.text.read_bytes()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if len(self._bytes) <= cell.context:
            raise SystemExit(f"the text has {len(self._bytes)} bytes, too few for --context {cell.context}")
        self._generator = torch.Generator().manual_seed(given.seed)
        self._shape = cell.batch, cell.context

    def next(self) -> dict[str, torch.Tensor]:
        """input_ids and labels, (batch, context)."""
        batch, context = self._shape
        starts = torch.randint(len(self._bytes) - context, (batch, 1), generator=self._generator)
        tokens = self._bytes[starts + torch.arange(context)].long()
        return {"input_ids": tokens, "labels": tokens}


def table(cells: list[Cell]) -> str:
    """Steps a second, and in brackets tokens a second relative to eager attention at the shortest context, if that was run."""
    attentions = list(dict.fromkeys(cell.attention for cell in cells))
    lines = [f"steps/s on {cells[0].ranks} rank{'s' * (cells[0].ranks > 1)}", "", f"| model | tokens | {' | '.join(attentions)} |"]
    lines.append("|---" * (2 + len(attentions)) + "|")
    for (size, context), row in itertools.groupby(cells, lambda cell: (cell.size, cell.context)):
        found = list(row)
        shown = " | ".join(_shown(cell, cells) for cell in found)
        lines.append(f"| {size} | {found[0].batch} x {context:,} | {shown} |")
    return "\n".join(lines)


def _shown(cell: Cell, cells: list[Cell]) -> str:
    if not cell.losses:
        return "out of memory"
    first = min(
        (x for x in cells if x.size == cell.size and x.attention == "eager" and x.losses), key=lambda x: x.context, default=None
    )
    if first is None:
        return f"{cell.steps_a_second:.2f}"
    rates = [x.steps_a_second * x.batch * x.context for x in (cell, first)]
    return f"{cell.steps_a_second:.2f} ({rates[0] / rates[1]:.2f})"


if __name__ == "__main__":
    main()
