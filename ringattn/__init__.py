"""ringattn: exact attention over sequences too long for one GPU.

>>> import torch, ringattn as ra
>>> q = k = v = torch.randn(1, 16, 2, 8)
>>> ra.ring_attention(q, k, v, mask=ra.causal()).shape
torch.Size([1, 16, 2, 8])
"""

import sys

from . import reference, verification
from ._version import __version__
from .attention import attend, ring_attention
from .collective import unshard
from .geometry.layout import Layout, balanced, contiguous, default_layout, shard, striped, zigzag
from .geometry.mask import (
    Mask,
    bigbird,
    block_sparse,
    causal,
    dilated_window,
    documents,
    full,
    global_tokens,
    prefix,
    sliding_window,
)
from .geometry.placement import placed
from .geometry.plan import Plan, make_plan
from .geometry.span import Span
from .integrations.replace import replace_attention
from .partial import Partial, Stats, finish, merge
from .predict import planner
from .preparation import prepare
from .recurrent.convolution import causal_conv1d
from .recurrent.features import favor_features, favor_projection
from .recurrent.kernels import RecurrenceKernels, fla_kernels, torch_kernels
from .recurrent.linear_attention import linear_attention
from .runtime.groups import hybrid, process_group, symmetric
from .schedule.schedules import Schedule, default_schedule, double_ring, gather, pass_q, ring, waves
from .scores import Buckets, RelativeBias, ScoreMod, alibi_slopes, buckets, relative_bias, score, t5_buckets
from .serving.batch import CacheBatch
from .serving.cache import PagedCache
from .serving.decoding import decode
from .serving.pages import CachedSequence, OutOfPages
from .serving.prefilling import prefill
from .training import causal_lm, data, loss, tiled
from .training.checkpoint import checkpoint_contexts, checkpoint_layers, checkpoint_policy
from .training.seeds import manual_seed
from .verification import Report, verify
from .warmup import warm

__all__ = [
    "Buckets",
    "CacheBatch",
    "CachedSequence",
    "Layout",
    "Mask",
    "OutOfPages",
    "PagedCache",
    "Partial",
    "Plan",
    "RecurrenceKernels",
    "RelativeBias",
    "Report",
    "Schedule",
    "ScoreMod",
    "Span",
    "Stats",
    "__version__",
    "alibi_slopes",
    "attend",
    "balanced",
    "bigbird",
    "block_sparse",
    "buckets",
    "causal",
    "causal_conv1d",
    "checkpoint_contexts",
    "checkpoint_layers",
    "checkpoint_policy",
    "contiguous",
    "decode",
    "default_layout",
    "default_schedule",
    "dilated_window",
    "documents",
    "double_ring",
    "favor_features",
    "favor_projection",
    "finish",
    "fla_kernels",
    "full",
    "gather",
    "global_tokens",
    "hybrid",
    "linear_attention",
    "make_plan",
    "manual_seed",
    "merge",
    "pass_q",
    "placed",
    "prefill",
    "prefix",
    "prepare",
    "process_group",
    "reference",
    "relative_bias",
    "replace_attention",
    "ring",
    "ring_attention",
    "score",
    "shard",
    "sliding_window",
    "striped",
    "symmetric",
    "t5_buckets",
    "torch_kernels",
    "unshard",
    "verify",
    "warm",
    "waves",
    "zigzag",
]

# dotted names under which these modules were documented before they had folders of their own
_FORMER = {
    "integrations.causal_lm": causal_lm,
    "integrations.data": data,
    "integrations.loss": loss,
    "integrations.tiled": tiled,
    "integrations.verify": verification,
    "planner": planner,
}
for _name, _module in _FORMER.items():
    sys.modules[f"{__name__}.{_name}"] = _module
    _folder, _, _stem = f"{__name__}.{_name}".rpartition(".")
    setattr(sys.modules[_folder], _stem, _module)
