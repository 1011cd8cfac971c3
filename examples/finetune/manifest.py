"""What makes a folder a checkpoint of `finetune_long_document.py`: its manifest, `manifest.json`.

The manifest lists every file with its length and SHA-256, and for a rank's file the rank, the step and the rows of each tensor that it
holds. It is written last, and holds the SHA-256 of itself: a folder with a valid manifest and the files that it lists is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .ranks import CheckpointError

NAME = "manifest.json"
FORMAT = 1
LAST = "last"  # of --resume

# settings that a run must share with the checkpoint that it resumes
RESUMED = (
    "model", "shape", "layout", "attention", "dtype", "vocab", "hidden", "layers", "heads", "kv_heads", "tokens", "heldout", "seed",
    "warmup", "lr", "clip",
)  # fmt: skip

Manifest = dict[str, Any]


def describe(path: Path, **facts: Any) -> dict[str, Any]:
    """A file's entry: its length and digest, and `facts`. The file is flushed to disk."""
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return dict(bytes=path.stat().st_size, sha256=_sha256(path), **facts)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror}") from error


def write_manifest(folder: Path, content: Manifest) -> None:
    """Write the manifest, and flush it and the folder to disk."""
    path = folder / NAME
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    try:
        with path.open("w") as file:
            json.dump(dict(sha256=own, content=content), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        flush_folder(folder)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror}") from error


def flush_folder(folder: Path) -> None:
    """Flush a folder's list of names to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError unless the manifest is as it was written."""
    path = folder / NAME
    try:
        written = json.loads(path.read_text())
        content = written["content"]
        if hashlib.sha256(json.dumps(content).encode()).hexdigest() == written["sha256"]:
            if content["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {content['format']}, but this program reads format {FORMAT}")
            return content
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a checkpoint's folder, or not a complete one: it lacks {NAME}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(f"{path} is damaged: it is not as it was written")


def check_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None, *, digests: bool) -> None:
    """Raise CheckpointError, which names the file, unless these files (default: all) are as they were written.

    Without `digests`, which read all bytes, lengths are compared, and the rank and step that each rank's file states.
    """
    for name in manifest["files"] if names is None else names:
        path, entry = folder / name, manifest["files"][name]
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        try:
            found = _rank_and_step(path) if "rank" in entry else None
            length = path.stat().st_size
            if found is not None and found != (entry["rank"], entry["step"]):
                raise CheckpointError(
                    f"{path} is of rank {found[0]} at step {found[1]}, but should be of rank {entry['rank']} at step {entry['step']}"
                )
            if length != entry["bytes"]:
                raise CheckpointError(f"{path} has {length} bytes, but was written with {entry['bytes']}")
            if digests and _sha256(path) != entry["sha256"]:
                raise CheckpointError(f"{path} is damaged: its SHA-256 is not that of what was written")
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def check_settings(settings: Any, folder: Path, manifest: Manifest) -> None:
    """Raise ValueError if the checkpoint was written by a run with other settings; the message names the setting."""
    for name in RESUMED:
        now, was = getattr(settings, name), manifest["settings"][name]
        if now != was:
            raise ValueError(f"--{name.replace('_', '-')} is {now}, but the run of {folder} had {was}: give that")
    if manifest["step"] >= settings.steps:
        raise ValueError(f"{folder} is at step {manifest['step']} and --steps {settings.steps}: there is nothing left to do")


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints in a run's folder, complete or not, the newest first."""
    found = [path for path in out.glob("checkpoint-*") if path.is_dir() and path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def find_checkpoint(
    settings: Any, folders: list[Path], check: Callable[[Path], Manifest], say: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """The checkpoint to resume: the folder that `--resume` names, or for `last` the newest complete one of `folders`.

    check: returns a checkpoint's manifest, or raises CheckpointError if a file is not as it was written.
    say: told of every checkpoint that is passed over.

    Returns None if `--resume` is `last` and there is none yet. Raises CheckpointError if none is complete.
    """
    if settings.resume != LAST:
        path = Path(settings.resume)
        try:
            manifest = check(path)
        except CheckpointError as error:
            raise CheckpointError(f"--resume: {error}. {_advice(path)}") from error
        check_settings(settings, path, manifest)
        return path, manifest
    for path in folders:
        try:
            manifest = check(path)
        except CheckpointError as error:
            say(f"passing over a checkpoint: {error}")
            continue
        check_settings(settings, path, manifest)
        return path, manifest
    if folders:
        raise CheckpointError(
            f"--resume is {LAST}, but no checkpoint in {settings.out} is complete: to begin anew, move them away or give another --out"
        )
    return None


def check_resumable(settings: Any) -> None:
    """Raise ValueError or CheckpointError if a run cannot resume, as far as that shows without reading all weights."""
    find_checkpoint(settings, checkpoints(Path(settings.out)), _check_lengths, say=lambda text: None)


def _check_lengths(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    check_files(folder, manifest, digests=False)
    return manifest


def _advice(path: Path) -> str:
    """Which other checkpoint beside this one to resume."""
    for other in checkpoints(path.parent):
        if other.name != path.name:
            try:
                _check_lengths(other)
            except CheckpointError:
                continue
            return f"The newest complete one beside it: --resume {other}"
    return f"No other checkpoint in {path.parent} is complete"


def _rank_and_step(path: Path) -> tuple[int, int] | None:
    """What a rank's file says of itself, or None where its header cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            stated = file.metadata() or {}
        return int(stated["rank"]), int(stated["step"])
    except (SafetensorError, KeyError, ValueError):
        return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
