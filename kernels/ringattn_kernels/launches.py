"""Launches of kernels whose arguments differ from call to call in addresses alone, made ready once.

For each launch Triton looks at all arguments to find the compiled kernel that fits them, and a tensor descriptor is checked and named
anew: together several times what the driver takes. Here the arguments of a first launch are kept, but for what moves; later ones of the
same kind have the same compiled kernel, and get new addresses.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from .table import TileTable

Moving = torch.Tensor | float | int | None


def launch(
    kernel: triton.JITFunction,
    table: TileTable,
    facts: tuple,
    moving: dict[str, Moving],
    make: Callable[[], tuple[int, dict[str, Any]]],
    *,
    num_warps: int,
) -> None:
    """`kernel[(programs,)](**arguments, num_warps=num_warps)`, where `make()` gives (programs, arguments); nothing without programs.

    moving: of the arguments those that may differ between launches of a kind: tensors, for descriptors those that they describe, and
    floats; integers do not.
    facts: what `make` depends on besides the table and all of these tensors but their addresses.
    """
    # Triton asks of an address whether it is a multiple of 16, and nothing of a float
    key = ("launch", kernel.fn, driver.active.get_current_device(), facts, *moving, *map(_kind, moving.values()))
    table.derived(key, lambda: _Ready(kernel, num_warps, *make(), moving))(moving)


def _kind(x: Moving) -> tuple:
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0
    return type(x), None if isinstance(x, float) else x


class _Ready:
    """A compiled kernel and its arguments, with gaps for those that move."""

    def __init__(
        self, kernel: triton.JITFunction, num_warps: int, programs: int, arguments: dict[str, Any], moving: dict[str, Moving]
    ) -> None:
        check(arguments, moving)
        self._launch: Callable[..., None] | None = None
        if programs > 0:
            self._launch = kernel.warmup(**arguments, num_warps=num_warps, grid=(programs,))[(programs, 1, 1)]
        names = kernel.arg_names
        self._fixed = [None if name in moving else arguments[name] for name in names]
        self._gaps = [(name, names.index(name), _fields(arguments[name])) for name in moving]

    def __call__(self, moving: dict[str, Moving]) -> None:
        if self._launch is None:
            return
        arguments = self._fixed.copy()
        for name, index, fields in self._gaps:
            arguments[index] = moving[name] if fields is None else _descriptor(fields, moving[name])
        self._launch(*arguments)


def check(arguments: dict[str, Any], moving: dict[str, Moving]) -> None:
    """Assert that `moving` names its values among the arguments, each tensor everywhere."""
    bases = {name: x.base if isinstance(x, TensorDescriptor) else x for name, x in arguments.items()}
    tensors = [x for x in moving.values() if isinstance(x, torch.Tensor)]
    assert all(bases[name] is x or (not isinstance(x, torch.Tensor) and bases[name] == x) for name, x in moving.items())
    assert not any(bases[name] is x for x in tensors for name in bases.keys() - moving.keys())


def _fields(argument: Any) -> dict[str, Any] | None:
    """What a tensor descriptor says besides the address."""
    return {**vars(argument), "base": None} if isinstance(argument, TensorDescriptor) else None


def _descriptor(fields: dict[str, Any], base: Moving) -> TensorDescriptor:
    """What is checked of one descriptor is true of others that differ in the address alone."""
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=base)
    return descriptor
