"""`launch/repo/triton_versions.py`: which versions it takes, and how it counts. The tests that it runs are tested elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def versions():
    spec = importlib.util.spec_from_file_location("triton_versions", ROOT / "launch" / "repo" / "triton_versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_newest_fix_of_each_minor_version_is_taken(versions):
    offered = ["3.10.0", "3.9.0", "3.7.2", "3.7.10", "3.7.0", "3.6.0", "3.5.1", "3.8.0rc1"]
    assert versions.newest_fixes(offered) == ["3.6.0", "3.7.10", "3.9.0", "3.10.0"]


def test_the_tests_that_it_runs_exist(versions):
    assert all((ROOT / arguments[0]).is_file() for arguments in versions.COLUMNS.values())


@pytest.mark.thorough
def test_passed_and_failed_tests_are_counted_without_those_for_gpus(versions, monkeypatch, tmp_path, capsys):
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n@pytest.mark.gpu\ndef test_on_a_gpu(): pass\n"
    )
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "COLUMNS", {"three": ["test_three.py"], "none": ["test_absent.py"]})
    assert versions.run("three", "3.6.0", {}) == (1, 2)
    assert "assert 1 == 2" in capsys.readouterr().err
    assert versions.run("none", "3.6.0", {}) == (0, 0)


def test_a_version_is_found_before_the_installed_one(versions, tmp_path):
    place = tmp_path / "3.99.0" / "triton"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("__version__ = '3.99.0'\n")
    environment = versions.install("3.99.0", tmp_path)
    assert environment["TRITON_CACHE_DIR"].startswith(str(tmp_path))
    # of another size: Python takes a compiled module for that of its source by the size and the second in which it was written
    (place / "__init__.py").write_text("__version__ = '3.98.0'  # another\n")
    with pytest.raises(AssertionError, match=r"finds Triton 3\.98\.0"):
        versions.install("3.99.0", tmp_path)
