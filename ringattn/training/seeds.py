"""Random states of ranks that hold different rows of one sequence.

With one seed on all ranks, `nn.Dropout` drops the same places of every shard. With another seed on each, ranks disagree about what all of
them draw: a model's first weights, and which weights attention drops.
"""

from __future__ import annotations

import numpy as np
import torch

from .. import check

_LARGEST = (1 << 63) - 1


def manual_seed(seed: int, rank: int, replica: int = 0, *, device: str | torch.device | None = None) -> None:
    """Seed torch's generators of this rank: what a shard drops by itself differs, and what all ranks of a ring draw is the same.

    Call it on every rank once the model is made, with equal weights everywhere. `nn.Dropout` on GPUs draws from the GPU's generator, which
    is seeded by seed, replica and rank. Attention's dropout draws its seed from the CPU's, which is seeded by seed and replica alone. If
    shards are on CPUs, `nn.Dropout` draws from the CPU's, which is then seeded by the rank too: give attention's dropout a seed
    of its own, `score(dropout=..., seed=...)`.

    Args:
        seed: 0 to 2**63 - 1, the same on every rank.
        rank: this rank within its ring.
        replica: which of the rings, for those that see other sequences.
        device: where the shards are; by default the GPU if there is one, else the CPU.

    Raises ValueError for values out of range.

    >>> import torch, ringattn as ra
    >>> ra.manual_seed(1, rank=0, device="cpu")
    >>> first = torch.rand(1)
    >>> ra.manual_seed(1, rank=1, device="cpu")
    >>> bool(first == torch.rand(1))
    False
    """
    numbers = check.integer("seed", seed, most=_LARGEST), check.integer("replica", replica)
    rank = check.integer("rank", rank)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = str(device).partition(":")[0] if isinstance(device, (str, torch.device)) else None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {check.shown(device)}, but ringattn computes on cpu and cuda devices")
    shared, own = _mixed(*numbers), _mixed(*numbers, rank)
    torch.default_generator.manual_seed(own if kind == "cpu" else shared)
    if kind == "cuda":
        torch.cuda.manual_seed_all(own)


def _mixed(*numbers: int) -> int:
    """One seed from several numbers; near-by numbers give seeds far apart."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
