"""The overhead's benchmark runs, and a call's host time does not creep up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_overhead():
    command = [sys.executable, ROOT / "launch/bench.py", "overhead", "--world-sizes", "8", "--calls", "20", "--rounds", "10"]
    run = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    _, *lines = run.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["ring", "gather", "waves(3)", "double_ring"]
    # ten times what a quiet machine takes: a host that waits, or tables made anew in each call, take far more
    assert all(float(value) < 5000 for line in lines for value in line.split()[2:])
