"""No two public classes share a name in launch/ and the two packages."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_class_of_launch_shares_its_name():
    places = defaultdict(list)
    for folder in ("launch", "ringattn", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(path.relative_to(ROOT).as_posix())
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not {name: found for name, found in shared.items() if any(path.startswith("launch/") for path in found)}


def test_launch_is_not_a_package():
    assert not (ROOT / "launch" / "__init__.py").exists()
