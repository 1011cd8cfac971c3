"""What `finetune_long_document.py` reads and writes: the document, its tokens, the log, figures."""

from __future__ import annotations

import json
import os
import platform
import resource
import sysconfig
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .ranks import CheckpointError
from .settings import Settings


def read_document(path: str | None) -> tuple[str, str]:
    """The document's name and text."""
    if path is not None:
        return Path(path).name, Path(path).read_text(encoding="utf-8")
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "\n".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)
        return "the standard library's source (this Python lacks pydoc_data.topics)", text[:500_000]
    return "Python's language reference", "\n\n".join(topics[name] for name in sorted(topics))


def prepare_tokens(settings: Settings, device: torch.device) -> tuple[dict, torch.Tensor]:
    """The document's facts (on rank 0) and its tokens (s,) on every rank. Rank 0 trains the tokenizer, and saves it."""
    facts, tokens = {}, None
    if dist.get_rank() == 0:
        name, text = read_document(settings.text)
        facts = dict(name=name, characters=len(text))
        out = Path(settings.out)
        out.mkdir(parents=True, exist_ok=True)
        folder = Path(settings.resume or settings.model)
        if (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            # a shape's vocabulary sets the work of a step; the text needs fewer tokens
            tokenizer = train_tokenizer(text, min(settings.vocab, 8192))
        replace_text(out / "tokenizer.json", tokenizer.to_str(pretty=True))
        tokens = torch.tensor(tokenizer.encode(text).ids)
    tokens = share_tokens(tokens, device)
    least = max(16, 2 * settings.ranks)
    if len(tokens) < least:
        raise ValueError(f"the document has {len(tokens)} tokens, but {settings.ranks} ranks need {least}: give a longer --text")
    return facts, tokens


def train_tokenizer(text: str, vocab: int) -> Tokenizer:
    """A byte-level BPE of this text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def share_tokens(tokens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Rank 0's tokens (s,) on every rank, on the CPU."""
    length = torch.tensor(0 if tokens is None else len(tokens), device=device)
    dist.broadcast(length, src=0)
    shared = torch.empty(int(length), dtype=torch.int64, device=device) if tokens is None else tokens.to(device)
    dist.broadcast(shared, src=0)
    return shared.cpu()


def split_heldout(settings: Settings, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens to train on and the document's tail, which is kept from training. A document shorter than a step is repeated."""
    tail = int(len(tokens) * settings.heldout)
    # drop a tail that is too short for all ranks
    tail = tail if tail >= 2 * settings.ranks else 0
    training = tokens[: len(tokens) - tail]
    if settings.tokens + 1 > len(training) and settings.tokens:
        training = training.repeat(-(-(settings.tokens + 1) // len(training)))
    return training, tokens[len(tokens) - tail :]


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this rank has held: of the GPU as torch allocates it, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def machine(device: str) -> dict:
    """The machine and the versions of a run."""
    return dict(
        device=torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {os.cpu_count()} cores",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


def open_log(out: Path, first: int) -> TextIO:
    """Open `log.jsonl` to append after step `first`. Lines that a killed run wrote after its last checkpoint are dropped."""
    path = out / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if first and path.is_file() else []
    # the last line may have been cut off
    replace_text(path, "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first))
    return path.open("a")


def append_line(log: TextIO, line: dict) -> None:
    try:
        log.write(json.dumps(line) + "\n")
        log.flush()
    except OSError as error:
        raise CheckpointError(f"{log.name} could not be written: {error.strerror}") from error


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: where the disk is full, what was there stays."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"{path} could not be written: {error.strerror}") from error


def write_figures(out: Path, figures: dict) -> None:
    """Write `figures.json` and `loss.png`, the loss over the steps, beside that of the run in `--beside`."""
    from matplotlib.figure import Figure

    replace_text(out / "figures.json", json.dumps(figures, indent=1) + "\n")
    settings = figures["settings"]
    figure = Figure(figsize=(8, 4.8), layout="constrained", facecolor="white")
    axes = figure.subplots()
    if settings["beside"]:
        other = json.loads((Path(settings["beside"]) / "figures.json").read_text())
        _plot_losses(axes, other, color="#f0a860", linewidth=5)
    _plot_losses(axes, figures, color="#1f5fa8", linewidth=1.6)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean over all tokens (nats)")
    model = f"{settings['shape'] or settings['model']} model of {figures['parameters'] / 1e6:.1f}M parameters, {settings['dtype']}"
    axes.set_title(
        f"{figures['document']['name']}: {figures['tokens_a_step']:,} tokens a step, causal mask\n"
        f"{model}, {figures['machine']['device']}",
        fontsize=10,
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(out / "loss.png", dpi=110)


def _plot_losses(axes: Any, figures: dict, **style: Any) -> None:
    first, losses, settings = figures["first_step"], figures["losses"], figures["settings"]
    ranks = settings["ranks"]
    names = {"ringattn": f"ring attention, {settings['layout']} layout", "ulysses-sdpa": "all-to-all around torch's attention"}
    # with one rank there is no all-to-all, only torch's attention over the whole sequence
    name = "dense attention (torch's)" if settings["attention"] == "ulysses-sdpa" and ranks == 1 else None
    name = name or names.get(settings["attention"], settings["attention"])
    backend = "" if ranks == 1 else " over NCCL" if settings["device"] == "cuda" else " over gloo"
    axes.plot(
        range(first + 1, first + 1 + len(losses)),
        losses,
        label=f"{name}, {ranks} rank{'s' if ranks > 1 else ''}{backend}",
        **style,
    )
