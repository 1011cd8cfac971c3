"""One runtime object a group: its transport and its cached plans. The only place with state; freed with the group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .layout import Layout, default_layout
from .mask import Mask
from .plan import Plan, make_plan
from .schedule import Schedule, Step, default_schedule, make_steps
from .transport import Alone, ProcessGroupTransport, Transport

Group = dist.ProcessGroup | DeviceMesh | Transport

K = TypeVar("K")
V = TypeVar("V")

_PLANS_KEPT = 64


@dataclass(frozen=True)
class Route:
    """What a rank does for one layout, mask and schedule."""

    plan: Plan
    schedule: Schedule
    steps: tuple[Step, ...]


class Context:
    """A group's transport, and the plans made for it, newest kept."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._routes: OrderedDict[tuple[str, str, Schedule | None], Route] = OrderedDict()
        self._layouts: OrderedDict[tuple[str, int], Layout] = OrderedDict()

    def route(self, layout: Layout, mask: Mask, schedule: Schedule | None) -> Route:
        """The plan and this rank's steps, made once. A schedule of None chooses one by the plan."""
        return _kept(self._routes, (layout.digest, mask.digest, schedule), lambda: self._make_route(layout, mask, schedule))

    def default_layout(self, mask: Mask, seq_len: int) -> Layout:
        """`layout.default_layout` for this group, made once."""
        return _kept(self._layouts, (mask.digest, seq_len), lambda: default_layout(mask, seq_len, self.transport.size))

    def _make_route(self, layout: Layout, mask: Mask, schedule: Schedule | None) -> Route:
        plan = make_plan(layout, mask)
        chosen = default_schedule(plan) if schedule is None else schedule
        return Route(plan, chosen, make_steps(chosen, plan, self.transport.rank))


def _kept(cache: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    """The cache's value for a key, made if need be; the least recently used goes when the cache is full."""
    if key not in cache:
        cache[key] = make()
    cache.move_to_end(key)
    if len(cache) > _PLANS_KEPT:
        cache.popitem(last=False)
    return cache[key]


_contexts: WeakKeyDictionary[dist.ProcessGroup | Transport, Context] = WeakKeyDictionary()
_alone = Context(Alone())


def get_context(group: Group | None) -> Context:
    """The context of a process group, a 1-D device mesh, a transport, or (None) of the default group, if there is one.

    Raises ValueError for anything else, and for a group that this rank is not in.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return _alone
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a {group.ndim}-D DeviceMesh, but must be 1-D: pass one axis of it, such as mesh['ring']")
        if group.get_coordinate() is None:
            raise ValueError("group is a DeviceMesh that does not hold this rank")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group does not hold this rank: rank {dist.get_rank()} of the job must not call with it")
    if not isinstance(group, (dist.ProcessGroup, Transport)):
        raise ValueError(f"group is a {type(group).__name__}, but must be a ProcessGroup, a 1-D DeviceMesh or None")
    if group not in _contexts:
        _contexts[group] = Context(group if isinstance(group, Transport) else _transport(group))
    return _contexts[group]


def _transport(group: dist.ProcessGroup) -> Transport:
    if dist.get_rank(group) < 0:
        raise ValueError(f"group does not hold this rank: rank {dist.get_rank()} of the job must not call with it")
    return ProcessGroupTransport(group) if dist.get_world_size(group) > 1 else Alone()
