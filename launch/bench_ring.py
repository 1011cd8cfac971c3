"""Ring attention on all GPUs of a host: speed and memory, beside one GPU's kernels and Ulysses in the same run.

Methods, which take turns in every round, forward and backward, causal:

    ring, gather  `ring_attention` over a zigzag layout, with that schedule, over the transport that the group gets by itself
    ring-nccl, gather-nccl  the same over the process group, where asked for
    local         the same rank's tiles in one launch on random K/V: no communication, the kernels' single-GPU rate
    ulysses       all-to-all from sequence to heads and back around PyTorch's attention (cuDNN), over a contiguous layout

Starts a process a GPU by itself, or runs in those that torchrun started. With `--device cpu` it runs over gloo, at toy sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringattn as ra
from ringattn import local
from ringattn.plan import Rows, Tiles, move_keys
from ringattn.score import Score

METHODS = ("ring", "gather", "ulysses", "local")
OVER_PROCESS_GROUP = {"ring-nccl": "ring", "gather-nccl": "gather"}
_LONG = 15.0  # seconds of a round that is not repeated
Tensors = tuple[torch.Tensor, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", help="total tokens (default: 64k, 128k, 512k and 1M)")
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, *OVER_PROCESS_GROUP), default=METHODS)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--world-size", type=int, help="ranks (default: one a GPU; 2 on a CPU)")
    parser.add_argument("--memory", action="store_true", help="only the peak memory of ring and gather at six sizes, with its fit")
    parser.add_argument("--seconds", type=float, default=8, help="time for the rounds of one size after its first (default 8)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for ring.json and ring.png")


def main(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if arguments.memory:
        arguments.methods = [method for method in arguments.methods if method in ("ring", "gather")]
        arguments.tokens = arguments.tokens or [n << 16 for n in (1, 2, 3, 4, 6, 8)]
    arguments.tokens = arguments.tokens or [n << 16 for n in (1, 2, 8, 16)]
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
        run_rank(int(os.environ.get("LOCAL_RANK", "0")), arguments)
        return
    world_size = arguments.world_size or (torch.cuda.device_count() if arguments.device == "cuda" else 2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_start, args=(world_size, store.port, arguments), nprocs=world_size)


def _start(rank: int, world_size: int, port: int, arguments: argparse.Namespace) -> None:
    if arguments.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    run_rank(rank, arguments)


def run_rank(local_rank: int, arguments: argparse.Namespace) -> None:
    """Measure every size; rank 0 prints and writes what is there after each."""
    if arguments.device == "cuda":
        torch.cuda.set_device(local_rank)
    n = dist.get_world_size()
    names = [name for name in arguments.methods if name != "ulysses" or arguments.kv_heads % n == 0]
    cases = [Case(tokens, arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.device) for tokens in arguments.tokens]
    for name in names:
        # compile and connect
        _once(make_method(name, replace(cases[0], tokens=min(cases[0].tokens, 2048 * n))), arguments.device)
    rows = []
    for case in cases:
        rows += measure(case, names, None if arguments.memory else arguments.seconds)
        if dist.get_rank() == 0:
            report(rows[-len(names) :], header=case is cases[0])
            write(rows, arguments)
    if dist.get_rank() == 0:
        for method, fit in memory_fits(rows).items():
            print(f"{method}: {fit['bytes_per_token']:.0f} bytes a token + {fit['bytes'] / 2**20:.0f} MiB, R^2 = {fit['r2']:.5f}")
    dist.destroy_process_group()


@dataclass(frozen=True)
class Case:
    """One size: batch 1, causal, bf16 on GPUs."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    device: str

    def inputs(self, kv_tokens: int) -> Tensors:
        """q and dout (1, s_local, h, d), k and v (1, kv_tokens, hk, d)."""
        s, dtype = self.tokens // dist.get_world_size(), torch.bfloat16 if self.device == "cuda" else torch.float32
        shapes = (s, self.heads), (kv_tokens, self.kv_heads), (kv_tokens, self.kv_heads), (s, self.heads)
        return tuple(torch.randn(1, n, h, self.head_dim, device=self.device, dtype=dtype) for n, h in shapes)

    @property
    def forward_flop(self) -> float:
        """Of one rank: two products over the live half of all pairs."""
        return 4 * self.tokens**2 / 2 * self.heads * self.head_dim / dist.get_world_size()


class Method:
    """`forward` and then `backward`, on the same inputs every time."""

    def __init__(self, case: Case, compute: Callable[[Tensors], torch.Tensor]) -> None:
        *leaves, self.dout = case.inputs(case.tokens // dist.get_world_size())
        self.leaves = tuple(x.requires_grad_() for x in leaves)
        self.compute = compute
        self.results_bytes = sum(x.numel() * x.element_size() for x in (*leaves, self.dout))  # dq, dk, dv and out

    def forward(self) -> None:
        self.out = self.compute(self.leaves)

    def backward(self) -> None:
        torch.autograd.grad(self.out, self.leaves, self.dout)
        del self.out


class Local(Method):
    """A rank's kernels alone: all its tiles over the whole K/V in one launch, gradients straight in their final dtype."""

    def __init__(self, case: Case) -> None:
        rank = dist.get_rank()
        plan = ra.make_plan(ra.zigzag(case.tokens, dist.get_world_size()), ra.causal())
        bases = np.cumsum([0, *plan.lengths])
        rows = [move_keys(plan.tiles(rank, o), Rows.span(0, n), int(bases[o])) for o, n in enumerate(plan.lengths)]
        self.tiles = Tiles(np.concatenate(rows), plan.lengths[rank], case.tokens)
        self.q, self.k, self.v, self.dout = case.inputs(case.tokens)
        self.score = Score(case.head_dim**-0.5)
        self.results_bytes = sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v, self.dout))  # dq, dk, dv and out

    def forward(self) -> None:
        self.state = local.forward(self.q, self.k, self.v, self.tiles, self.score, state=None, final=True)

    def backward(self) -> None:
        out, *stats = self.state
        inputs = (self.q, self.k, self.v, self.dout, *stats, local.delta(out, self.dout))
        local.gradients(*inputs, self.tiles, self.score, dtype=self.q.dtype)
        del self.state


def make_method(name: str, case: Case) -> Method:
    if name == "local":
        return Local(case)
    if name == "ulysses":
        return Method(case, ulysses)
    layout = ra.zigzag(case.tokens, dist.get_world_size())
    schedule = {"ring": ra.ring, "gather": ra.gather}[OVER_PROCESS_GROUP.get(name, name)]()
    options = {"layout": layout, "mask": ra.causal(), "schedule": schedule}
    options["group"] = ra.process_group() if name in OVER_PROCESS_GROUP else None
    return Method(case, lambda leaves: ra.ring_attention(*leaves, **options))


class _AllToAll(torch.autograd.Function):
    """(s_local, h, d) to (s, h / world_size, d), or back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, to_heads: bool) -> torch.Tensor:
        ctx.to_heads = to_heads
        return _swap(x, to_heads)

    @staticmethod
    def backward(ctx, dx: torch.Tensor):
        return _swap(dx, not ctx.to_heads), None


def _swap(x: torch.Tensor, to_heads: bool) -> torch.Tensor:
    n = dist.get_world_size()
    parts = x.unflatten(1, (n, -1)).transpose(0, 1) if to_heads else x.unflatten(0, (n, -1))
    parts = parts.contiguous()  # (n, s_local, h / n, d)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)


def ulysses(leaves: Tensors) -> torch.Tensor:
    """DeepSpeed-Ulysses (Jacobs et al. 2023), with contiguous shards of equal length."""
    q, k, v = (_AllToAll.apply(x[0], True)[None].transpose(1, 2) for x in leaves)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return _AllToAll.apply(out[0].transpose(0, 1), False)[None]


def measure(case: Case, names: list[str], seconds: float | None) -> list[dict]:
    """A row for each method: medians over rounds of the slowest rank's times, and the peak memory of the first round.

    The first round warms up, and counts only if it took so long that there is no other, or with `seconds` None.
    """
    began = time.monotonic()
    methods = {name: make_method(name, case) for name in names}
    memory = {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name, method in methods.items():
        before = _reset_peak(case.device)
        times[name].append(_once(method, case.device))
        memory[name] = _peak(case.device) - before - method.results_bytes if case.device == "cuda" else 0
    (round_seconds,) = _slowest([time.monotonic() - began], case.device)
    rounds = 0 if seconds is None or round_seconds > _LONG else min(10, max(2, int(seconds / round_seconds)))
    for _ in range(rounds):
        for name, method in methods.items():
            times[name].append(_once(method, case.device))
    return [_row(case, name, times[name][1:] if rounds else times[name], memory[name]) for name in names]


def _row(case: Case, name: str, times: list[tuple[float, float]], memory: int) -> dict:
    forward, both = (statistics.median(column) for column in zip(*[_slowest(list(pair), case.device) for pair in times]))
    return {
        "method": name,
        "tokens": case.tokens,
        "tokens_per_gpu": case.tokens // dist.get_world_size(),
        "rounds": len(times),
        "forward_ms": forward * 1e3,
        "forward_backward_ms": both * 1e3,
        "forward_tflops": case.forward_flop / forward / 1e12,
        "forward_backward_tflops": 3.5 * case.forward_flop / both / 1e12,
        "peak_bytes_beyond_inputs": int(_slowest([memory], case.device)[0]),
    }


def _once(method: Method, device: str) -> tuple[float, float]:
    """Seconds of the forward pass and of both; ranks start together."""
    if device == "cpu":
        dist.barrier()
        marks = [time.perf_counter()]
        for step in (method.forward, method.backward):
            step()
            marks.append(time.perf_counter())
        return marks[1] - marks[0], marks[2] - marks[0]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    dist.all_reduce(torch.zeros(1, device="cuda"))
    events[0].record()
    method.forward()
    events[1].record()
    method.backward()
    events[2].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3, events[0].elapsed_time(events[2]) / 1e3


def _slowest(values: list[float], device: str) -> list[float]:
    """The greatest of all ranks, value by value."""
    x = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist()


def _reset_peak(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def memory_fits(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Peak memory beyond inputs as a line in tokens a GPU, for each method with three sizes or more."""
    fits = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        x, y = np.array(
            [(r["tokens_per_gpu"], r["peak_bytes_beyond_inputs"]) for r in rows if r["method"] == method], dtype=float
        ).T
        if len(x) < 3 or method == "local" or not y.any():
            continue
        slope, intercept = np.polyfit(x, y, 1)
        residual = ((y - slope * x - intercept) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        fits[method] = {"bytes_per_token": slope, "bytes": intercept, "r2": 1 - residual}
    return fits


def report(rows: list[dict], header: bool) -> None:
    """Print one size's rows, with each method's fraction of the local rate."""
    if header:
        print(f"{'':>9} {'':>11}  {'milliseconds':>20}  {'TFLOP/s a GPU':>15}  {'of local':>9}  {'peak GiB':>8}")
        print(
            f"{'tokens':>9} {'method':>11}  {'forward':>9} {'fwd+bwd':>10}  {'forward':>7} {'fwd+bwd':>7}  {'fwd':>4} {'both':>4}"
        )
    alone = next((row for row in rows if row["method"] == "local"), None)
    for row in rows:
        of_local = ""
        if alone is not None:
            of_local = "{:4.0%} {:4.0%}".format(*(row[key] / alone[key] for key in ("forward_tflops", "forward_backward_tflops")))
        print(
            f"{row['tokens']:>9} {row['method']:>11}  {row['forward_ms']:9.2f} {row['forward_backward_ms']:10.2f}  "
            f"{row['forward_tflops']:7.1f} {row['forward_backward_tflops']:7.1f}  {of_local:>9}  "
            f"{row['peak_bytes_beyond_inputs'] / 2**30:8.2f}",
            flush=True,
        )


def write(rows: list[dict], arguments: argparse.Namespace) -> None:
    """ring.json, and ring.png where matplotlib is installed; ring_memory.* for `--memory`."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "ring_memory" if arguments.memory else "ring"
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    record = {
        "command": " ".join(["python", *sys.argv]),
        "device": device,
        "world_size": dist.get_world_size(),
        "torch": torch.__version__,
        "heads": arguments.heads,
        "kv_heads": arguments.kv_heads,
        "head_dim": arguments.head_dim,
        "rows": rows,
        "memory_fits": memory_fits(rows),
    }
    (arguments.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        draw(rows, arguments.out / f"{name}.png", arguments.memory, f"{dist.get_world_size()} x {device}")


def draw(rows: list[dict], path: Path, memory: bool, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = [("peak_bytes_beyond_inputs", "peak memory beyond inputs and results, GiB", 2**30)]
    if not memory:
        columns = [
            ("forward_tflops", "forward, TFLOP/s a GPU", 1),
            ("forward_backward_tflops", "forward + backward, TFLOP/s a GPU", 1),
        ]
    figure, axes = plt.subplots(1, len(columns), figsize=(6 * len(columns), 4), squeeze=False)
    for axis, (key, label, unit) in zip(axes[0], columns):
        for method in dict.fromkeys(row["method"] for row in rows):
            points = [(row["tokens"], row[key] / unit) for row in rows if row["method"] == method]
            axis.plot(*zip(*points), marker="o", label=method)
        axis.set(xlabel="total tokens", ylabel=label, title=title, ylim=(0, None))
        if not memory:
            axis.set_xscale("log", base=2)
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
