"""`launch/repo/environment.py`, which makes the environment of the Makefile's targets."""

from __future__ import annotations

import importlib.util
import json
import re
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
    assert {"torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "pytest", "ruff", "pyrefly"} <= names
    assert "deepspeed" in names
    assert environment.requirements()["pyrefly"].startswith("pyrefly>=")
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


def test_the_lock_has_a_hashed_version_of_every_requirement_within_its_range(environment):
    from packaging.requirements import Requirement

    text = environment.LOCK.read_text()
    assert "://" not in text, "hashes hold for any index"
    locked = environment.lock()
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", " "))]
    assert len(lines) == sum(len(re.findall(r"^\S+==", block, re.MULTILINE)) for block in locked.values())
    for requirement in map(Requirement, environment.requirements().values()):
        versions = re.findall(rf"^{requirement.name}==(\S+)", locked[requirement.name], re.MULTILINE)
        assert versions
        assert all(version in requirement.specifier for version in versions), requirement


class Pip:
    """Stands in for all commands: keeps them, and answers those that install the lock."""

    def __init__(self, returncode=0, stderr=""):
        self.commands, self.installed, self.answer = [], [], (returncode, stderr)

    def run(self, command, **options):
        command = [str(part) for part in command]
        self.commands.append(command)
        if "--report" in command:
            found = {
                "metadata": {"name": "torch", "version": "2.6.0+cpu"},
                "download_info": {"archive_info": {"hashes": {"sha256": "0" * 64}}},
            }
            Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": [found]}))
        if "--require-hashes" in command:
            self.installed += re.findall(r"^[a-z].*", Path(command[-1]).read_text(), re.MULTILINE)
        return subprocess.CompletedProcess(
            command, *((*self.answer[:1], "", self.answer[1]) if "--require-hashes" in command else (0,))
        )


@pytest.fixture
def pip(environment, monkeypatch):
    def use(*answer):
        pip = Pip(*answer)
        monkeypatch.setattr(environment.subprocess, "run", pip.run)
        return pip

    monkeypatch.delenv("TORCH", raising=False)
    return use


def test_an_environment_is_made_of_the_locks_packages_and_what_it_lacks_is_named(environment, pip, capsys):
    found = pip()
    environment.own_environment(fresh=True)
    *_, tools, one, other, project = found.commands
    assert all({"--require-hashes", "--no-deps", "--no-build-isolation"} <= set(command) for command in (tools, one, other))
    versions = re.findall(r"^(?!torch=|nvidia-|cuda-)[a-z].*", environment.LOCK.read_text(), re.MULTILINE)
    assert sorted(found.installed) == sorted(versions)
    assert "--editable" in project and environment.SMALL_TORCH in project
    assert "not in requirements.lock: torch 2.6.0+cpu, sha256 000" in capsys.readouterr().out


@pytest.mark.parametrize("torch", ["", "torch==2.11.0"])
def test_where_the_lock_does_not_apply_packages_come_within_the_ranges(environment, pip, monkeypatch, capsys, torch):
    """An index lacks a version, or another torch is asked for."""
    monkeypatch.setenv("TORCH", torch)
    found = pip(1, "ERROR: No matching distribution found for idna==3.20\n")
    environment.own_environment(fresh=True)
    printed = capsys.readouterr().out
    assert ("TORCH is torch==2.11.0" if torch else "No matching distribution found for idna==3.20") in printed
    assert "packages come within the ranges of pyproject.toml, without hashes" in printed
    assert found.commands[-1][-2:] == ["--editable", f"{environment.ROOT}[train,dev]"]
    assert (torch or environment.SMALL_TORCH) in found.commands[-1]
    assert not torch or environment.SMALL_TORCH not in found.commands[-1]


def test_a_package_of_another_hash_ends_it(environment, pip, capsys):
    pip(1, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n")
    with pytest.raises(subprocess.CalledProcessError):
        environment.own_environment(fresh=True)
    printed = capsys.readouterr().out
    assert "DO NOT MATCH THE HASHES" in printed
    assert "make TORCH=torch" in printed
