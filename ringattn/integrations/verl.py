"""verl's actor and reference around a ring: an engine for verl's registry, on packed batches that change from call to call.

    actor_rollout_ref.actor.strategy=ringattn
    actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=8   # the ring's size, in verl's words

verl loads this module by itself, through the entry point "ringattn" in the group "verl.plugins". The engine is verl's own for FSDP2, in
which attention goes around a ring in place of Ulysses' all-to-all. So the number of heads does not limit the number of ranks.

Each micro-batch is one row of packed sequences. All ranks of a ring get it whole. The engine places its sequences on the ranks
(`placed`), cuts tokens, positions, labels and temperatures alike, and runs the model on this rank's rows. Log-probabilities and
entropies of all rows are gathered, and verl's losses run on them unchanged. The gather's gradient is the sum over the ring, as FSDP, which
averages over all ranks, needs it.

Shapes: n tokens of a micro-batch, n_local of this rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from ..collective import unshard
from ..geometry.layout import Layout, contiguous, shard
from ..geometry.mask import documents
from ..geometry.placement import placed
from . import verl_platform  # noqa: F401  before verl's engines, which ask for the platform when they are imported
from .huggingface import attach
from .imports import cannot_import

try:
    from verl.utils import tensordict_utils
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
except ImportError as error:
    raise cannot_import(__name__, "verl with what its FSDP engine imports", ["verl", "peft"], error) from error

__all__ = ["RingEngineWithLMHead"]

_OF_TOKENS = ("input_ids", "position_ids", "shift_labels")  # of the model's inputs, (1, n)
_INPUTS = {*_OF_TOKENS, "attention_mask", "temperature", "return_dict"}


@EngineRegistry.register(model_type="language_model", backend="ringattn", device=["cuda", "cpu"])
class RingEngineWithLMHead(FSDPEngineWithLMHead):
    """verl's engine for actor and reference (`model_type` "language_model"), with FSDP2 and attention around a ring.

    verl makes it where a strategy is "ringattn", with the configurations of its FSDP engine. `ulysses_sequence_parallel_size` of the
    `FSDPEngineConfig` is the ring's size, of neighbouring ranks; it must divide the number of ranks, and may exceed the number of heads.

    Log-probabilities, entropy, loss and gradients are those of one process. Honoured are verl's other options of FSDP2, `pad_to_length`,
    micro-batches by tokens, temperatures a sample, entropy in chunks, LoRA, and fused kernels where the embeddings are tied.

    Raises ValueError, on every rank, for batches with padding (`use_remove_padding=False`), models that see images, `multi_modal_inputs`,
    position ids of several kinds, distillation from top-k logits, fused kernels with an output embedding of its own, and models that
    `attach` refuses.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        _check_config(model_config, engine_config)
        # the base class builds FSDP2 under this name
        super().__init__(model_config, dataclasses.replace(engine_config, strategy="fsdp2"), *args, **kwargs)

    def _init_device_mesh(self) -> None:
        size, ranks = self.engine_config.ulysses_sequence_parallel_size, dist.get_world_size()
        if size < 1 or ranks % size:
            raise ValueError(
                f"ulysses_sequence_parallel_size is {size}, but must divide the number of ranks, {ranks}: it is the ring's size"
            )
        super()._init_device_mesh()
        if self.ulysses_device_mesh is None:
            ring = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        else:
            ring = self.ulysses_device_mesh["sp"].get_group()
        assert isinstance(ring, dist.ProcessGroup)
        self.ring = ring
        # the base class neither cuts batches nor gathers outputs, and its modes set no all-to-all
        self.use_ulysses_sp = False
        self.ulysses_parallel_group = None

    def _build_module(self) -> Any:
        size, self.ulysses_sequence_parallel_size = self.ulysses_sequence_parallel_size, 1
        config = self.model_config.hf_config
        before, config._attn_implementation = config._attn_implementation, "eager"  # whatever is there, attach replaces it
        try:
            return super()._build_module()
        finally:
            self.ulysses_sequence_parallel_size = size
            config._attn_implementation = before

    def _build_fsdp_module(self, module: Any) -> Any:
        attach(module, group=self.ring)
        return super()._build_fsdp_module(module)

    def _get_packed_pad_size(self, packed_length: int) -> int:
        """verl's padding, and as much that each rank has a token."""
        return max(super()._get_packed_pad_size(packed_length), self.ulysses_sequence_parallel_size - packed_length)

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's rows of verl's inputs, with the layout and the sequences' bounds; and what `prepare_model_outputs` needs."""
        _check_batch(micro_batch)
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        unknown = inputs.keys() - _INPUTS
        if unknown:
            raise ValueError(f"the batch has {sorted(unknown)} for the model, but the strategy ringattn takes text alone")
        bounds = micro_batch["input_ids"].offsets().tolist()
        if output_args["pad_size"]:
            bounds.append(bounds[-1] + output_args["pad_size"])
        layout = _layout(bounds, self.ulysses_sequence_parallel_size)
        rank = dist.get_rank(self.ring)
        for name in _OF_TOKENS:
            if inputs.get(name) is not None:
                inputs[name] = shard(inputs[name], layout, rank, dim=1)
        for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
            output_args[name] = shard(output_args[name], layout, rank, dim=0)
        tensor = torch.tensor(bounds, dtype=torch.int32)
        inputs.update(layout=layout, cu_seq_lens_q=tensor, cu_seq_lens_k=tensor)
        if inputs.get("shift_labels") is not None:
            inputs["num_items_in_batch"] = bounds[-1]  # fused kernels make no mean, but attach asks for the count
        output_args["layout"] = layout
        return inputs, output_args

    def prepare_model_outputs(self, output: Any, output_args: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._layout = output_args["layout"]
        return super().prepare_model_outputs(output, output_args, *args, **kwargs)

    def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
        """(n_local,) of each rank -> (n,) on all of them, without padding."""
        whole = unshard(tensor, self._layout, self.ring, dim=0)
        return whole[: len(whole) - pad_size]


def _check_config(model_config: Any, engine_config: Any) -> None:
    if not model_config.use_remove_padding:
        raise ValueError(
            "use_remove_padding is False, but a ring takes packed sequences: set actor_rollout_ref.model.use_remove_padding=True"
        )
    if hasattr(model_config.hf_config, "vision_config") or hasattr(model_config.hf_config, "audio_config"):
        raise ValueError(
            f"{type(model_config.hf_config).__name__} has a vision or audio config, but the strategy ringattn takes models of text: use "
            "the strategy fsdp2"
        )
    if model_config.use_fused_kernels and not model_config.hf_config.get_text_config().tie_word_embeddings:
        raise ValueError(
            "use_fused_kernels is True, and the output embedding is not tied to the input's: under FSDP2 verl's fused kernels would get "
            "the shard of its weight that a rank stores: set use_fused_kernels=False"
        )
    strategy = getattr(engine_config, "strategy", None)
    if strategy not in ("ringattn", "fsdp2"):
        raise ValueError(f"strategy is {strategy!r}, but must be 'ringattn': the engine runs on FSDP2")


def _check_batch(micro_batch: Any) -> None:
    def flag(name: str, default: bool) -> bool:
        return bool(tensordict_utils.get_non_tensor_data(data=micro_batch, key=name, default=default))

    if not flag("use_remove_padding", True):
        raise ValueError("use_remove_padding is False in the batch, but a ring takes packed sequences")
    if flag("distillation_use_topk", False):
        raise ValueError("distillation_use_topk is True, but a ring's shards are not those of which verl cuts the teacher's logits")
    if micro_batch["position_ids"].dim() == 3:
        raise ValueError("position_ids are of several kinds, as for images, but the strategy ringattn takes models of text")


def _layout(bounds: list[int], ranks: int) -> Layout:
    """Where the packed sequences with these bounds go: even work; and a token for each rank, which transformers' models need."""
    layout = placed(documents(cu_seqlens=bounds), bounds[-1], ranks)
    return layout if all(layout.lengths) else contiguous(bounds[-1], ranks)
