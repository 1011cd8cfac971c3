"""Check that the tests notice mistakes: apply each mutation of `mutations.py` to a copy of the repository, and run its tests there.

    python launch/repo/mutants.py                   # all of them; make mutants
    python launch/repo/mutants.py --only shift      # those whose file, text or reason holds this

A mutant is killed if a test fails. One that survives the tests of its row meets all tests of its folder. At the end,
the tests that killed must pass on an unchanged copy. The result goes to docs/lab/mutants.md if no row was left out. The exit status is
1 if a mutant survives, and 2 if the table is not true. The working tree is never touched.

torch and pytest are imported once. Each run of tests is a fork of this process, which then imports the packages of its copy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "lab" / "mutants.md"
INTERPRETER = "interpreter_cases.py"
LIMIT = 600  # seconds for the tests of a row
OPTIONS = [
    "-x",
    "-q",
    "-m",
    "not gpu",
    "--thorough",
    "-W",
    "ignore::RuntimeWarning",
    "-o",
    "addopts=--import-mode=importlib",
    "-o",
    "timeout=240",
]
OPTIONS += ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", Path(__file__).stem, "--hypothesis-profile", "mutants"]
# folder of a mutation -> tests that a mutant meets if it survives those of its row
WIDER = {
    "ringattn/geometry": "tests/geometry tests/schedule tests/test_attention.py",
    "ringattn/schedule": "tests/schedule tests/predict tests/test_attention.py tests/device",
    "ringattn/predict": "tests/predict",
    "ringattn/transport": "tests/transport tests/distributed",
    "ringattn/device": "tests/device tests/test_attention.py",
    "ringattn/training": "tests/training",
    "ringattn/recurrent": "tests/recurrent",
    "ringattn/integrations": "tests/integrations",
    "ringattn": "tests/runtime tests/distributed tests/test_attention.py tests/test_errors.py tests/test_partial.py",
    "kernels": "tests/kernels",
}


@dataclass(frozen=True)
class MutantFate:
    """How a mutant fared: `killer` is the first test that failed, or None if none did."""

    mutation: Mutation
    killer: str | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the file, the text or the reason of the mutations to try")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs of tests at a time")
    given = parser.parse_args()
    wrong = [f"{m.file} holds {count} times: {m.old!r}" for m in MUTATIONS if (count := occurrences(ROOT, m)) != 1]
    if wrong:
        print("\n".join(["the table is not true, for each old text must occur once:", *wrong]))
        return 2
    chosen = [m for m in MUTATIONS if any(given.only in text for text in (m.file, m.old, m.why))]
    began = time.monotonic()
    prepare()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies = [copy_tree(Path(scratch) / str(job)) for job in range(given.jobs)]
        killers: dict[Mutation, str | None] = {}
        for of_row in (True, False):
            left = [m for m in chosen if killers.get(m) is None]
            for (mutation, _), found in run(copies, [(m, m.tests if of_row else wider(m)) for m in left]):
                killers[mutation] = found
                print(line_of(MutantFate(mutation, found)), flush=True)
        unchanged = [(None, tests) for tests in together(filter(None, killers.values()))]
        broken = [found for _, found in run(copies, unchanged) if found]
    if broken:
        print("the table is not true, for these fail without a mutation too:", *broken, sep="\n")
        return 2
    verdicts = [MutantFate(m, killers[m]) for m in chosen]
    survivors = sum(verdict.killer is None for verdict in verdicts)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(verdicts) - survivors} of {len(verdicts)} mutants killed in {minutes:.0f} minutes")
    if len(chosen) == len(MUTATIONS):
        PAGE.write_text(page(verdicts))
    return int(survivors > 0)


def occurrences(root: Path, mutation: Mutation) -> int:
    return (root / mutation.file).read_text().count(mutation.old)


def together(killers: Iterable[str]) -> list[str]:
    """The tests that killed, for one run of those through Triton's interpreter and one of the others."""
    found = sorted(set(killers))
    parts = [[killer for killer in found if (INTERPRETER in killer) == interpreted] for interpreted in (False, True)]
    return [shlex.join(part) for part in parts if part]


def wider(mutation: Mutation) -> str:
    return next(tests for folder, tests in WIDER.items() if mutation.file.startswith(f"{folder}/"))


def copy_tree(folder: Path) -> Path:
    """The files that git knows, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def prepare() -> None:
    """Import what takes long, once for all runs: whatever knows nothing of the packages of this repository."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # stale bytecode would hide a mutation
    sys.dont_write_bytecode = True
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.tensor  # noqa: F401

    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401


def run(
    copies: Sequence[Path], tasks: Iterable[tuple[Mutation | None, str]]
) -> Iterator[tuple[tuple[Mutation | None, str], str | None]]:
    """Run tests, each with a mutation, in the copies; yields each task and the first test that fails, as they end."""
    waiting, free = list(tasks)[::-1], list(copies)
    running: dict[int, tuple[tuple[Mutation | None, str], Path, Callable[[], None], float]] = {}
    while waiting or running:
        while waiting and free:
            mutation, tests = task = waiting.pop()
            copy = free.pop()
            undo = mutate(copy, mutation)
            running[start(copy, tests)] = task, copy, undo, time.monotonic()
        for pid, (task, copy, undo, began) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                undo()
                free.append(copy)
                yield task, verdict(task[1], status, output_of(copy).read_text(errors="replace"))
            elif time.monotonic() - began > LIMIT:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.05)


def mutate(copy: Path, mutation: Mutation | None) -> Callable[[], None]:
    """Apply a mutation to a copy; returns what undoes it."""
    if mutation is None:
        return lambda: None
    path = copy / mutation.file
    before = path.read_text()
    path.write_text(before.replace(mutation.old, mutation.new))
    return lambda: path.write_text(before) and None


def output_of(copy: Path) -> Path:
    return copy.parent / f"{copy.name}.txt"


def start(copy: Path, tests: str) -> int:
    """Run tests in a copy: the process, which leads a group of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        output = os.open(output_of(copy), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(file, stream)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        os.chdir(copy)
        places = [str(copy), str(copy / "kernels"), str(Path(__file__).parent)]
        sys.path[:0] = places
        os.environ["PYTHONPATH"] = os.pathsep.join(places)
        if INTERPRETER in tests:
            os.environ["TRITON_INTERPRET"] = "1"
        import pytest

        code = int(pytest.main([*OPTIONS, *shlex.split(tests)]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def verdict(tests: str, status: int, output: str) -> str | None:
    """The first test that failed; None if all passed. Raises RuntimeError if no test ran."""
    if os.WIFSIGNALED(status):  # it hung, past the limit
        return shlex.split(tests)[0]
    if os.WEXITSTATUS(status) == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest {tests} ended with {os.WEXITSTATUS(status)}:\n{output[-2000:]}")
    return failed[1]


def pytest_addoption(parser: object) -> None:
    """For pytest, which gets this file as a plugin: random cases are the same in each run, and are not made smaller if they fail."""
    from hypothesis import Phase, settings

    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], derandomize=True, database=None, deadline=None)


def line_of(found: MutantFate) -> str:
    """A row of the table."""
    file = found.mutation.file.removeprefix("ringattn/").removeprefix("kernels/ringattn_kernels/")
    killer = f"`{re.sub(r'.*/', '', found.killer.split('[')[0])}`" if found.killer else "**survives**"
    return f"| `{file}` | {found.mutation.why} | {killer} |"


def page(verdicts: Sequence[MutantFate]) -> str:
    """docs/lab/mutants.md."""
    killed = sum(found.killer is not None for found in verdicts)
    head = f"""# Mistakes that the tests notice

Each row is a mistake in one line, from `launch/repo/mutations.py`, and the first test that failed with it, on a CPU. {killed} of
{len(verdicts)} mutants are killed. `make mutants` tries them all on copies of the repository and writes this page.

| file | the mistake | killed by |
|---|---|---|
"""
    return head + "\n".join(map(line_of, verdicts)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
