"""Examples in docstrings run, and print what the docstring shows."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

import ringattn

# packages that are not in the development environment, and that a module of ours imports at once
NEEDED = {"ringattn.integrations.lightning": "lightning", "ringattn.integrations.megatron": "megatron"}
FOUND = ["ringattn", *(found.name for found in pkgutil.walk_packages(ringattn.__path__, "ringattn.") if "__" not in found.name)]
MODULES = [name for name in FOUND if name not in NEEDED or importlib.util.find_spec(NEEDED[name])]


if importlib.util.find_spec("trl") is None:  # it needs Python 3.11
    MODULES.remove("ringattn.integrations.trl")


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_the_docstring_shows(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    tests = [test for name in MODULES for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]
    assert len(tests) > 10
