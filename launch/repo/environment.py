"""Make `.venv`, the environment that the Makefile's targets run in, and install missing packages into it.

There are two ways; the interpreter that runs this file decides:

- If it has a torch that sees a GPU, that torch and all its other packages are used as they are. `.venv` is then an empty
  environment that looks into the interpreter's packages, and only absent packages are installed. If none is absent,
  nothing is fetched, so this works offline. Packages in `OPTIONAL` may stay absent.
- Otherwise `.venv` is an ordinary environment with the package itself (editable) and its `train` and `dev` extras, in the
  versions of `requirements.lock`, whose hashes pip checks. torch comes after them, within the range of pyproject.toml and
  of `SMALL_TORCH`, because its builds differ by index: a CPU build where pip's configured indexes offer one. What the lock
  does not know is printed. If the lock does not apply (`TORCH` is set, or an index lacks one of its versions), that is printed too, and all
  packages come within the ranges of pyproject.toml; but if a package has another hash, there is no environment.

This file uses only the standard library. Two runs at once are safe, and a second run is instant.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
READY = VENV / "ready.json"
LOCK = ROOT / "launch" / "repo" / "requirements.lock"
# newer builds bring gigabytes for GPUs along, where some indexes have older ones for CPUs
SMALL_TORCH = "torch<2.14"
# a GPU host without network runs the tests without them
OPTIONAL = {"ruff", "pyrefly", "hatchling", "deepspeed", "accelerate", "trl", "pytest-xdist"}


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 (an older Python may run this file)
        print(f"Python {sys.version.split()[0]} is too old: ringattn needs 3.10 or newer (make PYTHON=...)")
        return 1
    with open(ROOT / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = fingerprint()
        made = json.loads(READY.read_text()) if READY.exists() else {}
        if made == wanted:
            READY.touch()
            return 0
        fresh = made.get("python") != wanted["python"]
        READY.unlink(missing_ok=True)
        try:
            if sees_gpu():
                borrow_environment()
            else:
                own_environment(fresh)
        except subprocess.CalledProcessError as error:
            print(f"setting up .venv failed: {' '.join(map(str, error.cmd))}")
            return 1
        READY.write_text(json.dumps(wanted))
    return 0


def fingerprint() -> dict[str, str]:
    """What `.venv` was made from. While it stays the same there is nothing to do."""
    sources = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes() + LOCK.read_bytes())
    return {
        "python": f"{sys.executable} {sys.version}",
        "sources": sources.hexdigest(),
        "torch": os.environ.get("TORCH", ""),
    }


def sees_gpu() -> bool:
    """Whether this interpreter has a torch with a working GPU (asked in a child: importing torch is slow and loud)."""
    check = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0


def own_environment(fresh: bool) -> None:
    """An ordinary environment: the project, editable, with its extras."""
    print(f"making .venv with Python {sys.version.split()[0]} and installing into it (minutes, once)", flush=True)
    command = [sys.executable, "-m", "venv", *(["--clear"] if fresh else []), VENV]
    pip = [PYTHON, "-m", "pip"]
    if subprocess.run(command, capture_output=True).returncode != 0:
        # an interpreter without ensurepip (some distributions split it off): its own pip installs from outside
        venv.create(VENV, clear=True, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", PYTHON]
    # compiling all modules takes longer than installing them, and most are never imported
    pip = [*pip, "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    torch = os.environ.get("TORCH")
    project = ["--editable", f"{ROOT}[train,dev]"]
    if torch:
        print(f"TORCH is {torch}: packages come within the ranges of pyproject.toml, without hashes", flush=True)
        run([*pip, torch, *project])
    elif install_locked(pip):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            # everything is there but torch and the libraries that its build needs
            run([*pip, "--no-build-isolation", "--report", report, SMALL_TORCH, *project])
            print_unlocked(json.loads(report.read_text()))
    else:
        run([*pip, SMALL_TORCH, *project])


def install_locked(pip: list) -> bool:
    """Install what the lock has for this Python and platform, apart from torch's builds. Returns whether pip could.

    Raises CalledProcessError if a package has another hash.
    """
    locked = {name: block for name, block in lock().items() if not re.match(r"torch$|nvidia-|cuda-", name)}
    # the packages that others are built with come first, so that builds fetch nothing
    first = {"setuptools", "wheel"} & locked.keys()
    others = sorted(locked.keys() - first)
    # two pips at a time, because each unpacks on one core
    for parts in ([first], [others[::2], others[1::2]]):
        with ThreadPoolExecutor() as threads:
            done = list(threads.map(lambda names: install_hashed(pip, [locked[name] for name in names]), parts))
        for failed in (each for each in done if "DO NOT MATCH THE HASHES" in each.stderr):
            print(f"{failed.stderr}To install other builds without hashes, within the ranges of pyproject.toml: make TORCH=torch")
            failed.check_returncode()
        for failed in (each for each in done if each.returncode):
            reason = ([line for line in failed.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"])[-1]
            print(f"{reason} ({LOCK.name}): packages come within the ranges of pyproject.toml, without hashes", flush=True)
            return False
    return True


def install_hashed(pip: list, blocks: list[str]) -> subprocess.CompletedProcess[str]:
    """What came of pip's installing these blocks of the lock."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder) / "requirements.txt"
        chosen.write_text("".join(blocks))
        command = [*pip, "--require-hashes", "--no-deps", "--no-build-isolation", "--requirement", chosen]
        return subprocess.run(command, stderr=subprocess.PIPE, text=True)


def lock() -> dict[str, str]:
    """Distribution name -> its lines in the lock: a version for each Python and platform, with hashes."""
    blocks: dict[str, str] = {}
    for block in re.findall(r"^[a-z].*(?:\n +--hash.*)+\n", LOCK.read_text(), re.MULTILINE):
        name = block.split("==", 1)[0]
        blocks[name] = blocks.get(name, "") + block
    return blocks


def print_unlocked(report: dict) -> None:
    """Name what pip installed although its hash is not in the lock."""
    known = LOCK.read_text()
    for one in report["install"]:
        archive, package = one["download_info"].get("archive_info", {}), one["metadata"]
        digest = archive.get("hashes", {}).get("sha256")
        if digest and digest not in known:
            print(f"not in {LOCK.name}: {package['name']} {package['version']}, sha256 {digest}", flush=True)


def borrow_environment() -> None:
    """An empty environment that sees this interpreter's packages, plus the packages that those lack."""
    print(f"using the GPU build of torch that {sys.executable} has", flush=True)
    # not --system-site-packages: if this interpreter is itself in an environment, that option would skip it
    venv.create(VENV, clear=True, symlinks=True)
    outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    lines = [f"import site; site.addsitedir({path!r})" for path in outer]
    lines += [str(ROOT), str(ROOT / "kernels")]
    inner = subprocess.check_output([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip()
    Path(inner, "ringattn-borrowed.pth").write_text("\n".join(lines) + "\n")
    missing = {name: requirement for name, requirement in requirements().items() if not installed(name)}
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    needed = [requirement for name, requirement in missing.items() if name not in OPTIONAL]
    if needed:
        run([*install, *needed])
    tools = [requirement for name, requirement in missing.items() if name in OPTIONAL]
    if tools and subprocess.run([*install, "--retries", "0", "--timeout", "5", *tools], capture_output=True).returncode:
        print(f"left out, as they cannot be fetched here: {', '.join(sorted(OPTIONAL & set(missing)))}", flush=True)


def requirements() -> dict[str, str]:
    """Distribution name -> requirement, of the project and its `train` and `dev` extras."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return {
        re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0]: line
        for line in [*project["dependencies"], *extras["train"], *extras["dev"]]
    }


def installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run(command: list) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
