"""Grids of threads as ranks: the exchange between sequence and heads, the bytes that move, the tensors that are saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.geometry.rows import Order
from ringattn.runtime.ulysses import HeadExchange, Hybrid, kv_copies
from ringattn.transport import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def grid_of(transport, u):
    """A rank's grid of threads, `size / u` x u."""
    ring, heads = divmod(transport.rank, u)
    return Hybrid(transport.subgroup(range(heads, transport.size, u)), transport.subgroup(range(ring * u, ring * u + u)), transport)


@pytest.mark.parametrize("rows", [(3, 3), (2, 0, 5), (0, 4, 1, 1), (0, 0)], ids=str)
def test_there_and_back(rows):
    """Row r of rank i holds (i, r, n) in head n. Each rank gets all rows of its heads, rank by rank, then its own rows back."""
    u, per_rank = len(rows), 2
    counted = [[(i, r) for r in range(n)] for i, n in enumerate(rows)]

    def work(transport):
        exchange = HeadExchange(transport, rows)
        own = torch.tensor([[[i, r, n] for n in range(u * per_rank)] for i, r in counted[transport.rank]], dtype=torch.int64)
        x = own.reshape(-1, u * per_rank, 3)[None].repeat(2, 1, 1, 1)  # (b, s, n, d)
        there, other = exchange.to_heads(x, -x[:, :, :u])
        back = exchange.to_rows(there, other)
        return x, there, back

    for rank, (x, there, back) in enumerate(run_ranks(u, work)):
        heads = range(rank * per_rank, (rank + 1) * per_rank)
        wanted = torch.tensor([[[i, r, n] for n in heads] for part in counted for i, r in part])
        assert torch.equal(there, wanted.reshape(-1, per_rank, 3)[None].repeat(2, 1, 1, 1))
        assert torch.equal(back[0], x)
        assert torch.equal(back[1], -x[:, :, :u])


@pytest.mark.parametrize("u", range(1, 13))
def test_every_query_head_meets_its_key_head(u):
    for h in range(u, 49, u):
        for hk in (n for n in range(1, h + 1) if h % n == 0):
            copies = kv_copies(h, hk, u)
            keys = [head for head in range(hk) for _ in range(copies)]
            assert len(keys) % u == 0, (h, hk)
            mine, local = h // u, len(keys) // u
            assert mine % local == 0, (h, hk)
            for rank in range(u):
                held = keys[rank * local : (rank + 1) * local]
                for head in range(mine):
                    assert held[head // (mine // local)] == (rank * mine + head) // (h // hk), (h, hk)
            # no more copies than needed if u divides hk or hk divides u
            assert copies == max(1, u // hk) or (hk % u and u % hk), (h, hk)


@pytest.mark.parametrize(("ring", "heads"), [(2, 2), (2, 3), (1, 3)], ids="{}".format)
@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather()], ids=repr)
def test_bytes_on_each_axis(ring, heads, schedule):
    """The ring moves whole shards of 1 / heads of K/V; the heads axis moves all but 1 / heads of q, k, v, out and the statistics.

    The backward pass moves K/V again and their gradients along the ring, and q, k, v, dout, delta, the statistics and the inputs'
    gradients on the heads axis."""
    b, n, h, hk, d, d_v, itemsize = 1, 24 * ring * heads, 12, 6, 4, 2, 8
    layout = ra.contiguous(n, ring * heads)

    def work(transport):
        grid = grid_of(transport, heads)
        shapes = ((h, d), (hk, d), (hk, d_v))
        q, k, v = (torch.ones(b, n // grid.size, x, y, dtype=torch.float64, requires_grad=True) for x, y in shapes)
        out = ra.ring_attention(q, k, v, layout=layout, mask=ra.full(), group=grid, schedule=schedule)
        forward = sent(grid)
        out.sum().backward()
        assert transport.bytes_sent == 0
        return forward, [total - once for total, once in zip(sent(grid), forward, strict=True)]

    def sent(grid):
        return [getattr(axis, "bytes_sent", 0) for axis in (grid.ring, grid.heads)]

    s = n // (ring * heads)
    whole = s * heads * (hk // heads) * (d + d_v) * itemsize
    inputs = h * d + hk * (d + d_v)
    for forward, backward in run_ranks(ring * heads, work):
        assert forward[0] == (ring - 1) * whole
        assert forward[1] == s * (inputs + h * d_v + 2 * h) * (heads - 1) // heads * itemsize
        assert backward[0] == 2 * (ring - 1) * whole
        assert backward[1] == s * (2 * inputs + h * d_v + 3 * h) * (heads - 1) // heads * itemsize


def test_same_bits_twice():
    """Copies of K/V heads are summed in a fixed order."""
    layout = ra.zigzag(70, 6)
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(1, 70, 6, 8), *torch.randn(2, 1, 70, 1, 8).unbind(), torch.randn(1, 70, 6, 8)

    def work(transport):
        grid = grid_of(transport, 3)
        leaves = [ra.shard(x, layout, grid.rank).requires_grad_() for x in (q, k, v)]
        out = ra.ring_attention(*leaves, layout=layout, group=grid)
        return out.detach(), *torch.autograd.grad(out, leaves, ra.shard(dout, layout, grid.rank))

    for once, again in zip(run_ranks(6, work), run_ranks(6, work)):
        assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


def test_gradients_of_copies_are_rounded_once():
    """The gradients of two query heads of one K/V head nearly cancel: if they were rounded to bf16 first, their sum would be lost."""
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(1, 40, n, 8).bfloat16() for n in (1, 1, 1, 1))
    q, dout = q.repeat(1, 1, 2, 1), torch.cat([dout, -dout + (torch.randn(1, 40, 1, 8) / 64).bfloat16()], dim=2)

    def gradients(kind, group=None, layout=None):
        leaves = [(x if layout is None else ra.shard(x, layout, group.rank)).to(kind).requires_grad_() for x in (q, k, v)]
        out = ra.ring_attention(*leaves, group=group, layout=layout)
        dleaves = torch.autograd.grad(out, leaves, (dout if layout is None else ra.shard(dout, layout, group.rank)).to(kind))
        return [x if layout is None else ra.unshard(x, layout, group) for x in dleaves[1:]]

    wanted, alone = gradients(torch.float64), gradients(torch.bfloat16)
    together = run_ranks(4, lambda transport: gradients(torch.bfloat16, grid_of(transport, 2), ra.zigzag(40, 4)))[0]
    for right, one, several in zip(wanted, alone, together, strict=True):
        assert (several - right).abs().max() <= 2 * (one - right).abs().max()


def test_orders_stay_within_ranks():
    order = Order(np.array([0, 1, 3, 2, 4]))
    first, second = run_ranks(2, lambda transport: HeadExchange(transport, (2, 3)))
    assert first.own_order(order) is None
    assert second.own_order(order).rows.tolist() == [1, 0, 2]
    assert second.own_order(None) is None


def test_only_inputs_and_results_are_saved():
    """No rows of other ranks are kept for the backward pass."""

    def work(transport):
        q, k, v = (torch.randn(1, 5, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
        out, stats = ra.ring_attention(q, k, v, layout=ra.zigzag(20, 4), group=grid_of(transport, 2), return_stats=True)
        wanted = [q, k, v, out, stats.row_max, stats.row_sum]
        saved = [x for x in out.grad_fn.saved_tensors if x is not None]
        assert [x.data_ptr() for x in saved[:6]] == [x.data_ptr() for x in wanted]
        assert all(x.numel() <= 3 for x in saved[6:])

    run_ranks(4, work)


def test_gradients_of_gradients_are_refused():
    def work(transport):
        x = torch.ones(1, 2, 2, 4, requires_grad=True)
        out = ra.ring_attention(x, x, x, group=grid_of(transport, 2))
        with pytest.raises(ValueError, match="no second derivative"):
            torch.autograd.grad(out.sum(), x, create_graph=True)

    run_ranks(2, work)
