"""`manual_seed`: what a shard drops by itself differs between ranks, and what all ranks draw does not."""

import pytest
import torch

import ringattn as ra


def dropped(rank, replica=0, seed=3):
    ra.manual_seed(seed, rank, replica, device="cpu")
    return torch.nn.functional.dropout(torch.ones(256), 0.5)


def test_shards_drop_other_places():
    assert torch.equal(dropped(0), dropped(0))
    kept = [dropped(rank, replica, seed) > 0 for rank, replica, seed in ((0, 0, 3), (1, 0, 3), (0, 1, 3), (1, 1, 3), (0, 0, 4))]
    for i, one in enumerate(kept):
        for other in kept[:i]:
            assert 80 < int((one == other).sum()) < 176


def test_ranks_of_a_ring_share_the_generator_of_the_cpu(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    found = []
    for rank, replica in ((0, 0), (1, 0), (0, 1)):
        ra.manual_seed(7, rank, replica, device="cuda")
        found.append(torch.rand(4))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert len(set(seeded)) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(seed=-1, rank=0), "seed is -1, but must be at least 0"),
        (dict(seed=0, rank=-1), "rank is -1, but must be at least 0"),
        (dict(seed=0, rank=0, replica=1.0), "replica is 1.0, but must be an integer"),
        (dict(seed=0, rank=0, device="mps"), "device is 'mps', but ringattn computes on cpu and cuda"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        ra.manual_seed(**given)
