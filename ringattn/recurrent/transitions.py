"""Transitions: what a whole segment does to the state that it begins with.

A segment of a recurrence ends with `apply(total, state) + written`: `total` is the product of its tokens' transitions, and `written` the
state that it would end with from zero. Without a decay the product is 1. Of decays it is their product, kept as a logarithm that cannot
underflow. With the delta rule each token multiplies by a_t (1 - beta_t k_t k_t^T): the product differs from a multiple of the identity in
as many directions as the segment has tokens, so it is kept as the whole matrix (d_k, d_k). Keys and betas, from which other ranks could
make it, are more numbers as soon as a segment has more than d_k tokens.

Shapes: totals are (b, h, numbers), states (b, h, d_k, d_v).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


class Transition(ABC):
    """A kind of transition, and how many numbers a head's total is."""

    numbers: int

    @abstractmethod
    def apply(self, total: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What is left of a state."""

    @abstractmethod
    def transposed(self, total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the state before, from the gradient of what is left of it."""


@dataclass(frozen=True)
class Decays(Transition):
    """Sums of logarithms of decays: none, one a head, or one for each of d_k rows of the state."""

    numbers: int  # pyrefly: ignore[bad-override]

    def apply(self, total: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return total.exp()[..., None] * state if self.numbers else state

    def transposed(self, total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return self.apply(total, gradient)


@dataclass(frozen=True)
class Matrices(Transition):
    """Matrices (d_k, d_k), row by row."""

    d_k: int

    @property
    def numbers(self) -> int:  # pyrefly: ignore[bad-override]
        return self.d_k**2

    def apply(self, total: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self._matrix(total) @ state

    def transposed(self, total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return self._matrix(total).mT @ gradient

    def _matrix(self, total: torch.Tensor) -> torch.Tensor:
        return total.unflatten(-1, (self.d_k, self.d_k))
