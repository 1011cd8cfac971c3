"""The functions of the package ring_flash_attn 0.1.8, with its names, arguments and results, around ringattn's ring.

    import ringattn.integrations.ring_flash_attn as ring_flash_attn

is the only change to a program. The package's modules, such as `zigzag_ring_flash_attn` and `adapters.hf_adapter`, are modules of this one.
Where libraries import the package themselves, call `install()` first.

Which rows a rank holds follows from the name: `ring_*` one chunk of the sequence, `zigzag_ring_*` two, `stripe_*` every world_size-th
token; of each document alike in `*_varlen_*`; and `llama3_*` one chunk of all documents together.

`window_size`, `alibi_slopes` and `dropout_p` are honoured. So is `causal=False` by every function, and rows may be those of any group that
`ring_attention` takes. What cannot be honoured is a ValueError, on every rank.

Shapes: b batch, s_local tokens of this rank, t those of its documents together, h query heads, hk key/value heads, d head dim.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ... import check
from ...geometry.layout import Layout, contiguous, striped, zigzag
from ...runtime.agree import refusing
from ...runtime.graph_breaks import breaks_graphs
from ...runtime.groups import Group, get_context
from ..ring_flash_attn_arguments import (
    Returned,
    around,
    contiguous_layout,
    options,
    packed_layout,
    row_bounds,
    whole_bounds,
    whole_layout,
)
from ..ring_flash_attn_documents import llama3_flash_attn_prepare_cu_seqlens
from ..ring_flash_attn_models import substitute_hf_flash_attn, update_ring_flash_attn_params

__all__ = [
    "FunctionsOfBatches",
    "FunctionsOfDocuments",
    "install",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

_WindowSize = tuple[int, int]
_NAME = "ring_flash_attn"  # the package's
_MODULES = (
    "adapters",
    "adapters.hf_adapter",
    "llama3_flash_attn_varlen",
    "ring_flash_attn",
    "ring_flash_attn_varlen",
    "stripe_flash_attn",
    "utils",
    "zigzag_ring_flash_attn",
    "zigzag_ring_flash_attn_varlen",
)


def install() -> None:
    """Make this the package `ring_flash_attn` of the process, its modules too, for programs and libraries that import it by name.

    Call it before the first of them is imported. Raises ValueError if the package itself was imported already.

    >>> import ringattn.integrations.ring_flash_attn
    >>> ringattn.integrations.ring_flash_attn.install()
    >>> from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func
    """
    here = sys.modules[__name__]
    other = sys.modules.get(_NAME)
    if other not in (None, here):
        raise ValueError(
            f"the package {_NAME} was imported already, from {getattr(other, '__file__', None)}: call install() before whatever imports it"
        )
    sys.modules[_NAME] = here
    for module in _MODULES:
        sys.modules[f"{_NAME}.{module}"] = importlib.import_module(f"{__name__}.{module}")


@dataclass(frozen=True)
class FunctionsOfBatches:
    """`ring_flash_attn_func`, `zigzag_ring_flash_attn_func`, `stripe_flash_attn_func` and their packed forms: sequences of one length.

    make_layout: of tokens and ranks. even: whether a rank's shard is two chunks, so that its tokens are even.
    """

    make_layout: Callable[[int, int], Layout]
    even: bool = False

    @breaks_graphs
    def func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: _WindowSize = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group | None = None,
    ) -> Returned:
        """Attention of this rank's queries to the whole sequence: out (b, s_local, h, d) in q's dtype. A collective, and differentiable.

        Args:
            q: (b, s_local, h, d), of as many tokens on every rank, as for `ring_attention`.
            k: (b, s_local, hk, d), h a multiple of hk.
            v: (b, s_local, hk, d).
            dropout_p: the probability with which a weight is dropped. Ranks draw one seed from torch's generator for the CPU, which must be
                in the same state on all of them.
            softmax_scale: 1/sqrt(d) by default.
            causal: whether a query sees keys up to its own position only.
            window_size: (left, right), how many keys on each side a query sees besides itself; -1 is no limit.
            alibi_slopes: (h,) or (b, h), fp32: score - slope * |q position - k position|.
            deterministic: the backward pass gives the same bits. On a GPU it must be asked of PyTorch too.
            return_attn_probs: return (out, lse, None), with lse (b, h, s_local) in fp32 (fp64 for fp64). Gradients flow through lse too.
            group: the ranks, the default group by default.

        Raises ValueError, on every rank, for bad input and for what cannot be honoured.
        """
        ranks = get_context(group).ranks
        with refusing(ranks):
            check.tensors(q, k, v)
            asked = options(q, dropout_p, causal, window_size, alibi_slopes, deterministic, return_attn_probs, packed=False)
            layout = whole_layout(self.make_layout, q.shape[1], ranks.size, self.even)
        return around((q, k, v), layout, asked.mask, asked, softmax_scale, group)

    def kvpacked_func(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: _WindowSize = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group | None = None,
    ) -> Returned:
        """As `func`, with kv (b, s_local, 2, hk, d)."""
        k, v = _parts("kv", kv, 2, 2, group)
        return self.func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
        )

    def qkvpacked_func(
        self,
        qkv: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: _WindowSize = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group | None = None,
    ) -> Returned:
        """As `func`, with qkv (b, s_local, 3, h, d)."""
        q, k, v = _parts("qkv", qkv, 3, 2, group)
        return self.func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
        )


@dataclass(frozen=True)
class FunctionsOfDocuments:
    """`ring_flash_attn_varlen_func`, `zigzag_ring_flash_attn_varlen_func` and their packed forms: documents, each cut among all ranks.

    zigzag: whether a rank holds two chunks of each document, or one.
    """

    zigzag: bool

    @breaks_graphs
    def func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: _WindowSize = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group | None = None,
    ) -> Returned:
        """Attention of this rank's queries to their own documents: out (t, h, d) in q's dtype. A collective, and differentiable.

        Args:
            q: (t, h, d), this rank's rows of all documents, one after the other.
            k: (t, hk, d), h a multiple of hk.
            v: (t, hk, d).
            cu_seqlens: (documents + 1,) integers, the bounds of the documents in these rows, the same on every rank: those of the whole
                sequence, divided by the number of ranks.
            max_seqlen: at least the tokens of the longest document in these rows.

        The other arguments are as in `FunctionsOfBatches.func`, but alibi_slopes (h,). With `return_attn_probs` it returns
        (out, lse, None), lse (h, t). Raises ValueError, on every rank, for bad input and for what cannot be honoured.
        """
        ranks = get_context(group).ranks
        with refusing(ranks):
            _rows(q, k, v)
            asked = options(q, dropout_p, causal, window_size, alibi_slopes, deterministic, return_attn_probs, packed=True)
            bounds = row_bounds("cu_seqlens", cu_seqlens, q.shape[0], max_seqlen)
            layout = packed_layout(bounds, ranks.size, self.zigzag)
            mask = asked.mask_of(tuple(ranks.size * bound for bound in bounds))
        return _without_batch(around(_with_batch(q, k, v), layout, mask, asked, softmax_scale, group))

    def kvpacked_func(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: _WindowSize = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group | None = None,
    ) -> Returned:
        """As `func`, with kv (t, 2, hk, d)."""
        k, v = _parts("kv", kv, 2, 1, group)
        common = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
        return self.func(q, k, v, cu_seqlens, max_seqlen, *common)

    def qkvpacked_func(
        self,
        qkv: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: _WindowSize = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group | None = None,
    ) -> Returned:
        """As `func`, with qkv (t, 3, h, d)."""
        q, k, v = _parts("qkv", qkv, 3, 1, group)
        common = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
        return self.func(q, k, v, cu_seqlens, max_seqlen, *common)


_RING, _ZIGZAG, _STRIPE = FunctionsOfBatches(contiguous), FunctionsOfBatches(zigzag, even=True), FunctionsOfBatches(striped)
_RING_DOCUMENTS, _ZIGZAG_DOCUMENTS = FunctionsOfDocuments(zigzag=False), FunctionsOfDocuments(zigzag=True)

ring_flash_attn_func = _RING.func
ring_flash_attn_kvpacked_func = _RING.kvpacked_func
ring_flash_attn_qkvpacked_func = _RING.qkvpacked_func
zigzag_ring_flash_attn_func = _ZIGZAG.func
zigzag_ring_flash_attn_kvpacked_func = _ZIGZAG.kvpacked_func
zigzag_ring_flash_attn_qkvpacked_func = _ZIGZAG.qkvpacked_func
stripe_flash_attn_func = _STRIPE.func
stripe_flash_attn_kvpacked_func = _STRIPE.kvpacked_func
stripe_flash_attn_qkvpacked_func = _STRIPE.qkvpacked_func
ring_flash_attn_varlen_func = _RING_DOCUMENTS.func
ring_flash_attn_varlen_kvpacked_func = _RING_DOCUMENTS.kvpacked_func
ring_flash_attn_varlen_qkvpacked_func = _RING_DOCUMENTS.qkvpacked_func
zigzag_ring_flash_attn_varlen_func = _ZIGZAG_DOCUMENTS.func
zigzag_ring_flash_attn_varlen_kvpacked_func = _ZIGZAG_DOCUMENTS.kvpacked_func
zigzag_ring_flash_attn_varlen_qkvpacked_func = _ZIGZAG_DOCUMENTS.qkvpacked_func


@breaks_graphs
def llama3_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group | None = None,
) -> Returned:
    """Attention of this rank's chunk of packed documents to their own documents: out (t, h, d) in q's dtype. A differentiable collective.

    Args:
        q: (t, h, d), rows rank * t to (rank + 1) * t of the whole sequence.
        k: (t, hk, d), h a multiple of hk.
        v: (t, hk, d).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: what `llama3_flash_attn_prepare_cu_seqlens` returns.
        heads_k_stride: a divisor of hk. Results do not depend on it: the schedule bounds the memory of K/V, not the heads at a time.

    The other arguments are as in `FunctionsOfBatches.func`, but alibi_slopes (h,). With `return_attn_probs` it returns
    (out, lse, None), lse (h, t). Raises ValueError, on every rank, for bad input and for what cannot be honoured.
    """
    ranks = get_context(group).ranks
    with refusing(ranks):
        _rows(q, k, v)
        if k.shape[1] % check.integer("heads_k_stride", heads_k_stride, least=1):
            raise ValueError(f"heads_k_stride is {heads_k_stride}, which does not divide k's {k.shape[1]} heads")
        asked = options(q, dropout_p, causal, window_size, alibi_slopes, deterministic, return_attn_probs, packed=True)
    longest = max_seqlen_q, max_seqlen_k
    bounds = whole_bounds(ranks, q.shape[0], asked.causal, cu_seqlens_q, cu_seqlens_k, longest, local_k_slice)
    layout = contiguous_layout(q.shape[0], ranks.size)
    return _without_batch(around(_with_batch(q, k, v), layout, asked.mask_of(bounds), asked, softmax_scale, group))


def llama3_flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group | None = None,
) -> Returned:
    """As `llama3_flash_attn_varlen_func`, with kv (t, 2, hk, d)."""
    k, v = _parts("kv", kv, 2, 1, group)
    documents = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice
    common = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return llama3_flash_attn_varlen_func(q, k, v, *documents, *common)


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group | None = None,
) -> Returned:
    """As `llama3_flash_attn_varlen_func`, with qkv (t, 3, h, d)."""
    q, k, v = _parts("qkv", qkv, 3, 1, group)
    documents = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice
    common = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return llama3_flash_attn_varlen_func(q, k, v, *documents, *common)


@breaks_graphs
def _parts(name: str, packed: Any, count: int, dim: int, group: Group | None) -> tuple[torch.Tensor, ...]:
    """The `count` tensors along a dimension of a packed one. Raises ValueError, on every rank, for another shape."""
    with refusing(get_context(group).ranks):
        check.dense_tensor(name, packed)
        if packed.dim() != dim + 3 or packed.shape[dim] != count:
            wanted = ("batch, " if dim == 2 else "") + f"tokens, {count}, heads, head_dim"
            raise ValueError(f"{name} has shape {tuple(packed.shape)}, but must be ({wanted})")
        return packed.unbind(dim)


def _rows(*qkv: torch.Tensor) -> None:
    """Raise ValueError unless each tensor has the dimensions of packed documents."""
    for name, x in zip("qkv", qkv):
        check.dense_tensor(name, x)
        if x.dim() != 3:
            raise ValueError(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}, but must have 3 for packed documents: (tokens, heads, head_dim)"
            )


def _with_batch(*qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (x[None] for x in qkv)
    return q, k, v


def _without_batch(found: Returned) -> Returned:
    if isinstance(found, tuple):
        out, lse, _ = found
        return out[0], lse[0], None
    return found[0]
