"""docs/api.md is the output of `launch/repo/api_reference.py`, and holds every public name."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import ringattn
import ringattn_kernels

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def reference():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "launch" / "repo"))
        yield importlib.import_module("api_reference")


@pytest.fixture(scope="module")
def page(reference):
    return reference.build()


def test_the_page_is_up_to_date(page):
    assert (ROOT / "docs" / "api.md").read_text() == page, "run python launch/repo/api_reference.py"


def test_every_public_name_has_its_section(reference, page):
    headings = set(re.findall(r"^#### `(.*)`$", page, re.MULTILINE))
    modules = {name for name in ringattn.__all__ if isinstance(getattr(ringattn, name), type(re))}
    assert set(ringattn.__all__) - modules - {"__version__"} <= headings
    assert set(ringattn_kernels.__all__) <= headings
    assert {"reference.attention", "attach", "shift_labels", "choose_forward"} <= headings
    doors = {path.stem for path in (ROOT / "ringattn" / "integrations").glob("*.py")} - {"__init__"} - reference.INNER
    assert doors <= set(re.findall(r"^## ringattn\.integrations\.(\w+)$", page, re.MULTILINE))


def test_links_lead_to_numbered_headings(page):
    headings = [shown.lower().replace(".", "") for shown in re.findall(r"^#### `(.*)`$", page, re.MULTILINE)]
    slugs = [name + (f"-{headings[:n].count(name)}" if headings[:n].count(name) else "") for n, name in enumerate(headings)]
    assert re.findall(r"\]\(#(.*?)\)", page.split("\n## ")[0]) == slugs


SOURCE = '''
@dataclass
class Point(Base):
    """A point.

    Args:
        x: across,
            further in
        y: up

        z = x + y

    >>> Point(1)
    """

    x: int
    y: float = 0.0
    _cache: dict = None

    @property
    def norm(self) -> float:
        """Its length."""

    def moved(self, by: int, *rest, far=None, **options) -> Point:
        """Elsewhere."""

    def hidden(self):
        pass
'''


def test_a_class_is_shown_with_its_fields_methods_and_docstring(reference):
    text = reference.entry("Point", ast.parse(SOURCE).body[0])
    assert "class Point(x: int, y: float = 0.0)" in text
    assert "- `x`: across,\n  further in\n- `y`: up" in text
    assert "```text\nz = x + y\n```" in text
    assert "```python\n>>> Point(1)\n```" in text
    assert "- `norm`: Its length." in text
    assert "- `moved(by: int, *rest, far=None, **options) -> Point`: Elsewhere." in text
    assert "hidden" not in text


def test_a_long_signature_has_one_argument_per_line(reference):
    node = ast.parse("def f(" + ", ".join(f"argument_{n}: int" for n in range(9)) + ", *, last=1) -> None: pass").body[0]
    lines = reference.signature("f", node).split("\n")
    assert (lines[0], lines[1], lines[-2], lines[-1]) == ("f(", "    argument_0: int,", "    last=1,", ") -> None")


def test_a_public_name_without_a_docstring_is_refused(reference, monkeypatch, tmp_path):
    (tmp_path / "bare.py").write_text('"""Bare."""\ndef public(): pass\ndef _own(): pass\n')
    module = reference.Module("pkg.bare", tmp_path / "bare.py")
    monkeypatch.setattr(reference, "public", lambda: iter([("pkg.bare", [(module, list(module.definitions()))])]))
    with pytest.raises(ValueError, match=r"^pkg\.bare\.public: no docstring"):
        reference.build()
