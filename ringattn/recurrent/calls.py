"""What calls of this folder share: the check of layout and mask, and the agreement of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from .. import check
from ..geometry.layout import Layout
from ..geometry.mask import Mask, causal
from ..runtime.agree import Facts, refusing
from ..runtime.agreed import Agreed
from ..runtime.calls import check_default_layout, check_layout
from ..runtime.context import Context
from ..runtime.kept import CheckpointedCall, next_call
from .segments import OwnSegments, Segments, check_mask, check_spans, make_segments

DEFAULT_MASK = causal()


def check_call(context: Context, x: torch.Tensor, argument: str, layout: Layout | None, mask: Mask, name: str | None) -> None:
    """Raise ValueError if a call's tensor (b, s, ...) does not fit its group, layout and mask."""
    ranks = context.ranks
    ranks.order.check()
    if context.hybrid is not None:
        raise ValueError(
            f"group is {context.hybrid!r}, but states pass between ranks in one row: pass the process group of all its ranks, in the order "
            "of their shards"
        )
    check_mask(mask)
    if name is not None:
        check.instance("name", name, str, "pass a text, the same on every rank")
    if layout is not None:
        check.instance("layout", layout, Layout, check.BUILD_A_LAYOUT)
        check_layout(layout, mask, ranks)
        check_spans(layout)
        held = layout.lengths[ranks.rank]
        if x.shape[1] != held:
            raise ValueError(
                f"{argument} has {x.shape[1]} tokens, but rank {ranks.rank} of layout {layout!r} holds {held}: cut it with "
                "shard(x, layout, rank), or build the layout for this sequence length"
            )
    if not check.has_values(x) and ranks.size > 1:
        what = "on meta" if x.is_meta else "a fake tensor"
        raise ValueError(f"{argument} is {what}, so it has no values to pass on: pass this rank's shard on cpu or cuda")
    ranks.check_device(x.device)


@dataclass(frozen=True, eq=False)
class CheckedCall:
    """A call that has been checked, and agreed on (None for one rank).

    checkpointed: the call as checkpointed code around it sees it. identity: what it shares with the call of which it is the recomputation.
    """

    context: Context
    segments: Segments
    agreed: Agreed | None
    checkpointed: CheckpointedCall = field(default_factory=CheckpointedCall)
    identity: tuple = ()

    @cached_property
    def own(self) -> OwnSegments:
        """This rank's segments."""
        return self.segments.of(self.context.ranks.rank)

    def refuse_second_derivative(self, function: str) -> None:
        """Raise ValueError, on every rank, if a backward pass is to be differentiated in turn."""
        if torch.is_grad_enabled():
            with self.context.turn, refusing(self.context.ranks):
                raise ValueError(f"{function} has no second derivative: call backward without create_graph=True")

    def begin_backward(self) -> None:
        """Agree with the other ranks that this is the backward pass of this call."""
        if self.agreed is not None:
            self.agreed.backward()


def agree_on_segments(
    context: Context, x: torch.Tensor, layout: Layout | None, mask: Mask, name: str | None, facts: dict[str, Any]
) -> CheckedCall:
    """The call of a tensor x (b, s, ...) that has been checked; `facts` must be equal on all ranks.

    Raises ValueError, on every rank, if the ranks disagree, or if shards do not have the lengths of the default layout.
    """
    ranks, agreed, counts = context.ranks, None, (x.shape[1],)
    checkpointed, options = next_call(), (*facts.values(), *x.shape[:2])
    if ranks.size > 1:
        facts |= {
            # a rank that takes results exchanges nothing
            "results": "kept by a checkpoint" if checkpointed.takes else "computed",
            "batch size": x.shape[0],
            "dtype": x.dtype,
            "device": x.device.type,
            "captured in a CUDA graph": check.captured(x),
            "mask": mask,
            "layout": "the default" if layout is None else layout,
        }
        key = (*(value.digest if isinstance(value, (Mask, Layout)) else value for value in facts.values()),)
        agreed, counts = Agreed.now(context, context.facts(key, lambda: Facts(facts)), x.shape[1], name)
        ranks.connect(x.device)
    if layout is None:
        mask.check_length(sum(counts))
        layout = context.default_layout(mask, sum(counts))
        check_default_layout(layout, mask, counts)
        check_spans(layout)
    segments = make_segments(layout, mask)
    identity = (options, segments.every)
    with refusing(ranks):
        checkpointed.check(identity)
    return CheckedCall(context, segments, agreed, checkpointed, identity)
