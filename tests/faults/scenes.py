"""Scenes of a few ranks in which something goes wrong, each rank a process of its own.

As a script, this file is the launcher: it imports torch and ringattn once, and forks the ranks of all scenes that come through a pipe.
In a scene each rank runs a forward and a backward pass, and then both again. At a phase of these, something happens to the victim. All
other ranks report how their call ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

LONGEST = 60.0  # seconds that a scene may take, on a busy machine
AT_ONCE = 8  # ranks
TOKENS = 4  # of a rank

# before a rank's first call; once all have come; before its second call; in the second call, at a pass's first and last exchange
PHASES = ("first call", "connect", "agree", "first hop", "last hop", "backward", "gradients home")


@dataclass(frozen=True)
class Scene:
    """What happens to whom: `world` ranks, in a grid of 2 x 2 or a ring; the `victim` is a rank or the process of the store.

    act: "kill", "stop", "raise" (and end), "out of memory" (of a GPU, and end), "catch" (and live on), "refuse" (the input of the first
    call), or "leave": all ranks end as a program does that does not destroy its groups. apart: each rank believes itself on a host of its
    own. served_by: the rank that serves the store, or None for a process apart. timeout: seconds, of the ranks' groups. gpus: each rank has
    a GPU, over copy engines or (without `engines`) NCCL.
    """

    world: int
    victim: int | str
    phase: str
    act: str
    grid: bool = False
    apart: bool = False
    served_by: int | None = None
    timeout: float = 30.0
    gpus: bool = False
    engines: bool = True


@dataclass
class Outcome:
    """What became of a scene: reports of the ranks that lived, when it happened, who did not end by itself, what
    ranks printed that left, and new shared files."""

    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    happened: float = 0.0
    hung: list[int] = field(default_factory=list)
    printed: dict[int, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


class Leave(BaseException):
    """Ends a rank as a program ends."""


class Victim:
    """Lets something happen to this rank when it reaches the scene's phase."""

    def __init__(self, scene: Scene, rank: int, server: int, tell: Callable[[Any], None]) -> None:
        acts = rank == scene.victim or (scene.victim == "store" and rank == 0)
        self.phase = scene.phase if acts else ""
        self.act = scene.act
        self.pid = server if scene.victim == "store" else os.getpid()
        self.tell = tell
        self.exchanges = [0, 0]  # of the first forward and backward pass
        self.step = self.at = 0
        self.backward = False

    def reach(self, phase: str) -> None:
        if phase != self.phase:
            return
        self.tell(time.monotonic())
        self.phase = ""
        if self.act in ("refuse", "leave"):
            return
        if self.act == "kill":
            os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.2)  # until the store's process is gone
        elif self.act == "stop":
            os.kill(self.pid, signal.SIGSTOP)
            time.sleep(0.2)
        elif self.act == "out of memory":
            import torch

            torch.empty(1 << 50, device="cuda")
        else:
            raise MemoryError("out of memory")

    def exchange(self) -> None:
        """The next exchange of a pass."""
        last = self.exchanges[self.backward]
        if self.step == 0:
            self.exchanges[self.backward] += 1
        elif self.at == 0:
            self.reach("backward" if self.backward else "first hop")
        if self.step == 1 and self.at == last - 1:
            self.reach("gradients home" if self.backward else "last hop")
        self.at += 1

    def begin(self, step: int, backward: bool) -> None:
        self.step, self.backward, self.at = step, backward, 0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def play(scene: Scene, rank: int, port: int, server: int, tell: Callable[[Any], None]) -> None:
    """A rank's part."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import ringattn as ra
    from ringattn.transport import HostChannel, ProcessGroupTransport, processes

    faulthandler.dump_traceback_later(LONGEST - 5, exit=False)
    if scene.apart:
        processes.host = lambda: f"host {rank}"
    victim = Victim(scene, rank, server, tell)
    before = descriptors()
    timeout = timedelta(seconds=scene.timeout)
    # torch's own rendezvous gives the store the groups' timeout, too
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == scene.served_by, wait_for_workers=False, timeout=timeout)
    device, dtype = ("cuda", torch.bfloat16) if scene.gpus else ("cpu", torch.float32)
    if scene.gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if scene.gpus else "gloo", store=store, rank=rank, world_size=scene.world, timeout=timeout)
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads")) if scene.grid else None
    group = group if scene.engines else ra.process_group()
    dist.barrier()
    tell(READY)  # what happens then happens to our calls
    connect, exchange = HostChannel._connect, ProcessGroupTransport.exchange

    def connecting(self, *arguments):
        victim.reach("connect")
        return connect(self, *arguments)

    def exchanging(self, *arguments, **options):
        victim.exchange()
        return exchange(self, *arguments, **options)

    HostChannel._connect, ProcessGroupTransport.exchange = connecting, exchanging
    layout = ra.zigzag(TOKENS * scene.world, scene.world)
    q = torch.ones(1, TOKENS, 2, 64 if scene.gpus else 8, device=device, dtype=dtype, requires_grad=True)
    report: dict[str, Any] = {}
    try:
        victim.reach("first call")
        for step in range(2):
            if step:
                victim.reach("agree")
            refuses = scene.act == "refuse" and rank == scene.victim and step == 0
            victim.begin(step, False)
            out = ra.ring_attention(q, q, q, layout=ra.zigzag(3, 3) if refuses else layout, group=group, schedule=ra.ring())
            victim.begin(step, True)
            out.sum().backward()
        report["result"] = bool((out == 1).all())
    except (MemoryError, torch.OutOfMemoryError):
        if scene.act == "catch":
            time.sleep(scene.timeout + 4)
        else:
            os._exit(1)
    except Exception as error:
        report |= {"error": f"{type(error).__name__}: {error}", "cause": str(error.__cause__), "trace": traceback.format_exc()}
    report["ended"] = time.monotonic()
    if scene.act == "leave":
        tell(report)
        raise Leave
    if scene.gpus:
        # a GPU may wait for ever: end without it
        tell(report | {"descriptors": 0})
        os._exit(0)
    out = None
    # what the error's traceback held, and what the group held
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    del store, group
    gc.collect()
    report["descriptors"] = descriptors() - before
    tell(report)


def serve(pipe: Connection) -> None:
    """The process of a store: it sends the port, and lives until it is killed."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    pipe.send(store.port)
    time.sleep(3600)


def fork(work: Callable[[Connection], None], others: list[Connection]) -> tuple[int, Connection]:
    """A child process and a pipe to it."""
    ours, theirs = Pipe()
    child = os.fork()
    if child == 0:
        # a pipe held by another child would hide the end of this one
        for other in [ours, *others]:
            other.close()
        status = 1
        with contextlib.suppress(BrokenPipeError):
            try:
                work(theirs)
                status = 0
            except Leave:
                raise
            except BaseException:
                traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    theirs.close()
    return child, ours


READY = "ready"


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("ringattn")}


class Stage:
    """A scene under way: the processes of its ranks and of its store."""

    def __init__(self, scene: Scene, others: list[Connection]) -> None:
        self.scene = scene
        self.outcome = Outcome()
        self.ready = 0  # ranks whose group was made
        self.server, port = 0, 0
        if scene.served_by is None:
            self.server, pipe = fork(serve, others)
            port = pipe.recv()
            pipe.close()
        else:
            port = free_port()
        self.children: dict[int, int] = {}  # the process of each rank
        self.pipes: dict[Connection, int] = {}
        self.logs = {}
        for rank in range(scene.world):
            log = tempfile.TemporaryFile("w+b") if scene.act == "leave" else None  # noqa: SIM115  closed below
            self.logs |= {} if log is None else {rank: log}

            def work(pipe: Connection, rank=rank, log=log) -> None:
                if log is not None:
                    os.dup2(log.fileno(), 2)
                play(scene, rank, port, self.server, pipe.send)

            self.children[rank], pipe = fork(work, [*others, *self.pipes])
            self.pipes[pipe] = rank
        self.deadline = time.monotonic() + LONGEST

    def hear(self, pipe: Connection) -> None:
        """Note what a rank tells, or that its process has closed its pipe."""
        try:
            told = pipe.recv()
        except (EOFError, ConnectionResetError):
            del self.pipes[pipe]
            pipe.close()
            return
        if told == READY:
            self.ready += 1
        elif isinstance(told, float):
            self.outcome.happened = told
        else:
            self.outcome.reports[self.pipes[pipe]] = told

    @property
    def over(self) -> bool:
        """Whether all ranks but a stopped one have ended."""
        stopped = {self.scene.victim} if self.scene.act == "stop" else set()
        return not set(self.pipes.values()) - stopped or time.monotonic() > self.deadline

    def close(self) -> Outcome:
        """End what has not ended."""
        for pipe, rank in self.pipes.items():
            if self.scene.act != "stop" or rank != self.scene.victim:
                self.outcome.hung.append(rank)
            os.kill(self.children[rank], signal.SIGKILL)
            pipe.close()
        for child in self.children.values():
            os.waitpid(child, 0)
        if self.server:
            os.kill(self.server, signal.SIGKILL)
            os.waitpid(self.server, 0)
        for rank, log in self.logs.items():
            log.seek(0)
            self.outcome.printed[rank] = log.read().decode()
            log.close()
        return self.outcome


def perform(scenes: list[Scene], control: Connection) -> list[Outcome]:
    """All scenes, several at once.

    On a busy machine ranks may not connect within their timeout. A scene in which nothing has happened yet is set up again.
    """
    files = shared_files()
    waiting, stages, outcomes, again = list(enumerate(scenes)), {}, {}, 3 * len(scenes)
    while waiting or stages:
        while waiting and sum(stage.scene.world for stage in stages.values()) + waiting[0][1].world <= AT_ONCE:
            number, scene = waiting.pop(0)
            stages[number] = Stage(scene, [control, *(pipe for stage in stages.values() for pipe in stage.pipes)])
        owners = {pipe: stage for stage in stages.values() for pipe in stage.pipes}
        for pipe in wait(list(owners), 1.0):
            owners[pipe].hear(pipe)
        for number in [number for number, stage in stages.items() if stage.over]:
            stage = stages.pop(number)
            outcomes[number] = stage.close()
            outcomes[number].files = sorted(shared_files() - files)
            if (stage.ready < stage.scene.world or not outcomes[number].happened) and again:
                again -= 1
                waiting.append((number, stage.scene))
    return [outcomes[number] for number in range(len(scenes))]


def main(pipe: Connection, gpus: bool) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh  # noqa: F401

    import ringattn as ra

    if not gpus:
        # what every rank would import and plan again; with GPUs, a process that has run autograd must not be forked
        q = torch.ones(1, TOKENS, 2, 8, requires_grad=True)
        ra.ring_attention(q, q, q).sum().backward()
    # children then neither look at what exists already nor copy it
    gc.collect()
    gc.freeze()
    while True:
        pipe.send(perform(pickle.loads(pipe.recv_bytes()), pipe))


if __name__ == "__main__":
    # scenes are pickled by the name that tests know this module by
    sys.modules["scenes"] = sys.modules["__main__"]
    Scene.__module__ = Outcome.__module__ = "scenes"
    with contextlib.suppress(EOFError, Leave):
        main(Connection(int(sys.argv[1])), sys.argv[2] == "gpus")
