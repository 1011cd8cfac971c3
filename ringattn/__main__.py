"""`python -m ringattn`: `plan` predicts what a layer's attention takes on given GPUs, and `warm` compiles kernels ahead of time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import product
from math import inf

import numpy as np
import torch

from .geometry.layout import Layout, balanced, contiguous, default_layout, striped, zigzag
from .geometry.mask import Mask, causal, documents, full, sliding_window
from .geometry.placement import placed
from .predict import timeline
from .predict.machine import MACHINES, Machine
from .predict.planner import check_work, held_bytes, options, predict, recommend
from .predict.simulation import Prediction, Workload
from .warmup import warm

_GIB = 1 << 30
LAYOUTS: dict[str, Callable[[Mask, int, int], Layout]] = {
    "balanced": balanced,
    "contiguous": lambda _, *sizes: contiguous(*sizes),
    "default": default_layout,
    "placed": placed,
    "striped": lambda _, *sizes: striped(*sizes),
    "zigzag": lambda _, *sizes: zigzag(*sizes),
}
_COLUMNS = (
    "forward ms | fwd+bwd ms | exposed ms | TFLOP/s a GPU | share of the kernels' rate | sent GiB | between nodes GiB | peak GiB"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; None means the process's own."""
    parser = argparse.ArgumentParser(prog="python -m ringattn", description="Attention over sequences too long for one GPU.")
    commands = parser.add_subparsers(required=True)
    plan = commands.add_parser(
        "plan",
        help="predict time, communication and memory of each schedule",
        description=(
            "For one number of GPUs and one length, a table of the schedules; for several, the best schedule of each. The mask "
            "window:TOKENS is causal with the last TOKENS keys, documents:MEAN packs causal documents of log-normal lengths with this mean."
        ),
    )
    plan.add_argument("--gpus", type=int, nargs="+", required=True, help="GPUs in all")
    plan.add_argument("--gpus-per-node", type=int, default=8, help="(default 8)")
    plan.add_argument("--tokens", type=int, nargs="+", required=True, help="tokens of the whole sequence")
    plan.add_argument(
        "--kv-tokens",
        type=int,
        help="keys, if they are others than the queries: an encoder's states, or a document whose last chunk is --tokens",
    )
    plan.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    plan.add_argument("--kv-heads", type=int, default=8, help="K/V heads (default 8)")
    plan.add_argument("--head-dim", type=int, default=128, help="(default 128)")
    plan.add_argument("--mask", default="causal", help="causal (default), full, window:TOKENS or documents:MEAN")
    plan.add_argument("--layout", choices=sorted(LAYOUTS), default="default", help="(default: the mask's default layout)")
    plan.add_argument(
        "--memory-gib",
        type=float,
        help="GPU memory for attention beyond q, k, v, out and their gradients (default: all that these leave free)",
    )
    plan.add_argument("--machine", choices=sorted(MACHINES), default="h200")
    plan.add_argument("--rates", nargs="+", default=[], metavar="NAME=VALUE", help="machine figures to replace, e.g. node_gbs=90")
    plan.add_argument("--nccl", action="store_true", help="move messages over NCCL within nodes too, not by copy engines")
    plan.add_argument("--json", action="store_true", help="print all figures as JSON")
    plan.add_argument("--timeline", metavar="PNG", help="draw the recommended schedule, step by step; needs matplotlib")
    plan.set_defaults(run=_plan, command=plan)
    ready = commands.add_parser(
        "warm",
        help="compile the kernels into Triton's cache",
        description="Run it once on each machine with GPUs, or once with TRITON_CACHE_DIR in a folder that all of them share.",
    )
    ready.add_argument("--head-dim", type=int, nargs="+", default=[128], help="of q and k (default 128)")
    ready.add_argument("--v-head-dim", type=int, help="of v (default: the same)")
    ready.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    ready.set_defaults(run=_warm, command=ready)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except ValueError as error:
        given.command.error(str(error))


def _warm(given: argparse.Namespace) -> None:
    seconds = warm(given.head_dim, v_head_dim=given.v_head_dim, dtype=getattr(torch, given.dtype))
    print(f"kernels of head dim {', '.join(map(str, given.head_dim))} in {given.dtype} are compiled: {seconds:.1f} s")


def _plan(given: argparse.Namespace) -> None:
    machine = MACHINES[given.machine].with_rates(dict(_rate(text) for text in given.rates))
    worlds = list(product(given.gpus, given.tokens))
    if given.timeline and len(worlds) > 1:
        raise ValueError(f"--timeline draws one world, but {len(worlds)} are given: give one value of --gpus and one of --tokens")
    if given.timeline:
        timeline.need_figures()
    found = []
    for gpus, tokens in worlds:
        mask = parse_mask(given.mask, tokens)
        keys = {}
        if given.kv_tokens is not None:
            if given.mask.startswith("documents"):
                raise ValueError(
                    "--kv-tokens goes with the masks causal, full and window:TOKENS, whose last query is at the last key"
                )
            keys = dict(kv_tokens=given.kv_tokens, q_offset=max(0, given.kv_tokens - tokens))
        work = Workload(tokens, given.heads, given.kv_heads, given.head_dim, mask, LAYOUTS[given.layout], **keys)
        check_work(work, gpus, given.gpus_per_node)
        memory = _budget(given.memory_gib, machine, work, gpus)
        predictions = [
            predict(machine, work, gpus, given.gpus_per_node, option)
            for option in options(work, gpus, given.gpus_per_node, nccl=given.nccl)
        ]
        found.append((gpus, tokens, predictions, recommend(predictions, memory), memory))
    if given.json:
        print(json.dumps([_record(machine, *world) for world in found], indent=1))
    elif len(found) == 1:
        _print_world(*found[0])
    else:
        _print_worlds(found)
    if given.timeline:
        _, _, predictions, best, _ = found[0]
        try:
            timeline.draw(best or min(predictions, key=lambda p: p.peak), given.timeline)
        except OSError as error:
            raise ValueError(f"--timeline cannot be saved: {error}") from None
        print(f"timeline: {given.timeline}", file=sys.stderr)


def parse_mask(text: str, tokens: int) -> Mask:
    """The mask that `text` names, for a sequence of so many tokens. Raises ValueError if it names none."""
    word, _, number = text.partition(":")
    if text in ("causal", "full"):
        return causal() if text == "causal" else full()
    if word == "window" and number.isdigit() and int(number) > 0:
        return sliding_window(int(number) - 1)
    if word == "documents" and number.isdigit() and int(number) > 0:
        return documents(lengths=_log_normal(int(number), tokens))
    raise ValueError(f"mask is {text!r}, but must be causal, full, window:TOKENS or documents:MEAN, such as window:4096")


def _log_normal(mean: int, tokens: int) -> list[int]:
    """Lengths of documents that fill `tokens`: log-normal, with a deviation of the logarithm of 1, the same in every run."""
    generator = np.random.default_rng(0)
    lengths = []
    left = max(1, tokens)
    while left > 0:
        lengths.append(min(left, max(1, int(generator.lognormal(np.log(mean) - 0.5)))))
        left -= lengths[-1]
    return lengths


def _rate(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--rates has {text!r}, but takes NAME=VALUE, such as node_gbs=90") from None


def _budget(memory_gib: float | None, machine: Machine, work: Workload, gpus: int) -> float:
    """Bytes of a GPU for attention beyond q, k, v, out and their gradients."""
    if memory_gib is not None:
        if not 0 < memory_gib < inf:
            raise ValueError(f"memory_gib is {memory_gib}, but must be more than 0, and finite")
        return memory_gib * _GIB
    return machine.memory_gib * _GIB - held_bytes(work, gpus)


def _figures(p: Prediction) -> str:
    times = f"{p.forward * 1e3:,.1f} | {p.total * 1e3:,.1f} | {p.exposed * 1e3:,.1f}"
    rates = f"{p.tflops:.0f} | {p.alone / p.total:.2f}"
    return f"{times} | {rates} | {p.sent / _GIB:.2f} | {p.sent_between_nodes / _GIB:.2f} | {p.peak / _GIB:.2f}"


def _print_world(gpus: int, tokens: int, predictions: list[Prediction], best: Prediction | None, memory: float) -> None:
    print(f"{gpus:,} GPU{'s' * (gpus > 1)}, {tokens:,} token{'s' * (tokens > 1)}: one layer, predicted\n")
    print(f"| schedule | {_COLUMNS} |")
    print("|---" * 9 + "|")
    for p in predictions:
        mark = " (recommended)" if p is best else " (too large)" if p.peak > memory else ""
        print(f"| {p.option}{mark} | {_figures(p)} |")
    if best is None:
        print(f"\nNothing fits in {max(memory, 0) / _GIB:.1f} GiB a GPU beyond inputs, output and gradients: take more GPUs.")


def _print_worlds(found: list) -> None:
    print(f"| GPUs | tokens | schedule | {_COLUMNS} |")
    print("|---" * 11 + "|")
    for gpus, tokens, _, best, _ in found:
        row = f"{best.option} | {_figures(best)}" if best is not None else "does not fit" + " | " * 8
        print(f"| {gpus:,} | {tokens:,} | {row} |")


def _record(
    machine: Machine, gpus: int, tokens: int, predictions: list[Prediction], best: Prediction | None, memory: float
) -> dict:
    names = ("forward", "backward", "total", "exposed", "alone", "tflops", "sent", "sent_between_nodes", "peak")
    return {
        "machine": machine.name,
        "gpus": gpus,
        "tokens": tokens,
        "memory": memory,
        "recommended": None if best is None else str(best.option),
        "schedules": [{"schedule": str(p.option), **{name: getattr(p, name) for name in names}} for p in predictions],
    }


if __name__ == "__main__":
    main()
