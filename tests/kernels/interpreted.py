"""Runs cases through Triton's interpreter in a process of their own; there, this module is a plugin of pytest's that makes it faster."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]


def run(cases: str) -> None:
    """Run a file of this folder. TRITON_INTERPRET decides at import what `triton.jit` means, hence the process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider", "-p", __name__]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    }
    result = subprocess.run([*command, f"tests/kernels/{cases}"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def pytest_configure() -> None:
    """Replace the language's functions once a launch; Triton does it in each call of a function from a kernel, a third of the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    launches = []

    class Launch:
        def __init__(self) -> None:
            self._replaced = replace(language)
            launches.append(self)

        def restore(self) -> None:
            self._replaced.restore()
            launches.clear()

    interpreter._patch_lang = lambda function: nullcontext() if launches else Launch()
