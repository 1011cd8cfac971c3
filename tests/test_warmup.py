"""Kernels compiled ahead of time: what `warm` calls, its errors, and that nothing is left to compile afterwards."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringattn as ra
from ringattn import __main__, warmup
from ringattn.device import local
from ringattn.device.streams import InOrder
from ringattn.transport import SilentTransport
from tests.kernels.as_hopper import launched_forms

# (batch size, tokens, query heads, K/V heads)
SHAPES = (
    (1, 1024, 8, 2), (2, 2048, 16, 16), (1, 4096, 32, 8), (1, 16384, 8, 1), (1, 16384, 32, 8), (64, 1024, 16, 16), (128, 512, 16, 16),
)  # fmt: skip
FIRST_CALLS = f"""
import torch, ringattn as ra
for batch, tokens, heads, kv_heads in {SHAPES}:
    q, k, v = (torch.randn(batch, tokens, h, 128, device="cuda", dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))
    for mask in (ra.causal(), ra.full(), ra.sliding_window(200)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        ra.ring_attention(*leaves, mask=mask).backward(torch.randn_like(q))
torch.cuda.synchronize()
"""


def test_each_call_is_made_alone_and_in_rings(monkeypatch):
    monkeypatch.setattr(warmup, "_SHAPES", ((2, 24, 2, 1),))
    made = []
    real = warmup.ring_attention
    monkeypatch.setattr(
        warmup, "ring_attention", lambda *a, **options: made.append((a[0].shape, options["group"].size)) or real(*a, **options)
    )
    assert ra.warm([8, 16], v_head_dim=4, dtype=torch.float32, device="cpu") > 0
    assert {shape[3] for shape, _ in made} == {8, 16}
    assert {size for _, size in made} == {1, 3, 4}
    assert not torch.are_deterministic_algorithms_enabled()


def test_scores_are_modified_as_calls_will_do(monkeypatch):
    monkeypatch.setattr(warmup, "_SHAPES", ((2, 24, 2, 1),))
    made, given = [], []
    real = warmup.ring_attention
    monkeypatch.setattr(
        warmup, "ring_attention", lambda *a, score, **options: made.append(score) or real(*a, score=score, **options)
    )
    ra.warm([8], softcap=3.0, alibi=True, sinks=True, bias=True, dropout=True, dtype=torch.float32, device="cpu")
    assert {repr(score.kind) for score in made} == {
        "score(softcap=3.0, alibi, bias of 32 buckets of 32 pieces of distances, sinks, dropout=0.1)"
    }
    assert all(x.sinks.requires_grad and x.bias.table.requires_grad and not x.alibi.requires_grad for x in made)
    for options, error in ((dict(softcap=0), "softcap is 0"), (dict(sinks=1), "sinks is 1")):
        with pytest.raises(ValueError, match=error):
            ra.warm([8], **options, device="cpu")
    monkeypatch.setattr(__main__, "warm", lambda dims, **options: given.append((dims, options)) or 0.0)
    __main__.main(["warm", "--head-dim", "64", "--sinks", "--softcap", "50", "--bias"])
    (dims, options), wanted = given[0], dict(softcap=50.0, alibi=False, sinks=True, bias=True, dropout=False)
    assert dims == [64] and wanted.items() <= options.items()


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [
        (128, ()),
        *(pytest.param(d, (), marks=pytest.mark.thorough) for d in (64, 96, 192, 256)),
        pytest.param(64, ("sinks",)),
        *(
            pytest.param(128, parts, marks=pytest.mark.thorough)
            for parts in (("softcap",), ("alibi",), ("bias",), ("dropout",), ("softcap", "alibi", "sinks"))
        ),
        pytest.param(256, ("softcap",), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_later_calls_need_no_kernel_that_was_not_compiled(head_dim, parts, monkeypatch, without_replays):
    forms = launched_forms(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(local, "moment", lambda x: None)
    monkeypatch.setattr(local, "streams", lambda *arguments: InOrder())
    # no number matters: memory that nobody fills takes no time
    monkeypatch.setattr(torch, "zeros", torch.empty)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    ra.warm([head_dim], device="cpu", **{part: 50.0 if part == "softcap" else True for part in parts})
    compiled = set(forms)
    for (batch, tokens, heads, kv_heads), ranks in itertools.product(SHAPES, (1, 2, 8)):
        shapes = [(batch, tokens // ranks, h, head_dim) for h in (heads, kv_heads, kv_heads)]
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        table = torch.empty(heads, 32, requires_grad=True)
        parts_of = dict(alibi=torch.empty(heads), sinks=torch.empty(heads, requires_grad=True), softcap=50.0, dropout=0.3)
        parts_of["bias"] = ra.relative_bias(table, ra.t5_buckets(bidirectional=False))
        found = {part: parts_of[part] for part in parts}
        for mask in (ra.causal(), ra.full()):
            group = SilentTransport(ranks // 2, ranks) if ranks > 1 else None
            options = dict(mask=mask, layout=ra.zigzag(tokens, ranks), group=group, score=ra.score(**found) if found else None)
            out = ra.ring_attention(q, k, v, **options)
            out.backward(torch.empty_like(out))
    assert {form[0] for form in compiled} >= {"hopper_forward_kernel", "merge_kernel", "pair_kernel", "row_kernel"}
    assert forms == compiled, {form[0] for form in forms - compiled}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_an_error(capsys):
    with pytest.raises(ValueError, match="compiles kernels for this machine's GPU, but it has none"):
        ra.warm()
    with pytest.raises(SystemExit):
        __main__.main(["warm"])
    assert "it has none: run it where attention will run" in capsys.readouterr().err


@pytest.mark.gpu
def test_nothing_is_left_to_compile(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "ringattn", "warm", "--head-dim", "128"], env=environment, check=True, timeout=400)
    before = sorted(Path(tmp_path).rglob("*.cubin"))
    assert before
    subprocess.run([sys.executable, "-c", FIRST_CALLS], env=environment, check=True, timeout=100)
    assert sorted(Path(tmp_path).rglob("*.cubin")) == before
