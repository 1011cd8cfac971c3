"""Tensors of a forward pass in host memory until its backward pass: copied there and back by a stream of their own.

A tensor's memory on the device is let go once the device's stream has been told to wait for the copy, so that the allocator can hand
it on in the stream's order. (`record_stream` gives memory back when the host sees that the copy has ended: a host that is layers
ahead of its GPU would find none of it free.)
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch


class HostMemory:
    """Page-locked memory for the tensors of one model's layers, used again in every step, and the streams that copy."""

    def __init__(self) -> None:
        self._free: dict[tuple, list[torch.Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}
        self._moving: dict[Parked, None] = {}
        self._seen: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.latest: Callable[[], Any] = lambda: None  # a weak reference to the last layer that parked its tensors

    def __reduce__(self) -> Any:
        return HostMemory, ()  # a copied model has memory of its own

    def park(self, x: torch.Tensor, place: tuple) -> Parked:
        """Begin to copy x. Its `place` among a layer's tensors is that of tensors of other layers and steps as large as it."""
        parked = Parked(self, x, self._free.setdefault(place, []))
        self._moving[parked] = None
        return parked

    def first_seen(self, x: torch.Tensor) -> bool:
        """Whether no layer has asked for this tensor before."""
        known = self._seen.get(id(x)) is x
        self._seen[id(x)] = x
        return not known

    def settle(self) -> None:
        """Let the devices' current streams wait for all copies, and let go of what was copied, there and back, and not taken."""
        for device in self._streams:
            self.wait(device)
        moving, self._moving = self._moving, {}
        for parked in moving:
            parked.let_go()

    def wait(self, device: torch.device) -> None:
        """Let the device's current stream wait for the copies so far."""
        torch.get_device_module(device).current_stream(device).wait_stream(self._streams[device])

    def copy(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
        """Between the host and a device, behind what its current stream has to do so far."""
        modules = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()
        self._streams[device].wait_stream(modules.current_stream(device))
        with modules.stream(self._streams[device]):
            target.copy_(source, non_blocking=True)

    def buffer(self, nbytes: int, device: torch.device, free: list[torch.Tensor]) -> torch.Tensor:
        """(nbytes or more,) uint8: one of those that are free, or a new one in its place."""
        for index, buffer in enumerate(free):
            if len(buffer) >= nbytes:
                return free.pop(index)
        if free:
            free.pop()
        nbytes = max(nbytes, 1)
        return _page_locked(nbytes) if device.type == "cuda" else torch.empty(nbytes, dtype=torch.uint8)


class Parked:
    """A tensor in host memory. While it is copied there or back it is on its device as well."""

    def __init__(self, memory: HostMemory, x: torch.Tensor, free: list[torch.Tensor]) -> None:
        self._memory, self._device = memory, x.device
        # beneath autograd too, the alias is to share x's count of changes in place
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._x: torch.Tensor | None = x.detach()
        self._version = x._version
        strides = torch.empty_like(x, device="meta").stride()
        nbytes = x.numel() * x.element_size()
        buffer = memory.buffer(nbytes, x.device, free)
        weakref.finalize(self, free.append, buffer).atexit = False
        self._host = buffer[:nbytes].view(x.dtype).as_strided(x.shape, strides)
        memory.copy(self._host, self._x, x.device)

    def fetch(self) -> None:
        """Begin to copy it back, unless it is still on the device."""
        if self._x is None:
            self._x = torch.empty_like(self._host, device=self._device)
            self._memory.copy(self._x, self._host, self._device)
            self._version = self._x._version
            self._memory._moving[self] = None

    def take(self) -> torch.Tensor:
        """It on its device, for the current stream; it can be taken again."""
        self.fetch()
        self._memory.wait(self._device)
        self._memory._moving.pop(self, None)
        x = self.let_go()
        assert x is not None
        return x

    def let_go(self) -> torch.Tensor | None:
        """What is on the device, which is from now on in host memory alone."""
        x, self._x = self._x, None
        if x is not None and x._version != self._version:
            raise RuntimeError(
                "a checkpointed layer's input, or the output of ring_attention in it, was changed in place, and the backward pass "
                "needs it as it was: write x = x * y in place of x *= y"
            )
        return x


def _page_locked(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8 in host memory that copy engines reach; torch's own allocator would round the size up to a power of two."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    memory.madvise(mmap.MADV_DONTFORK)  # a data loader's workers would get copies of locked pages
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    result = runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 1)  # for all GPUs
    if int(result):
        raise RuntimeError(
            f"{nbytes:,} bytes of host memory cannot be page-locked: {runtime.cudaGetErrorString(result)}; offload fewer layers"
        )
    weakref.finalize(buffer, _unlock, memory, buffer.data_ptr()).atexit = False
    return buffer


def _unlock(memory: mmap.mmap, address: int) -> None:
    torch.cuda.synchronize()
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)
