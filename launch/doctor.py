"""Examine the machines of a job, all ranks together: is everything equal, connected, fast and exact? One table; status 0 if so, else 1.

    launch/torchrun.sh launch/doctor.py                     # all GPUs of this machine
    launch/torchrun.sh --hosts a,b launch/doctor.py         # of several
    torchrun --nproc-per-node 4 launch/doctor.py --device cpu

The table's `look at` column names ranks. A rank that never arrives, dies or hangs ends the examination within `--timeout` seconds of its
stage, with what was found until then.
"""

import importlib
import signal
import sys
from pathlib import Path


def main() -> int:
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "kernels")]
    # libraries start threads when they are imported, and all of them must leave SIGTERM to the watch
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    return importlib.import_module("doctor_examination").main()


if __name__ == "__main__":
    sys.exit(main())
