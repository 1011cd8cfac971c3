"""Benchmarks: `python launch/bench.py COMMAND --help`.

    curves    loss curves of the same training around a ring, on one rank, and with dense attention
    fit       the planner's machine fitted to what `ring` has measured
    kernels   forward and backward of one GPU beside PyTorch's, in the same run
    overhead  what a call costs the host, beside kernels and transfers or with them
    ring      ring attention on all GPUs of a host, beside one GPU's kernels and Ulysses, in the same run
    steady    whether memory stays flat over many steps, and no host waits for its GPU
    sweep     block sizes, warps and stages of the kernels, to fill `ringattn_kernels/config.py`

Each command lives in a module beside this one with `add_arguments(parser)` and `main(arguments)`.
"""

import argparse
import importlib
import sys
from pathlib import Path

COMMANDS = {name: f"bench_{name}" for name in ("curves", "fit", "kernels", "overhead", "ring", "steady", "sweep")}


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "kernels")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        # a command's own imports (a GPU library, say) are not needed to run another
        if name in sys.argv[1:2]:
            loaded = importlib.import_module(module)
            command = commands.add_parser(name, help=loaded.__doc__)
            loaded.add_arguments(command)
            command.set_defaults(main=loaded.main)
        else:
            commands.add_parser(name)
    arguments = parser.parse_args()
    arguments.main(arguments)


if __name__ == "__main__":
    main()
