"""Check that the tests notice mistakes: apply each mutation of `mutations.py` to a copy of the repository, and run its tests there.

    python launch/repo/mutants.py                   # all of them; make mutants
    python launch/repo/mutants.py --only shift      # those whose file, text or reason holds this

A mutant is killed if a test fails, or hangs past its limit. One that survives the tests of its row meets all tests of its folder. First,
the tests of all rows must pass on an unchanged copy. The result goes to docs/lab/mutants.md if no row was left out. The exit status is 1
if a mutant survives, and 2 if the table is not true. The working tree is never touched.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parent))

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "lab" / "mutants.md"
INTERPRETER = "interpreter_cases.py"
LIMIT = 600  # seconds for the tests of a row
# folder of a mutation -> tests that a mutant meets if it survives those of its row
WIDER = {
    "ringattn/geometry": "tests/geometry tests/schedule tests/test_attention.py",
    "ringattn/schedule": "tests/schedule tests/predict tests/test_attention.py tests/device",
    "ringattn/predict": "tests/predict",
    "ringattn/transport": "tests/transport tests/distributed",
    "ringattn/device": "tests/device tests/test_attention.py",
    "ringattn/training": "tests/training",
    "ringattn/integrations": "tests/integrations",
    "ringattn": "tests/runtime tests/distributed tests/test_attention.py tests/test_errors.py tests/test_partial.py",
    "kernels": "tests/kernels",
}


@dataclass(frozen=True)
class Verdict:
    """How a mutant fared: `killer` is the first test that failed, or None if none did."""

    mutation: Mutation
    killer: str | None
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the file, the text or the reason of the mutations to try")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    given = parser.parse_args()
    wrong = [f"{m.file} holds {count} times: {m.old!r}" for m in MUTATIONS if (count := occurrences(ROOT, m)) != 1]
    if wrong:
        print("\n".join(["the table is not true, for each old text must occur once:", *wrong]))
        return 2
    chosen = [m for m in MUTATIONS if any(given.only in text for text in (m.file, m.old, m.why))]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(given.jobs):
            copies.put(copy_tree(Path(scratch) / str(job)))

        def in_a_copy(function, argument):
            copy = copies.get()
            try:
                return function(copy, argument)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(given.jobs) as pool:
            rows = list(dict.fromkeys(m.tests for m in chosen))
            broken = [found for found in pool.map(lambda tests: in_a_copy(first_failure, tests), rows) if found]
            if broken:
                print("without any mutation these fail:", *broken, sep="\n")
                return 2
            verdicts = []
            for verdict in pool.map(lambda m: in_a_copy(judge, m), chosen):
                verdicts.append(verdict)
                print(line_of(verdict), f"{verdict.seconds:.0f} s |", flush=True)
    survivors = [verdict for verdict in verdicts if verdict.killer is None]
    minutes = (time.monotonic() - began) / 60
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants killed in {minutes:.0f} minutes")
    if len(chosen) == len(MUTATIONS):
        PAGE.write_text(page(verdicts))
    return int(bool(survivors))


def occurrences(root: Path, mutation: Mutation) -> int:
    return (root / mutation.file).read_text().count(mutation.old)


def copy_tree(folder: Path) -> Path:
    """The files that git knows, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def judge(copy: Path, mutation: Mutation) -> Verdict:
    """Apply a mutation to a copy, run tests until one fails, and undo it."""
    path = copy / mutation.file
    before = path.read_text()
    began = time.monotonic()
    try:
        path.write_text(before.replace(mutation.old, mutation.new))
        wider = next(tests for folder, tests in WIDER.items() if mutation.file.startswith(f"{folder}/"))
        killer = first_failure(copy, mutation.tests) or first_failure(copy, wider)
    finally:
        path.write_text(before)
    return Verdict(mutation, killer, time.monotonic() - began)


def first_failure(copy: Path, tests: str) -> str | None:
    """The first test that fails in a copy; None if all pass. Raises RuntimeError if there is no test."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-o", "addopts=--import-mode=importlib", "-o", "timeout=120", "-W", "ignore::RuntimeWarning"]
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{copy / 'kernels'}", "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutation and its undoing may have the same time and size
    if INTERPRETER in tests:
        environment["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(
        [*command, *shlex.split(tests)],
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"{tests}: more than {LIMIT} s"
    if process.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if failed is None and "Timeout" not in output:
        raise RuntimeError(f"pytest {tests} ended with {process.returncode}:\n{output[-2000:]}")
    return failed[1] if failed else f"{tests}: a timeout"


def line_of(verdict: Verdict) -> str:
    """A row of the table."""
    mutation = verdict.mutation
    killer = f"`{re.sub(r'.*/', '', verdict.killer)[:90]}`" if verdict.killer else "**survives**"
    return f"| `{mutation.file.removeprefix('ringattn/').removeprefix('kernels/ringattn_kernels/')}` | {mutation.why} | {killer} |"


def page(verdicts: Iterable[Verdict]) -> str:
    """docs/lab/mutants.md."""
    verdicts = list(verdicts)
    killed = sum(verdict.killer is not None for verdict in verdicts)
    head = f"""# Mistakes that the tests notice

Each row is a mistake in one line, from `launch/repo/mutations.py`, and the first test that failed with it, on a CPU. {killed} of
{len(verdicts)} mutants are killed. `make mutants` tries them all on copies of the repository and writes this page.

| file | the mistake | killed by |
|---|---|---|
"""
    return head + "\n".join(map(line_of, verdicts)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
