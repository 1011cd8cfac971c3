"""Runs `interpreter_cases.py` and `paged_cases.py` through Triton's interpreter."""

import pytest

from tests.kernels import interpreted


# the limit of a single test is for hangs; this test runs a hundred in a row, on a machine that may be shared
@pytest.mark.timeout(1200)
def test_kernels_through_the_interpreter():
    interpreted.run("interpreter_cases.py", "paged_cases.py")
