"""`bench decode`: its contestants compute the same, and it measures on CPUs, with one rank and with two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
TOY = ["--device", "cpu", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--page-size", "16", "--repeats", "2"]


@pytest.fixture
def decode(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    import bench.decode

    return bench.decode


def test_contestants_compute_the_same(decode):
    load = decode.DecodeLoad(3, 210, 4, 2, 8, 16, torch.float32, "cpu")
    steps = decode.contestants(load)
    assert list(steps) == ["pages", "in order", "one page", "SDPA"]
    decode.compare(steps)
    assert list(decode.contestants(load, ["SDPA", "pages"])) == ["pages", "SDPA"]
    assert load.layer_bytes == 3 * 70 * 2 * 8 * 2 * 4
    first, other = (step()[0] for step in list(steps.values())[:2])
    assert torch.equal(first, other) and first.std() > 0.01
    with pytest.raises(SystemExit, match="SDPA does not compute what pages does"):
        decode.compare(steps | {"SDPA": lambda: [x + 1 for x in steps["SDPA"]()]})


def run(*options) -> str:
    done = subprocess.run([sys.executable, LAUNCH / "bench", "decode", *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_one_rank():
    found = run(*TOY, "--batches", "1", "2", "--tokens", "100", "--host")
    rate = r" +[\d.]+ GB/s \( *\d+%, *\d+%\)"
    assert len(re.findall(rf"tokens   copy +[\d.]+ GB/s   pages{rate}   in order{rate}   SDPA{rate}", found)) == 2
    assert len(re.findall(r"tokens   host   pages +[\d.]+ us   in order +[\d.]+ us   SDPA", found)) == 2


@pytest.mark.thorough
def test_two_ranks():
    found = run(*TOY, "--batches", "2", "--tokens", "100", "--world-size", "2")
    assert re.search(r"2 x +50 tokens   on 2 ranks, us a layer   default +[\d.]+   all-gather +[\d.]+   none +[\d.]+", found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu():
    assert run("--batches", "8", "--tokens", "65536", "--world-size", "1").count("SDPA") == 1
