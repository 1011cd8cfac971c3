"""What happens to a score between q k^T and the softmax: for now, it is scaled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """score = softmax_scale * (q . k)."""

    softmax_scale: float
