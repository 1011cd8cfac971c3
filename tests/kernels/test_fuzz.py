"""Random problems on a GPU: the numbers of 500, and the end of 1,000 more. `interpreter_cases.py` runs a few of each on a CPU."""

import pytest
import torch

from tests.kernels import fuzz

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


# the first ones compile dozens of variants
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_five_hundred_random_problems_against_dense_attention(first):
    fuzz.check(range(first, first + 50), fuzz.GPU)


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_a_thousand_launches_of_random_tables_end(first):
    fuzz.launch_many(range(first, first + 100), fuzz.GPU, seconds=240)
