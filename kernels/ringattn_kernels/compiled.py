"""Compiled kernels, found by what Triton asks of the arguments: a launch over a tile table never seen finds its kernel without Triton.

Triton's own way looks at each argument, at the options and at every global value that the kernel has read. Here the kernels that it
found are kept by the facts that it compiles for, or by more: dtypes and alignment of tensors, blocks of descriptors, constants, and of
other integers their width, whether they are 1, and whether 16 divides them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from .direct import Form, describes, form_of

_KEPT = 1024  # compiled kernels
_WIDE = 1 << 31  # integers from here on have more than 32 bits
_ALIGNED = 16  # bytes of an address, and the divisor of an integer, that Triton asks for
_CONSTANT, _FREE, _ASKED = range(3)  # kinds of parameters: a constant, an integer of any value, one that is specialized
_OF_A_TENSOR = {"base", "shape", "strides"}  # of a descriptor's fields


@dataclass(frozen=True, eq=False)
class Compiled:
    """A kernel that Triton has compiled, and how `direct` launches it; None where Triton has to."""

    kernel: Any
    form: Form | None


def compiled_for(
    kernel: triton.JITFunction, arguments: dict[str, Any], grid: tuple[int, int, int], options: dict[str, Any]
) -> Compiled:
    """The kernel that Triton compiles for these arguments and options on the current device."""

    def find() -> Compiled:
        found = kernel.warmup(**arguments, **options, grid=grid)
        found[grid]  # loads it onto the device
        names = kernel.arg_names
        return Compiled(found, form_of(found, names, [arguments[name] for name in names]))

    facts = specialization(kernel, arguments)
    if facts is None:
        return find()
    try:
        place = _place((kernel.fn, driver.active.get_current_device(), *sorted(options.items()), *_modes(kernel), *facts))
    except TypeError:  # a constant without a hash
        return find()
    if not place:
        place.append(find())
    return place[0]


def specialization(kernel: triton.JITFunction, arguments: dict[str, Any]) -> list | None:
    """What Triton asks of these arguments, or more; None if there are some that are not known here."""
    parameters = _parameters(kernel)
    if len(arguments) != len(parameters):
        return None
    facts: list = []
    for name, kind in parameters:
        x = arguments[name]
        of = type(x)
        if kind == _CONSTANT:
            facts += of, x
        elif of is int:
            small = -_WIDE <= x < _WIDE
            facts += (int, small or x.bit_length()) if kind == _FREE else (int, small or x.bit_length(), x == 1, x % _ALIGNED == 0)
        elif x is None:
            facts.append(None)
        elif isinstance(x, torch.Tensor):
            facts += x.dtype, x.data_ptr() % _ALIGNED == 0
        elif of is float:
            facts.append(float)
        elif of is bool:
            facts += bool, x
        elif describes(x):
            facts.append(_of_descriptor(x))
        else:
            return None
    return facts


def _of_descriptor(x: Any) -> tuple:
    """All of a descriptor but its tensor; of that, the dtype and the number of dimensions."""
    fields = [tuple(value) if isinstance(value, list) else value for name, value in vars(x).items() if name not in _OF_A_TENSOR]
    return type(x), x.base.dtype, len(x.shape), *fields


def _modes(kernel: triton.JITFunction) -> tuple:
    """What else Triton compiles for."""
    return kernel.debug or knobs.runtime.debug, knobs.compilation.instrumentation_mode


@functools.cache
def _parameters(kernel: triton.JITFunction) -> list[tuple[str, int]]:
    """The names of a kernel's parameters, and their kinds."""
    return [(x.name, _CONSTANT if x.is_constexpr else _FREE if x.do_not_specialize else _ASKED) for x in kernel.params]


@functools.lru_cache(_KEPT)
def _place(key: tuple) -> list[Compiled]:
    return []
