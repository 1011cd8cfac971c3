"""`scaled_dot_product_attention` of torch around a ring: `scaled_dot_product_attention(q, k, v, is_causal=True, group=ring)`.

It takes torch's arguments and shapes, and `ring_sdpa` makes the calls of a whole block of code run around the ring:

    with ring_sdpa(layout=layout, group=ring):
        logits = model(ids_of_this_rank, layout.positions(rank))

Shapes: b batch, h query heads, hk key/value heads, s_local tokens of this rank, d head dim, d_v value head dim.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from .. import check
from ..attention import ring_attention
from ..geometry.layout import Layout
from ..geometry.mask import Mask, causal, full
from ..runtime.agree import refusing
from ..runtime.groups import Group, get_context
from ..runtime.op import in_one_dtype
from ..scores import ScoreMod, with_dropout

__all__ = ["ring_sdpa", "scaled_dot_product_attention"]

_ORIGINAL = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    layout: Layout | None = None,
    mask: Mask | None = None,
    group: Group | None = None,
    score: ScoreMod | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` over the whole sequence, of which each rank holds a shard. Differentiable.

    Args:
        query: (b, h, s_local, d), this rank's rows, with dtypes and sizes as for `ring_attention`.
        key: (b, hk, s_local, d); hk is h without `enable_gqa`, else divides it.
        value: (b, hk, s_local, d_v).
        attn_mask: None. Around a ring what is live is said by `mask`, over global positions, and a bias of scores by `score`.
        dropout_p: the probability with which a weight is dropped, in the place of the dropout of `score`. Without a seed there, each call
            draws one from torch's generator for the CPU, which must be in the same state on all ranks.
        is_causal: whether a query sees keys up to its own position only.
        scale: 1/sqrt(d) by default.
        enable_gqa: whether key and value may have fewer heads.
        layout: which positions each rank holds; None for `default_layout` of the mask: zigzag if `is_causal`, contiguous if not.
        mask: which pairs are live, None for all; with `is_causal`, only the causal ones of these.
        group: the ranks of the ring, as for `ring_attention`.
        score: what else happens to scores and weights, from `score(...)`.

    Returns out (b, h, s_local, d_v) in query's dtype; under autocast in the low precision, as torch's own. Raises ValueError, on every
    rank, for an attn_mask and for bad input, and for a mask beside is_causal under torch.compile's fullgraph=True, which cannot combine
    masks.

    >>> import torch
    >>> from ringattn.integrations.sdpa import scaled_dot_product_attention
    >>> q = k = v = torch.randn(1, 2, 16, 8)
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 16, 8])
    """
    if not torch.compiler.is_compiling():
        with refusing(get_context(group).ranks):
            check.optional("mask", mask, Mask, check.BUILD_A_MASK)
            check.optional("score", score, ScoreMod, check.BUILD_A_SCORE)
            check.flag("is_causal", is_causal)
            check.flag("enable_gqa", enable_gqa)
    elif mask is not None and is_causal:
        raise ValueError(
            "mask and is_causal are both given in compiled code, which cannot combine masks: pass mask & causal() alone"
        )
    return attend_as_torch(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, Around(layout, mask, group, score)
    )


class ring_sdpa(TorchFunctionMode):
    """`with ring_sdpa(layout=layout, group=ring):`, in which torch's scaled_dot_product_attention runs around the ring, in this thread.

    Every call in the block is taken, in whatever module; `replace_attention` chooses modules, and refuses what it would miss. Give the
    model its positions, `layout.positions(rank)`. The backward pass may run in the block or outside of it. Activation checkpointing runs
    the forward pass again where torch has switched the block off: take `replace_attention`, or enter the block within the checkpointed
    function.

    Args:
        layout, mask, group, score: as for `scaled_dot_product_attention` of this module.

    Raises ValueError for arguments of a wrong type. A call in the block raises it, on every rank, for an `attn_mask`, for bad input,
    for `torch.nn.MultiheadAttention` and in a function that reentrant checkpointing runs. Other checkpointing raises torch's own error.

    >>> import torch
    >>> from ringattn.integrations.sdpa import ring_sdpa
    >>> q = k = v = torch.randn(1, 2, 16, 8)
    >>> with ring_sdpa():
    ...     torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 16, 8])
    """

    def __init__(
        self,
        *,
        layout: Layout | None = None,
        mask: Mask | None = None,
        group: Group | None = None,
        score: ScoreMod | None = None,
    ) -> None:
        super().__init__()
        get_context(group)
        check.optional("layout", layout, Layout, check.BUILD_A_LAYOUT)
        check.optional("mask", mask, Mask, check.BUILD_A_MASK)
        check.optional("score", score, ScoreMod, check.BUILD_A_SCORE)
        self._around = Around(layout, mask, group, score)
        self._has_gradients = False

    def __enter__(self) -> ring_sdpa:
        self._has_gradients = torch.is_grad_enabled()
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.multi_head_attention_forward:
            refuse(
                self._around.group,
                "torch.nn.MultiheadAttention is called within ring_sdpa, but takes its mask and its shapes by other means: call "
                "ringattn.ring_attention in its place",
            )
        if func is not _ORIGINAL:
            return func(*args, **kwargs)
        if self._has_gradients and not torch.compiler.is_compiling() and _runs_in_a_function_of_autograd():
            refuse(
                self._around.group,
                "attention runs without gradients in a function of autograd, such as that of reentrant activation checkpointing, whose "
                "second forward pass would attend within the shard: take replace_attention, or enter ring_sdpa within that function",
            )
        return bound(self._around, *args, **kwargs)


def _runs_in_a_function_of_autograd() -> bool:
    """Whether the caller is within the forward pass of a `torch.autograd.Function`, where there are no gradients."""
    frame = None if torch.is_grad_enabled() else sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount and isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False


class Around:
    """What calls of torch's attention need besides their arguments."""

    def __init__(self, layout: Layout | None, mask: Mask | None, group: Group | None, score: ScoreMod | None) -> None:
        self.layout, self.group, self.score = layout, group, score
        whole = full() if mask is None else mask
        # made here because compiled code cannot combine masks
        self.masks = {False: whole, True: causal() if mask is None else whole & causal()}


def bound(
    around: Around,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """A call of torch's function, as it was made."""
    return attend_as_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, around)


def attend_as_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    around: Around,
) -> torch.Tensor:
    """Attention around the ring of (b, h, s_local, d). Raises ValueError, on every rank, for what cannot be honoured."""
    problem = _of_shapes(query=query, key=key, value=value)
    if attn_mask is not None:
        problem = of_dense_mask(attn_mask)
    elif problem is None and key.shape[1] != query.shape[1] and not enable_gqa:
        problem = f"key has {key.shape[1]} heads and query has {query.shape[1]}: pass enable_gqa=True to share them"
    if problem is not None:
        refuse(around.group, problem)
    q, k, v = (x.transpose(1, 2) for x in in_one_dtype(query, key, value))
    found = around.score
    if dropout_p:
        if torch.compiler.is_compiling():
            found = with_dropout(found, dropout_p)
        else:
            with refusing(get_context(around.group).ranks):
                found = with_dropout(found, dropout_p)
    mask = around.masks[is_causal]
    out = ring_attention(q, k, v, layout=around.layout, mask=mask, group=around.group, softmax_scale=scale, score=found)
    return out.transpose(1, 2)


def _of_shapes(**tensors: Any) -> str | None:
    """What is wrong with q, k or v, before their heads and tokens are swapped."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            return f"{name} is {check.shown(x)}, but must be a tensor (batch, heads, tokens, head_dim)"
        if x.dim() != 4:
            shape = tuple(x.shape)
            return (
                f"{name} has {x.dim()} dimensions, shape {shape}, but around a ring must have 4: (batch, heads, tokens, head_dim)"
            )
    return None


def of_dense_mask(attn_mask: Any) -> str:
    """What to do instead of an attn_mask: a bool mask hides pairs, but another one adds to scores, and leaving it out would drop that."""
    if isinstance(attn_mask, torch.Tensor) and attn_mask.dtype != torch.bool:
        return (
            f"attn_mask of {attn_mask.dtype} is added to scores, but ringattn takes no dense bias: if it holds only 0 and -inf, say what "
            "is live with mask=...; a bias of distances is score=score(alibi=...) or score(bias=relative_bias(...)); any other "
            "bias cannot go around a ring, and leaving it out would change the result"
        )
    return (
        "attn_mask is given, but around a ring what is live is said over global positions: give mask=causal(), sliding_window(...), "
        "documents(...) or a combination that says the same, and no attn_mask"
    )


def refuse(group: Group | None, message: str) -> NoReturn:
    """Raise ValueError, on every rank."""
    if torch.compiler.is_compiling():
        raise ValueError(message)
    with refusing(get_context(group).ranks):
        raise ValueError(message)
