"""The tokens of a model's call with a `RingCache`: checked, and turned so that all rows begin together.

Shapes: b rows, n columns, m tokens of the longest row.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

# names of a model's argument: from transformers 5.24 on, the same one for all; before, Mamba's kind has the last
CACHES = ("cache", "past_key_values", "cache_params")

# arguments that a model runs with as they are, or that are made anew
_TAKEN = ("input_ids", "attention_mask", "position_ids", "cache_position", "logits_to_keep", *CACHES)


def cache_name(model: Any) -> str:
    """The name of a model's argument that takes a cache."""
    return _cache_name(type(model))


@functools.cache
def _cache_name(kind: type) -> str:
    takes = inspect.signature(kind.forward).parameters
    return next((name for name in CACHES if name in takes), "past_key_values")


def named_caches(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with a cache by the name that its model gives it: transformers 5.24 still takes the names of before."""
    former = [name for name in CACHES[1:] if kwargs.get(name) is not None]
    if not former or kwargs.get("cache") is not None or cache_name(model) != "cache":
        return kwargs
    return {name: value for name, value in kwargs.items() if name not in CACHES} | {"cache": kwargs[former[0]]}


@dataclass(frozen=True)
class CachedInputs:
    """New tokens of a call.

    ids: (b, m), each row's tokens first. counts: of them in each row of ids. columns: n. keeps: the last columns of logits that are
    wanted, 1 to n. visible: (b, seen + n) bool, which columns hold tokens; None: all. rows: by row of the call, its row of ids.
    """

    ids: torch.Tensor
    counts: list[int]
    columns: int
    keeps: int
    visible: torch.Tensor | None
    rows: list[int]
    digest: int  # 63 bits, of tokens and padding

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Of the longest row."""
        return self.ids.shape[1]

    @property
    def is_plain(self) -> bool:
        """Whether each row of the call is a row of ids, without padding."""
        return self.rows == list(range(len(self.ids))) and set(self.counts) == {self.columns}

    def places(self, columns: int) -> torch.Tensor:
        """(b, columns) int64: the positions, in ids, of the tokens in the last columns of the call's rows; -1 for padding."""
        if self.visible is None or min(self.counts) == self.columns:
            return torch.arange(self.columns)[-columns:].expand(self.batch_size, -1)
        new = self.visible[:, -self.columns :].cpu()
        return (new.cumsum(1) - 1).masked_fill(~new, -1)[:, -columns:]

    def without_repeats(self) -> CachedInputs:
        """These tokens, with rows that equal the one before computed once, such as those of beams."""
        # a row's padding may hold other numbers than the one before: it is then computed by itself
        equal = [False, *(self.ids[1:] == self.ids[:-1]).all(1).tolist()]
        rows, firsts = [], []
        for row, count in enumerate(self.counts):
            if not equal[row] or count != self.counts[row - 1]:
                firsts.append(row)
            rows.append(len(firsts) - 1)
        return replace(
            self, ids=self.ids[torch.tensor(firsts, device=self.ids.device)], counts=[self.counts[x] for x in firsts], rows=rows
        )


def check_inputs(
    model: Any, kwargs: dict[str, Any], lengths: Sequence[int], seen: int, before: torch.Tensor | None
) -> CachedInputs:
    """The tokens of a call. lengths: of the cached rows, in tokens. seen: their columns. before: (b, seen), which columns hold tokens.

    Raises ValueError for what a call with a cache cannot honour.
    """
    _check_options(model, kwargs)
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            "a model's call with a RingCache needs input_ids, a tensor (batch, tokens) of integers, the same on every rank"
        )
    b, n = ids.shape
    if not n:
        raise ValueError(
            f"no tokens are left to compute: the cache holds {seen} of each row, and input_ids must have these and new ones; or give the "
            "new ones with an attention_mask (batch, old + new)"
        )
    if seen and b != len(lengths):
        raise ValueError(
            f"input_ids has {b} rows, but the cache {len(lengths)}: for several answers or beams call cache.batch_repeat_interleave, or "
            "give one row for each of the cache"
        )
    visible = _visible(kwargs.get("attention_mask"), b, n, seen, before)
    new = None if visible is None else visible[:, seen:]
    counts = [n] * b if new is None else new.sum(1).tolist()
    if new is not None and not bool(new[:, -1].all()):
        raise ValueError("attention_mask hides the last token of a row: pad on the left (tokenizer.padding_side = 'left')")
    _check_positions(kwargs.get("position_ids"), lengths if seen else [0] * b, new, n)
    keeps = kwargs.get("logits_to_keep") or 0
    if not isinstance(keeps, int):
        raise ValueError("logits_to_keep is a tensor, but a call with a RingCache takes a number of last tokens")
    content = ids.to("cpu", torch.int64).contiguous().numpy().tobytes()
    content += b"" if new is None else new.cpu().contiguous().numpy().tobytes()
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
    if new is not None and min(counts) < n:
        # tokens first, in their order
        ids = ids.gather(1, new.to(ids.device).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : max(counts)])
    return CachedInputs(ids, counts, n, min(keeps, n) or n, visible, list(range(b)), digest)


def _check_options(model: Any, kwargs: dict[str, Any]) -> None:
    if torch.is_grad_enabled():
        raise ValueError("a RingCache keeps no gradients: call the model under torch.no_grad(), as generate does")
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds is given, but ranks compare the tokens of a call with a RingCache: give input_ids")
    if kwargs.get("return_dict") is False:
        raise ValueError("return_dict is False, but a call with a RingCache returns its output by name: leave it out")
    if kwargs.get("use_cache") is False:
        raise ValueError(
            "use_cache is False, perhaps from generation_config, but past_key_values is a RingCache: give use_cache=True"
        )
    for name, value in kwargs.items():
        if name not in _TAKEN and isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} is a tensor of shape {tuple(value.shape)}, but a call with a RingCache takes {', '.join(_TAKEN)} "
                "alone: leave it out"
            )
    for name in ("layout", "mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is given to a call with a RingCache, which takes whole tokens: make the cache with layout=")


def _visible(mask: Any, b: int, n: int, seen: int, before: torch.Tensor | None) -> torch.Tensor | None:
    """(b, seen + n) bool, or None if all columns hold tokens."""
    if mask is None:
        if before is None:
            return None
        return torch.cat([before, before.new_ones(b, n)], 1)
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (b, seen + n):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {shape}, but must be {(b, seen + n)}: for the {seen} columns in the cache and the {n} new ones"
        )
    mask = mask != 0
    old = mask[:, :seen]
    if not bool(old.all() if before is None else (old == before).all()):
        raise ValueError("attention_mask hides other tokens of the cache than it did when they came: give it as it was, and ones")
    return None if bool(mask.all()) else mask


def _check_positions(given: Any, lengths: Sequence[int], new: torch.Tensor | None, n: int) -> None:
    """Raise ValueError unless tokens are at the positions that follow those of the cache."""
    if given is None:
        return
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.shape[1] != n:
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ValueError(f"position_ids is {shape}, but a call with a RingCache takes one position for each token: leave it out")
    begin = torch.tensor(lengths, device=given.device)[:, None]
    if new is None:
        wrong = given != begin + torch.arange(n, device=given.device)
    else:
        new = new.to(given.device)
        wrong = (given != begin + new.cumsum(1) - 1) & new
    if bool(wrong.any()):
        raise ValueError(
            "position_ids are not those that follow the tokens in the cache: leave them out, and give input_ids or attention_mask of all "
            "tokens, old and new"
        )
