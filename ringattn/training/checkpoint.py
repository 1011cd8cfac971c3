"""Activation checkpointing that keeps results of attention and recurrences, so that their forward pass runs once and not twice.

Selective checkpointing (torch.utils.checkpoint) recomputes a block in the backward pass, except for operators that a policy saves. The
cost of recomputing attention grows with the square of the sequence. Its results, out and two fp32 statistics per head, grow with
the sequence alone, and are about as large as the block's input. Recurrences are no operators: `runtime/kept.py` keeps
theirs. Both, and the input, may stay in host memory (`offload.py`) until the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .. import check
from ..runtime.kept import KeptCalls
from ..runtime.op import FORWARD
from .offload import HostMemory, Parked


def checkpoint_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save attention's output and statistics, and recompute everything else: for `create_selective_checkpoint_contexts`, alone or
    within a policy of your own. Recurrences are no operators, and run again: `checkpoint_contexts` keeps their results, too."""
    return CheckpointPolicy.MUST_SAVE if op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_contexts() -> Any:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` that follows `checkpoint_policy`.

    It also keeps what `linear_attention` gives, and the rows before segments that `causal_conv1d` has received, so that the recomputation
    runs no recurrence and exchanges no states. All ranks of a group must use it alike: else a recurrence raises ValueError on all of them.

    >>> import torch, ringattn as ra
    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.randn(1, 16, 2, 8, requires_grad=True)
    >>> out = checkpoint(lambda x: ra.ring_attention(x, x, x), x, use_reentrant=False, context_fn=ra.checkpoint_contexts)
    >>> out.sum().backward()
    """
    forward, recomputation = create_selective_checkpoint_contexts(checkpoint_policy)
    if get_proxy_mode() is not None:
        # torch.compile traces a graph, which has no recurrences, and takes nothing but modes of dispatch
        return forward, recomputation
    recurrences = KeptCalls()
    return recurrences.storing(forward), recurrences.taking(recomputation)


def checkpoint_layers(layers: Iterable[nn.Module], offload: int = 0) -> None:
    """Let each layer keep only its inputs and the results of attention and recurrences, and recompute the rest in the backward pass.

    The first `offload` layers keep these in page-locked host memory, which is reused in every step. Copies run beside the device's own
    work, and back to the device one layer ahead of the backward pass.

    >>> import torch, ringattn as ra
    >>> class Layer(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x + ra.ring_attention(x, x, x)
    >>> layers = torch.nn.ModuleList(Layer() for _ in range(3))
    >>> ra.checkpoint_layers(layers, offload=2)
    >>> x = torch.randn(1, 16, 2, 8, requires_grad=True)
    >>> for layer in layers:
    ...     x = layer(x)
    >>> x.sum().backward()

    Args:
        layers: modules that run one after the other, such as `model.model.layers` of a transformers model. Names, parameters and
            hooks stay. Call it before or after DDP, FSDP2 or DeepSpeed wraps the model; a second call changes `offload`.
        offload: how many layers, counted from the first, use host memory; 0 for none. The backward pass needs the last layers first, so
            these should stay on the device. A layer's inputs are the tensors among its arguments, by position or by name, through which
            gradients flow; a tensor that layers share is copied once.

    All ranks of a group must checkpoint the same layers. Raises ValueError for anything that is not a layer, for layers that transformers
    checkpoints too, and if torch.compile compiles an offloaded layer. Raises RuntimeError if a layer's input, or the output of
    attention or a recurrence in it, is changed in place after it was kept.
    """
    if isinstance(layers, nn.Module) and not hasattr(layers, "__iter__"):
        raise ValueError(f"layers is a {type(layers).__name__}, one module: give a list of its layers, such as model.model.layers")
    layers = check.listed("layers", layers, "a list of modules, such as model.model.layers")
    for layer in layers:
        if not isinstance(layer, nn.Module):
            raise ValueError(f"layers holds a {type(layer).__name__}, but must hold modules")
    if len({id(layer) for layer in layers}) != len(layers):
        raise ValueError("layers holds a module twice: give each once")
    if check.integer("offload", offload) > len(layers):
        raise ValueError(f"offload is {offload}, but must be at most {len(layers)}, the number of layers")
    memory = HostMemory() if offload else None
    classes: dict[type, type] = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, _Checkpointed):
            # a new class, because a patched forward would be wrong in copies and wrappers
            made = classes.get(type(layer)) or type(type(layer).__name__, (_Checkpointed, type(layer)), {})
            classes[type(layer)] = layer.__class__ = made
        object.__setattr__(layer, "host_memory", memory)
        object.__setattr__(layer, "offloads", index < offload)


def runs_again_reentrantly() -> bool:
    """Whether a backward pass runs code again that torch.utils.checkpoint ran without gradients before (`use_reentrant=True`).

    The other kind of checkpointing is known by its hooks on saved tensors, by which `runtime/op.py` compares both runs.
    """
    autograd = torch._C._autograd
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and autograd._top_saved_tensors_default_hooks(True) is None


class _Checkpointed(nn.Module):
    """A mixin: the layer's own forward, checkpointed."""

    host_memory: HostMemory | None
    offloads: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if getattr(self, "gradient_checkpointing", False):
            raise ValueError(
                f"{type(self).__name__} is checkpointed by transformers too: call the model's gradient_checkpointing_disable(), or "
                "leave checkpoint_layers out"
            )
        count, names = len(args), tuple(kwargs)

        def run(*values: Any) -> Any:
            return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

        values = (*args, *kwargs.values())
        if self.host_memory is not None and not torch.compiler.is_compiling():
            self.host_memory.settle()
        if not self.offloads:
            return checkpoint(run, *values, use_reentrant=False, context_fn=checkpoint_contexts)
        if torch.compiler.is_compiling():
            raise ValueError("checkpoint_layers does not work under torch.compile if offload is above 0: use offload=0 there")
        assert self.host_memory is not None
        return _Offloaded(self.host_memory).checkpoint(run, values)


class _Offloaded:
    """One call of a layer: its inputs, and the results of each call of attention or of a recurrence in it, are kept in host memory."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self.before = memory.latest
        memory.latest = weakref.ref(self)
        self.inputs: list[Parked] = []
        self.results: list[list[Parked | torch.Tensor]] = []
        self.recurrences = KeptCalls(lambda x, place: memory.park(x, ("recurrence", *place)))

    def checkpoint(self, run: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        # these hooks see only the tensors among the values: checkpoint has hooks of its own for the tensors that `run` saves
        with saved_tensors_hooks(self._pack, _unpack):
            return checkpoint(run, *values, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[Any, Any]:
        return self.recurrences.storing(_Park(self)), self.recurrences.taking(_Fetch(self))

    def park_results(self, results: Iterable[torch.Tensor]) -> None:
        # the integers are on the host already
        call = len(self.results)
        self.results.append(
            [self._memory.park(x, ("result", call, i)) if x.is_floating_point() else x for i, x in enumerate(results)]
        )

    def _pack(self, x: torch.Tensor) -> Parked | torch.Tensor:
        # others keep these tensors anyway: leaves, masks and positions, and tensors that layers share
        if x.grad_fn is None or not self._memory.first_seen(x):
            return x
        self.inputs.append(self._memory.park(x, ("input", len(self.inputs))))
        return self.inputs[-1]


def _unpack(kept: Parked | torch.Tensor) -> torch.Tensor:
    return kept.take() if isinstance(kept, Parked) else kept


class _Park(TorchDispatchMode):
    """In the forward pass: copies attention's results to host memory."""

    def __init__(self, layer: _Offloaded) -> None:
        super().__init__()
        self._layer = layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is FORWARD:
            self._layer.park_results(result)
        return result


class _Fetch(TorchDispatchMode):
    """In the recomputation: fetches results from host memory, gives those of attention in the order of its calls, and then fetches the
    previous layer's inputs."""

    def __init__(self, layer: _Offloaded) -> None:
        super().__init__()
        self._layer = layer
        self._calls: list[list[Parked | torch.Tensor]] = []

    def __enter__(self) -> Any:
        self._calls = self._layer.results[::-1]
        recurrences = [call.tensors or () for call in self._layer.recurrences.calls]
        for x in (x for results in (*self._calls, *recurrences) for x in results if isinstance(x, Parked)):
            x.fetch()
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        before = self._layer.before()
        for x in [] if before is None else before.inputs:
            x.fetch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not FORWARD:
            return func(*args, **(kwargs or {}))
        return tuple(_unpack(x) for x in self._calls.pop())
