"""`python -m ringattn warm` compiles the kernels of given head dims ahead of time, into Triton's cache.

Without it, the first forward and backward of a process on a new machine wait for the compiler. The cache is the folder
`TRITON_CACHE_DIR`, by default `~/.triton/cache`: run it once a machine, or once for a folder that all machines share.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import torch

from . import check
from .attention import ring_attention
from .geometry.layout import zigzag
from .schedule.schedules import Schedule, gather, ring
from .scores import ScoreMod, relative_bias, score, t5_buckets
from .transport import Alone, SilentTransport, Transport

# (batch size, tokens, query heads, K/V heads): programs that share blocks, programs for which there is just enough to do, much to do for
# each; short sequences of many heads, and so many heads that the programs of any GPU have whole ones for themselves
_SHAPES = ((2, 768, 2, 1), (1, 12288, 2, 1), (1, 12288, 128, 16), (1, 1024, 64, 64), (1, 128, 4096, 4096))
_RANKS = (3, 4)  # of rings with a first, a middle and a last launch, and with gradients of two and of three other ranks


def warm(
    head_dims: Iterable[int] = (128,),
    *,
    v_head_dim: int | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: bool = False,
    bias: bool = False,
    dropout: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> float:
    """Call attention once in each of the ways in which kernels differ: alone and in rings, short and long, in either order of sums.

    Args:
        head_dims: of q and k. v_head_dim: of v, by default the same.
        softcap, alibi, sinks, bias, dropout: what calls will do to scores, as in `score`; slopes that need no gradient, and sinks and
            the table of T5's 32 buckets that do.
        dtype: of q, k and v.
        device: a GPU of the kind that will run them.

    Returns the seconds that it took. Raises ValueError for what `ring_attention` refuses, and where there is no GPU.

    >>> ra.warm([64, 128])  # doctest: +SKIP
    """
    dims = check.listed("head_dims", head_dims, "a list of head dims, such as [64, 128]")
    dims = [check.integer("head_dims", each, least=1, most=check.MAX_HEAD_DIM) for each in dims]
    if v_head_dim is not None:
        v_head_dim = check.integer("v_head_dim", v_head_dim, least=1, most=check.MAX_HEAD_DIM)
    if softcap is not None:
        score(softcap=softcap)
    for name, value in (("alibi", alibi), ("sinks", sinks), ("bias", bias), ("dropout", dropout)):
        check.flag(name, value)
    check.instance("dtype", dtype, torch.dtype, "pass torch.bfloat16 and the like")
    on_gpu = device != "cpu"
    if on_gpu and not (isinstance(device, str) and device.partition(":")[0] == "cuda"):
        raise ValueError(f"device is {check.shown(device)}, but must be cuda, cuda with a number, or cpu")
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("warm compiles kernels for this machine's GPU, but it has none: run it where attention will run")
    began = time.perf_counter()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        for head_dim in dims:
            for ordered in (False, True):
                torch.use_deterministic_algorithms(ordered, warn_only=True)
                for batch, tokens, heads, kv_heads in _SHAPES:
                    heads_and_dims = (heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim or head_dim)
                    modified = None
                    if softcap is not None or alibi or sinks or bias or dropout:
                        modified = _score(heads, device, softcap, alibi, sinks, bias, dropout)
                    options = (batch, tokens), heads_and_dims, modified, dtype, device
                    _attend(Alone(), None, *options)
                    for ranks, schedule in itertools.product(_RANKS, (ring(), gather())):
                        _attend(SilentTransport(0, ranks), schedule, *options)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _score(heads: int, device: str, softcap: float | None, alibi: bool, sinks: bool, bias: bool, dropout: bool) -> ScoreMod:
    """What is done to the scores of so many heads; arguments as in `warm`."""
    slopes = torch.zeros(heads, device=device) if alibi else None
    sunk = torch.zeros(heads, device=device, requires_grad=True) if sinks else None
    added = None
    if bias:
        buckets = t5_buckets(bidirectional=False)
        added = relative_bias(torch.zeros(heads, buckets.count, device=device, requires_grad=True), buckets)
    return score(softcap=softcap, alibi=slopes, sinks=sunk, bias=added, dropout=0.1 * dropout, seed=0)


def _attend(
    group: Transport, schedule: Schedule | None, sequences: tuple[int, int], heads_and_dims: Iterable[tuple[int, int]],
    modified: ScoreMod | None, dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    """One forward and one backward of a rank. sequences: batch size, and tokens of all ranks. heads_and_dims: of q, k and v."""
    batch, tokens = sequences
    layout = zigzag(tokens, group.size)
    shapes = ((batch, layout.lengths[group.rank], *each) for each in heads_and_dims)
    q, k, v = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    ring_attention(q, k, v, layout=layout, schedule=schedule, group=group, score=modified).sum().backward()
