"""What docs/troubleshooting.md and docs/launch.md quote exists: messages, files and options."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
LAUNCH = (ROOT / "docs" / "launch.md").read_text()
QUOTED = re.findall(r"```text\n(.*?)\n```", TROUBLES, re.DOTALL)


@cache
def messages() -> list[re.Pattern]:
    """Every text in the sources that could be a message, with anything in the place of what is filled in."""
    found = []
    for path in [*ROOT.glob("ringattn/**/*.py"), *ROOT.glob("kernels/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                texts = [part for part in ast.walk(node.exc) if isinstance(part, (ast.JoinedStr, ast.Constant))]
            elif isinstance(node, ast.Return) and node.value is not None:
                texts = [node.value, *ast.walk(node.value)]
            else:
                continue
            found += [pattern for pattern in map(as_pattern, texts) if pattern is not None]
    return found


def as_pattern(node: ast.AST) -> re.Pattern | None:
    """Of a string, or of what `+` and f-strings put together, if enough of it is fixed to be told by."""
    parts = pieces(node)
    fixed = "".join(part for part in parts if part is not None)
    if len(fixed) < 12:
        return None
    return re.compile("".join(".+?" if part is None else re.escape(part) for part in parts), re.DOTALL)


def pieces(node: ast.AST) -> list[str | None]:
    """The fixed parts of a text; None for each that is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in pieces(value)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*pieces(node.left), *pieces(node.right)]
    return [None]


@pytest.mark.parametrize("message", QUOTED, ids=[text[:40] for text in QUOTED])
def test_a_quoted_message_is_one_of_ours(message):
    assert any(pattern.fullmatch(message) for pattern in messages())


def test_messages_are_told_apart():
    assert len(QUOTED) > 10
    for changed in (QUOTED[0].replace("disagree", "differ"), QUOTED[3].replace("but rank", "and rank"), QUOTED[-1] + "!"):
        assert not any(pattern.fullmatch(changed) for pattern in messages())


@pytest.mark.parametrize("text", [TROUBLES, LAUNCH], ids=["troubleshooting", "launch"])
def test_files_and_links_lead_somewhere(text):
    for path in re.findall(r"\b(?:launch|examples|docs)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    headings = {line.lstrip("# ").lower().replace(",", "").replace(" ", "-") for line in text.split("\n") if line.startswith("#")}
    for target in re.findall(r"\]\(([^)]*)\)", text):
        assert target[1:] in headings if target.startswith("#") else (ROOT / "docs" / target).exists(), target


def test_options_that_are_quoted_exist():
    sources = "".join(path.read_text() for path in (ROOT / "launch").glob("*") if path.is_file())
    theirs = {
        "--nodes",
        "--ntasks-per-node",
        "--map-by",
        "--nproc-per-node",
        "--deepspeed_config",
        "--pid",
        "--steps",
        "--verify",
        "--help",
    }
    for option in set(re.findall(r"(?<![\w-])--[a-z][\w-]*", TROUBLES + LAUNCH)) - theirs:
        assert f'"{option}"' in sources or f"{option} " in sources, option
