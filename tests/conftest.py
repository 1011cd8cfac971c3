"""Fixtures of all tests: `gloo`, eight ranks to run functions on, and the strategies of `strategies.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def _load(name: str):
    """A module beside this file: with importlib mode the folder is not on the path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


ranks = _load("ranks")
strategies = _load("strategies")


def pytest_configure(config):
    config.pluginmanager.register(strategies)


@pytest.fixture(scope="session")
def gloo():
    """Ranks over gloo: `gloo.run(world_size, function, *args)`."""
    processes = ranks.Ranks("gloo", 8)
    yield processes
    processes.close()
