"""Machines to plan for: a GPU and its links as a few constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite


@dataclass(frozen=True)
class Link:
    """A way to move messages: what an exchange takes beyond its bytes, and from a kernel beside it."""

    latency_us: float
    slowdown: float  # a kernel takes longer by this share of the time for which both run
    copies: int  # how often a message crosses the links of a node


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
    nccl_latency_us: float  # see Link
    nccl_slowdown: float
    copy_latency_us: float  # the same of copy engines
    copy_slowdown: float
    memory_gib: float

    @property
    def nccl(self) -> Link:
        """Within nodes and between them."""
        return Link(self.nccl_latency_us, self.nccl_slowdown, copies=1)

    def copy_engines(self, ranks: int) -> Link:
        """Between the ranks of one node: by way of a third's memory, where there is one."""
        return Link(self.copy_latency_us, self.copy_slowdown, copies=2 if ranks > 2 else 1)

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


# Both tflops, and NCCL's latency and slowdown, are what `launch/bench fit` finds in docs/measurements.json. Assumed: the rest; of
# nominally 450 GB/s over NVLink and 50 between nodes a third and a fifth go to protocols.
H200 = Machine(
    name="h200",
    forward_tflops=705,
    backward_tflops=635,
    forward_launch_us=10,
    backward_launch_us=30,
    hbm_gbs=4200,
    nvlink_gbs=300,
    node_gbs=40,
    nccl_latency_us=250,
    nccl_slowdown=0.4,
    copy_latency_us=20,
    copy_slowdown=0.05,
    memory_gib=140,
)
MACHINES = {"h200": H200}
