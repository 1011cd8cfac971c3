"""The ring benchmark runs, at toy size over gloo."""

import json
import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def test_all_methods_are_measured(tmp_path):
    sizes = ["--tokens", "64", "96", "128", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--seconds", "0"]
    command = [sys.executable, LAUNCH / "bench.py", "ring", "--device", "cpu", *sizes, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "ring.json").read_text())
    assert record["world_size"] == 2
    assert [(row["tokens"], row["method"]) for row in record["rows"]] == [
        (tokens, method) for tokens in (64, 96, 128) for method in ("ring", "gather", "ulysses", "local")
    ]
    assert all(row["forward_backward_ms"] > row["forward_ms"] > 0 for row in record["rows"])
    assert "of local" in done.stdout
