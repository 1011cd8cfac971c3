"""Memory of one host's GPUs that all ranks map: arenas from torch's symmetric memory, copy engines, and counts that streams wait for.

None of this runs kernels, because the kernels that compute fill every multiprocessor and leave no room for others. Copy engines
copy between GPUs, and the streams themselves wait for counts and write them (stream memory operations). Copies within a GPU, which
two ranks need, do take multiprocessors. NVLink multicast stays off.

Sources: CUDA driver API, "Stream Memory Operations" and cuMemcpyBatchAsync.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ringattn_kernels.cuda_structs import MEMORY_OPERATION, CopyAttributes, copy_options

from .meeting import Meeting, MeetingStore
from .memory import Count, Mark, Memory, PlacedChunk, Queue, Values

if TYPE_CHECKING:
    from ringattn_kernels.submission import Submission

_LINE = 128  # bytes between two counts
_NUMBERS = itertools.count()
_kept: list[tuple] = []  # memory whose owner is gone and that could not be unmapped then

WAIT, WRITE = 1, 2
# for a wait: until the number there is >= value, cyclically; for a write: after all earlier memory operations
_FLAGS = 0


class Driver:
    """Functions of the CUDA driver that torch does not offer."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._operate = self._library.cuStreamBatchMemOp_v2
        self._operate.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p, ctypes.c_uint)
        self._copy = self._library.cuMemcpyBatchAsync  # of CUDA 12.8; later versions have other names
        numbers, sizes, attributes = ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(CopyAttributes)
        self._copy.argtypes = (
            *(numbers, numbers, numbers, ctypes.c_size_t, attributes, sizes, ctypes.c_size_t, sizes, ctypes.c_void_p),
        )
        self._attributes, self._first, self._failed = copy_options()
        self._copy_one = self._library.cuMemcpyAsync
        self._copy_one.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def operate(self, stream: int, operation: int, values: Sequence[tuple[int, int]]) -> None:
        """The stream waits until the 32 bits at each address have reached a value (`WAIT`), or writes the value there (`WRITE`)."""
        packed = b"".join([MEMORY_OPERATION.pack(operation, address, value & 0xFFFFFFFF, _FLAGS) for address, value in values])
        result = self._operate(stream, len(values), packed, 0)
        if result:
            raise self._error(result, "cuStreamBatchMemOp")

    def copy(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        """The stream does copies, each (target, source, bytes), in any order."""
        n = len(copies)
        targets, sources, sizes = [struct.pack(f"={n}Q", *numbers) for numbers in zip(*copies)]
        result = self._copy(targets, sources, sizes, n, self._attributes, self._first, 1, self._failed, stream)
        if result:
            raise self._error(result, "cuMemcpyBatchAsync")

    def copy_captured(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        """The same, one copy after the other, for a stream under capture: captures take no batches."""
        for target, source, nbytes in copies:
            result = self._copy_one(target, source, nbytes, stream)
            if result:
                raise self._error(result, "cuMemcpyAsync")

    def _error(self, result: int, function: str) -> RuntimeError:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(result, ctypes.byref(name))
        return RuntimeError(f"{function} failed with {(name.value or b'an unknown error').decode()} ({result})")


@functools.cache
def load_driver() -> Driver | None:
    """The driver, or None if it lacks one of the functions: they came with CUDA 12.8."""
    try:
        return Driver()
    except (OSError, AttributeError):
        return None


@contextlib.contextmanager
def as_group(meeting: Meeting, rank: int, size: int) -> Iterator[str]:
    """The name of a group that torch knows, with a store, for a rendezvous of the ranks that meet."""
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory, _unregister_process_group

    name, store = f"ringattn meeting {next(_NUMBERS)}", MeetingStore(meeting)  # in this process alone
    group = ProcessGroup(store, rank, size)
    # torch's versions look for a group in different places
    _SymmetricMemory.set_group_info(name, rank, size, store)
    _register_process_group(name, group)  # pyrefly: ignore[bad-argument-type]
    try:
        yield name
    finally:
        _unregister_process_group(name)  # pyrefly: ignore[bad-argument-type]


def unmap_kept() -> None:
    """Unmap memory that had to stay while a graph was captured, unless one is captured now."""
    if _kept and not torch.cuda.is_current_stream_capturing():
        _kept.clear()


def keep_while_captured(*memory: object) -> None:
    """Keep memory whose owner is gone, if a graph is captured now: to unmap it waits for the device, which breaks a capture."""
    if torch.cuda.is_current_stream_capturing():
        _kept.append(memory)


def allocate(device: torch.device, nbytes: int, zeros: int) -> torch.Tensor:
    """Memory that other GPUs can map, (nbytes,) uint8; the first `zeros` of them are 0."""
    # leave multicast alone: other jobs may share these GPUs
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    # imported here because some builds of torch lack it
    from torch._C._distributed_c10d import _SymmetricMemory

    unmap_kept()
    arena = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    arena[:zeros].zero_()
    torch.cuda.synchronize(device)
    return arena


def map_arenas(arena: torch.Tensor, meeting: Meeting, rank: int, size: int) -> tuple[object, list[int]]:
    """(what keeps all ranks' arenas mapped, their addresses here); all ranks have made theirs alike."""
    from torch._C._distributed_c10d import _SymmetricMemory

    with as_group(meeting, rank, size) as name:
        handle = _SymmetricMemory.rendezvous(arena, name)
    assert not getattr(handle, "multicast_ptr", 0)
    return handle, [handle.get_buffer(each, arena.shape, torch.uint8).data_ptr() for each in range(size)]


class CudaMemory(Memory):
    """A rank's arena on its GPU; the other ranks can map it once all ranks have called `meet`."""

    def __init__(self, rank: int, size: int, device: torch.device, capacity: int) -> None:
        self.rank = rank
        self.size = size
        self.capacity = capacity
        self.device = device
        driver = load_driver()
        assert driver is not None
        self.driver = driver
        self._counts = 8 * size * _LINE  # bytes
        self._arena = allocate(device, self._counts + capacity * (size - 1), zeros=self._counts)

    def meet(self, meeting: Meeting) -> None:
        """Map the other ranks' arenas."""
        # the arenas stay mapped as long as the handle lives
        self._handle, bases = map_arenas(self._arena, meeting, self.rank, self.size)
        self._note_addresses(bases)

    def _note_addresses(self, bases: list[int]) -> None:
        """The addresses where each rank's places begin, of this rank's counts (`own`), and of the counts at its peers (`theirs`)."""
        self.places = [base + self._counts for base in bases]
        self.own: dict[Count, int] = {}
        self.theirs: dict[Count, int] = {}
        for number, kind in enumerate(itertools.product((False, True), repeat=3)):
            captured, near, ready = kind
            for peer in range(self.size):
                count = Count(near, ready, peer, captured)
                self.own[count] = bases[self.rank] + (number * self.size + peer) * _LINE
                self.theirs[count] = bases[peer] + (number * self.size + self.rank) * _LINE

    def __del__(self) -> None:
        keep_while_captured(getattr(self, "_handle", None), self._arena)

    @property
    def current(self) -> CudaQueue:
        return CudaQueue(self, torch.cuda.current_stream(self.device))

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def queue(self) -> CudaQueue:
        return CudaQueue(self, torch.cuda.Stream(self.device, priority=-1))

    def listed(self, queue: Queue, submission: Submission) -> Queue:
        assert isinstance(queue, CudaQueue)
        return ListedQueue(self, queue.stream, submission)


class CudaQueue(Queue):
    """A CUDA stream as a queue."""

    _driver: Driver | Submission

    def __init__(self, memory: CudaMemory, stream: torch.cuda.Stream) -> None:
        self._memory = memory
        self._driver = memory.driver
        self.stream = stream
        self._handle = stream.cuda_stream

    def mark(self) -> Mark:
        return self.stream.record_event()

    def after(self, mark: Mark) -> None:
        mark.wait(self.stream)

    def wait(self, values: Values) -> None:
        own = self._memory.own
        self._driver.operate(self._handle, WAIT, [(own[count], value) for count, value in values])

    def stage(self, chunks: Sequence[PlacedChunk]) -> None:
        self._copy([(place, address, nbytes) for address, place, nbytes in self._copies(chunks)])

    def pull(self, chunks: Sequence[PlacedChunk]) -> None:
        self._copy(self._copies(chunks))

    def raise_to(self, values: Values) -> None:
        theirs = self._memory.theirs
        self._driver.operate(self._handle, WRITE, [(theirs[count], value) for count, value in values])

    def set_back(self, counts: Sequence[Count]) -> None:
        own = self._memory.own
        self._driver.operate(self._handle, WRITE, [(own[count], 0) for count in counts])

    def _copies(self, chunks: Sequence[PlacedChunk]) -> list[tuple[int, int, int]]:
        """Each part as a pull: its address in the tensor, the address of its place, and its bytes."""
        return [
            (tensors[number].data_ptr() + begin, self._memory.places[keeper] + offset + in_chunk, nbytes)
            for tensors, parts, keeper, offset, _ in chunks
            for number, begin, nbytes, in_chunk in parts
        ]

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        if isinstance(self._driver, Driver) and self._memory.capturing:
            self._driver.copy_captured(self._handle, copies)
        else:
            self._driver.copy(self._handle, copies)


class ListedQueue(CudaQueue):
    """A CUDA stream whose operations are listed in a submission."""

    def __init__(self, memory: CudaMemory, stream: torch.cuda.Stream, submission: Submission) -> None:
        super().__init__(memory, stream)
        self._driver = self._submission = submission

    def mark(self) -> Mark:
        return self._submission.mark(self._handle)

    def after(self, mark: Mark) -> None:
        self._submission.after(self._handle, mark)
