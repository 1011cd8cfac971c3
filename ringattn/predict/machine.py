"""Machines to plan for: a GPU and its links as a few constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ..check import number


@dataclass(frozen=True)
class Link:
    """A way to move messages: what an exchange costs besides its bytes, and how much it slows a kernel that runs beside it."""

    latency_us: float
    slowdown: float  # a kernel takes longer by this share of the time in which both run
    copies: int  # how often a message crosses the links of a node


def check_nodes(gpus: int, gpus_per_node: int) -> None:
    """Raise ValueError unless so many GPUs fill their nodes, or are a part of one."""
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ValueError(f"gpus is {gpus}, but must be a multiple of the {gpus_per_node} GPUs of a node, or fewer")


@dataclass(frozen=True)
class Machine:
    """The rates of a GPU and its links. Attention counts 4 h d operations a live pair forward, 2.5 times that backward; recurrences count
    as `recurrence.py` says."""

    name: str
    forward_tflops: float  # of the kernels, on long shards
    backward_tflops: float
    forward_launch_us: float  # time of a launch besides its operations: its start, and its end, when multiprocessors idle
    backward_launch_us: float
    hbm_gbs: float  # the GPU's memory, bytes read and written
    nvlink_gbs: float  # that a GPU sends, and at the same time receives, within its node
    node_gbs: float  # the same between nodes
    nccl_latency_us: float  # see Link
    nccl_slowdown: float
    copy_latency_us: float  # the same for copy engines
    copy_slowdown: float
    memory_gib: float
    assumed: str = ""  # what the figures rest on, for people
    recurrence_tflops: float = 30.0  # of the kernels of recurrences; assumed for every machine
    copies: bool = True  # whether its copy engines move messages within a node

    @property
    def nccl(self) -> Link:
        """NCCL, within nodes and between them."""
        return Link(self.nccl_latency_us, self.nccl_slowdown, copies=1)

    def copy_engines(self, ranks: int) -> Link:
        """Copy engines between the ranks of one node: messages go through the memory of a third rank, if there is one."""
        return Link(self.copy_latency_us, self.copy_slowdown, copies=2 if ranks > 2 else 1)

    def with_rates(self, rates: Mapping[str, float]) -> Machine:
        """This machine with some figures replaced. Raises ValueError for an unknown name, or a value that is too small or not finite."""
        known = [field.name for field in fields(self) if field.name not in ("name", "assumed", "copies")]
        for name, value in rates.items():
            if name not in known:
                raise ValueError(f"rate {name!r} is unknown: a machine has {', '.join(known)}")
            if number(name, value, least=0) == 0 and name.endswith(("_tflops", "_gbs", "_gib")):
                raise ValueError(f"{name} is {value}, but must be more than 0")
        return replace(self, **{name: float(value) for name, value in rates.items()})


# `launch/bench fit` finds both tflops, and NCCL's latency and slowdown, from docs/measurements.json. The rest is assumed: protocols
# take a third of the nominal 450 GB/s of NVLink, and a fifth of the nominal 50 GB/s between nodes.
H200 = Machine(
    name="h200",
    forward_tflops=710,
    backward_tflops=630,
    forward_launch_us=10,
    backward_launch_us=30,
    hbm_gbs=4200,
    nvlink_gbs=300,
    node_gbs=40,
    nccl_latency_us=350,
    nccl_slowdown=0.45,
    copy_latency_us=20,
    copy_slowdown=0.05,
    memory_gib=140,
    assumed="rates of the kernels and NCCL's latency are fitted to runs on up to 8 GPUs; NVLink at 2/3 of 450 GB/s and 50 GB/s a GPU "
    "between nodes, at 4/5, are assumed",
)
_UNTRIED = "nothing is measured on it"
# no run of any of these: shares of the nominal rates, as far as possible those that the H200 reaches
H100 = replace(
    H200,
    name="h100",
    hbm_gbs=2900,
    memory_gib=79,
    assumed=f"{_UNTRIED}: an H100 SXM with 80 GB computes and sends as an H200, whose kernels it runs, and its memory moves 2,900 GB/s",
)
A100 = replace(
    H200,
    name="a100",
    forward_tflops=185,
    backward_tflops=140,
    hbm_gbs=1750,
    recurrence_tflops=10.0,
    nvlink_gbs=200,
    node_gbs=20,
    memory_gib=79,
    assumed=f"{_UNTRIED}: an A100 SXM with 80 GB; the plain kernels at 59 % (forward) and 45 % (backward) of 312 TFLOP/s, NVLink at 2/3 of "
    "300 GB/s, 25 GB/s a GPU between nodes, at 4/5",
)
B200 = replace(
    H200,
    name="b200",
    forward_tflops=900,
    backward_tflops=675,
    hbm_gbs=6900,
    recurrence_tflops=45.0,
    nvlink_gbs=600,
    memory_gib=178,
    assumed=f"{_UNTRIED}: the plain kernels at 40 % (forward) and 30 % (backward) of 2,250 TFLOP/s, NVLink at 2/3 of 900 GB/s, 50 GB/s a "
    "GPU between nodes, at 4/5",
)
MI300X = replace(
    H200,
    name="mi300x",
    forward_tflops=450,
    backward_tflops=325,
    hbm_gbs=4600,
    recurrence_tflops=20.0,
    nvlink_gbs=42,
    memory_gib=190,
    copies=False,
    assumed=f"{_UNTRIED}: the plain kernels at 34 % (forward) and 25 % (backward) of 1,307 TFLOP/s; a message crosses one link of 64 GB/s "
    "to a neighbour, at 2/3, by RCCL with NCCL's latency; 50 GB/s a GPU between nodes, at 4/5",
)
MACHINES = {machine.name: machine for machine in (A100, B200, H100, H200, MI300X)}
