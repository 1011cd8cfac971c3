"""Activation checkpointing that keeps what attention computed, so that the forward pass of attention runs once and not twice.

Selective checkpointing (torch.utils.checkpoint) recomputes a block in the backward pass but for the operators that a policy saves.
Attention is the part whose recomputation grows with the square of the sequence; what there is to save, out and two fp32 statistics
a head, grows with the sequence, and is about as large as the block's input.
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .op import FORWARD


def checkpoint_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save attention's output and statistics, recompute all else: for `create_selective_checkpoint_contexts`, alone or within
    a policy of your own."""
    return CheckpointPolicy.MUST_SAVE if op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_contexts() -> Any:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` that follows `checkpoint_policy`.

    >>> import torch, ringattn as ra
    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.randn(1, 16, 2, 8, requires_grad=True)
    >>> out = checkpoint(lambda x: ra.ring_attention(x, x, x), x, use_reentrant=False, context_fn=ra.checkpoint_contexts)
    >>> out.sum().backward()
    """
    return create_selective_checkpoint_contexts(checkpoint_policy)
