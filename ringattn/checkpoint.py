"""Activation checkpointing that keeps what attention computed, so that the forward pass of attention runs once and not twice.

Selective checkpointing (torch.utils.checkpoint) recomputes a block in the backward pass but for the operators that a policy saves.
Attention is the part whose recomputation grows with the square of the sequence; what there is to save, out and two fp32 statistics
a head, grows with the sequence, and is about as large as the block's input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
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


def checkpoint_offload_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """`checkpoint_contexts` that keeps attention's output and statistics in host memory: pinned, copied beside the device's own work.

    A block's copy back begins with the block's recomputation. For eager mode: raises ValueError under torch.compile. The backward pass
    raises RuntimeError where a block changes attention's output in place.

    >>> import torch, ringattn as ra
    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.randn(1, 16, 2, 8, requires_grad=True)
    >>> contexts = ra.checkpoint_offload_contexts
    >>> out = checkpoint(lambda x: ra.ring_attention(x, x, x), x, use_reentrant=False, context_fn=contexts)
    >>> out.sum().backward()
    """
    if torch.compiler.is_compiling():
        raise ValueError("checkpoint_offload_contexts does not work under torch.compile: use checkpoint_contexts there")
    parked: list[list[_Parked]] = []
    return _Park(parked), _Fetch(parked)


class _Parked:
    """A tensor's copy in host memory."""

    def __init__(self, x: torch.Tensor) -> None:
        self._device = x.device
        self._modules = torch.get_device_module(x.device)
        self._side = torch.cuda.Stream(x.device) if x.is_cuda else torch.cpu.Stream()
        self._host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        self._copy(self._host, x)

    def fetch(self) -> torch.Tensor:
        """The tensor on its device again, once `wait` has been called."""
        # allocated for the current stream: memory of a side stream would stay with it
        x = torch.empty_like(self._host, device=self._device)
        self._copy(x, self._host)
        return x

    def wait(self) -> None:
        """Let the current stream wait for the copies."""
        self._modules.current_stream(self._device).wait_stream(self._side)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._side.wait_stream(self._modules.current_stream(self._device))
        with self._modules.stream(self._side):
            target.copy_(source, non_blocking=True)
        for x in (target, source):
            if x.is_cuda:
                x.record_stream(self._side)  # pyright: ignore[reportArgumentType]


class _Park(TorchDispatchMode):
    """Forward: attention's results go to host memory as well."""

    def __init__(self, parked: list[list[_Parked]]) -> None:
        super().__init__()
        self._parked = parked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is FORWARD:
            self._parked.append([_Parked(x) for x in result])
        return result


class _Fetch(TorchDispatchMode):
    """Recomputation: attention's results come from host memory, in the order of its calls."""

    def __init__(self, parked: list[list[_Parked]]) -> None:
        super().__init__()
        self._parked = parked
        self._calls: list[tuple[list[_Parked], list[torch.Tensor]]] = []
        self._given: list[tuple[torch.Tensor, int]] = []

    def __enter__(self) -> Any:
        self._calls = [(results, [x.fetch() for x in results]) for results in reversed(self._parked)]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        given, self._calls, self._given = self._given, [], []
        super().__exit__(*error)
        # the backward pass reads them, and torch does not look at what checkpointing keeps
        if any(x._version != version for x, version in given):
            raise RuntimeError(
                "a checkpointed block changes the output of ring_attention in place, which its backward pass needs: write "
                "out = out * x in place of out *= x"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not FORWARD:
            return func(*args, **(kwargs or {}))
        results, fetched = self._calls.pop()
        for x in results:
            x.wait()
        self._given += [(x, x._version) for x in fetched]
        return tuple(fetched)
