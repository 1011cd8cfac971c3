"""`bench doors`: every way that runs on CPUs has the same losses, and its steps hold what they should."""

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
TOY = dict(tokens=120, mean=30, layers=2, width=32, inner=48, heads=4, kv_heads=2, vocabulary=61, steps=2, rate=1e-2, rounds=1)
TOY |= {"warm-up": 1}


def run(tmp_path, *options):
    toy = [part for name, value in TOY.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, LAUNCH / "bench", "doors", "--device", "cpu", *toy, *options, "--out", tmp_path]
    return subprocess.run(command, capture_output=True, text=True, timeout=800)


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_all_ways_have_the_same_losses(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "doors.json").read_text())
    assert (record["world_size"], record["layers"]) == (2, 2)
    ways = [
        "attach",
        "zigzag",
        "padded",
        "accelerate",
        "trainer",
        *(["trl"] if importlib.util.find_spec("trl") else []),
        "replicas",
    ]
    assert [(row["case"], row["way"]) for row in record["rows"]] == [(case, way) for case in ("packed", "whole") for way in ways]
    for row in record["rows"]:
        assert row["loss_difference"] < 1e-5
        assert row["tokens_per_second"] > 0
    # the steps differ, and so do their losses
    assert len({row["last_loss"] for row in record["rows"] if row["way"] == "attach"}) == 2
    assert done.stdout.count("| replicas |") == 2


@pytest.mark.thorough
def test_padded_rows_have_the_losses_of_packed_ones(tmp_path):
    done = run(tmp_path, "--world-size", "1", "--ways", "attach", "context_parallel", "--checkpoint")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "doors.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["attach", "context_parallel"] * 2
    assert all(row["loss_difference"] < 1e-5 for row in rows)
    assert rows[1]["computed_tokens"] > 1


@pytest.mark.thorough
def test_torchs_rings_are_refused_on_cpus(tmp_path):
    done = run(tmp_path, "--ways", "attach", "context_parallel")
    assert done.returncode and "context_parallel is among --ways, but on CPUs it runs with 1 rank only" in done.stderr


@pytest.fixture
def ways(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    from bench import doors_ways

    return doors_ways


def test_a_step_has_a_row_for_each_rank(ways):
    given = Namespace(tokens=100, mean=20, sigma=1.0, vocabulary=50, warm_up=1, steps=2)
    steps = ways.make_steps("packed", given, 3)
    assert len(steps) == 3
    for step in steps:
        assert [row.tokens for row in step.rows] == [100] * 3
        assert step.counted == sum(int((row.packed["shift_labels"] != -100).sum()) for row in step.rows)
    assert steps[0].rows[0].lengths != steps[1].rows[0].lengths
    (whole, *_) = ways.make_steps("whole", given, 1)
    assert whole.rows[0].lengths == [100] and whole.counted == 99


def test_documents_may_be_the_chapters_of_a_text(ways, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"A title\nGe1:1 In the beginning\nGe1:2 And\n\nGe2:1 Thus\nEx1:1 Now\n")
    chapters = ways.iter_chapters(text)
    found = {bytes(next(chapters).tolist()) for _ in range(3)}
    assert found == {b"Ge1:1 In the beginning\nGe1:2 And\n", b"Ge2:1 Thus\n", b"Ex1:1 Now\n"}
    given = Namespace(tokens=60, text=text, warm_up=1, steps=1)
    first, second = (step.rows[0] for step in ways.make_steps("chapters", given, 1))
    # 53 bytes of three chapters, and 7 of the first one again
    assert first.tokens == second.tokens == 60 and len(first.documents) == 4 and first.lengths != second.lengths
    text.write_text("no verses")
    with pytest.raises(ValueError, match="no line that begins like `Ge1:3 `"):
        ways.iter_chapters(text)


def test_chapters_need_a_text(ways):
    from bench import doors

    with pytest.raises(SystemExit, match="give a file, and 256 or more"):
        doors.main(Namespace(cases=["chapters"], text=None, vocabulary=61))


def test_padded_rows_have_the_labels_of_packed_ones(ways):
    row = ways.TrainedRow([torch.arange(1, n + 1) for n in (5, 3, 9)])
    ids, labels = row.padded(4)
    assert ids.shape == labels.shape == (3, 12)
    assert ids[1].tolist() == [1, 2, 3] + [0] * 9 and labels[1].tolist() == [2, 3] + [-100] * 10
    packed = row.packed["shift_labels"]
    assert labels[labels != -100].tolist() == packed[packed != -100].tolist()
    step = ways.TrainedStep([row])
    assert ways.WAYS["context_parallel"].computed([step], 2) == pytest.approx(36 / 17)
    assert ways.WAYS["padded"].computed([step], 2) == pytest.approx(27 / 17)
    assert ways.WAYS["attach"].computed([step], 2) == 1
