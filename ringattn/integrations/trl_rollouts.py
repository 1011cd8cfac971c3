"""Completions of prompts that all ranks of a ring share: generated around the ring, or made by a `rollout_func` of the user."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F

from ..runtime.agree import Facts, agree, refusing
from ..transport import Ranks

_ROLLOUT = Facts({"function": "completions of a ring"})


def generated(prompts: list, trainer: Any) -> dict[str, Any]:
    """What the model answers, generated around the ring: a `rollout_func`."""
    from .generation import RingCache
    from .huggingface_inputs import cache_name

    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
    assert images is None, "only text is possible around a ring"
    longest = max(len(ids) for ids in prompt_ids)
    device, padding = trainer.accelerator.device, trainer.generation_config.pad_token_id
    rows = [torch.tensor(ids, device=device) for ids in prompt_ids]
    ids = torch.stack([F.pad(row, (longest - len(row), 0), value=padding) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    most = longest + trainer.max_completion_length
    was_training = model.training
    model.eval()
    with torch.no_grad():
        cache = RingCache(model, tokens=len(rows) * most, sequences=len(rows))
        out = model.generate(ids, attention_mask=mask, **{cache_name(model): cache}, generation_config=trainer.generation_config)
    model.train(was_training)
    ends = set(trainer.eos_token_ids)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [_to_end(row, ends) for row in out[:, longest:].tolist()],
        "logprobs": None,
    }


def _to_end(tokens: list[int], ends: set[int]) -> list[int]:
    """A completion up to its first end token, which is part of it."""
    return tokens[: next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))]


def of_first_rank(ranks: Ranks, made: dict[str, Any]) -> dict[str, Any]:
    """What the first rank of a ring made, on every rank of it; a collective."""
    with refusing(ranks):
        try:
            record = json.dumps(made).encode() if ranks.rank == 0 else b""
        except TypeError as error:
            raise ValueError(f"rollout_func returned what JSON does not know ({error}): return lists, numbers and texts") from None
    lengths, _ = agree(ranks, _ROLLOUT, len(record))
    records = ranks.all_gather_control(record.ljust(lengths[0], b" "))
    assert records is not None
    return json.loads(records[0])
