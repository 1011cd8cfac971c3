"""How many bytes the buffers of a pass take, counted from its instructions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..geometry.plan import Plan
from .instructions import Add, Close, Exchange, Holds, Launch, Message, Open, Stream, Wait
from .program import Pass, backward_passes
from .schedules import Schedule


class RowBytes(NamedTuple):
    """Bytes of one row's K and V, all batches and heads, and of the sums of its dK and dV."""

    kv: int
    sums: int

    def of_buffer(self, holds: Holds) -> int:
        """Bytes of a row of a buffer."""
        return self.kv if holds is Holds.KV else self.sums

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, heads: int) -> RowBytes:
        """For this number of heads of k (b, s, hk, d) and v (b, s, hk, d_v), with dK and dV in fp32 (fp64 for fp64)."""
        return cls.of_shapes(k.shape[0], heads, k.shape[3] + v.shape[3], k.element_size())

    @classmethod
    def of_shapes(cls, b: int, heads: int, head_dims: int, itemsize: int) -> RowBytes:
        """For this many batches and heads, the head dims of K and V together, and bytes of a number."""
        elements = b * heads * head_dims
        return cls(elements * itemsize, elements * max(4, itemsize))


def peak_bytes(program: Pass, row_bytes: RowBytes, *, beside_launch: int = 0, beside_last: int = 0, gathered: bool = False) -> int:
    """The most bytes of other ranks' K/V and sums that a rank holds at a time in a pass.

    beside_launch, beside_last: bytes that each launch takes in addition, and the step that adds what has come home at the end.
    gathered: also count scattered rows to send, which are copied until they have left.
    """
    held = copied = most = last = 0
    for x in program.instructions:
        launch = 0
        match x:
            case Open():
                held += row_bytes.of_buffer(x.buffer.holds) * x.buffer.rows if x.reuse is None else 0
            case Close():
                held -= sum(row_bytes.of_buffer(buffer.holds) * buffer.rows for buffer in x.buffers)
            case Exchange() if gathered:
                copied = sum(row_bytes.of_buffer(m.buffer.holds) * len(m.rows) for m in x.sends if _is_copied(m))
            case Wait():
                copied = 0
            case Launch():
                launch = beside_launch
            case Add() if x.stream is Stream.CALLER:
                last += row_bytes.of_buffer(x.staging.holds) * x.staging.rows
        most = max(most, held + copied + launch)
    return max(most, last + beside_last)


def backward_bytes(schedule: Schedule, plan: Plan, row_bytes: RowBytes) -> int:
    """The most bytes of other ranks' K/V and sums that any rank holds at a time in the backward pass."""
    return max(peak_bytes(program, row_bytes) for program in backward_passes(schedule, plan, range(plan.world_size)))


def _is_copied(message: Message) -> bool:
    return len(message.rows.ranges) > 1
