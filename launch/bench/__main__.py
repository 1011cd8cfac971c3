"""Benchmarks: `python launch/bench COMMAND`, from any folder. `python launch/bench COMMAND --help` describes one of them.

Each command is a module in this folder with `add_arguments(parser)` and `main(arguments)`. The first sentence of its docstring is what
`--help` lists.
"""

import argparse
import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
COMMANDS = (
    "batches",
    "cold",
    "cross",
    "curves",
    "deal",
    "decode",
    "doors",
    "fit",
    "kernels",
    "linear",
    "overhead",
    "packed",
    "pictures",
    "prefill",
    "ring",
    "scores",
    "short",
    "steady",
    "sweep",
    "versions",
)


def prepare_path() -> None:
    """Let this process, and the worker processes that inherit its path, import `bench`, `ringattn` and `ringattn_kernels`.

    Python puts this folder itself first. Remove it: its `kernels.py` would hide Hugging Face's package `kernels` from transformers.
    """
    rest = [path for path in sys.path if Path(path).resolve() != FOLDER]
    sys.path[:] = [str(FOLDER.parent), str(ROOT), str(ROOT / "kernels"), *rest]


def docstring(command: str) -> str:
    """The docstring of a command's module, read without importing what the module needs (torch, a GPU library)."""
    return ast.get_docstring(ast.parse((FOLDER / f"{command}.py").read_text())) or ""


def summary(command: str) -> str:
    """The first sentence of a command's docstring."""
    return " ".join(docstring(command).split("\n\n")[0].split()).split(". ")[0].rstrip(".") + "."


def main() -> None:
    prepare_path()
    # records and error messages quote the command as a person types it
    sys.argv[0] = "launch/bench"
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=sys.argv[0], description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = commands.add_parser(name, help=summary(name), description=docstring(name), formatter_class=raw)
        # import the module of the chosen command alone
        if name in sys.argv[1:2]:
            module = importlib.import_module(f"bench.{name}")
            module.add_arguments(command)
            command.set_defaults(main=module.main)
    arguments = parser.parse_args()
    arguments.main(arguments)


if __name__ == "__main__":
    main()
