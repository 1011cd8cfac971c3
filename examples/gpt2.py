"""Train GPT-2 on a text with dropout 0.1, as FlashAttention's paper does, and compare the attention of three implementations.

python examples/gpt2.py --attention ring --text kjv.txt                              # one GPU; also sdpa, eager
torchrun --nproc-per-node 2 examples/gpt2.py --attention ring --context 16384        # a ring
python examples/gpt2.py --attention ring --size tiny --context 64 --steps 3          # a try on the CPU

The same seed gives the same weights and batches for each implementation. Dropout draws differ, except between rings of different sizes:
weights of attention are dropped alike there, but what MLPs and embeddings drop follows from each rank's own generator. `--out` takes the
losses and the steps a second, without those of the first steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=["ring", "sdpa", "eager"], default="ring")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="of attention's weights, MLPs and embeddings (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--text", type=Path, help="default: a text made of numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for losses and steps a second")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    on_gpu = torch.cuda.is_available()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if ranks > 1 and given.attention != "ring":
        raise SystemExit(f"--attention {given.attention} runs on one GPU, but {ranks} ranks were started")
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model, layout = make_model(given, device, ranks)
    summed_loss = CausalLMLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, betas=(0.9, 0.95), weight_decay=0.1)
    batches = Batches(given)
    losses, seconds = [], []
    for step in range(given.steps):
        began = time.perf_counter()
        batch = shard_batch(batches.next(), layout, rank)
        batch = {name: x.to(device) for name, x in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = mean_loss(summed_loss(**batch), batch["shift_labels"], reduction=summed())
        loss.loss.backward()
        if ranks > 1:
            sum_gradients(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.mean.item())  # waits for the GPU
        seconds.append(time.perf_counter() - began)
        if rank == 0 and (step % 50 == 0 or step == given.steps - 1):
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    if rank == 0:
        rate = 1 / median(seconds[UNTIMED:] or seconds)
        print(f"{given.attention}, {ranks} rank{'s' * (ranks > 1)}, {given.context} tokens: {rate:.2f} steps/s")
        if given.out is not None:
            found = {
                **vars(given),
                "text": str(given.text),
                "out": str(given.out),
                "ranks": ranks,
                "steps_a_second": rate,
                "losses": losses,
            }
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def make_model(given: argparse.Namespace, device: torch.device, ranks: int) -> tuple[GPT2LMHeadModel, ra.Layout]:
    """GPT-2 with random weights, and which positions each rank holds."""
    torch.manual_seed(given.seed)
    layers, heads, width = SIZES[given.size]
    options = dict(
        attn_pdrop=given.dropout, resid_pdrop=given.dropout, embd_pdrop=given.dropout, bos_token_id=None, eos_token_id=None
    )
    config = GPT2Config(vocab_size=VOCAB, n_positions=given.context, n_layer=layers, n_head=heads, n_embd=width, **options)
    config._attn_implementation = "sdpa" if given.attention == "ring" else given.attention
    model = GPT2LMHeadModel(config).to(device).train()
    layout = ra.zigzag(given.context, ranks)
    if given.attention == "ring":
        attach(model, layout=layout)
    return model, layout


class Batches:
    """Random pieces of the text: the same on every rank, and for every implementation of attention."""

    def __init__(self, given: argparse.Namespace) -> None:
        text = " ".join(map(str, range(100_000))).encode() if given.text is None else given.text.read_bytes()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if len(self._bytes) <= given.context:
            raise SystemExit(f"the text has {len(self._bytes)} bytes, too few for --context {given.context}")
        self._generator = torch.Generator().manual_seed(given.seed)
        self._shape = given.batch, given.context

    def next(self) -> dict[str, torch.Tensor]:
        """input_ids and labels, (batch, context)."""
        batch, context = self._shape
        starts = torch.randint(len(self._bytes) - context, (batch, 1), generator=self._generator)
        tokens = self._bytes[starts + torch.arange(context)].long()
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    main()
