"""What `finetune_long_document.py` reads and writes: the document, its tokens, checkpoints, figures."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from finetune_long_document import Settings

# what a checkpoint must have in common with the run that goes on from it
RESUMED = ("vocab", "hidden", "layers", "heads", "kv_heads", "seq_len", "seed", "steps", "warmup", "lr", "clip")


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
        if settings.resume:
            tokenizer = Tokenizer.from_file(str(Path(settings.resume).parent / "tokenizer.json"))
        else:
            tokenizer = train_tokenizer(text, settings.vocab)
        tokenizer.save(str(out / "tokenizer.json"))
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


def digest(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]


def save_checkpoint(settings: Settings, model: torch.nn.Module, optimizer, tokens: torch.Tensor, step: int) -> None:
    """Model, optimizer, step and random state as safetensors, written whole or not at all, by rank 0."""
    if dist.get_rank() == 0:
        tensors = {f"model.{name}": parameter.detach().cpu() for name, parameter in model.named_parameters()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value.detach().cpu() for key, value in state.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if settings.device == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        kept = {name: getattr(settings, name) for name in RESUMED}
        notes = dict(step=str(step), tokens=digest(tokens), settings=json.dumps(kept))
        path = Path(settings.out) / f"checkpoint-{step:06d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{path}.part", notes)
        os.replace(f"{path}.part", path)
    dist.barrier()


def check_resumable(settings: Settings) -> None:
    """Raise ValueError, naming what is wrong, if the checkpoint is not of a run like this one."""
    path = Path(settings.resume or "")
    if not path.is_file():
        raise ValueError(f"--resume is {path}, which is not a file")
    if not (path.parent / "tokenizer.json").is_file():
        raise ValueError(f"--resume is {path}, but there is no tokenizer.json beside it")
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata() or {}
    except Exception as error:  # safetensors has its own error type for each way a file can be bad
        raise ValueError(f"--resume is {path}, which is not a safetensors file: {error}") from error
    if not {"step", "tokens", "settings"} <= set(notes):
        raise ValueError(f"--resume is {path}, which was not written by this program")
    for name, was in json.loads(notes["settings"]).items():
        now = getattr(settings, name)
        if now != was:
            raise ValueError(f"--{name.replace('_', '-')} is {now}, but the checkpoint's run had {was}: give that")
    if int(notes["step"]) >= settings.steps:
        raise ValueError(f"--resume is at step {notes['step']} and --steps {settings.steps}: there is nothing left to do")


def load_checkpoint(path: str, model: torch.nn.Module, optimizer, tokens: torch.Tensor) -> int:
    """Put a checkpoint's state into model, optimizer and random generators; returns the steps it had done."""
    with safe_open(path, "pt") as file:
        notes = file.metadata()
        if notes["tokens"] != digest(tokens):
            raise ValueError("the document is not the one the checkpoint was trained on: give the same --text")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(file.get_tensor(f"model.{name}"))
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name in file.keys():  # noqa: SIM118 (the file is not a mapping)
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = file.get_tensor(name)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        torch.set_rng_state(file.get_tensor("random.cpu"))
        if "random.cuda" in file.keys() and torch.cuda.is_available():  # noqa: SIM118
            torch.cuda.set_rng_state(file.get_tensor("random.cuda"))
    return int(notes["step"])


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this rank has held: of the GPU as torch allocates it, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def machine(device: str) -> dict:
    """What the run ran on and with."""
    return dict(
        device=torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {os.cpu_count()} cores",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


def write_figures(out: Path, figures: dict) -> None:
    """`figures.json`, and the loss over the steps as `loss.png`."""
    from matplotlib.figure import Figure

    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    first, losses = figures["first_step"], figures["losses"]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.plot(range(first + 1, first + 1 + len(losses)), losses, color="#2f6db5", linewidth=1.8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean over all tokens (nats)")
    axes.set_title(
        f"{figures['document']['name']}: {figures['seq_len']:,} tokens a step, "
        f"{figures['settings']['ranks']} ranks, {figures.get('tokens_per_second', 0):,.0f} tokens/s",
        fontsize=10,
    )
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(out / "loss.png", dpi=150)
