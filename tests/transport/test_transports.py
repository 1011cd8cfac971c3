"""Ranks as threads: order, counted bytes, control records, and errors."""

from __future__ import annotations

import queue

import pytest
import torch

from ringattn.transport import Alone, Peer, process_group, run_ranks


def test_results_come_in_rank_order():
    assert run_ranks(5, lambda t: (t.rank, t.size)) == [(rank, 5) for rank in range(5)]


def test_ranks_multiply_with_as_many_threads_as_torch_was_told():
    """Else the first products of a rank have other bits than later ones."""
    a, b = torch.randn(2, 1, 14, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # others than OMP_NUM_THREADS says
    try:
        expected = a @ b.mT
        assert all(torch.equal(found, expected) for found in run_ranks(3, lambda _: a @ b.mT))
    finally:
        torch.set_num_threads(threads)


def test_a_ring_of_sends_at_once():
    def work(t):
        here = torch.full((3,), float(t.rank))
        arrived = torch.full((3,), float("nan"))
        handle = t.exchange([Peer((t.rank + 1) % t.size, here)], [Peer((t.rank - 1) % t.size, arrived)])
        # the exchange sends the values of its start
        here.fill_(-1)
        handle.wait()
        return arrived.tolist()

    assert run_ranks(4, work) == [[float((rank - 1) % 4)] * 3 for rank in range(4)]


def test_receives_match_sends_in_order():
    def work(t):
        other = 1 - t.rank
        sends = [Peer(other, torch.full((n,), 10 * t.rank + n)) for n in (1, 2, 3)]
        targets = [torch.empty(n, dtype=torch.int64) for n in (1, 2, 3)]
        first = t.exchange(sends[:1], [Peer(other, targets[0])])
        second = t.exchange(sends[1:], [Peer(other, target) for target in targets[1:]])
        first.wait()
        second.wait()
        return [target.tolist() for target in targets]

    assert run_ranks(2, work) == [[[11], [12, 12], [13, 13, 13]], [[1], [2, 2], [3, 3, 3]]]


def test_a_receive_may_be_a_view():
    def work(t):
        buffer = torch.zeros(4)
        t.exchange([Peer(1 - t.rank, torch.ones(2))], [Peer(1 - t.rank, buffer[1:3])]).wait()
        return buffer.tolist()

    assert run_ranks(2, work) == [[0, 1, 1, 0]] * 2


def test_sizes_must_agree():
    def work(t):
        t.exchange([Peer(1 - t.rank, torch.ones(2))], [Peer(1 - t.rank, torch.ones(3))]).wait()

    with pytest.raises(AssertionError):
        run_ranks(2, work)


def test_bytes_are_counted():
    def work(t):
        if t.rank == 0:
            t.exchange([Peer(1, torch.ones(5, dtype=torch.bfloat16)), Peer(1, torch.ones(3, dtype=torch.float64))], []).wait()
        return t.bytes_sent

    assert run_ranks(2, work) == [34, 0]


def test_every_rank_has_every_record():
    records = [bytes([rank, rank]) for rank in range(3)]
    assert run_ranks(3, lambda t: t.all_gather_control(records[t.rank])) == [records] * 3


def test_patience_ends():
    def work(t):
        return t.all_gather_control(b"x", patience=0.05) if t.rank == 0 else "absent"

    assert run_ranks(2, work) == [None, "absent"]


def test_an_error_of_a_rank_is_raised():
    def work(t):
        if t.rank == 1:
            raise KeyError("the odd one")
        t.all_gather_control(b"", patience=0.05)

    with pytest.raises(KeyError, match="the odd one"):
        run_ranks(3, work)


def test_an_error_comes_before_the_timeouts_that_it_causes():
    def work(t):
        if t.rank == 1:
            raise KeyError("the odd one")
        raise queue.Empty

    with pytest.raises(KeyError):
        run_ranks(2, work)


def test_a_rank_alone():
    alone = Alone()
    assert (alone.rank, alone.size) == (0, 1)
    alone.exchange([], []).wait()
    assert alone.all_gather_control(b"record") == [b"record"]


@pytest.mark.parametrize(
    ("launched", "ranks", "wanted"),
    [
        (None, [0, 1, 2, 3], 4),
        ("4", range(8), 4),
        ("4", range(4, 8), 4),
        ("4", [0, 1, 4, 5], 2),
        ("4", [1, 5, 9], 1),
        ("4", [0, 1, 2, 4], None),  # unequal
        ("4", [0, 4, 1, 5], None),  # not node by node
    ],
)
def test_ranks_per_node(monkeypatch, launched, ranks, wanted):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if launched is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launched)
    assert process_group._ranks_per_node(list(ranks)) == wanted
