"""Launches made ready once, for kernels whose arguments differ from call to call only in addresses.

For each launch Triton looks at all arguments to find the compiled kernel that fits, and checks and names tensor descriptors anew.
This takes several times as long as the driver does. Here the arguments of a first launch are kept, except those that move. Later launches
of the same kind use the same compiled kernel with new addresses.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.runtime import driver

from .compiled import compiled_for
from .direct import FIRST, DirectLaunch, describes, hooked, mover
from .recorder import recorder
from .submission import Number, Submission
from .table import TileTable, kind

if TYPE_CHECKING:
    from .recorder import Find

Moving = torch.Tensor | float | int | None
Grid = int | tuple[int, ...]
Gap = tuple[str, int, Callable[[Any], Any] | None]  # of an argument that moves: its name, its place, and what makes a descriptor

_KEPT = 256  # launches without a table


def strides(**tensors: torch.Tensor) -> dict[str, int]:
    """`stride_qb`, `stride_qs` and `stride_qh` of q (b, s, h, d), and so on: arguments of a kernel."""
    return {f"stride_{name}{axis}": stride for name, x in tensors.items() for axis, stride in zip("bsh", x.stride())}


def results(
    out: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    state: tuple[torch.Tensor, ...] | None,
    sinks: torch.Tensor | None,
) -> dict[str, Moving]:
    """Where a launch of a forward leaves its rows, the state that it goes on from, and the sinks that they count: arguments of a kernel."""
    rows = dict(out_ptr=out, state_ptr=out if state is None else state[0], row_max_ptr=row_max, row_sum_ptr=row_sum)
    return rows | dict(sinks_ptr=sinks)


def launch(
    kernel: triton.JITFunction,
    table: TileTable | None,
    facts: tuple,
    moving: dict[str, Moving],
    make: Callable[[], tuple[Grid, dict[str, Any]]],
    **options: Any,
) -> "Ready | None":
    """`kernel[grid](**arguments, **options)`, where `make()` gives (grid, arguments). Does nothing without programs.

    Returns what launches it again; None for an interpreted kernel.

    table: the launch is kept with it. Launches without a table: the latest _KEPT are kept.
    moving: the arguments that may differ between launches of a kind: tensors (for a descriptor, the tensor that it describes), floats,
    and integers of 32 bits that the kernel does not specialize.
    facts: what else `make` and the options depend on, besides the table and these tensors (except their addresses).
    options: of Triton's, such as num_warps.
    """
    if not isinstance(kernel, triton.JITFunction):  # it is an interpreted one
        recorder.cannot_note("a launch of Triton's own")
        grid, arguments = make()
        sizes = grid if isinstance(grid, tuple) else (grid,)
        if min(sizes) > 0:
            kernel[sizes](**arguments, **options)
        return None
    # Triton asks whether an address is a multiple of 16, and asks nothing about a float
    kinds = [
        kind(x) if isinstance(x, torch.Tensor) else float if isinstance(x, float) else _kind_of_integer(kernel, name, x)
        for name, x in moving.items()
    ]
    key = ("launch", kernel.fn, driver.active.get_current_device(), facts, *moving, *kinds)
    kept = _kept if table is None else table.derived
    ready = kept(key, lambda: Ready(kernel, options, *make(), moving))
    ready(moving)
    return ready


def _kind_of_integer(kernel: triton.JITFunction, name: str, x: int | None) -> Any:
    return int if x is not None and name in _not_specialized(kernel) else x


@functools.cache
def _not_specialized(kernel: triton.JITFunction) -> frozenset[str]:
    """Its integers that may be any of 32 bits in one compiled kernel."""
    return frozenset(parameter.name for parameter in kernel.params if parameter.do_not_specialize)


def _kept(key: tuple, build: Callable[[], "Ready"]) -> "Ready":
    """As `TileTable.derived`, for a launch without a table."""
    place = _place(key)
    if not place:
        place.append(build())
    return place[0]


@functools.lru_cache(_KEPT)
def _place(key: tuple) -> list["Ready"]:
    return []


class Ready:
    """A compiled kernel and its arguments, with gaps for those that move."""

    def __init__(
        self,
        kernel: triton.JITFunction,
        options: dict[str, Any],
        grid: Grid,
        arguments: dict[str, Any],
        moving: dict[str, Moving],
    ) -> None:
        self._compiled: Any = None
        self._direct: DirectLaunch | None = None
        self._grid = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
        if min(self._grid) > 0:
            found = compiled_for(kernel, arguments, self._grid, options)
            self._compiled = found.kernel
            if found.form is None:
                self._fixed, self._gaps = parted(kernel.arg_names, arguments, moving)
            else:
                self._direct = DirectLaunch(found.form, self._grid, arguments, moving)

    def __call__(self, moving: dict[str, Moving]) -> None:
        if self._compiled is None:
            return
        if recorder.steps is not None:
            recorder.note(
                RecordedLaunch(self._direct, dict(moving), driver.active.get_current_stream(driver.active.get_current_device()))
            )
            if recorder.rehearses:
                return
        if self._direct is not None:
            if hooked():
                self._compiled[self._grid](*self._direct.as_triton_takes_it(moving))
            else:
                self._direct(moving)
            return
        arguments = self._fixed.copy()
        for name, index, move in self._gaps:
            arguments[index] = moving[name] if move is None else move(moving[name])
        self._compiled[self._grid](*arguments)

    def repeat(self, moving: dict[str, Moving]) -> "Repeat | None":
        """What launches it with other tensors, and with the same numbers; None where that needs Triton."""
        return None if self._direct is None or self._direct.describes else Repeat(self._direct, moving)


class Repeat:
    """A launch for whoever has compared all of its numbers, and all that a kernel is compiled for: only tensors' addresses differ.

    It says nothing to a recorder, and nothing to hooks.
    """

    def __init__(self, direct: DirectLaunch, moving: dict[str, Moving]) -> None:
        self._queue, self._arguments = direct.queue, direct.template(moving)
        self._places = [(name, place) for name, place, _ in direct.places if isinstance(moving[name], torch.Tensor)]

    def __call__(self, addresses: dict[str, int], stream: int) -> None:
        """Launch with tensors at these addresses."""
        arguments = self._arguments.copy()
        for name, place in self._places:
            arguments[place] = addresses[name]
        self._queue(arguments, stream)


class RecordedLaunch:
    """A launch that a pass has made, if it was a direct one, on a stream."""

    def __init__(self, direct: DirectLaunch | None, moving: dict[str, Moving], stream: int) -> None:
        self._direct, self._moving, self._stream = direct, moving, stream

    def __call__(self, submission: Submission, find: "Find") -> None:
        direct = self._direct
        if direct is None or not direct.plain:
            raise ValueError("not every launch can be listed")
        numbers = dict[int, Number]()
        for name, place, _ in direct.places:
            x = self._moving[name]
            number = find(x) if isinstance(x, torch.Tensor) else find(name) if type(x) is int else None
            if number is not None:
                numbers[place - FIRST] = number
        submission.launch(direct, direct.template(self._moving)[FIRST:], numbers, self._stream)


def parted(names: list[str], arguments: dict[str, Any], moving: dict[str, Moving]) -> tuple[list[Any], list[Gap]]:
    """(arguments with None for those that move; of these the name, the place, and what makes a descriptor, as `mover` does).

    Asserts that `moving` names its values among the arguments, each tensor everywhere.
    """
    fixed, gaps = [], []
    tensors = {id(x) for x in moving.values() if isinstance(x, torch.Tensor)}
    for place, name in enumerate(names):
        x = arguments[name]
        if name not in moving:
            fixed.append(x)
            continue
        move, given = mover(x), moving[name]
        base = x if move is None else x.base
        assert base is given or (not isinstance(given, torch.Tensor) and base == given), name
        fixed.append(None)
        gaps.append((name, place, move))
    assert len(gaps) == len(moving)
    described = [x.base for x in fixed if x is not None and type(x) is not int and describes(x)]
    assert tensors.isdisjoint(map(id, fixed)) and tensors.isdisjoint(map(id, described)), (
        "a tensor that moves has another name, too"
    )
    return fixed, gaps
