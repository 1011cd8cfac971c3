"""The repository as a package: what can be imported from its root, what the wheel holds, where the version is written."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import ringattn

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("folder", ["kernels", "launch", "tests", "examples"])
def test_top_level_folders_are_not_packages(folder):
    # a package called kernels would shadow Hugging Face's, which transformers looks for
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.thorough
def test_transformers_runs_from_the_root_of_the_repository():
    code = (
        "import torch, transformers;"
        "from transformers.utils import import_utils;"
        "assert not import_utils.is_kernels_available() or __import__('kernels').__file__;"
        "config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,"
        " num_attention_heads=2);"
        "print(tuple(transformers.LlamaForCausalLM(config)(torch.zeros(1, 4, dtype=torch.long)).logits.shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 4, 8)"


def test_importing_ringattn_imports_no_compiler_and_no_tensor_parallelism():
    # each of these takes longer to import than all of ringattn
    code = (
        "import sys, torch; before = set(sys.modules); import ringattn;"
        "print(sorted({'sympy', 'torch._dynamo', 'torch.distributed.tensor', 'transformers', 'triton'} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_version_is_written_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", ringattn.__version__)
    pattern = re.compile(rf"(?<![\d.]){re.escape(ringattn.__version__)}(?![\d.])")
    sources = [ROOT / "pyproject.toml", *ROOT.glob("ringattn/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    holders = [path.relative_to(ROOT).as_posix() for path in sources if pattern.search(path.read_text())]
    assert holders == ["ringattn/_version.py"]


# hatchling is missing only on GPU hosts without a network, which use their own packages
@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_wheel_holds_both_packages(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"ringattn-{ringattn.__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"ringattn/__init__.py", "ringattn/py.typed", "ringattn/integrations/huggingface.py", "ringattn_kernels/__init__.py"}
    assert wanted | {f"ringattn_kernels/{part}.c" for part in ("arrays", "plans", "submission", "tables")} <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"ringattn", "ringattn_kernels", f"ringattn-{ringattn.__version__}.dist-info"}


def test_modules_are_found_under_their_former_names():
    import ringattn.integrations.loss
    from ringattn.integrations.data import shard_batch
    from ringattn.planner import predict

    import ringattn.training.data
    import ringattn.training.loss
    from ringattn.integrations import causal_lm, tiled, verify

    assert ringattn.integrations.loss is ringattn.training.loss
    assert shard_batch is ringattn.training.data.shard_batch
    assert verify.verify is ringattn.verify
    assert all(map(callable, (ringattn.verify, predict, causal_lm.shift_labels, tiled.tiled)))


def test_no_module_imports_one_that_imports_it():
    """No circle of imports, not even with imports inside functions or for type checkers."""
    imports = {name: sorted(imported(name, path)) for name, path in MODULES.items()}
    open_, closed = [], set()

    def visit(name):
        assert name not in open_, f"a circle of imports: {' -> '.join([*open_[open_.index(name) :], name])}"
        if name not in closed:
            open_.append(name)
            for other in imports[name]:
                visit(other)
            closed.add(open_.pop())

    for name in imports:
        visit(name)


def test_no_two_classes_share_a_name():
    names = [
        node.name.lstrip("_")
        for folder in ("ringattn", "kernels", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted(name for name, count in Counter(names).items() if count > 1) == []


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "ringattn").rglob("*.py"))}


def imported(name, path):
    """The modules of the package that a file imports, anywhere in it."""
    found = set()
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return found & MODULES.keys() - {name}
