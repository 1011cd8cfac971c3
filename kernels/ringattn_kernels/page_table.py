"""`PageTable`: where a pool of pages holds the keys of some sequences. This module imports torch only.

Shapes: b sequences, n columns of a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_WINDOW = 1 << 30  # a window that hides nothing


@dataclass(frozen=True, eq=False)
class PageTable:
    """Pages of this rank that hold the keys of b sequences. All tensors lie on the device of the pool, and may change between launches.

    lengths  (b,) int64: tokens of each sequence, on all ranks together, less than 2**30
    first    (b,) int64: the number, within the sequence, of the first page that this rank holds
    pages    (b, n) int32: the pool's page of column c, which is page `first + c * ranks` of the sequence
    ranks    how many ranks hold pages of a sequence in turn
    """

    lengths: torch.Tensor
    first: torch.Tensor
    pages: torch.Tensor
    ranks: int
