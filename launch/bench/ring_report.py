"""What `bench ring` prints and writes: the table, the JSON file, lines fitted to peak memory."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Container

import numpy as np
import torch.distributed as dist

from . import ring_picture
from .shared.ranks import write_record


def say_errors(errors: dict[str, float], tokens: int) -> None:
    """Print, on rank 0, how far each method's results are from the first one's."""
    if dist.get_rank() == 0 and errors:
        first = next(iter(errors))
        said = ", ".join(f"{name} {error:.1e}" for name, error in errors.items() if name != first)
        print(f"difference of out, dq, dk, dv from {first}'s at {tokens} tokens: {said or 'nothing to compare'}", flush=True)


def add_ratios(rows: list[dict], peers: Container[str]) -> None:
    """Add `ratio` to each row: its rate, forward and backward, over another row's.

    The other row is that of the same method on one rank if there are several numbers of ranks, else of the fastest peer, else the first.
    """
    scaling = len({row["ranks"] for row in rows}) > 1
    rivals = [row for row in rows if row["method"] in peers] or rows[:1]
    fastest = max(rivals, key=lambda row: row["forward_backward_tflops"])
    for row in rows:
        other = next(one for one in rows if one["method"] == row["method"]) if scaling else fastest
        row["ratio"] = row["forward_backward_tflops"] / other["forward_backward_tflops"]


def table(rows: list[dict], header: bool) -> None:
    """Print one size's rows. *of local* is the share of the rate of `local` on the same layout."""
    width = max(6, *(len(row["method"]) for row in rows))
    if header:
        print("milliseconds ± half the interquartile range, and TFLOP/s per GPU: forward / forward and backward; MiB sent per GPU")
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
    """Fit peak memory beyond inputs to a line in tokens per GPU, for each method with at least three different sizes."""
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
    """Print the fitted lines."""
    for method, fit in memory_fits(rows).items():
        print(f"{method}: {fit['bytes_per_token']:.0f} bytes per token + {fit['bytes'] / 2**20:.0f} MiB, R^2 = {fit['r2']:.5f}")


def write(rows: list[dict], errors: dict[str, float], arguments: argparse.Namespace) -> None:
    """Write ring.json, and ring.png where matplotlib is installed; ring_memory.* with `--memory`, ring_scaling.* with `--scaling`."""
    name, axes = "ring", ring_picture.SPEED
    if arguments.memory:
        name, axes = "ring_memory", ring_picture.MEMORY
    elif arguments.scaling:
        name, axes = "ring_scaling", ring_picture.SCALING
    record = write_record(
        name,
        arguments,
        setting=f"{arguments.mask}, {arguments.heads} query and {arguments.kv_heads} key/value heads, head dim {arguments.head_dim}",
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        differences=errors,
        rows=rows,
        memory_fits=memory_fits(rows),
    )
    if importlib.util.find_spec("matplotlib"):
        ring_picture.plot(record, arguments.out / f"{name}.png", axes)
