"""Ranks that set something up together: the error on each rank if one fails, and torch's exchanges in groups that overlap."""

import pytest
from torch._C._distributed_c10d import _resolve_process_group

from ringattn.transport import run_ranks
from ringattn.transport.cuda_memory import as_group
from ringattn.transport.meeting import Meeting, MeetingStore

pytestmark = pytest.mark.usefixtures("one_thread")


def exchange(store, rank, size, number):
    """As torch does: set a rank's value under a name with its own number, and then get the values of all ranks."""
    store.set(f"prefix/{number}/{rank}", bytes([rank]))
    store.wait([f"prefix/{number}/{other}" for other in range(size)])
    return [store.get(f"prefix/{number}/{other}") for other in range(size)]


def test_names_of_exchanges_do_not_matter():
    """They differ between ranks if some were in other groups before."""

    def rank(transport):
        with as_group(Meeting(transport), transport.rank, transport.size) as name:
            group = _resolve_process_group(name)
            assert (group.rank(), group.size()) == (transport.rank, transport.size)
            store = group.get_group_store()
            return [exchange(store, transport.rank, transport.size, number + 7 * transport.rank) for number in range(3)]

    assert run_ranks(3, rank) == [[[b"\0", b"\1", b"\2"]] * 3] * 3


@pytest.mark.parametrize("last", range(4))
def test_all_ranks_learn_of_a_rank_that_fails_between_exchanges(last):
    def step(meeting, transport):
        store = MeetingStore(meeting)
        for number in range(3):
            if transport.rank == 1 and number == last:
                raise RuntimeError("no memory\nand more")
            exchange(store, transport.rank, transport.size, number)

    def rank(transport):
        meeting = Meeting(transport)
        taken = []
        steps = {
            "could not begin": lambda: taken.append(1),
            "could not map": lambda: step(meeting, transport),
            "never": taken.clear,
        }
        return meeting.take(steps), taken, meeting.swap({"rank": transport.rank})

    said = "rank 1 could not map: no memory" if last < 3 else None
    kept = [1] if last < 3 else []
    assert run_ranks(3, rank) == [(said, kept, [{"rank": 0}, {"rank": 1}, {"rank": 2}])] * 3


def test_a_rank_with_fewer_exchanges():
    def rank(transport):
        meeting = Meeting(transport)

        def step():
            for _ in range(1 + (transport.rank != 2)):
                meeting.gather(b"value")

        return meeting.take({"could not map": step})

    assert run_ranks(3, rank) == ["rank 0 could not map: rank 2 took part in fewer exchanges"] * 3
