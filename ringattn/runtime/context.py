"""`Context`: what is kept for one group of ranks: its transport, its plans, and what its calls were checked for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from threading import Lock
from typing import Any, TypeVar

from ringattn_kernels.repeats import Repeats, Replays

from ..check import SWAPPED
from ..geometry.layout import Layout, default_layout
from ..geometry.mask import Mask
from ..geometry.plan import Keys, make_cross_plan, make_placed_plan
from ..schedule.memory import RowBytes, backward_bytes
from ..schedule.program import compile_program
from ..schedule.schedules import RowTraffic, Schedule, cross_schedule, default_schedule
from ..transport import Ranks, Transport
from .agree import Facts
from .order import CallOrder
from .rank_attention import RankAttention
from .ulysses import HeadExchange, Hybrid, ring_layout

_log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

_KEPT = 64
_PREPARED = 16
_KEPT_BYTES = 256 << 20  # of tables of what ranks do, on the host and on the device
_NEWEST = 8  # that are kept whatever their size

# layout, mask, schedule, bytes of rows for schedules by memory, whether scores depend on positions, and keys of their own layout with
# the bytes that choose what moves
_AttentionKey = tuple[str, str, str | None, RowBytes | None, bool, str | None, RowTraffic | None]


class Context:
    """A group's ranks, the transport of their ring, and the latest of what was found and made for them."""

    def __init__(self, ranks: Transport | Hybrid) -> None:
        self.ranks: Ranks = ranks
        self.hybrid = ranks if isinstance(ranks, Hybrid) else None
        self.transport = ranks.ring if isinstance(ranks, Hybrid) else ranks
        # kept by the ranks: who refuses input may know them alone
        ranks.order = ranks.order or CallOrder()
        self.turn = ranks.order if ranks.size > 1 else nullcontext()  # what each pass of a call enters
        self._facts: OrderedDict[tuple, Facts] = OrderedDict()
        self._attentions: OrderedDict[_AttentionKey, RankAttention] = OrderedDict()
        # the latest of both with their keys: calls of many layers are alike, and comparing keys costs less than hashing them
        self._latest_facts: tuple[tuple, Facts] | None = None
        self.latest_attention: tuple[_AttentionKey, RankAttention] | None = None
        self._sizes: dict[RankAttention, int] = {}
        self._lock = Lock()
        # what is made ahead of a first call; in it the default schedule may depend on what the group's first call finds
        self._prepared: OrderedDict[tuple[_AttentionKey, bool], RankAttention] = OrderedDict()
        self._layouts: OrderedDict[tuple[str, int], Layout] = OrderedDict()
        self.repeats = Repeats()
        self.ready: dict[tuple, Any] = {}  # of `ready.py`: calls whose passes are recorded, by all that they depend on
        self.latest_ready: list[Any] = []  # what the latest of them were given
        self._warned_of_axes = False
        self.compiled: dict[int, object] = {}  # the calls of compiled graphs, which `calls.py` finds by number

    def warn_of_axes(self, tokens: int, heads: int) -> None:
        """Once: such sizes are no error, and only a layout would tell which of the two is tokens."""
        if not self._warned_of_axes:
            self._warned_of_axes = True
            _log.warning("q and k have %d tokens and %d heads; %s; if these are right, pass layout=", tokens, heads, SWAPPED)

    def facts(self, key: tuple, check: Callable[[], Facts]) -> Facts:
        """The facts of calls with this key, checked once. The key holds everything that the facts and their checks depend on."""
        latest = self._latest_facts
        if latest is None or latest[0] != key:
            latest = self._latest_facts = key, _kept(self._facts, key, check)
        return latest[1]

    def has_facts(self, key: tuple) -> bool:
        """Whether a call with this key has been checked before."""
        return key in self._facts

    def rank_attention(
        self,
        layout: Layout,
        mask: Mask,
        schedule: Schedule | None,
        row_bytes: RowBytes | None = None,
        placed: bool = False,
        keys: Keys | None = None,
        traffic: RowTraffic | None = None,
    ) -> RankAttention:
        """What this rank does for a layout, a mask and a schedule (None: chosen by the plan), made once.

        `row_bytes` is for schedules by memory alone; `placed` says whether scores depend on positions. `keys` have a layout of their own;
        `traffic` then chooses what moves. Raises ValueError if the schedule does not fit the group or its memory.
        """
        key = _key(layout, mask, schedule, row_bytes, placed, keys, traffic)
        latest = self.latest_attention
        if latest is not None and latest[0] == key:
            return latest[1]
        found = self._attentions.pop(key, None)
        if found is None:
            self._make_room()
            found = self._prepared.pop((key, self.transport.copy_engines), None)
            if found is None:
                found = self._make_rank_attention(layout, mask, schedule, row_bytes, placed, keys, traffic)
        self._attentions[key] = found
        self.latest_attention = key, found
        return found

    def use(self, attention: RankAttention) -> None:
        """This is what the latest call does: let others go first."""
        for key, kept in self._attentions.copy().items():
            if kept is attention:
                self._attentions.move_to_end(key)
                self.latest_attention = key, kept

    def prepare(
        self,
        layout: Layout,
        mask: Mask,
        schedule: Schedule | None,
        row_bytes: RowBytes | None = None,
        placed: bool = False,
        keys: Keys | None = None,
        traffic: RowTraffic | None = None,
    ) -> RankAttention:
        """As `rank_attention`, for a call to come, from any thread."""
        options = layout, mask, schedule, row_bytes, placed, keys, traffic
        key = _key(*options)
        found = self._attentions.get(key)
        if found is not None:
            return found
        early = key, self.transport.copy_engines
        found = _kept(self._prepared, early, lambda: self._make_rank_attention(*options), _PREPARED)
        self._drop_prepared()
        self._make_room()  # so that the call need not
        return found

    def _drop_prepared(self) -> None:
        """Bound the bytes of what no call has used yet."""
        with self._lock:
            # calls may take some of them meanwhile
            kept = list(self._prepared.copy().items())
            if len(kept) <= _NEWEST:
                return
            total = sum(one.nbytes for _, one in kept)
            for key, one in kept[:-_NEWEST]:
                if total > _KEPT_BYTES:
                    self._prepared.pop(key, None)
                    total -= one.nbytes

    def _make_room(self) -> None:
        """Drop the least recently used until one more may come."""
        kept, sizes = self._attentions, self._sizes
        with self._lock:
            # calls add tables to what they use: the newest may not have theirs yet
            for one in list(kept.values())[: -_NEWEST + 1]:
                if one not in sizes:
                    sizes[one] = one.nbytes
            total = sum(sizes.values())
            while len(kept) >= _KEPT or (total > _KEPT_BYTES and len(kept) >= _NEWEST):
                _, dropped = kept.popitem(last=False)
                total -= sizes.pop(dropped, 0)
                # recordings keep tables; a call may add one meanwhile
                self.ready = {name: x for name, x in self.ready.copy().items() if x.attention is not dropped}
                self.latest_ready = [x for x in self.latest_ready if x.ready.attention is not dropped]

    def default_layout(self, mask: Mask, seq_len: int) -> Layout:
        """`layout.default_layout` for this group, made once."""
        return _kept(self._layouts, (mask.digest, seq_len), lambda: default_layout(mask, seq_len, self.ranks.size))

    def _make_rank_attention(
        self,
        layout: Layout,
        mask: Mask,
        schedule: Schedule | None,
        row_bytes: RowBytes | None,
        placed: bool,
        keys: Keys | None = None,
        traffic: RowTraffic | None = None,
    ) -> RankAttention:
        exchange = k_exchange = None
        if self.hybrid is not None and self.hybrid.heads.size > 1:
            u = self.hybrid.heads.size
            exchange = k_exchange = HeadExchange(self.hybrid.heads, self.hybrid.rows(layout))
            layout = ring_layout(layout, u)
            if keys is not None:
                k_exchange = HeadExchange(self.hybrid.heads, self.hybrid.rows(keys.layout))
                keys = Keys(ring_layout(keys.layout, u), keys.q_offset)
        plan = make_placed_plan(layout, mask, placed) if keys is None else make_cross_plan(layout, mask, keys, placed)
        ranks_per_node, copy_engines = self.transport.ranks_per_node, self.transport.copy_engines
        if schedule is not None:
            chosen = schedule
        elif traffic is None:
            chosen = default_schedule(plan, ranks_per_node, copy_engines)
        else:
            chosen = cross_schedule(plan, traffic, ranks_per_node, copy_engines)
        chosen = chosen.resolve(
            plan, ranks_per_node, None if row_bytes is None else lambda candidate: backward_bytes(candidate, plan, row_bytes)
        )
        order = plan.order[self.transport.rank]
        order = k_order = order if exchange is None else exchange.own_order(order)
        if keys is not None:
            k_order = plan.k_order[self.transport.rank]
            k_order = k_order if k_exchange is None else k_exchange.own_order(k_order)
        program = compile_program(chosen, plan, self.transport.rank)
        # what is recorded on a GPU takes q, k and v of one layout
        replayed = exchange is None and order is None and keys is None and not program.queries_move
        replays = Replays(self.repeats) if replayed else None
        return RankAttention(self.transport, program, order, k_order, exchange, k_exchange, replays, plan.nbytes)


def _key(
    layout: Layout,
    mask: Mask,
    schedule: Schedule | None,
    row_bytes: RowBytes | None,
    placed: bool,
    keys: Keys | None = None,
    traffic: RowTraffic | None = None,
) -> _AttentionKey:
    options = None if schedule is None else schedule.digest, row_bytes, placed
    return layout.digest, mask.digest, *options, None if keys is None else keys.digest, traffic


def _kept(cache: OrderedDict[K, V], key: K, make: Callable[[], V], most: int = _KEPT) -> V:
    """The cache's value for a key, made if missing. A full cache drops its least recently used value."""
    # threads may share a cache (such as that of no group), so each line leaves it valid
    value = cache.pop(key, None)
    if value is None:
        value = make()
    cache[key] = value
    if len(cache) > most:
        cache.popitem(last=False)
    return value
