"""Names of the package ring_flash_attn that have no meaning here: an error names what takes their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def absent(module: str, names: Mapping[Any, str]) -> Callable[[str], object]:
    """`__getattr__` for a module: ImportError, with what takes its place, for each of `names`; AttributeError for others."""

    def find(name: str) -> object:
        if name in names:
            # an AttributeError would lose its message in `from module import name`
            raise ImportError(
                f"{name} is a part of the package ring_flash_attn's own ring, which ringattn does not have: use {names[name]}"
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def absent_passes(module: str, kind: str, *others: str) -> Callable[[str], object]:
    """`absent` of the passes of the module's functions: of the class `kind`, and of both passes and `others`."""
    name = module.rpartition(".")[2]
    passes = (kind, f"{name}_forward", f"{name}_backward", *others)
    return absent(module, dict.fromkeys(passes, f"{name}_func, whose backward pass is autograd's"))
