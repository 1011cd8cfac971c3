"""`Repeats`: whether passes of new kinds come again; `Replays`: the recordings of one owner, who shares that with others."""

from __future__ import annotations

from typing import Any

_TRIES = 8


class Repeats:
    """Whether it pays to record a pass of a new kind in its first call, which then takes the host less than an unrecorded second call does.

    A model's layers make each pass several times, with another batch in each step. A single layer makes each pass once.
    """

    def __init__(self) -> None:
        self._new = _TRIES  # passes of new kinds since one came again
        self._failed: dict[tuple, int] = {}

    def again(self) -> None:
        """A pass came again."""
        self._new = 0

    def failed(self, facts: tuple, nbytes: int) -> None:
        """A pass with inputs of so many bytes could not be recorded in its first call."""
        self._failed[facts] = min(nbytes, self._failed.get(facts, nbytes))

    def expected(self, facts: tuple, nbytes: int) -> bool:
        """Whether this pass of a new kind is to be recorded: one of the latest _TRIES came again, and none as large has failed."""
        self._new += 1
        return self._new <= _TRIES and nbytes < self._failed.get(facts, nbytes + 1)


class Replays(dict[tuple, Any]):
    """The recordings of one owner, by all that they depend on. repeats: of all owners in the same place."""

    def __init__(self, repeats: Repeats) -> None:
        super().__init__()
        self.repeats = repeats
