"""Functions that torch.compile leaves alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable)


def breaks_graphs(function: _Function) -> _Function:
    """Let torch.compile leave a function and all that it calls alone, at the cost of a graph break.

    `torch.compiler.disable` does it, but first imports the compiler, which takes seconds: only where it is there already.
    """

    disabled: list[Callable] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not disabled and "torch._dynamo" in sys.modules:
            disabled.append(torch.compiler.disable(function))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    run._torchdynamo_disable = True  # pyrefly: ignore[missing-attribute]
    return run  # pyrefly: ignore[bad-return]
