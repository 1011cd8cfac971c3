"""The kernels for pages on CPU tensors through Triton's interpreter, against `ringattn.device.paged` in fp64.

`test_paged.py` runs this file in a process of its own: TRITON_INTERPRET decides at import what `triton.jit` means.
"""

import pytest
import torch

import ringattn_kernels as rk
from ringattn.device import paged as plain
from ringattn_kernels import mailbox, paged
from ringattn_kernels.modifiers import Modifiers

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
FP32, FP16 = torch.float32, torch.float16
THOROUGH = pytest.mark.thorough
SOFTCAP = Modifiers(softcap=1.5)


def slopes(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(5))


def problem(lengths, page_size, ranks, rank, heads, dims, tokens, dtype, seed=0):
    """q, the pool of K and V, and the table of one rank; slots that hold no token are NaN, and so are pages that no sequence has."""
    generator = torch.Generator().manual_seed(seed)
    b, (h, hk) = len(lengths), heads
    columns = -(-max(lengths) // (page_size * ranks)) + 1
    pages = torch.randperm(b * columns + 3, generator=generator)[: b * columns].view(b, columns).int()
    pool = [torch.full((b * columns + 3, hk, page_size, dim), float("nan"), dtype=dtype) for dim in dims]
    first = torch.tensor([(rank - 2 * i) % ranks for i in range(b)])
    for i, length in enumerate(lengths):
        for column in range(columns):
            held = min(max(0, length - (int(first[i]) + column * ranks) * page_size), page_size)
            for x in pool:
                x[pages[i, column], :, :held] = torch.randn(hk, held, x.shape[3], generator=generator).to(dtype)
    q = torch.randn(b, tokens, h, dims[0], generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    return q, *pool, rk.PageTable(torch.tensor(lengths), first, pages, ranks)


def compare(got, exact, dtype):
    for x, y in zip(got, exact):
        scale = max(1.0, float(y[y.isfinite()].abs().max())) if y.isfinite().any() else 1.0
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize(
    ("ranks", "lengths", "page_size", "heads", "dims", "tokens", "window", "modifiers", "sinks", "dtype", "config"),
    [
        (1, (70, 5, 33), 16, (2, 1), (16, 16), 1, None, None, False, FP32, (16, 16, 5)),
        pytest.param(3, (70, 5, 33), 16, (2, 1), (16, 16), 1, None, None, False, FP32, (16, 16, 5), marks=THOROUGH),
        pytest.param(3, (40,), 16, (2, 2), (24, 40), 16, None, None, True, FP16, (16, 32, 3), marks=THOROUGH),
        (3, (300, 1), 32, (6, 2), (16, 16), 1, 50, SOFTCAP, True, FP32, (32, 16, 7)),
        (1, (129, 200, 64, 3), 64, (4, 1), (16, 16), 3, 0, Modifiers(None, slopes(1, 4)), False, FP32, (16, 32, 11)),
        pytest.param(3, (129, 20), 16, (2, 2), (16, 16), 3, 17, Modifiers(9.0, slopes(2, 2)), True, FP32, (16, 16, 24), marks=THOROUGH),
        (3, (40, 21), 16, (4, 1), (512, 320), 2, None, None, True, FP32, (16, 16, 5)),
        (1, (7,), 16, (20, 1), (16, 16), 2, None, None, False, FP32, (16, 16, 2)),  # three blocks of rows of one head
    ],
)  # fmt: skip
@pytest.mark.some(3)
def test_against_plain_torch(ranks, lengths, page_size, heads, dims, tokens, window, modifiers, sinks, dtype, config):
    sinks = torch.linspace(-2, 2, heads[0]) if sinks else None
    options = dict(softmax_scale=0.3, window=window, modifiers=modifiers)
    how = paged.PagedConfig(*config, num_warps=1, num_stages=1)
    found = []
    for rank in range(ranks):
        q, k, v, table = problem(lengths, page_size, ranks, rank, heads, dims, tokens, dtype)
        exact = plain.attend_pages(q.double(), k.double(), v.double(), table, **options, sinks=sinks)
        got = rk.attend_pages(q, k, v, table, **options, sinks=sinks, config=how)
        assert got[0].dtype == dtype and got[1].dtype == got[2].dtype == FP32
        compare(got, exact, dtype)
        found.append(torch.full((q[..., 0].numel() * (dims[1] + 2),), float("nan")))
        rk.attend_pages(q, k, v, table, **options, packed=found[-1], config=how)
    packed = torch.stack(found)
    compare(rk.merge_packed(packed, q, dims[1], sinks), plain.merge_packed(packed.double(), q.double(), dims[1], sinks), dtype)


@pytest.mark.parametrize("programs", [1, 2, 3, 8, 50])
@pytest.mark.some(2)
def test_runs_of_tiles_may_end_anywhere(programs):
    """Sequences that another rank holds have no tile, and others have many more than one program takes."""
    problems = problem((500, 3, 17, 90, 1), 16, 4, 1, (2, 2), (16, 16), 1, FP32)
    exact = plain.attend_pages(*(x.double() for x in problems[:3]), problems[3], softmax_scale=0.3)
    compare(rk.attend_pages(*problems, softmax_scale=0.3, config=paged.PagedConfig(16, 16, programs, 1, 1)), exact, FP32)
    assert (exact[2] == 0).any()


def test_a_rank_that_holds_nothing():
    q, k, v, table = problem((5, 9), 16, 3, 2, (2, 1), (16, 16), 1, FP32)
    table = rk.PageTable(table.lengths, torch.tensor([1, 2]), table.pages, 3)
    out, row_max, row_sum = rk.attend_pages(q, k, v, table, softmax_scale=0.3)
    assert (out == 0).all() and (row_max == float("-inf")).all() and (row_sum == 0).all()


def test_the_work_follows_the_lengths_on_the_device():
    """The same tensors with other lengths in them: nothing is taken from an earlier call."""
    q, k, v, table = problem((200, 200), 16, 1, 0, (2, 1), (16, 16), 2, FP32)
    for lengths in ((200, 7), (33, 190), (2, 2)):
        table.lengths.copy_(torch.tensor(lengths))
        exact = plain.attend_pages(q.double(), k.double(), v.double(), table, softmax_scale=0.3)
        compare(rk.attend_pages(q, k, v, table, softmax_scale=0.3), exact, FP32)


@pytest.mark.parametrize("words", [1, 1024, 3001])
def test_ranks_give_each_other_small_rows(words):
    """Two ranks' kernels, one after the other: what the first would wait for is there from the turn before."""
    size, room = 2, 4096
    flags = mailbox.flag_words(size)
    arenas = [torch.zeros(flags + 2 * size * room, dtype=torch.int32) for _ in range(size)]
    bases = torch.tensor([arena.data_ptr() for arena in arenas])
    turns = [torch.zeros(mailbox.flag_words(1), dtype=torch.int32) for _ in range(size)]
    sent = torch.randint(1, 1 << 30, (5, size, words), dtype=torch.int32)

    def turn(rank, number):
        rows = torch.zeros(size, words, dtype=torch.int32)
        rows[rank] = sent[number, rank]
        mailbox.all_gather(rows, arenas[rank], bases, turns[rank], rank)
        return rows

    per_rank = flags // size
    arenas[0][per_rank : 2 * per_rank] = 1  # as if rank 1 had sent its first row
    turn(0, 0)
    for number in range(1, 5):
        # rank 1 is a turn behind, and finds what rank 0 sent; so that rank 0 finds something, its flag is raised once more
        assert torch.equal(turn(1, number - 1), sent[number - 1])
        arenas[0][per_rank : 2 * per_rank] = number + 1
        turn(0, number)
