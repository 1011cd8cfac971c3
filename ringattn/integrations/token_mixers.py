"""Modules by which tokens see each other beside attention: on a shard, they would not see past its ends."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
_OTHERS = (
    *(nn.RNNBase, nn.RNNCellBase),
    *(nn.MaxPool1d, nn.AvgPool1d, nn.LPPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d),
    _NormBase,  # batch and instance norms, whose statistics are over tokens
)


def check_token_mixers(model: nn.Module, known: Collection[nn.Module] = ()) -> None:
    """Raise ValueError if a module in it mixes tokens: a convolution, recurrence, pooling, or a norm with statistics over tokens.

    known: modules that run around the ring, whose parts may do so.
    """
    parts = {part for module in known for part in module.modules()}
    for name, module in model.named_modules():
        if module in parts:
            continue
        is_wide = isinstance(module, _CONVOLUTIONS) and module.kernel_size != (1,)
        if is_wide or isinstance(module, _OTHERS):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, which mixes tokens beside attention: it would not see past the "
                "shard's ends; run it on whole sequences, outside of the model that runs on shards"
            )
