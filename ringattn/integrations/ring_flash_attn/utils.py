"""Of the package's helpers those that have a meaning without its ring."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ._absent import absent

__all__ = ["AllGatherComm", "get_default_args"]


def get_default_args(func: Callable) -> dict[str, Any]:
    """The parameters of a function by name, each with its default, or None.

    >>> get_default_args(lambda x, scale=2.0: x)
    {'x': None, 'scale': 2.0}
    """
    func = getattr(func, "_init_fn", func)  # of an operator made by torch.library.custom_op, the function
    empty = inspect.Parameter.empty
    return {name: None if x.default is empty else x.default for name, x in inspect.signature(func).parameters.items()}


class AllGatherComm:
    """Gathers tensors from the ranks of a process group of torch's, several at a time.

    >>> gathering = AllGatherComm(group)  # doctest: +SKIP
    >>> gathering.all_gather(whole, shard)  # doctest: +SKIP
    >>> gathering.wait()  # doctest: +SKIP
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.handles: list[dist.Work] = []

    def all_gather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> None:
        """Begin to gather `input_tensor`, of one shape on all ranks, into `output_tensor`, rank after rank: read it after `wait`."""
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=self.group, async_op=True)
        assert work is not None
        self.handles.append(work)

    def wait(self) -> None:
        """Wait for all that was begun."""
        for work in self.handles:
            work.wait()
        self.handles = []


__getattr__ = absent(
    __name__,
    dict.fromkeys(("RingComm", "update_out_and_lse"), "ring_attention, which moves keys and values and merges blocks itself")
    | dict.fromkeys(
        ("flatten_varlen_lse", "unflatten_varlen_lse"), "return_attn_probs=True, whose lse is (h, t) for packed documents"
    ),
)
