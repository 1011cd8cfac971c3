"""Passes that are recorded once and replayed: what they allocate and launch, without the Python that led there.

A pass over the same kinds of tensors makes the same launches each time, with other addresses. Finding them costs the host several times as
long as the launches. So the first call of a kind runs as it is, and builds what is kept; the second one is recorded; the others are
replayed: one allocation for all tensors that live inside the pass, one for each result, and the launches.

A recording holds only if it explains all that happened: nothing but allocations, views and direct launches, whose tensors are inputs,
results, allocations of the pass, or tensors that were there before. Otherwise the pass runs as it is for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import driver

from . import launches
from .direct import DirectLaunch, hooked
from .table import kind

Tensors = tuple[torch.Tensor, ...]

_KEPT = 64  # recordings of one owner
_ALIGNED = 512  # bytes, as torch's allocator aligns
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEWS = {"alias", "as_strided", "detach", "expand", "permute", "select", "slice", "t", "transpose", "unbind", "unsqueeze", "view"}


def replay(found: dict[tuple, Any], facts: tuple, inputs: Tensors, work: Callable[[], Tensors]) -> Tensors:
    """`work()`, which computes tensors from the inputs on the current CUDA stream, or its replay.

    found: the recordings of one owner, who gives the same `facts` only to passes that do the same with such tensors.
    """
    if torch.cuda.is_current_stream_capturing():
        return work()
    device = driver.active.get_current_device()
    stream = driver.active.get_current_stream(device)
    addresses = [x.data_ptr() for x in inputs]
    # streams of two devices may have one number
    where = device, inputs[0].device, stream
    key = (facts, where, torch.are_deterministic_algorithms_enabled(), *map(kind, inputs))
    known = found.get(key, _NEW)
    # inputs that begin at one address, such as one tensor given twice, would be taken for one another
    if known is None or len(set(addresses)) < len(addresses) or hooked():
        return work()
    if isinstance(known, _Recording):
        return known(addresses, stream)
    if len(found) >= _KEPT:
        found.clear()
    if known is _NEW:
        found[key] = _SEEN
        return work()
    results, found[key] = _record(inputs, addresses, work)
    return results


_NEW, _SEEN = object(), object()


class _Source(NamedTuple):
    """Where the address of an argument comes from: `base` counts inputs, then results, and is -1 for the memory inside the pass."""

    base: int
    offset: int


class _RecordedLaunch(NamedTuple):
    """A launch: its arguments in the launcher's order, and those that move."""

    launch: DirectLaunch
    arguments: list[Any]
    moving: list[tuple[int, Callable[[int], Any] | None, _Source]]


class _Recording:
    """A pass as allocations and launches."""

    def __init__(self, device: torch.device, nbytes: int, results: Tensors, made: list[_RecordedLaunch]) -> None:
        self._device, self._nbytes, self._launches = device, nbytes, made
        self._results = [(tuple(x.shape), x.stride(), x.dtype) for x in results]

    def __call__(self, addresses: list[int], stream: int) -> Tensors:
        device = self._device
        results = tuple(
            [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self._results]
        )
        bases = addresses + [x.data_ptr() for x in results]
        inside = None
        if self._nbytes:
            inside = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
            bases.append(inside.data_ptr())
        for launch, template, moving in self._launches:
            arguments = template.copy()
            for place, describe, (base, offset) in moving:
                address = bases[base] + offset
                arguments[place] = address if describe is None else describe(address)
            launch.queue(arguments, stream)
        return results


class _Witness(TorchDispatchMode):
    """Keeps what is allocated, by the address of its memory, and notes whether anything else happens than allocations and views."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: dict[int, torch.Tensor] = {}
        self.plain = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _ALLOCATIONS:
            self.allocated[result.untyped_storage().data_ptr()] = result
        elif name not in _VIEWS:
            self.plain = False
        return result


def _record(inputs: Tensors, addresses: list[int], work: Callable[[], Tensors]) -> tuple[Tensors, _Recording | None]:
    """The results of `work`, and its recording if that explains it."""
    counted = 0

    def count(metadata: Any) -> None:
        nonlocal counted
        counted += 1

    made: list[tuple[DirectLaunch | None, dict[str, Any]]] = []
    watch, hook = _Witness(), knobs.runtime.launch_enter_hook
    if not hasattr(hook, "add") or launches.recorder.made is not None:
        return work(), None
    hook.add(count)
    launches.recorder.made = made
    try:
        with watch:
            results = work()
    finally:
        launches.recorder.made = None
        hook.remove(count)
    if not watch.plain or counted != len(made):
        return results, None
    bases = dict(zip(addresses + [x.data_ptr() for x in results], range(len(addresses) + len(results))))
    own = {x.untyped_storage().data_ptr() for x in results}
    # each result is memory of its own, from its beginning on
    if len(bases) < len(addresses) + len(results) or own != {x.data_ptr() for x in results} or not own <= watch.allocated.keys():
        return results, None
    memory, nbytes = {}, 0
    for address, x in watch.allocated.items():
        if address not in own and x.untyped_storage().nbytes():
            memory[address] = nbytes
            nbytes += -(-x.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
    inside = {x.untyped_storage().data_ptr() for x in inputs}

    def place_of(x: torch.Tensor) -> _Source | None:
        begin, address = x.untyped_storage().data_ptr(), x.data_ptr()
        if address in bases:
            return _Source(bases[address], 0)
        if begin in memory:
            return _Source(-1, memory[begin] + address - begin)
        if begin in own:
            return _Source(bases[begin], address - begin)
        return None

    found = []
    for launch, moving in made:
        if launch is None:
            return results, None
        arguments, places = launch.template(moving), []
        for name, at, describe in launch.places:
            x = moving[name]
            if isinstance(x, torch.Tensor):
                place = place_of(x)
                if place is not None:
                    places.append((at, describe, place))
                elif x.untyped_storage().data_ptr() in inside:
                    return results, None
                else:
                    launch.keep(x)
        found.append(_RecordedLaunch(launch, arguments, places))
    return results, _Recording(inputs[0].device, nbytes, results, found)
