"""Models of transformers that make their scores themselves instead of by `AttentionInterface`: forward passes for their attention.

    BLOOM, MPT, Falcon    ALiBi; Falcon has rotary embeddings instead, unless its config says alibi
    T5, mT5, UMT5         a learned bias for each head and bucket of distances, and no softmax scale

A function here takes the place of the forward pass of one class: the module's own projections, attention around the ring with the
`score` that the class means, and the module's own output.

In ALiBi of these models the bias is slope * k position. The softmax of a row does not change if the row's slope * q position is taken
off, and slope * (k position - q position) is -slope * distance where no key comes after its query.

Shapes: b batch, s local tokens, h query heads, hk key/value heads, d head dim.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..digest import constant
from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..geometry.region import LO
from ..scores import Buckets, relative_bias, t5_buckets
from ..training.causal_lm import forward_names
from .huggingface_attachment import LiveMask
from .huggingface_forward import Asked, attend_around_ring, attend_to_states
from .huggingface_plain import FORWARDS as PLAIN
from .huggingface_plain import WITHOUT_INTERFACE

_BUCKETS = "ringattn_buckets"  # the attribute of a module that holds the `Buckets` of its bias; None without one
_MASKS = {"create_causal_mask", "create_bidirectional_mask"}  # functions of transformers that ask for a `LiveMask`


def forwards_of_own(modules: Sequence[nn.Module], takes_others: bool = False) -> list[nn.Module]:
    """Those of a model's attention modules that have a forward pass here.

    takes_others: whether the model's other modules take their attention from `AttentionInterface`; if not, a model that has others has
    none.
    """
    found = [module for module in modules if _own(module) is not None]
    # T5's layers around its attention are called attention too
    others = [x for x in modules if x not in found and not any(part in found for part in x.modules())]
    return [] if others and not takes_others else found


def takes_interface(modules: Sequence[nn.Module]) -> bool:
    """Whether all attention modules take their attention from `AttentionInterface`, though their model may not say so."""
    outer = [x for x in modules if not any(part in modules for part in x.modules() if part is not x)]
    return bool(outer) and all("ALL_ATTENTION_FUNCTIONS" in forward_names(module) for module in outer)


def counts_distances(modules: Sequence[nn.Module]) -> bool:
    """Whether these modules need no positions, because their scores are of distances."""
    return all(_own(module) not in PLAIN.values() for module in modules)


def check_forwards_of_own(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if these modules cannot have our forward passes."""
    for module in modules:
        if "forward" in vars(module) and not _is_put_in(module):
            raise ValueError(
                f"the forward of {type(module).__name__} is replaced already, as accelerate's hooks do: remove them, and attach first"
            )
        _buckets(module)
    scored = [module for module in modules if _own(module) not in PLAIN.values()]
    makers = [part for part in model.modules() if hasattr(part, "config") and _holds_blocks(part, scored)]
    if not all(_MASKS & forward_names(part) for part in makers):
        raise ValueError(
            f"{type(model).__name__} makes its masks itself in this version of transformers, without the functions that ask the ring "
            "for them: use a newer one, such as 5.23"
        )


def check_mask_of_scores(model: nn.Module, mask: Mask | None, layout: Layout) -> None:
    """Raise ValueError if a mask does not fit the scores of a model's attention."""
    if mask is None or not bool((mask.regions(layout.seq_len)[:, LO] < 0).any()):
        return
    placed = next((module for module in model.modules() if _own(module) is not None and _has_alibi(module)), None)
    if placed is not None:
        raise ValueError(
            f"{mask!r} lets tokens see later ones, which {type(placed).__name__} would favour the more the farther they are, where "
            "ringattn's ALiBi favours near ones: attach a mask within ringattn.causal()"
        )


def put_in(module: nn.Module) -> None:
    """Let a module run our forward pass."""
    # compiled code can read buckets but cannot trace how they are made
    vars(module)[_BUCKETS] = _buckets(module)
    own = _own(module)
    assert own is not None
    module.forward = MethodType(own, module)


def take_out(model: nn.Module) -> bool:
    """Undo `put_in` in all modules of a model; returns whether there was anything to undo."""
    found = [module for module in model.modules() if _is_put_in(module)]
    for module in found:
        del vars(module)["forward"]
        vars(module).pop(_BUCKETS, None)
    return bool(found)


def _is_put_in(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) in _FORWARDS.values()


def _own(module: nn.Module) -> Callable[..., Any] | None:
    """The forward pass that a module has here, if it needs one."""
    # with the file: models loaded from the Hub with code of their own have classes of the same names
    found = _FORWARDS.get(f"{type(module).__module__}.{type(module).__name__}".removeprefix("transformers.models."))
    return None if found in WITHOUT_INTERFACE and takes_interface([module]) else found


def _holds_blocks(part: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether a part of the model is one that runs layers: it has a list of modules that hold attention."""
    lists = [child for child in part.children() if isinstance(child, nn.ModuleList)]
    return any(module in modules for blocks in lists for module in blocks.modules())


def _bloom(
    module: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor | None = None,
    attention_mask: LiveMask | None = None,
    layer_past: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = module.query_key_value(hidden_states).unflatten(-1, (module.num_heads, 3, module.head_dim)).unbind(3)
    dropout = module.attention_dropout.p if module.training else 0.0
    asked = Asked(module.inv_norm_factor, scores=dict(alibi=_slopes(module, "build_alibi_tensor", q), dropout=dropout))
    out = attend_around_ring(module, q, k, v, attention_mask, asked, {**options, "past_key_values": layer_past})
    return F.dropout(module.dense(out.flatten(2)), module.hidden_dropout, module.training) + residual, None


def _mpt(
    module: Any,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: LiveMask | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = qkv.unflatten(-1, (3, module.n_heads, module.head_dim)).unbind(2)
    dropout = module.attn_dropout_p if module.training else 0.0
    asked = Asked(module.softmax_scale, scores=dict(alibi=_slopes(module, "build_mpt_alibi_tensor", q), dropout=dropout))
    out = attend_around_ring(module, q, k, v, attention_mask, asked, {**options, "past_key_values": past_key_values})
    return module.out_proj(out.flatten(2)), None


def _falcon(
    module: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: LiveMask | None,
    position_ids: torch.Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    heads = module.num_heads
    if not module.new_decoder_architecture:
        groups = 1 if module.multi_query else heads
    else:
        groups = module.num_kv_heads
    # each group of heads has its queries, then a key, then a value
    fused = module.query_key_value(hidden_states).unflatten(-1, (groups, heads // groups + 2, module.head_dim))
    q, k, v = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    scores: dict[str, Any] = {}
    if _has_alibi(module):
        # the scale applies to the slopes too; without ALiBi, Falcon drops no weights
        slopes = _slopes(module, "build_alibi_tensor", q).double() * module.inv_norm_factor
        scores = dict(alibi=slopes, dropout=module.attention_dropout.p if module.training else 0.0)
    else:
        assert position_embeddings is not None
        q, k = _modeling(module).apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
    options = {**options, "past_key_values": layer_past, "output_attentions": output_attentions}
    out = attend_around_ring(module, q, k, v, attention_mask, Asked(module.inv_norm_factor, scores=scores), options)
    return module.dense(out.flatten(2)), None


def _t5(
    module: Any,
    hidden_states: torch.Tensor,
    mask: LiveMask | None = None,
    key_value_states: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """The first layer's table takes the place of the bias that T5's layers hand on to each other: (h, buckets)."""
    table = _table(module, hidden_states) if position_bias is None else position_bias
    options = {**options, "past_key_values": past_key_values}
    return _with_bias(module, hidden_states, key_value_states, table, mask, options), table, None


def _umt5(
    module: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: LiveMask | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    options = {**options, "past_key_values": past_key_values}
    table = _table(module, hidden_states)
    return _with_bias(module, hidden_states, encoder_hidden_states, table, attention_mask, options), None


def _with_bias(
    module: Any,
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    table: torch.Tensor | None,
    mask: LiveMask | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """T5's attention, with the bias of a table (h, buckets), to these tokens, or to the encoder's states (b, t, n)."""
    seen = hidden if states is None else states
    q, k, v = (
        project(x).unflatten(-1, (module.n_heads, -1)) for project, x in ((module.q, hidden), (module.k, seen), (module.v, seen))
    )
    scores: dict[str, Any] = dict(dropout=module.dropout if module.training else 0.0)
    if states is not None:
        return module.o(attend_to_states(module, q, k, v, mask, Asked(1.0, scores=scores), options).flatten(2))
    if table is not None:
        scores["bias"] = relative_bias(table, vars(module)[_BUCKETS])
    return module.o(attend_around_ring(module, q, k, v, mask, Asked(1.0, scores=scores), options).flatten(2))


def _table(module: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """A module's learned bias (h, buckets), if it has one: looked up, because wrappers gather a module's weights when it is called."""
    if not module.has_relative_attention_bias:
        return None
    return module.relative_attention_bias(torch.arange(module.relative_attention_num_buckets, device=hidden.device)).t()


def _buckets(module: Any) -> Buckets | None:
    """T5's distances in buckets. Raises ValueError for settings that leave no bucket for a direction."""
    if _own(module) not in (_t5, _umt5):
        return None
    count, far = module.relative_attention_num_buckets, module.relative_attention_max_distance
    return t5_buckets(count, far, bidirectional=not module.is_decoder)


def _has_alibi(module: Any) -> bool:
    return _own(module) in (_bloom, _mpt) or (_own(module) is _falcon and module.config.alibi)


def _slopes(module: nn.Module, build: str, q: torch.Tensor) -> torch.Tensor:
    """The slopes (h,) of a model's own function, which for head counts that are no power of two differ between models."""
    return _slopes_on(getattr(_modeling(module), build), q.shape[2], q.device)


@constant
def _slopes_on(build: Callable[..., torch.Tensor], h: int, device: torch.device) -> torch.Tensor:
    """torch.compile calls this while it traces."""
    return _kept_slopes(build, h, device)


@lru_cache(256)
def _kept_slopes(build: Callable[..., torch.Tensor], h: int, device: torch.device) -> torch.Tensor:
    # tensors made in inference mode could not be used in training later
    with torch.inference_mode(False):
        takes_mask = "attention_mask" in build.__code__.co_varnames
        # biases of two neighbours: (h, 1, 2)
        bias = build(torch.ones(1, 2, dtype=torch.int64), h, torch.float32) if takes_mask else build(h, 2)
        return (bias[:, 0, 1] - bias[:, 0, 0]).float().to(device)


def _modeling(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


_FORWARDS: dict[str, Callable[..., Any]] = {
    **PLAIN,
    "bloom.modeling_bloom.BloomAttention": _bloom,
    "mpt.modeling_mpt.MptAttention": _mpt,
    "falcon.modeling_falcon.FalconAttention": _falcon,
    "t5.modeling_t5.T5Attention": _t5,
    "mt5.modeling_mt5.MT5Attention": _t5,
    "umt5.modeling_umt5.UMT5Attention": _umt5,
}
