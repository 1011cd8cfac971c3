"""`bench steady`: steps that keep memory are noticed, and a run at toy size over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


@pytest.mark.thorough
def test_steps_are_counted_on_every_rank(tmp_path):
    toy = ["--tokens", 32, "--steps", 3, "--heads", 2, "--kv-heads", 1, "--head-dim", 8, "--methods", "ring", "--out", tmp_path]
    command = [sys.executable, LAUNCH / "bench", "steady", "--device", "cpu", *map(str, toy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "steady.json").read_text())
    assert (record["world_size"], record["tokens"]) == (2, 32)
    (row,) = record["rows"]
    assert (row["method"], row["steps"]) == ("ring", 3)
    assert row["ms_a_step"] > 0
    assert "ring: 3 steps" in done.stdout


# larger than any freed memory that the allocator could reuse
BLOCK = 40 << 20  # bytes


@pytest.mark.parametrize("kept", [0, BLOCK], ids=["nothing", "a block"])
def test_memory_that_every_step_keeps_is_seen(monkeypatch, kept):
    monkeypatch.syspath_prepend(LAUNCH)
    from bench import steady

    monkeypatch.setattr(steady, "_WARM_UP", 1)
    monkeypatch.setattr(steady.dist, "barrier", lambda: None)
    monkeypatch.setattr(steady, "slowest", lambda values, device: values)
    held = []
    row = steady.steady(lambda: held.append(bytes([1]) * kept), 4, "cpu")
    assert (row["host_bytes"] > 3 * BLOCK) == bool(kept)
