"""A million tokens on GPUs: sampled rows of every rank's results against fp64. A short sequence on a CPU tests the reference itself.

Each rank draws the same whole sequence. In fp64 it computes the statistics of all of its own queries, a block at a time; out and dq of its
sampled queries; and its queries' part of dk and dv of all ranks' sampled keys, which are summed over ranks. The errors that count as
allowed are those of dense attention in the same dtype, of the same rows.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.transport import run_ranks

H, D, SAMPLES = 2, 128, 32
SCALE = 2 * D**-0.5
FACTORS = {"out": 2, "dq": 3, "dk": 3, "dv": 3}


def samples(layout, rank):
    """Some local rows of a rank: the first and last of each of its two chunks, and others at random."""
    length = layout.lengths[rank]
    edges = torch.tensor([0, length // 2 - 1, length // 2, length - 1])
    generator = torch.Generator().manual_seed(rank)
    return torch.cat([edges, torch.randint(length, (SAMPLES - 4,), generator=generator)]).unique()


def sampled(group, rank, n, device, block):
    """Of this rank: what ring attention gives for its sampled rows, and its part of what they should be, in fp64 and in the same dtype."""
    layout = ra.zigzag(n, dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else group.size)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, heads, D, generator=generator, device=device).bfloat16() for heads in (H, 1, 1, H))
    leaves = [ra.shard(x, layout, rank).requires_grad_() for x in (q, k, v)]
    mine, positions, own = samples(layout, rank), layout.positions(rank).to(device), ra.shard(dout, layout, rank)
    out, stats = ra.ring_attention(*leaves, layout=layout, group=group, softmax_scale=SCALE, return_stats=True)
    gradients = torch.autograd.grad(out, leaves, own)
    got = {name: x.detach()[0, mine].double().cpu() for name, x in zip(FACTORS, (out, *gradients))}
    got["lse"] = stats.lse.detach()[0, :, mine].double().cpu()
    queries, k, v, own = leaves[0].detach()[0], k[0, :, 0], v[0, :, 0], own[0]  # (s, h, d), (n, d), (n, d), (s, h, d)
    del out, stats, gradients, leaves, q, dout

    lse, delta = statistics(queries, k, v, own, positions, block)
    keys = torch.cat([layout.positions(r)[samples(layout, r)] for r in range(layout.world_size)]).to(device)
    rows = positions[mine.to(device)]
    results = {"got": got, "lse": lse[:, mine].cpu()}
    for name, kind in (("exact", torch.float64), ("same", torch.bfloat16)):
        of_rows = row_results(*(x[mine.to(device)].to(kind) for x in (queries, own)), k.to(kind), v.to(kind), rows)
        of_keys = key_results(queries.to(kind), k[keys].to(kind), v[keys].to(kind), own.to(kind), positions, keys, lse, delta)
        results[name] = {part: x.double().cpu() for part, x in zip(FACTORS, (*of_rows, *of_keys))}
    return results


def statistics(queries, k, v, dout, positions, block):
    """lse and delta = rowsum(dout * out) of every query, (h, s), in fp64."""
    k, v = k.double(), v.double()
    lse, delta = (torch.empty(H, len(positions), dtype=torch.float64, device=k.device) for _ in range(2))
    for head in range(H):
        for begin in range(0, len(positions), block):
            part = slice(begin, begin + block)
            at = positions[part]
            first, end = int(at.min()), int(at.max()) + 1
            scores = (queries[part, head].double() * SCALE) @ k[:end].T
            scores[:, first:].masked_fill_(torch.arange(first, end, device=k.device) > at[:, None], float("-inf"))
            row_max = scores.amax(1, keepdim=True)
            weights = scores.sub_(row_max).exp_()
            row_sum = weights.sum(1, keepdim=True)
            out = weights @ v[:end] / row_sum
            lse[head, part] = (row_max + row_sum.log())[:, 0]
            delta[head, part] = (out * dout[part, head].double()).sum(1)
    return lse, delta


def row_results(q, dout, k, v, rows):
    """out and dq (samples, h, d) of some queries, by dense attention in the inputs' dtype."""
    q = q.clone().requires_grad_()
    found = []
    for head in range(H):
        scores = (q[:, head] @ k.T) * SCALE
        scores = scores.masked_fill(torch.arange(len(k), device=k.device) > rows[:, None], float("-inf"))
        weights = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(1).to(q.dtype)
        found.append(weights @ v)
    out = torch.stack(found, 1)
    return out.detach(), torch.autograd.grad(out, q, dout)[0]


def key_results(q, k, v, dout, positions, keys, lse, delta):
    """What these queries add to dk and dv (samples, 1, d) of some keys, by dense attention in the inputs' dtype."""
    dk, dv = (torch.zeros(len(keys), D, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device) for _ in range(2))
    unseen = positions[:, None] < keys
    for head in range(H):
        weights = (((q[:, head] @ k.T) * SCALE).double() - lse[head, :, None]).exp_().masked_fill_(unseen, 0.0).to(q.dtype)
        dweights = dout[:, head] @ v.T
        dscores = (weights.double() * (dweights.double() - delta[head, :, None])).to(q.dtype) * SCALE
        dv += weights.T @ dout[:, head]
        dk += dscores.T @ q[:, head]
    return dk[:, None], dv[:, None]


def judge(ranks):
    """Assert the contract: errors of all sampled rows, of the worst element and the root mean square."""
    for name, factor in FACTORS.items():
        got = torch.cat([rank["got"][name] for rank in ranks])
        whole = sum if name in ("dk", "dv") else torch.cat
        exact, same = (whole([rank[kind][name] for rank in ranks]) for kind in ("exact", "same"))
        error, allowed = got - exact, same.bfloat16().double() - exact
        for kind in (lambda x: x.abs().max(), torch.norm):
            assert kind(error) <= factor * kind(allowed), (name, float(kind(error)), float(kind(allowed)))
    for rank in ranks:
        torch.testing.assert_close(rank["got"]["lse"], rank["lse"], rtol=1e-5, atol=1e-5)


def of_member(group, n, block):
    return sampled(group, dist.get_rank(group), n, "cuda", block)


@pytest.mark.gpu
def test_a_million_tokens(nccl, world_size):
    judge(nccl.run(world_size, of_member, 1 << 20, 1024 // world_size, timeout=240))


@pytest.mark.parametrize("size", [1, 3])
def test_the_reference_of_sampled_rows(one_thread, size):
    """The same on a CPU; and the reference is dense attention's."""
    n = 514
    ranks = run_ranks(size, lambda t: sampled(t, t.rank, n, "cpu", 100))
    judge(ranks)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, heads, D, generator=generator).bfloat16() for heads in (H, 1, 1, H))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = ra.reference.attention(*leaves, softmax_scale=SCALE)
    wanted = dict(zip(FACTORS, (out, *torch.autograd.grad(out, leaves, dout.double()))))
    layout = ra.zigzag(n, size)
    at = torch.cat([layout.positions(r)[samples(layout, r)] for r in range(size)])
    for name, x in wanted.items():
        whole = sum if name in ("dk", "dv") else torch.cat
        torch.testing.assert_close(whole([rank["exact"][name] for rank in ranks]), x.detach()[0, at], rtol=0, atol=1e-12)
