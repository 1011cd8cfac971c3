"""Launches past Triton's own preparation of arguments, which takes the host several times as long as the driver's launch.

Triton asks each tensor for its address and the driver what memory that is, and describes each block for the copy engine anew. Here the
arguments lie as the compiled launcher takes them: addresses as integers, and descriptors that are kept by address, because the allocator
of torch gives the same addresses again. Releases of Triton whose launcher looks otherwise launch as Triton does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

_KEPT = 64  # descriptors of an argument
_STREAM = 3  # its place among the launcher's arguments
FIRST = 13  # the place of the kernel's first


class DirectLaunch:
    """A compiled kernel on a grid, with all its arguments but those that move, in the order of their names."""

    def __init__(
        self, compiled: Any, grid: tuple[int, int, int], names: list[str], arguments: list[Any], moving: frozenset[str]
    ) -> None:
        run = compiled.run
        self._launcher, metadata, indices = _unwrapped(run)
        self.grid, self.function = grid, compiled.function
        warps, programs_together, shared = compiled.packed_metadata
        self.sizes = 32 * warps, shared  # threads, and bytes of shared memory
        signature = list(compiled.src.signature.values())
        self.kinds: list[str] = []  # Triton's names of the arguments' types
        # whether nothing but sizes and arguments is said to the driver
        self.plain = programs_together == 1 and not run.launch_cooperative_grid and not run.launch_pdl
        # the stream comes behind the grid; two sorts of scratch memory, what hooks are told, and two hooks: none
        head = *grid, 0, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None
        self._arguments: list[Any] = [*head, compiled.packed_metadata, None, None, None]
        # of what moves: its name, its place among the launcher's arguments, and what makes a descriptor of an address
        self.places: list[tuple[str, int, Callable[[int], Any] | None]] = []
        self._kept = []  # the tensors whose addresses do not move
        described = iter(metadata)
        for index, (name, argument) in enumerate(zip(names, arguments, strict=True)):
            place, moves, describe = len(self._arguments), name in moving, None
            if index in indices:
                about = next(described)
                describe = _describer(argument, about)
                self._arguments += _of_descriptor(argument, about)
                dims = len(argument.shape)
                self.kinds += ["nvTmaDesc", *["i32"] * dims, *["i64"] * dims]
            else:
                self._arguments.append(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
                self.kinds.append(signature[index])
            if moves:
                self._arguments[place] = None
                self.places.append((name, place, describe))
            else:
                self._kept.append(argument)

    @property
    def describes(self) -> bool:
        """Whether a tensor that moves is given as a descriptor."""
        return any(describe is not None for *_, describe in self.places)

    def __call__(self, moving: dict[str, Any]) -> None:
        """Launch with these tensors (for a descriptor, the tensor that it describes) and numbers."""
        self.queue(self.template(moving), driver.active.get_current_stream(driver.active.get_current_device()))

    def template(self, moving: dict[str, Any]) -> list[Any]:
        """All arguments of the launcher, with what moves."""
        arguments = self._arguments.copy()
        for name, place, describe in self.places:
            value = moving[name]
            if isinstance(value, torch.Tensor):
                value = value.data_ptr()
            arguments[place] = value if describe is None else describe(value)
        return arguments

    def queue(self, arguments: list[Any], stream: int) -> None:
        """Launch with all arguments on a stream."""
        arguments[_STREAM] = stream
        self._launcher(*arguments)


def direct_launch(
    compiled: Any, grid: tuple[int, int, int], names: list[str], arguments: list[Any], moving: frozenset[str]
) -> DirectLaunch | None:
    """A `DirectLaunch`, or None where this release of Triton launches in another way, or the kernel needs scratch memory."""
    try:
        return DirectLaunch(compiled, grid, names, arguments, moving)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
        return None


def mover(argument: Any) -> Callable[[Any], Any] | None:
    """What makes a descriptor of the same block of another tensor, which needs no check of its own; None for what is no descriptor."""
    if not hasattr(argument, "block_shape"):
        return None
    kind, fields = type(argument), {**vars(argument), "base": None}

    def move(base: Any) -> Any:
        descriptor = object.__new__(kind)
        descriptor.__dict__ = {**fields, "base": base}
        return descriptor

    return move


def hooked() -> bool:
    """Whether somebody, such as a profiler, asked Triton to be told of launches."""
    return _asks(knobs.runtime.launch_enter_hook) or _asks(knobs.runtime.launch_exit_hook)


def _asks(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


def _unwrapped(run: Any) -> tuple[Callable[..., None], list[Any], frozenset[int]]:
    """(the compiled launcher, what descriptors need, and which arguments these are). Raises where it looks otherwise."""
    if run.global_scratch_size or run.profile_scratch_size:
        raise ValueError
    launch = run.launch
    if not hasattr(launch, "__code__"):
        return launch, [], frozenset()
    cells = dict(zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__)))
    metadata = cells["tensordesc_meta"]
    if None in metadata:
        raise ValueError
    return cells["launcher"], metadata, frozenset(cells["tensordesc_indices"])


def _of_descriptor(descriptor: Any, metadata: Any) -> list[Any]:
    """What the launcher takes for a descriptor; the first is the copy engine's own."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, metadata)


def _describer(descriptor: Any, metadata: Any) -> Callable[[int], Any]:
    """What makes the copy engine's descriptor of the same block at another address; the latest are kept."""
    known: dict[int, Any] = {}
    move = mover(descriptor)
    assert move is not None

    def describe(address: int) -> Any:
        found = known.get(address)
        if found is None:
            if len(known) >= _KEPT:
                known.clear()
            found = known[address] = _of_descriptor(move(_Address(address)), metadata)[0]
        return found

    return describe


class _Address:
    """What stands in for a tensor."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address
