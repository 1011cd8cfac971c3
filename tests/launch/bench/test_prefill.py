"""`bench prefill`: which chunks it compares, and a run on CPUs."""

import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


def run(*options) -> str:
    done = subprocess.run([sys.executable, LAUNCH / "bench", "prefill", *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def prefill(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    import bench.prefill

    return bench.prefill


def test_schedules_are_compared_where_the_cache_has_doubled(prefill, monkeypatch):
    arguments = Namespace(tokens=105, chunk=10)
    assert [n for n in range(0, 105, 10) if prefill.is_compared(n, arguments)] == [0, 10, 20, 40, 80, 100]
    monkeypatch.setattr(prefill, "slowest", lambda values, device: list(values))
    prefill.compare({"a": torch.ones(2), "b": torch.ones(2)}, "cpu")
    with pytest.raises(SystemExit, match="a does not compute what b does"):
        prefill.compare({"a": torch.ones(2), "b": torch.ones(2) * 1.1}, "cpu")


@pytest.mark.thorough
def test_chunks_of_a_document():
    sizes = ["--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--page-size", "16"]
    found = run("--device", "cpu", "--tokens", "150", "--chunk", "32", *sizes)
    rows = re.findall(r"^ +(\d+) +(\w+) +[\d.]+ +([\d.]+) +[\d.e-]+ +\d+%$", found, re.MULTILINE)
    compared = ["default", "pass_q", "ring"]
    wanted = [(n, name) for n in (0, 32, 64, 96, 128) for name in (compared if n != 96 else compared[:1])]
    assert [(int(cached), name) for cached, name, _ in rows] == wanted
    assert all(float(layer) > 0 for *_, layer in rows)
    assert "training forward of the whole document" in found and "all chunks by default" in found


@pytest.mark.thorough
def test_plans_alone():
    sizes = ["--tokens", "3000", "--chunk", "1024", "--heads", "4", "--kv-heads", "2", "--page-size", "16"]
    found = run("--device", "cpu", "--plans", "--world-size", "3", *sizes)
    rows = re.findall(r"^ +([\d,]+) +(\w+) +[\d.]+$", found, re.MULTILINE)
    assert rows == [(n, name) for n in ("0", "1,024", "2,048") for name in ("default", "pass_q", "ring")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_gpus():
    assert run("--tokens", "20000", "--chunk", "8192").count("pass_q") == 3
