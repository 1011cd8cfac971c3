"""What the functions of the package ring_flash_attn are given, as layouts, masks and scores of ringattn, or refused by name.

Documents are packed one after the other. `cu_seqlens` [0, n1, n1 + n2, ...] are their bounds: of a rank's rows where each document is cut
among the ranks, else of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from .. import check
from ..attention import ring_attention
from ..geometry.layout import Layout, contiguous, layout_of_pieces
from ..geometry.mask import Mask, causal, documents, full, sliding_window
from ..runtime.agree import Facts, gather_integers, refusing
from ..runtime.groups import Group
from ..scores import ScoreMod, score
from ..transport import Ranks

_KEPT = "_ringattn_values"  # the attribute of a tensor that holds its version and its values
_PREPARED = "_ringattn_prepared"  # the attribute that holds its version and a `Prepared`

Returned = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]


@dataclass(frozen=True)
class Options:
    """The arguments that all functions share, checked: what is live besides documents, and what happens to scores."""

    causal: bool
    left: int | None
    right: int | None
    score: ScoreMod | None
    with_lse: bool

    @property
    def mask(self) -> Mask:
        """What is live where there are no documents."""
        return _mask(self.causal, self.left, self.right)

    def mask_of(self, cu_seqlens: tuple[int, ...]) -> Mask:
        """What is live within documents with these bounds of the whole sequence."""
        return _packed(cu_seqlens, self.causal, self.left, self.right)


def options(
    q: torch.Tensor,
    dropout_p: Any,
    causal: Any,
    window_size: Any,
    alibi_slopes: Any,
    deterministic: Any,
    return_attn_probs: Any,
    *,
    packed: bool,
) -> Options:
    """Raise ValueError for a value that cannot be honoured. packed: whether documents are packed, so that slopes are one a head."""
    dropout = check.number("dropout_p", dropout_p, least=0.0)
    if dropout >= 1:
        raise ValueError(f"dropout_p is {dropout}, but must be less than 1: it is the share of weights that are dropped")
    causal = check.flag("causal", causal)
    left, right = _window(window_size)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q, packed)
    if check.flag("deterministic", deterministic) and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "deterministic is True, but around a ring the order of sums follows PyTorch's switch: call "
            "torch.use_deterministic_algorithms(True), and leave it on for the backward pass"
        )
    asked = None if alibi_slopes is None and not dropout else score(alibi=alibi_slopes, dropout=dropout)
    return Options(causal, left, 0 if causal else right, asked, check.flag("return_attn_probs", return_attn_probs))


def _window(value: Any) -> tuple[int | None, int | None]:
    """`(left, right)`, None for a side without a limit, which is -1 in `value`."""
    sides = check.listed("window_size", value, "a pair (left, right), with -1 for no limit")
    if len(sides) != 2:
        raise ValueError(f"window_size is {value!r}, but must be a pair (left, right), with -1 for no limit")
    left, right = (check.integer("window_size", side, least=-1) for side in sides)
    return (None if left < 0 else left), (None if right < 0 else right)


def _check_slopes(slopes: Any, q: torch.Tensor, packed: bool) -> None:
    check.dense_tensor("alibi_slopes", slopes)
    b, h = q.shape[0], q.shape[-2]
    if packed and slopes.dim() == 2:
        raise ValueError(
            f"alibi_slopes has shape {tuple(slopes.shape)}, slopes for each document, but around a ring packed documents share them: "
            f"pass one a head, ({h},)"
        )
    if tuple(slopes.shape) not in ((h,), (b, h)) or not slopes.is_floating_point():
        wanted = f"({h},)" if packed else f"({h},) or ({b}, {h})"
        raise ValueError(
            f"alibi_slopes has dtype {slopes.dtype} and shape {tuple(slopes.shape)}, but must hold floating-point numbers in {wanted}"
        )


@lru_cache(256)
def _mask(is_causal: bool, left: int | None, right: int | None) -> Mask:
    if left is None and is_causal:
        return causal()
    return full() if left is None and right is None else sliding_window(left, right)


@lru_cache(64)
def _packed(cu_seqlens: tuple[int, ...], is_causal: bool, left: int | None, right: int | None) -> Mask:
    return documents(cu_seqlens=cu_seqlens, causal=is_causal, window=(left, right))


@lru_cache(256)
def whole_layout(make: Callable[[int, int], Layout], tokens: int, ranks: int, even: bool) -> Layout:
    """The layout of ranks with so many tokens each. even: whether a rank holds two chunks, of the same length."""
    if even and ranks > 1 and tokens % 2:
        raise ValueError(f"q has {tokens} tokens, but a zigzag shard is two chunks of one length: pad the sequence")
    return make(tokens * ranks, ranks)


@lru_cache(64)
def packed_layout(local: tuple[int, ...], ranks: int, zigzag: bool) -> Layout:
    """Each document is cut among all ranks, into `ranks` equal chunks or, for zigzag, twice as many.

    local: the bounds of a rank's rows, the same on every rank.
    """
    bounds = np.array(local, dtype=np.int64)
    lengths = np.diff(bounds)
    if zigzag and ranks > 1 and (lengths % 2).any():
        odd = int(lengths[lengths % 2 == 1][0])
        raise ValueError(
            f"cu_seqlens holds a length of {odd}, but a rank has two chunks of one length of each document: pad documents to multiples "
            "of 2 * world_size"
        )
    size = lengths // 2 if zigzag and ranks > 1 else lengths
    rank = np.arange(ranks)
    # [ranks, documents, chunks of a document]: which chunk it is
    hands = np.stack([rank, 2 * ranks - 1 - rank], axis=1) if zigzag and ranks > 1 else rank[:, None]
    start = ranks * bounds[:-1, None] + hands[:, None, :] * size[:, None]
    owner = np.broadcast_to(rank[:, None, None], start.shape)
    stop = start + size[:, None]
    name = f"{'zigzag' if zigzag else 'contiguous'} within documents"
    return layout_of_pieces(owner.ravel(), start.ravel(), stop.ravel(), ranks, ranks * local[-1], name)


def row_bounds(name: str, cu_seqlens: Any, tokens: int, max_seqlen: Any, name_of_max: str = "max_seqlen") -> tuple[int, ...]:
    """Bounds of documents that fill `tokens` rows; none is longer than `max_seqlen`."""
    bounds = values(name, cu_seqlens)
    if len(bounds) < 2 or bounds[0] != 0:
        raise ValueError(f"{name} starts with {list(bounds[:1])}, but must start with 0 and give the bounds of all documents")
    lengths = [b - a for a, b in zip(bounds, bounds[1:])]
    if min(lengths) < 0:
        raise ValueError(f"{name} is {_short(bounds)}, but must not decrease")
    if bounds[-1] != tokens:
        raise ValueError(
            f"{name} ends with {bounds[-1]}, but q has {tokens} tokens on this rank: give the bounds of this rank's own rows"
        )
    if check.integer(name_of_max, _plain(max_seqlen)) < max(lengths):
        raise ValueError(f"{name_of_max} is {max_seqlen}, but the longest document of {name} has {max(lengths)} tokens")
    return bounds


def values(name: str, given: Any) -> tuple[int, ...]:
    """Integers, read once from a tensor and kept with it until it changes, because reading waits for its device."""
    kept = getattr(given, _KEPT, None)
    if kept is not None and kept[0] == _version(given):
        return kept[1]
    found = tuple(check.integers(name, given).tolist())
    keep(given, found)
    return found


def keep(given: Any, found: tuple[int, ...]) -> None:
    """Keep a tensor's values with it."""
    if isinstance(given, torch.Tensor):
        setattr(given, _KEPT, (_version(given), found))


def _version(x: torch.Tensor) -> int:
    """A number that changes with the tensor; those made in inference mode have none."""
    return -1 if x.is_inference() else x._version


def _plain(value: Any) -> Any:
    """A number of a tensor as one of Python."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _short(bounds: tuple[int, ...]) -> str:
    return str(list(bounds)) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:6]))}, ..., {bounds[-1]}]"


@dataclass(frozen=True)
class Prepared:
    """What `llama3_flash_attn_prepare_cu_seqlens` knew when it made its results."""

    cu_seqlens: tuple[int, ...]
    causal: bool
    rank: int
    ranks: int
    keys: slice

    def remember(self, *made: torch.Tensor) -> None:
        """Note it with the tensors made from it."""
        for x in made:
            setattr(x, _PREPARED, (_version(x), self))


def whole_bounds(
    ranks: Ranks,
    tokens: int,
    is_causal: bool,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    longest: tuple[Any, Any],
    local_k_slice: Any,
) -> tuple[int, ...]:
    """The bounds of all documents of the whole sequence, from what a rank was given; a collective.

    A rank's arguments hold its own documents alone. They are known at once if they come from
    `llama3_flash_attn_prepare_cu_seqlens`; else the hosts swap the starts. Raises ValueError, on every rank, if they do not fit.
    """
    with refusing(ranks):
        queries = row_bounds("cu_seqlens_q", cu_seqlens_q, tokens, longest[0], "max_seqlen_q")
        keys = _slice(local_k_slice)
        known = _prepared(cu_seqlens_q, cu_seqlens_k)
        starts = np.empty(0, dtype=np.int64)
        if known is not None:
            _check_prepared(known, ranks, is_causal, keys)
        else:
            starts = _starts(ranks, tokens, is_causal, queries, cu_seqlens_k, longest[1], keys)
    if known is not None:
        return known.cu_seqlens
    function = "llama3_flash_attn_varlen without llama3_flash_attn_prepare_cu_seqlens"
    found = gather_integers(ranks, Facts({"function": function}), starts)
    every = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *found, np.array([tokens * ranks.size])]))
    with refusing(ranks):
        first, last = ranks.rank * tokens, (ranks.rank + 1) * tokens
        begins = int(every[every.searchsorted(first, side="right") - 1])
        ends = last if is_causal else int(every[every.searchsorted(last)])
        if tokens and (keys.start, keys.stop) != (begins, ends):
            raise ValueError(
                f"local_k_slice is {keys.start} to {keys.stop}, but this rank's documents go from {begins} to {ends}: use "
                f"llama3_flash_attn_prepare_cu_seqlens with causal={is_causal} and the bounds of the whole sequence"
            )
    return tuple(every.tolist())  # pyrefly: ignore[bad-argument-type]


def _prepared(cu_seqlens_q: Any, cu_seqlens_k: Any) -> Prepared | None:
    """What both tensors were made from, unless they have changed since."""
    kept = [getattr(x, _PREPARED, None) for x in (cu_seqlens_q, cu_seqlens_k)]
    for x, found in zip((cu_seqlens_q, cu_seqlens_k), kept):
        if found is None or found[0] != _version(x):
            return None
    return kept[0][1] if kept[0][1] is kept[1][1] else None  # pyrefly: ignore[unsupported-operation]


def _check_prepared(known: Prepared, ranks: Ranks, is_causal: bool, keys: slice) -> None:
    if (known.rank, known.ranks) != (ranks.rank, ranks.size):
        raise ValueError(
            f"cu_seqlens_q was prepared for rank {known.rank} of {known.ranks}, but this is rank {ranks.rank} of {ranks.size} of the group"
        )
    if known.causal != is_causal:
        raise ValueError(f"causal is {is_causal}, but cu_seqlens_k was prepared with causal={known.causal}: give both the same")
    if keys != known.keys:
        raise ValueError(
            f"local_k_slice is {keys.start} to {keys.stop}, but was prepared as {known.keys.start} to {known.keys.stop}"
        )


def _slice(value: Any) -> slice:
    """A slice of rows with both bounds."""
    if not isinstance(value, slice) or value.step not in (None, 1):
        raise ValueError(
            f"local_k_slice is {check.shown(value)}, but must be a slice: take that of llama3_flash_attn_prepare_cu_seqlens"
        )
    start, stop = (check.integer("local_k_slice", _plain(side)) for side in (value.start, value.stop))
    return slice(start, stop)


def _starts(
    ranks: Ranks, tokens: int, is_causal: bool, queries: tuple[int, ...], cu_seqlens_k: Any, longest: Any, keys: slice
) -> np.ndarray:
    """The positions in the whole sequence at which this rank's documents start, within its rows."""
    bounds = values("cu_seqlens_k", cu_seqlens_k)
    first = ranks.rank * tokens
    # where the keys of each document end, as the ends of its queries say: but for the last, whose end may be with a later rank
    ends = [0, *(end + first - keys.start for end in queries[1:-1]), keys.stop - keys.start]
    if (not is_causal and keys.stop < first + tokens) or (is_causal and keys.stop != first + tokens) or list(bounds) != ends:
        raise ValueError(
            f"cu_seqlens_k is {_short(bounds)} and local_k_slice {keys.start} to {keys.stop}, which do not fit cu_seqlens_q "
            f"{_short(queries)} on rank {ranks.rank}: use llama3_flash_attn_prepare_cu_seqlens with causal={is_causal}"
        )
    if check.integer("max_seqlen_k", _plain(longest)) < max(b - a for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"max_seqlen_k is {longest}, but cu_seqlens_k holds a longer document")
    own = [first + start for start in queries[1:-1] if start < tokens]
    return np.array([first, *own] if keys.start == first else own, dtype=np.int64)


def around(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: Layout,
    mask: Mask,
    asked: Options,
    softmax_scale: float | None,
    group: Group | None,
) -> Returned:
    """Attention around the ring, with what these functions return: out, or (out, lse, None)."""
    given: Any = dict(layout=layout, mask=mask, group=group, softmax_scale=softmax_scale, score=asked.score)
    if not asked.with_lse:
        return ring_attention(*qkv, **given)
    out, stats = ring_attention(*qkv, **given, return_stats=True)
    return out, stats.lse, None


def contiguous_layout(tokens: int, ranks: int) -> Layout:
    """Rank r holds the r-th chunk of the whole sequence, of `tokens` a rank."""
    return whole_layout(contiguous, tokens, ranks, even=False)
