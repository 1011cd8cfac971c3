"""Programs that start a server's engine on CPUs, such as `tests/vllm_on_cpus.py`: how they run, and what they must answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def installed(program: Path, folder: Path, group: str) -> Path:
    """A program's copy in a folder that looks like an installed package, whose function `plug` is an entry point of a group."""
    name = program.stem
    information = folder / f"{name}-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:plug\n")
    return Path(shutil.copy(program, folder))


def answers(program: Path, *arguments: object, **variables: str) -> tuple[dict[str, Any], str]:
    """The report that a program writes to the file of its last argument, and what it printed."""
    result = program.parent / "result.json"
    path = os.pathsep.join(map(str, (program.parent, ROOT, ROOT / "kernels")))
    command = [sys.executable, program, *arguments, result]
    environment = os.environ | {"PYTHONPATH": path} | variables
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return json.loads(result.read_text()), ended.stdout


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Two reports have the same tokens, and log-probabilities within 1e-4."""
    assert found["tokens"] == wanted["tokens"]
    for a, b in zip(found["logprobs"], wanted["logprobs"]):
        assert len(a) == len(b)
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=1e-4)
