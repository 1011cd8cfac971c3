"""Ranks for tests: processes that live as long as the test session and run functions together, over gloo or NCCL.

As a script, this file is the launcher: it imports torch and ringattn once, and forks the ranks, also those that start anew. Each rank
waits on a pipe for the file and the name of a function to run. So a test takes milliseconds, instead of the time to start processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import IO, Any, ClassVar

ROOT = Path(__file__).resolve().parent.parent
_START_TIMEOUT = 120.0
SHARED = "RINGATTN_TEST_GPU_RANKS"  # in the environment, with a number: that of ranks, which share the GPUs


def gpu_ranks() -> int:
    """How many ranks tests on GPUs may have."""
    import torch

    return int(os.environ.get(SHARED, torch.cuda.device_count()))


class RankError(AssertionError):
    """A rank raised an error, died or hung; the message holds the tracebacks of all such ranks."""


class Launcher:
    """A process that imports slow modules once, and forks ranks as often as they are wanted."""

    _running: ClassVar[dict[tuple, Launcher]] = {}

    @classmethod
    def of(cls, imports: tuple[str, ...]) -> Launcher:
        """The launcher with these imports in this environment. The last three stay, for ranks that start anew."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        key = imports, frozenset(environment.items())
        found = cls._running.pop(key, None)
        if found is None or found._process.poll() is not None:
            found = cls(imports)
        cls._running[key] = found
        if len(cls._running) > 3:
            cls._running.pop(next(iter(cls._running))).close()
        return found

    def __init__(self, imports: tuple[str, ...]) -> None:
        self._pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  stays open as long as the process lives
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, __file__, ",".join(imports), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
                "NCCL_NVLS_ENABLE": "0",
            },
            start_new_session=True,
        )
        theirs.close()

    def fork(self, backend: str, fds: Sequence[int], log: int) -> int:
        """Fork a rank for each pipe; they write to `log`. Returns the number of the group of their processes."""
        with contextlib.suppress(EOFError, OSError):
            self._pipe.send((backend, len(fds)))
            for fd in (log, *fds):
                send_handle(self._pipe, fd, self._process.pid)
            if self._pipe.poll(_START_TIMEOUT * _slowness()):
                return self._pipe.recv()
        report = _tail(self._log)
        self.close()
        raise RankError(f"ranks did not start\n{report}")

    def close(self) -> None:
        """End the process. Its ranks stay until their pipes close."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()
        self._log.close()


class Ranks:
    """`size` processes with a process group of one backend. They start at the first run, and again after a failure."""

    def __init__(self, backend: str, size: int, imports: Sequence[str] = ()) -> None:
        """`imports`: further slow modules for the launcher to import once for all ranks."""
        self.backend = backend
        self.imports = tuple(imports)
        self.size = size
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        self._groups: set[tuple[int, ...]] = set()
        self._started: int | None = None  # the group of the ranks' processes

    def run(
        self, world_size: int, function: Callable, *args: Any, ranks: Sequence[int] | None = None, timeout: float = 60.0
    ) -> list[Any]:
        """Run `function(group, *args)` on ranks 0 to world_size - 1, or on `ranks`, with their group; returns results in rank order.

        `function` must be defined in a module (no closure); `args` and results are pickled. A function that makes groups must run on all
        ranks, as torch names groups by counting them. Raises RankError if a rank raises an error, dies (in this run or since the last),
        counts a group that others do not, or takes longer than `timeout` seconds (on a busy machine up to five times as long), with each
        such rank's traceback. The ranks are then started anew. Over NCCL, a test that wants more ranks than there are is skipped.
        """
        timeout *= _slowness()
        members = tuple(range(world_size)) if ranks is None else tuple(ranks)
        if self.backend == "nccl" and world_size > self.size:
            import pytest

            pytest.skip(f"needs {world_size} GPUs, but this machine has {self.size}")
        assert len(members) == world_size <= self.size
        task = function.__module__, sys.modules[function.__module__].__file__, function.__qualname__, members, pickle.dumps(args)
        self._give(members, task)
        replies = self._collect(members, timeout)
        failed = {rank: text for rank, (ok, text) in replies.items() if not ok}
        if failed or len(replies) < world_size:
            hung = [rank for rank in members if rank not in replies]
            stacks = self._stacks(hung) if hung else ""
            self.close()
            report = [f"--- rank {rank} of {members} ---\n{text}" for rank, text in sorted(failed.items())]
            if hung:
                report.append(f"--- ranks {hung} of {members} did not finish, {timeout:.0f} s allowed ---\n{stacks}")
            raise RankError("\n".join(report))
        return [replies[rank][1] for rank in members]

    def end_groups(self) -> None:
        """End all groups but the first of all ranks: each group of gloo has a thread that wakes a hundred times a second."""
        self._groups.clear()  # the next run makes its own in milliseconds
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the next run says that a rank has ended
                pipe.send(())

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        if self._started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._started, signal.SIGKILL)
            self._log.close()
        self._pipes, self._started = [], None
        self._groups = set()

    def _start(self) -> None:
        ends = [Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in ends]
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  stays open as long as the ranks live
        self._started = Launcher.of(self.imports).fork(self.backend, [theirs.fileno() for _, theirs in ends], self._log.fileno())
        for _, theirs in ends:
            theirs.close()
        self._pids = [self._hear(pipe) for pipe in self._pipes]
        # rank 0 serves the store and sends its port
        port = self._hear(self._pipes[0])
        for pipe in self._pipes[1:]:
            pipe.send(port)

    def _give(self, members: tuple[int, ...], task: tuple) -> None:
        """Send the task to its ranks. All ranks, members or not, make their group first if it is new."""
        if self._started is None:
            self._start()
        problem = "a rank has ended since the last run"
        with contextlib.suppress(OSError):
            if members in self._groups or not (problem := self._make(members)):
                for rank in members:
                    self._pipes[rank].send(task)
                return
        tail = self._tail()
        self.close()
        raise RankError(f"{problem}\n{tail}")

    def _make(self, members: tuple[int, ...]) -> str:
        """Make a group; returns the tracebacks of ranks that could not."""
        self._groups.add(members)
        for pipe in self._pipes:
            pipe.send(members)
        return "\n".join(filter(None, map(self._hear, self._pipes)))

    def _hear(self, pipe: Connection) -> Any:
        try:
            if pipe.poll(_START_TIMEOUT * _slowness()):
                return pipe.recv()
        except (EOFError, OSError):
            pass
        tail = self._tail()
        self.close()
        raise RankError(f"ranks did not start, or make a group\n{tail}")

    def _collect(self, members: tuple[int, ...], timeout: float) -> dict[int, tuple[bool, Any]]:
        replies: dict[int, tuple[bool, Any]] = {}
        waiting = {self._pipes[rank]: rank for rank in members}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    replies[rank] = (False, f"the process ended\n{self._tail()}")
                if not replies[rank][0]:
                    # the other ranks may wait for this one for ever
                    deadline = min(deadline, time.monotonic() + 5)
        return replies

    def _stacks(self, ranks: list[int]) -> str:
        """Where ranks hang, from their faulthandlers."""
        stacks = []
        for rank in ranks:
            before = self._log.seek(0, os.SEEK_END)
            os.kill(self._pids[rank], signal.SIGUSR1)
            time.sleep(0.2)
            self._log.seek(before)
            stacks.append(f"rank {rank}: {self._log.read().decode(errors='replace')}")
        return "".join(stacks)

    def _tail(self) -> str:
        return _tail(self._log)


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
    return log.read().decode(errors="replace")


def _slowness() -> float:
    """How many programs share a processor of this machine: from 1 to 5."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 5.0)


def launch(imports: str, pipe: Connection) -> None:
    """Import, then fork a process that forks ranks for each request, until the pipe closes."""
    # once for all ranks; looking for garbage would take a tenth of the time
    gc.disable()
    for name in filter(None, imports.split(",")):
        importlib.import_module(name)
    import pytest  # noqa: F401

    import ringattn  # noqa: F401

    # ranks then neither look at what was imported nor copy it
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        try:
            backend, size = pipe.recv()
            log, *fds = (recv_handle(pipe) for _ in range(1 + size))
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            pipe.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.close(log)
            fork_ranks(backend, fds)
            os._exit(0)
        for fd in (log, *fds):
            os.close(fd)
        pipe.send(child)


def fork_ranks(backend: str, fds: Sequence[int]) -> None:
    """Fork a rank for each pipe, and wait for all ranks to end."""
    children = []
    for rank, fd in enumerate(fds):
        child = os.fork()
        if child == 0:
            for other in fds:
                if other != fd:
                    os.close(other)
            with contextlib.suppress(EOFError, BrokenPipeError):
                serve(rank, len(fds), backend, Connection(fd))
            os._exit(0)
        children.append(child)
    for fd in fds:
        os.close(fd)
    for _ in children:
        child, status = os.wait()
        print(f"rank {children.index(child)} ended with status {os.waitstatus_to_exitcode(status)}", flush=True)


def serve(rank: int, size: int, backend: str, pipe: Connection) -> None:
    """Run the functions that come through the pipe, until it closes."""
    import torch
    import torch.distributed as dist

    from ringattn.sharing import shared_gpu

    faulthandler.register(signal.SIGUSR1, all_threads=False)
    torch.set_num_threads(1)
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        os.environ.update(shared_gpu(rank, rank, size, gpus))
    timeout = timedelta(seconds=90)
    pipe.send(os.getpid())
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    groups: dict[tuple[int, ...], Any] = {}
    kept = set(dist.distributed_c10d._world.pg_map)
    while True:
        task = pipe.recv()
        if not task:
            groups.clear()
            for group in set(dist.distributed_c10d._world.pg_map) - kept:
                dist.destroy_process_group(group)
            continue
        if isinstance(task[0], int):
            answer = ""
            try:
                groups[task] = dist.new_group(task, timeout, backend)
            except Exception:
                answer = f"rank {rank}: {traceback.format_exc()}"
            pipe.send(answer)
            continue
        module, code, name, members, args = task
        made = dist.distributed_c10d._world.group_count
        try:
            function = getattr(_load(module, code), name)
            reply = pickle.dumps((True, function(groups[members], *pickle.loads(args))))
            if len(members) < size and made != dist.distributed_c10d._world.group_count:
                raise RuntimeError("only some ranks made a group: a function that makes groups must run on all")
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        if SHARED in os.environ:
            torch.cuda.empty_cache()
        pipe.send_bytes(reply)


def _load(name: str, code: str) -> Any:
    """The module of a file, under the name that pickles use for it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, code)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


if __name__ == "__main__":
    launch(sys.argv[1], Connection(int(sys.argv[2])))
