"""Programs as a person starts them, and what they wrote.

`start` makes a fresh process, which costs seconds of imports; `run` forks one from a server that has imported everything, once for
all tests, and so takes no longer than the program's own work. Without `gpus=True` no program sees a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import multiprocessing
import os
import pickle
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROGRAM = EXAMPLES / "finetune_long_document.py"
SHORT = ["--device", "cpu", "--vocab", "300", "--tokens", "61", "--steps", "4", "--warmup", "1", "--generate", "3"]
TOY = ["--hidden", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", *SHORT]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
needs_diffusers = pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="needs diffusers")
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
needs_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")

_TIMEOUT = 800
_FORKS = multiprocessing.get_context("forkserver")
# what programs import; those that are not installed are left out
_FORKS.set_forkserver_preload(
    [
        "torch",
        "ringattn",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "accelerate",
        "deepspeed",
        "matplotlib.figure",
    ]
)


def environment(gpus: bool = False) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    found |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    return found if gpus else found | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def start(*command: object, gpus: bool = False) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment(gpus), capture_output=True, text=True, timeout=_TIMEOUT
    )


def succeed(*command: object, gpus: bool = False) -> str:
    done = start(*command, gpus=gpus)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(path: Path, *arguments: object, ranks: int = 0, within: tuple[Callable, ...] = ()) -> str:
    """Run a program and return what it printed. Fails unless every process ends with exit code 0.

    ranks: how many processes, with the variables that torchrun gives them; 0: one process without.
    within: context managers of this module that the program runs in.
    """
    with patch.dict(os.environ, environment(), clear=True):
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder, held_port() as port:
        variables: list[dict[str, str]] = [{}]
        if ranks:
            common = dict(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="localhost", MASTER_PORT=port)
            variables = [{name: str(value) for name, value in dict(common, RANK=i, LOCAL_RANK=i).items()} for i in range(ranks)]
        outputs = [Path(folder) / str(i) for i in range(len(variables))]
        given = str(path), list(map(str, arguments)), within
        processes = [_FORKS.Process(target=_run, args=(*given, own, str(out))) for own, out in zip(variables, outputs)]
        for process in processes:
            process.start()
        wait_for(processes)
        printed = "".join(out.read_text() for out in outputs if out.exists())
    assert [process.exitcode for process in processes] == [0] * len(processes), printed
    return printed


def call(function: Callable, *arguments: Any, ranks: int) -> list[Any]:
    """Call a function of a module on ranks of a gloo group, forked as `run` does; returns their results."""
    with patch.dict(os.environ, environment(), clear=True):
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder, held_port() as port:
        common = dict(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="localhost", MASTER_PORT=port)
        outputs = [Path(folder) / str(i) for i in range(ranks)]
        processes = []
        for i, out in enumerate(outputs):
            variables = {name: str(value) for name, value in dict(common, RANK=i, LOCAL_RANK=i).items()}
            processes.append(_FORKS.Process(target=_call, args=(function, arguments, variables, str(out))))
            processes[-1].start()
        wait_for(processes)
        printed = "".join(out.read_text() for out in outputs if out.exists())
        assert [process.exitcode for process in processes] == [0] * ranks, printed
        return [pickle.loads(out.with_suffix(".result").read_bytes()) for out in outputs]


def wait_for(processes: Sequence[BaseProcess]) -> None:
    """Wait until all have ended. Those that wait for one that failed, or take too long, are killed."""
    running, deadline = list(processes), time.monotonic() + _TIMEOUT
    while running and wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
        if any(process.exitcode for process in running):
            deadline = min(deadline, time.monotonic() + 5)
        running = [process for process in running if process.exitcode is None]
    for process in processes:
        process.kill()
        process.join()


def _call(function: Callable, arguments: tuple, variables: dict[str, str], out: str) -> None:
    """In the process that was forked."""
    _begin(out, variables)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    result = function(*arguments)
    Path(out).with_suffix(".result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def _begin(out: str, variables: dict[str, str]) -> None:
    """In the process that was forked, before anything else: its output goes to a file."""
    gc.freeze()  # garbage is not looked for among what was imported
    with open(out, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(variables)


def _run(path: str, arguments: list[str], within: tuple[Callable, ...], variables: dict[str, str], out: str) -> None:
    """In the process that was forked."""
    _begin(out, variables)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    with contextlib.ExitStack() as stack:
        for manager in within:
            stack.enter_context(manager())
        runpy.run_path(path, run_name="__main__")


def dense_flash_attn(q, k, v, causal):
    """torch's attention with flash-attention's order of axes."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


@contextlib.contextmanager
def dense_attention():
    """Models keep their own attention: torch's, over all that they are given."""
    with (
        patch("ringattn.replace_attention", lambda *args, **options: None),
        patch("ringattn.integrations.huggingface.attach", lambda *args, **options: None),
        patch("ringattn.integrations.ring_flash_attn.zigzag_ring_flash_attn_func", dense_flash_attn),
    ):
        yield


@contextlib.contextmanager
def plain_sgd():
    """AdamW takes the steps of SGD: its own are the same however gradients are scaled."""
    import torch

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:  # Lightning makes gradients in it
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-50 * group["lr"])

    with patch("torch.optim.AdamW.step", step):
        yield


@contextlib.contextmanager
def held_port():
    """A port that the system gives to nobody who asks for any free port, but on which a store can listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("localhost", 0))
        yield holder.getsockname()[1]


def losses(printed: str) -> list[float]:
    """Of the steps that a `train_*.py` printed."""
    found = re.findall(r"step (\d+): loss (\S+)", printed)
    assert [int(step) for step, _ in found] == list(range(len(found)))
    return [float(loss) for _, loss in found]


def figures(out: Path) -> dict:
    return json.loads((out / "figures.json").read_text())
