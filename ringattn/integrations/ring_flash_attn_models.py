"""Models of transformers whose FlashAttention runs around a ring, as with the package ring_flash_attn: packed documents in one row.

Shapes: s_local tokens of this rank, h query heads, hk key/value heads, d head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import check
from ..attention import ring_attention
from ..geometry.mask import Mask, documents
from ..runtime.agree import refusing
from ..runtime.graph_breaks import breaks_graphs
from ..runtime.groups import Group, get_context
from ..scores import score
from .ring_flash_attn_arguments import contiguous_layout, row_bounds, values
from .ring_flash_attn_documents import llama3_flash_attn_prepare_cu_seqlens

__all__ = [
    "DATA_PARAMS",
    "check_params",
    "flash_attention_forward",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "use_ring_attn",
]

# what `llama3_flash_attn_varlen_func` takes of the documents given last, by argument, for programs that call it themselves
DATA_PARAMS: dict[str, Any] = {}

# names of the attention implementation in transformers: FlashAttention's own, and one that asks for no package flash_attn
_NAMES = ("flash_attention_2", "ring_packed")
# options that do not affect attention
_HARMLESS = frozenset(
    {"cache_position", "use_cache", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"}
)


class FlashAttentionAround:
    """What takes the place of transformers' FlashAttention: attention around one group's ring, to the documents given last."""

    def __init__(self, group: Group | None, heads_k_stride: int, before: Callable | None) -> None:
        self.group, self.heads_k_stride = group, heads_k_stride
        self.before = before  # transformers' own, which runs while `is_on` is False
        self.is_on = True
        self.cu_seqlens: tuple[int, ...] | None = None
        self._masks: dict[int | None, Mask] = {}
        self._positions: Any = None  # the tensor that was found to be right

    def update(self, cu_seqlens: tuple[int, ...]) -> None:
        """From the next call on the documents have these bounds."""
        self.cu_seqlens, self._masks, self._positions = cu_seqlens, {}, None

    @breaks_graphs
    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query (1, h, s_local, d), key and value (1, hk, s_local, d) -> out (1, s_local, h, d), and None for weights."""
        if not self.is_on and self.before is not None:
            given = dict(dropout=dropout, scaling=scaling, sliding_window=sliding_window, softcap=softcap, is_causal=is_causal)
            given |= dict(s_aux=s_aux, position_ids=position_ids) | options
            given = {name: value for name, value in given.items() if value is not None}
            return self.before(module, query, key, value, attention_mask, **given)
        ranks = get_context(self.group).ranks
        with refusing(ranks):
            self._check(module, query, key, attention_mask, is_causal, options)
            mask = self._mask(sliding_window)
            tokens = query.shape[2]
            if position_ids is not None:
                self._check_positions(position_ids, ranks.rank * tokens, tokens)
            asked = None
            if softcap is not None or s_aux is not None or dropout:
                asked = score(softcap=softcap, sinks=s_aux, dropout=dropout)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if torch.is_autocast_enabled(q.device.type):  # rotary embeddings leave q and k in fp32 and v in the low precision
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) if x.dtype == torch.float32 else x for x in (q, k, v))
        layout = contiguous_layout(tokens, ranks.size)
        layer = getattr(module, "layer_idx", None)
        name = None if layer is None else f"{type(module).__name__} of layer {layer}"
        out = ring_attention(q, k, v, layout=layout, mask=mask, group=self.group, softmax_scale=scaling, score=asked, name=name)
        return out.to(query.dtype), None

    def _check(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        is_causal: bool | None,
        options: dict[str, Any],
    ) -> None:
        """Raise ValueError for a call that cannot be honoured."""
        if self.cu_seqlens is None:
            raise ValueError(
                "no documents are known: call update_ring_flash_attn_params(cu_seqlens, process_group) before the model"
            )
        if attention_mask is not None:
            raise ValueError(
                "attention_mask is given, or hides padding, but around the ring documents are packed: leave it out, and say where "
                "documents end by update_ring_flash_attn_params"
            )
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise ValueError(
                f"{type(module).__name__} is not causal, which substitute_hf_flash_attn does not take: use "
                "ringattn.integrations.huggingface.attach"
            )
        if query.shape[0] != 1:
            raise ValueError(f"the batch has {query.shape[0]} rows, but documents are packed into one row: concatenate them")
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"the keys have {key.shape[2]} tokens and the queries {query.shape[2]}: call the model with use_cache=False"
            )
        if key.shape[1] % self.heads_k_stride:
            raise ValueError(f"heads_k_stride is {self.heads_k_stride}, which does not divide the {key.shape[1]} heads of keys")
        world_size = get_context(self.group).ranks.size
        if query.shape[2] * world_size != self.cu_seqlens[-1]:
            raise ValueError(
                f"this rank has {query.shape[2]} tokens, but cu_seqlens ends with {self.cu_seqlens[-1]}, "
                f"{self.cu_seqlens[-1] // world_size} for each of {world_size} ranks: "
                "update_ring_flash_attn_params takes the whole batch before it is cut"
            )
        for name, given in options.items():
            if given is None or given is False or name in _HARMLESS:
                continue
            if name == "deterministic" and torch.are_deterministic_algorithms_enabled():
                continue
            raise ValueError(
                f"{name} is {check.shown(given)}, but substitute_hf_flash_attn does not know what that asks of attention: leave it out, "
                "or use ringattn.integrations.huggingface.attach"
            )

    def _mask(self, window: int | None) -> Mask:
        """What is live: transformers counts the query's own position in a window."""
        if window not in self._masks:
            left = None if window is None else check.integer("sliding_window", window, least=1) - 1
            self._masks[window] = documents(cu_seqlens=self.cu_seqlens, window=(left, None))
        return self._masks[window]

    def _check_positions(self, position_ids: torch.Tensor, first: int, tokens: int) -> None:
        """Raise ValueError for positions that count within the shard. Reads them once a batch, which waits for their device."""
        if position_ids is self._positions or position_ids.dim() != 2 or position_ids.shape[1] != tokens:
            return
        assert self.cu_seqlens is not None
        here = torch.arange(first, first + tokens)
        bounds = torch.tensor(sorted(set(self.cu_seqlens)))
        within = here - bounds[torch.searchsorted(bounds, here, right=True) - 1]
        found = position_ids[0].cpu()
        if not torch.equal(found, within) and not torch.equal(found, here):
            raise ValueError(
                "position_ids neither restart at each document nor count from the start of the whole sequence: make them before the "
                "batch is cut, and give each rank its chunk"
            )
        self._positions = position_ids


def substitute_hf_flash_attn(process_group: Group | None, heads_k_stride: int) -> None:
    """Run the attention of transformers models with `attn_implementation="flash_attention_2"` around a ring, from now on.

    Each rank calls the model with its chunk of packed documents, (1, s_local), and their `position_ids`, after
    `update_ring_flash_attn_params`. Without the package flash_attn, which transformers asks for by that name, take
    `attn_implementation="ring_packed"`, the same attention. A model's sliding windows, softcaps, sinks and dropout are honoured; windows
    count as the model does.

    Args:
        process_group: the ranks of the ring, as for `ring_attention`.
        heads_k_stride: a divisor of the models' key/value heads. Results do not depend on it.

    Under activation checkpointing, run a batch's backward pass before the next update. Raises ValueError for bad input; the models raise
    it, on every rank, for padding, several rows, other than causal attention, and options that cannot be honoured.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    get_context(process_group)
    before = ALL_ATTENTION_FUNCTIONS.get(_NAMES[0])
    if isinstance(before, FlashAttentionAround):
        before = before.before
    around = FlashAttentionAround(process_group, check.integer("heads_k_stride", heads_k_stride, least=1), before)
    for name in _NAMES:
        AttentionInterface.register(name, around)
        AttentionMaskInterface.register(name, flash_attention_mask)


def update_ring_flash_attn_params(cu_seqlens: torch.Tensor, process_group: Group | None) -> None:
    """Say where the documents of the next batch end, on every rank, before the model is called.

    `DATA_PARAMS` then holds what `llama3_flash_attn_varlen_func` takes of these documents.

    Args:
        cu_seqlens: (documents + 1,) integers, the bounds in the whole batch, whose length the number of ranks divides.
        process_group: that of `substitute_hf_flash_attn`, if that was called.

    Raises ValueError for bad bounds and for another group.
    """
    around, ranks = _substituted(), get_context(process_group).ranks
    if around is not None and ranks is not get_context(around.group).ranks:
        raise ValueError("process_group is not that of substitute_hf_flash_attn, whose ring the models run around: pass the same")
    bounds = values("cu_seqlens", cu_seqlens)
    row_bounds("cu_seqlens", cu_seqlens, bounds[-1] if bounds else 0, bounds[-1] if bounds else 0)
    if bounds[-1] % ranks.size:
        raise ValueError(f"cu_seqlens ends with {bounds[-1]}, which {ranks.size} ranks do not divide: pad the batch")
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"
    DATA_PARAMS.update(zip(names, llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, ranks.rank, ranks.size)))
    if around is not None:
        around.update(bounds)


def use_ring_attn(flag: bool) -> None:
    """Whether models with substituted attention run around the ring, from the next call on; else each rank by itself, by FlashAttention.

    Raises ValueError without `substitute_hf_flash_attn` before, and for False without the package flash_attn.
    """
    from transformers.utils.import_utils import is_flash_attn_2_available

    around = _known()
    if not check.flag("flag", flag) and (around.before is None or not is_flash_attn_2_available()):
        raise ValueError("flag is False, but without the package flash_attn there is no attention for a rank by itself: install it")
    around.is_on = flag


def flash_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What `substitute_hf_flash_attn` put in FlashAttention's place: query (1, h, s_local, d) -> out (1, s_local, h, d), and None.

    Raises ValueError without `substitute_hf_flash_attn` before.
    """
    return _known()(module, query, key, value, attention_mask, **options)


def check_params(f1: Callable, f2: Callable) -> bool:
    """Whether two functions have as many parameters."""
    return len(inspect.signature(f1).parameters) == len(inspect.signature(f2).parameters)


def _substituted() -> FlashAttentionAround | None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    around = ALL_ATTENTION_FUNCTIONS.get(_NAMES[0])
    return around if isinstance(around, FlashAttentionAround) else None


def _known() -> FlashAttentionAround:
    around = _substituted()
    if around is None:
        raise ValueError("nothing is substituted: call substitute_hf_flash_attn(process_group, heads_k_stride) before")
    return around
