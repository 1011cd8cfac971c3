"""What a benchmark of many ranks computes: its shape, its mask, its layout and its random inputs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

import ringattn as ra

from .ranks import RankGroup

Tensors = tuple[torch.Tensor, ...]


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The arguments of every benchmark of many ranks that say what is computed."""
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mask", default="causal", help="causal, full, window:TOKENS or documents:NUMBER (of skewed lengths)")


@dataclass(frozen=True)
class RingCase:
    """One size: batch 1, bf16 on GPUs and fp32 on CPUs. score: of our own methods."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    device: str
    mask: ra.Mask
    ranks: RankGroup
    score: ra.ScoreMod | None = None

    def layout(self, kind: str = "") -> ra.Layout:
        return make_layout(kind, self.mask, self.tokens, self.ranks.size)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @cached_property
    def forward_flop(self) -> float:
        """Operations of a forward pass, the mean over ranks: two products over the live pairs."""
        pairs = self.layout().work(self.mask).sum()
        return 4 * float(pairs) * self.heads * self.head_dim / self.ranks.size

    def whole(self) -> Tensors:
        """q, k, v and dout of the whole sequence, the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(0)
        return tuple(self._random(self.tokens, h, generator) for h in self._heads)

    def shards(self, layout: ra.Layout) -> Tensors:
        """q, k, v and dout of this rank's length, of random numbers."""
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        return tuple(self._random(layout.lengths[dist.get_rank()], h, generator) for h in self._heads)

    def keys(self) -> Tensors:
        """k and v of the whole sequence's length."""
        return tuple(self._random(self.tokens, self.kv_heads, None) for _ in range(2))

    @property
    def _heads(self) -> tuple[int, ...]:
        """Of q, k, v and dout."""
        return self.heads, self.kv_heads, self.kv_heads, self.heads

    def _random(self, tokens: int, heads: int, generator: torch.Generator | None) -> torch.Tensor:
        return torch.randn(1, tokens, heads, self.head_dim, device=self.device, dtype=self.dtype, generator=generator)


def make_case(tokens: int, ranks: RankGroup, arguments: argparse.Namespace) -> RingCase:
    """The case of the command line's shape and mask at one size."""
    shape = arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.device
    return RingCase(tokens, *shape, parse_mask(arguments.mask, tokens), ranks)


def parse_mask(text: str, tokens: int) -> ra.Mask:
    """The mask that `--mask` names.

    `documents:N`: the n-th of N documents is proportional to 1 / n, so that the first is long and most are short.
    """
    word, _, number = text.partition(":")
    counted = number.isdigit() and int(number) > 0
    if not (counted if word in ("window", "documents") else word in ("causal", "full") and not number):
        raise ValueError(f"mask is {text!r}, but must be causal, full, window:TOKENS or documents:NUMBER, such as window:4096")
    if word == "documents":
        weights = [1 / (n + 1) for n in range(int(number))]
        lengths = [int(tokens * weight / sum(weights)) for weight in weights]
        return ra.documents(lengths=[tokens - sum(lengths[1:]), *lengths[1:]]) & ra.causal()
    if word == "window":
        return ra.sliding_window(int(number) - 1, 0)
    return ra.causal() if word == "causal" else ra.full()


def log_normal_lengths(mean: int, sigma: float, total: int, seed: int, longest: int | None = None) -> list[int]:
    """Log-normal lengths with this mean, of up to `longest` tokens; the last one is cut to fill `total`."""
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    left = total
    while left:
        length = int(generator.lognormal(np.log(mean) - sigma**2 / 2, sigma))
        lengths.append(min(max(1, length), left, left if longest is None else longest))
        left -= lengths[-1]
    return lengths


# name -> layout of (mask, tokens, ranks)
LAYOUTS: dict[str, Callable[[ra.Mask, int, int], ra.Layout]] = {
    "balanced": ra.balanced,
    "placed": ra.placed,
    "zigzag": lambda _, *sizes: ra.zigzag(*sizes),
    "striped": lambda _, *sizes: ra.striped(*sizes),
    "contiguous": lambda _, *sizes: ra.contiguous(*sizes),
}


def make_layout(kind: str, mask: ra.Mask, tokens: int, ranks: int) -> ra.Layout:
    """The layout of a name in `LAYOUTS`; zigzag if the name is empty."""
    return LAYOUTS[kind or "zigzag"](mask, tokens, ranks)
