"""Examine the machines of a job, all ranks together, before a long run.

    launch/jobs/torchrun.sh launch/doctor                     # all GPUs of this machine
    launch/jobs/torchrun.sh --hosts a,b launch/doctor         # all GPUs of several
    torchrun --nproc-per-node 4 launch/doctor --device cpu

The doctor prints one table of what it found; its column `look at` names ranks. The exit status is 0 if all is well, else 1. If a rank
never arrives, dies or hangs, the examination ends within `--timeout` seconds of its stage and prints what it found until then.
"""

import importlib
import signal
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    root = FOLDER.parents[1]
    # Python puts this folder itself first; its modules are those of the package `doctor`
    rest = [path for path in sys.path if Path(path).resolve() != FOLDER]
    sys.path[:] = [str(FOLDER.parent), str(root), str(root / "kernels"), *rest]
    # block SIGTERM before libraries start threads: every thread must leave this signal to the watch
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    return importlib.import_module("doctor.examination").main()


if __name__ == "__main__":
    sys.exit(main())
