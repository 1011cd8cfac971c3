"""What `StatePassing` makes for an exchange: only what some other rank hears."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ringattn as ra
from ringattn.recurrent.segments import make_segments
from ringattn.recurrent.state_passing import StatePassing, Summary
from ringattn.recurrent.transitions import Matrices

B, H, D = 1, 2, 3
NUMBERS = B * H * (D * D + D * D)  # of a summary


class Made(TorchDispatchMode):
    """Counts the numbers of tensors that operations make; views make none."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.numbers += out.numel()
        return out


class Exchanges:
    """A transport of one rank of several, which delivers nothing."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def exchange(self, sends, receives):
        self.sent, self.received = (sum(peer.tensor.numel() for peer in peers) for peers in (sends, receives))
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize(
    ("rank", "size", "heard", "hears"),
    [(0, 1, 0, 0), (0, 2, 1, 0), (1, 2, 0, 1)],
    ids=["one rank", "the first of two", "the second"],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_segments_that_no_other_rank_hears_of_are_not_packed(rank, size, heard, hears, backward):
    """Documents of 3 tokens, one of which crosses the bound of two shards of 32."""
    if backward:
        heard, hears = hears, heard
    segments = make_segments(ra.contiguous(32 * size, size), ra.documents(lengths=[3] * (32 * size // 3) + [32 * size % 3]))
    own, transport = segments.of(rank), Exchanges(rank, size)
    totals = dict.fromkeys(own.first) | {index: torch.ones(B, H, D * D) for index in own.following}
    summaries = {index: Summary(total, torch.ones(B, H, D, D)) for index, total in totals.items()}
    if backward:
        summaries = {index: summaries[index] for index in own.following}
    passing = StatePassing(transport, segments, Matrices(D), (B, H, D, D), False, torch.float32, torch.device("cpu"))
    with Made() as made:
        if backward:
            passing.start_backward(summaries, None)
        else:
            passing.start_forward(summaries)
    assert (transport.sent, transport.received) == (heard * NUMBERS, hears * NUMBERS)
    # a summary that is sent: zeros for the total of a document's first, the two joined, and those of a peer joined
    assert made.numbers <= (2.5 * heard + hears) * NUMBERS


def test_segments_that_begin_documents_get_no_totals(monkeypatch):
    found, start = {}, StatePassing.start_forward

    def recorded(passing, own):
        found.update(own)
        return start(passing, own)

    monkeypatch.setattr(StatePassing, "start_forward", recorded)
    q, k, v = torch.randn(3, 1, 30, 2, 4).unbind()
    ra.linear_attention(q, k, v, beta=torch.rand(1, 30, 2), mask=ra.documents(lengths=[3] * 10))
    assert [summary.total for summary in found.values()] == [None] * 10
