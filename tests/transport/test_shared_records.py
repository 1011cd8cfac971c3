"""Records through shared memory, in C and in Python: one protocol, whoever speaks it; and what is odd or late is an error that says so."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from io import FileIO

import pytest

from ringattn.transport import shared_records
from ringattn.transport.roster import Roster
from ringattn.transport.shared_records import SharedRecords
from ringattn_kernels import native

SIZES = (0, 1, 42, 500, 1004, 1005, 2048)  # up to one piece, and more


class Counting:
    """The records in C, which counts how often they left the rest to Python. then: called after each swap."""

    def __init__(self, then=lambda: None):
        module = native.submission()
        assert module is not None, "submission.c does not compile"
        self.post, self._swap, self.left, self._then = module.post, module.swap, 0, then

    def swap(self, *arguments):
        found = self._swap(*arguments)
        self.left += found is None
        self._then()
        return found


def swapping(records, quick):
    """swap(record): the records of all ranks."""
    post = records.posting(quick)
    return lambda record: post(record)()


@pytest.fixture
def make():
    """make(ranks, seconds): each rank's view of one memory, with that timeout."""
    with ExitStack() as stack:

        def make(size, seconds=60.0):
            file, _ = shared_records.create(size)
            stack.enter_context(file)
            found = []
            for rank in range(size):
                own = stack.enter_context(FileIO(os.dup(file.fileno()), "r+"))
                found.append(SharedRecords(own, rank, Roster(rank, tuple(range(size)), timedelta(seconds=seconds))))
            return found

        yield make


def record(rank, turn, size):
    return bytes((rank * 31 + turn * 7 + i) % 256 for i in range(size))


@pytest.mark.parametrize("in_c", [(True, True), (True, False), (False, True, True), (True, False, False, True)], ids=str)
@pytest.mark.some(2)
def test_ranks_understand_each_other_in_either_language(in_c, make):
    ranks = make(len(in_c))

    def run(rank):
        swap = swapping(ranks[rank], Counting() if in_c[rank] else None)
        return [swap(record(rank, turn, SIZES[turn % len(SIZES)])) for turn in range(400)]

    with ThreadPoolExecutor(len(in_c)) as threads:
        for found in threads.map(run, range(len(in_c))):
            for turn, records in enumerate(found):
                assert records == [record(rank, turn, SIZES[turn % len(SIZES)]) for rank in range(len(in_c))]


def test_a_rank_that_is_there_is_found_without_python(make):
    """Record after record, also where the numbers of pieces come round."""
    first, second = make(2)
    quick = Counting()
    swap = swapping(second, quick)
    for turn in range(200):
        # a patience of no time: this leaves the record and goes on
        assert first.all_gather(record(0, turn, 42), 0.0) is None
        assert swap(record(1, turn, 42)) == [record(0, turn, 42), record(1, turn, 42)]
    assert quick.left == 0


@pytest.mark.parametrize("in_c", [True, False])
def test_a_record_that_is_posted_can_be_read_before_its_rank_waits(in_c, make):
    first, second = make(2)
    collect = first.posting(Counting())(b"one")
    assert swapping(second, Counting() if in_c else None)(b"two") == [b"one", b"two"]
    assert collect() == [b"one", b"two"]


def test_a_late_rank_is_waited_for_in_python(make):
    first, second = make(2)
    late = threading.Event()
    quick = Counting(late.set)

    def come():
        late.wait()
        return second.all_gather(b"two", None)

    with ThreadPoolExecutor(1) as other:
        future = other.submit(come)
        assert swapping(first, quick)(b"one") == [b"one", b"two"] == future.result()
    assert quick.left == 1


def test_other_threads_run_while_a_rank_waits(make):
    """The other rank is a thread of the same interpreter, which is in its own call meanwhile."""
    ranks, quick = make(2), [Counting(), Counting()]

    def run(rank):
        swap = swapping(ranks[rank], quick[rank])
        return [swap(record(rank, turn, 42)) for turn in range(300)]

    with ThreadPoolExecutor(2) as threads:
        assert len({tuple(map(tuple, found)) for found in threads.map(run, range(2))}) == 1


def test_a_rank_that_does_not_come_is_named(make):
    first, _ = make(2, seconds=0.05)
    with pytest.raises(RuntimeError, match="rank 1 has not made this call within"):
        swapping(first, Counting())(b"one")


def test_a_record_of_another_length_is_an_error(make):
    first, second = make(2)
    assert second.all_gather(b"longer", 0.0) is None
    with pytest.raises(RuntimeError, match="rank 1 has a record of 6 bytes, not 3"):
        swapping(first, Counting())(b"one")


def test_a_rank_that_has_gone_on_is_an_error(make):
    first, second = make(2)
    for _ in range(65):
        assert second.all_gather(b"two", 0.0) is None
    with pytest.raises(RuntimeError, match="rank 1 has gone on without this rank, by 64 records"):
        swapping(first, Counting())(b"one")


@pytest.mark.parametrize("byte", [8, 12, 16, 20, 22], ids=["length", "piece", "checksum", "first", "last"])
def test_a_record_that_is_not_whole_yet_is_not_taken(byte, make):
    first, second = make(2, seconds=0.2)
    assert second.all_gather(b"two", 0.0) is None
    begin = second._place(1, 1) + byte
    second._memory[begin] ^= 1

    def mend():
        second._memory[begin] ^= 1

    quick = Counting(mend)
    assert swapping(first, quick)(b"one") == [b"one", b"two"]
    assert quick.left == 1


@pytest.mark.parametrize(
    "arguments", [(bytearray(100), 1, 0, 2, b"x"), (bytearray(1 << 20), 1, 2, 2, b"x"), (bytearray(1 << 20), 1, 0, 2, bytes(1005))]
)
def test_memory_that_is_too_small_is_not_written(arguments):
    module = native.submission()
    assert module is not None
    for write in (module.post, module.swap):
        with pytest.raises((ValueError, TypeError)):
            write(*arguments)
    assert not any(arguments[0])
