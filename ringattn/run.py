"""Runs: what attention needs besides tensors, each known to the operators of `op.py` by a number.

A run lives for a call and its backward pass, or, in a compiled graph, as long as the group.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from weakref import WeakValueDictionary

import torch

from . import check
from .agree import agree, refuse
from .context import Context, Route, named_context
from .digest import constant, find
from .layout import Layout
from .mask import Mask, causal
from .schedule import RowBytes, Schedule
from .transport import Ranks
from .work import Work


class Run(ABC):
    """What an operator needs besides tensors; `number` finds it while it is alive. `final`: out is to be in q's dtype."""

    final: bool

    def __init__(self, number: int | None = None) -> None:
        self.number = next(_numbers) if number is None else number
        _runs[self.number] = self

    @abstractmethod
    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, needs_grad: bool) -> int:
        """Check the input, agree with the other ranks, and return the length of the whole sequence."""

    @abstractmethod
    def work(self, seq_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Work:
        """What this rank does for a sequence of that length."""


class LocalRun(Run):
    """Tiles of one device, without communication."""

    final = False

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, needs_grad: bool) -> int:
        return q.shape[1]

    def work(self, seq_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Work:
        return self._work


class RingRun(Run):
    """A group's ranks, a mask, and a layout and a schedule or None for the defaults."""

    final = True

    def __init__(
        self,
        context: Context,
        layout: Layout | None,
        mask: Mask,
        schedule: Schedule | None,
        *,
        number: int | None = None,
    ) -> None:
        super().__init__(number)
        self.context = context
        self.layout = layout
        self.mask = mask
        self.schedule = schedule

    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, needs_grad: bool) -> int:
        ranks, hybrid = self.context.ranks, self.context.hybrid
        try:
            check.fit(q, k, v)
            check.same_tokens(q, k)
            if self.layout is not None:
                _check_layout(self.layout, self.mask, ranks, q.shape[1])
            softmax_scale = check.softmax_scale(softmax_scale, q.shape[3])
            if hybrid is not None:
                hybrid.check_heads(q.shape[2])
            ranks.check_device(q.device)
        except ValueError as error:
            if ranks.size > 1:
                refuse(ranks, error)
            raise
        tokens = (q.shape[1],)
        if ranks.size > 1:
            facts = self._facts(q, k, v, softmax_scale, needs_grad) | {"ranks per node": ranks.ranks_per_node}
            if hybrid is not None:
                facts |= hybrid.facts
            tokens = agree(ranks, facts, q.shape[1])
            ranks.connect(q.device)
        if self.layout is None:
            _check_default_layout(self.context.default_layout(self.mask, sum(tokens)), self.mask, tokens)
        return sum(tokens)

    def route(self, seq_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Route:
        """The plan of a sequence of that length, and this rank's steps."""
        layout = self.context.default_layout(self.mask, seq_len) if self.layout is None else self.layout
        hybrid = self.context.hybrid
        kv_heads = k.shape[2] if hybrid is None else hybrid.kv_heads(q.shape[2], k.shape[2])
        return self.context.route(layout, self.mask, self.schedule, RowBytes.of(k, v, kv_heads))

    def work(self, seq_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Work:
        route = self.route(seq_len, q, k, v)
        return Work(self.context.transport, route.steps, route.order, route.order, route.exchange)

    def _facts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, needs_grad: bool
    ) -> dict[str, object]:
        """What must be equal on all ranks, under the names a user knows."""
        layout, mask = self.layout, self.mask
        return {
            "function": "ring_attention",
            "batch size": q.shape[0],
            "number of query heads": q.shape[2],
            "number of key/value heads": k.shape[2],
            "head_dim": q.shape[3],
            "v's head_dim": v.shape[3],
            "dtype": q.dtype,
            "device": q.device.type,
            "softmax_scale": softmax_scale,
            "schedule": self.schedule,
            "requires_grad": needs_grad,
            "mask": f"{mask!r} ({mask.digest[:8]})",
            "layout": "the default" if layout is None else f"{layout!r} ({layout.digest[:8]})",
        }


@constant
def compiled_run(group: tuple[str, ...], layout: str | None, mask: str | None, schedule: str | None) -> int:
    """The number of a `RingRun` given by a group's names and digests (None: the defaults), kept as long as the group.

    torch.compile calls it while it traces and puts the number into the graph. It follows from the arguments, so that graphs of
    equal calls are equal, in caches too.
    """
    context = named_context(group)
    text = repr((group, layout, mask, schedule)).encode()
    # above all numbers of other runs, below the greatest int64
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2 | 1 << 62
    live = causal() if mask is None else find(mask)
    context.compiled[number] = RingRun(context, find(layout), live, find(schedule), number=number)
    return number


def find_run(number: int) -> Run:
    """The run with a number. Raises ValueError if it is gone."""
    run = _runs.get(number)
    if run is None:
        raise ValueError(
            "attention was compiled for a process group that is gone: call torch.compiler.reset() after making a new one"
        )
    return run


_numbers = itertools.count()
_runs: WeakValueDictionary[int, Run] = WeakValueDictionary()


def _check_layout(layout: Layout, mask: Mask, ranks: Ranks, tokens: int) -> None:
    if layout.world_size != ranks.size:
        raise ValueError(
            f"layout {layout!r} is for {layout.world_size} ranks, but the group has {ranks.size}: build it for the group"
        )
    held = layout.lengths[ranks.rank]
    if held != tokens:
        raise ValueError(
            f"q has {tokens} tokens, but rank {ranks.rank} of layout {layout!r} holds {held}: "
            "shard q, k and v with shard(x, layout, rank), or build the layout for this sequence length"
        )
    mask.check_length(layout.seq_len)


def _check_default_layout(layout: Layout, mask: Mask, tokens: tuple[int, ...]) -> None:
    if layout.lengths != tokens:
        odd = next(rank for rank, (held, got) in enumerate(zip(layout.lengths, tokens, strict=True)) if held != got)
        raise ValueError(
            f"q has {tokens[odd]} tokens on rank {odd}, but the default layout of {mask!r}, {layout!r}, "
            f"holds {layout.lengths[odd]} there: pass the layout that the shards were made with"
        )
