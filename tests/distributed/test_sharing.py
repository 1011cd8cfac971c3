"""Ranks that share a GPU: what their processes are told, and that they give the same bits over NCCL and over copy engines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringattn import sharing
from ringattn.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
SIXTH = {"RANK": "13", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(("gpus", "local_rank"), [(1, "0"), (2, "1"), (4, "1"), (7, "5")])
def test_ranks_that_are_more_than_the_gpus_take_them_in_turn(gpus, local_rank):
    told = {"LOCAL_RANK": local_rank, "NCCL_HOSTID": "rank 13", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    assert sharing._settings(SIXTH, gpus) == told


@pytest.mark.parametrize("gpus", [8, 9])
def test_ranks_with_a_gpu_each_are_told_nothing(gpus):
    assert sharing._settings(SIXTH, gpus) == {}


@pytest.mark.parametrize(
    "odd", [{}, {**SIXTH, "RANK": "first"}, {"RANK": "0", "LOCAL_RANK": "0"}], ids=["none", "no number", "one less"]
)
def test_outside_of_torchrun(odd):
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE are not set: start ranks with torchrun"):
        sharing._settings(odd, 1)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    for name, value in SIXTH.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        main(["share", "train.py"])
    assert "share: error: there is no GPU here that ranks could share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["train.py", "--steps", "3", "-m", ""], ["train.py", "--steps", "3", "-m", ""]),
        (["-m", "ringattn", "doctor", "--json", "x"], ["-m", "ringattn", "doctor", "--json", "x"]),
    ],
    ids=["script", "module"],
)
def test_the_program_gets_its_arguments_as_they_are(monkeypatch, given, command):
    for name, value in SIXTH.items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    main(["share", *given])
    ((path, words, environment),) = started
    assert (path, words) == (sys.executable, [sys.executable, *command])
    assert environment == {**os.environ, **sharing.shared_gpu(13, 5, 8, 4)}


PROGRAM = """
import os
import torch
import torch.distributed as dist
import ringattn as ra

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
q, k, v, dout = (torch.randn(1, 300, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2, 4))
torch.use_deterministic_algorithms(True, warn_only=True)
results = []
for group in (ra.process_group(), ra.symmetric()):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ra.ring_attention(*leaves, group=group)
    results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
dist.destroy_process_group()
print("the same")
"""


@pytest.mark.gpu
def test_a_program_whose_ranks_share_a_gpu(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    quiet = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    environment = {**os.environ, **quiet, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*torchrun, "-m", "ringattn", "share", tmp_path / "train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("the same", done.stdout)) == 3, done.stdout
