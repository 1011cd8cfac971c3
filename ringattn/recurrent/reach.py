"""How far a state before a segment reaches into it: rows after that need not know the state.

Token t multiplies the state by a matrix of spectral norm at most `max exp(decay_t)`, with the delta rule times
`max(1, |1 - beta_t |k_t|^2|)`; without it each row of the state has decays of its own. Where the product of these since the segment
began is less than the dtype of states can hold, the state before the segment is forgotten. Many layers forget within hundreds or
thousands of rows of a segment that has tens of thousands. The rows until then are the segment's head, the others its tail: a tail begins
from the state that its head has made from zero.

The host must know how many rows a head has: it waits once for the device, in calls with long segments that follow others.

Shapes: b batch, s' rows of segments that follow others, h heads of v.
"""

from __future__ import annotations

import torch

from .. import check
from .kernels import repeated
from .segments import OwnSegments

SHORTEST = 4096  # rows of a segment for which it is worth waiting for the device
_STEP = 64  # rows of a head are a multiple of it, as chunks of kernels are
_ZERO = {torch.float32: -104.0, torch.float64: -746.0}  # the exponential is 0


def reaches(own: OwnSegments, k: torch.Tensor, decay: torch.Tensor | None, beta: torch.Tensor | None) -> dict[int, int]:
    """The rows of the heads of a rank's segments, by index, for those that have tails: at most half of the segment is its head.

    k, decay, beta: of the rank's rows, as `RecurrenceInputs` holds them.
    """
    lengths = own.lengths(own.following)
    if decay is None or max(lengths, default=0) < SHORTEST or not check.has_values(k) or check.captured(k):
        return {}
    with torch.no_grad():
        logarithms = _logarithms(*(None if x is None else own.rows(own.following, own.by_position(x)) for x in (k, decay, beta)))
        limit = _ZERO[logarithms.dtype]
        found = []
        for part in logarithms.split(lengths, dim=1):
            # a GPU adds up along the last dim, of neighbours in memory, ten times as fast as along others
            sums = part.movedim(1, -1).contiguous().cumsum(-1)
            alive = ~(sums < limit).flatten(0, 1).all(0)
            found.append((alive * torch.arange(1, len(alive) + 1, device=k.device)).amax())
        alive_rows = torch.stack(found).tolist()
    heads = (_STEP * (rows // _STEP + 1) for rows in alive_rows)
    return {index: rows for index, rows, length in zip(own.following, heads, lengths) if 2 * rows <= length}


def _logarithms(k: torch.Tensor | None, decay: torch.Tensor | None, beta: torch.Tensor | None) -> torch.Tensor:
    """Bounds of the norms of tokens' transitions, (b, s', h), or of each of d_k rows of the state, (b, s', h * d_k)."""
    assert k is not None
    assert decay is not None
    dtype = torch.promote_types(k.dtype, torch.float32)
    if beta is None:
        return decay.flatten(2).to(dtype)
    logarithms = (decay.amax(3) if decay.dim() == 4 else decay).to(dtype)
    squares = torch.linalg.vector_norm(k, dim=3, keepdim=True, dtype=dtype).square()
    growth = (1 - beta.to(dtype) * repeated(squares, beta.shape[2]).squeeze(3)).abs()
    return logarithms + growth.clamp(min=1).log()
