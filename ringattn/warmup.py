"""`python -m ringattn warm` compiles the kernels of given head dims ahead of time, into Triton's cache.

Without it, the first forward and backward of a process on a new machine wait for the compiler. The cache is the folder
`TRITON_CACHE_DIR`, by default `~/.triton/cache`: run it once a machine, or once for a folder that all machines share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from . import check
from .attention import ring_attention
from .geometry.layout import zigzag
from .schedule.schedules import Schedule, gather, ring
from .transport import Alone, Peer, Transport
from .transport.base import Done

# tokens whose blocks are split among programs, and tokens whose are not
_LENGTHS = (768, 12288)


class _Echo(Transport):
    """The first rank of a ring of three, which has a first, a middle and a last launch; the others send zeros, and say what it says."""

    rank = 0
    size = 3

    def all_gather_control(self, record: bytes, patience: float | None = None) -> list[bytes] | None:
        return [record] * self.size

    def exchange(self, sends: Sequence[Peer], receives: Sequence[Peer], *, at_rest: bool = False) -> Done:
        for _, x in receives:
            x.zero_()
        return Done()


def warm(
    head_dims: Sequence[int] = (128,), *, v_head_dim: int | None = None, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> float:
    """Call attention once in each of the ways in which kernels differ: alone and in rings, short and long, in either order of sums.

    Args:
        head_dims: of q and k. v_head_dim: of v, by default the same.
        dtype: of q, k and v.
        device: a GPU of the kind that will run them.

    Returns the seconds that it took. Raises ValueError for what `ring_attention` refuses, and where there is no GPU.

    >>> ra.warm([64, 128])  # doctest: +SKIP
    """
    check.instance("dtype", dtype, torch.dtype, "pass torch.bfloat16 and the like")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("warm compiles kernels for this machine's GPU, but it has none: run it where attention will run")
    began = time.perf_counter()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        for head_dim in head_dims:
            for ordered in (False, True):
                torch.use_deterministic_algorithms(ordered, warn_only=True)
                for tokens in _LENGTHS:
                    shape = tokens, head_dim, v_head_dim or head_dim, dtype, device
                    _attend(Alone(), None, *shape)
                    for schedule in (ring(), gather()):
                        _attend(_Echo(), schedule, *shape)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _attend(
    group: Transport, schedule: Schedule | None, tokens: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """One forward and one backward of a rank."""
    layout = zigzag(tokens, group.size)
    held = layout.lengths[group.rank]
    shapes = (1, held, 2, head_dim), (1, held, 1, head_dim), (1, held, 1, v_head_dim)
    q, k, v = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    ring_attention(q, k, v, layout=layout, schedule=schedule, group=group).sum().backward()
