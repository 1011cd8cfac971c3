"""`bench linear`: layers on ranks against one process, and its table, on CPUs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


def run(*options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, LAUNCH / "bench", "linear", *options], capture_output=True, text=True, timeout=600)


def check(done, gpus, methods):
    """Both layers are compared, and each method has a row; several ranks send something."""
    assert done.returncode == 0, done.stderr
    compared = re.findall(r"^(\w+), \d ranks, .*: out ([\d.e-]+)  dx ([\d.e-]+)  weights ([\d.e-]+)$", done.stdout, re.MULTILINE)
    assert {row[0] for row in compared} == {"gdn", "mamba2"}
    row = r"^ *(\w+) +(\d) +(\d+) +(\w+) +[\d.]+ +([\d.]+) +[\d.e+]+ +([\d.]+) +([\d.]+) +([\d.]*)$"
    rows = re.findall(row, done.stdout, re.MULTILINE)
    wanted = [(name, n, method) for name in ("gdn", "mamba2") for n in gpus for method in methods]
    assert [(name, n, method) for name, n, _, method, *_ in rows] == wanted
    assert all((float(sent) > 0) == (n != "1") for _, n, _, _, _, sent, _, _ in rows)
    assert all(ratio for _, n, *_, ratio in rows if n != "1")


@pytest.mark.thorough
def test_layers_on_one_rank_and_on_two():
    small = ["--device", "cpu", "--small", "--tokens", "600", "--check", "100", "--rounds", "2"]
    check(run(*small, "--world-size", "2", "--methods", "ours", "torch"), ["1", "2"], ["ours", "torch"])


@pytest.mark.thorough
def test_what_cannot_run_is_refused():
    for options, message in (
        (["--rounds", "0"], "must be at least 1"),
        (["--device", "cpu", "--methods", "fla"], "needs flash-linear"),
    ):
        done = run(*options)
        assert done.returncode
        assert message in done.stderr


@pytest.mark.gpu
def test_on_gpus():
    n = torch.cuda.device_count()
    check(run("--tokens", "999", "--rounds", "2", "--methods", "ours", "--check", "500"), ["1", str(n)][: min(n, 2)], ["ours"])
