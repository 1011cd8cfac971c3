"""Importing the package loads nothing of Triton until a kernel is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

import ringattn_kernels as rk

ROOT = Path(__file__).resolve().parents[2]


def test_tables_and_queries_import_without_triton():
    # None in sys.modules makes an import fail
    code = (
        "import sys; sys.modules['triton'] = None;"
        "import ringattn_kernels, ringattn_kernels.table, ringattn_kernels.queries;"
        "from ringattn_kernels import Queries, TileTable;"
        "print(sorted(m for m in sys.modules if m.startswith('triton')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "kernels", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['triton']"


def test_every_public_name_is_found_by_its_first_use():
    assert set(rk.__all__) <= set(dir(rk))
    for name in rk.__all__:
        assert getattr(rk, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'forwards'"):
        _ = rk.forwards


@pytest.mark.thorough
def test_modules_of_the_package_do_not_hide_its_functions():
    code = "import ringattn_kernels.attention, ringattn_kernels.statistics, ringattn_kernels as rk; print(rk.forward.__module__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "kernels", capture_output=True, text=True)
    assert done.stdout.strip() == "ringattn_kernels.attention", done.stderr
