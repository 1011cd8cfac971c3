"""The examples of a page each: started alone, and by torchrun."""

from __future__ import annotations

import json

import pytest

from tests.examples.programs import EXAMPLES, TORCHRUN, run, succeed


def errors(printed: str, ranks: int) -> list[float]:
    """The largest difference from dense attention on each rank."""
    found = [float(line.rsplit(maxsplit=1)[-1]) for line in printed.splitlines() if f"of {ranks}" in line]
    assert len(found) == ranks
    return found


def test_minimal():
    path = EXAMPLES / "ring_attention_minimal.py"
    assert max(errors(run(path), 1)) < 1e-5
    assert max(errors(succeed(*TORCHRUN, 2, path), 2)) < 1e-5


def test_hybrid_mesh():
    printed = run(EXAMPLES / "hybrid_mesh.py", ranks=4)
    assert printed.count("a mesh of (2, 2)") == 4
    assert max(errors(printed, 4)) < 1e-5


def test_gpt2(tmp_path):
    """Without dropout a ring has the losses of eager attention; with it, it learns."""
    tiny = ["--size", "tiny", "--context", 61, "--batch", 2, "--lr", 0.01]
    found = {}
    for name, ranks, *more in (("ring", 2), ("eager", 1), ("ring", 1, "--dropout", 0.1, "--steps", 30)):
        more = more or ["--dropout", 0.0, "--steps", 4]
        out = tmp_path / "out.json"
        run(EXAMPLES / "gpt2.py", "--attention", name, *tiny, *more, "--out", out, ranks=ranks)
        found[name, ranks] = json.loads(out.read_text())["losses"]
    assert found["ring", 2] == pytest.approx(found["eager", 1], rel=2e-5)
    assert found["ring", 1][-1] < found["ring", 1][0] - 1.0


def test_drawing(tmp_path):
    run(EXAMPLES / "draw_layouts_and_masks.py", "--seq-len", 48, "--ranks", 3, "--out", tmp_path)
    run(EXAMPLES / "draw_ring.py", "--out", tmp_path)
    for name in ("layouts_and_masks.png", "documents_balanced.png", "ring_of_gpus.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
