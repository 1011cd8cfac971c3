"""Measures the kernels of one GPU, forward and backward, beside PyTorch's attentions and FlashAttention-4 in the same run.

A rate, in TFLOP/s, is operations on live pairs over the median time (`kernels_cases.py` says how operations are counted). All contestants
of a case, and a dense 8192^3 matrix product, take turns in random order, each on an idle GPU. Kinds of cases:

    dense   causal or full, q/k and v of one length
    zigzag  what one of 8 ranks of 16k tokens computes, in one table of tiles; beside a dense causal call of as many operations
    packed  32 documents of mixed length in 64k tokens, causal within each; peers by their variable-length calls and block masks
    short   few blocks of queries or keys: a short question against long keys, few heads; beside ours with no block split
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
import triton
from triton.runtime.errors import OutOfResources

from ringattn.geometry.plan import live_pairs
from ringattn_kernels.config import overridden

from . import kernels_peers as contestants
from .kernels_cases import HEAD_DIMS, KINDS, KernelCase, PackedCase, ShortCase, ZigzagCase, quick, table
from .kernels_picture import DIRECTIONS, plot
from .shared.timing import Spread, spreads

WHOLE = "whole blocks"
IMAGE = Path("runs/bench/kernels.png")


def add_arguments(parser) -> None:
    parser.add_argument("--quick", action="store_true", help="measure a few cases in less than 90 seconds, beside the first peer")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--sequences", type=int, nargs="+", help="lengths of dense cases (default: 4k to 64k)")
    parser.add_argument(
        "--head-dims",
        nargs="+",
        help=f"of dense cases; 192/128 is 192 of q and k, 128 of v (default: {' '.join(HEAD_DIMS)})",
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8], help="key/value heads of dense cases")
    parser.add_argument("--masks", nargs="+", default=["causal", "full"], choices=["causal", "full"], help="masks of dense cases")
    parser.add_argument(
        "--peers", nargs="+", choices=contestants.PEERS, help="default: the installed ones; flex for packed cases only"
    )
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS, choices=DIRECTIONS)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--plot", type=Path, nargs="?", const=IMAGE, help=f"draw the figures (without a file's name: {IMAGE})")
    parser.add_argument("--from", dest="source", type=Path, help="read the figures from this JSON file and measure nothing")


def main(arguments) -> None:
    if arguments.source is not None:
        record = json.loads(arguments.source.read_text())
        print(heading(record))
        for row in record["rows"]:
            print(line(row))
    else:
        record = measure_all(arguments)
    if arguments.plot is not None:
        plot(record, arguments.plot)


def measure_all(arguments) -> dict:
    """Measure all cases; print each, and write the JSON file again after each."""
    if not torch.cuda.is_available():
        sys.exit("bench kernels measures on a GPU, and torch sees none here; --from shows and draws recorded figures")
    cases = quick() if arguments.quick else table(
        arguments.kinds, arguments.sequences, arguments.head_dims, arguments.heads, arguments.kv_heads, arguments.masks
    )  # fmt: skip
    record = {
        "device": torch.cuda.get_device_name() if overridden() is None else f"{torch.cuda.get_device_name()} as {overridden()}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": str(date.today()),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }
    print(heading(record))
    for case in cases:
        record["rows"].append(measure(case, peers_of(case, arguments.peers, arguments.quick), arguments.directions))
        print(line(record["rows"][-1]), flush=True)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(record, indent=1))
        torch.cuda.empty_cache()
    return record


def peers_of(case: KernelCase, wanted: list[str] | None, is_quick: bool) -> list[str]:
    """The peers that are measured beside ours on a case."""
    if isinstance(case, ZigzagCase):
        return []
    if wanted:
        return wanted
    if is_quick:
        return ["cudnn", "flash2"] if isinstance(case, PackedCase) else ["cudnn"]
    return contestants.installed() + (["flex"] if isinstance(case, PackedCase) else [])


def measure(case: KernelCase, peers: list[str], directions: Sequence[str] = DIRECTIONS) -> dict:
    """Rates of all contestants of a case, by name and direction, and the reason for each that could not take part."""
    inputs = contestants.tensors(case)
    functions, flop, missing = {"matmul": contestants.matmul()}, {"matmul": dict.fromkeys(DIRECTIONS, contestants.MATMUL_FLOP)}, {}
    for name, mode in contestants.BACKWARD_MODES.items():
        functions[name] = contestants.ours(case, inputs, **mode)
    if isinstance(case, ZigzagCase):
        dense = case.dense_alike
        for name, mode in contestants.BACKWARD_MODES.items():
            functions[name + ", dense"] = contestants.ours(dense, contestants.tensors(dense), **mode)
            flop[name + ", dense"] = {direction: dense.flop(direction) for direction in DIRECTIONS}
    if isinstance(case, ShortCase):
        functions[f"ringattn, {WHOLE}"] = contestants.ours(case, inputs, splits=1, deterministic=False)
    for peer in peers:
        found = take_part(peer, case, inputs)
        if isinstance(found, str):
            missing[peer] = found
        else:
            functions[peer] = found
    repeats = int(min(9, max(5, 1e14 / case.flop("forward"))))
    rates: dict[str, dict[str, dict]] = {name: {} for name in functions}
    for direction in directions:
        # both modes of the backward share one forward
        taking_part = {
            name: getattr(passes, direction)
            for name, passes in functions.items()
            if direction == "backward" or "deterministic" not in name
        }
        for name, spread in spreads(taking_part, repeats).items():
            rates[name][direction] = rated(spread, flop.get(name, {}).get(direction) or case.flop(direction))
    facts = {"case": case.name, "kind": case.kind, "tokens": case.tokens, "heads": case.heads, "kv_heads": case.kv_heads}
    facts |= {"head_dim": case.head_dim, "v_dim": case.v_dim, "mask": case.mask, "pairs": live_pairs(case.tiles)}
    return facts | {"kernels": contestants.choices(case, inputs), "rates": rates, "missing": missing}


def take_part(peer: str, case: KernelCase, inputs: contestants.Tensors) -> contestants.Passes | str:
    """A peer's passes, each run once, or the reason why it cannot compute this case."""
    try:
        passes = contestants.PEERS[peer](case, inputs)
        passes.backward()
        apart = difference(contestants.ours(case, inputs).forward()[0], passes.forward())
    except (ImportError, RuntimeError, AssertionError, OutOfResources) as error:  # a peer is not installed, or refuses the shape
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return passes if apart < 0.02 else f"its result differs from ours by {apart:.1%}"


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The relative difference, in the Euclidean norm, of our (1, s, h, d) from a peer's (1, h, s, d) or (s, h, d)."""
    theirs = theirs[None] if theirs.dim() == 3 else theirs
    theirs = theirs if theirs.shape == ours.shape else theirs.transpose(1, 2)
    return ((theirs - ours).float().norm() / ours.float().norm()).item()


def rated(spread: Spread, flop: float) -> dict[str, float]:
    """Milliseconds, and TFLOP/s of the median and both quartiles."""
    tflops = {"tflops": flop / spread.median / 1e9, "low": flop / spread.upper / 1e9, "high": flop / spread.lower / 1e9}
    return {"ms": spread.median} | tflops


def heading(record: dict) -> str:
    """Machine, versions and the head of the table."""
    versions = ", ".join(f"{name} {record[name]}" for name in ("torch", "triton", "cudnn"))
    head = f"{record['device']}, {versions}; TFLOP/s forward / backward, ± half the interquartile range"
    columns = "| case | kernels | ringattn | share of matmul | others | ratio |"
    return "\n".join([head, columns, "|" + " --- |" * 6])


def line(row: dict) -> str:
    """A row of the table.

    Its columns: the case; which of our kernels ran (forward, backward, deterministic backward); our rate; its share of the matrix
    product's; the others' rates; our ratio to the first of the others.
    """
    rates = dict(row["rates"])
    matmul, mine = rates.pop("matmul"), rates.pop("ringattn")
    share = " / ".join(f"{mine[d]['tflops'] / matmul[d]['tflops']:.2f}" for d in mine)
    others = [f"{name} {cell(rate)}" for name, rate in rates.items() if rate] + [f"{name}: not for this" for name in row["missing"]]
    rivals = [rate for name, rate in rates.items() if "deterministic" not in name and WHOLE not in name]
    ratio = " / ".join(f"{mine[d]['tflops'] / rivals[0][d]['tflops']:.2f}" for d in mine) if rivals else ""
    kernels = " / ".join(choice.split(":")[0] for choice in row["kernels"].values())
    return f"| {row['case']} | {kernels} | {cell(mine)} | {share} | {'; '.join(others)} | {ratio} |"


def cell(rate: dict[str, dict[str, float]]) -> str:
    """`646 ± 3 / 511 ± 2`, with a dash for a direction that was not measured."""
    found = [rate.get(direction) for direction in DIRECTIONS]
    return " / ".join(f"{r['tflops']:.0f} ± {(r['high'] - r['low']) / 2:.0f}" if r else "-" for r in found)
