"""CUDA driver calls that are listed once and then queued together, as often as wanted, by one call into C.

From Python, the driver's calls of a pass take the host longer than short passes take the GPU: each goes through a launcher that reads its
arguments anew, or through ctypes. Here they lie as the driver takes them, and `submission.c` queues them. Where that cannot be compiled,
passes run call by call.

The list keeps the order that it was told, with few calls: of events and waits for them what `waits.py` finds necessary, and one call for
memory operations that follow each other.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .cuda_structs import ADDRESS, MEMORY_OPERATION, VALUE, copy_options
from .direct import DirectLaunch
from .waits import After, Do, Mark, ordered

_LAUNCH, _MARK, _AFTER, _OPERATE, _COPY = range(5)
_VALUES = 9  # of a step, at most
_WORD, _HALF_WORD, _TENSOR_MAP = range(3)
_ALIGNED = 128  # bytes: the driver wants descriptors at multiples of 64
_MAP_BYTES = 128
_NO_SCRATCH = 0, 0  # addresses of two sorts of scratch memory, the last parameters of each kernel
_KEPT = 256  # blocks of parameters
_TOGETHER = 256  # memory operations that one call takes
# a kernel's parameters by Triton's names of types, as `struct` packs them; pointers are "Q"
_FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
_FORMATS |= {"fp32": "f", "f32": "f", "fp64": "d"}


@dataclass(frozen=True)
class Number:
    """An integer that each run has anew: `numbers[index] + offset`."""

    index: int
    offset: int = 0

    def __add__(self, more: int) -> Number:
        return Number(self.index, self.offset + more)

    __radd__ = __add__


@dataclass(frozen=True)
class Functions:
    """The driver's functions, by address: launch, mark, after, operate, copy and replace an address; then what batched copies take besides.

    kept: memory at these addresses.
    """

    addresses: tuple[int, ...]
    kept: Any = None


class Submission:
    """A list of driver calls, to which methods add; `begin` and then `finish` queue all of them.

    numbers: how many integers each run begins with; `more_numbers` asks for others. caller: the stream whose later work comes after what
    the list says it comes after. Other streams keep their own order, and are given more by those who first let them follow a caller's.

    `begin` queues the caller's launches up to the first that waits for another stream: they need nothing of other ranks, and touch no
    memory but this rank's. So a pass begins to compute before the ranks agree, and before its messages are on their way.
    """

    def __init__(self, module: ModuleType, functions: Functions, numbers: int, caller: int) -> None:
        self._submit: Callable[[int, list[Any]], tuple[int, int] | None] = module.submit
        self._functions = array("q", functions.addresses)
        self._listed: list[Do | Mark | After] = []
        self._caller = caller
        self._patches, self._parameters = array("q"), array("q")
        self._arguments = bytearray()
        self._kept: list[Any] = [functions]  # and events, and memory
        # addresses of the calls of `begin`, of all others, and how many the first are, once the list is complete; 0: no calls
        self._programs: tuple[int, int, int] | None = None
        self._first_numbers = self.numbers = numbers

    def keep(self, what: Any) -> None:
        """Keep what the calls' arguments point to."""
        self._kept.append(what)

    def more_numbers(self, count: int) -> list[Number]:
        """Further numbers that each run is given."""
        self.numbers += count
        return [Number(index) for index in range(self.numbers - count, self.numbers)]

    def launch(self, direct: DirectLaunch, values: Sequence[Any], numbers: dict[int, Number], stream: int) -> None:
        """A kernel. values: its arguments as the launcher takes them. numbers: those that replace addresses among these, by their places.

        Raises ValueError for arguments that are not known here.
        """
        block = _parameter_block(direct.kinds)
        begin = self._room(block.format.size, _ALIGNED)
        for place, number in numbers.items():
            offset, patch = block.places[place]
            self._patches.extend((patch, begin + offset, number.index, number.offset))
        given = [0 if (x := values[place]) is None else x for place in block.places]
        for index, place in block.descriptors:
            given[index] = _descriptor(values[place])
        try:
            block.format.pack_into(self._arguments, begin, *given, *_NO_SCRATCH)
        except struct.error as error:
            raise ValueError(str(error)) from error
        first = len(self._parameters)
        self._parameters.extend([begin + offset for offset in block.offsets])
        count = len(self._parameters) - first
        self._do(stream, _LAUNCH, direct.function, *direct.grid, *direct.sizes, direct.early, first, count)

    def mark(self, stream: int) -> int:
        """A point in a stream, for `after`."""
        mark = len(self._listed)
        self._listed.append(Mark(stream, mark))
        return mark

    def after(self, stream: int, mark: int) -> None:
        """What the stream does next comes after a point in another stream."""
        self._listed.append(After(stream, mark))

    def operate(self, stream: int, operation: int, values: Sequence[tuple[int | Number, int | Number]]) -> None:
        """As `Driver.operate` of the transports: waits for, or writes, values at addresses."""
        place = self._room(MEMORY_OPERATION.size * len(values))
        for number, (address, value) in enumerate(values):
            begin = place + number * MEMORY_OPERATION.size
            MEMORY_OPERATION.pack_into(self._arguments, begin, operation, 0, 0, 0)
            self._write("Q", begin + ADDRESS, address)
            self._write("I", begin + VALUE, value)
        self._do(stream, _OPERATE, place, len(values))

    def copy(self, stream: int, copies: Sequence[tuple[int | Number, int | Number, int]]) -> None:
        """Copies, each (target, source, bytes), in any order."""
        place = self._packed("Q", [x for column in zip(*copies) for x in column])
        self._do(stream, _COPY, place, len(copies))

    def complete(self) -> tuple[int, int, int]:
        """Nothing more is listed: make ready to run, which the first `begin` does otherwise. The addresses of two programs, and a size."""
        if self._programs is None:
            self._programs = self._finished()
        return self._programs

    def begin(self, numbers: list[Any]) -> None:
        """Queue the first calls. Tensors among the numbers stand for their addresses. Not for two threads at once, until `finish` is done.

        numbers: those that a run begins with. Raises RuntimeError if the driver refuses a call.
        """
        program = self.complete()[0]
        assert len(numbers) == self._first_numbers
        failed = self._submit(program, numbers) if program else None
        if failed is not None:
            raise _refused(*failed)

    def finish(self, numbers: list[Any]) -> None:
        """Queue the others. numbers: all of them. Raises RuntimeError if the driver refuses a call."""
        assert self._programs is not None and len(numbers) == self.numbers
        _, program, before = self._programs
        failed = self._submit(program, numbers) if program else None
        if failed is not None:
            raise _refused(before + failed[0], failed[1])

    def _finished(self) -> tuple[int, int, int]:
        size = len(self._arguments)
        memory = ctypes.create_string_buffer(size + _ALIGNED)
        begin = -(-ctypes.addressof(memory) // _ALIGNED) * _ALIGNED
        ctypes.memmove(begin, bytes(self._arguments), size)
        self._kept.append(memory)
        first, others = self._parts(self._calls())
        places = {place for call in first for place in self._parameters_of(call)}
        patches = [self._patches[i : i + 4] for i in range(0, len(self._patches), 4)]
        found = [
            self._program(calls, [patch for patch in patches if (patch[1] in places) == early], begin)
            for calls, early in ((first, True), (others, False))
        ]
        # the programs have what they need of these
        self._listed, self._patches, self._arguments = [], array("q"), bytearray()
        return found[0], found[1], len(first)

    def _program(self, calls: Sequence[tuple[int, ...]], patches: Sequence[array[int]], arguments: int) -> int:
        """The address of calls as `submission.c` reads them, with what it writes into their arguments first; 0 if there are none."""
        if not calls:
            return 0
        steps, written = array("q"), array("q")
        for kind, stream, *values in calls:
            steps.extend([kind, stream, *values, *[0] * (_VALUES - len(values))])
        for patch in patches:
            written += patch
        addresses = [x.buffer_info()[0] for x in (self._functions, steps, written, self._parameters)]
        program = array("q", [*addresses[:2], len(calls), addresses[2], len(patches), addresses[3], arguments])
        self._kept += steps, written, program
        return program.buffer_info()[0]

    def _parts(self, calls: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The calls of `begin`, and all others, which keep their order."""
        numbers = dict(zip(self._patches[1::4], self._patches[2::4]))  # by the place that is written
        first, others, waits = list[tuple[int, ...]](), list[tuple[int, ...]](), False
        for call in calls:
            own = call[1] == self._caller
            if own and not waits:
                # a number that comes later is known only once the ranks have agreed
                late = any(numbers.get(place, -1) >= self._first_numbers for place in self._parameters_of(call))
                waits = call[0] not in (_LAUNCH, _MARK) or late
            (first if own and not waits else others).append(call)
        return first, others

    def _parameters_of(self, call: tuple[int, ...]) -> Sequence[int]:
        """Where a launch's parameters are; nothing for other calls."""
        begin, count = call[-2:]
        return self._parameters[begin : begin + count] if call[0] == _LAUNCH else ()

    def _calls(self) -> list[tuple[int, ...]]:
        """The driver calls that the list takes: kind, stream, and values."""
        events: dict[Any, int] = {}
        found: list[tuple[int, ...]] = []
        for x in ordered(self._listed, self._caller):
            if isinstance(x, Do):
                kind, values = x.call
                joined = _joined(found[-1], x) if found else None
                if joined is None:
                    found.append((kind, x.stream, *values))
                else:
                    found[-1] = joined
            elif isinstance(x, Mark):
                events[x.name] = self._event()
                found.append((_MARK, x.stream, events[x.name]))
            else:
                found.append((_AFTER, x.stream, events[x.name]))
        return _launched_early(found)

    def _event(self) -> int:
        event = torch.cuda.Event()
        event.record(torch.cuda.default_stream())  # the event is made when it is first recorded; nobody captures this stream
        self._kept.append(event)
        return event.cuda_event

    def _do(self, stream: int, kind: int, *values: int) -> None:
        self._listed.append(Do(stream, (kind, values)))

    def _room(self, nbytes: int, aligned: int = 8) -> int:
        place = -(-len(self._arguments) // aligned) * aligned
        self._arguments.extend(bytes(place + nbytes - len(self._arguments)))
        return place

    def _packed(self, form: str, values: Sequence[Any]) -> int:
        size = struct.calcsize(form)
        place = self._room(size * len(values))
        for index, value in enumerate(values):
            self._write(form, place + size * index, value)
        return place

    def _write(self, form: str, place: int, value: Any) -> None:
        if isinstance(value, Number):
            kind = {8: _WORD, 4: _HALF_WORD}[struct.calcsize(form)]
            self._patches.extend([kind, place, value.index, value.offset])
        else:
            struct.pack_into("=" + form, self._arguments, place, value & 0xFFFFFFFF if form == "I" else value)


class _ParameterPlace(NamedTuple):
    """Where a parameter is in its launch's block, and how a number is written there."""

    offset: int
    patch: int


class _ParameterBlock(NamedTuple):
    """The memory of a launch's parameters, with the offset of each.

    places: of the parameters, by the places of the arguments; others are constants. descriptors: indices and places of those.
    """

    format: struct.Struct
    offsets: list[int]
    places: dict[int, _ParameterPlace]
    descriptors: list[tuple[int, int]]


def _refused(call: int, error: int) -> RuntimeError:
    return RuntimeError(f"the CUDA driver refused call {call} of a recorded pass with error {error}")


@functools.lru_cache(_KEPT)
def _parameter_block(kinds: tuple[str, ...]) -> _ParameterBlock:
    """For arguments of these types, by Triton's names. Raises ValueError for one that is not known here."""
    text, size, offsets, places = "=", 0, list[int](), dict[int, _ParameterPlace]()
    for place, kind in enumerate((*kinds, *["u64" for _ in _NO_SCRATCH])):
        if kind == "constexpr":
            continue
        form = f"{_MAP_BYTES}s" if kind == "nvTmaDesc" else "Q" if kind.startswith("*") else _FORMATS.get(kind)
        if form is None:
            raise ValueError(kind)
        nbytes = struct.calcsize("=" + form)
        offset = -(-size // nbytes) * nbytes
        text, size = f"{text}{offset - size}x{form}", offset + nbytes
        offsets.append(offset)
        if place < len(kinds):
            patch = _TENSOR_MAP if nbytes == _MAP_BYTES else _HALF_WORD if nbytes == 4 else _WORD
            places[place] = _ParameterPlace(offset, patch)
    descriptors = [(index, place) for index, (place, (_, patch)) in enumerate(places.items()) if patch == _TENSOR_MAP]
    return _ParameterBlock(struct.Struct(text), offsets, places, descriptors)


def _joined(before: tuple[int, ...], x: Do) -> tuple[int, ...] | None:
    """A driver call and the next one as one; None unless both are memory operations of one stream, with arguments side by side."""
    kind, (place, count, *_) = x.call
    if kind != _OPERATE or before[:2] != (_OPERATE, x.stream):
        return None
    first, earlier = before[2:]
    together = earlier + count
    return (*before[:2], first, together) if place == first + MEMORY_OPERATION.size * earlier and together <= _TOGETHER else None


def _launched_early(calls: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same calls, with each launch as soon as its stream has what it waits for: other streams' calls take the host a while.

    Memory operations that come right behind that point stay before it, because other ranks may wait for them.
    """
    found: list[tuple[int, ...]] = []
    for call in calls:
        found.append(call)
        if call[0] != _LAUNCH:
            continue
        first = len(found) - 1
        while first and found[first - 1][:2] == (_AFTER, call[1]):
            first -= 1
        group = found[first:]
        del found[first:]
        awaited = {wait[2] for wait in group[:-1]}
        place = max((n for n, x in enumerate(found, 1) if x[1] == call[1] or (x[0] == _MARK and x[2] in awaited)), default=0)
        while place < len(found) and found[place][0] == _OPERATE:
            place += 1
        found[place:place] = group
    return found


def _descriptor(value: Any) -> bytes:
    """The copy engine's descriptor in an object of Triton's: its last bytes, at a multiple of their alignment."""
    begin = -(-(id(value) + object.__basicsize__) // _ALIGNED) * _ALIGNED
    if begin + _MAP_BYTES != id(value) + type(value).__basicsize__:
        raise ValueError(f"{type(value)} holds its descriptor elsewhere")
    return ctypes.string_at(begin, _MAP_BYTES)


@functools.cache
def driver_functions() -> Functions | None:
    """Those of this machine's driver; None if it lacks one: batched copies came with CUDA 12.8."""
    names = "cuLaunchKernelEx", "cuEventRecord", "cuStreamWaitEvent", "cuStreamBatchMemOp_v2", "cuMemcpyBatchAsync"
    try:
        library = ctypes.CDLL("libcuda.so.1")
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (*names, "cuTensorMapReplaceAddress")]
    except (OSError, AttributeError):
        return None
    kept = copy_options()
    return Functions((*(x or 0 for x in found), *map(ctypes.addressof, kept)), kept)
