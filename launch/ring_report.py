"""What `bench.py ring` prints and writes: table, JSON, plot, fits, traces."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from ring_methods import Case, make_method

_TRANSFERS = ("nccl", "Memcpy PtoP", "Memcpy DtoD")


def say_errors(errors: dict[str, float], tokens: int) -> None:
    if dist.get_rank() == 0 and errors:
        first = next(iter(errors))
        said = ", ".join(f"{name} {error:.1e}" for name, error in errors.items() if name != first)
        print(f"difference of out, dq, dk, dv from {first}'s at {tokens} tokens: {said or 'nothing to compare'}", flush=True)


def table(rows: list[dict], header: bool) -> None:
    """Print one size's rows, with each method's fraction of the local rate."""
    width = max(len(row["method"]) for row in rows)
    if header:
        print(f"{'':>9} {'':>{width}}  {'milliseconds':>20}  {'TFLOP/s a GPU':>15}  {'of local':>9}  {'peak GiB':>8}")
        print(
            f"{'tokens':>9} {'method':>{width}}  {'forward':>9} {'fwd+bwd':>10}  {'forward':>7} {'fwd+bwd':>7}  {'fwd':>4} {'both':>4}"
        )
    alone = next((row for row in rows if row["method"] == "local"), None)
    for row in rows:
        of_local = ""
        if alone is not None:
            of_local = "{:4.0%} {:4.0%}".format(*(row[key] / alone[key] for key in ("forward_tflops", "forward_backward_tflops")))
        exposed = f"  {row['exposed']:.0%} of {row['transfer_ms']:.2f} ms of transfers exposed" if "exposed" in row else ""
        print(
            f"{row['tokens']:>9} {row['method']:>{width}}  {row['forward_ms']:9.2f} {row['forward_backward_ms']:10.2f}  "
            f"{row['forward_tflops']:7.1f} {row['forward_backward_tflops']:7.1f}  {of_local:>9}  "
            f"{row['peak_bytes_beyond_inputs'] / 2**30:8.2f}{exposed}",
            flush=True,
        )


def memory_fits(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Peak memory beyond inputs as a line in tokens a GPU, for each method with three sizes or more."""
    fits = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [(row["tokens_per_gpu"], row["peak_bytes_beyond_inputs"]) for row in rows if row["method"] == method]
        x, y = np.array(points, dtype=float).T
        if len(x) < 3 or method == "local" or not y.any():
            continue
        slope, intercept = np.polyfit(x, y, 1)
        residual = ((y - slope * x - intercept) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        fits[method] = {"bytes_per_token": slope, "bytes": intercept, "r2": 1 - residual}
    return fits


def say_fits(rows: list[dict]) -> None:
    for method, fit in memory_fits(rows).items():
        print(f"{method}: {fit['bytes_per_token']:.0f} bytes a token + {fit['bytes'] / 2**20:.0f} MiB, R^2 = {fit['r2']:.5f}")


def trace(case: Case, names: list[str], groups: dict[str, object], folder: Path, rows: list[dict]) -> None:
    """Profile a forward and backward pass of each method: rank 0 writes a trace, and its share of exposed transfers joins the row."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if case.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    folder.mkdir(parents=True, exist_ok=True)
    for name, row in zip(names, rows):
        method = make_method(name, case, groups)
        dist.barrier()
        with torch.profiler.profile(activities=activities) as profile:
            method.forward()
            method.backward()
            if case.device == "cuda":
                torch.cuda.synchronize()
        if dist.get_rank() == 0:
            path = folder / f"trace-{name}-{case.tokens}.json"
            profile.export_chrome_trace(str(path))
            moving, busy = device_intervals(json.loads(path.read_text())["traceEvents"])
            alone = length(moving) - overlap(moving, busy)
            row |= {"transfer_ms": length(moving) / 1e3, "exposed": alone / length(moving) if moving else 0.0}


def device_intervals(events: list[dict]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(transfers, computation) on the device, each as disjoint ascending intervals in microseconds."""
    moving, busy = [], []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        interval = event["ts"], event["ts"] + event["dur"]
        transfer = any(word.lower() in event["name"].lower() for word in _TRANSFERS)
        (moving if transfer else busy).append(interval)
    return union(moving), union(busy)


def union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)


def overlap(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Of two lists of disjoint intervals."""
    return length(a) + length(b) - length(union([*a, *b]))


def write(rows: list[dict], errors: dict[str, float], arguments: argparse.Namespace) -> None:
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
        "mask": arguments.mask,
        "layout": "balanced" if arguments.balanced else "zigzag",
        "differences": errors,
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
