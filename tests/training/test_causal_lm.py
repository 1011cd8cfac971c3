"""`ringattn.training.causal_lm`: shifted labels, the chunked loss, and gradients summed over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ringattn.training.causal_lm import IGNORE, shift_labels, sum_gradients, token_loss


def test_labels_are_the_next_tokens():
    tokens = torch.tensor([[5, 6, 7], [1, 2, 3]])
    assert shift_labels(tokens).tolist() == [[6, 7, IGNORE], [2, 3, IGNORE]]
    assert shift_labels(torch.empty(1, 0, dtype=torch.int64)).shape[0] == 1


@pytest.mark.parametrize("chunk", [1, 7, 31, 64])
def test_loss_and_gradients_equal_those_of_whole_logits(chunk):
    torch.manual_seed(0)
    hidden = torch.randn(2, 31, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(17, (2, 31))
    labels[0, 3:9] = IGNORE
    whole = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    expected = torch.autograd.grad(whole, (hidden, weight))
    loss = token_loss(hidden, weight, labels, chunk)
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), expected, rtol=1e-10, atol=1e-12)


def test_low_precision_logits_are_reduced_in_fp32():
    hidden = torch.randn(1, 5, 8, dtype=torch.bfloat16)
    assert token_loss(hidden, torch.randn(9, 8, dtype=torch.bfloat16), torch.zeros(1, 5, dtype=torch.int64)).dtype == torch.float32


def test_an_empty_shard_has_zero_loss_and_gradients():
    hidden = torch.randn(1, 0, 8, requires_grad=True)
    weight = torch.randn(17, 8, requires_grad=True)
    loss = token_loss(hidden, weight, torch.empty(1, 0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert weight.grad.abs().max() == 0
    assert hidden.grad.shape == (1, 0, 8)


@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "chunk", "message"),
    [
        ((1, 4, 8), (9, 8), (1, 5), 2, r"hidden has the tokens \(1, 4\) and labels \(1, 5\)"),
        ((1, 4, 8), (8, 9), (1, 4), 2, r"weight has shape \(8, 9\)"),
        ((1, 4, 8), (9, 8), (1, 4), 0, "chunk is 0"),
    ],
    ids=["tokens", "weight", "chunk"],
)
def test_bad_shapes_are_named(hidden, weight, labels, chunk, message):
    with pytest.raises(ValueError, match=message):
        token_loss(torch.zeros(hidden), torch.zeros(weight), torch.zeros(labels, dtype=torch.int64), chunk)


def gradients_of_ranks(group, with_missing):
    rank = group.rank()
    first, second, unused, frozen = (torch.nn.Parameter(torch.ones(3)) for _ in range(4))
    frozen.requires_grad_(False)
    first.grad = torch.full((3,), float(rank + 1))
    if not (with_missing and rank == 1):
        second.grad = torch.full((3,), 10.0)
    sum_gradients([first, second, unused, frozen, first], group)  # a tied parameter comes twice
    assert frozen.grad is None
    assert unused.grad is None, "AdamW would decay a parameter that has zeros for a gradient"
    return first.grad, second.grad


@pytest.mark.parametrize("with_missing", [False, True])
def test_gradients_are_summed_over_ranks(gloo, with_missing):
    for first, second in gloo.run(3, gradients_of_ranks, with_missing):
        assert first.tolist() == [6.0] * 3
        assert second.tolist() == [20.0 if with_missing else 30.0] * 3


def test_gradients_of_one_rank_stay():
    parameter = torch.nn.Parameter(torch.ones(3))
    sum_gradients([parameter])
    assert parameter.grad is None
