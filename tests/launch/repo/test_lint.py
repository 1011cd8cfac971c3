"""The linter, the formatter and the type checker of `make lint` find nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = {
    "linter": ["ruff", "check"],
    "formatter": ["ruff", "format", "--check"],
    "type checker": ["pyrefly", "check", "--python-interpreter-path", sys.executable],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_nothing_is_found(command):
    # a GPU host without network runs the other tests without them
    pytest.importorskip(command[0])
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
