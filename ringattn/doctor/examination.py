"""Examine the machines of a job, all ranks together: is everything equal, connected, fast and exact? Status 0 if so, else 1."""

from __future__ import annotations

import argparse
import json
import os
import socket
import textwrap
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from .board import Board, End, Watch
from .facts import Environment, Finding, KernelChoice, Site, SymmetricMemory, Verdict, Versions
from .measure import Clock, Collectives, Exactness, Links, Speed

CHECKS = (Versions(), Environment(), KernelChoice(), Clock(), Speed(), Collectives(), Links(), Exactness(), SymmetricMemory())


def options() -> argparse.ArgumentParser:
    """The doctor's options, without --help."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the findings, with every rank's records, to this file")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that one stage may take (default: 120)")
    parser.add_argument("--slow", type=float, help="a rank is slow above this many times the median (default: 1.15, on CPUs 3)")
    parser.add_argument(
        "--link", type=float, help="a link is slow below this share of the upper quartile (default: 0.6, on CPUs 0.1)"
    )
    parser.add_argument("--skew", type=float, default=0.5, help="a clock is off above this many seconds (default: 0.5)")
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line; None means the process's own."""
    parser = argparse.ArgumentParser(prog="launch/doctor", description=__doc__, parents=[options()])
    given = parser.parse_args(arguments)
    try:
        complete(given)
    except ValueError as error:
        parser.error(str(error))
    return given


def complete(given: argparse.Namespace) -> None:
    """Fill in what depends on the device. Raises ValueError for values out of range."""
    given.slow = (1.15 if given.device == "cuda" else 3.0) if given.slow is None else given.slow
    given.link = (0.6 if given.device == "cuda" else 0.1) if given.link is None else given.link
    for name in ("timeout", "slow", "link", "skew"):
        if not getattr(given, name) > 0:  # NaN too is refused
            raise ValueError(f"--{name} is {getattr(given, name)}, but must be above 0")
    if given.json is not None and given.json.is_dir():
        raise ValueError(f"--json is {given.json}, which is a folder: give a file")


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine with the options of a command line; None means the process's own."""
    return examine_job(parse(arguments))


def examine_job(options: argparse.Namespace) -> int:
    """Examine this job's machines; the exit status of this rank."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        print(
            "doctor: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set: start it with launch/jobs/torchrun.sh or torchrun, "
            "as in torchrun --nproc-per-node 8 -m ringattn doctor"
        )
        return 2
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # two connections: the watch must not wait while the examination waits on its own
    store, other = (meet(rank, size, serve, options.timeout) for serve in (serves, False))
    if store is None or other is None:
        return 1
    host = socket.gethostname()
    board = Board(store, rank, size, host)
    found: list[Finding] = []
    hosts: list[str] = []
    report = partial(report_findings, found, hosts, options)
    with Watch(Board(other, rank, size, host), options.timeout, report) as watch:
        board.at("arrival")
        hosts += board.swap(host)
        board.at("setting up the process group")
        watch.next_stage()
        backend = "nccl" if device.type == "cuda" else "gloo"
        groups = PrefixStore("group", store)
        dist.init_process_group(backend, store=groups, rank=rank, world_size=size, timeout=timedelta(seconds=4 * options.timeout))
        group = dist.group.WORLD
        assert group is not None
        site = Site(rank, size, tuple(hosts), device, board, group, options.slow, options.link, options.skew)
        examine(site, found, watch)
        if rank == 0:
            report(None)
        board.at("the end")
        board.swap("done")
        dist.destroy_process_group()
    leave(store, size, serves)
    return int(any(finding.verdict is Verdict.LOOK for finding in found))


def examine(site: Site, found: list[Finding], watch: Watch | None = None) -> list[Finding]:
    """Run all checks in turn, on all ranks together. Each appends one finding to `found`, the same on every rank."""
    for check in CHECKS:
        site.board.at(check.name)
        if watch is not None:
            watch.next_stage()
        found.append(check.judge(site, site.board.swap(check.observe(site))))
    return found


def meet(rank: int, size: int, serves: bool, timeout: float) -> Store | None:
    """A connection to the job's store: torchrun's, or one that rank 0 serves (`serves`). None if it cannot be reached."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, size, serves, timedelta(seconds=timeout), wait_for_workers=False)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        print(
            f"doctor: rank {rank} cannot reach {address}:{port}, where the ranks meet, within {timeout:.0f} s: {reason}", flush=True
        )
        return None
    return PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def leave(store: Store, size: int, serves: bool) -> None:
    """Wait until all ranks have left, on the rank that serves the store."""
    if store.add("left", 1) == size:
        store.set("all left", "")
    if serves:
        store.wait(["all left"])


def report_findings(found: list[Finding], hosts: list[str], options: argparse.Namespace, end: End | None) -> None:
    """Print and write the findings. `end` says why the examination is incomplete, if it is."""
    if end is not None:
        found.append(Finding("examination", Verdict.LOOK, end.text, end.ranks))
    print(table(found, hosts), flush=True)
    if options.json is not None:
        write(found, hosts, options)


def table(found: list[Finding], hosts: Sequence[str] = ()) -> str:
    """The findings for a person: a row each, and a matrix of the speed between ranks."""
    head = ("check", "", "look at", "what was seen")
    rows = [(f.check, f.verdict.value, "rank " + ", ".join(map(str, f.ranks)) if f.ranks else "", f.text) for f in found]
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(3)]
    lines = []
    for row in [head, tuple("-" * width for width in (*widths, 13)), *rows]:
        first, *rest = textwrap.wrap(row[3], 100) or [""]
        lines.append("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), first]))
        lines += [" " * (sum(widths) + 6) + line for line in rest]
    for finding in found:
        if finding.check == Links.name and 1 < len(finding.records) <= 16:
            lines += ["", "GB/s a direction, between ranks", "      " + "".join(f"{n:7}" for n in range(len(finding.records)))]
            for to, record in enumerate(finding.records):
                cells = (f"{speed:7.3g}" if source != to else "      -" for source, speed in enumerate(record["GB/s with"]))
                lines.append(f"{to:6}" + "".join(cells))
    bad = [finding.check for finding in found if finding.verdict is Verdict.LOOK]
    if not bad:
        return "\n".join([*lines, "", "all is well"])
    looks = sorted({rank for finding in found for rank in finding.ranks})
    shown = ", ".join(f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}" for rank in looks)
    return "\n".join([*lines, "", f"not well: {', '.join(bad)}" + (f"; look at {shown}" if looks else "")])


def write(found: list[Finding], hosts: Sequence[str], options: argparse.Namespace) -> None:
    """The findings for a program."""
    rows = [
        {"check": f.check, "verdict": f.verdict.value, "look at": f.ranks, "text": f.text, "ranks": list(f.records)} for f in found
    ]
    fine = all(finding.verdict is not Verdict.LOOK for finding in found)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"fine": fine, "device": options.device, "hosts": list(hosts), "checks": rows}, indent=1))
