"""Measures packed documents of log-normal lengths, another batch every step, on layouts side by side: zigzag, balanced and placed.

A step makes the layout of its batch and runs both passes, as often as `--calls` says; one step comes right after the other. In each round
all layouts take turns on the same batches; the first round warms up. A time is that of the slowest rank. `--batches`:

    new          every round has its documents in another order, which no round had before: plans, programs and tables are made in the step
    ahead        the same, but a thread makes the layout of the next batch and calls `ra.prepare`, while this batch is computed, at the
                 time at which `ShardedBatches` does it
    prepared     the same, but layouts are made, and `ra.prepare` is called, before the round begins
    seen         all rounds have the same batches: plans, programs and tables are there from the first round

The columns:

    TFLOP/s      of the live pairs, a GPU, forward and backward: the median over the rounds, with quartiles
    ms           of a step, over its calls
    layout ms    that making the layout takes the host; it is part of the step, unless that is prepared
    work, tokens of the busiest rank and of the longest shard, over the mean of all ranks
    moved        K/V rows that a rank needs of others, over the mean tokens of a rank: the mean over ranks, and the most

With `--train` a step trains a Llama (`--layers`, `--width`) on the batch, with the sum of gradients and AdamW. The table then has the
tokens a second of all GPUs. With `--device cpu` the benchmark runs over gloo; take toy sizes there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.training.ahead import Ahead
from ringattn.training.causal_lm import CausalLMLoss, sum_gradients
from ringattn.training.data import pack, shard_batch
from ringattn.training.loss import mean_loss, summed
from ringattn.transport import Transport

from .ring_measure import rest
from .shared.cases import LAYOUTS, log_normal_lengths
from .shared.ranks import add_ranks, group_of, slowest, start_ranks, write_record
from .shared.timing import spread

_VOCABULARY = 32_000
_PREPARED = 16  # batches that `ra.prepare` keeps until they are used
WAYS = ("new", "ahead", "prepared", "seen")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens a GPU (default: 8192 32768)")
    parser.add_argument("--means", type=int, nargs="+", default=[2048, 16384], help="mean lengths (default: 2048 16384)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a length (default: 1)")
    parser.add_argument("--layouts", nargs="+", choices=sorted(LAYOUTS), default=["zigzag", "balanced", "placed"])
    parser.add_argument(
        "--batches", nargs="+", choices=WAYS, default=list(WAYS), help="what was seen of them before (default: all)"
    )
    parser.add_argument("--steps", type=int, default=10, help="batches of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the first (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=1, help="calls with each batch, as of layers (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--transport", choices=("default", "nccl"), default="default", help="nccl: no copy engines; gloo on CPUs")
    parser.add_argument("--train", action="store_true", help="train a Llama instead of attention alone")
    parser.add_argument("--layers", type=int, default=4, help="for --train (default: %(default)s)")
    parser.add_argument("--width", type=int, default=4096, help="for --train: the model's width; MLPs are 3.5 times as wide")
    add_ranks(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for packed.json")


def main(arguments: argparse.Namespace) -> None:
    if arguments.train and arguments.calls != 1:
        raise SystemExit(f"--calls is {arguments.calls}, but a model that is trained has --layers")
    if "prepared" in arguments.batches and arguments.steps > _PREPARED:
        raise SystemExit(
            f"--steps is {arguments.steps}, but at most {_PREPARED} batches are prepared: leave out --batches prepared"
        )
    start_ranks(run_rank, arguments)


@dataclass(frozen=True)
class Batch:
    """The documents of a step."""

    lengths: list[int]
    mask: ra.Mask
    tokens: int


def make_batch(mean: int, sigma: float, tokens: int, seed: int) -> Batch:
    """Documents of log-normal lengths with this mean; the last one is cut to fill `tokens`."""
    lengths = log_normal_lengths(mean, sigma, tokens, seed)
    return Batch(lengths, ra.documents(lengths=lengths), tokens)


def reordered(batch: Batch, seed: int) -> Batch:
    """The same documents in another order: as much work, and a mask that nobody has seen."""
    lengths = np.random.default_rng(seed).permutation(batch.lengths).tolist()
    return Batch(lengths, ra.documents(lengths=lengths), batch.tokens)


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure every mix; rank 0 prints and writes the results after each."""
    ranks, device = group_of(dist.get_world_size(), arguments), arguments.device
    group = ranks.transports[""] if arguments.transport == "nccl" else ranks.group
    make_step = trainer if arguments.train else attention
    rows: list[dict] = []
    for tokens in arguments.tokens:
        for mean in arguments.means:
            batches = [make_batch(mean, arguments.sigma, tokens * ranks.size, seed) for seed in range(arguments.steps)]
            step = make_step(arguments, group, tokens)
            times = {(way, name): [] for way in arguments.batches for name in arguments.layouts}
            for number in range(arguments.rounds + 1):
                for way, name in times:
                    # each way and round has orders of its own
                    seed = 1 + number * len(WAYS) + WAYS.index(way)
                    given = batches if way == "seen" else [reordered(batch, seed) for batch in batches]
                    ready = maker(arguments, group, LAYOUTS[name], ranks.size, prepare=way in ("ahead", "prepared"))
                    seconds = turn(step, ready, given, way, device)
                    if number:
                        times[way, name].append(slowest([seconds], device)[0])
            new = [
                {"batches": way} | _row(name, tokens, mean, batches, times[way, name], arguments, ranks.size) for way, name in times
            ]
            rows += new
            if dist.get_rank() == 0:
                _print(new, header=rows == new, train=arguments.train)
                _write(rows, arguments)


def maker(
    arguments: argparse.Namespace, group: dist.ProcessGroup | Transport, make_layout: Callable, ranks: int, *, prepare: bool
) -> Callable[[Batch], ra.Layout]:
    """Makes the layout of a batch and, if asked to, its call ready."""
    heads = arguments.heads, arguments.kv_heads, arguments.kv_heads
    like = tuple(torch.empty(1, 1, h, arguments.head_dim, device=arguments.device, dtype=_dtype(arguments)) for h in heads)
    # of the thread that computes
    stream = torch.cuda.current_stream() if arguments.device == "cuda" else None

    def ready(batch: Batch) -> ra.Layout:
        layout = make_layout(batch.mask, batch.tokens, ranks)
        if prepare:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                ra.prepare(layout, batch.mask, like=like, group=group)
        return layout

    return ready


def turn(step: Callable, ready: Callable[[Batch], ra.Layout], batches: list[Batch], way: str, device: str) -> float:
    """Seconds of all batches on this rank, with the making of their layouts unless they are prepared; the ranks start together, rested."""
    layouts, left = [ready(batch) for batch in batches] if way == "prepared" else [], iter(batches)
    with Ahead(lambda: next(left, None), ready, "ahead") if way == "ahead" else nullcontext() as ahead:
        # without a rest, batches that were prepared while the GPU idled would run at higher clocks than others
        rest(device)
        began = time.perf_counter()
        for number, batch in enumerate(batches):
            if ahead is not None:
                layout = ahead.result()
                assert layout is not None
            else:
                layout = layouts[number] if layouts else ready(batch)
            step(batch, layout)
        wait(device)
        return time.perf_counter() - began


def _dtype(arguments: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if arguments.device == "cuda" else torch.float32


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def attention(
    arguments: argparse.Namespace, group: dist.ProcessGroup | Transport, tokens: int
) -> Callable[[Batch, ra.Layout], None]:
    """A step of attention alone, on random shards of a batch's lengths."""
    device, rank = arguments.device, dist.get_rank()
    rows = 2 * tokens + 256  # more than any of the layouts gives a rank
    widths = [heads * arguments.head_dim for heads in (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads)]
    pools = [torch.randn(rows * width, device=device, dtype=_dtype(arguments)) for width in widths]

    def step(batch: Batch, layout: ra.Layout) -> None:
        held = layout.lengths[rank]
        q, k, v, dout = (pool[: held * width].view(1, held, -1, arguments.head_dim) for pool, width in zip(pools, widths))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        for _ in range(arguments.calls):
            out = ra.ring_attention(*leaves, layout=layout, mask=batch.mask, group=group)
            torch.autograd.grad(out, leaves, dout)

    return step


def trainer(arguments: argparse.Namespace, group: dist.ProcessGroup | Transport, tokens: int) -> Callable[[Batch, ra.Layout], None]:
    """A step of training on random tokens: the same weights on every rank, which sum their gradients."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ringattn.integrations.huggingface import attach

    torch.manual_seed(0)
    device, rank = arguments.device, dist.get_rank()
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 7 // 2,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
    )
    model = LlamaForCausalLM(config).to(device, _dtype(arguments))
    run, optimizer = CausalLMLoss(model), torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")

    def step(batch: Batch, layout: ra.Layout) -> None:
        generator = torch.Generator().manual_seed(len(batch.lengths))
        ids = torch.randint(_VOCABULARY, (batch.tokens,), generator=generator)
        whole = pack(ids.split(batch.lengths))
        attach(model, layout=layout, mask=batch.mask, group=group)
        mine = {name: value.to(device) for name, value in shard_batch(whole, layout, rank).items()}
        loss = mean_loss(run(**mine), mine["shift_labels"], reduction=summed())
        loss.loss.backward()
        sum_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()

    return step


def _row(
    name: str, tokens: int, mean: int, batches: list[Batch], seconds: list[float], arguments: argparse.Namespace, n: int
) -> dict:
    """What is known of a layout on the batches of a mix."""
    pairs, layout_seconds, facts = 0, 0.0, []
    for batch in batches:
        began = time.perf_counter()
        layout = LAYOUTS[name](batch.mask, batch.tokens, n)
        layout_seconds += time.perf_counter() - began
        plan, work = ra.make_plan(layout, batch.mask), layout.work(batch.mask)
        needs = [sum(len(plan.needs(rank, owner)) for owner in range(n) if owner != rank) for rank in range(n)]
        pairs += int(work.sum())
        facts.append((work.max() / work.mean(), max(layout.lengths) / tokens, np.mean(needs) / tokens, max(needs) / tokens))
    work_ratio, token_ratio, moved, most_moved = np.mean(facts, axis=0).tolist()
    seconds = [one / arguments.calls for one in seconds]
    flop = 3.5 * 4 * pairs * arguments.heads * arguments.head_dim / n
    rate = spread([flop / one / 1e12 for one in seconds])
    total = sum(batch.tokens for batch in batches)
    return {
        "layout": name,
        "tokens_per_gpu": tokens,
        "mean_length": mean,
        "tflops": None if arguments.train else rate.median,
        "tflops_quartiles": None if arguments.train else [rate.lower, rate.upper],
        "tokens_per_second": spread([total / one for one in seconds]).median,
        "ms": 1e3 * spread(seconds).median / len(batches),
        "layout_ms": 1e3 * layout_seconds / len(batches),
        "work": work_ratio,
        "tokens": token_ratio,
        "moved": moved,
        "most_moved": most_moved,
    }


def _print(rows: list[dict], header: bool, train: bool) -> None:
    rate = "tokens/s" if train else "TFLOP/s a GPU (quartiles)"
    if header:
        print(f"| tokens a GPU | mean length | batches | layout | {rate} | ms | layout ms | work | tokens | moved, mean / most |")
        print("|---" * 10 + "|")
    for row in rows:
        speed = f"{row['tokens_per_second']:,.0f}"
        if not train:
            speed = f"{row['tflops']:.4g} ({row['tflops_quartiles'][0]:.4g} to {row['tflops_quartiles'][1]:.4g})"
        mix = f"{row['tokens_per_gpu']:,} | {row['mean_length']:,} | {row['batches']} | {row['layout']}"
        times = f"{speed} | {row['ms']:.2f} | {row['layout_ms']:.2f}"
        even = f"{row['work']:.2f} | {row['tokens']:.2f} | {row['moved']:.2f} / {row['most_moved']:.2f}"
        print(f"| {mix} | {times} | {even} |", flush=True)


def _write(rows: list[dict], arguments: argparse.Namespace) -> None:
    """Write packed.json."""
    arguments.mask = f"documents, log-normal with sigma {arguments.sigma}"
    shape = {
        name: getattr(arguments, name)
        for name in ("heads", "kv_heads", "head_dim", "steps", "rounds", "calls", "train", "transport")
    }
    write_record("packed", arguments, **shape, rows=rows)
