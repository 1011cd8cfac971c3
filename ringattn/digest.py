"""`Digested`, the base of layouts, masks and schedules: immutable values with a fingerprint of their content.

The fingerprint stands for the value where an object cannot be used: between ranks, as a key of caches, and in compiled graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

F = TypeVar("F", bound=Callable)


class Digested:
    """An immutable value with its `digest`: 32 hex digits, which are the same for equal values on all ranks."""

    # computed when the value is made: torch.compile can read it but cannot trace the hashing
    digest: str

    def _key(self) -> bytes:
        """Bytes that differ for any two different values."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.blake2b(self._key(), digest_size=16).hexdigest())
        self._remember()

    def _remember(self) -> None:
        with _lock:
            first = _alive.setdefault(self.digest, self)
        if first is not self:
            # keep the value that `find` returns alive as long as any equal value
            object.__setattr__(self, "_first", first)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_first", "_latest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remember()


_alive: WeakValueDictionary[str, Digested] = WeakValueDictionary()
_lock = Lock()


def find(digest: str | None) -> Any:
    """The value with this digest, as long as it or an equal value is alive; None for None."""
    return None if digest is None else _alive[digest]


def constant(function: F) -> F:
    """Make torch.compile call `function` when it traces, and treat the result as a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but first imports the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function
