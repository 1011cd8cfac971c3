"""`python -m ringattn verify`: attention that is right passes, on every rank; attention that is not is told, with status 1."""

import pytest
import torch

import ringattn as ra
from ringattn import __main__ as command_line
from ringattn.doctor.measure import shares

SMALL = ["verify", "--device", "cpu", "--tokens", "61", "--head-dim", "8"]


def measured(group, striped):
    layout = ra.striped(37, 3) if striped else ra.zigzag(37, 3)
    sizes = (4, 2, 8)
    return shares(
        group, group.rank(), torch.device("cpu"), layout, ra.sliding_window(9), sizes, torch.float32, torch.float64, name="test"
    )


@pytest.mark.parametrize("striped", [False, True])
def test_each_rank_is_within_the_error_allowed(gloo, striped):
    for record in gloo.run(3, measured, striped):
        assert list(record) == ["out", "dq", "dk", "dv"] and max(record.values()) <= 1


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--mask", "window:9"],
        ["--mask", "documents:0.25K", "--layout", "placed"],
        ["--mask", "window:1"],  # a query sees itself only, so that dq and dk are 0
        ["--tokens", "1", "--dtype", "bfloat16"],
    ],
)
def test_one_rank_passes(capsys, monkeypatch, options):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    command_line.main([*SMALL, *options])
    assert "all is well" in capsys.readouterr().out


def test_wrong_attention_is_told(capsys, monkeypatch):
    attention = ra.ring_attention
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(ra, "ring_attention", lambda *args, **options: attention(*args, **options) * 1.0001)
    with pytest.raises(SystemExit) as end:
        command_line.main(SMALL)
    assert end.value.code == 1
    assert "not well: an error is above what is allowed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "tokens is 0, but must be at least 1"),
        (["--kv-heads", "3"], "k has 3 heads, which does not divide q's 4"),
        (["--mask", "holes"], "mask is 'holes', but must be causal"),
    ],
)
def test_bad_options_are_refused(capsys, options, message):
    with pytest.raises(SystemExit):
        command_line.main([*SMALL, *options])
    assert message in capsys.readouterr().err
