"""Write docs/api.md, the reference of every public name, from signatures and docstrings: `python launch/repo/api_reference.py`.

The sources are read, not imported: this needs no GPU, no transformers and no DeepSpeed, and gives the same text everywhere. A name is
public if a package's `__all__` holds it. In a module of `ringattn.integrations` or `ringattn.training` without `__all__`, every name
without a leading _ is.
With `--check` nothing is written, and the exit status is 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API reference

Made from the docstrings by `python launch/repo/api_reference.py`; what the words mean is in [architecture.md](architecture.md).
Shapes: b batch, s tokens, h query heads, hk key/value heads, d head dim, d_v value head dim.
"""
# modules of these folders that only other modules of the library use
_HUGGINGFACE = (
    "attachment",
    "call",
    "checks",
    "encoder",
    "forward",
    "heads",
    "hooks",
    "inputs",
    "labels",
    "padding",
    "plain",
    "positions",
    "whole",
)
INNER = {f"huggingface_{name}" for name in (*_HUGGINGFACE, "scores")} | {
    "diffusers_ring",
    "offload",
    "ring_flash_attn_arguments",
    "imports",
    "trainer_parts",
    "trainer_settings",
    "trl_rollouts",
    "trl_settings",
    "vllm_merge",
    "vllm_step",
}
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign


@dataclass(frozen=True)
class Module:
    """A source file: its name as users import it, and its tree."""

    name: str
    path: Path

    @property
    def tree(self) -> ast.Module:
        return _tree(self.path)

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring."""
        text = ast.get_docstring(self.tree)
        assert text, f"{self.path} has no docstring"
        return " ".join(text.split("\n\n")[0].split())

    def definitions(self) -> dict[str, Definition]:
        """Public functions and classes; of an overloaded function the implementation."""
        found = [node for node in self.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        return {node.name: node for node in found if not node.name.startswith("_")}

    def definition(self, name: str) -> Definition:
        """A function, a class or a constant."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return node
            if isinstance(node, ast.AnnAssign) and node.value is not None and ast.unparse(node.target) == name:
                return ast.Assign([node.target], node.value, lineno=node.lineno)
        return self.definitions()[name]

    def locate(self, name: str) -> tuple[Path, str | None]:
        """Where a name is defined, through all imports: the file, and the name there (None: it is that module)."""
        path, inner = self.sources().get(name, (self.path, name))
        if path == self.path or inner is None:
            return path, inner
        return Module(self.name, path).locate(inner)

    def exports(self) -> list[str] | None:
        """`__all__`, if it has one."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return ast.literal_eval(node.value)
        return None

    def sources(self) -> dict[str, tuple[Path, str | None]]:
        """Where imported names come from: a file, and the name there (None: the name is that module)."""
        found: dict[str, tuple[Path, str | None]] = {}
        lazy = [node for block in self.tree.body if isinstance(block, ast.If) for node in block.body]
        for node in [*self.tree.body, *lazy]:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = self.path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                for alias in node.names:
                    name = alias.asname or alias.name
                    inner = base / f"{alias.name}.py"
                    whole = node.module is None and inner.exists()
                    found[name] = (inner, None) if whole else (_file(base), alias.name)
        return found


@functools.cache
def _tree(path: Path) -> ast.Module:
    """A file's tree, which each of a page's hundreds of names asks for again."""
    return ast.parse(path.read_text())


def _file(base: Path) -> Path:
    return base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"


def _dotted(path: Path) -> str:
    """The name under which a module is imported."""
    folder = ROOT / "kernels" if ROOT / "kernels" in path.parents else ROOT
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def public() -> Iterator[tuple[str, list[tuple[Module, list[str]]]]]:
    """(import name, [(module of the definitions, their names)]) of every package and integration."""
    shown: set[tuple[Path, str]] = set()
    for name, folder in (("ringattn", ROOT / "ringattn"), ("ringattn_kernels", ROOT / "kernels" / "ringattn_kernels")):
        package = Module(name, folder / "__init__.py")
        files: dict[Path, tuple[Module, list[str]]] = {}
        for exported in package.exports() or []:
            if exported == "__version__":
                continue
            path, inner = package.locate(exported)
            if inner is None:
                module = Module(f"{name}.{exported}", path)
                files.setdefault(path, (module, []))[1].extend(f"{exported}.{found}" for found in module.definitions())
            else:
                files.setdefault(path, (Module(_dotted(path), path), []))[1].append(exported)
                shown.add((path, inner))
        yield name, [files[path] for path in sorted(files)]
    dispatch = ROOT / "kernels" / "ringattn_kernels" / "dispatch.py"
    folders = [sorted((ROOT / "ringattn" / folder).glob("*.py")) for folder in ("training", "integrations")]
    # a package's own module before those within
    folders[1] = sorted([*folders[1], *(ROOT / "ringattn" / "integrations").glob("*/**/*.py")], key=_dotted)
    for path in [dispatch, *folders[0], *folders[1]]:
        name = _dotted(path)
        module = Module(name, path)
        if (not path.stem.startswith("_") or path.stem == "__init__") and path.stem not in INNER:
            # a name that a package exports has its section with the package
            names = [inner for inner in module.exports() or module.definitions() if (path, inner) not in shown]
            names = [inner for inner in names if module.locate(inner)[0] == path]
            if names:
                yield name, [(module, names)]


def build() -> str:
    """The page. Raises ValueError for public names without a docstring."""
    index, parts, bare, slugs = [], [], [], Counter[str]()
    for name, modules in public():
        links, texts = [], []
        for module, names in modules:
            texts.append(f"### {module.summary}" if module.name != name else module.summary)
            for shown in names:
                node = module.definition(shown.rpartition(".")[2])
                if not isinstance(node, ast.Assign) and not ast.get_docstring(node):
                    bare.append(f"{name}.{shown}")
                texts.append(entry(shown, node))
                slug = shown.lower().replace(".", "")
                # GitHub numbers headings of the same name from the second on
                links.append(f"[`{shown}`](#{slug}{f'-{slugs[slug]}' if slugs[slug] else ''})")
                slugs[slug] += 1
        index.append(f"- **{name}**: {', '.join(links)}")
        parts.append("\n\n".join([f"## {name}", *texts]))
    if bare:
        raise ValueError(f"{', '.join(bare)}: no docstring, but every public name needs one")
    return "\n".join([HEAD, *(_wrapped(line) for line in index), "", "\n\n".join(parts), ""])


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 132, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def entry(shown: str, node: Definition) -> str:
    """The section of a function, or of a class with its public methods."""
    if isinstance(node, ast.Assign):
        return f"#### `{shown}`\n\n```python\n{ast.unparse(node)}\n```"
    lines = [f"#### `{shown}`", f"```python\n{signature(shown, node)}\n```", rendered(ast.get_docstring(node) or "")]
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if not isinstance(member, ast.FunctionDef) or member.name.startswith("_"):
                continue
            text = ast.get_docstring(member)
            if text:
                decorators = {ast.unparse(decorator) for decorator in member.decorator_list}
                call = member.name if decorators & {"property", "cached_property"} else _call(member.name, member, 1)
                first, *rest = rendered(text).split("\n")
                lines.append("\n".join([f"- `{call}`: {first}", *(f"  {line}".rstrip() for line in rest)]))
    return "\n\n".join(line for line in lines if line)


def signature(shown: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """How it is called: a dataclass with its fields, another class with its constructor's arguments."""
    if isinstance(node, ast.FunctionDef):
        return _call(shown, node)
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return f"class {_call(shown, member, 1)}"
    fields = [
        ast.unparse(member) for member in node.body if isinstance(member, ast.AnnAssign) and "init=False" not in ast.unparse(member)
    ]
    public_fields = [field for field in fields if not field.startswith("_")]
    bases = [ast.unparse(base) for base in node.bases]
    return f"class {shown}({', '.join(public_fields or bases)})" if public_fields or bases else f"class {shown}"


def _call(name: str, node: ast.FunctionDef, skip: int = 0) -> str:
    """Name, arguments and result; one argument per line if a single line would be too long."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    words = [_argument(argument, default) for argument, default in zip(plain, defaults)]
    static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
    words = words[0 if static else skip :]
    if arguments.vararg:
        words.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        words.append("*")
    words += [_argument(argument, default) for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    if arguments.kwarg:
        words.append("**" + _argument(arguments.kwarg, None))
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    line = f"{name}({', '.join(words)}){result}"
    return line if len(line) <= 110 else "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){result}"])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
    if default is None:
        return text
    return f"{text} = {ast.unparse(default)}" if argument.annotation else f"{text}={ast.unparse(default)}"


def rendered(docstring: str) -> str:
    """A docstring as Markdown: examples and indented blocks as code, arguments as a list."""
    blocks = []
    for block in inspect.cleandoc(docstring).split("\n\n"):
        head, *rest = block.split("\n")
        if block.startswith(">>>"):
            blocks.append(f"```python\n{block}\n```")
        elif head in ("Args:", "Returns:", "Raises:") and rest:
            blocks.append(f"{head}\n\n{_listed(rest)}" if head == "Args:" else f"{head} {' '.join(map(str.strip, rest))}")
        elif all(line.startswith("    ") for line in block.split("\n")):
            blocks.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            blocks.append(block)
    return "\n\n".join(blocks)


def _listed(lines: list[str]) -> str:
    """A list item for each line `name: meaning`, with its continuation lines indented."""
    out: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).split("\n"):
        name, colon, text = line.partition(":")
        if line.startswith(" ") or not colon:
            out.append("  " + line.strip())
        else:
            out.append(f"- `{name}`:{text}")
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    page = build()
    if not parser.parse_args().check:
        PAGE.write_text(page)
        return 0
    if PAGE.read_text() == page:
        return 0
    print("docs/api.md differs from the docstrings: run python launch/repo/api_reference.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
