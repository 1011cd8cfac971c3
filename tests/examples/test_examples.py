"""Each example runs as a person would start it, at toy size: alone, with its own ranks, and under torchrun."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
TOY = [
    *("--device", "cpu", "--vocab", "300", "--hidden", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1"),
    *("--seq-len", "61", "--steps", "4", "--warmup", "1", "--generate", "3"),
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def start(*command: object) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=280)


def succeed(*command: object) -> str:
    done = start(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("document") / "text.txt"
    path.write_text("".join(f"Line {n} of a document that is long enough: {n * n} is the square of {n}.\n" for n in range(60)))
    return path


@pytest.fixture(scope="session")
def run(text, tmp_path_factory):
    """A whole run on two ranks, with a checkpoint half way."""
    out = tmp_path_factory.mktemp("run")
    printed = succeed(EXAMPLES / "finetune_long_document.py", *TOY, "--text", text, "--out", out, "--save-every", 2)
    return out, printed


def figures(out: Path) -> dict:
    return json.loads((out / "figures.json").read_text())


@pytest.mark.parametrize("command", [[], [*TORCHRUN, 2]], ids=["alone", "torchrun"])
def test_minimal(command):
    printed = succeed(*command, EXAMPLES / "ring_attention_minimal.py").splitlines()
    ranks = 2 if command else 1
    assert len([line for line in printed if f"of {ranks}: " in line]) == ranks
    assert all(float(line.rsplit(maxsplit=1)[-1]) < 1e-5 for line in printed if line.startswith("rank"))


def test_hybrid_mesh():
    printed = succeed(*TORCHRUN, 4, EXAMPLES / "hybrid_mesh.py").splitlines()
    errors = [float(line.rsplit(maxsplit=1)[-1]) for line in printed if "a mesh of (2, 2)" in line]
    assert len(errors) == 4
    assert max(errors) < 1e-5


def test_drawing(tmp_path):
    succeed(EXAMPLES / "draw_layouts_and_masks.py", "--seq-len", 48, "--ranks", 3, "--out", tmp_path)
    for name in ("layouts_and_masks.png", "documents_balanced.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_run_learns_and_writes_its_files(run):
    out, printed = run
    result = figures(out)
    losses = result["losses"]
    assert len(losses) == 4
    assert losses[-1] < losses[0] < 1.2 * math.log(300)
    assert result["tokens_per_second"] > 0
    assert result["peak_memory_gib_per_rank"] > 0
    assert result["settings"]["ranks"] == 2
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert result["generated"] in printed
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-000002.safetensors", "checkpoint-000004.safetensors"}


def test_a_resumed_run_has_the_same_losses_to_the_bit(run, text, tmp_path):
    out, _ = run
    checkpoint = out / "checkpoint-000002.safetensors"
    succeed(EXAMPLES / "finetune_long_document.py", *TOY, "--text", text, "--out", tmp_path, "--resume", checkpoint)
    resumed = figures(tmp_path)
    assert resumed["first_step"] == 2
    assert resumed["losses"] == figures(out)["losses"][2:]
    assert resumed["generated"] == figures(out)["generated"]


def test_under_torchrun_another_number_of_ranks_has_the_same_losses(run, text, tmp_path):
    succeed(*TORCHRUN, 3, EXAMPLES / "finetune_long_document.py", *TOY, "--text", text, "--out", tmp_path, "--layout", "striped")
    result = figures(tmp_path)
    assert result["settings"]["ranks"] == 3
    assert result["losses"] == pytest.approx(figures(run[0])["losses"], rel=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_passes(text, tmp_path, dtype):
    printed = succeed(
        EXAMPLES / "finetune_long_document.py",
        *TOY,
        "--text",
        text,
        "--out",
        tmp_path,
        "--verify",
        "--dtype",
        dtype,
        "--verify-tokens",
        97,
    )
    assert "all within bounds" in printed
    assert "FAILED" not in printed
    assert printed.count(" ok") == 12


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("finetune_long_document")


def test_verify_catches_a_wrong_ring(program, monkeypatch, capsys, tmp_path, text):
    """Positions off by one are what a mistaken integration looks like: they must not pass."""
    import finetune_verify
    import torch.distributed as dist

    import ringattn as ra

    settings = program.parse([*TOY, "--text", str(text), "--out", str(tmp_path), "--ranks", "1"])
    ids = torch.randint(300, (1, 33), generator=torch.Generator().manual_seed(0))
    labels = program.shift_labels(ids)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        arguments = program.summed_loss, ra.zigzag(33, 1), ids, labels, torch.float32
        assert finetune_verify.verify(program.build_model(settings), program.build_model(settings), *arguments)
        truth = ra.Layout.positions
        monkeypatch.setattr(ra.Layout, "positions", lambda self, rank: truth(self, rank) * 2)
        assert not finetune_verify.verify(program.build_model(settings), program.build_model(settings), *arguments)
        assert "FAILED" in capsys.readouterr().out
    finally:
        dist.destroy_process_group()


def test_windows_are_drawn_by_step_and_labelled_across_their_end(program):
    settings = program.parse([*TOY, "--seq-len", "10"])
    tokens = torch.arange(100)
    starts = set()
    for step in range(20):
        ids, labels = program.window(tokens, 10, settings, step)
        assert labels.tolist() == (ids + 1).tolist()
        assert torch.equal(ids, program.window(tokens, 10, settings, step)[0])
        starts.add(int(ids[0, 0]))
    assert len(starts) > 10
    ids, labels = program.window(tokens, 100, settings, 0)
    assert torch.equal(ids[0], tokens)
    assert labels[0, -1] == -100


def test_learning_rate_warms_up_and_decays(program):
    settings = program.parse(["--device", "cpu", "--steps", "20", "--warmup", "4", "--lr", "1"])
    rates = [program.learning_rate(step, settings) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks is 0, but must be at least 1"),
        (["--heads", "3", "--hidden", "24"], "--heads is 3 and --kv-heads 2"),
        (["--hidden", "100"], "--hidden is 100, but must be a multiple of twice --heads"),
        (["--hidden", "4096"], "heads of more than 256"),
        (["--text", "/nowhere/text"], "--text is /nowhere/text, which is not a file"),
        (["--resume", "/nowhere/checkpoint"], "--resume is /nowhere/checkpoint, which is not a file"),
        (["--vocab", "100"], "--vocab is 100, but must be at least 257"),
        (["--seq-len", "3"], "--seq-len is 3: 2 ranks need 4 or more"),
        (["--steps", "-1"], "--steps is -1"),
        (["--layout", "spiral"], "invalid choice: 'spiral'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_arguments_are_named_before_ranks_start(program, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        program.parse(["--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused(program, capsys, run):
    checkpoint = str(run[0] / "checkpoint-000002.safetensors")
    for arguments, message in (
        (["--lr", "0.5"], "--lr is 0.5, but the checkpoint's run had"),
        (["--steps", "9"], "--steps is 9, but the checkpoint's run had 4"),
    ):
        with pytest.raises(SystemExit):
            program.parse([*TOY, "--resume", checkpoint, *arguments])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.parse([*TOY, "--resume", str(run[0] / "checkpoint-000004.safetensors")])
    assert "nothing left to do" in capsys.readouterr().err
    broken = run[0] / "broken.safetensors"
    broken.write_bytes(b"not a checkpoint")
    with pytest.raises(SystemExit):
        program.parse([*TOY, "--resume", str(broken)])
    assert "not a safetensors file" in capsys.readouterr().err
