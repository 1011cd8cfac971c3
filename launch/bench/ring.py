"""Measures ring attention on all GPUs of a host: speed, memory and bytes sent, beside its peers and one GPU's kernels.

In one run all methods take turns, forward and backward, in another order each round, and each starts on idle GPUs.
`shared/methods.py` explains their names. A time is that of the slowest rank: the median over the rounds, with quartiles. Two columns of
the table need a word:

    host    milliseconds that both passes take the host, which runs ahead of its GPU
    ratio   of the rate, forward and backward: to the fastest peer if there is one, else to the first method;
            with --scaling to the same method on one rank

Before anything is timed, the results of every method are compared with those of the first. The benchmark starts one process per GPU, or
uses the processes that torchrun started. The host queues a turn while its GPU is still busy, as in training; with `--one-by-one` a turn is
five calls, and each begins when the GPU is idle, so that the host's time counts. With `--device cpu` it runs over gloo; take toy sizes
there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist

import ringattn as ra

from . import ring_report, ring_trace
from .ring_measure import Entry, measure
from .shared.cases import RingCase, add_shape, make_case, parse_mask
from .shared.methods import check_method, make_method
from .shared.peers import FLASH4, PEER_METHODS, is_installed
from .shared.ranks import add_ranks, group_of, start_ranks

_CHECK_TOKENS = 2048  # per rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", help="total tokens (default: 64k, 128k, 512k and 1M)")
    parser.add_argument(
        "--methods",
        nargs="+",
        help="default: ring and gather over every transport, the installed peers, and local; for documents also on balanced shards",
    )
    add_shape(parser)
    add_ranks(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--memory", action="store_true", help="measure peak memory only, at six sizes, and fit it to a line")
    kind.add_argument(
        "--scaling",
        action="store_true",
        help="measure on 1, 2, 4, ... of the ranks in turns, with --tokens per rank (default: 64k)",
    )
    parser.add_argument("--seconds", type=float, default=8, help="time for the rounds of one size after its first (default 8)")
    parser.add_argument("--one-by-one", action="store_true", help="queue nothing ahead: times include the host's")
    parser.add_argument(
        "--trace", action="store_true", help="also profile a pass of each method: write a trace, print the exposed communication"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for ring.json, ring.png and traces")


def main(arguments: argparse.Namespace) -> None:
    if arguments.tokens is None:
        counts = (1,) if arguments.scaling else (1, 2, 3, 4, 6, 8) if arguments.memory else (1, 2, 8, 16)
        arguments.tokens = [n << 16 for n in counts]
    try:
        check(arguments)
    except ValueError as error:
        raise SystemExit(f"bench ring: {error}") from None
    start_ranks(run_rank, arguments)


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for arguments that no rank could run, before any is started."""
    for name in ("heads", "kv_heads", "head_dim", "world_size", "budget", "tokens"):
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
    if arguments.heads % arguments.kv_heads:
        raise ValueError(f"kv_heads is {arguments.kv_heads}, which does not divide the {arguments.heads} heads")
    for tokens in arguments.tokens:
        parse_mask(arguments.mask, tokens)
    for name in arguments.methods or ():
        check_method(name, arguments.device, arguments.mask)


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure every size; rank 0 prints and writes the results after each."""
    names = arguments.methods or _default_methods(arguments)
    everyone = dist.get_world_size()
    sizes = [everyone]
    if arguments.scaling:
        sizes = sorted({everyone, *(1 << n for n in range(everyone.bit_length()))})
    groups = [group_of(size, arguments) for size in sizes]
    shortest = min(arguments.tokens) * (everyone if arguments.scaling else 1)
    small = make_case(min(shortest, _CHECK_TOKENS * everyone), groups[-1], arguments)
    errors = compare(small, names)
    ring_report.say_errors(errors, small.tokens)
    rows = []
    for tokens in arguments.tokens:
        cases = [make_case(tokens * (ranks.size if arguments.scaling else 1), ranks, arguments) for ranks in groups]
        entries = [Entry(name, case, ahead=not arguments.one_by_one) for case in cases for name in names]
        new = measure(entries, None if arguments.memory else arguments.seconds)
        if arguments.trace:
            ring_trace.trace(entries, arguments.out, new)
        ring_report.add_ratios(new, PEER_METHODS)
        rows += new
        if dist.get_rank() == 0:
            ring_report.table(new, header=rows == new)
            ring_report.write(rows, errors, arguments)
    if dist.get_rank() == 0:
        ring_report.say_fits(rows)


def _default_methods(arguments: argparse.Namespace) -> list[str]:
    names = ["ring", "gather"]
    if arguments.device == "cuda":
        names += ["ring+symmetric", "waves-1+symmetric", "gather+symmetric"]
    if arguments.scaling:
        return names
    if arguments.mask == "causal" and not arguments.memory:
        if arguments.kv_heads % dist.get_world_size() == 0:
            names += ["ulysses", *(["ulysses+flash4"] if is_installed(FLASH4) else [])]
        if arguments.device == "cuda":
            names += ["cp-alltoall", "cp-allgather"]
        if is_installed("ring_flash_attn"):
            names.append("ring_flash_attn")
    if not arguments.memory:
        names.append("local")
    return [*names, *(f"{name}@balanced" for name in names)] if arguments.mask.startswith("documents") else names


def compare(case: RingCase, names: list[str]) -> dict[str, float]:
    """Largest difference of out, dq, dk and dv of each method from those of the first, relative to their norm."""
    first, errors = None, {}
    for name in names:
        if name.startswith("local"):
            continue
        method = make_method(name, case, same=True)
        whole = [ra.unshard(x, method.layout, case.ranks.transports[""]).double() for x in method.results()]
        first = first or whole
        errors[name] = max(float((x - y).norm() / y.norm()) for x, y in zip(whole, first))
    return errors
