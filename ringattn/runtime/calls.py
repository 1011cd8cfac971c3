"""Calls: what a call of attention needs besides tensors. The operators of `op.py` know each by a number; without them it has none.

A call lives until its backward pass has run or, in a compiled graph, as long as the group.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from .. import check
from ..digest import constant, find
from ..geometry.layout import Layout
from ..geometry.mask import Mask, causal
from ..geometry.plan import Keys, check_q_offset_alone
from ..schedule.memory import RowBytes
from ..schedule.schedules import RowTraffic, Schedule
from ..scores import MOST_PLACES, Score, ScoreKind
from ..transport import Ranks
from .agree import Facts, agree, agree_backward, refusing
from .context import Context
from .groups import named_context
from .order import UNKNOWN, Label, traced_label
from .rank_attention import RankAttention


class Call(ABC):
    """What an operator needs besides tensors; `number` finds it while it is alive. It gets one when an operator is first given it.

    final: out gets q's dtype. alone: there are no other ranks.
    """

    final: bool
    alone: bool = True
    kind: ScoreKind | None = None  # of what is done to scores
    turn: AbstractContextManager[None] = nullcontext()  # what a pass enters

    def __init__(self, number: int | None = None) -> None:
        self._number = number
        if number is not None:
            _calls[number] = self

    @property
    def number(self) -> int:
        if self._number is None:
            self._number = next(_numbers)
            _calls[self._number] = self
        return self._number

    def score(
        self,
        softmax_scale: float,
        heads: int,
        slopes: torch.Tensor | None,
        values: torch.Tensor | None,
        sinks: torch.Tensor | None,
        seed: torch.Tensor | None,
    ) -> Score:
        """What is done to the scores of so many heads, with these tensors (see `ScoreKind.modifiers`)."""
        return Score(softmax_scale, None if self.kind is None else self.kind.modifiers(slopes, values, seed, heads), sinks)

    @abstractmethod
    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score, needs_grad: bool) -> tuple[int, int]:
        """Check the input, and agree with the other ranks: the length of the whole sequence, and the place in the group's order."""

    def identity(self, score: Score) -> int:
        """A number that is equal for calls that compute the same from the same tensors, within this process."""
        return 0

    @abstractmethod
    def rank_attention(self, seq_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> RankAttention:
        """What this rank does for a sequence of that length."""

    def begin_backward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score, place: int) -> None:  # noqa: B027 - a rank alone
        """Agree with the other ranks that this is the backward pass of the call at that place."""

    def check_backward(self, captured: bool, forward_captured: bool) -> None:  # noqa: B027 - a rank alone may capture either
        """Raise ValueError, on every rank, if only one of the passes is captured in a CUDA graph. For calls with other ranks."""

    def refuse(self, error: ValueError) -> NoReturn:
        """Raise an error, on every rank."""
        raise error


class LocalCall(Call):
    """Attention over tiles of one device, without communication."""

    final = False

    def __init__(self, rank_attention: RankAttention, kind: ScoreKind | None = None) -> None:
        super().__init__()
        self._rank_attention = rank_attention
        self.kind = kind

    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score, needs_grad: bool) -> tuple[int, int]:
        return q.shape[1], 0

    def rank_attention(self, seq_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> RankAttention:
        return self._rank_attention


class RingCall(Call):
    """A group's ranks, a mask, a layout and a schedule (None: the default); and what tells the call from others.

    keys: of K/V with a layout of their own; None if they have that of q.
    """

    final = True

    def __init__(
        self,
        context: Context,
        layout: Layout | None,
        mask: Mask,
        schedule: Schedule | None,
        label: Label = UNKNOWN,
        kind: ScoreKind | None = None,
        *,
        number: int | None = None,
        keys: Keys | None = None,
    ) -> None:
        super().__init__(number)
        self.context = context
        self.layout = layout
        self.mask = mask
        self.schedule = schedule
        self.kind = kind
        self._placed = kind is not None and kind.placed
        self.keys = keys
        self._named = (
            *(layout and layout.digest, mask.digest, schedule and schedule.digest, kind and kind.digest),
            keys and keys.digest,
        )
        self._label = label
        self._compiled = number is not None
        self.alone = context.ranks.size == 1
        # of the one call that this is, if it is not compiled: its facts, and what this rank does for a sequence of a length
        self.known: Facts | None = None
        self.known_attention: tuple[int, RankAttention] | None = None
        # the tokens of each rank and the place, if the ranks have agreed before
        self.agreed: tuple[tuple[int, ...], int] | None = None
        self.tokens: tuple[int, ...] = ()  # of each rank in the latest forward pass
        self._latest_default: Layout | None = None  # of its latest forward pass, if `layout` is None
        self.turn = context.turn

    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score, needs_grad: bool) -> tuple[int, int]:
        ranks = self.context.ranks
        with refusing(ranks):
            ranks.order.check()
            if self._compiled and check.in_forward_mode():
                raise ValueError(f"compiled attention is differentiated {check.TRANSFORMED}")
            facts = self._facts(q, k, v, score, needs_grad)
        self.known = None if self._compiled else facts
        tokens, place = (q.shape[1],), 0
        if ranks.size > 1:
            tokens, place = self.agreed or agree(ranks, facts, q.shape[1], self._label)
            ranks.connect(q.device)
        self.tokens, seq_len = tokens, sum(tokens)
        if self.layout is None:
            layout = self.context.default_layout(self.mask, seq_len)
            check_default_layout(layout, self.mask, tokens)
            self._latest_default = layout
        length = seq_len if self.keys is None or self.layout is None else self.keys.seq_len(self.layout)
        if self._placed and length > MOST_PLACES:
            raise ValueError(f"the sequence has {length} tokens, but scores that depend on positions take at most 2**31")
        return seq_len, place

    def identity(self, score: Score) -> int:
        return hash((*self._named, score.softmax_scale, None if score.modifiers is None else score.modifiers.seed_and_offset))

    def begin_backward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score, place: int) -> None:
        ranks = self.context.ranks
        if ranks.size > 1:
            with refusing(ranks):
                ranks.order.check()
                facts = self.known or self._facts(q, k, v, score, True)
            agree_backward(ranks, facts, place)

    def rank_attention(self, seq_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> RankAttention:
        if self.known_attention is not None and self.known_attention[0] == seq_len:
            return self.known_attention[1]
        layout = self.layout
        if layout is None:
            layout = self._latest_default
            if layout is None or layout.seq_len != seq_len:
                layout = self.context.default_layout(self.mask, seq_len)
        row_bytes = traffic = None
        hybrid = self.context.hybrid
        if self.keys is not None and self.schedule is None:
            h, hk = q.shape[2], k.shape[2]
            heads = (h, hk) if hybrid is None else (h // hybrid.heads.size, hybrid.kv_heads(h, hk))
            traffic = RowTraffic.of(*heads, q.shape[3], v.shape[3], q.element_size(), backward=True)
        if self.schedule is not None and self.schedule.by_memory:
            row_bytes = RowBytes.of(k, v, k.shape[2] if hybrid is None else hybrid.kv_heads(q.shape[2], k.shape[2]))
        found = self.context.rank_attention(layout, self.mask, self.schedule, row_bytes, self._placed, self.keys, traffic)
        if not self._compiled:
            self.known_attention = seq_len, found
        return found

    def check_backward(self, captured: bool, forward_captured: bool) -> None:
        if captured != forward_captured:
            one, other = ("backward", "forward") if captured else ("forward", "backward")
            self.refuse(
                ValueError(f"the {one} pass is captured in a CUDA graph, but the {other} pass was not: capture both, or neither")
            )

    def refuse(self, error: ValueError) -> NoReturn:
        with self.turn, refusing(self.context.ranks):
            raise error

    def _facts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score, needs_grad: bool) -> Facts:
        """What must be equal on all ranks; this rank's input is checked in the first of all calls alike."""
        softmax_scale, drawn = score.softmax_scale, None if score.modifiers is None else score.modifiers.seed_and_offset
        shapes, kinds = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
        key = *self._named, *shapes, *kinds, softmax_scale, needs_grad
        # a rank alone may capture what it likes
        captured = not self.alone and check.captured(q)
        if captured and not self.context.has_facts((*key, False)):
            raise ValueError(
                "this call is captured in a CUDA graph, and the first of its kind: make the same call once before, with its backward "
                "pass if it has one, which makes the kernels, the tables and the memory that ranks share"
            )
        facts = self.context.facts((*key, captured), lambda: self._checked(q, k, v, softmax_scale, needs_grad, captured))
        # every call has another seed: not a key of what is kept
        return facts if drawn is None else facts.with_fact("seed and offset of dropout", drawn)

    def _checked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, needs_grad: bool, captured: bool
    ) -> Facts:
        """Check this rank's input; return what must be equal on all ranks."""
        layout, mask = self.layout, self.mask
        ranks, hybrid = self.context.ranks, self.context.hybrid
        check.fit(q, k, v)
        if self.keys is None:
            check.same_tokens(q, k)
            if layout is not None:
                check_layout(layout, mask, ranks)
                _check_tokens(layout, ranks, q)
        else:
            check_keys(self.keys, layout, mask, ranks, (q.shape[1], k.shape[1]))
        softmax_scale = check.softmax_scale(softmax_scale, q.shape[3])
        if layout is None and ranks.rank == 0 and check.looks_swapped(q, k):
            self.context.warn_of_axes(q.shape[1], q.shape[2])
        if hybrid is not None:
            hybrid.check_heads(q.shape[2])
        ranks.check_device(q.device)
        facts: dict[str, object] = {
            "function": "ring_attention",
            "batch size": q.shape[0],
            "number of query heads": q.shape[2],
            "number of key/value heads": k.shape[2],
            "head_dim": q.shape[3],
            "v's head_dim": v.shape[3],
            "dtype": q.dtype,
            "device": q.device.type,
            "softmax_scale": softmax_scale,
            "schedule": str(self.schedule),
            "requires_grad": needs_grad,
            "captured in a CUDA graph": captured,
            "mask": mask,
            "layout": "the default" if layout is None else layout,
            "kv_layout": "that of q" if self.keys is None else self.keys.layout,
            "q_offset": 0 if self.keys is None else self.keys.q_offset,
            "ranks per node": ranks.ranks_per_node,
            "score": "none" if self.kind is None else self.kind,
        }
        return Facts(facts if hybrid is None else facts | hybrid.facts)


@constant
def compiled_call(
    group: tuple[str, ...],
    layout: str | None,
    mask: str | None,
    schedule: str | None,
    kind: str | None = None,
    name: str | None = None,
    kv_layout: str | None = None,
    q_offset: int = 0,
) -> int:
    """The number of the `RingCall` of a group's names, of digests (None: the defaults), and of a name. It is kept as long as the group.

    torch.compile calls this while it traces, and puts the number into the graph. The number follows from the arguments, so that equal
    calls give equal graphs, in compile caches too.
    """
    context = named_context(group)
    label = traced_label(name)
    keys = keys_of(find(layout), find(kv_layout), q_offset)
    text = repr((group, layout, mask, schedule, label, kind, keys and keys.digest)).encode()
    # above all numbers of other calls, and within int64
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2 | 1 << 62
    live = causal() if mask is None else find(mask)
    context.compiled[number] = RingCall(context, find(layout), live, find(schedule), label, find(kind), number=number, keys=keys)
    return number


def find_call(number: int | Call) -> Call:
    """The call with a number, or the call itself. Raises ValueError if it is gone."""
    if not isinstance(number, int):  # asking whether it is a Call would take longer, because that is an abstract class
        return number
    call = _calls.get(number)
    if call is None:
        raise ValueError(
            "attention was compiled for a process group that is gone: call torch.compiler.reset() after making a new one"
        )
    return call


_numbers = itertools.count()
_calls: WeakValueDictionary[int, Call] = WeakValueDictionary()


def keys_of(layout: Layout | None, kv_layout: Layout | None, q_offset: int) -> Keys | None:
    """The keys of a call with these arguments; None if they have the layout of q, and its positions. Raises ValueError for bad ones."""
    if kv_layout is None:
        check_q_offset_alone(q_offset)
        return None
    found = Keys(kv_layout, q_offset)
    if layout is None:
        raise ValueError(
            "kv_layout is given, but layout is None: pass the layout of q too, which has no default beside a kv_layout"
        )
    return None if layout == kv_layout and found.q_offset == 0 else found


def check_keys(keys: Keys, layout: Layout | None, mask: Mask, ranks: Ranks, shards: tuple[int, int] | None = None) -> None:
    """Raise ValueError if q's layout or that of the keys is not for these ranks, the mask, or this rank's shards.

    shards: how many tokens of q, and of k, this rank has.
    """
    assert layout is not None
    for name, x, argument, one in (("layout", layout, "q", "q"), ("kv_layout", keys.layout, "k", "k and v")):
        if x.world_size != ranks.size:
            raise ValueError(f"{name} {x!r} is for {x.world_size} ranks, but the group has {ranks.size}: build it for the group")
        tokens = None if shards is None else shards[argument == "k"]
        if tokens is not None and x.lengths[ranks.rank] != tokens:
            raise ValueError(
                f"{argument} has {tokens} tokens, but rank {ranks.rank} of {name} {x!r} holds {x.lengths[ranks.rank]}: "
                f"shard {one} with shard(x, {name}, rank), or build the layout for this sequence length"
            )
    keys.check(layout, mask)


def check_layout(layout: Layout, mask: Mask, ranks: Ranks) -> None:
    """Raise ValueError if a layout is not for these ranks, or a mask not for its sequence."""
    if layout.world_size != ranks.size:
        alone = ranks.size == 1 and not (dist.is_available() and dist.is_initialized())
        hint = "; no process group is initialised: start the program with torchrun, and call init_process_group" if alone else ""
        raise ValueError(
            f"layout {layout!r} is for {layout.world_size} ranks, but the group has {ranks.size}: build it for the group" + hint
        )
    mask.check_length(layout.seq_len)


def _check_tokens(layout: Layout, ranks: Ranks, q: torch.Tensor) -> None:
    tokens, held = q.shape[1], layout.lengths[ranks.rank]
    if held != tokens:
        hint = f"; {check.SWAPPED}" if q.shape[2] == held else ""
        raise ValueError(
            f"q has {tokens} tokens, but rank {ranks.rank} of layout {layout!r} holds {held}: "
            f"shard q, k and v with shard(x, layout, rank), or build the layout for this sequence length" + hint
        )


def check_default_layout(layout: Layout, mask: Mask, tokens: tuple[int, ...]) -> None:
    if layout.lengths != tokens:
        odd = next(rank for rank, (held, got) in enumerate(zip(layout.lengths, tokens, strict=True)) if held != got)
        raise ValueError(
            f"q has {tokens[odd]} tokens on rank {odd}, but the default layout of {mask!r}, {layout!r}, "
            f"holds {layout.lengths[odd]} there: pass the layout that the shards were made with"
        )
