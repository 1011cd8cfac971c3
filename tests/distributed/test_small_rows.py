"""Small rows that ranks on GPUs give each other by a kernel: every turn has the rows of that turn, on all streams and in graphs."""

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from tests.cuda_graphs import captured

pytestmark = pytest.mark.gpu
# numbers of fp32; the last two have no room, and go by copy engines
SIZES = (1, 2, 1000, 33_280, 300_001, 1 << 19, (1 << 19) + 1, 1 << 20)


def turns(group):
    """The sizes whose rows were wrong, call by call on two streams and in replays of a graph between calls."""
    rank, size, wrong = dist.get_rank(group), dist.get_world_size(group), []
    transport = ra.symmetric(group)
    transport.connect(torch.device("cuda", torch.cuda.current_device()))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]

    def whole(words, number):
        generator = torch.Generator("cuda").manual_seed(1000 * words + number)
        return torch.randn(size, words, generator=generator, device="cuda")

    for words in SIZES:
        graphed, got = torch.zeros(size, words, device="cuda"), 0

        def gather(graphed=graphed):
            transport.all_gather(graphed)

        graph, _ = captured(gather)
        for number in range(30):
            stream = streams[number % 2]
            stream.wait_stream(streams[1 - number % 2])
            with torch.cuda.stream(stream):
                wanted = whole(words, number)
                rows = torch.zeros_like(wanted)
                rows[rank] = wanted[rank]
                if number % 3:
                    transport.all_gather(rows)
                else:
                    graphed.copy_(rows)
                    graph.replay()
                    rows = graphed.clone()
                if rank == 0 and number % 7 == 0:
                    torch.cuda._sleep(2_000_000)  # the others run ahead as far as they may
                got += torch.equal(rows, wanted)
        if got != 30:
            wrong.append((words, got))
        torch.cuda.synchronize()
    return wrong


def test_turns(nccl, world_size):
    assert nccl.run(world_size, turns, timeout=120) == [[]] * world_size
