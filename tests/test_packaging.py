"""The repository as a package: what is importable from its root, what the wheel holds, where the version is written."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ringattn

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("folder", ["kernels", "launch", "tests", "examples"])
def test_folders_of_the_top_level_are_no_packages(folder):
    # a package called kernels would shadow Hugging Face's, which transformers looks for
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


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


def test_importing_it_imports_no_compiler_and_no_tensor_parallelism():
    # each takes longer than all of ringattn
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


# absent only where a GPU host's own packages are used and nothing can be fetched
@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_wheel_holds_both_packages(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"ringattn-{ringattn.__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"ringattn/__init__.py", "ringattn/py.typed", "ringattn/integrations/huggingface.py", "ringattn_kernels/__init__.py"}
    assert wanted <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"ringattn", "ringattn_kernels", f"ringattn-{ringattn.__version__}.dist-info"}
