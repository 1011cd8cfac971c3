"""`Halos`: the rows just before each segment, from the ranks that hold them; and the way back of their gradients.

Shapes: b batch, s tokens of this rank by position, c channels, m segments of this rank that follow others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import torch

from ..transport import Handle, Peer, Transport
from .segments import Segments


class HaloPiece(NamedTuple):
    """Rows of a rank (by position) that are rows `place` of the halo of its receiver's `number`-th following segment."""

    rank: int
    rows: slice
    receiver: int
    number: int
    place: slice


class Halos:
    """What one rank sends and receives for a convolution of some width."""

    def __init__(self, segments: Segments, transport: Transport, width: int) -> None:
        self._segments, self._transport, self._width = segments, transport, width

    def start_forward(self, x: torch.Tensor) -> PendingHalos:
        """Send the rows (b, s, c) that other ranks need. What comes are parts of halos (m, b, width - 1, c), in the dtype of x."""
        mine = self._transport.rank
        found = PendingHalos()
        sends, receives = [], []
        for peer in range(self._transport.size):
            out, into = self._pieces[mine, peer], self._pieces[peer, mine]
            if peer == mine:
                found.parts += [((piece.number, slice(None), piece.place), x[:, piece.rows]) for piece in out]
                continue
            if out:
                sends.append(Peer(peer, torch.cat([x[:, piece.rows] for piece in out], dim=1)))
            if into:
                target = x.new_empty(x.shape[0], count_rows(into), x.shape[2])
                receives.append(Peer(peer, target))
                parts = target.split([count_rows([piece]) for piece in into], dim=1)
                found.parts += [((piece.number, slice(None), piece.place), part) for piece, part in zip(into, parts)]
        found.start(self._transport, sends, receives)
        return found

    def start_backward(self, dhalos: torch.Tensor) -> PendingHalos:
        """Send the gradients (m, b, width - 1, c) of halos home. What comes are parts of gradients of rows (b, s, c)."""
        mine = self._transport.rank
        found = PendingHalos()
        sends, receives = [], []
        for peer in range(self._transport.size):
            out, into = self._pieces[peer, mine], self._pieces[mine, peer]
            if peer == mine:
                found.parts += [((slice(None), piece.rows), dhalos[piece.number, :, piece.place]) for piece in out]
                continue
            if out:
                sends.append(Peer(peer, torch.cat([dhalos[piece.number, :, piece.place] for piece in out], dim=1)))
            if into:
                target = dhalos.new_empty(dhalos.shape[1], count_rows(into), dhalos.shape[3])
                receives.append(Peer(peer, target))
                parts = target.split([count_rows([piece]) for piece in into], dim=1)
                found.parts += [((slice(None), piece.rows), part) for piece, part in zip(into, parts)]
        found.start(self._transport, sends, receives)
        return found

    @cached_property
    def _pieces(self) -> defaultdict[tuple[int, int], list[HaloPiece]]:
        return halo_pieces(self._segments, self._width)


class PendingHalos:
    """An exchange of rows under way: `parts` are to be added at places of a tensor, in this order."""

    def __init__(self) -> None:
        self.parts: list[tuple[tuple, torch.Tensor]] = []

    def start(self, transport: Transport, sends: list[Peer], receives: list[Peer]) -> None:
        self._sends = sends  # alive until they have gone
        self._handle: Handle = transport.exchange(sends, receives)

    def add_to(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor, once all parts have come and are added."""
        self._handle.wait()
        self._sends.clear()
        for place, part in self.parts:
            whole[place] += part
        return whole


def count_rows(pieces: Iterable[HaloPiece]) -> int:
    """The rows of some pieces."""
    return sum(piece.rows.stop - piece.rows.start for piece in pieces)


def halo_pieces(segments: Segments, width: int) -> defaultdict[tuple[int, int], list[HaloPiece]]:
    """The pieces of all halos of a convolution, by (rank that holds them, rank that needs them)."""
    found: defaultdict[tuple[int, int], list[HaloPiece]] = defaultdict(list)
    every, numbers = segments.every, defaultdict(int)
    for index, segment in enumerate(every):
        if segment.first:
            continue
        number, end, source = numbers[segment.rank], width - 1, index - 1
        numbers[segment.rank] += 1
        while end > 0:
            held = every[source]
            n = min(end, len(held))
            rows = slice(held.rows.stop - n, held.rows.stop)
            found[held.rank, segment.rank].append(HaloPiece(held.rank, rows, segment.rank, number, slice(end - n, end)))
            end, source = end - n, source - 1
            if held.first:
                break
    return found
