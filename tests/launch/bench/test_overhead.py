"""The benchmark of the host's time runs, and a call's host time stays small."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def overhead(*options: str) -> list[str]:
    command = [sys.executable, ROOT / "launch/bench", "overhead", "--device", "cpu", *options]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=800)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.thorough
def test_overhead():
    _, *lines = overhead("--world-sizes", "8", "--calls", "20", "--rounds", "10")
    assert [line.split()[1] for line in lines] == ["ring", "gather", "waves(3)", "double_ring"]
    # ten times the time of a quiet machine; a host that waits, or that makes tables again in each call, takes far more
    assert all(float(value) < 5000 for line in lines for value in line.split()[2:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "0"], "--layers is 0, but must be at least 1"),
        (["--methods", "local"], "method 'local' makes no calls of attention"),
        (["--methods", "rings"], "method 'rings' is not one of"),
        (["--score", "sink"], "--score is 'sink', but must be one of none, softcap, "),
        (["--score", "sinks", "--methods", "ring", "ulysses"], "method 'ulysses' is a peer, which modifies no scores"),
    ],
)
def test_refusal(options, message, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch")
    from bench import overhead as command

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ValueError, match=message):
        command.main(parser.parse_args(["--real", "--device", "cpu", *options]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [[], ["--one-thread"], ["--layers", "2"], ["--score", "sinks", "--head-dim", "64"]],
    ids=["", "one thread", "layers", "score"],
)
def test_the_time_of_whole_calls_on_all_ranks(how):
    peers = [] if "--score" in how else ["ulysses"]
    toy = ["--tokens", "32", "--rounds", "1", "--calls", "1", "--methods", "ring", *peers, "--profile"]
    heading, *lines = overhead("--real", *toy, *how)
    assert "32 tokens on 2 ranks" in heading
    rows = [line.split() for line in lines if line.strip().startswith(("ring ", "ulysses "))]
    assert [row[0] for row in rows] == ["ring", *peers]
    assert all(float(value) > 0 for row in rows for value in row[1:])
    # only the first rank prints its profile
    assert sum("function calls" in line for line in lines) == 1 + len(peers)
