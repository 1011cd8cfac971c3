"""Dense attention over a whole sequence that all ranks draw alike, and the errors of a rank's shard."""

import torch
import torch.distributed as dist

import ringattn as ra

LAYOUTS = {
    "contiguous": ra.contiguous,
    "zigzag": ra.zigzag,
    "striped": ra.striped,
    "balanced": lambda n, world_size: ra.balanced(ra.documents(lengths=[n // 3, n // 4]), n, world_size),
}
MASKS = {
    "causal": lambda n: ra.causal(),
    "full": lambda n: ra.full(),
    "window": lambda n: ra.sliding_window(11, 3),
    "documents": lambda n: ra.documents(lengths=[n // 3, 0, 1 if n > 3 else 0, n // 5]),  # the rest is padding
    "prefix": lambda n: ra.prefix(n // 3),
    "global|window": lambda n: ra.global_tokens(range(0, n, 13)) | ra.sliding_window(4, 4),
    "dilated&causal": lambda n: (ra.dilated_window((5, 5), 3) | ra.sliding_window(2)) & ra.causal(),
    "bigbird": lambda n: ra.bigbird(n, 8, random_blocks=2),
}


def inputs(n, seed, heads=(4, 2), dtype=torch.float64, batch=1):
    """q, k, v, dout and a weight for each lse; `heads`: of queries, of K/V; head dims are odd."""
    h, hk = heads
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, n, h, 5), (batch, n, hk, 5), (batch, n, hk, 3), (batch, n, h, 3), (batch, h, n)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def difference(x, y):
    """The greatest difference; infinities of the same sign are equal."""
    assert x.shape == y.shape
    off = torch.where(x == y, 0, x - y).abs()
    return float(off.max()) if off.numel() else 0.0


def from_first(group, make, *given):
    """What make(*given) returns on the first rank, tensors, on all GPUs: a reference takes much memory, and ranks may share a GPU."""
    made = [[x.cpu() for x in make(*given)] if dist.get_rank() == 0 else None]
    torch.cuda.empty_cache()
    dist.broadcast_object_list(made, 0, group)
    return [x.cuda() for x in made[0]]


def check(group, rank, mask, layout, schedule, q, k, v, dout, dlse=None):
    """The greatest difference of this rank's out, statistics and gradients from the reference's.

    Gradients flow through out, and with dlse through lse too. Rank 1 leaves the statistics out of its loss, but takes part.
    """
    if dlse is not None:
        dlse = dlse.clone()
        dlse[..., layout.positions(1)] = 0
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    leaves = [ra.shard(x, layout, rank).requires_grad_() for x in (q, k, v)]
    ref, ref_stats = ra.reference.attention(*whole, mask=mask, return_stats=True)
    out, stats = ra.ring_attention(*leaves, layout=layout, mask=mask, group=group, schedule=schedule, return_stats=True)
    ref_loss, loss = (ref * dout).sum(), (out * ra.shard(dout, layout, rank)).sum()
    if dlse is not None:
        ref_loss = ref_loss + (ref_stats.lse * dlse).sum()
        loss = loss if rank == 1 else loss + (stats.lse * ra.shard(dlse, layout, rank, dim=2)).sum()
    found, wanted = (out, *torch.autograd.grad(loss, leaves)), (ref, *torch.autograd.grad(ref_loss, whole))
    pairs = [(x, ra.shard(y, layout, rank)) for x, y in zip(found, wanted, strict=True)]
    pairs += [(getattr(stats, name), ra.shard(getattr(ref_stats, name), layout, rank, 2)) for name in ("row_max", "row_sum", "lse")]
    return max(difference(x.detach(), y.detach()) for x, y in pairs)


def check_unshard(group, rank, layout, shape, dim=1):
    """unshard is the inverse of shard, and its gradient is the adjoint."""
    x = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(layout.seq_len)).double()  # sums are exact
    leaf = ra.shard(x, layout, rank, dim).requires_grad_()
    whole = ra.unshard(leaf, layout, group, dim)
    assert torch.equal(whole, x)
    (gradient,) = torch.autograd.grad(whole, leaf, (rank + 1) * x)
    assert torch.equal(gradient, ra.shard(x * sum(range(1, layout.world_size + 1)), layout, rank, dim))


def errors_in_16_bits(group, rank, layout, q, k, v, dout):
    """The errors of a rank's shard of out, dq, dk and dv, each with that of dense attention in the same dtype."""
    results = {}
    for kind in (torch.float64, q.dtype):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        out = ra.reference.attention(*leaves)
        results[kind] = [ra.shard(x.double(), layout, rank) for x in (out, *torch.autograd.grad(out, leaves, dout.to(kind)))]
    leaves = [ra.shard(x, layout, rank).requires_grad_() for x in (q, k, v)]
    out = ra.ring_attention(*leaves, layout=layout, group=group)
    got = [out, *torch.autograd.grad(out, leaves, ra.shard(dout, layout, rank))]
    assert all(x.dtype == q.dtype for x in got)
    return [(difference(x.double(), y), difference(z, y)) for x, y, z in zip(got, *results.values(), strict=True)]
