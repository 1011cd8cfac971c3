"""`launch/repo/environment.py`, which makes the environment of the Makefile's targets."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The module, working in a temporary folder."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "launch" / "repo" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(module, "READY", tmp_path / ".venv" / "ready.json")
    return module


def test_requirements_are_those_of_the_project(environment):
    names = set(environment.requirements())
    assert {"torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "pytest", "ruff", "pyright"} <= names
    assert "deepspeed" in names
    assert environment.requirements()["pyright"].startswith("pyright[nodejs]")
    assert names >= environment.OPTIONAL


def test_a_borrowed_environment_sees_the_interpreters_packages_and_fetches_nothing(environment, monkeypatch):
    monkeypatch.setattr(environment, "sees_gpu", lambda: True)
    monkeypatch.setattr(environment, "requirements", lambda: {"torch": "torch", "pytest": "pytest"})
    monkeypatch.setattr(environment, "run", lambda command: pytest.fail(f"nothing is missing, but {command} was run"))
    assert environment.main() == 0
    code = "import importlib.util as u, sys; print(u.find_spec('torch').origin, sys.prefix)"
    torch_at, prefix = subprocess.check_output([environment.PYTHON, "-c", code], text=True, cwd=ROOT.parent).split()
    assert torch_at == importlib.util.find_spec("torch").origin
    assert Path(prefix) == environment.VENV != Path(sys.prefix)


def test_a_second_run_does_nothing_until_its_sources_change(environment, monkeypatch):
    made = []
    monkeypatch.setattr(environment, "sees_gpu", lambda: False)
    monkeypatch.setattr(environment, "own_environment", lambda fresh: (made.append(fresh), environment.VENV.mkdir(exist_ok=True)))
    for _ in range(2):
        assert environment.main() == 0
    assert made == [True], "made once, from scratch"
    monkeypatch.setenv("TORCH", "torch==2.11.0")
    assert environment.main() == 0
    assert made == [True, False], "another torch goes into the same environment"


def test_a_failed_installation_is_reported_and_tried_again(environment, monkeypatch, capsys):
    def fail(fresh):
        environment.VENV.mkdir(exist_ok=True)
        raise subprocess.CalledProcessError(1, ["pip", "install"])

    monkeypatch.setattr(environment, "sees_gpu", lambda: False)
    monkeypatch.setattr(environment, "own_environment", fail)
    for _ in range(2):
        assert environment.main() == 1
        assert "setting up .venv failed: pip install" in capsys.readouterr().out
