"""Ring attention in Megatron-core (0.16): the `core_attention` of a layer's spec.

    spec = ring_spec(get_gpt_layer_local_spec())
    model = GPTModel(config, transformer_layer_spec=spec, ...)  # config.context_parallel_size ranks share a sequence

Megatron's context parallelism runs in Transformer Engine alone. `RingCoreAttention` takes the place of its `TEDotProductAttention` or
of Megatron's own `DotProductAttention`: batches, rotary embeddings, losses and gradients stay Megatron's.

Shapes: b batch, s_local rows of this rank, h query heads and hk key/value heads of this tensor-parallel rank, d head dim.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from .. import check
from ..attention import ring_attention
from ..geometry.layout import Layout, zigzag
from ..geometry.mask import Mask, causal, full, sliding_window
from ..runtime.agree import refusing
from ..runtime.groups import get_context
from ..schedule.schedules import Schedule, gather, ring
from ..scores import ScoreMod
from ..scores import score as make_score
from .imports import cannot_import

try:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnBackend, AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
except ImportError as error:
    raise cannot_import(__name__, "Megatron-core", ["megatron"], error, "megatron-core") from error

__all__ = ["RingCoreAttention", "ring_spec"]

# what each kind of attention in a config sees; padding and arbitrary masks are tensors
_LIVE = {
    AttnMaskType.causal: causal(),
    AttnMaskType.causal_bottom_right: causal(),
    AttnMaskType.no_mask: full(),
}
# options of a config that ask for what ring attention does not do, and what to do instead
_REFUSED = {
    "fp8_dot_product_attention": "attention around a ring is in bf16, fp16 or fp32: set it to False",
    "fp8_multi_head_attention": "attention around a ring is in bf16, fp16 or fp32: set it to False",
    "qk_clip": "the greatest logits are not returned: set it to False",
    "log_max_attention_logit": "the greatest logits are not returned: set it to False",
    "batch_invariant_mode": "kernels are chosen by sizes: set it to False",
    "flash_decode": "there is no key/value cache: generate without it",
    "hierarchical_context_parallel_sizes": "give schedule=double_ring(ranks_per_node) to ring_spec",
}


class RingCoreAttention(MegatronModule):
    """The `core_attention` of Megatron's attention modules, around the ring of a context-parallel group.

    Megatron makes it from a spec and gives `config`, `layer_number`, `attn_mask_type`, `attention_type`, `attention_dropout`,
    `softmax_scale`, `k_channels`, `v_channels`, `cp_comm_type` and `pg_collection`. The spec's `params` give the others:

    Args:
        layout: which positions each rank of the context-parallel group holds; None for zigzag with two equal chunks a rank, as
            Megatron cuts its batches. Another layout needs batches that you cut, and position embeddings that come with them.
        mask: which pairs are live, in the place of `attn_mask_type`.
        score: what else happens to scores, from `score(...)`, but for dropout and sinks, which the config says.
        schedule: how keys and values move, if `cp_comm_type` is None.

    Honoured in the config: `attention_dropout` in training, with seeds from torch's generator for the CPU, which must be in one state on
    all ranks of the ring; `softmax_type` with its learned offset; `window_size` and `window_attn_skip_freq`; `softmax_scale`;
    `apply_query_key_layer_scaling`, which leaves scores as they are; `num_query_groups`; tensor parallelism; `cp_comm_type` "p2p" (a ring)
    and "all_gather". Raises ValueError, by name, for what is not honoured: `cp_comm_type` "a2a" and "a2a+p2p", an `attention_backend`
    other than auto, `deterministic_mode` without `torch.use_deterministic_algorithms(True)`, FP8 attention, clipped logits, attention to
    other tokens. A call raises it, on every rank, for an `attention_mask`, an `attention_bias`, packed sequences and masks of padding.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        layout: Layout | None = None,
        mask: Mask | None = None,
        score: ScoreMod | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(config=config)
        check.optional("layout", layout, Layout, check.BUILD_A_LAYOUT)
        check.optional("mask", mask, Mask, check.BUILD_A_MASK)
        check.optional("score", score, ScoreMod, check.BUILD_A_SCORE)
        check.optional("schedule", schedule, Schedule, check.BUILD_A_SCHEDULE)
        _check_config(config, attention_type, score)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.group = pg_collection.tp, pg_collection.cp
        ranks = get_context(self.group).ranks.size
        if config.context_parallel_size != ranks:
            raise ValueError(
                f"config.context_parallel_size is {config.context_parallel_size}, but the context-parallel group has {ranks} ranks"
            )
        self.layout, self.mask, self.score = layout, mask, score
        self.attn_mask_type = attn_mask_type
        self.schedule = _schedule(cp_comm_type, schedule)
        self.softmax_scale = softmax_scale
        self.dropout = check.number(
            "attention_dropout", config.attention_dropout if attention_dropout is None else attention_dropout
        )
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = sliding_window(*(None if side < 0 else side for side in config.window_size)) if windowed else None
        heads = config.num_attention_heads // self.tp_group.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.softmax_offset: torch.Tensor | None = None
        if config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(heads, device=device, dtype=config.params_dtype)
        elif config.softmax_type == "learnable":
            del self.softmax_offset
            self.softmax_offset = nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
            if config.perform_initialization:
                config.init_method(self.softmax_offset)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """out (s_local, b, h * d_v) of query (s_local, b, h, d), key (s_local, b, hk, d) and value (s_local, b, hk, d_v)."""
        ranks = get_context(self.group).ranks
        with refusing(ranks):
            given = dict(attention_mask=attention_mask, attention_bias=attention_bias, packed_seq_params=packed_seq_params)
            for name, x in given.items():
                if x is not None:
                    raise ValueError(
                        f"{name} is given to RingCoreAttention, but around a ring what is live is said over global positions: give None, "
                        "and say it by ring_spec(spec, mask=...); what is added to scores by score=score(bias=..., alibi=...)"
                    )
            check.tensors(query, key, value)
            mask = self._live(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
            layout = self.layout
            if layout is None:
                rows = query.shape[0]
                if ranks.size > 1 and rows % 2:
                    raise ValueError(
                        f"this rank has {rows} rows, but Megatron cuts a sequence into two equal chunks a rank: make its length a "
                        f"multiple of {2 * ranks.size}, or give ring_spec the layout by which you cut"
                    )
                layout = zigzag(ranks.size * rows, ranks.size)
            score = self._score()
        out = ring_attention(
            *(x.transpose(0, 1) for x in (query, key, value)),
            layout=layout,
            mask=mask,
            group=self.group,
            softmax_scale=self.softmax_scale,
            score=score,
            schedule=self.schedule,
        )
        return out.transpose(0, 1).flatten(2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> Any:
        """The learned offset, as Megatron's own `DotProductAttention` saves it."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=(metadata or {}).get("dp_cp_group"))
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def _live(self, kind: Any) -> Mask:
        mask = self.mask
        if mask is None:
            if kind not in _LIVE:
                raise ValueError(
                    f"attn_mask_type is {kind}, whose mask is a tensor: say what is live by ring_spec(spec, mask=...), without padding"
                )
            mask = _LIVE[kind]
        return mask if self.window is None else mask & self.window

    def _score(self) -> ScoreMod | None:
        """What happens to scores in this call: dropout in training alone, and a score more a row in the denominator."""
        dropout = self.dropout if self.training else 0.0
        given = self.score
        if self.softmax_offset is None and not dropout:
            return given
        given = make_score() if given is None else given
        return make_score(
            softcap=given.softcap,
            alibi=given.alibi,
            bias=given.bias,
            sinks=given.sinks if self.softmax_offset is None else self.softmax_offset,
            dropout=dropout,
            seed=given.seed,
            offset=given.offset,
        )


def ring_spec(
    spec: Any,
    *,
    layout: Layout | None = None,
    mask: Mask | None = None,
    score: ScoreMod | None = None,
    schedule: Schedule | None = None,
) -> Any:
    """A copy of a spec of Megatron-core whose self-attention runs around the ring of the context-parallel group.

    Args:
        spec: a `ModuleSpec` of a layer, from `get_gpt_layer_local_spec` and the like, or `TransformerBlockSubmodules` with several.
        layout, mask, score, schedule: as for `RingCoreAttention`.

    Raises ValueError for a layer that mixes tokens by other means than a `core_attention`, such as attention to an encoder.
    """
    params = dict(layout=layout, mask=mask, score=score, schedule=schedule)
    if isinstance(spec, ModuleSpec) and hasattr(spec.submodules, "self_attention"):
        return _with_ring(spec, params)
    layers: Any = getattr(spec, "layer_specs", None)
    if layers is not None:
        found: Any = copy.copy(spec)
        found.layer_specs = [_with_ring(layer, params) for layer in layers]
        return found
    raise ValueError(
        f"spec is a {type(spec).__name__}, but must be the ModuleSpec of a transformer layer, or the submodules of a block"
    )


def _with_ring(spec: Any, params: dict[str, Any]) -> Any:
    layer: Any = getattr(spec, "submodules", None)
    attention: Any = getattr(layer, "self_attention", None)
    parts: Any = getattr(attention, "submodules", None)
    if not hasattr(parts, "core_attention"):
        raise ValueError(f"a layer of spec has {attention!r} for self_attention, which has no core_attention to replace")
    if getattr(layer, "cross_attention", IdentityOp) is not IdentityOp:
        raise ValueError("a layer of spec has cross_attention, whose keys are other tokens: a ring takes self-attention alone")
    spec, layer, attention, parts = map(copy.copy, (spec, layer, attention, parts))
    parts.core_attention = ModuleSpec(module=RingCoreAttention, params=params)
    attention.submodules, layer.self_attention, spec.submodules = parts, attention, layer
    return spec


def _check_config(config: Any, attention_type: str, score: ScoreMod | None) -> None:
    """Raise ValueError for what is not honoured."""
    for name, instead in _REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(f"config.{name} is {getattr(config, name)}, but {instead}")
    if attention_type != "self":
        raise ValueError(f"attention_type is {attention_type!r}, but a ring takes self-attention alone")
    if config.attention_backend is not AttnBackend.auto:
        raise ValueError(
            f"config.attention_backend is {config.attention_backend}, but ringattn has kernels of its own: leave it auto"
        )
    if config.deterministic_mode and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("config.deterministic_mode is True, but PyTorch's switch is off: torch.use_deterministic_algorithms(True)")
    if config.softmax_type not in ("vanilla", "off-by-one", "learnable"):
        raise ValueError(f"config.softmax_type is {config.softmax_type!r}, which is unknown here")
    if score is not None and score.dropout:
        raise ValueError(f"score has dropout {score.dropout}, but config.attention_dropout says it: leave it out of score(...)")
    if score is not None and score.sinks is not None and config.softmax_type != "vanilla":
        raise ValueError(f"score has sinks, but config.softmax_type is {config.softmax_type!r}, which adds some: give one of them")


def _schedule(cp_comm_type: str | None, schedule: Schedule | None) -> Schedule | None:
    """How keys and values move. Raises ValueError for an all-to-all, and for two answers."""
    if cp_comm_type is None:
        return schedule
    if schedule is not None:
        raise ValueError(f"cp_comm_type is {cp_comm_type!r}, and a schedule is given: give one of them")
    if cp_comm_type not in ("p2p", "all_gather"):
        raise ValueError(
            f"cp_comm_type is {cp_comm_type!r}, but must be 'p2p', 'all_gather' or None: an all-to-all to heads is not made of "
            "Megatron's groups"
        )
    return ring() if cp_comm_type == "p2p" else gather()
