"""`bench versions`: versions take turns, and compute the same; a worker answers each message."""

import io
import json
import subprocess
import sys
import weakref
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "launch"


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    import bench.versions

    return bench.versions


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    import bench.versions_worker

    return bench.versions_worker


def answers(worker, messages, make, clock=lambda function, calls: calls):
    out = io.StringIO()
    worker.serve(map(json.dumps, messages), out, make, clock)
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("kinds", [["plain", "deterministic"], ["masks", "scores"]])
def test_a_worker_computes_each_case(kinds, versions, worker):
    """Each mask, score and head dim, with few tokens."""
    for case in versions.cases(64, kinds):
        case = asdict(case) | dict(batch=min(case.batch, 2), tokens=16, heads=2, kv_heads=1, head_dim=16, v_dim=8, lengths=(4, 12))
        messages = [dict(case=case, do="sum", direction=direction) for direction in ("forward", "backward")]
        forward, backward = answers(worker, messages, lambda case: worker.ours(case, "cpu"))
        assert len(forward) == 1 and len(backward) == 3
        assert all(x > 0 for x in (*forward, *backward))


def test_a_worker_makes_a_case_once_and_holds_one_at_a_time(worker):
    made, kept = [], weakref.WeakSet()

    def make(case):
        assert not kept, "the case before is still held"
        made.append(case["name"])
        x = torch.tensor([1.0, -2.0])
        kept.add(x)
        return dict(forward=lambda: (x,), backward=lambda: (x, x))

    messages = [dict(do="compile", case=dict(name="a"))]
    messages += [dict(do="sum", direction="forward", case=dict(name=name)) for name in "aa"]
    messages += [dict(do="time", direction="backward", case=dict(name=name), calls=7) for name in "ab"]
    assert answers(worker, messages, make) == [[1, 2], [3.0], [3.0], 7, 7]
    assert made == ["a", "a", "b"]


def test_versions_take_turns_and_the_median_counts(versions):
    case, asked = versions.cases(64, ["plain"])[0], []
    times = {"old": iter([10000, 10, 900, 10]), "new": iter([20, 20, 5])}

    def version(name):
        def ask(message):
            asked.append((name, message["do"], message.get("calls")))
            return lambda: [100.0] if message["do"] == "sum" else next(times[name])

        return ask

    found = versions.in_turns({name: version(name) for name in times}, case, "backward", 3)
    assert found == {"old": 10, "new": 20}
    # results first, then bursts of about the same length, each version once a round
    assert asked[:3] == [("old", "sum", None), ("new", "sum", None), ("old", "time", 3)]
    assert all(calls == 6 for _, _, calls in asked[3:])
    assert [{name for name, *_ in asked[i : i + 2]} for i in (3, 5, 7)] == [{"old", "new"}] * 3


def test_a_version_that_computes_something_else_is_named(versions):
    case = versions.cases(64, ["plain"])[0]
    found = {name: lambda message, value=value: lambda: [1.0, value] for name, value in (("old", 5.0), ("new", 5.02))}
    with pytest.raises(SystemExit, match="16384 32:8 D64 causal: new does not compute what old does"):
        versions.in_turns(found, case, "forward", 1)


def test_processes_answer_at_the_same_time_and_their_end_is_told(versions, tmp_path, monkeypatch):
    """Of a worker that says which folder its version is in, and ends when it is asked to time."""
    program = tmp_path / "worker.py"
    program.write_text(
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    if json.loads(line)['do'] == 'time': sys.exit()\n"
        "    print(json.dumps([os.getcwd(), os.environ['PYTHONPATH'], sys.argv[1:]]), flush=True)\n"
    )
    monkeypatch.setattr(versions, "WORKER", program)
    monkeypatch.setenv("PYTHONPATH", "more")
    with versions.workers({"old": tmp_path}) as found:
        told = versions.ask_all(found, dict(do="compile", case={}))
        assert told["old"] == [str(tmp_path), f"{tmp_path}:{tmp_path / 'kernels'}:more", []]
        assert told[versions.CUDNN][1:] == ["more", [versions.CUDNN]]
        with pytest.raises(SystemExit, match=r"old ended .*; it was asked to time"):
            found["old"](dict(do="time", case={}))()


def test_folders_are_versions_with_names_of_their_own(versions, tmp_path):
    assert versions.versions([f"new={ROOT}", str(ROOT)]) == {"new": ROOT, ROOT.name: ROOT}
    with pytest.raises(SystemExit, match="is not a version of this library: it has no folder ringattn"):
        versions.versions([str(tmp_path)])
    with pytest.raises(SystemExit, match="would be shown as new, which another one is"):
        versions.versions([f"new={ROOT}", f"new={ROOT}"])


def test_documents_fill_their_sequence(versions):
    _, documents = versions.cases(64, ["masks"])
    assert sum(documents.lengths) == documents.tokens and len(documents.lengths) > 1


def test_cudnn_takes_part_where_it_computes_the_same(versions):
    found = {"old": 1, versions.CUDNN: 2}
    plain, window = versions.cases(64, ["plain"])[0], versions.cases(64, ["masks"])[0]
    assert list(versions.takers(found, plain)) == ["old", versions.CUDNN] and list(versions.takers(found, window)) == ["old"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(versions):
    with pytest.raises(SystemExit, match="timed on a GPU"):
        versions.main(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_two_versions_are_measured():
    command = [sys.executable, LAUNCH / "bench", "versions", f"old={ROOT}", f"new={ROOT}", "--head-dims", "64", "--rounds", "2"]
    done = subprocess.run([*command, "--kinds", "plain", "scores"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("backward") == 8 and done.stdout.count("new") == 8 and done.stdout.count("cuDNN") == 5
