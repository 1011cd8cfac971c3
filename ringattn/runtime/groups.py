"""Groups: what users may pass as `group=`, and the one `Context` of each.

A context is kept with its process group or transport, and is freed with it.
"""

from __future__ import annotations

import hashlib
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..digest import constant
from ..transport import (
    DEFAULT_BUDGET,
    Alone,
    AutomaticTransport,
    HostChannel,
    ProcessGroupTransport,
    Ranks,
    SymmetricTransport,
    Transport,
    closed_by,
    timeout_of,
)
from .context import Context
from .ulysses import Hybrid

Group = dist.ProcessGroup | DeviceMesh | Transport | Hybrid

_contexts: WeakKeyDictionary[dist.ProcessGroup, Context] = WeakKeyDictionary()
_hybrids: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[dist.ProcessGroup, Hybrid]] = WeakKeyDictionary()
_channels: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], HostChannel]] = WeakKeyDictionary()
_alone = Context(Alone())
_making = RLock()  # of contexts: threads may ask for one at once


def get_context(group: Group | None) -> Context:
    """The context of a process group, a device mesh, a transport or a hybrid; None is the default group, or one rank without one.

    Raises ValueError for anything else, and for a group without this rank.
    """
    if group is None:
        # of most calls
        world = dist.group.WORLD if dist.is_available() else None
        found = _alone if world is None else _contexts.get(world)
        if found is not None:
            return found
    if isinstance(group, (Transport, Hybrid)):
        ranks = group
    else:
        ranks = _ranks(group)
        if isinstance(ranks, dist.ProcessGroup):
            if ranks not in _contexts:
                with _making:
                    if ranks not in _contexts:
                        _contexts[ranks] = Context(_transport(ranks))
            return _contexts[ranks]
    # kept with the ranks themselves: a context holds its ranks, and a weak dictionary never frees a key that its value holds
    if ranks.context is None:
        with _making:
            ranks.context = ranks.context or Context(ranks)
    return ranks.context


def symmetric(group: dist.ProcessGroup | DeviceMesh | None = None, *, budget: int = DEFAULT_BUDGET) -> Transport:
    """A transport for GPUs of one host: copy engines pull tensors through memory that all ranks map, beside kernels that fill the GPU.

    Make it once, on every rank, and pass it as `group=` to every call. An NCCL group uses it by itself where it can. Make one to
    choose the budget, or to get an error where it cannot be used. From the first call on it keeps `budget` bytes of this rank's GPU
    for messages on their way; larger messages go in pieces.

    The partials of `decode`, up to 2 MiB a rank, go by a kernel on each GPU instead. From the first of them on that takes 4 MiB for
    each rank more.

    Raises ValueError for a bad group or budget. The first call raises ValueError, on every rank, unless all ranks are on one host, each
    on its own GPU (or TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1 there), the GPUs reach each other's memory, the driver is of
    CUDA 12.8 or later, and the budgets are equal.

    >>> transport = ra.symmetric(budget=1 << 30)  # doctest: +SKIP
    >>> out = ra.ring_attention(q, k, v, group=transport)  # doctest: +SKIP
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, np.integer)):
        raise ValueError(f"budget is a {type(budget).__name__}, but must be a number of bytes")
    group = _process_group(group)
    return SymmetricTransport(group, int(budget)) if dist.get_world_size(group) > 1 else Alone()


def process_group(group: dist.ProcessGroup | DeviceMesh | None = None) -> Transport:
    """A transport over the process group's own sends and receives, NCCL or gloo, never over shared memory.

    Make it once, on every rank, and pass it as `group=` to every call. Raises ValueError for a bad group.
    """
    group = _process_group(group)
    return ProcessGroupTransport(group) if dist.get_world_size(group) > 1 else Alone()


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group that `group` stands for. Raises ValueError if it stands for none, or for several."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "there is no default group: start the program with torchrun, and call torch.distributed.init_process_group first"
        )
    found = _ranks(group)
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(
            f"group is a {type(group).__name__} of {found.size} ranks, but must be a ProcessGroup, or one axis of a DeviceMesh"
        )
    return found


def _ranks(group: Group | None) -> dist.ProcessGroup | Transport | Hybrid:
    """The ranks that `group` stands for. Raises ValueError if this rank is not among them, or if it is no group."""
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        group = _of_mesh(group)
    is_process_group = isinstance(group, dist.ProcessGroup)
    if group is dist.GroupMember.NON_GROUP_MEMBER or (is_process_group and dist.get_rank(group) < 0):
        raise ValueError(f"group does not hold this rank: rank {dist.get_rank()} of the job must not call with it")
    if not is_process_group and not isinstance(group, (Transport, Hybrid)):
        raise ValueError(
            f"group is a {type(group).__name__}, but must be a ProcessGroup, a DeviceMesh, hybrid(...), symmetric(...) or None"
        )
    return group


@constant
def hybrid(mesh: DeviceMesh, ring: str | int = "ring", heads: str | int = "heads") -> Hybrid:
    """Two axes of a device mesh as one group to pass to `ring_attention`: an all-to-all between sequence and heads along the axis
    `heads`, and a ring along the axis `ring` (names or numbers of axes).

    The layout is for all ranks of both axes: with u ranks on the heads axis, the rank that is the i-th on the ring axis and the j-th on
    the heads axis holds shard `i * u + j`. q's heads must be a multiple of u. K/V heads need not be: they are copied if there are
    fewer. A 2-D mesh whose axes are named "ring" and "heads" may be passed as it is. Other axes of the mesh, such as data, make
    separate groups.

    Raises ValueError for axes that the mesh does not have, and for a mesh whose ranks do not ascend along both axes.

    >>> mesh = init_device_mesh("cuda", (8, 4), mesh_dim_names=("ring", "heads"))  # doctest: +SKIP
    >>> out = ra.ring_attention(q, k, v, layout=ra.zigzag(seq_len, 32), group=mesh)  # doctest: +SKIP
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}, but must be a DeviceMesh: make one with init_device_mesh")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("mesh is a DeviceMesh that does not hold this rank")
    axes = _axis("ring", mesh, ring), _axis("heads", mesh, heads)
    if axes[0] == axes[1]:
        raise ValueError(f"ring and heads are both axis {ring!r} of the mesh: they must be two")
    others = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
    table = mesh.mesh[others]
    members = table if axes[0] < axes[1] else table.T  # (ring, heads)
    if any((members.diff(dim=dim) <= 0).any() for dim in (0, 1)):
        raise ValueError(
            f"mesh holds the ranks {table.tolist()}, which do not ascend along both axes: torch numbers a group's ranks in ascending "
            "order, so a rank's place in the mesh would not be its rank in the ring"
        )
    groups = mesh.get_group(axes[0]), mesh.get_group(axes[1])
    kept = _hybrids.setdefault(groups[0], WeakKeyDictionary())
    if groups[1] not in kept:
        kept[groups[1]] = _make_hybrid(*groups, members.flatten().tolist())
    return kept[groups[1]]


def _make_hybrid(ring: dist.ProcessGroup, heads: dist.ProcessGroup, members: list[int]) -> Hybrid:
    ascending = sorted(members)
    order = [ascending.index(member) for member in members]
    axes = get_context(ring).transport, get_context(heads).transport
    return Hybrid(*axes, _channel(ascending), order, names=(ring.group_name, heads.group_name))


def _channel(members: list[int]) -> Ranks:
    """The channel of some ranks of the job: one for all meshes of these ranks, so that ranks with different meshes can compare them."""
    if len(members) == 1:
        return Alone()
    world = dist.group.WORLD
    assert world is not None
    kept = _channels.setdefault(world, {})
    key = tuple(members)
    if key not in kept:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
        closed = closed_by(world)
        kept[key] = HostChannel(
            f"ranks-{digest}", key.index(dist.get_rank()), key, timeout_of(world), lambda rank: closed(key[rank])
        )
    return kept[key]


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup | Hybrid:
    names = mesh.mesh_dim_names or ()
    if set(names) == {"ring", "heads"}:
        return hybrid(mesh)
    if mesh.ndim != 1:
        raise ValueError(
            f"group is a {mesh.ndim}-D DeviceMesh{f' with the axes {names}' if names else ''}: pass one axis of it, such as "
            "mesh['ring'], or hybrid(mesh, ring=..., heads=...) for a ring along one axis and heads along another"
        )
    if mesh.get_coordinate() is None:
        raise ValueError("group is a DeviceMesh that does not hold this rank")
    return mesh.get_group()


def _axis(name: str, mesh: DeviceMesh, axis: str | int) -> int:
    """The number of an axis of a mesh."""
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < mesh.ndim:
        return axis
    has = f"the axes {names}" if names else f"{mesh.ndim} axes without names"
    raise ValueError(f"{name} is {axis!r}, but the mesh has {has}: give the name or the number of one")


def group_names(group: Group | None) -> tuple[str, ...]:
    """The names of a group's process groups, for `named_context`: none for the default group, two for a hybrid."""
    group = _of_mesh(group) if isinstance(group, DeviceMesh) else group
    if group is None:
        return ()
    if isinstance(group, dist.ProcessGroup):
        return (group.group_name,)
    if isinstance(group, Hybrid) and group.names is not None:
        return group.names
    raise ValueError("torch.compile knows a group by its name: pass a ProcessGroup, a DeviceMesh or hybrid(mesh)")


def process_groups(group: Group | None) -> list[dist.ProcessGroup]:
    """The process groups along a group's axes that have more than one rank: a sum along each in turn is the sum over all ranks.

    Here a DeviceMesh may have any axes. Raises ValueError for a group that has no process groups, or is without this rank.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return []
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:
            raise ValueError("group is a DeviceMesh that does not hold this rank")
        found = group.get_all_groups()
    else:
        ranks = _ranks(group)
        if isinstance(ranks, dist.ProcessGroup):
            found = [ranks]
        elif isinstance(ranks, Hybrid) and ranks.names is not None:
            found = [_named_group(name) for name in ranks.names]
        elif ranks.size == 1:
            found = []
        else:
            raise ValueError(
                f"group is a {type(group).__name__}, which has no process groups to sum over: pass the ProcessGroup it was made of"
            )
    return [each for each in found if dist.get_world_size(each) > 1]


def _named_group(name: str) -> dist.ProcessGroup:
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(name)


def named_context(names: tuple[str, ...]) -> Context:
    """The context of the group with these names, which must exist."""
    groups = [_named_group(name) for name in names]
    return get_context(_hybrids[groups[0]][groups[1]] if len(groups) == 2 else groups[0] if groups else None)


def _transport(group: dist.ProcessGroup) -> Transport:
    if dist.get_world_size(group) == 1:
        return Alone()
    backends = str(dist.get_backend_config(group)).split(",")
    return AutomaticTransport(group) if "cuda:nccl" in backends else ProcessGroupTransport(group)
