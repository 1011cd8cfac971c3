"""A door whose packages cannot be imported names the module that is missing, not its own package whatever is missing."""

import importlib
import sys

import pytest

from ringattn.integrations.imports import cannot_import

ABSENT = "a_package_that_nobody_has"
CASES = {
    "the package": (
        ["torch", ABSENT],
        ModuleNotFoundError(name=ABSENT),
        f"but {ABSENT} is not installed: pip install torch {ABSENT}",
    ),
    "the package, after another": (
        [ABSENT],
        ModuleNotFoundError(name="spmd"),
        f"but {ABSENT} is not installed: pip install {ABSENT}",
    ),
    "what it imports": (
        ["torch"],
        ModuleNotFoundError(name=f"{ABSENT}.part"),
        f"which is installed and imports {ABSENT}, but {ABSENT} is not installed: install it",
    ),
    "a name": (
        ["torch"],
        ImportError("cannot import name 'Gone' from 'numpy'", name="numpy"),
        "does not fit: cannot import name 'Gone' from 'numpy'; try another version of numpy",
    ),
    "unknown": (["torch"], ImportError("it is so"), "does not fit: it is so; try another version of it"),
}


@pytest.mark.parametrize(("modules", "error", "message"), CASES.values(), ids=CASES.keys())
def test_the_missing_module_is_named(modules, error, message):
    assert str(cannot_import("a.door", "a package", modules, error)) in (
        f"a.door needs a package, {message}",
        f"a.door needs a package, but what is installed {message}",
    )


@pytest.mark.parametrize(
    ("door", "package", "dependency"),
    [("torchtitan", "torchtitan", "spmd_types"), ("verl_platform", "verl", "ray"), ("lightning", "lightning", "torchmetrics")],
)
def test_doors_name_what_their_package_imports(door, package, dependency, monkeypatch, tmp_path):
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text(f"import {dependency}\n")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"ringattn.integrations.{door}", raising=False)
    monkeypatch.setitem(sys.modules, dependency, None)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=f"which is installed and imports {dependency}, but {dependency} is not installed"):
        importlib.import_module(f"ringattn.integrations.{door}")
