"""Machines to plan for: a GPU and its links as a few constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite


@dataclass(frozen=True)
class Machine:
    """What a GPU and its links do. Rates count 4 h d operations a live pair forward, 2.5 times that backward."""

    name: str
    forward_tflops: float  # of the kernels, on long shards
    backward_tflops: float
    forward_launch_us: float  # of a launch beyond its operations: its start, and the tail in which processors run dry
    backward_launch_us: float
    hbm_gbs: float  # the GPU's memory, bytes read and written
    nvlink_gbs: float  # a GPU sends, and receives, within its node
    node_gbs: float  # and between nodes
    latency_us: float  # of an exchange beyond its bytes
    slowdown: float  # share of a kernel's speed that goes to a transfer beside it
    stall_share: float  # a forward launch waits for processors that a transfer beside it holds, for this share of its time
    stall_ms: float  # and at most so long
    memory_gib: float

    def with_rates(self, rates: Mapping[str, float]) -> Machine:
        """The same with some figures replaced. Raises ValueError for an unknown name, or a value that is no such figure."""
        known = [field.name for field in fields(self) if field.name != "name"]
        for name, value in rates.items():
            if name not in known:
                raise ValueError(f"rate {name!r} is unknown: a machine has {', '.join(known)}")
            may_be_zero = not name.endswith(("_tflops", "_gbs", "_gib"))
            if not (isfinite(value) and (value > 0 or (may_be_zero and value == 0))):
                raise ValueError(f"{name} is {value}, but must be {'at least 0' if may_be_zero else 'more than 0'}, and finite")
        return replace(self, **rates)


# Fitted to docs/measurements.json: both tflops (one GPU's work without communication), stall_share and stall_ms (ring and gather).
# From short sequences in docs/performance.md: what a launch takes beyond its operations. Assumed: the rest; of nominally 450 GB/s
# over NVLink and 50 between nodes a third and a fifth go to protocols.
H200 = Machine(
    name="h200",
    forward_tflops=628,
    backward_tflops=484,
    forward_launch_us=40,
    backward_launch_us=250,
    hbm_gbs=4200,
    nvlink_gbs=300,
    node_gbs=40,
    latency_us=50,
    slowdown=0.25,
    stall_share=0.65,
    stall_ms=4,
    memory_gib=140,
)
MACHINES = {"h200": H200}
