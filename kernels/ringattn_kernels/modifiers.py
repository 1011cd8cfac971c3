"""What happens to a scaled score before the softmax, and to a weight after it. This module imports torch only.

    score = softcap * tanh(score / softcap)              softcap (Gemma 2)
    score = score - slopes[b, h] * |distance|            ALiBi (Press et al. 2021)
    score = score + bias.values[h, piece(distance)]      relative position bias (T5, Raffel et al. 2019, section 2.1)
    weight = 0 or weight / (1 - p)                       dropout of weights (Dao et al. 2022, algorithm 2)

in this order, where distance is the global position of the key less that of the query.

Shapes: b batch, h query heads, n pieces of distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

ROUNDS = 7  # of Philox
LEVELS = 1 << 15  # of the numbers that decide which pairs are dropped


@dataclass(frozen=True, eq=False)
class Bias:
    """A number for each head and piece of distances. Piece i holds the distances from edges[i - 1] on, below edges[i].

    edges: ascending. values: (h, n), fp32 or fp64, contiguous, with n = len(edges) + 1.
    """

    edges: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True)
class Dropout:
    """Which pairs are dropped follows from these numbers, the batch, the head and the global positions alone.

    p: the probability, in [0, 1). seed: 64 bits. offset: 32 bits. heads: query heads of all ranks. first_head: the first one here.
    """

    p: float
    seed: int
    offset: int
    heads: int
    first_head: int = 0

    @property
    def dropped(self) -> int:
        """How many of the LEVELS numbers drop a pair."""
        return min(round(self.p * LEVELS), LEVELS - 1)

    @property
    def words(self) -> dict[str, int]:
        """seed and offset as kernels take them, in words of 32 bits with a sign: what differs between calls of a kind."""
        words = dict(seed_low=self.seed & 0xFFFFFFFF, seed_high=self.seed >> 32, offset=self.offset)
        return {name: word - (1 << 32) if word >> 31 else word for name, word in words.items()}


@dataclass(frozen=True, eq=False)
class Modifiers:
    """What is done to scores and weights. slopes: (b or 1, h), fp32 or fp64, contiguous."""

    softcap: float | None = None
    slopes: torch.Tensor | None = None
    bias: Bias | None = None
    dropout: Dropout | None = None

    @property
    def placed(self) -> bool:
        """Whether they depend on positions."""
        return not (self.slopes is None and self.bias is None and self.dropout is None)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """slopes and the values of a bias, where there are any."""
        values = None if self.bias is None else self.bias.values
        return tuple([x for x in (self.slopes, values) if x is not None])

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Modifiers:
        """The same with other tensors, in the order of `tensors`."""
        left = iter(tensors)
        slopes = None if self.slopes is None else next(left)
        bias = None if self.bias is None else replace(self.bias, values=next(left))
        return Modifiers(self.softcap, slopes, bias, self.dropout)

    @property
    def words(self) -> dict[str, int]:
        """Those of dropout, if there is one."""
        return {} if self.dropout is None else self.dropout.words

    @property
    def seed_and_offset(self) -> tuple[int, int] | None:
        """Of dropout, if there is one."""
        return None if self.dropout is None else (self.dropout.seed, self.dropout.offset)

    def of_heads(self, begin: int, end: int) -> Modifiers:
        """Those of some of the heads."""
        slopes = None if self.slopes is None else self.slopes[:, begin:end].contiguous()
        bias = None if self.bias is None else replace(self.bias, values=self.bias.values[begin:end].contiguous())
        dropout = None if self.dropout is None else replace(self.dropout, first_head=self.dropout.first_head + begin)
        return Modifiers(self.softcap, slopes, bias, dropout)


@dataclass(frozen=True, eq=False)
class ModifierSums:
    """Sums of the gradients of slopes and of a bias's values, in fp32 or fp64; each launch of a backward pass adds to them."""

    slopes: torch.Tensor | None
    values: torch.Tensor | None

    @classmethod
    def empty(cls, modifiers: Modifiers, slopes_too: bool = True, values_too: bool = True) -> ModifierSums:
        """Memory for those that are asked for, of what there is."""
        slopes, bias = modifiers.slopes, modifiers.bias
        return cls(
            torch.empty_like(slopes) if slopes is not None and slopes_too else None,
            torch.empty_like(bias.values) if bias is not None and values_too else None,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that there are."""
        return tuple([x for x in (self.slopes, self.values) if x is not None])

    @property
    def wanted(self) -> bool:
        """Whether there is something to add to."""
        return bool(self.tensors)

    def add_distances(self, found: torch.Tensor) -> None:
        """Add the gradient of slopes that follows from the sums of dS * |distance|: (b, h), fp64."""
        assert self.slopes is not None
        self.slopes.sub_(found if len(self.slopes) > 1 else found.sum(0, keepdim=True))
