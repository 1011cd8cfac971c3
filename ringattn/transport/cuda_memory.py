"""Memory of one host's GPUs that all ranks map: arenas from torch's symmetric memory, copy engines, and counts that streams wait for.

No kernel runs for any of it, for the kernels that compute fill every multiprocessor and would let none in: copies between GPUs
are done by copy engines, and counts are waited for and written by the streams themselves (stream memory operations). Copies
within a GPU, which two ranks need, do take multiprocessors. NVLink multicast stays off.

Sources: CUDA driver API, "Stream Memory Operations" and cuMemcpyBatchAsync.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Iterator, Sequence

import torch

from .meeting import Meeting, MeetingStore
from .staged import Count, Mark, Memory, Piece, Queue

_LINE = 128  # bytes between two counts
_NUMBERS = itertools.count()
_kept: list[tuple] = []  # what could not be unmapped when its owner went


class _StreamOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams, of a wait or a write."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )

    WAIT, WRITE = 1, 2
    # as flags of a wait: until value <= what is there, cyclically; of a write: after all memory operations before it
    AT_LEAST, IN_ORDER = 0, 0


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_uint32),
        ("source_hint", ctypes.c_uint32 * 2),
        ("target_hint", ctypes.c_uint32 * 2),
        ("flags", ctypes.c_uint32),
    )

    STREAM_ORDER = 1
    PREFER_OVERLAP_WITH_COMPUTE = 1


class Driver:
    """The driver's functions that torch does not offer."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._operate = self._library.cuStreamBatchMemOp_v2
        self._operate.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(_StreamOperation), ctypes.c_uint)
        self._copy = self._library.cuMemcpyBatchAsync  # as of CUDA 12.8; later versions have names of their own
        addresses, sizes = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
        attributes = ctypes.POINTER(_CopyAttributes)
        self._copy.argtypes = (
            *(addresses, addresses, sizes, ctypes.c_size_t, attributes, sizes, ctypes.c_size_t, sizes, ctypes.c_void_p),
        )
        self._attributes = (_CopyAttributes * 1)(
            _CopyAttributes(_CopyAttributes.STREAM_ORDER, flags=_CopyAttributes.PREFER_OVERLAP_WITH_COMPUTE)
        )
        self._copy_one = self._library.cuMemcpyAsync
        self._copy_one.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._first = (ctypes.c_size_t * 1)(0)
        self._failed = (ctypes.c_size_t * 1)(0)

    def wait(self, stream: int, counts: Sequence[tuple[int, int]]) -> None:
        """The stream waits until the 32 bits at each address have come to a value."""
        self._operations(stream, _StreamOperation.WAIT, _StreamOperation.AT_LEAST, counts)

    def write(self, stream: int, counts: Sequence[tuple[int, int]]) -> None:
        """The stream writes each value, of 32 bits, to its address."""
        self._operations(stream, _StreamOperation.WRITE, _StreamOperation.IN_ORDER, counts)

    def _operations(self, stream: int, operation: int, flags: int, counts: Sequence[tuple[int, int]]) -> None:
        operations = (_StreamOperation * len(counts))(
            *(_StreamOperation(operation, address, value & 0xFFFFFFFF, flags) for address, value in counts)
        )
        self._check(self._operate(stream, len(counts), operations, 0), "cuStreamBatchMemOp")

    def copy(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        """The stream copies from (target, source, bytes), in no order among them."""
        n = len(copies)
        targets, sources, sizes = zip(*copies)
        result = self._copy(
            (ctypes.c_uint64 * n)(*targets),
            (ctypes.c_uint64 * n)(*sources),
            (ctypes.c_size_t * n)(*sizes),
            n,
            self._attributes,
            self._first,
            1,
            self._failed,
            stream,
        )
        self._check(result, "cuMemcpyBatchAsync")

    def copy_captured(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        """The same for a stream that is captured, which takes no batches; one after the other."""
        for target, source, nbytes in copies:
            self._check(self._copy_one(target, source, nbytes, stream), "cuMemcpyAsync")

    def _check(self, result: int, function: str) -> None:
        if result:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(name))
            raise RuntimeError(f"{function} failed with {(name.value or b'an unknown error').decode()} ({result})")


@functools.cache
def load_driver() -> Driver | None:
    """The driver, or None where it has not all that is needed: it is of CUDA 12.8 or later."""
    try:
        return Driver()
    except (OSError, AttributeError):
        return None


@contextlib.contextmanager
def as_group(meeting: Meeting, rank: int, size: int) -> Iterator[str]:
    """The name of what torch takes for a group with a store, so that ranks that meet can have a rendezvous."""
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory, _unregister_process_group

    name, store = f"ringattn meeting {next(_NUMBERS)}", MeetingStore(meeting)  # in this process alone
    group = ProcessGroup(store, rank, size)
    # versions of torch differ in where they look
    _SymmetricMemory.set_group_info(name, rank, size, store)
    _register_process_group(name, group)  # pyright: ignore[reportArgumentType]
    try:
        yield name
    finally:
        _unregister_process_group(name)  # pyright: ignore[reportArgumentType]


def unmap_kept() -> None:
    """Unmap what had to stay while a graph was captured, unless one is captured now."""
    if _kept and not torch.cuda.is_current_stream_capturing():
        _kept.clear()


class CudaMemory(Memory):
    """A rank's arena on its GPU, of which the others know once all ranks have called `meet`."""

    def __init__(self, rank: int, size: int, device: torch.device, capacity: int) -> None:
        self.rank = rank
        self.size = size
        self.capacity = capacity
        self.device = device
        driver = load_driver()
        assert driver is not None
        self.driver = driver
        # a library that maps memory of GPUs that others may share must leave multicast alone
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        # imported where it is used, for not every build of torch has it
        from torch._C._distributed_c10d import _SymmetricMemory

        self._counts = 8 * size * _LINE  # bytes
        total = self._counts + capacity * (size - 1)
        unmap_kept()
        self._arena = _SymmetricMemory.empty_strided_p2p((total,), (1,), torch.uint8, device)
        self._arena[: self._counts].zero_()
        torch.cuda.synchronize(device)

    def meet(self, meeting: Meeting) -> None:
        """Map the other ranks' arenas."""
        from torch._C._distributed_c10d import _SymmetricMemory

        with as_group(meeting, self.rank, self.size) as name:
            handle = _SymmetricMemory.rendezvous(self._arena, name)
        assert not getattr(handle, "multicast_ptr", 0)
        self._handle = handle  # they stay mapped as long as it lives
        shape = self._arena.shape
        self._bases = [handle.get_buffer(rank, shape, torch.uint8).data_ptr() for rank in range(self.size)]

    def __del__(self) -> None:
        # the device is waited for where memory is unmapped, which ends a capture; and garbage is collected at any time
        if self.capturing:
            _kept.append((getattr(self, "_handle", None), self._arena))

    @property
    def current(self) -> CudaQueue:
        return CudaQueue(self, torch.cuda.current_stream(self.device))

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def queue(self) -> CudaQueue:
        return CudaQueue(self, torch.cuda.Stream(self.device, priority=-1))

    def place(self, piece: Piece) -> int:
        """Address of a piece in its keeper's arena."""
        return self._bases[piece.keeper] + self._counts + piece.offset

    def count(self, keeper: int, count: Count, peer: int) -> int:
        """Address of a count that `keeper` keeps of its channel from or to `peer`."""
        return self._bases[keeper] + ((4 * count.captured + 2 * count.near + count.ready) * self.size + peer) * _LINE


class CudaQueue(Queue):
    """A stream."""

    def __init__(self, memory: CudaMemory, stream: torch.cuda.Stream) -> None:
        self._memory = memory
        self._driver = memory.driver
        self._stream = stream

    def mark(self) -> Mark:
        return self._stream.record_event()

    def after(self, mark: Mark) -> None:
        self._stream.wait_event(mark)

    def wait(self, counts: Sequence[Count]) -> None:
        self._driver.wait(self._stream.cuda_stream, self._own(counts))

    def stage(self, pieces: Sequence[Piece]) -> None:
        self._copy([(self._memory.place(p), _address(p), p.nbytes) for p in pieces])

    def pull(self, pieces: Sequence[Piece]) -> None:
        self._copy([(_address(p), self._memory.place(p), p.nbytes) for p in pieces])

    def raise_to(self, counts: Sequence[Count]) -> None:
        memory = self._memory
        self._driver.write(self._stream.cuda_stream, [(memory.count(c.peer, c, memory.rank), c.value) for c in counts])

    def set_back(self, counts: Sequence[Count]) -> None:
        self._driver.write(self._stream.cuda_stream, self._own(counts))

    def _own(self, counts: Sequence[Count]) -> list[tuple[int, int]]:
        return [(self._memory.count(self._memory.rank, c, c.peer), c.value) for c in counts]

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        copy = self._driver.copy_captured if self._memory.capturing else self._driver.copy
        copy(self._stream.cuda_stream, copies)


def _address(piece: Piece) -> int:
    return piece.tensor.data_ptr() + piece.begin
