"""Two nodes with a slow link between them: how many bytes cross it, and how long each pass takes, for each schedule.

A node is a network namespace with four ranks. A virtual cable joins the two nodes, and a token bucket at each end limits its rate. Ranks
of one node talk over its loopback device, so the cable's counters count only the bytes between nodes.

As a script, this file is the ranks' launcher: it imports torch once and forks the ranks into the namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODES, RANKS_PER_NODE = 2, 4
WORLD_SIZE = NODES * RANKS_PER_NODE
TOKENS, HEADS, HEAD_DIM = 12, 16, 256  # per rank: many bytes and little compute
SHARD = 2 * TOKENS * HEADS * HEAD_DIM * 4  # bytes of K and V in fp32
LINK = {True: 30e6 / 8, False: 120e6 / 8}  # bytes a second, where time counts and where bytes alone do
# shards of K/V that leave a node in a forward pass
SHARDS_OUT = {"ring": WORLD_SIZE - 1, "double ring": RANKS_PER_NODE, "hybrid": RANKS_PER_NODE}
FASTER = 0.8  # the greatest share of the ring's time: four shards instead of seven take 0.57 of it if only the link takes time
FEWEST, ROUNDS = 2, 8  # at most, to find a moment when this machine's processors are free


@pytest.mark.thorough
def test_bytes_and_time_over_a_slow_link(nodes, request):
    """Who is faster is asked with `--thorough` alone: beside other programs this machine's processors take longer than the link."""
    timed = request.config.getoption("--thorough")
    found = run_ranks(nodes, ROUNDS if timed else FEWEST)
    for method, shards in SHARDS_OUT.items():
        # the backward pass moves K/V again, and as many bytes of fp32 dK/dV
        for part, wanted in enumerate((shards * SHARD, 2 * shards * SHARD)):
            for node in range(NODES):
                # plus headers, acknowledgements and the records by which ranks agree
                assert wanted <= found[method]["bytes"][node][part] <= 1.15 * wanted, (method, found[method])
            # nothing is faster than the link
            assert found[method]["seconds"][part] > 0.9 * wanted / LINK[timed], (method, found[method])
    assert faster(found) or not timed, found


def faster(found: dict) -> bool:
    """Whether double ring and hybrid beat the ring in both passes."""
    ring, *others = (found[method]["seconds"] for method in SHARDS_OUT)
    return all(other[part] < FASTER * ring[part] for other in others for part in (0, 1))


def command(*args: object) -> None:
    subprocess.run([str(x) for x in args], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def nodes(request):
    """The names of two namespaces with a slow cable between them."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc")
    names = [f"ringattn{os.getpid()}n{i}" for i in range(NODES)]
    try:
        try:
            for name in names:
                command("ip", "netns", "add", name)
            command("ip", "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs network namespaces: {error.stderr.strip()}")
        for i, name in enumerate(names):
            inside = ("ip", "-n", name)
            command(*inside, "link", "set", "lo", "up")
            command(*inside, "address", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
            command(*inside, "link", "set", "cable", "up")
            # a queue that drops nothing
            rate = f"{LINK[request.config.getoption('--thorough')] * 8:.0f}bit"
            command(
                "tc", "-n", name, "qdisc", "add", "dev", "cable", "root", "tbf", "rate", rate, "burst", "128kb", "latency", "2s"
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def run_ranks(nodes: list[str], most: int) -> dict:
    """For each method: "seconds" of the fastest forward and backward pass, and the least "bytes" that each node sent in them."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "cable",
        "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
    }
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer, tempfile.TemporaryFile("w+") as log:
        launcher = subprocess.Popen(
            [sys.executable, __file__, answer.name, str(most), *nodes],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = launcher.wait(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
        log.seek(0)
        assert status == 0, log.read()
        return json.load(answer)


def launch(path: str, most: int, nodes: list[str]) -> int:
    """Fork the ranks into their nodes; returns the worst exit status."""
    import ringattn  # noqa: F401  once for all ranks

    for rank in range(WORLD_SIZE):
        if os.fork() == 0:
            with open(f"/var/run/netns/{nodes[rank // RANKS_PER_NODE]}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")
            serve(rank, path, most)
            os._exit(0)
    return max(os.waitpid(-1, 0)[1] for _ in range(WORLD_SIZE))


def serve(rank: int, path: str, most: int) -> None:
    """One rank: run each method, in `most` rounds or fewer; rank 0 writes the measurements."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import ringattn as ra

    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("10.77.0.1", 29871, WORLD_SIZE, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    mesh = init_device_mesh("cpu", (NODES, RANKS_PER_NODE), mesh_dim_names=("ring", "heads"))
    methods = {
        "ring": {"schedule": ra.ring()},
        "double ring": {"schedule": ra.double_ring()},
        "hybrid": {"group": mesh, "schedule": ra.ring()},
    }
    layout = ra.contiguous(WORLD_SIZE * TOKENS, WORLD_SIZE)
    q, k, v, dout = torch.randn(4, 1, TOKENS, HEADS, HEAD_DIM).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rounds: dict[str, list] = {method: [] for method in methods}
    found: dict[str, dict] = {}
    # the first round connects; the fastest of the others is what the link allows
    while len(rounds["ring"]) < FEWEST or (len(rounds["ring"]) < most and not faster(found)):
        for method, options in methods.items():
            marks = [mark(dist)]
            out = ra.ring_attention(*leaves, layout=layout, mask=ra.full(), **options)
            marks.append(mark(dist))
            torch.autograd.grad(out, leaves, dout)
            marks.append(mark(dist))
            everyone: list = [None] * WORLD_SIZE
            dist.all_gather_object(everyone, marks)
            # ranks 0 and 4 read their nodes' counters, rank 0 the time
            nodes = everyone[::RANKS_PER_NODE]
            passes = range(len(marks) - 1)
            seconds = [nodes[0][i + 1][0] - nodes[0][i][0] for i in passes]
            sent = [[node[i + 1][1] - node[i][1] for i in passes] for node in nodes]
            rounds[method].append((seconds, sent))
        found = {method: fastest(of[1:]) for method, of in rounds.items() if of[1:]}
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()


def fastest(rounds: list[tuple[list, list]]) -> dict:
    seconds, sent = zip(*rounds)
    return {"seconds": [min(x) for x in zip(*seconds)], "bytes": [[min(x) for x in zip(*of_node)] for of_node in zip(*sent)]}


def mark(dist) -> tuple[float, int]:
    """The time, and the bytes that have left this node so far, while all ranks wait here."""
    dist.barrier()
    now = time.perf_counter()
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("cable:")]
    dist.barrier()
    return now, int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    sys.exit(bool(launch(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
