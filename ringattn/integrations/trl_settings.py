"""Arguments and settings of trl's trainers: those that cannot be honoured around a ring, by name, and what loaders must know of rings."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist

from ..transport import Ranks
from .accelerate import RingParallelismConfig
from .trainer_settings import SHARED_ARGUMENTS, SHARED_LOADING, SHARED_SETTINGS, Settings, check_given, check_settings

# settings that cannot be honoured: when they ask for something, and why not
_SETTINGS: Settings = {
    **SHARED_SETTINGS,
    "deepspeed": (lambda x: x is not None, "its loaders would deal rows to the ranks of a ring: use DDP or FSDP2"),
    "activation_offloading": (bool, "it is not tried around a ring: leave it out, or see ringattn.training.offload"),
    "include_num_input_tokens_seen": (
        lambda x: x not in ("no", False, None),
        "it would count each token once a rank of a ring: leave it out",
    ),
    "precompute_ref_log_probs": (bool, "it would gather each pair once a rank of a ring: leave it out"),
    "use_vllm": (bool, "vLLM samples for each rank by itself: give a rollout_func, which may ask a server of vLLM"),
    "use_transformers_continuous_batching": (bool, "its cache does not go around a ring: leave it out"),
    "log_completions": (bool, "it would list each completion once a rank of a ring: leave it out"),
}
# arguments of the trainers, likewise
_ARGUMENTS: dict[str, str] = {
    **SHARED_ARGUMENTS,
    "compute_loss_func": "no rank has logits of whole sequences: override compute_loss, and make the loss from log-probabilities",
    "quantization_config": "the model is loaded already: load it so",
    "peft_config": "the model is attached already: wrap it by get_peft_model, attach that, and give it",
    "tools": "their calls are not tried around a ring: leave them out, or call them in a rollout_func",
    "environment_factory": "environments are not tried around a ring: leave it out, or step them in a rollout_func",
}


def check_arguments(given: dict[str, Any], config: type) -> None:
    """Raise ValueError for a trainer's arguments that cannot be honoured. config: of which class `args` must be."""
    from transformers import PreTrainedTokenizerBase

    settings = given.get("args")
    if not isinstance(settings, config):
        raise ValueError(f"args is {kind(settings)}, but must be a {config.__name__}: give one")
    check_given(given, _ARGUMENTS)
    check_settings(settings, _SETTINGS, SHARED_LOADING)
    tokenizer = given.get("processing_class")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"processing_class is {kind(tokenizer)}, but must be a tokenizer: only text is possible around a ring")
    text: Any = given["model"].config.get_text_config()
    asked = getattr(settings, "router_aux_loss_coef", None)
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if asked is None else asked
    if hasattr(text, "output_router_logits") and coefficient:
        raise ValueError(f"router_aux_loss_coef is {coefficient}, but the routers' loss would be of a shard: set it to 0.0 in args")


def check_groups(settings: Any, ranks: int) -> None:
    """Raise ValueError for a GRPOConfig whose groups of completions would be spread over rings, or whose rewards would be."""
    if ranks == 1:
        return
    held = {
        "num_generations": settings.per_device_train_batch_size * settings.steps_per_generation,
        "num_generations_eval": settings.per_device_eval_batch_size,
    }
    for name, rows in held.items():
        group = getattr(settings, name, None) or settings.num_generations
        if rows % group and (name == "num_generations" or settings.eval_strategy != "no"):
            raise ValueError(
                f"{name} is {group}, but a ring makes {rows} completions at a time, which must be whole groups: give a multiple of {group}"
            )
    if settings.scale_rewards == "batch":
        raise ValueError("scale_rewards is 'batch', but trl would count rewards once a rank of a ring: scale them by 'group'")
    if settings.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError(
            "multi_objective_aggregation is 'normalize_then_sum', but trl would count rewards once a rank of a ring: leave it out"
        )


def on_rings(settings: Any, ranks: Ranks, replica: tuple[int, int]) -> Any:
    """The trainer's settings with loaders that deal rows to rings. Raises ValueError for rings of ranks that are not consecutive."""
    if ranks.size == 1:
        return settings
    settings = copy.copy(settings)
    given = settings.parallelism_config
    if given is None:
        given = RingParallelismConfig(ring_size=ranks.size)
    elif not isinstance(given, RingParallelismConfig) or given.ring_size != ranks.size:
        raise ValueError(
            f"parallelism_config is {kind(given)}, but loaders must know the ring: give RingParallelismConfig(ring_size={ranks.size}), "
            "or leave it out for DDP"
        )
    rank, expected = dist.get_rank(), replica[0] * ranks.size + ranks.rank
    if rank != expected or replica[1] * ranks.size != dist.get_world_size():
        raise ValueError(
            f"rank {rank} is rank {ranks.rank} of ring {replica[0]}, but loaders deal to rings of consecutive ranks: make the ring "
            "the last axis of the mesh, and every rank in a ring"
        )
    settings.parallelism_config = given
    if getattr(settings, "generation_batch_size", None) is not None:  # trl's count of all ranks' completions
        settings.generation_batch_size //= ranks.size
    return settings


def kind(value: Any) -> str:
    """A value in an error message."""
    return "missing" if value is None else repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
