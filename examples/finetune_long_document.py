"""Train a causal language model on one long document, its attention computed around a ring of ranks.

    make demo                                                          # or, in an environment with ringattn[train]:
    python examples/finetune_long_document.py                          # starts its own ranks: all GPUs, or 2 on a CPU
    torchrun --nproc-per-node 8 examples/finetune_long_document.py     # joins torchrun's, on one host or many
    python examples/finetune_long_document.py --text book.txt --steps 300
    python examples/finetune_long_document.py --model path/of/a/model --wrapper fsdp2 --tokens 1000000 --mlp-tile 8192
    python examples/finetune_long_document.py --shape 8b --tokens 131072 --steps 3     # random weights: speed and memory
    torchrun --nproc-per-node 2 examples/finetune_long_document.py --shape 1.5b-hybrid --tokens 1048576 --mlp-tile 16384 --steps 4
    python examples/finetune_long_document.py --shape 1b --wrapper deepspeed --zero 3 --tokens 131072 --steps 3
    python examples/finetune_long_document.py --resume runs/long_document/checkpoint-000050
    torchrun --max-restarts 3 --nproc-per-node 8 examples/finetune_long_document.py --save-every 50 --resume last
    python examples/finetune_long_document.py --verify                 # one step against dense attention in one process

The document is Python's language reference (`pydoc_data.topics`) or `--text`. On GPUs every step sees the whole document
as one sequence, in bf16; on a CPU a window of it. Each rank holds a shard of the sequence: its tokens' embeddings, MLPs,
logits and loss are local, and only attention talks to the other ranks. Writes to `--out`: `log.jsonl`, a line a step;
`loss.png`; `figures.json`; `checkpoint-STEP/`; `tokenizer.json`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from finetune.checkpoint import (
    check_writable,
    checkpoint_bytes,
    choose_checkpoint,
    load_checkpoint,
    prepare_folder,
    save_checkpoint,
)
from finetune.files import (
    append_line,
    machine,
    open_log,
    peak_memory_gib,
    prepare_tokens,
    share_tokens,
    split_heldout,
    write_figures,
)
from finetune.model import activation_bytes, build_model, count_flops, count_parameters, decoder_layers
from finetune.peers import peer_checkpoint_contexts, surroundings
from finetune.progress import Progress
from finetune.ranks import CheckpointError, join_ranks, start_ranks
from finetune.settings import ALL, DTYPES, Settings, parse
from finetune.trainer import LAYOUTS, Trainer, learning_rate
from tokenizers import Tokenizer

import ringattn as ra
from ringattn.integrations.generation import RingCache
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss, shift_labels


def window(tokens: torch.Tensor, seq_len: int, settings: Settings, step: int) -> dict[str, torch.Tensor]:
    """The step's sequence and its labels, (1, seq_len) each, the same on every rank: the whole, or a part drawn at random."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    last = len(tokens) - 1 - seq_len
    start = int(torch.randint(last + 1, (), generator=generator)) if last > 0 else 0
    piece = tokens[None, start : start + seq_len + 1]
    return dict(input_ids=piece[:, :seq_len], shift_labels=shift_labels(piece)[:, :seq_len])


def make_trainer(settings: Settings, model: CausalLMLoss, device: torch.device) -> Trainer:
    if settings.wrapper == "deepspeed":
        # takes seconds to import
        from finetune.deepspeed import DeepSpeedTrainer

        return DeepSpeedTrainer(settings, model, device)
    return Trainer(settings, model, device)


def train(settings: Settings, trainer: Trainer, tokens: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """The training loop. Returns the figures, the same on every rank but for times."""
    rank = dist.get_rank()
    training, tail = split_heldout(settings, tokens)
    seq_len = min(settings.tokens or len(training), len(training))
    model = trainer.model
    recompute = settings.recompute
    if recompute is None:
        recompute = bool(settings.offload) or activation_bytes(model.model.config, seq_len / settings.ranks) > 64e9
    if recompute and settings.attention == "ringattn":
        # keeps attention's output, so that attention runs once
        layers = decoder_layers(model)
        ra.checkpoint_layers(layers, offload=len(layers) if settings.offload == ALL else settings.offload)
    elif recompute:
        model.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": peer_checkpoint_contexts})
    first = load_checkpoint(settings, model, trainer.optimizer, training, device) if settings.resume else 0
    flops = count_flops(model.model.config, model, seq_len)
    figures: dict[str, Any] = dict(
        tokens_a_step=seq_len,
        recompute=recompute,
        first_step=first,
        losses=[],
        gradient_norms=[],
        seconds=[],
        model_flops_a_step=flops,
    )
    save_every = settings.save_every or (0 if settings.shape or settings.wrapper == "deepspeed" else settings.steps)
    prepare_folder(Path(settings.out), first, checkpoint_bytes(model) if save_every else 0, device)
    log = open_log(Path(settings.out), first) if rank == 0 else None
    model.train()
    if settings.rehearse:
        with surroundings(settings.attention, device):
            trainer.rehearse(window(training, min(settings.rehearse, seq_len), settings, first))
    progress = Progress(first, settings.steps, hidden=rank != 0)
    for step in range(first, settings.steps):
        began = time.perf_counter()
        rate = learning_rate(step, settings)
        with surroundings(settings.attention, device):
            loss, norm = trainer.step(window(training, seq_len, settings, step), rate)
        seconds = time.perf_counter() - began
        line = dict(
            step=step + 1,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            seconds=seconds,
            **speed(settings, flops, seq_len, seconds),
        )
        line["peak_memory_gib"] = peak_memory_gib(device)
        for name, value in (("losses", loss), ("gradient_norms", norm), ("seconds", seconds)):
            figures[name].append(value)
        mfu = f"{line['mfu']:.1%} MFU, " if line["mfu"] else ""
        progress.step(
            step + 1, f"loss {loss:.3f}, {line['tokens_per_second']:,.0f} tokens/s, {mfu}peak {line['peak_memory_gib']:.2f} GiB"
        )
        if log is not None:
            append_line(log, line)
        if save_every and (step + 1 == settings.steps or (step + 1) % save_every == 0):
            save_checkpoint(settings, model, trainer.optimizer, training, step + 1, device)
    progress.close()
    if log is not None:
        log.close()
    peak = torch.tensor(peak_memory_gib(device), device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    # unless there was a rehearsal, the first step compiles kernels and sets up communication
    seconds = figures["seconds"][0 if settings.rehearse else 1 :] or figures["seconds"]
    figures.update(speed(settings, flops, seq_len, statistics.median(seconds)))
    figures["peak_memory_gib_per_rank"] = peak.item()
    figures["parameters"] = count_parameters(model)
    figures["heldout_tokens"] = len(tail)
    figures["heldout_perplexity"] = trainer.perplexity(tail, seq_len) if len(tail) and settings.attention == "ringattn" else None
    return figures


def speed(settings: Settings, flops: float | None, seq_len: int, seconds: float) -> dict[str, float | None]:
    """Tokens per second of all ranks, and model FLOP/s a rank over the stated peak."""
    return dict(
        tokens_per_second=seq_len / seconds,
        mfu=None if flops is None or settings.peak is None else flops / seconds / settings.ranks / settings.peak,
    )


@torch.no_grad()
def generate(settings: Settings, model: Any, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`ids` (s,) and `settings.generate` more, sampled, the same on every rank: keys and values stay in pages on all ranks."""
    model.eval()
    attach(model)
    cache = RingCache(model, tokens=len(ids) + settings.generate, layout=LAYOUTS[settings.layout], dtype=DTYPES[settings.dtype])
    sampling = dict(do_sample=True, temperature=0.8, top_k=20, max_new_tokens=settings.generate, use_cache=True)
    torch.manual_seed(settings.seed)
    with torch.autocast(device.type, DTYPES[settings.dtype], enabled=settings.dtype == "bfloat16"):
        return model.generate(ids[None].to(device), past_key_values=cache, **sampling)[0].cpu()


def run_rank(local_rank: int, settings: Settings, store: str | None) -> None:
    """One rank, from joining the others to leaving them. `store` is a file to meet at; None means torchrun's variables."""
    device = torch.device("cuda", local_rank) if settings.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    join_ranks("nccl" if device.type == "cuda" else "gloo", local_rank, settings.ranks, store)
    try:
        work(settings, device)
    except CheckpointError as error:
        if dist.get_rank() == 0:
            print(f"finetune_long_document.py: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        dist.destroy_process_group()


def check_step(settings: Settings, model: CausalLMLoss, tokens: torch.Tensor) -> bool:
    """`--verify`: prints the differences from dense attention in one process; whether they are within bounds."""
    layout = LAYOUTS[settings.layout](min(settings.verify_tokens, len(tokens) - 1), settings.ranks)
    dtype = DTYPES[settings.dtype]
    report = ra.verify(
        model.model.train(),
        window(tokens, layout.seq_len, settings, step=0),
        layout=layout,
        loss=lambda model, inputs: CausalLMLoss(model)(**inputs),
        autocast=None if dtype == torch.float32 else dtype,
    )
    if dist.get_rank() == 0:
        print(report, flush=True)
    return report.passed


def work(settings: Settings, device: torch.device) -> None:
    began = time.perf_counter()
    rank, out = dist.get_rank(), Path(settings.out)
    check_writable(out, device)
    settings = choose_checkpoint(settings, device)
    document, tokens = prepare_tokens(settings, device)
    model = build_model(settings, device, int(tokens.max()) + 1)
    if rank == 0:
        parameters = count_parameters(model) / 1e6
        print(f"{document['name']}: {document['characters']:,} characters, {len(tokens):,} tokens")
        print(
            f"{settings.ranks} ranks on {machine(settings.device)['device']}, {parameters:.1f}M parameters, {settings.dtype}, "
            f"wrapper {settings.wrapper}" + ("" if settings.zero is None else f", ZeRO {settings.zero}"),
            flush=True,
        )
    if settings.verify:
        if not check_step(settings, model, tokens):
            sys.exit(1)
        return
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json")) if rank == 0 else None
    prompt = None
    if tokenizer is not None:
        document_end = tokens[-min(settings.tokens or len(tokens), len(tokens)) :]
        prompt = document_end if settings.prompt is None else torch.tensor(tokenizer.encode(settings.prompt).ids, dtype=torch.int64)
    prompt = share_tokens(prompt, device)
    if settings.generate and not len(prompt):
        raise ValueError(f"--prompt is {settings.prompt!r}, which has no tokens")
    trainer = make_trainer(settings, model, device)
    setup_seconds = time.perf_counter() - began
    figures = train(settings, trainer, tokens, device)
    ids = generate(settings, model.model, prompt, device) if settings.generate else None
    if tokenizer is not None:
        figures.update(
            document=document, tokens=len(tokens), setup_seconds=setup_seconds, total_seconds=time.perf_counter() - began
        )
        shown = len(prompt) if settings.prompt is not None else min(len(prompt), 32)
        figures["generated"] = None if ids is None else tokenizer.decode(ids[len(prompt) - shown :].tolist())
        write_figures(out, dict(settings=asdict(settings), machine=machine(settings.device), **figures))
        report(figures, out)


def report(figures: dict[str, Any], out: Path) -> None:
    losses, mfu, perplexity = figures["losses"], figures["mfu"], figures["heldout_perplexity"]
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps of {figures['tokens_a_step']:,} tokens; "
        f"{figures['tokens_per_second']:,.0f} tokens/s, {figures['peak_memory_gib_per_rank']:.2f} GiB peak a rank"
        + (f", {mfu:.1%} MFU" if mfu else "")
        + (f"; perplexity {perplexity:.1f} on the held-out {figures['heldout_tokens']:,} tokens" if perplexity else "")
    )
    print(f"wrote {out}/loss.png, log.jsonl and figures.json")
    if figures["generated"] is not None:
        print(f"the model writes:\n{figures['generated']}")


def main() -> None:
    settings = parse(description=__doc__)
    if "RANK" in os.environ:
        run_rank(int(os.environ["LOCAL_RANK"]), settings, store=None)
        return
    with tempfile.TemporaryDirectory() as folder:
        # forked ranks need no imports, but a process that has initialized CUDA must not be forked
        method = "spawn" if settings.device == "cuda" else "fork"
        start_ranks(run_rank, (settings, f"{folder}/store"), settings.ranks, method)


if __name__ == "__main__":
    main()
