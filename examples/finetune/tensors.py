"""The tensors of a checkpoint: which rank writes which rows to its file, and who reads them again.

A tensor that is whole on every rank is in rank 0's file. One that FSDP2 has sharded is in parts, each rank's rows of dimension 0 in the
rank's own file. So another number of ranks, or another wrapper, finds its own rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .manifest import Manifest, describe
from .ranks import CheckpointError


def tensors_to_write(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's: sharded tensors, and on rank 0 what is whole, with the random states of all ranks; a collective."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter
        tensors |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state()
    for name, state in states.items():
        row = state.to(device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        tensors[name] = torch.stack(rows)
    return {name: tensor for name, tensor in tensors.items() if dist.get_rank() == 0 or _is_sharded(tensor)}


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], step: int) -> dict | None:
    """Write this rank's file; returns its entry in the manifest, or None if the rank has nothing to write."""
    rank = dist.get_rank()
    local = {name: _local(tensor).detach().cpu().contiguous() for name, tensor in tensors.items()}
    local = {name: tensor for name, tensor in local.items() if tensor.numel()}
    if not local:
        return None
    path = folder / f"rank-{rank:05d}.safetensors"
    try:
        save_file(local, path, metadata=dict(rank=str(rank), step=str(step)))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    parts = {
        name: dict(
            shape=list(tensors[name].shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            first_row=_first_row(tensors[name]),
            rows=tensor.shape[0] if tensor.dim() else 1,
        )
        for name, tensor in local.items()
    }
    return describe(path, rank=rank, step=step, tensors=parts)


@torch.no_grad()
def read_tensors(
    folder: Path, manifest: Manifest, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Fill the model, the optimizer and the random generators of this rank."""
    saved = _Saved(folder, manifest)
    for name, parameter in model.named_parameters():
        saved.read_into(f"model.{name}", parameter)
        if not saved.holds(f"optimizer.step.{name}"):
            continue  # no step has used it
        state = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        for key, moment in state.items():
            saved.read_into(f"optimizer.{key}.{name}", moment)
        # fused AdamW counts its steps on the device
        optimizer.state[parameter] = {"step": saved.whole(f"optimizer.step.{name}").to(device), **state}
    # another number of ranks goes on from one state, as a new run begins
    row = dist.get_rank() if manifest["settings"]["ranks"] == dist.get_world_size() else 0
    torch.set_rng_state(saved.whole("random.cpu")[row].clone())
    if device.type == "cuda" and saved.holds("random.cuda"):
        torch.cuda.set_rng_state(saved.whole("random.cuda")[row].clone())


class _Saved:
    """The tensors of a checkpoint, from whichever files hold their rows."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        self.parts: dict[str, list[tuple[str, dict]]] = {}  # of a tensor: files and what they hold, in the order of rows
        for file, entry in sorted(manifest["files"].items()):
            for name, part in entry.get("tensors", {}).items():
                self.parts.setdefault(name, []).append((file, part))

    def holds(self, name: str) -> bool:
        return name in self.parts

    def whole(self, name: str) -> torch.Tensor:
        """A tensor that rank 0 has written."""
        return self._open(self.parts[name][0][0]).get_tensor(name)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill a parameter, or this rank's rows of a sharded one."""
        shape = self.parts[name][0][1]["shape"] if self.holds(name) else "not there"
        if shape != list(target.shape):
            raise CheckpointError(
                f"{self.folder}: {name} is {shape}, but {list(target.shape)} in this model: give the --model of the checkpoint's run"
            )
        local = _local(target)
        if not local.dim():
            local.copy_(self.whole(name))
            return
        first = _first_row(target)
        for file, part in self.parts[name]:
            begin, end = max(first, part["first_row"]), min(first + len(local), part["first_row"] + part["rows"])
            if begin < end:
                rows = self._open(file).get_slice(name)[begin - part["first_row"] : end - part["first_row"]]
                local[begin - first : end - first].copy_(rows)

    def _open(self, file: str) -> Any:
        if file not in self.files:
            self.files[file] = safe_open(self.folder / file, "pt")
        return self.files[file]


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _first_row(tensor: torch.Tensor) -> int:
    """The first row of this rank's part. FSDP2 deals rows as torch.chunk does."""
    if not _is_sharded(tensor):
        return 0
    rows = tensor.shape[0]
    return min(rows, dist.get_rank() * -(-rows // dist.get_world_size()))
