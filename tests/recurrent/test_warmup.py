"""fla's kernels compiled and tuned ahead of time: which calls are made, how configurations are shared out, and errors."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringattn as ra
from ringattn import __main__
from ringattn.recurrent import warmup
from ringattn.recurrent.segments import make_segments
from ringattn.recurrent.warmup import RecurrentLayer, compiling_only, tuning_briefly, warm_recurrent

linear_attention = importlib.import_module("ringattn.recurrent.linear_attention")
TUNED = """
import types
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from ringattn.recurrent.warmup import compiling_only

driver.set_active(
    types.SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
)

@triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 32, 64, 128, 256)], key=["n"])
@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + rows, 2 * tl.load(x_ptr + rows, rows < n), rows < n)

x = torch.ones(100)
with compiling_only(SHARE, OF):
    for _ in range(2):
        double[(1,)](x, 100)
assert x.sum() == 100, "nothing has run"
"""
NOTHING_LEFT = """
from ringattn.recurrent import warmup
warmup._run_all([warmup.RecurrentLayer.parse("delta:4:64:64:2")], 3, 4096, warmup.torch.bfloat16)
"""


def test_a_layer_by_its_text():
    assert RecurrentLayer.parse("delta:32:128:64:16") == RecurrentLayer("delta:32:128:64:16", "number", True, 32, 128, 64, 16)
    assert RecurrentLayer.parse("vector:8:16:32").hk == 8
    for text in ("delta", "delta:4:16", "rwkv:4:16:16", "delta:4:16:16:2:1", "delta:0:16:16", "delta:4:-1:16"):
        with pytest.raises(ValueError, match="KIND:HEADS:D_K:D_V"):
            RecurrentLayer.parse(text)


@pytest.mark.parametrize(("ranks", "segments"), [(1, [(1, 0)]), (2, [(1, 0), (1, 1)]), (3, [(1, 0), (1, 1), (0, 2)])])
def test_segments_that_begin_and_that_follow(monkeypatch, ranks, segments):
    """Each kind of layer runs once for each number of segments that a rank may have, forward and backward."""
    made = []
    run = RecurrentLayer.run

    def on_cpu(layer, tokens, group, layout, dtype, device):
        found = make_segments(layout, ra.causal()).of(group.rank)
        made.append((len(found.first), len(found.following)))
        run(layer, tokens, group, layout, torch.float32, "cpu")

    monkeypatch.setattr(warmup, "fla_kernels", ra.torch_kernels)
    monkeypatch.setattr(RecurrentLayer, "run", on_cpu)
    monkeypatch.setattr(linear_attention._LinearCall, "check_finite", lambda *_: None)
    for kind in warmup.KINDS:
        made.clear()
        warmup._run_all([RecurrentLayer.parse(f"{kind}:4:4:3:2")], ranks, 12, torch.float32)
        assert made == segments


@pytest.mark.thorough
def test_configurations_are_compiled_once_over_all_shares(tmp_path):
    """For a GPU that need not be there."""
    found = []
    for share in range(2):
        folder = tmp_path / str(share)
        script = tmp_path / f"share_{share}.py"
        script.write_text(TUNED.replace("SHARE, OF", f"{share}, 2"))
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
        subprocess.run([sys.executable, script], env=environment, check=True, timeout=200)
        found.append({path.parent.name for path in Path(folder).rglob("*.cubin")})
    assert sorted(map(len, found)) == [2, 3]
    assert not found[0] & found[1]


def test_triton_is_as_before():
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    before = autotuner.run, jit.run, autotuner.__dict__["do_bench"]
    with compiling_only(), tuning_briefly():
        assert autotuner.run is not before[0]
    assert (autotuner.run, jit.run, autotuner.__dict__["do_bench"]) == before


def test_bad_arguments(monkeypatch, capsys):
    for options in (dict(ranks=0), dict(tokens=0)):
        with pytest.raises(ValueError, match="at least 1"):
            warm_recurrent(["delta:4:16:16"], **options)
    with pytest.raises(SystemExit):
        __main__.main(["warm", "--recurrent", "delta:4:16"])
    assert "--recurrent is 'delta:4:16'" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="it has none: run it where layers will run"):
        warm_recurrent(["delta:4:16:16"])


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_nothing_is_left_to_compile(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    warm = [sys.executable, "-m", "ringattn", "warm", "--recurrent", "delta:4:64:64:2", "--tokens", "4096"]
    subprocess.run(warm, env=environment, check=True, timeout=500)
    before = sorted(Path(tmp_path).rglob("*.cubin"))
    assert before
    told = {**environment, "TRITON_PRINT_AUTOTUNING": "1"}
    done = subprocess.run([sys.executable, "-c", NOTHING_LEFT], env=told, check=True, timeout=200, capture_output=True)
    assert b"Autotuning kernel" not in done.stdout
    assert sorted(Path(tmp_path).rglob("*.cubin")) == before
