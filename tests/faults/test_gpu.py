"""Faults of ranks on GPUs: over NCCL and over copy engines, the next call of the others names the rank that has ended."""

import re

import pytest
import torch
from scenes import Scene

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("act", ["kill", "out of memory"])
@pytest.mark.parametrize("engines", [True, False], ids=["copy engines", "nccl"])
def test_a_rank_that_ends_is_named_in_the_next_call(perform, act, engines):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    scenes = [Scene(2, 1, phase, act, gpus=True, engines=engines) for phase in ("connect", "agree")]
    for scene, outcome in zip(scenes, perform(scenes), strict=True):
        assert outcome.hung == [], scene
        report = outcome.reports[0]
        assert re.search("rank 1 has ended, and this rank waits for it: look at the output of rank 1", report["error"]), report
        assert report["ended"] - outcome.happened < 5, report
