"""What checkpointed code keeps of its calls of recurrences, so that its recomputation neither computes nor exchanges it again.

A policy of selective checkpointing saves operators, such as attention. A recurrence is none: it has an autograd function of its own, whose
backward pass needs more than its results. So each call of checkpointed code, a block, keeps these itself, in the order of the recurrences
in it. Every recomputation of the block takes them from the first on. They stay for further backward passes, and go with the block's graph.

Blocks may be nested, as modes of dispatch are: a recurrence looks from the innermost block outwards for results to take, and the blocks
inside that one keep them. Ranks that checkpoint alike take alike; `recurrent/calls.py` compares this in every call, as a rank that
takes results sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

CHANGED_IN_PLACE = (
    "a checkpointed layer's input, or the output of ring_attention or linear_attention in it, was changed in place, and the backward pass "
    "needs it unchanged: write x = x * y instead of x *= y"
)


class KeptTensor(Protocol):
    """A tensor that can be taken again and again, each time as a new object."""

    def take(self) -> torch.Tensor: ...


class HeldTensor:
    """A tensor that stays where it is."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x.detach()
        self._version = self._x._version

    def take(self) -> torch.Tensor:
        if self._x._version != self._version:
            raise RuntimeError(CHANGED_IN_PLACE)
        return self._x.detach()


@dataclass(eq=False)
class KeptCall:
    """What one call keeps; nothing until it has ended. `of` says which call it was, `rest` is what is no tensor."""

    of: tuple = ()
    tensors: Sequence[KeptTensor | None] | None = None
    rest: Any = None


class KeptCalls:
    """The calls of one block, in order. keep: makes a `KeptTensor` of a tensor and its place, the number of the call and its own."""

    def __init__(self, keep: Callable[[torch.Tensor, tuple[int, int]], KeptTensor] = lambda x, place: HeldTensor(x)) -> None:
        self.keep = keep
        self.calls: list[KeptCall] = []

    def storing(self, mode: AbstractContextManager) -> AbstractContextManager:
        """A context, around `mode`, in which calls keep their results."""
        return _Phase(self, mode, takes=False)

    def taking(self, mode: AbstractContextManager) -> AbstractContextManager:
        """A context, around `mode`, in which calls take these results. It may be entered again."""
        return _Phase(self, mode, takes=True)


@dataclass(eq=False)
class CheckpointedCall:
    """A call of a recurrence, as the blocks around it see it. It holds no tensors once they are kept or taken."""

    _taken: KeptCall | None = None
    _storing: list[tuple[KeptCalls, int]] = field(default_factory=list)

    @property
    def takes(self) -> bool:
        """Whether a block has the call's results."""
        return self._taken is not None

    def check(self, of: tuple) -> None:
        """Raise ValueError if the results to take are another call's."""
        if self._taken is not None and self._taken.of != of:
            raise ValueError(
                "a checkpointed module called linear_attention or causal_conv1d in the backward pass with another layout, mask, shape "
                "or option than in its forward pass: call backward before you change them"
            )

    def keep(self, of: tuple, tensors: Sequence[torch.Tensor | None], rest: Any = None) -> None:
        """Let the blocks keep the call's results: tensors, and what is no tensor."""
        storing, self._storing = self._storing, []
        for block, number in storing:
            kept = [None if x is None else block.keep(x, (number, place)) for place, x in enumerate(tensors)]
            block.calls[number] = KeptCall(of, kept, rest)

    def take(self) -> tuple[list[torch.Tensor | None], Any]:
        """The tensors, and the rest, which inner blocks keep in turn. Raises RuntimeError if a tensor has been changed in place."""
        taken, self._taken = self._taken, None
        assert taken is not None
        assert taken.tensors is not None
        tensors = [None if x is None else x.take() for x in taken.tensors]
        self.keep(taken.of, tensors, taken.rest)
        return tensors, taken.rest


def next_call() -> CheckpointedCall:
    """The call that begins now, in this thread's blocks."""
    storing: list[tuple[KeptCalls, int]] = []
    for active in reversed(_active.get()):
        if active.calls is None:
            active.block.calls.append(KeptCall())
            storing.append((active.block, len(active.block.calls) - 1))
            continue
        taken = next(active.calls, None)
        if taken is not None and taken.tensors is not None:
            return CheckpointedCall(taken, storing)
    return CheckpointedCall(None, storing)


class _Active(NamedTuple):
    """A block in one of its phases: `calls` are those still to be taken, None while it keeps them."""

    block: KeptCalls
    calls: Iterator[KeptCall] | None


_active: ContextVar[tuple[_Active, ...]] = ContextVar("ringattn_checkpoints", default=())


class _Phase(AbstractContextManager):
    def __init__(self, block: KeptCalls, mode: AbstractContextManager, takes: bool) -> None:
        self._block, self._mode, self._takes = block, mode, takes

    def __enter__(self) -> None:
        self._mode.__enter__()
        _active.set((*_active.get(), _Active(self._block, iter(self._block.calls) if self._takes else None)))

    def __exit__(self, *error: Any) -> bool | None:
        _active.set(_active.get()[:-1])
        return self._mode.__exit__(*error)
