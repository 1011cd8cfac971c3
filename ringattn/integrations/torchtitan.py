"""torchtitan's decoders around a ring: an inner attention for its override registry, and a trainer that cuts batches by our layouts.

    RingTitanTrainer.Config(
        model_spec=llama3.model_registry("8B"),
        parallelism=ParallelismConfig(context_parallel_degree=8, tensor_parallel_degree=2),
        override=OverrideConfig(imports=["ringattn.integrations.torchtitan.ring_attention_override"]),
        training=TrainingConfig(disable_cuda_graphs=True, ...),
        ...
    )

torchtitan's own context parallelism gathers all keys and values on every rank. Here they stay sharded on the axis "cp", and go around the
ring. torchtitan has no registry for the cut of batches, so a subclass of its `Trainer` overrides `post_dataloading_process`.

Shapes: b rows, s tokens of a whole row, n = b s, n_local of this rank; h heads, hk key/value heads, d head dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..attention import ring_attention
from ..geometry.layout import Layout, contiguous, shard, zigzag
from ..geometry.mask import Mask, documents
from .imports import cannot_import

try:
    import spmd_types
    from torchtitan.config import override
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.common.decoder_sharding import dense_activation_placement
    from torchtitan.protocols.module import Module
    from torchtitan.protocols.sharding import LocalMapConfig
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise cannot_import(__name__, "torchtitan", ["torchtitan"], error) from error

__all__ = ["RingInnerAttention", "RingInnerConfig", "RingMask", "RingTitanTrainer", "ring_attention_override"]

_LAYOUTS = {"headtail": zigzag, None: contiguous}  # by torchtitan's names of load balancers


@dataclass(frozen=True, eq=False)
class RingMask:
    """Stands for torchtitan's attention masks in a call of a model: what is live, who holds which positions, and who the ranks are."""

    mask: Mask
    layout: Layout
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict) -> RingMask:
        return self  # a process group cannot be copied


@dataclass(kw_only=True, slots=True)
class RingInnerConfig(Module.Config):
    """`RingInnerAttention.Config`, without settings: masks and layouts come with each batch."""


class RingInnerAttention(Module):
    """torchtitan's `inner_attention` around a ring: q (1, n_local, h, d), k and v (1, n_local, hk, d) -> (1, n_local, h, d).

    Raises ValueError for other masks than a `RingMask`, and for options that a ring does not have, such as `score_mod` and `out_transform`.
    """

    Config = RingInnerConfig

    def __init__(self, config: RingInnerConfig) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,  # torchtitan's names, by which its shardings are declared
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        asked = sorted(name for name, value in options.items() if value is not None)
        if asked:
            raise ValueError(f"the model passes {asked} to its attention, which ring attention does not have")
        if not isinstance(attention_masks, RingMask):
            raise ValueError(
                f"attention_masks is a {type(attention_masks).__name__}, but must be a RingMask: train with RingTitanTrainer, which cuts "
                "each batch and says which positions the ranks hold"
            )
        if q_BLNH.shape[2] != k_BLNH.shape[2] and not enable_gqa:
            raise ValueError(f"q has {q_BLNH.shape[2]} heads and k {k_BLNH.shape[2]}, but enable_gqa is False")
        at = attention_masks
        with spmd_types.no_typecheck():
            return ring_attention(
                q_BLNH, k_BLNH, v_BLNH, mask=at.mask, layout=at.layout, group=at.group, softmax_scale=scale, name="torchtitan"
            )


@override(target=FlexAttention.Config, exact=True, description="ring attention in place of FlexAttention")
def ring_attention_override(cfg: FlexAttention.Config) -> RingInnerConfig:
    """`RingInnerAttention` in place of FlexAttention, with k and v sharded on the axis "cp" as q is. For `OverrideConfig(imports=[...])`.

    Raises ValueError for `kernel_options`, which are of FlexAttention's kernels.
    """
    if cfg.kernel_options:
        raise ValueError(f"kernel_options are {cfg.kernel_options}, but are of FlexAttention's kernels: leave them out")
    own = dense_activation_placement(tp=spmd_types.S(2))  # heads on "tp", tokens on "cp"
    sharding = cfg.sharding_config
    if sharding is not None:
        names = ("q_BLNH", "k_BLNH", "v_BLNH")
        sharding = dataclasses.replace(
            sharding,
            in_src_shardings=dict.fromkeys(names, own),
            in_dst_shardings=dict.fromkeys(names, own),
            out_src_shardings=own,
            local_map=LocalMapConfig(in_grad_placements=(own, own, own)),
        )
    return RingInnerConfig(param_init=cfg.param_init, sharding_config=sharding)  # pyrefly: ignore[unexpected-keyword]


class RingTitanTrainer(Trainer):
    """torchtitan's trainer for models with `RingInnerAttention`: it cuts each batch's tokens, labels and positions by one layout.

    All rows of a batch become one sequence of n = b s tokens, whose documents begin where rows do and where `positions` are 0; tokens see
    their own document only, as in torchtitan. `context_parallel_load_balancer` chooses the layout of the n tokens: "headtail" is zigzag,
    None is contiguous. Losses and gradients are those of one rank.

    Raises ValueError, before it starts, for options that it cannot honour: another load balancer, CUDA graphs and compiled models (each
    batch has its own mask), pipelines, the validator (which cuts by itself), the backend "partial_dtensor", and a configuration without
    `ring_attention_override`. Raises ValueError for models with masks of their own, such as windows.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's, without further settings."""

    def __init__(self, config: Config) -> None:
        _check(config)
        super().__init__(config)
        if self.parallel_dims.cp_enabled:
            ring = self.parallel_dims.get_mesh("cp").get_group()
        else:
            ring = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(ring, dist.ProcessGroup)
        self._ring = ring
        for model in self.model_parts:
            kind: Any = type(model)
            if not isinstance(model, Decoder) or kind.get_attention_masks is not Decoder.get_attention_masks:
                raise ValueError(
                    f"{kind.__name__} makes attention masks of its own, which a ring does not know: take another model"
                )
            if not any(isinstance(module, RingInnerAttention) for module in model.modules()):
                raise ValueError(
                    f"{kind.__name__} has no attention that ring_attention_override replaces: build it with FlexAttention"
                )

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """This rank's rows of a batch: tokens, labels and positions (1, n_local), and the `RingMask` of the whole batch."""
        unknown = input_dict.keys() - {"input", "positions"}
        if unknown:
            raise ValueError(f"the batch has {sorted(unknown)}, which are not cut: give input and positions alone")
        tokens = input_dict["input"]
        positions = input_dict.get("positions")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        starts = positions == 0
        starts[:, 0] = True
        bounds = [*starts.flatten().nonzero().flatten().tolist(), tokens.numel()]
        ranks = dist.get_world_size(self._ring)
        layout = _LAYOUTS[self.config.parallelism.context_parallel_load_balancer](tokens.numel(), ranks)
        mine = RingMask(documents(cu_seqlens=bounds), layout, self._ring)
        rows = {"input": tokens, "positions": positions, "labels": labels}
        rank = dist.get_rank(self._ring)
        rows = {name: shard(x.reshape(1, -1), layout, rank) for name, x in rows.items()}
        return self._annotated(rows["input"], rows["labels"], {"positions": rows["positions"], "attention_masks": mine})

    def _annotated(
        self, tokens: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """As torchtitan's own method ends: tokens counted, and tensors with the types of its backend."""
        from torchtitan.distributed.full_dtensor import parallelize_inputs
        from torchtitan.distributed.spmd_types import annotate_input_spmd_types

        self.ntokens_seen += labels.numel()
        full = self.config.parallelism.spmd_backend == "full_dtensor"
        return (parallelize_inputs if full else annotate_input_spmd_types)(self.parallel_dims, tokens, labels, options)


def _check(config: Any) -> None:
    parallelism = config.parallelism
    wanted = f"{__name__}.{ring_attention_override.__name__}"
    named = [entry if isinstance(entry, str) else entry[0] for entry in config.override.imports]
    if wanted not in named:
        raise ValueError(f"override.imports are {named}, but must have {wanted!r}: it puts ring attention into the model")
    if parallelism.context_parallel_load_balancer not in _LAYOUTS:
        raise ValueError(
            f"context_parallel_load_balancer is {parallelism.context_parallel_load_balancer!r}, but must be one of {list(_LAYOUTS)}"
        )
    if parallelism.context_parallel_ptrr_mask_key is not None:
        raise ValueError("context_parallel_ptrr_mask_key is of torchtitan's FlexAttention: leave it out")
    if not config.training.disable_cuda_graphs:
        raise ValueError("disable_cuda_graphs is False, but each batch has its own mask: set training.disable_cuda_graphs=True")
    if config.compile.enable and "model" in config.compile.components:
        raise ValueError("compile.enable is True for the model, but each batch has its own mask: set compile.components=['loss']")
    if parallelism.pipeline_parallel_degree > 1:
        raise ValueError(
            f"pipeline_parallel_degree is {parallelism.pipeline_parallel_degree}, but RingTitanTrainer has no pipelines"
        )
    if config.validator.enable:
        raise ValueError("validator.enable is True, but torchtitan's validator would cut batches its own way: set it to False")
    if parallelism.spmd_backend == "partial_dtensor":
        raise ValueError(
            "spmd_backend is 'partial_dtensor', whose context parallelism knows FlexAttention alone: take 'spmd_types'"
        )
