"""Times versions of this library in turns on one GPU, each in a process of its own, beside cuDNN.

A version is a folder with `ringattn` and `kernels`, such as `git archive COMMIT ringattn kernels | tar -x -C FOLDER` makes. All versions
compute each case; their results are compared first. Then each takes its turn to run a burst of calls, in another order each round, so that
all meet the same clocks and temperature: two runs one after the other differ by more than most changes do. Shown are the median burst, in
microseconds a call, and its rate as a share of the first version's. A name before the folder is what the table shows: `old=FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from .shared.cases import log_normal_lengths

WORKER = Path(__file__).with_name("versions_worker.py")
CUDNN = "cuDNN"
_BURST = 60_000  # microseconds of calls in a turn
_SAME = 2e-3  # sums of absolute values of results may differ by so much of themselves


@dataclass(frozen=True)
class Case:
    """A call: `batch` sequences of `tokens`, query heads, K/V heads, the head dims, a mask and what modifies the scores, both by name.

    deterministic: asks torch for deterministic algorithms. lengths: of documents.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    mask: str = "causal"
    score: str = ""
    deterministic: bool = False
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        dims = f"D{self.head_dim}" if self.head_dim == self.v_dim else f"D{self.head_dim}/{self.v_dim}"
        rest = " ".join(filter(None, (self.mask, self.score, "deterministic" if self.deterministic else "")))
        return f"{self.batch} x {self.tokens} {self.heads}:{self.kv_heads} {dims} {rest}"

    @property
    def has_peer(self) -> bool:
        """Whether cuDNN computes the same."""
        return self.mask in ("causal", "full") and not self.score


def cases(head_dim: int, kinds: list[str]) -> list[Case]:
    """The cases of a head dim (192: with values of 128)."""
    dims = head_dim, 128 if head_dim == 192 else head_dim
    long, ungrouped = (1, 16384, 32, 8, *dims), (1, 16384, 16, 16, *dims)
    lengths = tuple(log_normal_lengths(2048, 1.0, 65536, 0))
    found = {
        "plain": [
            Case(*long),
            Case(*long, "full"),
            Case(1, 4096, 32, 8, *dims, "full"),
            Case(16, 4096, 16, 16, *dims),
            Case(64, 1024, 16, 16, *dims),
        ],
        "deterministic": [Case(*long, deterministic=True)],
        "masks": [Case(*long, "window"), Case(1, 65536, 32, 8, *dims, "documents", lengths=lengths)],
        "scores": [Case(*ungrouped, score=score) for score in ("softcap", "alibi", "dropout")],
    }
    return [case for kind in kinds for case in found[kind]]


KINDS = ("plain", "deterministic", "masks", "scores")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trees", nargs="+", metavar="[NAME=]FOLDER", help="versions; the first is the one to compare with")
    parser.add_argument(
        "--directions", nargs="+", choices=("forward", "backward"), default=["backward"], help="(default: backward)"
    )
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128], help="of 8 to 256, multiples of 8 (default: 64 128)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["plain"], help="(default: plain)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each version (default: %(default)s)")


def main(arguments: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("versions are timed on a GPU, and there is none here")
    if wrong := [head_dim for head_dim in arguments.head_dims if head_dim % 8 or not 8 <= head_dim <= 256]:
        raise SystemExit(f"--head-dims must be multiples of 8 from 8 to 256, got {wrong[0]}")
    chosen = [case for head_dim in arguments.head_dims for case in cases(head_dim, arguments.kinds)]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds a call, share of the first version's rate",
        flush=True,
    )
    with workers(versions(arguments.trees)) as found:
        # all compile at once
        for case in chosen:
            ask_all(takers(found, case), dict(do="compile", case=asdict(case)))
        for direction in arguments.directions:
            for case in chosen:
                times = in_turns(takers(found, case), case, direction, arguments.rounds)
                first = next(iter(times.values()))
                row = "   ".join(f"{name} {time:8.0f} {first / time:.3f}" for name, time in times.items())
                print(f"{direction:8} {case!s:48} {row}", flush=True)


def versions(trees: list[str]) -> dict[str, Path]:
    """By name, the folders."""
    found: dict[str, Path] = {}
    for tree in trees:
        name, _, folder = tree.rpartition("=")
        path = Path(folder).resolve()
        if missing := [part for part in ("ringattn", "kernels") if not (path / part).is_dir()]:
            raise SystemExit(f"{tree} is not a version of this library: it has no folder {missing[0]}")
        name = name or path.name
        if name in found or name == CUDNN:
            raise SystemExit(f"{tree} would be shown as {name}, which another one is; give it a name, NAME=FOLDER")
        found[name] = path
    return found


Ask = Callable[[dict], Callable[[], object]]


@contextmanager
def workers(trees: dict[str, Path]) -> Iterator[dict[str, Ask]]:
    """By name, what sends a message to a version's process, and gives what waits for its answer; cuDNN's is the last."""
    processes: dict[str, subprocess.Popen] = {}

    def ask(name: str) -> Ask:
        process = processes[name]

        def send(message: dict) -> Callable[[], object]:
            def answer() -> object:
                line = process.stdout.readline()
                if not line:
                    raise SystemExit(f"{name} ended (its last words are above); it was asked to {message['do']} {message['case']}")
                return json.loads(line)

            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            return answer

        return send

    try:
        for name, folder in [*trees.items(), (CUDNN, Path.cwd())]:
            own = () if name == CUDNN else (str(folder), str(folder / "kernels"))
            places = os.pathsep.join(filter(None, (*own, os.environ.get("PYTHONPATH"))))
            command = [sys.executable, str(WORKER), *([CUDNN] if name == CUDNN else [])]
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes[name] = subprocess.Popen(command, cwd=folder, env=os.environ | dict(PYTHONPATH=places), **pipes)
        yield {name: ask(name) for name in processes}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def takers(found: dict[str, Ask], case: Case) -> dict[str, Ask]:
    return {name: ask for name, ask in found.items() if name != CUDNN or case.has_peer}


def ask_all(found: dict[str, Ask], message: dict) -> dict[str, object]:
    """The answers of all, who work at the same time."""
    waiting = {name: ask(message) for name, ask in found.items()}
    return {name: answer() for name, answer in waiting.items()}


def in_turns(found: dict[str, Ask], case: Case, direction: str, rounds: int) -> dict[str, float]:
    """By name, microseconds of a call: the median of bursts. Results are compared first."""
    message = dict(case=asdict(case), direction=direction)
    sums = {name: ask(message | dict(do="sum"))() for name, ask in found.items()}
    first = next(iter(sums))
    for name, results in sums.items():
        # which pairs are dropped is each version's own
        if case.score != "dropout" and any(abs(x - y) > _SAME * abs(y) for x, y in zip(results, sums[first])):
            raise SystemExit(f"{case}: {name} does not compute what {first} does: {results} and {sums[first]}")
    once = found[first](message | dict(do="time", calls=3))()
    burst = message | dict(do="time", calls=max(2, int(_BURST / once)))
    times: dict[str, list] = {name: [] for name in found}
    order, shuffler = list(found), random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            times[name].append(found[name](burst)())
    return {name: median(values) for name, values in times.items()}
