"""`bench packed`: its batches, and runs at toy size over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
TOY = [
    "--tokens",
    "96",
    "--means",
    "20",
    "60",
    "--steps",
    "2",
    "--rounds",
    "2",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "8",
]


def run(tmp_path, *options):
    command = [sys.executable, LAUNCH / "bench", "packed", "--device", "cpu", *TOY, *options, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "packed.json").read_text()), done.stdout


@pytest.mark.thorough
def test_layouts_are_compared_on_new_batches(tmp_path):
    record, said = run(tmp_path, "--calls", "2")
    assert (record["world_size"], record["steps"], record["heads"], record["calls"]) == (2, 2, 4, 2)
    assert [(row["mean_length"], row["batches"], row["layout"]) for row in record["rows"]] == [
        (mean, way, name)
        for mean in (20, 60)
        for way in ("new", "ahead", "prepared", "seen")
        for name in ("zigzag", "balanced", "placed")
    ]
    for row in record["rows"]:
        assert row["tflops"] > 0
        assert row["ms"] > 0
        assert row["work"] >= 1
    assert max(row["work"] for row in record["rows"] if row["layout"] == "placed") < 1.2
    assert said.count("placed") == 8


@pytest.mark.thorough
def test_training(tmp_path):
    record, said = run(
        tmp_path, "--train", "--layers", "1", "--width", "32", "--means", "30", "--layouts", "placed", "zigzag", "--batches", "new"
    )
    assert [row["layout"] for row in record["rows"]] == ["placed", "zigzag"]
    assert all(row["tokens_per_second"] > 0 and row["tflops"] is None for row in record["rows"])
    assert "tokens/s" in said


@pytest.mark.parametrize("seed", [0, 1])
def test_batches_fill_their_tokens(monkeypatch, seed):
    monkeypatch.syspath_prepend(LAUNCH)
    from bench.packed import make_batch

    batch = make_batch(50, 1.0, 100_000, seed)
    assert sum(batch.lengths) == batch.tokens == 100_000
    assert 45 < 100_000 / len(batch.lengths) < 55
    assert make_batch(50, 1.0, 100_000, seed).lengths == batch.lengths


def test_new_batches_have_the_same_documents_in_another_order(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    from bench.packed import make_batch, reordered

    batch = make_batch(50, 1.0, 1000, 0)
    others = [reordered(batch, seed) for seed in range(1, 6)]
    assert all(sorted(other.lengths) == sorted(batch.lengths) for other in others)
    assert len({batch.mask.digest, *(other.mask.digest for other in others)}) == 6
