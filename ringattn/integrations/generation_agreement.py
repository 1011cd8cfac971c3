"""What ranks must agree on before a model's call with a `RingCache`: its tokens, and the generators that they were drawn from."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import torch

from ..runtime.agree import Facts, agree
from ..serving.pool import PagePool
from .huggingface_inputs import CachedInputs

_TOKENS, _DRAWS = 40, 22  # bits of digests, of a call's tokens and of a rank's generators


def agree_on_tokens(pool: PagePool, inputs: CachedInputs, seen: int, drawn: bytes) -> None:
    """Raise ValueError, on every rank, unless all ranks give the same tokens, and have drawn them from equal generators.

    seen: columns in the cache. drawn: the state of this rank's generators after the latest call.
    """
    now = generators(pool.device)
    # in a loop of steps, what moved the generators is the choice of the token
    drew = bool(seen) and inputs.columns == 1 and now != drawn
    number = inputs.digest >> (63 - _TOKENS) << (_DRAWS + 1) | _digest(now) >> (63 - _DRAWS) << 1 | drew
    facts = {
        "function": "a model's call with a RingCache",
        "cache": repr(pool),
        "batch size": inputs.batch_size,
        "tokens of a row": inputs.columns,
        "tokens of a row in the cache": seen,
    }
    numbers, _ = agree(pool.context.ranks, Facts(facts), number)
    tokens = [x >> (_DRAWS + 1) for x in numbers]
    draws = [x >> 1 & (1 << _DRAWS) - 1 for x in numbers]
    if len(set(tokens)) > 1:
        raise ValueError(
            f"ranks disagree on the tokens of a model's call with a RingCache: {_alike(tokens)} are ranks that agree: give the same "
            "whole input_ids and attention_mask on every rank; if tokens are sampled, call torch.manual_seed with one seed on all ranks"
        )
    if len(set(draws)) > 1 and any(x & 1 for x in numbers):
        raise ValueError(
            f"ranks sampled a token from generators in different states: {_alike(draws)} are ranks that agree: call "
            "torch.manual_seed with one seed on all ranks before generate"
        )


def _alike(values: Sequence[int]) -> str:
    """Which ranks have equal values."""
    holders: defaultdict[int, list[str]] = defaultdict(list)
    for rank, value in enumerate(values):
        holders[value].append(str(rank))
    return " / ".join(map(", ".join, holders.values()))


def generators(device: torch.device) -> bytes:
    """The state of the generators that tokens may be drawn from."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return b"".join(state.numpy().tobytes() for state in states)


def _digest(content: bytes) -> int:
    """63 bits."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
