"""The examples of a page each: started alone, and by torchrun."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pytest
import tokenizers
import torch
import transformers

from tests.examples.programs import EXAMPLES, TORCHRUN, run, succeed


def errors(printed: str, ranks: int) -> list[float]:
    """The largest difference from dense attention on each rank."""
    found = [float(line.rsplit(maxsplit=1)[-1]) for line in printed.splitlines() if f"of {ranks}" in line]
    assert len(found) == ranks
    return found


MINIMAL = EXAMPLES / "ring_attention_minimal.py"


def test_minimal():
    assert max(errors(run(MINIMAL), 1)) < 1e-5


@pytest.mark.thorough
def test_minimal_under_torchrun():
    assert max(errors(succeed(*TORCHRUN, 2, MINIMAL), 2)) < 1e-5


def test_hybrid_mesh():
    printed = run(EXAMPLES / "hybrid_mesh.py", ranks=4)
    assert printed.count("a mesh of (2, 2)") == 4
    assert max(errors(printed, 4)) < 1e-5


GPT2 = [EXAMPLES / "gpt2.py", "--size", "tiny", "--tokens", 122, "--lr", 0.01, "--seconds", 100]


def gpt2_losses(out, *options, ranks=1):
    """Losses by length of sequences and attention."""
    printed = run(*GPT2, *options, "--out", out, ranks=ranks)
    cells = json.loads(out.read_text())
    assert printed.count("| tiny |") == len({cell["context"] for cell in cells})
    assert all(cell["steps_a_second"] > 0 and cell["batch"] == max(1, 122 // cell["context"]) for cell in cells)
    return {(cell["context"], cell["attention"]): cell["losses"] for cell in cells}


def test_gpt2(tmp_path):
    """Without dropout a ring has the losses of eager attention; with it, it learns."""
    out = tmp_path / "out.json"
    exact = ["--dropout", 0.0, "--steps", 4, "--context", 61, 128]
    whole = gpt2_losses(out, *exact)
    assert set(whole) == {(context, attention) for context in (61, 128) for attention in ("ring", "sdpa", "eager")}
    for (context, attention), losses in [*whole.items(), *gpt2_losses(out, *exact, ranks=2).items()]:
        assert losses == pytest.approx(whole[context, "eager"], rel=2e-5), (context, attention)
    (learned,) = gpt2_losses(out, "--attention", "ring", "--context", 61, "--steps", 30).values()
    assert learned[-1] < learned[0] - 1.0


@pytest.mark.thorough
def test_gpt2_stops_when_the_time_is_over_on_all_ranks(tmp_path):
    # shards of one length: on a CPU all dropout draws from one generator
    (losses,) = gpt2_losses(tmp_path / "out.json", "--context", 60, "--seconds", 0, ranks=2).values()
    assert 5 < len(losses) < 300


@pytest.mark.thorough
def test_gpt2_shows_what_ran_out_of_memory(monkeypatch, capsys):
    program = runpy.run_path(str(EXAMPLES / "gpt2.py"))

    def train(cell, given, device):
        cell.losses.append(1.0)
        cell.steps_a_second = 2.0
        if (cell.context, cell.attention) == (4096, "eager"):
            raise torch.OutOfMemoryError

    monkeypatch.setitem(program["main"].__globals__, "train", train)
    monkeypatch.setattr(sys, "argv", ["gpt2.py"])
    monkeypatch.delenv("RANK", raising=False)
    program["main"]()
    printed = capsys.readouterr().out
    assert "medium, 2 x 4096 tokens, eager: out of memory" in printed
    assert "| small | 8 x 1,024 | 2.00 (1.00) | 2.00 (1.00) | 2.00 (1.00) |" in printed
    assert "| small | 2 x 4,096 | 2.00 (1.00) | 2.00 (1.00) | out of memory |" in printed
    assert "| medium | 1 x 16,384 | 2.00 (2.00) | 2.00 (2.00) | 2.00 (2.00) |" in printed


def test_verifying_a_model_of_ones_own(tmp_path):
    """docs/training.md has the program."""
    page = (EXAMPLES.parent / "docs" / "training.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "whole=" in code]
    (tmp_path / "verify.py").write_text(code)
    run(tmp_path / "verify.py", ranks=2)
    (tmp_path / "verify.py").write_text(code.replace('reduction="sum"', 'reduction="mean"').replace("assert", "print(report) #"))
    assert "hint: outputs are right in every row; likely a mean over each rank's tokens" in run(tmp_path / "verify.py", ranks=2)


def answers(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("'")]


@pytest.mark.thorough
def test_chat_with_a_book(tmp_path):
    """The answers of two ranks are those of one, of a model in a folder about a text file; without either the program runs too."""
    path, ask = EXAMPLES / "chat_with_a_book.py", ("--answer-tokens", 5, "--ask", "Who?", "--ask", "Why is it so?")
    two = run(path, "--characters", 300, *ask, ranks=2)
    assert len(answers(two)) == 2 and "read 300 tokens on 2 ranks in" in two
    assert two.count("first token after") == two.count(" ms, then ") == 2
    letters = {chr(i): i for i in range(128)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = transformers.MistralConfig(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, sliding_window=9,
                                        num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)  # fmt: skip
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "book.txt").write_text("Call me Ishmael. " * 9)
    one, two = (run(path, "--model", tmp_path, "--text", tmp_path / "book.txt", *ask, ranks=ranks) for ranks in (1, 2))
    assert "read 153 tokens on 2 ranks in" in two
    assert len(answers(one)) == 2 and answers(one) == answers(two)


@pytest.mark.thorough
def test_drawing(tmp_path):
    run(EXAMPLES / "draw_layouts_and_masks.py", "--seq-len", 48, "--ranks", 3, "--out", tmp_path)
    run(EXAMPLES / "draw_ring.py", "--out", tmp_path)
    for name in ("layouts_and_masks.png", "documents_balanced.png", "ring_of_gpus.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
