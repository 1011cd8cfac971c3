"""A unit of processor time, for bounds that hold on any machine, also while other programs run."""

from __future__ import annotations

import time

import numpy as np


def one_sort() -> float:
    """Seconds of this thread's processor time to sort 2^17 pairs of numbers: 25 ms on a machine that plans a million tokens in 50 ms."""
    keys = np.random.default_rng(0).integers(0, 1 << 20, (2, 1 << 17))
    start = time.thread_time()
    np.lexsort(keys)
    return time.thread_time() - start
