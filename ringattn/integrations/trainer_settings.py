"""Settings and arguments of transformers' Trainer that cannot be honoured around a ring: when they ask for something, and why not.

Tables say so by name. Those of trl's trainers are in `trl_settings.py`, beside what all trainers share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# whether a value asks for something; None, which older versions without the setting have, does not
Settings = dict[str, tuple[Callable[[Any], bool], str]]

_ONE_DEALS = "one rank would deal rows to all: leave it out"
_NOT_LOADED_SO = "batches come from loaders that deal rows to rings: leave it out"

# of TrainingArguments, for all trainers
SHARED_SETTINGS: Settings = {
    "neftune_noise_alpha": (lambda x: x is not None, "the noise would be scaled by the length of a shard: leave it out"),
    "use_liger_kernel": (bool, "its layers are not tried around a ring: leave it out"),
    "auto_find_batch_size": (bool, "a rank that runs out of memory would change the batch size alone: leave it out"),
    "dataloader_in_order": (lambda x: x is False, "ranks of a ring would get different batches at a time: leave it out"),
}
# within accelerator_config, for all trainers
SHARED_LOADING: Settings = {"dispatch_batches": (bool, _ONE_DEALS), "split_batches": (bool, _ONE_DEALS)}
# arguments, for all trainers
SHARED_ARGUMENTS: dict[str, str] = {
    "compute_metrics": "no rank has logits of whole sequences: leave it out; evaluate gives the exact mean loss",
    "preprocess_logits_for_metrics": "no rank has logits of whole sequences: leave it out",
}

_TRAINER_SETTINGS: Settings = {
    **SHARED_SETTINGS,
    "train_sampling_strategy": (
        lambda x: x not in (None, "random", "sequential"),
        "rows are dealt to rings at random or in order: give 'random' or 'sequential', or override get_train_dataloader",
    ),
    "group_by_length": (bool, "rows are dealt to rings at random: leave it out, or override get_train_dataloader"),
    "include_tokens_per_second": (bool, "it would count the tokens of a shard: leave it out"),
}
_TRAINER_LOADING: Settings = {
    **SHARED_LOADING,
    "even_batches": (lambda x: x is False, "rings take equal numbers of batches: leave it out"),
    "use_seedable_sampler": (lambda x: x is False, _NOT_LOADED_SO),
    "non_blocking": (bool, _NOT_LOADED_SO),
}
_PARALLEL = ("tp_size", "cp_size", "sp_size")


def check_settings(settings: Any, table: Settings, loading: Settings) -> None:
    """Raise ValueError for TrainingArguments that cannot be honoured. loading: of what is within accelerator_config."""
    for name, (asks, why) in table.items():
        if asks(getattr(settings, name, None)):
            raise ValueError(f"{name} is {getattr(settings, name)!r}, but {why}")
    within = getattr(settings, "accelerator_config", None)
    for name, (asks, why) in loading.items():
        if asks(getattr(within, name, None)):
            raise ValueError(f"{name} is {getattr(within, name)!r} in accelerator_config, but {why}")


def check_given(given: dict[str, Any], table: dict[str, str]) -> None:
    """Raise ValueError for a trainer's arguments that cannot be honoured."""
    for name, why in table.items():
        if given.get(name) is not None:
            raise ValueError(f"{name} is given, but {why}")


def check_trainer(given: dict[str, Any]) -> None:
    """Raise ValueError for what `RingTrainer` was given and cannot honour."""
    check_given(given, SHARED_ARGUMENTS)
    settings: Any = given.get("args")
    check_settings(settings, _TRAINER_SETTINGS, _TRAINER_LOADING)
    # one process may have it off: older versions of transformers turn it off there themselves
    if getattr(settings, "world_size", 1) > 1 and not settings.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices is False, but ranks of a ring hold different numbers of one sequence's tokens, so a mean of "
            "each rank's mean is none over tokens: leave it on"
        )
    parallel = getattr(settings, "parallelism_config", None)
    for name in _PARALLEL:
        if (getattr(parallel, name, None) or 1) > 1:
            raise ValueError(
                f"{name} is {getattr(parallel, name)} in parallelism_config, but ranks share sequences as a ring: leave it at 1"
            )
