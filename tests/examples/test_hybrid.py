"""Programs that train hybrid models: the example, and DeepSpeed's and Hugging Face's with such a model in the place of a Llama."""

from __future__ import annotations

import pytest

from tests.examples.programs import EXAMPLES, losses, needs_deepspeed, plain_sgd, run

SIZES = """dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    **dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, attn_layer_indices=[1], bos_token_id=None, eos_token_id=None),
)
"""


def hybrid(name, folder):
    """A copy of a program that trains Bamba."""
    text = (EXAMPLES / name).read_text().replace("Llama", "Bamba")
    before, after = text.split("sizes = dict(", 1)
    path = folder / name
    path.write_text(before + "sizes = " + SIZES + after.split("\n", 1)[1])
    return path


@pytest.mark.thorough
def test_the_example():
    printed = run(EXAMPLES / "hybrid_model.py", ranks=2)
    assert "all within bounds" in printed
    found = losses(printed)
    assert len(found) == 4 and found[-1] < found[0] - 0.3, "it learns"


@pytest.mark.thorough
@needs_deepspeed
def test_zero_3_takes_the_steps_of_one_process(tmp_path):
    found = losses(run(hybrid("train_deepspeed.py", tmp_path), ranks=2, within=(plain_sgd,)))
    assert found == pytest.approx(losses(run(hybrid("train_huggingface.py", tmp_path), ranks=1, within=(plain_sgd,))), rel=2e-5)
    assert found[-1] < found[0] - 0.3, "it learns"
