"""The fixture `perform`: runs scenes, all at once, in processes that are forked from a launcher of this folder's own."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def _scenes():
    """The module `scenes`, under the name by which the launcher's pickles find it."""
    if "scenes" not in sys.modules:
        spec = importlib.util.spec_from_file_location("scenes", HERE / "scenes.py")
        sys.modules["scenes"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["scenes"])
    return sys.modules["scenes"]


scenes = _scenes()


@pytest.fixture(scope="session")
def perform():
    """`perform([scene, ...])` returns the outcome of each."""
    ours, theirs = Pipe()
    log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  open as long as the launcher lives
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = subprocess.Popen(
        [sys.executable, str(HERE / "scenes.py"), str(theirs.fileno()), "gpus" if torch.cuda.is_available() else "cpu"],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )
    theirs.close()

    def run(wanted):
        log.seek(0, os.SEEK_END)
        ours.send(wanted)
        if not ours.poll(240):
            log.seek(0)
            raise AssertionError(f"the scenes did not end\n{log.read().decode(errors='replace')[-4000:]}")
        return ours.recv()

    yield run
    ours.close()
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    log.close()
