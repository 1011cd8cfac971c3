"""`Digested`, the base of layouts, masks and schedules: values that are known by a fingerprint of what they say.

The fingerprint stands for the value where no object can go: between ranks, as a key of caches, and in compiled graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

F = TypeVar("F", bound=Callable)


class Digested:
    """An immutable value, made by a frozen dataclass, with its `digest`: 32 hex digits, equal for equal values on any rank."""

    # computed when the value is made: torch.compile reads it, and cannot hash
    digest: str

    def _key(self) -> bytes:
        """What tells this value from all others."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.blake2b(self._key(), digest_size=16).hexdigest())
        self._remember()

    def _remember(self) -> None:
        with _lock:
            first = _alive.setdefault(self.digest, self)
        if first is not self:
            # the one that `find` knows stays alive as long as any of its equals
            object.__setattr__(self, "_first", first)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_first"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remember()


_alive: WeakValueDictionary[str, Digested] = WeakValueDictionary()
_lock = Lock()


def find(digest: str | None) -> Any:
    """The value with a digest, while it or an equal one is alive; None for None."""
    return None if digest is None else _alive[digest]


def constant(function: F) -> F:
    """Have torch.compile call `function` when it traces, and take what it returns for a constant.

    The same as `torch.compiler.assume_constant_result`, which imports the compiler, seconds of work, to set this mark.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
