"""What torch tells of a process group: how long it waits, and whose connections are closed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TAG = 0x7FFF_A77E  # of receives that nobody sends to


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout that a group was made with."""
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if timeout is not None:
            return timeout
    return dist.distributed_c10d._get_default_timeout(dist.get_backend(group))


def closed_by(group: dist.ProcessGroup) -> Callable[[int], bool]:
    """A function that says whether a rank of the group has closed its connection to this one, which its end does too.

    Only gloo tells. It cannot be asked directly, but it refuses to receive from a closed connection. A receive that it accepts is
    dropped, and nothing is ever sent to it.
    """
    kept = weakref.ref(group)  # so that the group can be freed
    gloo = "cpu:gloo" in str(dist.get_backend_config(group)) and os.environ.get("TORCH_GLOO_LAZY_INIT", "0") == "0"

    def closed(rank: int) -> bool:
        group = kept()
        if not gloo or group is None:
            return False
        backend: Any = group._get_backend(torch.device("cpu"))
        try:
            backend.recv([torch.empty(1, dtype=torch.uint8)], rank, _TAG)
        except RuntimeError:
            return True
        return False

    return closed
