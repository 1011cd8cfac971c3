"""The ranks that tests run on: errors come back with their tracebacks, hangs end, and the ranks work again afterwards."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist


def rank_sum(group, offset):
    x = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(x, group=group)
    return dist.get_rank(group), int(x)


def fail_differently(group):
    if dist.get_rank(group) == 1:
        raise KeyError("the odd one")
    if dist.get_rank(group) == 2:
        os._exit(3)
    time.sleep(600)


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_results_come_in_rank_order(gloo, world_size):
    total = sum(range(world_size)) + 10 * world_size
    assert gloo.run(world_size, rank_sum, 10) == [(rank, total) for rank in range(world_size)]


def test_subsets_of_ranks(gloo):
    assert gloo.run(3, rank_sum, 0, ranks=(2, 5, 7)) == [(0, 14), (1, 14), (2, 14)]


def test_more_ranks_than_gpus_are_skipped(gloo):
    with pytest.raises(pytest.skip.Exception, match="needs 3 GPUs, but this machine has 2"):
        type(gloo)("nccl", 2).run(3, rank_sum, 0)


def test_failures_are_reported_and_the_ranks_work_again(gloo):
    ranks = type(gloo)("gloo", 3)
    try:
        with pytest.raises(AssertionError) as caught:
            ranks.run(3, fail_differently, timeout=3)
        message = str(caught.value)
        assert "KeyError: 'the odd one'" in message.split("--- rank 1 of")[1]
        assert "the process ended" in message.split("--- rank 2 of")[1]
        assert "in fail_differently" in message.split("--- ranks [0] of (0, 1, 2) did not finish, ")[1]
        assert ranks.run(2, rank_sum, 0) == [(0, 1), (1, 1)]
    finally:
        ranks.close()


def make_a_group(group):
    dist.new_group([0, 1])


def process(group):
    return os.getpid()


def lose_groups(group):
    dist.new_group = None


def test_what_would_fail_later_is_said_at_once(gloo):
    """A group of which some ranks know nothing, a rank that ends between two runs, and a group that cannot be made."""
    ranks = type(gloo)("gloo", 3)
    try:
        with pytest.raises(AssertionError, match="only some ranks made a group"):
            ranks.run(2, make_a_group)
        os.kill(ranks.run(3, process)[1], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while "rank 1 ended" not in ranks._tail() and time.monotonic() < deadline:
            time.sleep(0.01)
        ranks.end_groups()
        with pytest.raises(AssertionError, match=r"a rank has ended since the last run(.|\n)*rank 1 ended with status -9"):
            ranks.run(3, process)
        ranks.run(3, lose_groups)
        with pytest.raises(AssertionError, match="rank 0: Traceback"):
            ranks.run(1, rank_sum, 0, ranks=(1,))
        assert ranks.run(1, rank_sum, 0, ranks=(1,)) == [(0, 1)]
    finally:
        ranks.close()
