"""Run the kernels' tests that need no GPU under several versions of Triton, and print a table.

    python launch/repo/triton_versions.py            # every minor version that pip offers, the newest fix of each
    python launch/repo/triton_versions.py 3.6.0 3.9.0 --folder /tmp/triton

Each version is installed alone into a temporary folder, which comes first on the path. torch, pytest and all other packages are those of
the Python that runs this file. The tests themselves say what they compile and assert.

A cell of the table is "passed of run"; tests that need a GPU are not run. The exit status is 1 if a test failed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# column of the table -> what pytest runs for it
COLUMNS = {
    "plain kernels": ["tests/kernels/test_variants.py"],
    "Hopper forward": ["tests/kernels/test_hopper_forward.py", "-k", "compiler", "--thorough"],
    "Hopper backward": ["tests/kernels/test_hopper_backward.py", "-k", "compiler", "--thorough"],
    "interpreter": ["tests/kernels/interpreter_cases.py", "-W", "ignore::RuntimeWarning"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="versions of Triton, such as 3.8.0")
    parser.add_argument(
        "--folder", type=Path, help="keep the installed versions in this folder, and use those that are already there"
    )
    arguments = parser.parse_args()
    versions = arguments.versions or newest_fixes(offered())
    failed = False
    print("| Triton | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for version in versions:
            environment = install(version, arguments.folder or Path(scratch))
            cells = [run(column, version, environment) for column in COLUMNS]
            print(f"| {version} | " + " | ".join(f"{passed} of {count}" for passed, count in cells) + " |", flush=True)
            failed |= any(passed < count or count == 0 for passed, count in cells)
    return int(failed)


def offered() -> list[str]:
    """The versions that pip would install here."""
    command = [sys.executable, "-m", "pip", "index", "versions", "triton", "--disable-pip-version-check"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.search(r"Available versions: (.*)", text)[1].split(", ")


def newest_fixes(versions: list[str], oldest: tuple[int, int] = (3, 6)) -> list[str]:
    """The newest fix of each minor version from `oldest` on, in order."""
    numbers = sorted(tuple(map(int, version.split("."))) for version in versions if re.fullmatch(r"\d+\.\d+\.\d+", version))
    newest = {number[:2]: number for number in numbers if number[:2] >= oldest}
    return [".".join(map(str, number)) for number in newest.values()]


def install(version: str, folder: Path) -> dict[str, str]:
    """Install Triton alone into its own folder. Returns the environment variables with which Python finds it first."""
    place = folder / version
    if not (place / "triton").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", place, f"triton=={version}"], check=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (place, ROOT, ROOT / "kernels"))),
        "TRITON_CACHE_DIR": str(folder / f"cache-{version}"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert found == version, f"Python finds Triton {found}, not {version}"
    return environment


def run(column: str, version: str, environment: dict[str, str]) -> tuple[int, int]:
    """(passed, run) of the tests of one column. The output of failed tests goes to stderr."""
    if column == "interpreter":
        environment = environment | {"TRITON_INTERPRET": "1"}
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not gpu",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=--import-mode=importlib",
        ]
        command = [*pytest, "--timeout=0", f"--junitxml={report.name}", *COLUMNS[column]]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        try:
            cases = list(ElementTree.parse(report.name).iter("testcase"))
        except ElementTree.ParseError:
            cases = []
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    if bad or not cases:
        print(f"Triton {version}, {column}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}", file=sys.stderr)
    return len(cases) - len(bad), len(cases)


if __name__ == "__main__":
    sys.exit(main())
