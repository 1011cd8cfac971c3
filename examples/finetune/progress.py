"""What `finetune_long_document.py` says of its steps: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

EVERY = 5.0  # seconds between lines in a file


class Progress:
    """Shown on stderr, unless it is `hidden`. A file gets whole lines, without carriage returns, and always the last step's."""

    def __init__(self, first: int, steps: int, hidden: bool) -> None:
        self.steps = steps
        self.lines = not hidden and not sys.stderr.isatty()
        self.bar = tqdm(initial=first, total=steps, disable=hidden or self.lines, desc="training")
        self.said = -EVERY

    def step(self, number: int, figures: str) -> None:
        """After a step, of which `number` is the count from 1."""
        self.bar.set_postfix_str(figures, refresh=False)
        self.bar.update()
        now = time.monotonic()
        if self.lines and (number == self.steps or now - self.said >= EVERY):
            self.said = now
            print(f"training: step {number} of {self.steps}, {figures}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self.bar.close()
