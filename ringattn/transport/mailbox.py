"""Small tensors that every rank gives to every other, by one kernel on each GPU that writes into memory which all ranks map.

Copy engines leave the multiprocessors to others, but take several operations of some microseconds each. Where nothing else runs, as
between the attention of a new token and the merge of its partials, a kernel is faster.
"""

from __future__ import annotations

import torch

from .cuda_memory import allocate, keep_while_captured, map_arenas
from .meeting import Meeting

_ROOM = 2 << 20  # bytes of a rank's row


class Mailbox:
    """A rank's memory for the rows of the other ranks, on its GPU; the others can write to it once all ranks have called `meet`."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        from ringattn_kernels.mailbox import flag_words

        self.rank, self.size, self.device = rank, size, device
        # flags, and two halves of a place for each rank
        self._flags = 4 * flag_words(size)
        self._arena = allocate(device, self._flags + 2 * size * _ROOM, zeros=self._flags)
        self._turns = torch.zeros(flag_words(1), dtype=torch.int32, device=device)
        self._last: torch.cuda.Stream | None = None

    def meet(self, meeting: Meeting) -> None:
        """Map the other ranks' memory."""
        self._handle, bases = map_arenas(self._arena, meeting, self.rank, self.size)
        self._bases = torch.tensor(bases, dtype=torch.int64, device=self.device)

    def __del__(self) -> None:
        keep_while_captured(getattr(self, "_handle", None), self._arena)

    def takes(self, rows: torch.Tensor) -> bool:
        """Whether there is room for a row of these."""
        return rows[0].nbytes <= _ROOM and rows[0].nbytes % 4 == 0

    def all_gather(self, rows: torch.Tensor) -> None:
        """As `Transport.all_gather`. Calls run in the order in which the host makes them, whatever their streams."""
        from ringattn_kernels.mailbox import all_gather

        current = torch.cuda.current_stream(self.device)
        if not torch.cuda.is_current_stream_capturing():
            if self._last is not None and self._last != current:
                current.wait_stream(self._last)
            self._last = current
        all_gather(rows.view(torch.int32), self._arena.view(torch.int32), self._bases, self._turns, self.rank)
