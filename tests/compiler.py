"""Whether the parts in C can be compiled here, as Triton compiles its launchers."""

import importlib.util
import os
import shutil

import pytest

there_is_a_compiler = importlib.util.find_spec("triton") and any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang")))
needs_compiler = pytest.mark.skipif(not there_is_a_compiler, reason="there is no compiler")
