"""What a door raises where a package that it needs cannot be imported: it names the module that is missing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec


def cannot_import(door: str, needs: str, modules: Sequence[str], error: ImportError, install: str = "") -> ImportError:
    """The error of a door, a module's name.

    Args:
        needs: the packages and versions that it needs, in words.
        modules: the packages' names as they are imported, and by default as they are installed.
        error: what importing from them raised.
        install: pip's arguments for them.
    """
    within = (error.name or "").partition(".")[0]
    absent = next((name for name in (*modules, within) if name and find_spec(name) is None), None)
    if absent in modules:
        return ImportError(f"{door} needs {needs}, but {absent} is not installed: pip install {install or ' '.join(modules)}")
    if absent is not None:
        return ImportError(
            f"{door} needs {needs}, which is installed and imports {absent}, but {absent} is not installed: install it"
        )
    return ImportError(
        f"{door} needs {needs}, but what is installed does not fit: {error}; try another version of {within or 'it'}"
    )
