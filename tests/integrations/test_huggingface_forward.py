"""Attached models that modify scores keep the numerics contract: outputs and all gradients against the model's own attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import ringattn as ra
from ringattn.integrations.huggingface import attach_seeded
from ringattn.verification import FLOOR
from ringattn.whole_step import OwnAttention, dense_copy, in_fp64
from tests.scored_models import EACH, VOCAB, build, squares

P, SEED = 0.2, 0
BOUND = 2.0  # of outputs


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """BLOOM and MPT round scores to fp32."""
    to_float = torch.Tensor.float
    with mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 and x.dim() == 4 else to_float(x)):
        yield


def outputs_of_whole(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), OwnAttention(SEED):
        return model(input_ids=tokens)[0].double()


def errors(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The root mean square, and the worst element."""
    away = value - exact
    return torch.stack([away.norm() / exact.norm(), away.abs().max() / exact.abs().max()])


@pytest.mark.parametrize("name", EACH)
# up to 255 tokens, because Falcon's biases are of positions rounded to bf16
@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "n"),
    [
        pytest.param("cpu", torch.float32, 8, 41, id="fp32"),
        pytest.param("cuda", torch.float32, 64, 255, id="fp32 on a GPU", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 64, 255, id="bf16 on a GPU", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 128, 255, id="bf16 on a GPU, wide heads", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.some(5)
def test_outputs_and_gradients_keep_the_contract(name, device, dtype, head_dim, n):
    model = build(name, head_dim, P).to(device, dtype)
    tokens = torch.randint(VOCAB, (2, n), generator=torch.Generator().manual_seed(1)).to(device)
    with exactly():
        report = ra.verify(model, dict(input_ids=tokens), loss=squares)
        exact = outputs_of_whole(in_fp64(dense_copy(model)), tokens)
    # the loss, one number, may be exact by chance; the outputs have more to say
    assert all(row.passed for row in report.differences if row.name != "loss"), report
    theirs = errors(outputs_of_whole(dense_copy(model), tokens), exact)
    attach_seeded(model, ra.zigzag(n, 1), None, None, (), SEED)
    with torch.no_grad():
        ours = errors(model(input_ids=tokens)[0].double(), exact)
    measured = 1 if dtype == torch.float32 else 2  # the worst element in fp32 depends on the order of a few sums
    assert (ours <= (BOUND * theirs).clamp(min=FLOOR[dtype]))[:measured].all(), (ours, theirs)
