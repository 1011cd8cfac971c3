"""Examples in docstrings run, and print what the docstring shows."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

import ringattn

# of libraries that the development environment does without, or that need Python 3.11
LIBRARIES = {
    f"ringattn.integrations.{name}": name.split("_")[0]
    for name in ("lightning", "megatron", "torchtitan", "trl", "verl", "verl_platform", "vllm", "vllm_step")
}
NAMES = ["ringattn", *(found.name for found in pkgutil.walk_packages(ringattn.__path__, "ringattn.") if "__" not in found.name)]
MODULES = [name for name in NAMES if name not in LIBRARIES or importlib.util.find_spec(LIBRARIES[name])]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_the_docstring_shows(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    tests = [test for name in MODULES for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]
    assert len(tests) > 10
