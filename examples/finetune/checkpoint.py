"""Checkpoints of `finetune_long_document.py`: a folder with safetensors of each rank's part and one JSON; nothing is pickled.

With whole weights on every rank (no wrapper, DDP) rank 0 writes them; under FSDP2 every rank writes its own shards. Either way a run
resumed with the same ranks goes on with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

# settings that a run must share with the checkpoint that it resumes
RESUMED = (
    "model", "shape", "wrapper", "layout", "attention", "dtype", "vocab", "hidden", "layers", "heads", "kv_heads",
    "tokens", "heldout", "seed", "steps", "warmup", "lr", "clip",
)  # fmt: skip


def save_checkpoint(
    settings: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, document: torch.Tensor, step: int
) -> None:
    """Model, optimizer and random state, written whole or not at all, as `checkpoint-STEP/`; a collective."""
    final = Path(settings.out) / f"checkpoint-{step:06d}"
    part = final.with_name(final.name + ".part")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    if rank == 0 or settings.wrapper == "fsdp2":
        tensors = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if settings.device == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        save_file(
            {name: _local(tensor).detach().cpu().contiguous() for name, tensor in tensors.items()}, part / _file(settings, rank)
        )
    dist.barrier()
    if rank == 0:
        kept = {name: getattr(settings, name) for name in RESUMED}
        (part / "state.json").write_text(
            json.dumps(dict(step=step, ranks=settings.ranks, tokens=digest(document), settings=kept), indent=1)
        )
        tokenizer = Path(settings.out) / "tokenizer.json"
        shutil.copy(tokenizer, part / "tokenizer.json")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
    dist.barrier()


def check_resumable(settings: Any) -> None:
    """Raise ValueError if the checkpoint was written by a run with other settings; the message names the setting."""
    path = Path(settings.resume)
    if not (path / "state.json").is_file() or not (path / "tokenizer.json").is_file():
        raise ValueError(f"--resume is {path}, which is not a checkpoint's folder")
    try:
        state = json.loads((path / "state.json").read_text())
        kept, step, ranks = state["settings"], int(state["step"]), int(state["ranks"])
        settings_now = {name: getattr(settings, name) for name in kept}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--resume is {path}, whose state.json was not written by this program: {error}") from error
    for name, was in kept.items():
        now = settings_now[name]
        if now != was:
            raise ValueError(f"--{name.replace('_', '-')} is {now}, but the checkpoint's run had {was}: give that")
    if settings.wrapper == "fsdp2" and ranks != settings.ranks:
        raise ValueError(f"--ranks is {settings.ranks}, but the checkpoint's shards are those of {ranks} ranks: give that")
    if step >= settings.steps:
        raise ValueError(f"--resume is at step {step} and --steps {settings.steps}: there is nothing left to do")
    for rank in range(settings.ranks):
        if not (path / _file(settings, rank)).is_file():
            raise ValueError(f"--resume is {path}, which lacks {_file(settings, rank)}")


def load_checkpoint(settings: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, document: torch.Tensor) -> int:
    """Load a checkpoint into the model, the optimizer and the random generators. Returns the number of steps it had taken."""
    path = Path(settings.resume)
    state = json.loads((path / "state.json").read_text())
    if state["tokens"] != digest(document):
        raise ValueError("the document is not the one the checkpoint was trained on: give the same --text")
    parameters = dict(model.named_parameters())
    with safe_open(path / _file(settings, dist.get_rank()), "pt") as file, torch.no_grad():
        for name, parameter in parameters.items():
            _local(parameter).copy_(file.get_tensor(f"model.{name}"))
        # the optimizer numbers parameters by group, then by parameter
        listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(listed):
            moments = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = file.get_tensor(f"optimizer.{index}.{key}")
                if key == "step":
                    moments[key] = value.to(parameter.device if settings.device == "cuda" else "cpu")
                else:
                    moments[key] = torch.zeros_like(parameter)
                    _local(moments[key]).copy_(value)
            optimizer.state[parameter] = moments
        torch.set_rng_state(file.get_tensor("random.cpu"))
        if settings.device == "cuda":
            torch.cuda.set_rng_state(file.get_tensor("random.cuda"))
    return int(state["step"])


def digest(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]


def _file(settings: Any, rank: int) -> str:
    return f"rank-{rank:05d}.safetensors" if settings.wrapper == "fsdp2" else "rank-00000.safetensors"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
