"""`bench curves`: three runs at toy size, their differences, and the options that it refuses."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


@pytest.fixture
def curves(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    import bench.curves

    return bench.curves


def run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, LAUNCH / "bench", "curves", "--device", "cpu", *map(str, arguments)]
    # waiting threads must not spin, because other tests run at the same time
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)


@pytest.mark.thorough
def test_three_runs_have_the_same_curve(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {n} of a document: {n * n} is the square of {n}.\n" for n in range(40)))
    model = ["--hidden", 16, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--vocab", 300, "--heldout", 0]
    done = run("--ranks", 2, "--tokens", 61, "--steps", 3, "--out", tmp_path / "out", "--", *model, "--text", text)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/curves.json").read_text())
    assert list(record["curves"]) == ["ring, 2 ranks", "ring, 1 rank", "dense, 1 rank"]
    assert (record["tokens_a_step"], record["settings"]["hidden"]) == (61, 16)
    for name, losses in record["curves"].items():
        settings = json.loads((tmp_path / "out" / name.replace(", ", "-").replace(" ", "-") / "figures.json").read_text())[
            "settings"
        ]
        assert f"{settings['ranks']} rank" in name
        assert (settings["attention"] == "ringattn") == name.startswith("ring")
        assert len(set(losses)) == 3
    assert len(record["differences"]) == 3
    assert all(max(by_step) < 1e-5 for by_step in record["differences"].values())
    assert max(map(max, record["differences"].values())) > 0
    assert done.stdout.count("largest relative difference") == 3
    assert (tmp_path / "out/curves.png").read_bytes()[1:4] == b"PNG"


def test_differences_are_relative_to_the_second_curve(curves):
    found = curves.compare({"a": [1.0, 3.0], "b": [2.0, 3.0], "c": [4.0, 1.0]})
    assert found == {"a / b": [0.5, 0.0], "a / c": [0.75, 2.0], "b / c": [0.5, 2.0]}


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (1, [], "ring attention would run on 1 rank twice"),
        (2, ["--ranks", "4"], "--ranks follows --, but --ranks is"),
        (2, ["--hidden", "16", "--verif"], "--verif follows --, but --verify is"),
        (2, ["--layout=striped"], "--layout=striped follows --, but --layout is"),
    ],
    ids=["one-rank", "ranks", "shortened", "with-value"],
)
def test_runs_that_could_not_be_compared_are_refused(curves, monkeypatch, ranks, options, message):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=message):
        curves.check(ranks, options)


def test_torchrun_and_a_failed_run_end_it(curves, monkeypatch, tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/finetune_long_document.py").write_text("import sys\nsys.exit(len(sys.argv))\n")
    monkeypatch.setattr(curves, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="the run of x ended with exit code 3"):
        curves.train({"x": ["--tokens", "1"]})
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="with python, not torchrun"):
        curves.check(2, [])


@pytest.mark.parametrize(("visible", "taken"), [(None, ["0", "1"]), ("6,3,1", ["6", "3"])])
def test_runs_side_by_side_take_a_gpu_each(curves, monkeypatch, tmp_path, visible, taken):
    (tmp_path / "examples").mkdir()
    # each run ends once the other has begun
    (tmp_path / "examples/finetune_long_document.py").write_text(
        "import os, sys, time\n"
        "own, other = sys.argv[1:]\n"
        "open(own + '.part', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "os.rename(own + '.part', own)\n"
        "for _ in range(3000):\n"
        "    if os.path.exists(other):\n"
        "        sys.exit()\n"
        "    time.sleep(0.01)\n"
        "sys.exit('alone for 30 s')\n"
    )
    monkeypatch.setattr(curves, "ROOT", tmp_path)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    files = [str(tmp_path / name) for name in "ab"]
    curves.train({"a": files, "b": files[::-1]})
    assert [Path(file).read_text() for file in files] == taken


def test_on_gpus_the_runs_of_one_rank_go_side_by_side(curves, monkeypatch, tmp_path):
    together = []

    def train(runs):
        together.append(list(runs))
        for options in runs.values():
            out = Path(options[options.index("--out") + 1])
            out.mkdir(parents=True)
            (out / "log.jsonl").write_text('{"loss": 1.0}\n')
            figures = dict(machine=dict(device="", torch=""), settings=dict(dtype=""), tokens_a_step=1, parameters=1)
            (out / "figures.json").write_text(json.dumps(figures))

    monkeypatch.setattr(curves, "train", train)
    monkeypatch.delenv("RANK", raising=False)
    arguments = Namespace(device="cuda", ranks=4, tokens=None, steps=1, out=tmp_path, options=[])
    curves.main(arguments)
    assert together == [["ring, 4 ranks"], ["ring, 1 rank", "dense, 1 rank"]]
