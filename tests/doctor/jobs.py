"""Jobs of the doctor in which a rank goes missing, for `test_doctor.py`. The ranks of each job are forked, so that torch is imported once.

python jobs.py FOLDER JOB...      writes FOLDER/JOB.out, JOB.json and JOB.status (of each rank that was started)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from ringattn.doctor import examination, measure  # noqa: E402

SIZE, ODD, PATIENCE = 3, 1, "15"  # seconds; other tests share the processors


def vanish(*_):
    os._exit(9)


def hang(*_):
    time.sleep(1000)


def fail(*_):
    raise RuntimeError("an ECC error was encountered")


# job -> the check in which the odd rank misbehaves, and what it does there
FAULTS = {
    "well": None,
    "absent": None,
    "vanishes": (measure.Collectives, vanish),
    "is killed for": (measure.Exactness, vanish),
    "hangs": (measure.Speed, hang),
    "fails": (measure.Links, fail),
}


def rank_of(job: str, rank: int, port: int, folder: Path) -> None:
    """Become a rank of a job."""
    out = os.open(folder / f"{job}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    if rank == ODD and FAULTS[job]:
        check, fault = FAULTS[job]
        check.observe = fault
    # other jobs share the processors: set wide limits
    sys.argv[1:] = [
        "--device",
        "cpu",
        "--json",
        str(folder / f"{job}.json"),
        "--timeout",
        PATIENCE,
        "--slow",
        "1e3",
        "--link",
        "1e-6",
    ]
    os._exit(examination.main())


def serve(jobs: list[str]) -> tuple[int, dict[str, int]]:
    """Start a process that holds each job's store, as torchrun's agent does. Returns its id and the ports.

    This process forks, so it must not start the stores' threads itself.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        stores = {job: dist.TCPStore("127.0.0.1", 0, SIZE, True, wait_for_workers=False) for job in jobs}
        os.write(writing, json.dumps({job: store.port for job, store in stores.items()}).encode())
        os.close(writing)
        time.sleep(1000)
    os.close(writing)
    with open(reading) as pipe:
        return pid, json.load(pipe)


def main(folder: Path, jobs: list[str]) -> None:
    running, statuses = {}, {job: {} for job in jobs}
    server, ports = serve(jobs)
    for job in jobs:
        for rank in range(SIZE):
            if job == "absent" and rank == ODD:
                continue
            pid = os.fork()
            if pid == 0:
                rank_of(job, rank, ports[job], folder)
            running[pid] = job, rank
    while running:
        pid, status = os.wait()
        job, rank = running.pop(pid)
        statuses[job][rank] = os.waitstatus_to_exitcode(status)
        if job == "is killed for" and rank == ODD:
            # torchrun ends the other ranks in the same way
            for other, (theirs, _) in running.items():
                if theirs == job:
                    os.kill(other, signal.SIGTERM)
    os.kill(server, signal.SIGKILL)
    for job in jobs:
        (folder / f"{job}.status").write_text(json.dumps(statuses[job]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
