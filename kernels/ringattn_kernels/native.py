"""The parts in C. Triton compiles them as it compiles its own launchers, with the same compiler and cache.

Each has a twin in Python, which runs where that is impossible.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


@functools.cache
def submission() -> ModuleType | None:
    """`submission.c`, compiled; None where that is impossible."""
    return _compiled("submission", "short calls take the host longer", cuda=True)


@functools.cache
def tables() -> ModuleType | None:
    """`tables.c`, compiled; None where that is impossible."""
    return _compiled("tables", "new batches take the host longer", after="arrays")


def plans() -> ModuleType | None:
    """`plans.c`, compiled; None where that is impossible, or where nothing has imported Triton: that takes longer than many plans."""
    return None if sys.modules.get("triton") is None else _plans()


@functools.cache
def _plans() -> ModuleType | None:
    return _compiled("plans", "new batches take the host longer", after="arrays")


def integers(tables: Sequence[bytearray], *columns: int) -> tuple[Any, ...]:
    """Tables of int32 that `tables.c` wrote, as arrays of so many columns each."""
    return tuple([np.frombuffer(x, dtype=np.int32).reshape(-1, n) for x, n in zip(tables, columns)])


def numbers(array: bytearray, *columns: int) -> Any:
    """int64 that `plans.c` wrote, as an array, or as a table of so many columns."""
    return np.frombuffer(array, dtype=np.int64).reshape(-1, *columns)


def _compiled(name: str, otherwise: str, cuda: bool = False, after: str = "") -> ModuleType | None:
    """A file in C, compiled. otherwise: what follows where it cannot be. cuda: it includes CUDA's headers. after: a file before it."""
    try:
        import triton
        from triton.runtime.build import compile_module_from_src

        headers = [str(Path(triton.__file__).parent / "backends" / "nvidia" / "include")] if cuda else []
        source = "".join(Path(__file__).with_name(f"{part}.c").read_text() for part in (after, name) if part)
        return compile_module_from_src(source, f"ringattn_{name}", include_dirs=headers)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, subprocess.SubprocessError) as error:
        logger.info("%s, because %s.c could not be compiled: %s", otherwise, name, error)
        return None
