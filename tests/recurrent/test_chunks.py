"""The chunked recurrence of one device: exact for several sequences, over several chunks, whatever decays underflow."""

import itertools

import pytest
import torch

from ringattn.recurrent import chunks
from ringattn.recurrent.chunks import Chunks
from tests.recurrent.steps import KINDS, relative, steps


@pytest.mark.parametrize("beta", [False, True], ids=["linear", "delta"])
@pytest.mark.parametrize("decays", KINDS)
def test_sequences_of_any_lengths(monkeypatch, decays, beta):
    monkeypatch.setattr(chunks, "_MOST_ROWS", 8)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for lengths in ((1,), (8,), (13,), (3, 16, 1, 7)):
        n, (b, h, d_k, d_v) = sum(lengths), (2, 2, 4, 3)
        q, k, v = draw(b, n, h, d_k), torch.nn.functional.normalize(draw(b, n, h, d_k), dim=-1), draw(b, n, h, d_v)
        decay = -(draw(b, n, h, d_k).exp() ** 3) if decays == "vector" else -(draw(b, n, h).exp() ** 3)
        decay[:, 2::7] = -torch.inf  # forgets all
        decay[:, ::4] = 0
        tensors = [q, k, v, decay if decays != "none" else None, draw(b, n, h).sigmoid() if beta else None]
        leaves = [x if x is None else x.requires_grad_() for x in (*tensors, draw(b, len(lengths), h, d_k, d_v))]
        wanted = steps(*leaves, lengths)
        *rows, initial = leaves
        found = Chunks(*rows[1:], initial.transpose(0, 1), lengths)
        got = found.read(rows[0] * d_k**-0.5), found.finals.transpose(0, 1)
        douts = [draw(*x.shape) for x in got]
        live = [x for x in leaves if x is not None]
        pairs = [*zip(got, wanted), *zip(*(torch.autograd.grad(results, live, douts) for results in (got, wanted)))]
        assert max(relative(x, y, y) for x, y in pairs) < 1e-12


@pytest.mark.parametrize("decays", ["scalar", "vector"])
def test_products_that_underflow_lose_nothing_else(decays):
    """In fp32, factors of 1e-6 over a chunk are 0, but neighbours of two tokens still see each other."""
    n, generator = 64, torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, n, 2, 4, generator=generator).unbind()
    decay = torch.full((1, n, 2, 4) if decays == "vector" else (1, n, 2), -13.8)
    decay[:, ::3] = 0
    initial = torch.zeros(1, 1, 2, 4, 4)
    found = Chunks(k, v, decay, None, initial, [n]).read(q * 0.5)
    wanted, _ = steps(*(x.double() for x in (q, k, v, decay)), None, None)
    assert relative(found.double(), wanted, wanted) < 1e-6


def test_memory_is_linear_in_the_length():
    """What autograd keeps grows as the length does."""
    kept = []
    for n in (256, 512, 1024):
        saved = 0

        def count(x):
            nonlocal saved
            saved += x.numel()
            return x

        q, k, v = (torch.randn(1, n, 1, 8, requires_grad=True) for _ in range(3))
        decay, beta = torch.zeros(1, n, 1, 8, requires_grad=True), torch.rand(1, n, 1, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            Chunks(k, v, decay, beta, torch.zeros(1, 1, 1, 8, 8), [n]).read(q)
        kept.append(saved)
    assert all(after < 2.05 * before for before, after in itertools.pairwise(kept))
