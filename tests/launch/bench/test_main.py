"""`python launch/bench`: its list of commands, where it runs, and which names it makes importable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "launch" / "bench"


def run(*arguments, cwd, code: str | None = None) -> subprocess.CompletedProcess:
    """The benchmarks as a person starts them, without any help from PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *(["-c", code] if code else [BENCH]), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=cwd, env=environment)


def test_help_lists_every_command_with_a_sentence(tmp_path):
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for path in BENCH.glob("*.py"):
        if "def add_arguments(" in path.read_text() and path.stem != "__main__":
            assert re.search(rf"^ +{path.stem} +[A-Z][^.]{{30,}}", done.stdout, re.MULTILINE), path.stem


@pytest.mark.parametrize("command", ["fit", "ring", "pictures"])
@pytest.mark.thorough
def test_each_command_describes_itself_from_any_folder(tmp_path, command):
    done = run(command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"usage: launch/bench {command}" in done.stdout


@pytest.mark.thorough
def test_worker_processes_find_their_modules_from_any_folder(tmp_path):
    toy = ["--tokens", 16, "--heads", 2, "--kv-heads", 1, "--head-dim", 8, "--seconds", 0, "--methods", "ring", "--out", "out"]
    done = run("ring", "--device", "cpu", *toy, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"command": "python launch/bench ring --device cpu' in (tmp_path / "out" / "ring.json").read_text()


@pytest.mark.thorough
def test_the_folder_itself_is_not_on_the_path(tmp_path):
    """Its `kernels.py` would hide the package `kernels` that transformers looks for."""
    code = f"""
import runpy, sys
sys.path.insert(0, {str(BENCH)!r})
sys.argv = ["bench", "sweep", "--help"]
try:
    runpy.run_path({str(BENCH / "__main__.py")!r}, run_name="__main__")
except SystemExit:
    pass
print(sorted(name for name in sys.modules if name.split(".")[0] in ("bench", "ring", "fit", "shared")))
print(any(path.endswith("launch/bench") for path in sys.path))
"""
    done = run(cwd=tmp_path, code=code)
    names, found = done.stdout.splitlines()[-2:]
    assert "'bench.sweep'" in names
    assert "'shared" not in names
    assert found == "False"
