"""What happens to a score between q k^T and the softmax: `score(...)` says it, and `ring_attention(..., score=...)` does it.

Shapes: b batch, s local tokens, h query heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ringattn_kernels.modifiers import Bias, Dropout, Modifiers

from . import check
from .digest import Digested, constant, find

_MOST_PIECES = 1024  # of distances: a program goes through those of its block
MOST_PLACES = 1 << 31  # tokens of a sequence whose positions matter: they are counters of 32 bits
_LARGEST_OFFSET = (1 << 32) - 1
_LARGEST_SEED = (1 << 63) - 1


@dataclass(slots=True)
class Score:
    """What a pass does to softmax_scale * (q . k). Tiles know nothing of sinks (h,), which a whole row counts once."""

    softmax_scale: float
    modifiers: Modifiers | None = None
    sinks: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Slopes, values of a bias, and sinks, where there are any."""
        if self.modifiers is None:
            return () if self.sinks is None else (self.sinks,)
        return self.modifiers.tensors if self.sinks is None else (*self.modifiers.tensors, self.sinks)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Score:
        """The same with other tensors, in the order of `tensors`."""
        if not tensors:
            return self
        of_modifiers, sinks = (tensors, None) if self.sinks is None else (tensors[:-1], tensors[-1])
        modifiers = self.modifiers and self.modifiers.with_tensors(of_modifiers)
        return Score(self.softmax_scale, modifiers, sinks)

    @property
    def numbers(self) -> Hashable:
        """All but the tensors and `Modifiers.words`."""
        modifiers = self.modifiers
        if modifiers is None:
            return self.softmax_scale if self.sinks is None else (self.softmax_scale, "sinks")
        bias, dropout = modifiers.bias, modifiers.dropout
        edges = None if bias is None else bias.edges
        share = None if dropout is None else (dropout.p, dropout.heads, dropout.first_head)
        return self.softmax_scale, modifiers.softcap, modifiers.slopes is not None, edges, share, self.sinks is not None


@dataclass(frozen=True)
class Buckets(Digested):
    """Distances, the position of the key less that of the query, in buckets; make one with `t5_buckets` or `buckets`.

    Piece i holds the distances from edges[i - 1] on, below edges[i], and lies in bucket `of_piece[i]`.
    """

    edges: tuple[int, ...]
    of_piece: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many numbers a head's table needs."""
        return max(self.of_piece) + 1

    def _key(self) -> bytes:
        return repr((self.edges, self.of_piece)).encode()

    def __repr__(self) -> str:
        return f"{self.count} buckets of {len(self.of_piece)} pieces of distances"


def buckets(edges: Sequence[int] | np.ndarray | torch.Tensor) -> Buckets:
    """Buckets in the order of distances: bucket i holds the distances from edges[i - 1] on, below edges[i].

    edges: ascending integers. A distance is the position of the key less that of the query: negative for keys of the past. Raises
    ValueError if the edges do not ascend, or are more than 1023.

    >>> import ringattn as ra
    >>> ra.buckets([-1, 1])  # far past, the last token and this one, future
    3 buckets of 3 pieces of distances
    """
    found = check.integers("edges", edges)
    if len(found) >= _MOST_PIECES:
        raise ValueError(f"edges has {len(found)} numbers, but may have at most {_MOST_PIECES - 1}")
    if (np.diff(found) <= 0).any():
        raise ValueError(f"edges is {found.tolist()}, but must ascend")
    if len(found) and max(abs(found[0]), abs(found[-1])) >= check.MAX_POSITION:
        raise ValueError("edges has a number of 2**48 or more, but positions are less than 2**48")
    return Buckets(tuple(found.tolist()), tuple(range(len(found) + 1)))


def t5_buckets(count: int = 32, max_distance: int = 128, *, bidirectional: bool) -> Buckets:
    """The buckets of T5 (Raffel et al. 2019, section 2.1), as transformers' models compute them.

    count: buckets, half of them for each direction if bidirectional. max_distance: from here on all distances share a bucket. Raises
    ValueError for counts that leave no bucket for a direction.

    >>> import ringattn as ra
    >>> ra.t5_buckets(bidirectional=False)
    32 buckets of 32 pieces of distances
    """
    count = check.integer("count", count, least=4, most=_MOST_PIECES)
    check.flag("bidirectional", bidirectional)
    one_way = count // 2 if bidirectional else count
    exact = one_way // 2
    max_distance = check.integer("max_distance", max_distance, least=exact + 1, most=1 << 20)
    away = torch.arange(max_distance + 1)
    # in fp32 and in this order, as the models do: at some distances the logarithm is a whole number but for rounding
    far = exact + (torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (one_way - exact)).long()
    of_distance = torch.where(away < exact, away, far.clamp(max=one_way - 1))
    past, future = of_distance.flip(0), (of_distance + one_way if bidirectional else 0 * of_distance)[1:]
    found = torch.cat([past, future])
    first = torch.cat([torch.tensor([True]), found[1:] != found[:-1]]).nonzero()[:, 0]
    return Buckets(tuple((first[1:] - max_distance).tolist()), tuple(found[first].tolist()))


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A learned number for each head and bucket of distances, which is added to scores; make one with `relative_bias`."""

    table: torch.Tensor
    buckets: Buckets


def relative_bias(table: torch.Tensor, buckets: Buckets) -> RelativeBias:
    """Add `table[head, bucket of the distance]` to each score. The gradient of `table` is that of this rank's queries.

    table: (h, buckets.count), floating point, on the device of q. Raises ValueError for another shape.

    >>> import torch, ringattn as ra
    >>> table = torch.zeros(2, 32, requires_grad=True)
    >>> bias = ra.relative_bias(table, ra.t5_buckets(bidirectional=False))
    """
    check.instance("buckets", buckets, Buckets, "make them with t5_buckets(...) or buckets(edges)")
    _parameter("table", table, 2)
    if table.shape[1] != buckets.count:
        raise ValueError(f"table has shape {tuple(table.shape)}, but must have a column for each of the {buckets.count} buckets")
    return RelativeBias(table, buckets)


def alibi_slopes(h: int) -> torch.Tensor:
    """The slopes of ALiBi (Press et al. 2021, section 3): (h,), fp32; 2**(-8 i / h) for head i = 1 .. h if h is a power of 2.

    Else those of the next smaller power of 2, and every other one of the next larger. Raises ValueError unless h is at least 1.

    >>> import ringattn as ra
    >>> ra.alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    h = check.integer("h", h, least=1, most=1 << 16)
    power = 1 << (h.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4 * i / power) for i in range(1, 2 * (h - power), 2)]
    return torch.tensor(slopes)


@dataclass(frozen=True)
class ScoreKind(Digested):
    """What ranks and compiled graphs must know of a `ScoreMod`: all but its tensors and its seed."""

    softcap: float | None
    alibi: bool
    buckets: Buckets | None
    sinks: bool
    dropout: float

    @property
    def placed(self) -> bool:
        """Whether scores or weights depend on positions."""
        return self.alibi or self.buckets is not None or self.dropout > 0

    @property
    def replayed(self) -> bool:
        """Whether calls are alike but for tensors: they draw nothing."""
        return not self.dropout

    def modifiers(
        self, slopes: torch.Tensor | None, values: torch.Tensor | None, seed: torch.Tensor | None, heads: int
    ) -> Modifiers | None:
        """What the device does. slopes: (b or 1, h). values: (h, pieces). seed: (2,) int64 on the CPU, with the offset."""
        bias = None if values is None or self.buckets is None else Bias(self.buckets.edges, values)
        dropout = None
        if seed is not None:
            number, offset = seed.tolist()
            dropout = Dropout(self.dropout, number, offset, heads)
        found = Modifiers(self.softcap, slopes, bias, dropout)
        return found if found.placed or found.softcap is not None else None

    def _key(self) -> bytes:
        own = None if self.buckets is None else self.buckets.digest
        return repr((self.softcap, self.alibi, own, self.sinks, self.dropout)).encode()

    def __repr__(self) -> str:
        parts = [f"softcap={self.softcap}"] if self.softcap is not None else []
        parts += ["alibi"] if self.alibi else []
        parts += [f"bias of {self.buckets}"] if self.buckets is not None else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"dropout={self.dropout}"] if self.dropout else []
        return f"score({', '.join(parts)})"


@functools.lru_cache(4096)
def _kind(softcap: float | None, alibi: bool, buckets: str | None, sinks: bool, dropout: float) -> ScoreKind:
    """The kind with these buckets, by their digest. It is kept, so that `find` finds it."""
    return ScoreKind(softcap, alibi, find(buckets), sinks, dropout)


@constant
def kind_digest(softcap: float | None, alibi: bool, buckets: str | None, sinks: bool, dropout: float) -> str:
    """The digest of a kind. torch.compile calls this while it traces."""
    return _kind(softcap, alibi, buckets, sinks, dropout).digest


@constant
def _pieces_on(of_piece: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The bucket of each piece of distances. torch.compile calls this while it traces."""
    return _kept_pieces(of_piece, device)


@functools.lru_cache(256)
def _kept_pieces(of_piece: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # kept, because a CUDA graph cannot capture a copy from the host, and a copy waits for the device
    with torch.inference_mode(False):  # else they could not be used in training later
        return torch.tensor(of_piece, device=device)


@dataclass(eq=False)
class ScoreMod:
    """What is done to scores and weights; make one with `score`."""

    softcap: float | None
    alibi: torch.Tensor | None
    bias: RelativeBias | None
    sinks: torch.Tensor | None
    dropout: float
    seed: int | None
    offset: int

    @property
    def kind(self) -> ScoreKind:
        """All but the tensors and the seed."""
        return _kind(*self._of_kind())

    @property
    def digest(self) -> str:
        """That of the kind, which compiled code can read."""
        return kind_digest(*self._of_kind())

    def _of_kind(self) -> tuple[float | None, bool, str | None, bool, float]:
        buckets = None if self.bias is None else self.bias.buckets.digest
        return self.softcap, self.alibi is not None, buckets, self.sinks is not None, self.dropout

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """The tensors, by the names of the arguments that gave them."""
        named = {"alibi": self.alibi, "bias": None if self.bias is None else self.bias.table, "sinks": self.sinks}
        return {name: x for name, x in named.items() if x is not None}

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ScoreMod:
        """The same with `change(x)` in the place of each tensor x."""
        found = {name: change(x) for name, x in self.given.items()}
        bias = None if self.bias is None else RelativeBias(found["bias"], self.bias.buckets)
        return replace(self, alibi=found.get("alibi"), bias=bias, sinks=found.get("sinks"))

    def check(self, q: torch.Tensor) -> None:
        """Raise ValueError if the tensors do not fit q (b, s, h, d)."""
        b, _, h, _ = q.shape
        if self.alibi is not None and tuple(self.alibi.shape) not in ((h,), (b, h)):
            raise ValueError(
                f"alibi has shape {tuple(self.alibi.shape)}, but must be ({h},) or ({b}, {h}): a slope for each head of q"
            )
        table = None if self.bias is None else self.bias.table
        if table is not None and len(table) != h:
            raise ValueError(f"the table of bias has {len(table)} heads, but q has {h}: it must have a row for each")
        if self.sinks is not None and tuple(self.sinks.shape) != (h,):
            raise ValueError(f"sinks has shape {tuple(self.sinks.shape)}, but must be ({h},): a sink for each head of q")
        for name, x in (("alibi", self.alibi), ("the table of bias", table), ("sinks", self.sinks)):
            if x is not None and x.device != q.device:
                raise ValueError(f"{name} is on {x.device} and q is on {q.device}: move it there")

    def tensors(
        self, dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Slopes, values and sinks in `dtype`, and the seed, which torch's generator gives unless the user does.

        All but sinks are for `ScoreKind.modifiers`.
        """
        slopes = values = seed = None
        sinks = None if self.sinks is None else self.sinks.to(dtype).contiguous()
        if self.alibi is not None:
            slopes = self.alibi.to(dtype).reshape(-1, self.alibi.shape[-1]).contiguous()
        if self.bias is not None:
            values = self.bias.table.to(dtype).index_select(1, _pieces_on(self.bias.buckets.of_piece, self.bias.table.device))
        if self.dropout:
            drawn = torch.randint(_LARGEST_SEED, (1,)) if self.seed is None else torch.tensor([self.seed])
            seed = torch.cat([drawn, torch.tensor([self.offset])])
        return slopes, values, sinks, seed


def score(
    *,
    softcap: float | None = None,
    alibi: torch.Tensor | None = None,
    bias: RelativeBias | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
) -> ScoreMod:
    """What to do to each score softmax_scale * (q . k), and to each weight. All ranks pass the same.

    In the order in which it is done:

    Args:
        softcap: score = softcap * tanh(score / softcap) (Gemma 2).
        alibi: slopes (h,) or (b, h): score = score - slope * |q position - k position| (ALiBi, Press et al. 2021); see `alibi_slopes`.
        bias: a learned number for each head and bucket of distances (T5); see `relative_bias`.
        sinks: (h,), one more score a row, in the softmax's denominator alone (GPT-OSS; Xiao et al. 2023). A row counts it once, on any
            number of ranks.
        dropout: the probability, in [0, 1), with which a weight is 0; the others are divided by 1 - dropout (FlashAttention, Dao et al.
            2022, algorithm 2). Pass 0.0 outside of training.
        seed: 0 to 2**63 - 1. Which pairs are dropped follows from seed, offset, batch, head and global positions alone (Philox, Salmon
            et al. 2011): any number of ranks, layouts and schedules drop the same, and the backward pass draws them again. None: a number
            from torch's generator for the CPU, which must be in the same state on all ranks.
        offset: 0 to 2**32 - 1, for further draws with one seed.

    Gradients flow to alibi, the table of bias and sinks, if they require them. On each rank they are those of its own queries (of alibi and
    bias with `pass_q`: of its own keys), as the gradients of all parameters are: sum them over the ranks
    (`training.causal_lm.sum_gradients`, DDP, FSDP).

    `Stats` are those of the modified scores, sinks included, before dropout.

    Raises ValueError for values out of these ranges; `ring_attention` raises it, on every rank, for tensors that do not fit q.

    >>> import torch, ringattn as ra
    >>> q = k = v = torch.randn(1, 16, 2, 8)
    >>> ra.ring_attention(q, k, v, score=ra.score(softcap=30.0, alibi=ra.alibi_slopes(2))).shape
    torch.Size([1, 16, 2, 8])
    """
    if softcap is not None:
        softcap = check.number("softcap", softcap)
        if softcap <= 0:
            raise ValueError(f"softcap is {softcap}, but must be more than 0, or None")
    if alibi is not None:
        _parameter("alibi", alibi, 1, 2)
    if bias is not None:
        check.instance("bias", bias, RelativeBias, "make one with relative_bias(table, buckets); ringattn takes no dense bias")
    if sinks is not None:
        _parameter("sinks", sinks, 1)
    dropout = check.number("dropout", dropout, least=0.0)
    if dropout >= 1:
        raise ValueError(f"dropout is {dropout}, but must be less than 1: it is the share of weights that are dropped")
    if seed is not None:
        seed = check.integer("seed", seed, most=_LARGEST_SEED)
    offset = check.integer("offset", offset, most=_LARGEST_OFFSET)
    return ScoreMod(softcap, alibi, bias, sinks, dropout, seed, offset)


def with_dropout(found: ScoreMod | None, dropout: float) -> ScoreMod:
    """Another score with this dropout, and with the same seed and offset, if there is a seed."""
    if found is None:
        return score(dropout=dropout)
    return score(
        softcap=found.softcap,
        alibi=found.alibi,
        bias=found.bias,
        sinks=found.sinks,
        dropout=dropout,
        seed=found.seed,
        offset=found.offset,
    )


def _parameter(name: str, x: Any, *dims: int) -> None:
    """Raise ValueError unless x is a tensor of real floating-point numbers with so many dimensions."""
    check.dense_tensor(name, x)
    if x.dim() not in dims or not x.is_floating_point():
        wanted = " or ".join(map(str, dims))
        raise ValueError(
            f"{name} has dtype {x.dtype} and shape {tuple(x.shape)}, but must hold floating-point numbers in {wanted} dimensions"
        )
    if not torch.compiler.is_compiling():
        check.backward_mode(**{name: x})
