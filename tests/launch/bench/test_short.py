"""`bench short`: its contestants compute the same; without a GPU it says so."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


@pytest.fixture
def short(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    import bench.short

    return bench.short


def test_contestants_compute_the_same(short, monkeypatch):
    shape = short.Shape(2, 40, 4, 2, 16, torch.float32)
    found = short.contestants(shape, "cpu")
    gradients = [torch.autograd.grad(call(), leaves, dout) for call, leaves, dout in found.values()]
    assert list(found) == ["ringattn", "torch"]
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(*gradients))
    assert str(shape) == "2 x 40, heads 4:2, D 16, float32"
    monkeypatch.setattr(short.ra, "ring_attention", lambda q, k, v: q + v.repeat_interleave(2, 2))
    with pytest.raises(SystemExit, match="torch does not compute what we do"):
        short.contestants(shape, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(short):
    with pytest.raises(SystemExit, match="timed on a GPU"):
        short.main(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_contestant_is_measured():
    done = subprocess.run([sys.executable, LAUNCH / "bench", "short", "--calls", "5"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stream") == 1 + 18
