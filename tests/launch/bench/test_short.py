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


@pytest.mark.parametrize(("tail", "name"), [(0, "2 x 40"), (5, "2 x 40, the last 5 dead")])
def test_contestants_compute_the_same(tail, name, short, monkeypatch):
    shape = short.Shape(2, 40, 4, 2, 16, torch.float32, tail)
    found = short.contestants(shape, "cpu")
    gradients = [torch.autograd.grad(call(), leaves, dout) for call, leaves, dout in found.values()]
    assert list(found) == ["ringattn", "eager"]
    assert list(short.contestants(shape, "cpu", ["cuDNN"])) == ["ringattn"]
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(*gradients))
    assert str(shape) == f"{name}, heads 4:2, D 16, float32"
    monkeypatch.setattr(short.ra, "ring_attention", lambda q, k, v, mask: q + v.repeat_interleave(2, 2))
    with pytest.raises(SystemExit, match="eager does not compute what we do"):
        short.contestants(shape, "cpu")


def test_what_memory_does_not_hold_is_left_out(short, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.Tensor, "masked_fill", full)
    assert list(short.contestants(short.Shape(1, 8, 2, 2, 16, torch.float32), "cpu")) == ["ringattn"]


def test_the_grid_has_each_length_with_and_without_a_dead_tail(short):
    assert {(x.head_dim, x.tokens, x.tail * 8 // x.tokens) for x in short.GRID} == {
        (d, tokens, tail) for d in (64, 128) for tokens in (128, 256, 512, 1024, 2048, 4096) for tail in (0, 1)
    }
    assert {x.batch * x.tokens for x in short.GRID} == {65536}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(short):
    with pytest.raises(SystemExit, match="timed on a GPU"):
        short.main(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_contestant_is_measured():
    done = subprocess.run([sys.executable, LAUNCH / "bench", "short", "--calls", "5"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stream") == 1 + 24
