"""Random calls; `make fuzz` makes many more. See `fuzz.py`."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ringattn.geometry.rows import Rows
from tests import fuzz
from tests.strategies import examples

pytestmark = pytest.mark.usefixtures("one_thread")

FIXED = settings(fuzz.SETTINGS, derandomize=True)


@settings(FIXED, max_examples=examples(50))
@given(fuzz.problems())
def test_random_calls_of_threads(problem):
    fuzz.check(problem, fuzz.run_threads(problem))


@settings(FIXED, max_examples=examples(20))
@given(problem=fuzz.problems(grids=False, longest=100))
def test_random_calls_over_gloo(gloo, problem):
    fuzz.check(problem, gloo.run(problem.world_size, fuzz.run_member, problem))


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@settings(FIXED, max_examples=25, phases=[Phase.generate])
@given(data=st.data())
def test_random_calls_on_gpus(nccl, data):
    problem = data.draw(fuzz.gpu_problems(nccl.size))
    fuzz.check(problem, fuzz.run_gpus(nccl, problem))


def test_a_lost_gradient_is_found(monkeypatch):
    @settings(FIXED, max_examples=100, phases=[Phase.generate])
    @given(fuzz.problems())
    def some(problem):
        fuzz.check(problem, fuzz.run_threads(problem))

    monkeypatch.setattr(Rows, "add_to", lambda rows, x, values: None)
    with pytest.raises(AssertionError, match=r"d[kv] on rank \d: error"):
        some()
