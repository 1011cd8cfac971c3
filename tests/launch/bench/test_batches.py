"""`bench batches` prints a row for each case, in which the parts make up the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_row_for_each_case():
    command = [sys.executable, ROOT / "launch/bench", "batches", "--batches", "1", "--cases", "3:64:2", "5:4096:4"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=800)
    assert run.returncode == 0, run.stderr
    head, *rows = run.stdout.splitlines()
    parts = ["mask", "layout", "plan", "schedule", "forward", "backward", "tiles", "tables"]
    assert head.split()[3:12] == [*parts, "all"]
    assert [row.split()[:3] for row in rows] == [["3", "64", "2"], ["5", "4096", "4"]]
    for row in rows:
        *times, whole = map(float, row.split()[3:])
        assert len(times) == 8
        assert abs(sum(times) - whole) < 0.01
