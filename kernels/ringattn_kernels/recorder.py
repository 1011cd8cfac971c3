"""Where passes note what they do on the GPU, while `recordings` listens to this thread; and whether they only rehearse it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._C import _DisableTorchDispatch as _Unwatched

if TYPE_CHECKING:
    import torch

    from .submission import Number, Submission

    # the number that stands for a tensor's address, None if the address stays, or for an integer of this name; raises ValueError if that
    # cannot be told
    Find = Callable[[torch.Tensor | str], Number | None]
    # what each later run gives for the numbers that a step has asked for
    Later = Callable[[], list[int]]
    Step = Callable[[Submission, Find], Later | None]


class Unexplained(Exception):
    """A pass that is rehearsed would do what cannot be listed."""


class Recorder(threading.local):
    """steps: what the pass of this thread has done so far, each as a function that lists it in a submission; None if nobody listens.

    explained: whether all that the pass has done so far is noted.
    rehearses: the pass is given tensors without memory, and nothing it notes is done.
    unwatched: torch shows nobody its operators while this lives; see `aside`.
    """

    steps: list[Any] | None = None
    explained = True
    rehearses = False
    unwatched: Any = None

    def note(self, step: Step) -> None:
        """The pass has done this now."""
        if self.steps is not None and self.explained:
            self.steps.append(step)

    def cannot_note(self, what: str) -> None:
        """The pass does something now that no step can repeat. Raises `Unexplained` in a rehearsal, where nothing may be done."""
        if self.rehearses:
            raise Unexplained(what)
        if self.steps is not None:
            self.explained = False
            self.steps.clear()  # they hold tensors


class _Aside:
    """`with aside:` around what a pass makes once, for itself and for others, such as tables: it is no part of the pass. Not nested."""

    def __enter__(self) -> None:
        assert recorder.unwatched is None
        if recorder.steps is not None:
            recorder.unwatched = _Unwatched()

    def __exit__(self, *error: object) -> None:
        recorder.unwatched = None


recorder = Recorder()
aside = _Aside()
