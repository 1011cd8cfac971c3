"""ringattn: exact attention over sequences too long for one GPU.

>>> import torch, ringattn as ra
>>> q = k = v = torch.randn(1, 16, 2, 8)
>>> ra.ring_attention(q, k, v, mask=ra.causal()).shape
torch.Size([1, 16, 2, 8])
"""

from . import reference
from ._version import __version__
from .attention import attend, ring_attention
from .checkpoint import checkpoint_contexts, checkpoint_layers, checkpoint_policy
from .collective import unshard
from .context import hybrid, process_group, symmetric
from .integrations.replace import replace_attention
from .integrations.verify import Report, verify
from .layout import Layout, balanced, contiguous, default_layout, shard, striped, zigzag
from .mask import (
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
from .partial import Partial, Stats, finish, merge
from .plan import Plan, make_plan
from .schedule import Schedule, default_schedule, double_ring, gather, ring, waves
from .span import Span

__all__ = [
    "Layout",
    "Mask",
    "Partial",
    "Plan",
    "Report",
    "Schedule",
    "Span",
    "Stats",
    "__version__",
    "attend",
    "balanced",
    "bigbird",
    "block_sparse",
    "causal",
    "checkpoint_contexts",
    "checkpoint_layers",
    "checkpoint_policy",
    "contiguous",
    "default_layout",
    "default_schedule",
    "dilated_window",
    "documents",
    "double_ring",
    "finish",
    "full",
    "gather",
    "global_tokens",
    "hybrid",
    "make_plan",
    "merge",
    "prefix",
    "process_group",
    "reference",
    "replace_attention",
    "ring",
    "ring_attention",
    "shard",
    "sliding_window",
    "striped",
    "symmetric",
    "unshard",
    "verify",
    "waves",
    "zigzag",
]
