"""Keep tensors of a forward pass in host memory until its backward pass. A separate stream copies them there and back.

A tensor's memory on the device is freed once the device's stream has been told to wait for the copy; the allocator then reuses it in
the stream's order. (`record_stream` frees memory only when the host sees that the copy has ended. A host that is layers ahead of its
GPU would find none of it free.)
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.kept import CHANGED_IN_PLACE


class HostMemory:
    """Page-locked memory for the tensors of one model's layers, reused in every step, and the streams that copy."""

    def __init__(self) -> None:
        self._free: dict[tuple, list[torch.Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}
        self._moving: dict[Parked, None] = {}
        self._seen: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.latest: Callable[[], Any] = lambda: None  # a weak reference to the last layer that parked its tensors

    def __reduce__(self) -> Any:
        return HostMemory, ()  # a copied model gets its own memory

    def park(self, x: torch.Tensor, place: tuple) -> Parked:
        """Start to copy x. Tensors with the same `place` in other layers and steps are as large as x, and share buffers with it."""
        parked = Parked(self, x, self._free.setdefault(place, []))
        self._moving[parked] = None
        return parked

    def first_seen(self, x: torch.Tensor) -> bool:
        """Whether this is the first call for this tensor."""
        known = self._seen.get(id(x)) is x
        self._seen[id(x)] = x
        return not known

    def settle(self) -> None:
        """Let the devices' current streams wait for all copies, and free the device memory of tensors that nobody has taken."""
        for device in self._streams:
            self.wait(device)
        moving, self._moving = self._moving, {}
        for parked in moving:
            parked.let_go()

    def wait(self, device: torch.device) -> None:
        """Let the device's current stream wait for the copies so far."""
        torch.get_device_module(device).current_stream(device).wait_stream(self._streams[device])

    def copy(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
        """Copy between the host and a device, after the earlier operations of the device's current stream."""
        modules = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()
        self._streams[device].wait_stream(modules.current_stream(device))
        with modules.stream(self._streams[device]):
            target.copy_(source, non_blocking=True)

    def buffer(self, nbytes: int, device: torch.device, free: list[torch.Tensor]) -> torch.Tensor:
        """(nbytes or more,) uint8: a free buffer that is large enough, or a new one, for which a smaller free one is dropped."""
        for index, buffer in enumerate(free):
            if len(buffer) >= nbytes:
                return free.pop(index)
        if free:
            free.pop()
        nbytes = max(nbytes, 1)
        return _page_locked(nbytes) if device.type == "cuda" else torch.empty(nbytes, dtype=torch.uint8)


class Parked:
    """A tensor in host memory. During copies it is on its device too."""

    def __init__(self, memory: HostMemory, x: torch.Tensor, free: list[torch.Tensor]) -> None:
        self._memory, self._device = memory, x.device
        # the alias must share x's count of in-place changes, also below autograd
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
        """Start to copy it back, unless it is still on the device."""
        if self._x is None:
            self._x = torch.empty_like(self._host, device=self._device)
            self._memory.copy(self._x, self._host, self._device)
            self._version = self._x._version
            self._memory._moving[self] = None

    def take(self) -> torch.Tensor:
        """The tensor on its device, for the current stream; it can be taken again."""
        self.fetch()
        self._memory.wait(self._device)
        self._memory._moving.pop(self, None)
        x = self.let_go()
        assert x is not None
        return x

    def let_go(self) -> torch.Tensor | None:
        """Free the device memory from now on, and return the tensor that was there."""
        x, self._x = self._x, None
        if x is not None and x._version != self._version:
            raise RuntimeError(CHANGED_IN_PLACE)
        return x


def _page_locked(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8 in page-locked host memory; torch's own allocator would round the size up to a power of two."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    memory.madvise(mmap.MADV_DONTFORK)  # a data loader's workers must not get copies of locked pages
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
