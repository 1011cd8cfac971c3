"""`bench cross`: its methods are compared, and it measures on CPUs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


def run(*options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, LAUNCH / "bench", "cross", *options], capture_output=True, text=True, timeout=600)


@pytest.fixture
def cross(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    import bench.cross

    return bench.cross


class Known:
    """A method with these results."""

    def __init__(self, *results):
        self.results = lambda: tuple(map(torch.tensor, results))


def test_methods_that_differ_end_the_run(cross, monkeypatch):
    monkeypatch.setattr(cross, "slowest", lambda values, device: list(values))
    cross.compare({"a": Known([1.0, 2.0], [3.0]), "b": Known([1.0, 2.01], [3.0])}, "cpu")
    for off in ([1.0, 2.0], [3.3]), ([1.0, float("nan")], [3.0]):
        with pytest.raises(SystemExit, match="b does not compute what a does"):
            cross.compare({"a": Known([1.0, 2.0], [3.0]), "b": Known(*off)}, "cpu")


@pytest.mark.thorough
def test_all_methods_are_measured():
    done = run(
        "--device", "cpu", "--cases", "64x16", "16x96", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--rounds", "2"
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\d+x\d+) +(\S+) +([\d.]+) +([\d.]+) +[\d.e-]+ +([\d.]+|-) +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)
    names = ["default", "ring", "gather", "pass_q", "gather+cuDNN"]
    assert [row[:2] for row in rows] == [(case, name) for case in ("64x16", "16x96") for name in names]
    assert all(float(forward) > 0 and float(both) > 0 for _, _, forward, both, _ in rows)
    assert [row[4] == "-" for row in rows] == [False] * 4 + [True] + [False] * 4 + [True]


@pytest.mark.thorough
def test_cases_that_no_method_takes_are_refused():
    for case, message in (("64", "'64' is no case"), ("63x16", "case 63x16 does not divide among 2 ranks")):
        done = run("--device", "cpu", "--cases", case)
        assert done.returncode and message in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_on_gpus():
    done = run("--cases", "4096x1024", "--world-size", "2", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4096x1024") == 5
