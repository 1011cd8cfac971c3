"""The cases of `bench kernels`: what is computed, as tiles, and how many operations that is.

Only live pairs count. A forward takes two products (d and d_v operations deep), a backward five (three of d, two of d_v), with
2 operations per pair, head and element. With d = d_v that is 4 and 10 * pairs * heads * d.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

import ringattn as ra
from ringattn.geometry.plan import live_pairs, make_tiles, move_keys
from ringattn.geometry.rows import Rows
from ringattn_kernels.table import TileTable

SEQUENCES = (4096, 8192, 16384, 32768, 65536)
HEAD_DIMS = ("128", "64", "96", "256", "192/128")
EVERYWHERE = ("128", "64")  # head dims measured at every length; the others at one
ZIGZAG_RANKS = 8


@dataclass(frozen=True)
class KernelCase:
    """One call of attention with `tokens` queries, batch 1. Without `causal` every pair is live."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    causal: bool = True
    kind: ClassVar[str]

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.tokens

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def shown_rows(self) -> str:
        return f"{self.tokens}"

    @property
    def name(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.v_dim else f"{self.head_dim}/{self.v_dim}"
        return f"{self.kind} {self.shown_rows} D{dims} {self.heads}:{self.kv_heads} {self.mask}"

    @cached_property
    def tiles(self) -> TileTable:
        """The live pairs, for the kernels."""
        if not self.causal:
            return make_tiles(np.array([(0, self.tokens, 0, self.keys, -self.keys, self.tokens)]), self.tokens, self.keys)
        return self._tiles_of(ra.causal())

    def _tiles_of(self, mask: ra.Mask) -> TileTable:
        return make_tiles(ra.make_plan(ra.contiguous(self.tokens, 1), mask).tiles(0, 0), self.tokens, self.tokens)

    def flop(self, direction: str) -> float:
        """Operations on live pairs, "forward" or "backward"."""
        d, dv = self.head_dim, self.v_dim
        return 2.0 * live_pairs(self.tiles) * self.heads * {"forward": d + dv, "backward": 3 * d + 2 * dv}[direction]

    @property
    def dense_alike(self) -> DenseCase:
        """One causal call of as many operations, in whole blocks of 128 rows."""
        side = round((2 * live_pairs(self.tiles)) ** 0.5 / 128) * 128
        return DenseCase(max(side, 128), self.heads, self.kv_heads, self.head_dim, self.v_dim)


class DenseCase(KernelCase):
    """Queries and keys of one length."""

    kind = "dense"


class ZigzagCase(KernelCase):
    """What one rank of eight computes under a zigzag layout: its two spans of queries against all keys, in one table of tiles."""

    kind = "zigzag"

    @property
    def keys(self) -> int:
        return self.tokens * ZIGZAG_RANKS

    @cached_property
    def tiles(self) -> TileTable:
        plan = ra.make_plan(ra.zigzag(self.keys, ZIGZAG_RANKS), ra.causal())
        bases = np.cumsum([0, *plan.lengths])
        parts = [move_keys(plan.tiles(0, owner), Rows.span(0, n), int(bases[owner])) for owner, n in enumerate(plan.lengths)]
        return make_tiles(np.concatenate(parts), self.tokens, self.keys)


class PackedCase(KernelCase):
    """Documents in one sequence, causal within each."""

    kind = "packed"

    @cached_property
    def documents(self) -> tuple[int, ...]:
        """Lengths of 32 packed documents, short and long ones mixed."""
        weights = np.random.default_rng(0).lognormal(sigma=1.0, size=32)
        ends = np.round(np.cumsum(weights) / weights.sum() * self.tokens).astype(int)
        return tuple(np.diff([0, *ends]).tolist())

    @cached_property
    def tiles(self) -> TileTable:
        return self._tiles_of(ra.documents(self.documents))


@dataclass(frozen=True)
class ShortCase(KernelCase):
    """Few blocks of queries, of keys, or of both; causal if there are as many queries as keys."""

    key_count: int = 0
    kind = "short"

    @property
    def keys(self) -> int:
        return self.key_count

    @property
    def shown_rows(self) -> str:
        return f"{self.tokens} x {self.keys}"


KINDS = tuple(case.kind for case in (DenseCase, ZigzagCase, PackedCase, ShortCase))


def dims(text: str) -> tuple[int, int]:
    """`128` or `192/128`: the head dims of q and k, and of v."""
    parts = [int(part) for part in text.split("/")]
    if len(parts) > 2 or min(parts) < 1:
        raise ValueError(f"a head dim is {text!r}, but must be one number, or two with a / between")
    return parts[0], parts[-1]


def short(queries: int, keys: int, heads: str, head_dim: str) -> ShortCase:
    """A short case; `heads` is "query:key/value"."""
    h, hk = map(int, heads.split(":"))
    return ShortCase(queries, h, hk, *dims(head_dim), causal=queries == keys, key_count=keys)


def short_cases() -> list[ShortCase]:
    """The short problems that are measured."""
    return [
        short(2048, 131072, "4:4", "128"),
        short(128, 131072, "4:4", "128"),
        short(512, 32768, "8:2", "128"),
        short(2560, 16384, "8:8", "128"),
        short(1024, 2048, "8:8", "128"),
        short(2048, 2048, "32:8", "128"),
        short(4096, 4096, "4:4", "128"),
        short(8192, 8192, "2:2", "128"),
        short(2048, 1024, "32:8", "128"),
        short(16384, 512, "8:8", "128"),
        short(65536, 77, "8:8", "128"),
        short(2048, 131072, "4:4", "64"),
        short(1024, 16384, "16:4", "64"),
        short(8192, 1024, "8:2", "64"),
        short(640, 16384, "16:4", "256"),
        short(1280, 16384, "16:16", "192/128"),
    ]


def table(
    kinds: Iterable[str] = KINDS,
    sequences: Iterable[int] | None = None,
    head_dims: Iterable[str] | None = None,
    heads: int = 32,
    kv_heads: Iterable[int] = (32, 8),
    masks: Iterable[str] = ("causal", "full"),
) -> list[KernelCase]:
    """The cases asked for. With neither sequences nor head dims: all lengths of the common head dims, one length of the others."""
    cases: list[KernelCase] = []
    if DenseCase.kind in kinds:
        for text in head_dims or HEAD_DIMS:
            everywhere = head_dims is not None or text in EVERYWHERE
            for tokens in sequences or (SEQUENCES if everywhere else (16384,)):
                cases += [DenseCase(tokens, heads, kv, *dims(text), mask == "causal") for kv in kv_heads for mask in masks]
    if ZigzagCase.kind in kinds:
        cases.append(ZigzagCase(16384, heads, min(8, heads), 128, 128))
    if PackedCase.kind in kinds:
        cases.append(PackedCase(65536, heads, heads, 128, 128))
    if ShortCase.kind in kinds:
        cases += short_cases()
    return cases


def quick() -> list[KernelCase]:
    """A few cases, with two head dims so that little has to be compiled: under 90 seconds on one H200."""
    return [
        DenseCase(16384, 32, 8, 128, 128),
        DenseCase(16384, 32, 32, 128, 128, causal=False),
        DenseCase(16384, 32, 8, 64, 64),
        DenseCase(16384, 32, 32, 64, 64, causal=False),
        *table((ZigzagCase.kind, PackedCase.kind)),
    ]
