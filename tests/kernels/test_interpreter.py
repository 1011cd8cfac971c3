"""Runs `interpreter_cases.py` with TRITON_INTERPRET=1 in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# the limit of a single test is for hangs; this test runs fifty in a row, on a machine that may be shared
@pytest.mark.timeout(1200)
def test_kernels_through_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "tests/kernels/interpreter_cases.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
