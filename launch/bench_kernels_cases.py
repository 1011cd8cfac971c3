"""The cases of `bench.py kernels`: what is computed, as tiles, and how much work that is.

Work is counted on live pairs alone: a forward takes two products (d and d_v operations deep), a backward five (three of d, two of d_v),
2 operations a pair, head and element. With d = d_v that is 4 and 10 * pairs * heads * d.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

import ringattn as ra
from ringattn.geometry.plan import Tiles, move_keys
from ringattn.geometry.rows import Rows

SEQUENCES = (4096, 8192, 16384, 32768, 65536)
HEAD_DIMS = ("128", "64", "96", "256", "192/128")
EVERYWHERE = ("128", "64")  # the others are measured at one length
KINDS = ("dense", "zigzag", "packed", "short")
ZIGZAG_RANKS = 8
# (queries, keys, heads, key/value heads, head dims) with few blocks of queries, of keys, or both; as long as each other: causal
SHORT = (
    (2048, 131072, 4, 4, "128"),
    (128, 131072, 4, 4, "128"),
    (512, 32768, 8, 2, "128"),
    (2560, 16384, 8, 8, "128"),
    (1024, 2048, 8, 8, "128"),
    (2048, 2048, 32, 8, "128"),
    (4096, 4096, 4, 4, "128"),
    (8192, 8192, 2, 2, "128"),
    (2048, 1024, 32, 8, "128"),
    (16384, 512, 8, 8, "128"),
    (65536, 77, 8, 8, "128"),
    (2048, 131072, 4, 4, "64"),
    (1024, 16384, 16, 4, "64"),
    (8192, 1024, 8, 2, "64"),
    (640, 16384, 16, 4, "256"),
    (1280, 16384, 16, 16, "192/128"),
)


@dataclass(frozen=True)
class Case:
    """One call of attention: `tokens` queries, batch 1."""

    kind: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    mask: str = "causal"
    keys: int = 0  # as many as tokens, or, of a zigzag rank, as those of all ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.keys or self.tokens * (ZIGZAG_RANKS if self.kind == "zigzag" else 1))

    @property
    def name(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.v_dim else f"{self.head_dim}/{self.v_dim}"
        rows = f"{self.tokens} x {self.keys}" if self.kind == "short" else f"{self.tokens}"
        return f"{self.kind} {rows} D{dims} {self.heads}:{self.kv_heads} {self.mask}"

    @cached_property
    def documents(self) -> tuple[int, ...]:
        """Lengths of 32 packed documents, short and long ones mixed."""
        assert self.kind == "packed"
        weights = np.random.default_rng(0).lognormal(sigma=1.0, size=32)
        ends = np.round(np.cumsum(weights) / weights.sum() * self.tokens).astype(int)
        return tuple(np.diff([0, *ends]).tolist())

    @cached_property
    def tiles(self) -> Tiles:
        """The live pairs, for the kernels."""
        if self.kind == "zigzag":
            # the work of one rank: its two spans against all, as one table over the whole K/V
            plan = ra.make_plan(ra.zigzag(self.tokens * ZIGZAG_RANKS, ZIGZAG_RANKS), ra.causal())
            bases = np.cumsum([0, *plan.lengths])
            parts = [move_keys(plan.tiles(0, owner), Rows.span(0, n), int(bases[owner])) for owner, n in enumerate(plan.lengths)]
            return Tiles(np.concatenate(parts), self.tokens, self.keys)
        if self.mask == "full":
            return Tiles(np.array([(0, self.tokens, 0, self.keys, -self.keys, self.tokens)]), self.tokens, self.keys)
        mask = ra.documents(self.documents) if self.kind == "packed" else ra.causal()
        return Tiles(ra.make_plan(ra.contiguous(self.tokens, 1), mask).tiles(0, 0), self.tokens, self.tokens)

    def flop(self, direction: str) -> float:
        """Operations on live pairs, "forward" or "backward"."""
        d, dv = self.head_dim, self.v_dim
        return 2.0 * self.tiles.pairs * self.heads * {"forward": d + dv, "backward": 3 * d + 2 * dv}[direction]

    @property
    def dense_alike(self) -> Case:
        """One causal call of as many operations, in whole blocks of 128 rows."""
        side = round((2 * self.tiles.pairs) ** 0.5 / 128) * 128
        return replace(self, kind="dense", tokens=max(side, 128), mask="causal", keys=0)


def dims(text: str) -> tuple[int, int]:
    """`128` or `192/128`: the head dims of q and k, and of v."""
    parts = [int(part) for part in text.split("/")]
    if len(parts) > 2 or min(parts) < 1:
        raise ValueError(f"a head dim is {text!r}, but must be one number, or two with a / between")
    return parts[0], parts[-1]


def table(
    kinds: Iterable[str] = KINDS,
    sequences: Iterable[int] | None = None,
    head_dims: Iterable[str] | None = None,
    heads: int = 32,
    kv_heads: Iterable[int] = (32, 8),
    masks: Iterable[str] = ("causal", "full"),
) -> list[Case]:
    """The cases asked for; with neither sequences nor head dims given, all lengths of the common head dims and one of the others."""
    cases = []
    if "dense" in kinds:
        for text in head_dims or HEAD_DIMS:
            everywhere = head_dims is not None or text in EVERYWHERE
            for tokens in sequences or (SEQUENCES if everywhere else (16384,)):
                cases += [Case("dense", tokens, heads, kv, *dims(text), mask) for kv in kv_heads for mask in masks]
    if "zigzag" in kinds:
        cases.append(Case("zigzag", 16384, heads, min(8, heads), 128, 128))
    if "packed" in kinds:
        cases.append(Case("packed", 65536, heads, heads, 128, 128))
    if "short" in kinds:
        for queries, keys, h, kv, text in SHORT:
            cases.append(Case("short", queries, h, kv, *dims(text), "causal" if queries == keys else "full", keys))
    return cases


def quick() -> list[Case]:
    """A glance, in two head dims, so that little has to be compiled: under 90 seconds on one H200."""
    dense = [
        Case("dense", 16384, 32, 8, 128, 128, "causal"),
        Case("dense", 16384, 32, 32, 128, 128, "full"),
        Case("dense", 16384, 32, 8, 64, 64, "causal"),
        Case("dense", 16384, 32, 32, 64, 64, "full"),
    ]
    return [*dense, *table(("zigzag", "packed"))]
