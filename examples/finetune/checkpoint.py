"""Checkpoints of `finetune_long_document.py`: folders of safetensors and JSON; nothing is pickled.

A run resumed with the same ranks goes on with the same bits, with others up to rounding. (torch.distributed.checkpoint reshards too,
but its metadata is a pickle, and so are the plans that its ranks exchange.)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from .manifest import (
    FORMAT,
    RESUMED,
    Manifest,
    check_files,
    checkpoints,
    describe,
    find_checkpoint,
    flush_folder,
    read_manifest,
    step_of,
    write_manifest,
)
from .ranks import CheckpointError, everyone
from .settings import Settings
from .tensors import read_tensors, tensors_to_write, write_tensors

# what a resumed run may change, and what follows
CHANGES = {
    "ranks": "losses agree up to rounding, not to the bit",
    "wrapper": "losses agree up to rounding, not to the bit",
    "steps": "the learning rate now falls until there",
}


def check_writable(out: Path, device: torch.device) -> None:
    """Raise CheckpointError unless every rank can write into the folder, which need not exist; a collective."""

    def probe() -> None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out) as file:
                file.write(b"0")
        except OSError as error:
            raise CheckpointError(f"--out is {out}, which cannot be written: {error.strerror}") from error

    everyone(device, probe)


def choose_checkpoint(settings: Settings, device: torch.device) -> Settings:
    """The settings with `resume` the folder to resume, or None; a collective. Every file of the checkpoint is read, by one rank."""
    if settings.resume is None:
        return settings
    # as rank 0 sees them: hosts may cache the listing of a shared folder
    found = everyone(device, lambda: [str(path) for path in checkpoints(Path(settings.out))])[0]
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def check(path: Path) -> Manifest:
        def check_own() -> None:
            manifest = read_manifest(path)
            check_files(path, manifest, list(manifest["files"])[rank::ranks], digests=True)

        everyone(device, check_own)
        return read_manifest(path)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    chosen = find_checkpoint(settings, [Path(path) for path in found], check, say)
    if chosen is None:
        say(f"no checkpoint in {settings.out} yet: beginning with step 1")
        return replace(settings, resume=None)
    path, manifest = chosen
    say(f"resuming {path}, after step {manifest['step']}")
    for name, meaning in CHANGES.items():
        was, now = manifest["settings"][name], getattr(settings, name)
        if was != now:
            say(f"--{name} was {was} and is {now}: {meaning}")
    return replace(settings, resume=str(path))


def prepare_folder(out: Path, first: int, need: int, device: torch.device) -> None:
    """Before the first step: raise CheckpointError unless `need` bytes fit on the disk; move away checkpoints after step `first`.

    A collective. Those are another run's, or damaged: `--resume last` must not take them for this run's.
    """

    def prepare() -> None:
        if dist.get_rank() != 0:
            return
        free = shutil.disk_usage(out).free
        if free < need:
            raise CheckpointError(f"--out is {out}, whose disk has {free:,} bytes free, but a checkpoint takes {need:,}")
        former = out / "former"
        try:
            for path in checkpoints(out):
                if step_of(path) > first:
                    former.mkdir(exist_ok=True)
                    shutil.rmtree(former / path.name, ignore_errors=True)
                    path.rename(former / path.name)
                    print(f"moved {path}, which this run does not resume, to {former}", flush=True)
        except OSError as error:
            raise CheckpointError(f"{out} cannot be written: {error.strerror}") from error

    everyone(device, prepare)


def checkpoint_bytes(model: torch.nn.Module) -> int:
    """About the bytes of a checkpoint's files together: AdamW keeps two moments beside each parameter."""
    return sum(3 * parameter.numel() * parameter.element_size() for parameter in model.parameters())


def save_checkpoint(
    settings: Settings,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    training: torch.Tensor,
    step: int,
    device: torch.device,
) -> None:
    """Model, optimizer and random states as `checkpoint-STEP/`, whole or not at all; a collective.

    If a rank cannot write, every rank raises CheckpointError, which names the file. Earlier checkpoints stay, and no part of this one.
    """
    out = Path(settings.out)
    final = out / f"checkpoint-{step:06d}"
    part = final.with_name(final.name + ".part")
    rank = dist.get_rank()
    try:
        everyone(device, lambda: _make_folder(part) if rank == 0 else None)
        tensors = tensors_to_write(model, optimizer, device)
        entries = everyone(device, lambda: write_tensors(part, tensors, step))
        content = dict(
            format=FORMAT,
            step=step,
            training=digest(training),
            settings={name: getattr(settings, name) for name in (*RESUMED, *CHANGES)},
            files={f"rank-{number:05d}.safetensors": entry for number, entry in enumerate(entries) if entry is not None},
        )
        everyone(device, lambda: _complete(part, final, out / "tokenizer.json", content) if rank == 0 else None)
    finally:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)


def load_checkpoint(
    settings: Settings, model: torch.nn.Module, optimizer: torch.optim.Optimizer, training: torch.Tensor, device: torch.device
) -> int:
    """Load the checkpoint that `choose_checkpoint` has found. Returns the number of steps it had taken."""
    assert settings.resume is not None
    path = Path(settings.resume)
    manifest = read_manifest(path)
    if manifest["training"] != digest(training):
        raise ValueError(
            f"the tokens to train on are not those of {path}'s run: give the same --text (and, where a short --heldout part leaves "
            "fewer than two tokens a rank, the same number of ranks)"
        )
    read_tensors(path, manifest, model, optimizer, device)
    return manifest["step"]


def digest(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]


def _make_folder(part: Path) -> None:
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{part} could not be made: {error.strerror}") from error


def _complete(part: Path, final: Path, tokenizer: Path, content: Manifest) -> None:
    """Copy the tokenizer, write the manifest, and give the folder its name, which makes it a checkpoint."""
    try:
        shutil.copy(tokenizer, part / tokenizer.name)
    except OSError as error:
        raise CheckpointError(f"{part / tokenizer.name} could not be written: {error.strerror}") from error
    content["files"][tokenizer.name] = describe(part / tokenizer.name)
    write_manifest(part, content)
    try:
        os.rename(part, final)
        flush_folder(final.parent)
    except OSError as error:
        raise CheckpointError(f"{final} could not be written: {error.strerror}") from error
