"""The pictures of docs/performance.md, and the figures that they are drawn from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECORDS = json.loads((ROOT / "docs" / "performance.json").read_text())
NAMES = ("performance_kernels.png", "performance_ring.png")


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch")
    from bench import pictures

    return pictures


def test_the_command_draws_both_pictures(pictures, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    pictures.add_arguments(parser)
    pictures.main(parser.parse_args(["--out", str(tmp_path / "deep")]))
    assert "wrote performance_kernels.png and performance_ring.png" in capsys.readouterr().out
    for name in NAMES:
        data = (tmp_path / "deep" / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 120 << 10


@pytest.mark.parametrize("path", [ROOT / "docs" / "images" / name for name in NAMES], ids=NAMES)
def test_the_committed_pictures_are_small(path):
    assert path.stat().st_size < 120 << 10


@pytest.mark.parametrize("name", RECORDS)
def test_records_say_machine_date_and_message(name):
    record = RECORDS[name]
    assert {"title", "device", "world_size", "setting", "torch", "triton", "date", "rows"} <= set(record)
    assert len(record["rows"]) >= 8


def test_the_figures_bear_out_the_titles():
    """The titles are written by hand: from 8k tokens (kernels) and 32k (ring) on they must be true of the rows."""
    for row in RECORDS["kernels"]["rows"]:
        for direction in ("forward", "backward"):
            rates = {name: rate[direction]["tflops"] for name, rate in row["rates"].items()}
            if row["tokens"] >= 8192:
                assert rates["ringattn"] > rates["cudnn"]
                assert rates["ringattn"] > 0.93 * rates["flash4"]
    speeds = {(row["tokens"], row["method"]): row["forward_backward_tflops"] for row in RECORDS["ring"]["rows"]}
    for (tokens, method), speed in speeds.items():
        if tokens >= 32768 and not method.startswith("default"):
            ours = speeds[tokens, "default+symmetric"]
            assert ours > (0.97 * speed if method == "ulysses+flash4" else speed)


def test_a_run_without_cudnn_has_no_picture(pictures, tmp_path):
    from bench import kernels_picture

    with pytest.raises(ValueError, match="measure with --peers cudnn"):
        kernels_picture.plot({"device": "GPU", "rows": [{"case": "one", "rates": {"ringattn": {}}}]}, tmp_path / "x.png")
