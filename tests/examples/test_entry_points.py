"""Each `train_*.py` on two ranks takes the steps of one process that sees whole sequences with its model's own dense attention.

The losses of four steps agree only if attention, labels, positions, the mean over unequal numbers of tokens, the wrapper's sum of
gradients and the norm by which they are clipped are right.
"""

from __future__ import annotations

import functools
import re

import pytest

from tests.examples.programs import (
    EXAMPLES,
    dense_attention,
    losses,
    needs_accelerate,
    needs_deepspeed,
    needs_diffusers,
    needs_lightning,
    needs_megatron,
    needs_trl,
    plain_sgd,
    run,
)

# the program, and the one that takes the same steps without a wrapper
PROGRAMS = [
    ("torch", "module"),
    ("module", "module"),
    ("sdpa", "module"),
    ("ring_flash_attn", "ring_flash_attn"),
    ("huggingface", "huggingface"),
    ("fsdp2", "huggingface"),
    pytest.param("deepspeed", "huggingface", marks=needs_deepspeed),
    pytest.param("trainer", "huggingface", marks=needs_accelerate),
    pytest.param("accelerate", "accelerate", marks=needs_accelerate),
    pytest.param("lightning", "lightning", marks=[needs_lightning, pytest.mark.thorough]),
]


@functools.cache
def dense(name: str) -> list[float]:
    return losses(run(EXAMPLES / f"train_{name}.py", ranks=1, within=(dense_attention, plain_sgd)))


@pytest.mark.parametrize(("name", "same"), PROGRAMS)
@pytest.mark.some(3)
def test_two_ranks_take_the_steps_of_one_process(name, same):
    found = losses(run(EXAMPLES / f"train_{name}.py", ranks=2, within=(plain_sgd,)))
    assert len(found) == 4
    assert found == pytest.approx(dense(same), rel=2e-5)
    assert found[-1] < found[0] - 0.3, "it learns"


@needs_diffusers
@pytest.mark.thorough
def test_three_ranks_train_the_transformer_of_one():
    """tests/integrations/test_diffusers.py compares such models with dense attention."""
    one, three = (losses(run(EXAMPLES / "train_diffusers.py", ranks=ranks, within=(plain_sgd,))) for ranks in (1, 3))
    assert len(one) == 4
    assert three == pytest.approx(one, rel=2e-5)


@needs_megatron
@pytest.mark.thorough
def test_three_ranks_train_the_gpt_of_one():
    """tests/integrations/test_megatron.py compares such models with dense attention."""
    one, three = (losses(run(EXAMPLES / "train_megatron.py", ranks=ranks, within=(plain_sgd,))) for ranks in (1, 3))
    assert len(one) == 4
    assert three == pytest.approx(one, rel=2e-5)
    assert one[-1] < one[0] - 0.2, "it learns"


@pytest.mark.thorough
def test_packed_documents():
    """The program compares its first step with dense attention itself; in the last it has learned what holds for documents never seen."""
    printed = run(EXAMPLES / "train_packed.py", ranks=2)
    found = re.findall(r"loss (\S+) over (\d+) tokens of 2 ranks", printed)
    (first, tokens), (last, others) = [(float(loss), int(number)) for loss, number in found]
    assert last < first / 5
    assert tokens != others, "documents are new"


@pytest.mark.thorough
@needs_trl
def test_documents_packed_by_trl(monkeypatch):
    monkeypatch.setenv("CI", "1")  # trl sends no figures of its use
    found, alone = (losses(run(EXAMPLES / "sft_trl.py", ranks=ranks)) for ranks in (2, 1))
    assert len(found) == 4
    assert found == pytest.approx(alone, rel=2e-5)
    assert found[-1] < found[0] - 0.3, "it learns"


@pytest.mark.parametrize("path", [*sorted(EXAMPLES.glob("train_*.py")), EXAMPLES / "sft_trl.py"], ids=lambda path: path.stem)
def test_they_are_short(path):
    assert len(path.read_text().splitlines()) < 60
