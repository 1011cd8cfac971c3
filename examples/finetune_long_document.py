"""Train a causal language model on one long document, its attention computed around a ring of ranks.

    make demo                                                          # or, in an environment with ringattn[train]:
    python examples/finetune_long_document.py                          # starts its own ranks: all GPUs, or 2 on a CPU
    torchrun --nproc-per-node 8 examples/finetune_long_document.py     # joins torchrun's, on one host or many
    python examples/finetune_long_document.py --text book.txt --steps 300
    python examples/finetune_long_document.py --resume runs/long_document/checkpoint-000050.safetensors
    python examples/finetune_long_document.py --verify                 # one step against dense attention in one process

The document is Python's language reference (`pydoc_data.topics`) or `--text`. On GPUs every step sees the whole document
as one sequence, in bf16; on a CPU a window of it. Each rank holds a shard of the sequence: its tokens' embeddings, MLPs,
logits and loss are local, and only attention talks to the other ranks. Writes to `--out`: `loss.png`, `figures.json`,
`checkpoint-*.safetensors` and `tokenizer.json`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from finetune_files import (
    check_resumable,
    load_checkpoint,
    machine,
    peak_memory_gib,
    prepare_tokens,
    save_checkpoint,
    share_tokens,
    write_figures,
)
from finetune_verify import verify
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn as ra
from ringattn.integrations.causal_lm import IGNORE, shift_labels, sum_gradients, token_loss
from ringattn.integrations.huggingface import attach

LAYOUTS = {"zigzag": ra.zigzag, "striped": ra.striped, "contiguous": ra.contiguous}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on; see `parse` for what each means."""

    text: str | None
    out: str
    resume: str | None
    device: str
    ranks: int
    layout: str
    dtype: str
    recompute: bool | None
    seq_len: int
    steps: int
    save_every: int
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    lr: float
    warmup: int
    clip: float
    seed: int
    generate: int
    prompt: str | None
    verify: bool
    verify_tokens: int


# by device: a model and a length that take a few minutes there
DEFAULTS = {
    "cpu": dict(
        ranks=2, dtype="float32", seq_len=2048, steps=100, hidden=128, layers=4, heads=4, kv_heads=2, lr=6e-3, warmup=8,
        verify_tokens=1024,
    ),
    "cuda": dict(
        ranks=None, dtype="bfloat16", seq_len=0, steps=100, hidden=1024, layers=12, heads=8, kv_heads=4, lr=6e-4, warmup=10,
        verify_tokens=4096,
    ),
}  # fmt: skip


def parse(argv: list[str] | None = None) -> Settings:
    """The settings of a command line. Bad ones end the program with a message, before any rank is started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", metavar="FILE", help="the document, UTF-8 (default: Python's language reference)")
    add("--out", default="runs/long_document", metavar="DIR", help="folder to write (default: %(default)s)")
    add("--resume", metavar="FILE", help="go on from this checkpoint, up to --steps")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    add("--ranks", type=int, help="ranks to start (default: all GPUs, or 2 on a CPU); torchrun's number under torchrun")
    add("--layout", choices=tuple(LAYOUTS), default="zigzag", help="who holds which tokens (default: %(default)s)")
    add("--dtype", choices=tuple(DTYPES), help="of matmuls and attention; parameters are float32 (default: by device)")
    add("--recompute", action=argparse.BooleanOptionalAction, default=None, help="recompute activations in backward")
    add("--seq-len", type=int, help="tokens a step; 0 is the whole document (default: 2048 on a CPU, 0 on GPUs)")
    add("--steps", type=int, help="training steps in all (default: 100)")
    add("--save-every", type=int, default=0, metavar="N", help="a checkpoint every N steps (default: at the end only)")
    add("--vocab", type=int, default=8192, help="size of the byte-level BPE (default: %(default)s)")
    add("--hidden", type=int, help="model width (default: 128 on a CPU, 1024 on GPUs)")
    add("--layers", type=int, help="layers (default: 4 on a CPU, 12 on GPUs)")
    add("--heads", type=int, help="query heads (default: 4 on a CPU, 8 on GPUs)")
    add("--kv-heads", type=int, help="key and value heads (default: 2 on a CPU, 4 on GPUs)")
    add("--lr", type=float, help="peak learning rate (default: 6e-3 on a CPU, 6e-4 on GPUs)")
    add("--warmup", type=int, help="steps of linear warm-up; cosine decay to a tenth follows (default: 8 on a CPU, 10 on GPUs)")
    add("--clip", type=float, default=1.0, help="largest norm of the whole gradient (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the weights, the windows and the sampling (default: %(default)s)")
    add("--generate", type=int, default=48, metavar="N", help="tokens to write at the end (default: %(default)s)")
    add("--prompt", help="what they go on from (default: the document's opening)")
    add("--verify", action="store_true", help="compare one step with dense attention in one process, and stop")
    add("--verify-tokens", type=int, metavar="N", help="tokens of that step (default: 1024 on a CPU, 4096 on GPUs)")
    args = parser.parse_args(argv)

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but this torch sees no GPU: use --device cpu")
    if "RANK" in os.environ:
        if args.ranks is not None:
            parser.error("--ranks is given, but torchrun has started the ranks: leave it out")
        args.ranks = int(os.environ["WORLD_SIZE"])
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.ranks = torch.cuda.device_count() if args.ranks is None else args.ranks
    args.warmup = min(args.warmup, args.steps)

    least = dict(ranks=1, seq_len=0, steps=1, save_every=0, vocab=257, hidden=2, layers=1, heads=1, kv_heads=1, warmup=0)
    for name, bound in dict(least, generate=0, verify_tokens=2, lr=0, clip=0).items():
        if getattr(args, name) < bound:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, but must be at least {bound}")
    if args.device == "cuda" and "RANK" not in os.environ and args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks is {args.ranks}, but this host has {torch.cuda.device_count()} GPUs: one rank a GPU")
    for name in ("seq_len", "verify_tokens"):
        if 0 < getattr(args, name) < 2 * args.ranks:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: {args.ranks} ranks need {2 * args.ranks} or more")
    if args.heads % args.kv_heads:
        parser.error(f"--heads is {args.heads} and --kv-heads {args.kv_heads}: the first must be a multiple of the second")
    if args.hidden % (2 * args.heads):
        parser.error(f"--hidden is {args.hidden}, but must be a multiple of twice --heads ({args.heads}): heads of even size")
    if args.hidden // args.heads > 256:
        parser.error(f"--hidden {args.hidden} over --heads {args.heads} makes heads of more than 256: use more heads")
    if args.text is not None and not Path(args.text).is_file():
        parser.error(f"--text is {args.text}, which is not a file")
    settings = Settings(**vars(args))
    if settings.resume is not None:
        try:
            check_resumable(settings)
        except ValueError as error:
            parser.error(str(error))
    return settings


def build_model(settings: Settings) -> LlamaForCausalLM:
    """A Llama of this size with random weights, the same on every rank."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=-(-settings.hidden * 8 // 3 // 64) * 64,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def summed_loss(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cross-entropy summed over the tokens given: this rank's, or the whole sequence's. ids, labels (1, s)."""
    with torch.autocast(ids.device.type, dtype, enabled=dtype == torch.bfloat16):
        hidden = model.model(input_ids=ids).last_hidden_state
        return token_loss(hidden, model.lm_head.weight, labels)


def window(tokens: torch.Tensor, seq_len: int, settings: Settings, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's sequence and its labels, (1, seq_len) each, the same on every rank: the whole, or a part drawn at random."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    last = len(tokens) - 1 - seq_len
    start = int(torch.randint(last + 1, (), generator=generator)) if last > 0 else 0
    piece = tokens[None, start : start + seq_len + 1]
    return piece[:, :seq_len], shift_labels(piece)[:, :seq_len]


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: LlamaForCausalLM, settings: Settings) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=settings.device == "cuda")


def train(settings: Settings, model: LlamaForCausalLM, tokens: torch.Tensor, device: torch.device) -> dict:
    """The training loop. Returns the figures, the same on every rank but for times."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seq_len = min(settings.seq_len or len(tokens), len(tokens))
    layout = LAYOUTS[settings.layout](seq_len, world_size)
    attach(model, layout=layout)
    recompute = max(layout.lengths) > 32768 if settings.recompute is None else settings.recompute
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make_optimizer(model, settings)
    first = load_checkpoint(settings.resume, model, optimizer, tokens) if settings.resume else 0
    figures = dict(seq_len=seq_len, recompute=recompute, first_step=first, losses=[], gradient_norms=[], seconds=[])
    model.train()
    bar = tqdm(range(first, settings.steps), initial=first, total=settings.steps, disable=rank != 0, desc="training")
    for step in bar:
        began = time.perf_counter()
        ids, labels = window(tokens, seq_len, settings, step)
        counted = int((labels != IGNORE).sum())
        ids, labels = (ra.shard(x, layout, rank).to(device) for x in (ids, labels))
        # this rank's part of the mean over all tokens of all ranks: summed over the ranks it is the loss
        loss = summed_loss(model, ids, labels, DTYPES[settings.dtype]) / counted
        loss.backward()
        sum_gradients(model.parameters())
        # after the sum every rank holds the whole gradient, so this is the global norm
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        figures["losses"].append(total.item())
        figures["gradient_norms"].append(norm.item())
        figures["seconds"].append(time.perf_counter() - began)
        bar.set_postfix_str(
            f"loss {total.item():.3f}, {seq_len / figures['seconds'][-1]:,.0f} tokens/s, peak {peak_memory_gib(device):.2f} GiB"
        )
        if step + 1 == settings.steps or (settings.save_every and (step + 1) % settings.save_every == 0):
            save_checkpoint(settings, model, optimizer, tokens, step + 1)
    bar.close()
    peak = torch.tensor(peak_memory_gib(device), device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    # the first step compiles kernels and sets up communication
    steady = figures["seconds"][1:] or figures["seconds"]
    if steady:
        figures["tokens_per_second"] = seq_len / statistics.median(steady)
    figures["peak_memory_gib_per_rank"] = peak.item()
    figures["parameters"] = sum(p.numel() for p in model.parameters())
    return figures


@torch.no_grad()
def generate(settings: Settings, model: LlamaForCausalLM, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`ids` (s,) and `settings.generate` more, sampled; without a cache, over the same ring, which takes any length."""
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.generate):
        layout = LAYOUTS[settings.layout](len(ids), world_size)
        attach(model, layout=layout)
        with torch.autocast(device.type, DTYPES[settings.dtype], enabled=settings.dtype == "bfloat16"):
            hidden = model.model(input_ids=ra.shard(ids[None], layout, rank).to(device)).last_hidden_state
            last = ra.unshard(hidden, layout)[0, -1]
            likely = (model.lm_head(last).float() / 0.8).topk(20)
        choice = torch.multinomial(likely.values.softmax(-1).cpu(), 1, generator=generator)
        ids = torch.cat([ids, likely.indices.cpu()[choice]])
    return ids


def run_rank(local_rank: int, settings: Settings, store: str | None) -> None:
    """One rank, from joining the others to leaving them. `store` is a file to meet at; None means torchrun's variables."""
    device = torch.device("cuda", local_rank) if settings.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
    meet = {} if store is None else dict(init_method=f"file://{store}", rank=local_rank, world_size=settings.ranks)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **meet)
    try:
        work(settings, device)
    finally:
        dist.destroy_process_group()


def work(settings: Settings, device: torch.device) -> None:
    began = time.perf_counter()
    rank, out = dist.get_rank(), Path(settings.out)
    document, tokens = prepare_tokens(settings, device)
    model = build_model(settings).to(device)
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"{document['name']}: {document['characters']:,} characters, {len(tokens):,} tokens")
        print(
            f"{settings.ranks} ranks on {machine(settings.device)['device']}, {parameters:.1f}M parameters, {settings.dtype}",
            flush=True,
        )
    if settings.verify:
        layout = LAYOUTS[settings.layout](min(settings.verify_tokens, len(tokens) - 1), settings.ranks)
        ids, labels = window(tokens, layout.seq_len, settings, step=0)
        if not verify(model, build_model(settings).to(device), summed_loss, layout, ids, labels, DTYPES[settings.dtype]):
            sys.exit(1)
        return
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json")) if rank == 0 else None
    prompt = None
    if tokenizer is not None:
        opening = tokens[: 2 * settings.ranks + 16]
        prompt = opening if settings.prompt is None else torch.tensor(tokenizer.encode(settings.prompt).ids, dtype=torch.int64)
    prompt = share_tokens(prompt, device)
    if len(prompt) < 2 * settings.ranks:
        raise ValueError(f"--prompt has {len(prompt)} tokens, but {settings.ranks} ranks need {2 * settings.ranks} or more")
    figures = train(settings, model, tokens, device)
    ids = generate(settings, model, prompt, device)
    if tokenizer is not None:
        written = tokenizer.decode(ids.tolist())
        figures.update(document=document, tokens=len(tokens), generated=written, total_seconds=time.perf_counter() - began)
        write_figures(out, dict(settings=asdict(settings), machine=machine(settings.device), **figures))
        losses = figures["losses"]
        if losses:
            print(
                f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps of {figures['seq_len']:,} tokens; "
                f"{figures['tokens_per_second']:,.0f} tokens/s, {figures['peak_memory_gib_per_rank']:.2f} GiB peak a rank"
            )
        print(f"wrote {out}/loss.png, figures.json and checkpoint-{settings.steps:06d}.safetensors")
        print(f"the model writes:\n{written}")


def main() -> None:
    settings = parse()
    if "RANK" in os.environ:
        run_rank(int(os.environ["LOCAL_RANK"]), settings, store=None)
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            # a fork has everything imported already; a process that has asked for CUDA must not be forked
            method = "spawn" if settings.device == "cuda" else "fork"
            mp.start_processes(run_rank, (settings, f"{folder}/store"), nprocs=settings.ranks, start_method=method)
        except mp.ProcessExitedException as error:
            sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
