"""Which versions of Triton the Hopper kernels are for, and what happens under any other."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton

import ringattn_kernels as rk
from ringattn_kernels import dispatch, hopper
from ringattn_kernels.dispatch import Kernels, choose_backward, choose_forward
from tests.kernels import dense

ROOT = Path(__file__).resolve().parents[2]
q = torch.empty(1, 8, 2, 128, dtype=torch.bfloat16)
table = rk.TileTable(np.array(dense.causal(8)), 8, 8)


@pytest.fixture
def newer_triton(monkeypatch):
    """A Hopper GPU under a version of Triton that is not out yet."""
    monkeypatch.setattr(dispatch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(hopper, "obstacle", hopper.version_obstacle("3.10.0"))
    dispatch._log.cache_clear()


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.4+git5ab6cd"])
def test_versions_between_the_oldest_and_the_newest_are_no_obstacle(version):
    assert hopper.version_obstacle(version) == ""


@pytest.mark.parametrize("version", ["2.7.0", "3.5.1", "3.10.0", "3.10.0a0+git1234567", "4.0"])
def test_any_other_version_is(version):
    assert f"Triton {version} is not one of 3.6 to 3.9" in hopper.version_obstacle(version)


def test_the_package_requires_just_these_versions():
    oldest, below = re.search(r'"triton>=([\d.]+),<([\d.]+);', (ROOT / "pyproject.toml").read_text()).groups()
    major, minor = map(int, hopper.NEWEST.split("."))
    assert oldest == hopper.OLDEST and below == f"{major}.{minor + 1}"


def test_under_another_version_the_plain_kernels_run_and_a_warning_says_why(newer_triton, caplog):
    with caplog.at_level(logging.WARNING, logger="ringattn_kernels.dispatch"):
        for _ in range(2):
            choices = [choose_forward(q, q, q, 0.1), choose_backward(q, q, q, q, table)]
    assert [choice.kernels for choice in choices] == [Kernels.PLAIN] * 2
    assert all("Triton 3.10.0" in choice.reason for choice in choices)
    assert [record.getMessage().split(", which")[0] for record in caplog.records] == [
        f"{what} runs plain Triton: Triton 3.10.0 is not one of 3.6 to 3.9" for what in ("forward", "backward")
    ]


def test_under_another_version_the_hopper_kernels_cannot_be_forced(newer_triton):
    with pytest.raises(
        ValueError, match=r"HOPPER is asked for, but Triton 3\.10\.0 is not one of 3\.6 to 3\.9.*pass Kernels\.PLAIN"
    ):
        choose_forward(q, q, q, 0.1, Kernels.HOPPER)
    for kernels in (Kernels.HOPPER, Kernels.HOPPER_FUSED):
        with pytest.raises(ValueError, match=r"Triton 3\.10\.0"):
            choose_backward(q, q, q, q, table, kernels)
    assert choose_backward(q, q, q, q, table, Kernels.PLAIN).reason == "the caller's wish"


def test_other_gpus_hear_of_their_architecture_alone(newer_triton, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "architecture", lambda device: "sm_100")
    with caplog.at_level(logging.INFO, logger="ringattn_kernels.dispatch"):
        assert choose_forward(q, q, q, 0.1).reason == "sm_100 is not sm_90"
    assert not caplog.records


def test_whoever_overrides_the_architecture_is_told_of_it(monkeypatch, caplog):
    dispatch._log.cache_clear()
    monkeypatch.setattr(triton.knobs.runtime, "override_arch", "sm80")
    monkeypatch.setattr(dispatch, "architecture", lambda device: "sm_80")
    with caplog.at_level(logging.INFO, logger="ringattn_kernels.dispatch"):
        assert choose_forward(q, q, q, 0.1).kernels == Kernels.PLAIN
    assert [record.getMessage() for record in caplog.records] == ["forward runs plain Triton: TRITON_OVERRIDE_ARCH is sm80"]


@pytest.mark.thorough
def test_the_plain_kernels_need_no_gluon():
    # None in sys.modules makes an import fail
    code = (
        "import sys, triton;"
        "triton.__version__ = '3.10.0';"
        "sys.modules['triton.experimental.gluon'] = None;"
        "import ringattn_kernels.attention;"
        "from ringattn_kernels import hopper;"
        "print(hopper.obstacle)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "kernels", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Triton 3.10.0 is not one of 3.6 to 3.9")
