"""What ranks must agree on before keys, values or partials of a cache move between them."""

from __future__ import annotations

from collections import defaultdict

import torch

from .. import check
from ..runtime.agree import Facts, agree, refusing
from ..runtime.order import label
from .batch import CacheBatch


def agree_on_call(batch: CacheBatch, history: int, x: torch.Tensor, facts: dict[str, object]) -> None:
    """Raise ValueError, on every rank, unless all ranks make this call with x, with the same batch and the same history of the cache."""
    context, ranks = batch.pool.context, batch.pool.context.ranks
    if ranks.size == 1:
        return
    facts = {"cache": repr(batch.pool), "batch size": len(x), "heads": x.shape[2], "head_dim": x.shape[3], **facts}
    captured = check.captured(x)
    with refusing(ranks):
        if captured and not context.has_facts((*facts.values(), False)):
            raise ValueError(
                "this call is captured in a CUDA graph, and the first of its kind: make the same call once before, which makes the "
                "kernels and the memory that ranks share"
            )
    known = context.facts((*facts.values(), captured), lambda: Facts(facts | {"captured in a CUDA graph": captured}))
    # in the place of a number of tokens, ranks swap a digest of all that they did with the sequences
    histories, _ = agree(ranks, known, history ^ batch.digest, label(None))
    if len(set(histories)) > 1:
        holders: defaultdict[int, list[str]] = defaultdict(list)
        for rank, history in enumerate(histories):
            holders[history].append(str(rank))
        raise ValueError(
            f"ranks disagree on the sequences of the cache or of the batch: {' / '.join(map(', '.join, holders.values()))} are ranks that "
            "agree: call add, extend, fork, free, truncate and evict alike, in the same order, on every rank"
        )
    ranks.connect(x.device)
