"""What `bench.py ring` prints and writes: table, JSON, plot, fits, traces."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from bench_ring import Entry

_TRANSFERS = ("nccl", "Memcpy PtoP", "Memcpy DtoD")


def say_errors(errors: dict[str, float], tokens: int) -> None:
    if dist.get_rank() == 0 and errors:
        first = next(iter(errors))
        said = ", ".join(f"{name} {error:.1e}" for name, error in errors.items() if name != first)
        print(f"difference of out, dq, dk, dv from {first}'s at {tokens} tokens: {said or 'nothing to compare'}", flush=True)


def add_ratios(rows: list[dict], peers: Container[str]) -> None:
    """Each row's rate, forward and backward, over that of its method on one rank, of the fastest peer, or else of the first method."""
    scaling = len({row["ranks"] for row in rows}) > 1
    rivals = [row for row in rows if row["method"] in peers] or rows[:1]
    fastest = max(rivals, key=lambda row: row["forward_backward_tflops"])
    for row in rows:
        other = next(one for one in rows if one["method"] == row["method"]) if scaling else fastest
        row["ratio"] = row["forward_backward_tflops"] / other["forward_backward_tflops"]


def table(rows: list[dict], header: bool) -> None:
    """Print one size's rows. Shares are of the rate of `local` on the same layout."""
    width = max(6, *(len(row["method"]) for row in rows))
    if header:
        print(
            "milliseconds, ± half the distance of the quartiles, and TFLOP/s a GPU: forward / forward and backward; MiB that a GPU sends"
        )
        print(
            f"{'ranks':>5} {'tokens':>9} {'method':>{width}}  {'ms':>33}  {'host':>6}  {'TFLOP/s':>13}  {'of local':>11}  {'ratio':>5}  "
            f"{'peak GiB':>8}  {'sent MiB':>8}"
        )
    locals_ = {row["method"].removeprefix("local"): row for row in rows if row["method"].startswith("local")}
    for row in rows:
        alone = locals_.get("".join(row["method"].partition("@")[1:]))
        keys = "forward", "forward_backward"
        ms = " / ".join(f"{row[f'{key}_ms']:.2f} ± {np.ptp(row[f'{key}_ms_quartiles']) / 2:.2f}" for key in keys)
        rates = " / ".join(f"{row[f'{key}_tflops']:.1f}" for key in keys)
        share = "" if alone is None else " / ".join(f"{row[f'{key}_tflops'] / alone[f'{key}_tflops']:.2f}" for key in keys)
        sent = "" if row["sent_bytes"] is None else f"{row['sent_bytes'] / 2**20:.1f}"
        exposed = f"  {row['exposed']:.0%} of {row['transfer_ms']:.2f} ms of transfers exposed" if "exposed" in row else ""
        print(
            f"{row['ranks']:>5} {row['tokens']:>9} {row['method']:>{width}}  {ms:>33}  {row['host_ms']:6.2f}  {rates:>13}  {share:>11}  "
            f"{row['ratio']:5.2f}  {row['peak_bytes_beyond_inputs'] / 2**30:8.2f}  {sent:>8}{exposed}",
            flush=True,
        )


def memory_fits(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Peak memory beyond inputs as a line in tokens a GPU, for each method of three different sizes or more."""
    fits = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [(row["tokens_per_gpu"], row["peak_bytes_beyond_inputs"]) for row in rows if row["method"] == method]
        x, y = np.array(points, dtype=float).T
        if len(set(x)) < 3 or method == "local" or not y.any():
            continue
        slope, intercept = np.polyfit(x, y, 1)
        residual = ((y - slope * x - intercept) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        fits[method] = {"bytes_per_token": slope, "bytes": intercept, "r2": 1 - residual}
    return fits


def say_fits(rows: list[dict]) -> None:
    for method, fit in memory_fits(rows).items():
        print(f"{method}: {fit['bytes_per_token']:.0f} bytes a token + {fit['bytes'] / 2**20:.0f} MiB, R^2 = {fit['r2']:.5f}")


def trace(entries: list[Entry], folder: Path, rows: list[dict]) -> None:
    """Profile a forward and backward pass of each method: rank 0 writes a trace, and its share of exposed transfers joins the row."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry, row in zip(entries, rows):
        on_gpu = entry.case.device == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
        method = entry.make()
        dist.barrier()
        if method is None:
            continue
        with torch.profiler.profile(activities=activities) as profile:
            method.forward()
            method.backward()
            if on_gpu:
                torch.cuda.synchronize()
        if dist.get_rank() == 0:
            path = folder / f"trace-{entry.name}-{entry.case.tokens}.json"
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


def circumstances(arguments: argparse.Namespace) -> dict:
    """What every record of a benchmark of many ranks begins with."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "world_size": dist.get_world_size(),
        "torch": torch.__version__,
        "mask": arguments.mask,
    }


def write(rows: list[dict], errors: dict[str, float], arguments: argparse.Namespace) -> None:
    """ring.json, and ring.png where matplotlib is installed; ring_memory.* for `--memory`, ring_scaling.* for `--scaling`."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "ring_memory" if arguments.memory else "ring_scaling" if arguments.scaling else "ring"
    record = {
        **circumstances(arguments),
        "heads": arguments.heads,
        "kv_heads": arguments.kv_heads,
        "head_dim": arguments.head_dim,
        "differences": errors,
        "rows": rows,
        "memory_fits": memory_fits(rows),
    }
    (arguments.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        draw(rows, arguments.out / f"{name}.png", name, f"{record['world_size']} x {record['device']}")


def draw(rows: list[dict], path: Path, kind: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    across, meaning = ("ranks", "GPUs") if kind == "ring_scaling" else ("tokens", "total tokens")
    columns = [("peak_bytes_beyond_inputs", "peak memory beyond inputs and results, GiB", 2**30)]
    if kind != "ring_memory":
        columns = [
            ("forward_tflops", "forward, TFLOP/s a GPU", 1),
            ("forward_backward_tflops", "forward + backward, TFLOP/s a GPU", 1),
        ]
    figure, axes = plt.subplots(1, len(columns), figsize=(6 * len(columns), 4), squeeze=False)
    for axis, (key, label, unit) in zip(axes[0], columns):
        for method in dict.fromkeys(row["method"] for row in rows):
            points = [(row[across], row[key] / unit) for row in rows if row["method"] == method]
            axis.plot(*zip(*points), marker="o", label=method)
        axis.set(xlabel=meaning, ylabel=label, title=title, ylim=(0, None))
        if kind != "ring_memory":
            axis.set_xscale("log", base=2)
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
