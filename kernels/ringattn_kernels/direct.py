"""Launches past Triton's own preparation of arguments, which takes the host several times as long as the driver's launch.

Triton asks each tensor for its address and the driver what memory that is, and describes each block for the copy engine anew. Here the
arguments lie as the compiled launcher takes them: addresses as integers, and descriptors that are kept by address, because the allocator
of torch gives the same addresses again. Releases of Triton whose launcher looks otherwise launch as Triton does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

_KEPT = 64  # descriptors of an argument
_STREAM = 3  # its place among the launcher's arguments
FIRST = 13  # the place of the kernel's first


class Form:
    """A compiled kernel as its launcher takes it: what launches with other tables, grids and tensors have in common.

    arguments: those of one launch, in the order of their names. Raises an error where this release of Triton launches in another way.
    """

    def __init__(self, compiled: Any, names: list[str], arguments: list[Any]) -> None:
        run = compiled.run
        self.launcher, metadata, indices = _unwrapped(run)
        self.function = compiled.function
        warps, programs_together, shared = compiled.packed_metadata
        self.sizes = 32 * warps, shared  # threads, and bytes of shared memory
        # whether its programs begin while the launch before it ends (programmatic dependent launch)
        self.early = bool(run.launch_pdl)
        # whether nothing else but sizes and arguments is said to the driver
        self.plain = programs_together == 1 and not run.launch_cooperative_grid
        # the stream comes behind the grid; two sorts of scratch memory, what hooks are told, and two hooks: none
        head = 0, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None
        self.head: list[Any] = [*head, compiled.packed_metadata, None, None, None]
        # each argument's name, its place among the launcher's, and what is known of its descriptor
        self.order: list[tuple[str, int, Any]] = []
        self._describers: dict[tuple, Describer] = {}
        described, signature = iter(metadata), list(compiled.src.signature.values())
        kinds = list[str]()
        for index, (name, argument) in enumerate(zip(names, arguments, strict=True)):
            about = next(described) if index in indices else None
            self.order.append((name, FIRST + len(kinds), about))
            if about is None:
                kinds.append(signature[index])
            else:
                dims = len(argument.shape)
                kinds += ["nvTmaDesc", *["i32"] * dims, *["i64"] * dims]
        self.kinds = tuple(kinds)  # Triton's names of the arguments' types

    def describer(self, name: str, descriptor: Any, about: Any) -> Describer:
        """What makes the copy engine's descriptor of an argument at any address. Launches share those of tensors of one kind."""
        key = name, *descriptor.shape, *descriptor.strides
        found = self._describers.get(key)
        if found is None:
            if len(self._describers) >= _KEPT:
                self._describers.clear()
            found = self._describers[key] = Describer(descriptor, about)
        return found


class DirectLaunch:
    """A compiled kernel on a grid, with all its arguments but those that move."""

    def __init__(self, form: Form, grid: tuple[int, int, int], arguments: dict[str, Any], moving: Collection[str]) -> None:
        self._launcher, self.function, self.sizes, self._order = form.launcher, form.function, form.sizes, form.order
        self.kinds, self.plain, self.early, self.grid = form.kinds, form.plain, form.early, grid
        self._arguments = listed = [*grid, *form.head]
        # of what moves: its name, its place among the launcher's arguments, and what makes a descriptor of an address
        self.places: list[tuple[str, int, Describer | None]] = []
        self._kept: dict[str, Any] = {}  # tensors whose addresses do not move, and descriptors of such
        for name, place, about in form.order:
            argument = arguments[name]
            if name in moving:
                self.places.append((name, place, None if about is None else form.describer(name, argument, about)))
                listed.append(None)
            elif about is not None:
                listed.append(_of_descriptor(argument, about)[0])
                self._kept[name] = argument
            elif isinstance(argument, torch.Tensor):
                listed.append(argument.data_ptr())
                self._kept[name] = argument
            else:
                listed.append(argument)
            if about is not None:
                listed += *argument.shape, *argument.strides

    @property
    def describes(self) -> bool:
        """Whether a tensor that moves is given as a descriptor."""
        return any(describe is not None for *_, describe in self.places)

    def __call__(self, moving: dict[str, Any]) -> None:
        """Launch with these tensors (for a descriptor, the tensor that it describes) and numbers."""
        self.queue(self.template(moving), driver.active.get_current_stream(driver.active.get_current_device()))

    def as_triton_takes_it(self, moving: dict[str, Any]) -> list[Any]:
        """The kernel's arguments for Triton's own launch."""
        describers = {name: describe for name, _, describe in self.places}
        listed = list[Any]()
        for name, place, _ in self._order:
            if name in describers:
                describe = describers[name]
                listed.append(moving[name] if describe is None else describe.move(moving[name]))
            else:
                listed.append(self._kept.get(name, self._arguments[place]))
        return listed

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


def form_of(compiled: Any, names: list[str], arguments: list[Any]) -> Form | None:
    """A `Form`, or None where this release of Triton launches in another way, or the kernel needs scratch memory."""
    try:
        return Form(compiled, names, arguments)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
        return None


def describes(argument: Any) -> bool:
    """Whether an argument is a descriptor. Asking a tensor for what it does not have takes long."""
    return not isinstance(argument, torch.Tensor) and hasattr(argument, "block_shape")


def mover(argument: Any) -> Callable[[Any], Any] | None:
    """What makes a descriptor of the same block of another tensor, which needs no check of its own; None for what is no descriptor."""
    if not describes(argument):
        return None
    kind, fields = type(argument), {**vars(argument), "base": None}

    def move(base: Any) -> Any:
        descriptor = object.__new__(kind)
        descriptor.__dict__ = {**fields, "base": base}
        return descriptor

    return move


def hooked() -> bool:
    """Whether somebody, such as a profiler, asked Triton to be told of launches."""
    # asked in every call: one function, not three
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))


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


class Describer:
    """Makes the copy engine's descriptor of the same block at any address; the latest are kept. move: makes Triton's, of a tensor."""

    def __init__(self, descriptor: Any, metadata: Any) -> None:
        move = mover(descriptor)
        assert move is not None
        self.move, self._metadata, self._known = move, metadata, dict[int, Any]()

    def __call__(self, address: int) -> Any:
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[address] = _of_descriptor(self.move(_Address(address)), self._metadata)[0]
        return found


class _Address:
    """What stands in for a tensor."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address
