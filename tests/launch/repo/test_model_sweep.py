"""`launch/repo/model_sweep.py`, which runs the language models of transformers on shards; tests/integrations run parts of it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "launch" / "repo"))
    return importlib.import_module("model_sweep")


@pytest.mark.parametrize(("page", "classes"), [("models.md", 200), ("models-4.57.md", 150)])
def test_the_page_holds_every_class_and_none_is_wrong(sweep, page, classes):
    found = sweep.rows((sweep.PAGES / page).read_text())
    assert len(found) > classes
    assert all(one.status in (sweep.EQUAL, sweep.REFUSED, sweep.NOT_MADE) and one.note for one in found)


def test_rows_of_a_page_are_read_as_they_were_written(sweep):
    fates = [sweep.ModelFate("A", "causal", sweep.EQUAL, "1e-15"), sweep.ModelFate("B", "masked", sweep.REFUSED, "b has no table")]
    assert sweep.rows(sweep.page(fates, 2, "zigzag")) == fates


@pytest.mark.parametrize(
    ("replies", "status"),
    [
        ([("equal", "1e-15")] * 2, "equal"),
        ([("refused", "why")] * 2, "refused"),
        ([("refused", "why"), ("equal", "1e-15")], "WRONG"),
        ([("equal", "1e-15"), None], "WRONG"),
        ([("equal", "1e-15"), ("WRONG", "logits differ")], "WRONG"),
        ([("not constructible", "too large"), None], "not constructible"),
    ],
)
def test_what_all_ranks_say_is_judged(sweep, replies, status):
    assert sweep.judged(replies)[0] == status


def test_differences(sweep):
    one = torch.ones(3, dtype=torch.float64)
    assert sweep.difference(one, one) == 0 == sweep.difference(None, None) == sweep.difference(0 * one, None)
    assert sweep.difference(one * 1.5, one) == 0.5
    assert sweep.difference(one, None) == sweep.difference(one * float("nan"), one) == float("inf")


def test_models_run_in_fp64_where_they_ask_for_fp32(sweep):
    with sweep._Double():
        assert torch.ones(2, dtype=torch.float32).dtype == torch.ones(2).double().float().dtype == torch.float64
        assert nn.functional.softmax(torch.ones(2).double(), dim=-1, dtype=torch.float32).dtype == torch.float64
