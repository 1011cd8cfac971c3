"""Checkpoints of `finetune_long_document.py`: exact on any number of ranks, whole or not there, and named where they are damaged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.examples.programs import _FORKS, EXAMPLES, PROGRAM, ROOT, TOY, figures, run


def losses_of(out):
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_resumed_run_has_the_same_losses_to_the_bit(finished, text, tmp_path):
    out, _ = finished
    checkpoint = out / "checkpoint-000002"
    printed = run(PROGRAM, *TOY, "--text", text, "--out", tmp_path, "--resume", checkpoint, "--beside", out)
    assert f"resuming {checkpoint}, after step 2\n" in printed
    resumed = figures(tmp_path)
    assert resumed["first_step"] == 2
    for name in ("losses", "gradient_norms"):
        assert resumed[name] == figures(out)[name][2:]
    assert resumed["heldout_perplexity"] == figures(out)["heldout_perplexity"]
    assert resumed["generated"] == figures(out)["generated"]


@pytest.fixture(scope="module")
def sharded(finished, text, tmp_path_factory):
    """A run under FSDP2 in fp64, and its command."""
    out = tmp_path_factory.mktemp("sharded")
    command = [PROGRAM, *TOY[:-2], "--text", text, "--wrapper", "fsdp2", "--dtype", "float64"]
    run(*command, "--out", out, "--save-every", 2)
    assert figures(out)["losses"] == pytest.approx(figures(finished[0])["losses"], rel=2e-6)
    assert len(list((out / "checkpoint-000002").glob("rank-*.safetensors"))) == 2
    return out, command


@pytest.mark.parametrize(
    ("options", "within"),
    [
        ([], 0.0),
        (["--ranks", "1", "--wrapper", "none"], 1e-13),
        # FSDP2's factor of 3 rounds otherwise in transformers' norms, which compute in fp32
        (["--ranks", "3", "--offload", "--mlp-tile", "8"], 1e-7),
    ],
    ids=["same ranks", "one rank", "more ranks"],
)
@pytest.mark.some(2)
def test_shards_are_resumed_on_any_number_of_ranks(sharded, tmp_path, options, within):
    out, command = sharded
    printed = run(*command, "--out", tmp_path, "--resume", out / "checkpoint-000002", *options)
    assert ("losses agree up to rounding, not to the bit" in printed) == bool(options)
    first, resumed = figures(out), figures(tmp_path)
    assert resumed["losses"][0] == pytest.approx(first["losses"][2], rel=min(within, 1e-13), abs=0), "the same weights"
    for name in ("losses", "gradient_norms"):
        assert resumed[name] == pytest.approx(first[name][2:], rel=within, abs=0)


def test_torchrun_restarts_a_run_from_its_last_complete_checkpoint(finished, text, tmp_path):
    """A rank is killed in the fourth step, and the newest of two checkpoints is cut short."""
    printed = run(
        ROOT / "tests" / "examples" / "restarted.py", *TOY, "--text", text, "--out", tmp_path, "--save-every", 1, "--resume", "last"
    )
    assert f"no checkpoint in {tmp_path} yet: beginning with step 1" in printed
    assert f"passing over a checkpoint: {tmp_path}/checkpoint-000003/rank-00000.safetensors has 1000 bytes" in printed
    assert f"resuming {tmp_path}/checkpoint-000002, after step 2" in printed
    assert losses_of(tmp_path) == losses_of(finished[0])
    assert figures(tmp_path)["losses"] == figures(finished[0])["losses"][2:]
    assert figures(tmp_path)["generated"] == figures(finished[0])["generated"]


@pytest.fixture
def resume(program, alone, finished, text, tmp_path):
    """Copies the finished run; `resume(name, steps)` is what a run in the copy would resume."""
    from finetune.checkpoint import choose_checkpoint

    out = tmp_path / "out"
    shutil.copytree(finished[0], out)

    def choose(name, *options):
        given = name if name == "last" else out / name
        settings = program.parse([*TOY, "--text", str(text), "--out", str(out), "--resume", str(given), *options])
        return choose_checkpoint(settings, torch.device("cpu")).resume

    choose.out = out
    return choose


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    """One bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=["cut", "flipped", "missing"])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json", "tokenizer.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_too(resume, capsys, damage, name):
    checkpoint = resume.out / "checkpoint-000004"
    damage(checkpoint / name)
    named = (
        f"{checkpoint} is not a checkpoint's folder"
        if (name, damage) == ("manifest.json", Path.unlink)
        else f"{checkpoint / name} "
    )
    with pytest.raises((SystemExit, OSError)) as raised:
        resume("checkpoint-000004", "--steps", "6")
    said = capsys.readouterr().err + str(raised.value)
    assert named in said
    assert f"The newest complete one beside it: --resume {resume.out / 'checkpoint-000002'}" in said
    # an unattended run says so and goes on from there
    assert resume("last", "--steps", "6") == str(resume.out / "checkpoint-000002")
    assert named in capsys.readouterr().out
    assert sorted(path.name for path in resume.out.glob("checkpoint-*")) == ["checkpoint-000002", "checkpoint-000004"]


def test_files_of_another_step_or_rank_are_refused(resume, sharded, capsys, program):
    old, new = (resume.out / f"checkpoint-00000{step}" / "rank-00000.safetensors" for step in (2, 4))
    shutil.copy(old, new)
    with pytest.raises(SystemExit):
        resume("checkpoint-000004", "--steps", "6")
    assert f"{new} is of rank 0 at step 2, but should be of rank 0 at step 4" in capsys.readouterr().err
    copy = resume.out / "swapped"
    shutil.copytree(sharded[0] / "checkpoint-000002", copy)
    first, second = (copy / f"rank-0000{rank}.safetensors" for rank in range(2))
    first.rename(copy / "x")
    second.rename(first)
    (copy / "x").rename(second)
    with pytest.raises(SystemExit):
        program.parse([*map(str, sharded[1][1:]), "--resume", str(copy)])
    assert f"{first} is of rank 1 at step 2, but should be of rank 0 at step 2" in capsys.readouterr().err


def test_without_a_complete_checkpoint_nothing_begins_anew(resume, capsys):
    for path in resume.out.glob("checkpoint-*"):
        (path / "manifest.json").unlink()
    with pytest.raises(SystemExit):
        resume("last")
    assert f"no checkpoint in {resume.out} is complete: to begin anew, move them away" in capsys.readouterr().err


def test_more_steps_on_one_rank_and_later_checkpoints_move_away(resume, program, capsys, text, monkeypatch):
    monkeypatch.setattr(program, "write_figures", lambda *args: None)
    former = resume.out / "checkpoint-000004" / "manifest.json"
    content = former.read_text()
    given = ["--text", text, "--out", resume.out, "--resume", resume.out / "checkpoint-000002", "--steps", 3, "--ranks", 1]
    program.work(program.parse([*TOY, *map(str, given)]), torch.device("cpu"))
    printed = capsys.readouterr().out
    assert "--steps was 4 and is 3: the learning rate now falls until there" in printed
    assert f"moved {former.parent}, which this run does not resume, to {resume.out}/former" in printed
    assert {path.name for path in resume.out.glob("checkpoint-*")} == {"checkpoint-000002", "checkpoint-000003"}
    assert (resume.out / "former" / "checkpoint-000004" / "manifest.json").read_text() == content
    # and on to more than the first run had
    program.work(
        program.parse([*TOY, *map(str, given[:4]), "--resume", "last", "--steps", "5", "--ranks", "1"]), torch.device("cpu")
    )
    assert len(losses_of(resume.out)) == 5


def test_another_runs_checkpoint_is_refused(program, capsys, finished, text, tmp_path):
    checkpoint = str(finished[0] / "checkpoint-000002")
    for arguments, message in (
        (["--lr", "0.5"], "--lr is 0.5, but the run of"),
        (["--dtype", "float64"], "--dtype is float64, but the run of"),
        (["--steps", "2"], "is at step 2 and --steps 2: there is nothing left to do"),
    ):
        with pytest.raises(SystemExit):
            program.parse([*TOY, "--resume", checkpoint, *arguments])
        assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_before_the_first_step(program, alone, monkeypatch, tmp_path):
    from finetune.checkpoint import prepare_folder
    from finetune.ranks import CheckpointError

    settings = program.parse([*TOY, "--ranks", "1", "--out", "/proc/nowhere"])
    with pytest.raises(CheckpointError, match="--out is /proc/nowhere, which cannot be written: No such file"):
        program.work(settings, torch.device("cpu"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=99_999))
    with pytest.raises(CheckpointError, match="whose disk has 99,999 bytes free, but a checkpoint takes 100,000"):
        prepare_folder(tmp_path, 0, 100_000, torch.device("cpu"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_a_failed_save_is_named_by_every_rank_and_leaves_the_checkpoint_before_it(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    printed = run(ROOT / "tests" / "examples" / "failing_saves.py", tmp_path, ranks=3)
    part = tmp_path / "checkpoint-000002.part"
    assert printed.count(f"{part}/rank-00001.safetensors could not be written: ") == 3
    assert printed.count("File too large") == 3
    assert printed.count(f"{part}/tokenizer.json could not be written: No such file") == 3


def wait_here(rank, folder):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    Path(folder, str(rank)).write_text(str(os.getpid()))
    time.sleep(60)


def parent(folder):
    sys.path.insert(0, str(EXAMPLES))
    from finetune.ranks import start_ranks

    start_ranks(wait_here, (folder,), 2, "fork")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_ranks_end_with_the_process_that_started_them(tmp_path, number):
    process = _FORKS.Process(target=parent, args=(str(tmp_path),))
    process.start()
    pids = [tmp_path / str(rank) for rank in range(2)]
    until(lambda: all(path.exists() and path.read_text() for path in pids))
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (128 + number if number == signal.SIGTERM else -number)
    until(lambda: not any(Path("/proc", path.read_text()).exists() for path in pids))


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
