"""Runs cases through Triton's interpreter in a process of their own; there, this module is a plugin of pytest's that makes it faster."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(*cases: str) -> None:
    """Run files of this folder. TRITON_INTERPRET decides at import what `triton.jit` means, hence the process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider", "-p", __name__]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    }
    result = subprocess.run(
        [*command, *(f"tests/kernels/{name}" for name in cases)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def pytest_configure() -> None:
    """Save two thirds of the interpreter's time: leave out what has no effect, and what has been computed before."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    _replace_once_a_launch(interpreter)
    if not interpreter.InterpreterOptions.debug:
        # the check of each sum of integers ends in an assertion that counts only with debug
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _share_types(interpreter)


def _replace_once_a_launch(interpreter) -> None:
    """Replace the language's functions once a launch; Triton does it in each call of a function from a kernel."""
    import triton.language as tl

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


def _share_types(interpreter) -> None:
    """Tensors of one type share their shape, and block types of one dtype and shape their fields: nothing changes either."""
    import triton.language as tl

    make_type, make_tensor, numpy_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}
    types: dict[tuple, dict] = {}
    shapes: dict[tuple, tuple] = {}

    def block_type(self, element_ty, shape):
        key = type(element_ty), element_ty.name, tuple(int(x) for x in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])

    def tensor(self, handle, type):
        if (found := shapes.get(type.name)) is None:
            make_tensor(self, handle, type)
            shapes[type.name] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = found

    def dtype(type):
        # Triton makes a table of all dtypes in each call
        if type.name not in dtypes:
            dtypes[type.name] = numpy_dtype(type)
        return dtypes[type.name]

    tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, dtype
