"""Where passes note what they do on the GPU, while `recordings` listens to this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .submission import Number, Submission

    # the number that stands for a tensor's address, None if the address stays; raises ValueError if that cannot be told
    Find = Callable[[torch.Tensor], Number | None]
    # what each later run gives for the numbers that a step has asked for
    Later = Callable[[], list[int]]
    Step = Callable[[Submission, Find], Later | None]


class Recorder(threading.local):
    """steps: what the pass of this thread has done so far, each as a function that lists it in a submission; None if nobody listens."""

    steps: list[Any] | None = None

    def note(self, step: Step) -> None:
        """The pass has done this now."""
        if self.steps is not None:
            self.steps.append(step)


recorder = Recorder()
