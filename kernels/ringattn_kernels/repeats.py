"""`Repeats`: whether passes of new kinds come again; `Replays`: the recordings of one owner, who shares that with others."""

from __future__ import annotations

from typing import Any

_TRIES = 8


class Repeats:
    """Whether it pays to record a pass of a new kind in its first call: that costs the host less than a second call that is not replayed.

    A model's layers make each pass several times, with another batch in each step. A single layer makes each pass once.
    """

    def __init__(self) -> None:
        self._new = _TRIES  # passes of new kinds since one came again

    def again(self) -> None:
        """A pass came again."""
        self._new = 0

    def expected(self) -> bool:
        """Whether this pass of a new kind will come again: one of the latest _TRIES did."""
        self._new += 1
        return self._new <= _TRIES


class Replays(dict[tuple, Any]):
    """The recordings of one owner, by all that they depend on. repeats: of all owners in the same place."""

    def __init__(self, repeats: Repeats) -> None:
        super().__init__()
        self.repeats = repeats
