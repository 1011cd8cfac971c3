"""The doctor of a checkout that is not installed: `python -m ringattn doctor`, from any folder.

launch/jobs/torchrun.sh launch/doctor                     # all GPUs of this machine
launch/jobs/torchrun.sh --hosts a,b launch/doctor         # all GPUs of several
torchrun --nproc-per-node 4 launch/doctor --device cpu
"""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    root = FOLDER.parents[1]
    # Python puts this folder itself first
    rest = [path for path in sys.path if Path(path).resolve() != FOLDER]
    sys.path[:] = [str(root), str(root / "kernels"), *rest]
    return importlib.import_module("ringattn.doctor.examination").main()


if __name__ == "__main__":
    sys.exit(main())
