"""Records between processes: through memory on one host, or over gloo if a process cannot map that memory."""

import contextlib
import gc
import os
import re
import signal
import time
from datetime import timedelta
from io import FileIO

import pytest
import torch.distributed as dist

from ringattn.runtime.ulysses import Hybrid
from ringattn.transport import Alone, HostChannel, ProcessGroupTransport, processes, shared_records, timeout_of
from ringattn.transport.roster import Roster
from ringattn.transport.symmetric import SymmetricTransport
from ringattn_kernels import native


def channel(group, name):
    return HostChannel(name, dist.get_rank(group), dist.get_process_group_ranks(group), timeout_of(group))


def swap(group, name, shared=True):
    """Whether records went through memory, whether records of many lengths are right, and the last records' lengths."""
    rank = dist.get_rank(group)
    host = channel(group, name)
    with pytest.MonkeyPatch.context() as patch:
        if not shared and rank == 1:
            patch.setattr(shared_records, "find", lambda key, size: FileIO("/nonexistent"))
        found = [host.all_gather_control(bytes([rank]) * length) for length in (25, 1, 2048, 25, 5000, 200_000)]
    right = all(record == bytes([r]) * len(record) for records in found for r, record in enumerate(records))
    return host._shared is not None, right, [len(record) for record in found[-1]]


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "gloo"])
def test_records_of_any_length_come_whole(gloo, shared):
    for found in gloo.run(3, swap, f"any length {shared}", shared):
        assert found == (shared, True, [200_000] * 3)


def swap_in_c(group, shared):
    """Whether records are right that go through memory in C on all ranks but one, over a channel and what stands before it."""
    rank = dist.get_rank(group)
    quick = None if rank == 1 else native.submission()
    host = channel(group, f"in C {shared}")
    with pytest.MonkeyPatch.context() as patch:
        if not shared and rank == 1:
            patch.setattr(shared_records, "find", lambda key, size: FileIO("/nonexistent"))
        host.all_gather_control(b"connect")
    over = ProcessGroupTransport(group)
    over.all_gather_control(b"connect")
    everyone = [Hybrid(Alone(), over, over), SymmetricTransport(group, control=over), over, host]
    found = []
    for ranks in everyone:
        post = ranks.posting(quick)
        for turn in range(100):
            found.append(post(f"{rank} {turn}".encode().ljust(42))() == [f"{r} {turn}".encode().ljust(42) for r in range(3)])
            if turn % 7 == 0:
                found.append(ranks.all_gather_control(bytes([rank])) == [bytes([r]) for r in range(3)])
    return (host._shared is not None) == shared and all(found)


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "gloo"])
def test_records_in_c_and_in_python_are_one_sequence(gloo, shared):
    assert gloo.run(3, swap_in_c, shared) == [True] * 3


def no_memory(*arguments):
    raise OSError("no memory")


def files_of_memory():
    """How many files without a name are open. Of other descriptors threads of gloo may open some at any time."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:")
    return count


def fail_to_share(group, rank, step):
    """Whether a rank that cannot share memory still gets records, and how many files of memory more are open afterwards."""
    before = files_of_memory()
    host = channel(group, f"no memory {step}")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == rank:
            patch.setattr(*{"create": (shared_records, "create"), "map": (shared_records.mmap, "mmap")}[step], no_memory)
        found = host.all_gather_control(b"x")
    shared = host._shared is not None
    del host
    gc.collect()
    return shared, found, files_of_memory() - before


@pytest.mark.parametrize(("rank", "step"), [(0, "create"), (0, "map"), (1, "map")])
def test_nothing_stays_of_memory_that_a_rank_cannot_share(gloo, rank, step):
    for shared, found, more in gloo.run(2, fail_to_share, rank, step):
        assert (shared, found) == (False, [b"x"] * 2)
        assert more <= 0


def many(group):
    rank = dist.get_rank(group)
    host = channel(group, "many")
    return all(
        host.all_gather_control(f"{rank} {n}".encode().ljust(25)) == [f"{r} {n}".encode().ljust(25) for r in range(4)]
        for n in range(1000)
    )


def test_many_records_in_a_row(gloo):
    assert gloo.run(4, many) == [True] * 4


def impatient(group):
    """Rank 0 stops waiting twice, the second time with a record of several pieces, before the others come."""
    host = channel(group, "impatient")
    rank = dist.get_rank(group)
    host.all_gather_control(b"x")
    if rank:
        dist.barrier(group)
    lengths = (25, 3000)
    found = [host.all_gather_control(bytes([rank]) * length, 0.05 if rank == 0 else None) for length in lengths]
    if rank == 0:
        dist.barrier(group)
    after = host.all_gather_control(bytes([rank]))
    return [x and [len(record) for record in x] for x in found], after


def test_records_stay_for_ranks_that_come_late(gloo):
    first, *others = gloo.run(3, impatient)
    assert first == ([None, None], [b"\0", b"\1", b"\2"])
    assert others == [([[25] * 3, [3000] * 3], [b"\0", b"\1", b"\2"])] * 2


def run_ahead(group):
    host = channel(group, "run ahead")
    rank = dist.get_rank(group)
    host.all_gather_control(b"x")
    dist.barrier(group)
    if rank == 0:
        for _ in range(70):
            host.all_gather_control(b"x", 0.0)
    dist.barrier(group)
    if rank == 1:
        with pytest.raises(RuntimeError, match="rank 0 has gone on without this rank, by 64 records: look at its errors"):
            host.all_gather_control(b"x")
    return True


def test_a_record_that_was_overwritten_is_an_error(gloo):
    assert gloo.run(2, run_ahead) == [True] * 2


def other_call(group):
    host = channel(group, "other call")
    rank = dist.get_rank(group)
    with pytest.raises(
        RuntimeError, match=f"ranks are in different calls: rank {1 - rank} has a record of {[25, 80][1 - rank]} bytes"
    ):
        host.all_gather_control(b"x" * [25, 80][rank])
    return True


def test_ranks_in_different_calls_raise_an_error(gloo):
    assert gloo.run(2, other_call) == [True] * 2


def test_a_rank_that_does_not_come_is_named():
    file, _ = shared_records.create(2)
    with pytest.raises(RuntimeError, match=r"rank 1 has not made this call within 0:00:00\.050000: find out where it hangs"):
        shared_records.SharedRecords(file, 0, Roster(0, (0, 1), timedelta(seconds=0.05))).all_gather(b"x", None)


def test_a_stopped_rank_is_named_where_another_waits_for_it():
    """Rank 1 runs, and is late because rank 2 is stopped."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        roster = Roster(0, (0, 1, 2), timedelta(seconds=3))
        stopped = processes._status(child)
        roster.processes |= {1: processes.this_process(), 2: processes.Process(processes.host(), child, stopped.started)}
        wanted = (
            rf"rank 1 has not made this call within 0:00:03, and rank 2 is stopped \(process {child}\): let it go on, or end it"
        )
        assert re.search(wanted, str(roster.late([1])))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_transfer_with_a_rank_that_left_because_of_a_third_names_both():
    """On other hosts nothing shows of a rank but its connection."""
    roster = Roster(2, (0, 1, 2, 3), timedelta(seconds=3), lambda rank: rank in (0, 1))
    roster.processes |= {rank: processes.this_process()._replace(host=f"host {rank}") for rank in range(4)}
    assert str(roster.failed([0])).startswith("ranks 0, 1 have not done its part of this call")


def test_a_lost_store_is_told_before_a_rank_that_ended_because_of_it():
    child = os.fork()
    if child == 0:
        os._exit(0)
    started = processes._status(child).started
    os.waitpid(child, 0)
    ended = processes.Process(processes.host(), child, started)
    roster = Roster(1, (0, 1, 2), timedelta(seconds=3))
    roster.processes |= {0: processes.this_process(), 2: ended}
    assert str(roster.silent("the store is lost")) == "the store is lost; rank 2 has ended or stopped, too"
    # rank 0 serves most stores
    roster.processes[0] = ended
    assert str(roster.silent("the store is lost")).startswith("rank 0 has ended, and this rank waits for it")


def left_alone(group):
    """Rank 1 forks a child, which shares its memory, and ends while rank 0 waits for rank 1."""
    host = channel(group, "left alone")
    rank = dist.get_rank(group)
    began = time.monotonic()
    host.all_gather_control(b"x")
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(0.3)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)
        os._exit(1)
    try:
        host.all_gather_control(b"x")
    except RuntimeError as error:
        took = time.monotonic() - began
        raise AssertionError(f"{error} | it took long enough: {took > 0.7}") from None
    return None


def test_nobody_waits_for_a_rank_that_has_ended(gloo):
    with pytest.raises(AssertionError) as caught:
        gloo.run(2, left_alone)
    assert "rank 1 has ended, and this rank waits for it: look at the output of rank 1 | it took long enough: True" in str(
        caught.value
    )
