"""What the pages quote exists: messages, files, headings and options. And no page takes longer to read than ten minutes."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
LAUNCH = (ROOT / "docs" / "launch.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LONGEST = 2600  # words of a page
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
    shard = next(text for text in QUOTED if "but rank" in text)
    for changed in (QUOTED[0].replace("disagree", "differ"), shard.replace("but rank", "and rank"), QUOTED[-1] + "!"):
        assert not any(pattern.fullmatch(changed) for pattern in messages())


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings; those of one name are numbered from the second on."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    names = [
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.split("\n") if line.startswith("#")
    ]
    return {name + (f"-{names[:n].count(name)}" if name in names[:n] else "") for n, name in enumerate(names)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_links_lead_somewhere(page):
    text = page.read_text()
    for path in re.findall(r"\b(?:launch|examples|docs|tests|kernels|ringattn)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([^)\s]*)\)", text):
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), target
        assert not anchor or anchor in slugs(other), target


# what a command runs -> where its options are defined
PROGRAMS = {
    "-m ringattn": "ringattn/__main__.py",
    "-m ringattn_kernels.variants": "kernels/ringattn_kernels/variants.py",
    "examples/finetune_long_document.py": "examples/finetune/settings.py",
    "launch/doctor": "ringattn/doctor/examination.py",
}


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The program of each command that a text quotes, as a path or `-m module`, and the options that follow it."""
    found = []
    for quoted in re.findall(r"`([^`\n]+(?:\n[^`\n]+)*)`|^    (\S.*)$", text.replace("\\\n", " "), re.MULTILINE):
        line = " ".join("".join(quoted).split())
        for program, rest in re.findall(
            r"(?:python|torchrun.*?) (-m [\w.]+|launch/bench(?: [a-z]\w*)?|launch/doctor|(?:launch/repo|examples)/\w+\.py)([^#|]*)",
            line,
        ):
            found.append((program, re.findall(r"(?<![\w-])--[a-z][\w-]*", rest.split(" -- ")[0])))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_programs_take_the_options_that_commands_give_them(page):
    for program, options in commands(page.read_text()):
        source = sources(program) if options else ""
        for option in set(options) - {"--help"}:
            assert f'"{option}"' in source, (program, option)


def sources(program: str) -> str:
    """The text of the files that define a program's options."""
    path, _, command = program.partition(" ")
    if path == "launch/bench":
        files = [ROOT / path / f"{command or '__main__'}.py", *(ROOT / path / "shared").glob("*.py")]
    else:
        files = [ROOT / PROGRAMS.get(program, path)]
        files += [ROOT / PROGRAMS["launch/doctor"]] * (program == "-m ringattn")
    return "".join(file.read_text() for file in files)


def test_commands_are_read_with_their_options():
    text = "first `python launch/bench ring --tokens 8 \\\n --trace`\n\n    python -m ringattn plan --gpus 8 -- --more\n"
    assert commands(text) == [("launch/bench ring", ["--tokens", "--trace"]), ("-m ringattn", ["--gpus"])]
    assert commands("`launch/jobs/torchrun.sh launch/doctor --json a`") == [("launch/doctor", ["--json"])]
    assert sum(len(commands(page.read_text())) for page in PAGES) > 30


def test_options_that_are_quoted_exist():
    files = [path for folder in ("launch", "examples") for path in (ROOT / folder).glob("**/*")]
    files += [ROOT / path for path in (PROGRAMS["-m ringattn"], PROGRAMS["launch/doctor"])]
    texts = "".join(path.read_text() for path in files if path.suffix in (".py", ".sh"))
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
        assert f'"{option}"' in texts or f"{option} " in texts, option


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=name_of)
def test_a_page_is_read_in_ten_minutes(page):
    if page.name != "api.md":  # to look things up in
        assert len(page.read_text().split()) <= LONGEST


def paragraphs(text: str) -> list[list[str]]:
    """The lines of each paragraph, without code blocks, tables and headings."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = [block.strip("\n").split("\n") for block in re.split(r"\n\s*\n", text)]
    return [lines for lines in found if not lines[0].startswith(("|", "#", "    "))]


def test_paragraphs_of_the_readme_are_short():
    assert paragraphs("# a\n\nb\nc\n\n| d |\n\n```python\ne\n\nf\n```\n\n    g\n") == [["b", "c"]]
    for lines in paragraphs((ROOT / "README.md").read_text()):
        assert len(lines) <= 4, lines[0]
