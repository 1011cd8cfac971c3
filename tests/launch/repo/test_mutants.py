"""`launch/repo/mutants.py`: the table is true of this tree, and its verdicts are right. The mutants themselves run under `make mutants`."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def mutants():
    path = ROOT / "launch" / "repo" / "mutants.py"
    spec = importlib.util.spec_from_file_location("mutants", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_each_old_text_occurs_once(mutants):
    assert [m.old for m in mutants.MUTATIONS if mutants.occurrences(ROOT, m) != 1] == []
    assert all(m.new != m.old and m.why for m in mutants.MUTATIONS)
    assert len(mutants.MUTATIONS) >= 40


def test_mutated_files_are_still_python(mutants):
    for mutation in (m for m in mutants.MUTATIONS if m.file.endswith(".py")):
        compile((ROOT / mutation.file).read_text().replace(mutation.old, mutation.new), mutation.file, "exec")


def test_the_tests_of_each_row_exist(mutants):
    for tests in {*(m.tests for m in mutants.MUTATIONS), *mutants.WIDER.values()}:
        paths = [part for part in shlex.split(tests) if part.startswith("tests/")]
        assert paths
        assert all((ROOT / path).exists() for path in paths), tests
    for mutation in mutants.MUTATIONS:
        assert any(mutation.file.startswith(f"{folder}/") for folder in mutants.WIDER), mutation.file


def test_a_mutant_is_killed_or_survives(mutants, tmp_path):
    copy = tmp_path / "copy"
    for folder in ("ringattn", "tests"):
        (copy / folder).mkdir(parents=True)
    (copy / "ringattn" / "__init__.py").touch()
    (copy / "tests" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--thorough', action='store_true')\n"
    )
    source = copy / "ringattn" / "one.py"
    source.write_text("one = 1\ntwo = 2\n")
    (copy / "tests" / "test_one.py").write_text("from pathlib import Path\n\n\n" + TEST)
    killed = mutants.Mutation("ringattn/one.py", "one = 1", "one = 3", "one is three", "tests/test_one.py")
    survives = mutants.Mutation("ringattn/one.py", "two = 2", "two = 3", "two is three", "tests/test_one.py")
    tasks = [(mutation, "tests/test_one.py") for mutation in (killed, None, survives)]
    assert list(mutants.run([copy], tasks)) == list(zip(tasks, ("tests/test_one.py::test_one", None, None)))
    assert source.read_text() == "one = 1\ntwo = 2\n"
    assert "**survives**" in mutants.line_of(mutants.MutantFate(survives, None))
    with pytest.raises(RuntimeError, match=r"pytest tests/test_two\.py ended with 4"):
        list(mutants.run([copy], [(None, "tests/test_two.py")]))


TEST = """def test_one():
    assert (Path(__file__).parents[1] / "ringattn" / "one.py").read_text().startswith("one = 1\\n")
"""


def test_the_page_is_that_of_the_table(mutants):
    """`make mutants` has run since the table was changed, and none survived."""
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*) \|$", mutants.PAGE.read_text(), re.MULTILINE)
    assert [why for _, why, _ in rows] == [m.why for m in mutants.MUTATIONS]
    assert not any("survives" in killer for _, _, killer in rows)
