"""`prepare` readies a call before it is made: what follows from a layout and a mask, without the tensors' values and without messages."""

from __future__ import annotations

from typing import Any

import torch

from . import check
from .device import local
from .geometry.layout import Layout
from .geometry.mask import Mask, causal
from .runtime.calls import check_keys, check_layout, keys_of
from .runtime.context import Context
from .runtime.groups import Group, get_context
from .schedule.memory import RowBytes
from .schedule.schedules import RowTraffic, Schedule
from .scores import Score, ScoreMod

_DEFAULT_MASK = causal()
_NOT_LEARNED = (False, False, False)
_LIKE = "give the q, k and v of any call of the layer, such as those of the batch before"


def prepare(
    layout: Layout,
    mask: Mask | None = None,
    *,
    kv_layout: Layout | None = None,
    q_offset: int = 0,
    like: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    group: Group | None = None,
    score: ScoreMod | None = None,
    softmax_scale: float | None = None,
    schedule: Schedule | None = None,
) -> None:
    """Ready the first `ring_attention` with a new layout and mask: this rank's plan, its messages, and all that its passes queue.

    A batch of packed documents that was never seen costs the host milliseconds in its first call. Call this before, on any thread: nothing
    is communicated, and not every rank has to. The latest 16 that no call has used yet are kept; older ones are dropped from 256 MiB on,
    but not the latest 8.

    Args:
        layout, mask, kv_layout, q_offset, group, score, softmax_scale, schedule: as they will be passed to `ring_attention`.
        like: (q, k, v) of such a call, (b, tokens, heads, head_dim) each, with any number of tokens; only shapes, dtype and device are
            read. With a kv_layout and no schedule it is needed, for its bytes choose the default one. On a GPU the tables that kernels
            read are then copied there, on the current stream: on another thread, make the stream of the calls the current one. If the
            group has made a call before, and moves nothing by NCCL, both passes are then listed too, so that the first call with
            contiguous tensors queues them as a later one does; with modified scores only listing makes the tables. Without it, and
            with dropout, the first call does all this.

    Raises ValueError for what `ring_attention` refuses of these arguments, on this rank alone.

    >>> import ringattn as ra
    >>> mask = ra.documents(lengths=[700, 324])
    >>> ra.prepare(ra.balanced(mask, 1024, world_size=1), mask)
    """
    context = get_context(group)
    mask = _DEFAULT_MASK if mask is None else mask
    check.instance("layout", layout, Layout, check.BUILD_A_LAYOUT)
    check.instance("mask", mask, Mask, check.BUILD_A_MASK)
    check.optional("schedule", schedule, Schedule, check.BUILD_A_SCHEDULE)
    check.optional("score", score, ScoreMod, check.BUILD_A_SCORE)
    check.softmax_scale(softmax_scale, head_dim=1)  # of a value that is given, whatever the heads
    keys = keys_of(layout, kv_layout, q_offset)
    if keys is None:
        check_layout(layout, mask, context.ranks)
    else:
        check_keys(keys, layout, mask, context.ranks)
    shapes = None if like is None else _shapes(like, context)
    row_bytes = traffic = None
    if keys is not None and schedule is None:
        if shapes is None:
            raise ValueError(
                f"kv_layout is given without a schedule, which then follows from the bytes of q and k, but like is None: {_LIKE}, or "
                "pass schedule="
            )
        traffic = RowTraffic.of(shapes.h, shapes.hk, shapes.d, shapes.d_v, shapes.dtype.itemsize, backward=True)
    if schedule is not None and schedule.by_memory:
        if shapes is None:
            raise ValueError(f"schedule is {schedule!r}, which chooses by the bytes of k and v, but like is None: {_LIKE}")
        row_bytes = RowBytes.of_shapes(shapes.b, shapes.hk, shapes.d + shapes.d_v, shapes.dtype.itemsize)
    kind = None if score is None else score.kind
    found = context.prepare(layout, mask, schedule, row_bytes, kind is not None and kind.placed, keys, traffic)
    for launch in (*found.program.forward.launches, *found.program.backward.launches):
        assert launch.tiles is not None
    if shapes is None:
        return
    for order in (found.q_order, found.k_order):
        if order is not None:
            order.indices(shapes.device)
    scale, wanted = check.softmax_scale(softmax_scale, shapes.d), _NOT_LEARNED
    modified = Score(scale)
    if score is not None:
        if not score.kind.replayed:
            return
        slopes, values, sinks, _ = score.tensors(torch.promote_types(shapes.dtype, torch.float32))
        modified = Score(scale, score.kind.modifiers(slopes, values, None, shapes.h), sinks)
        wanted = tuple([name in score.given and score.given[name].requires_grad for name in ("alibi", "bias", "sinks")])
    if modified.modifiers is None:
        local.prepare(found.program, shapes, scale, final=True)
    found.rehearse(modified, wanted, shapes, final=True)


def _shapes(like: Any, context: Context) -> local.RowShapes:
    """What launches get of tensors like these: on a grid, the heads of one rank of its heads axis."""
    if not isinstance(like, (tuple, list)) or len(like) != 3:
        raise ValueError(f"like is {check.shown(like)}, but must be (q, k, v): {_LIKE}")
    q, k, v = like
    check.tensors(q, k, v)
    check.fit(q, k, v)
    context.ranks.check_device(q.device)
    (b, _, h, d), hk = q.shape, k.shape[2]
    if context.hybrid is not None:
        context.hybrid.check_heads(h)
        h, hk = h // context.hybrid.heads.size, context.hybrid.kv_heads(h, hk)
    return local.RowShapes(b, h, hk, d, v.shape[3], q.dtype, q.device)
