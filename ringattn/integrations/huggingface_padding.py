"""Padding on the right of a batch: where each row ends, agreed between ranks.

No token before a row's end sees padding after it, if tokens see none after them. So padding needs no mask then; what the padding itself
sees is of no interest, because its labels do not count. If all rows end at one position, padding is hidden by a mask over positions.

Shapes: b batch, s local tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..geometry.layout import Layout
from ..runtime.agree import Facts, agree, refusing
from ..training.causal_lm import IGNORE
from ..transport import Ranks

_FACTS = Facts({"function": "where the rows of attention_mask end"})


def agreed_rows(mask: Any, layout: Layout, ranks: Ranks) -> tuple[int, ...] | None:
    """The number of tokens of each row, of this rank's columns (b, s) of an attention mask of ones and zeros; None without padding.

    A collective if a mask of two dimensions is given. Raises ValueError, on every rank, if a row has zeros before ones, or no ones.
    """
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return None
    live, here = mask.bool().cpu(), layout.positions(ranks.rank)
    # behind the last one, and at the first zero
    ends = torch.where(live, here + 1, 0).amax(dim=1)
    holes = torch.where(live, layout.seq_len, here).amin(dim=1)
    if ranks.size > 1:
        counts = agree(ranks, _FACTS, len(ends))[0]
        with refusing(ranks):
            if len(set(counts)) > 1:
                raise ValueError(f"attention_mask has {', '.join(map(str, counts))} rows on the ranks: give all ranks one batch")
        records = ranks.all_gather_control(torch.stack([ends, holes]).numpy().astype("<i8").tobytes())
        assert records is not None
        both = np.stack([np.frombuffer(record, dtype="<i8").reshape(2, -1) for record in records])
        ends, holes = torch.from_numpy(both[:, 0].max(axis=0)), torch.from_numpy(both[:, 1].min(axis=0))
    if bool((holes < ends).any()) or not bool(ends.all()):
        row = int(((holes < ends) | (ends == 0)).int().argmax())
        raise ValueError(
            f"attention_mask hides tokens of row {row} before others that it shows, or all of them, but only padding on the right is "
            "possible around a ring: pad there (tokenizer.padding_side = 'right'), or pack the sequences with pack(...)"
        )
    return None if bool((ends == layout.seq_len).all()) else tuple(ends.tolist())


def check_padded_labels(mask: Any, labels: Any) -> None:
    """Raise ValueError if padding (b, s) has labels (b, s) that count, as its logits are of no use."""
    if not isinstance(mask, torch.Tensor) or not isinstance(labels, torch.Tensor) or mask.dim() != 2 or mask.shape != labels.shape:
        return
    if bool(((mask == 0) & (labels != IGNORE)).any()):
        raise ValueError(
            f"attention_mask hides tokens that have labels: set the labels of padding to {IGNORE}, so that they do not count"
        )
