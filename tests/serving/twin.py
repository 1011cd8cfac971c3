"""A paged cache beside plain tensors: every change is made to both, and `decode` is compared with dense attention over the tensors."""

from __future__ import annotations

import numpy as np
import torch

import ringattn as ra


def reference(q, k, v, **options):
    """Dense attention of the last t tokens of one sequence: q (t, h, d), k (n, hk, d), v (n, hk, d_v)."""
    before = q.new_zeros(len(k) - len(q), *q.shape[1:])
    whole = ra.reference.attention(torch.cat([before, q])[None], k[None], v[None], **options)
    return whole[0, len(before) :]


class Twin:
    """Every rank makes one with the same seed, and the same calls."""

    def __init__(self, group, seed, *, heads=(4, 2), dims=(5, 3), layers=2, **options):
        self.heads, self.dims, self.layers = heads, dims, layers
        self.generator = torch.Generator().manual_seed(seed)
        sizes = dict(kv_heads=heads[1], head_dim=dims[0], v_head_dim=dims[1], layers=layers)
        self.cache = ra.PagedCache(**sizes, dtype=torch.float64, group=group, **options)
        self.kept = {}  # by sequence: K and V of each layer, (n, hk, d)

    @property
    def rank(self):
        return self.cache.pool.context.ranks.rank

    @property
    def size(self):
        return self.cache.pool.context.ranks.size

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def fresh(self, b, tokens):
        """K and V of new tokens, (b, tokens, hk, d)."""
        return [self.random(b, tokens, self.heads[1], dim) for dim in self.dims]

    def add(self):
        found = self.cache.add()
        self.kept[found] = [[x[0] for x in self.fresh(1, 0)] for _ in range(self.layers)]
        return found

    def grow(self, sequences, tokens, layout=None, into=None):
        """Extend by tokens that every rank has, or that are sharded by a layout."""
        batch = self.cache.extend(sequences, tokens, into=into)
        for layer in range(self.layers):
            new = self.fresh(len(sequences), tokens)
            if layout is None:
                self.cache.append(batch, *new, layer=layer)
            else:
                self.cache.fill(batch, *(ra.shard(x, layout, self.rank) for x in new), layout, layer=layer)
            for i, sequence in enumerate(sequences):
                self.kept[sequence][layer] = [torch.cat([x, y[i]]) for x, y in zip(self.kept[sequence][layer], new)]
        return batch

    def fork(self, sequence):
        found = self.cache.fork(sequence)
        self.kept[found] = [list(x) for x in self.kept[sequence]]
        return found

    def free(self, sequence):
        self.cache.free(sequence)
        del self.kept[sequence]

    def truncate(self, sequence, length):
        self.cache.truncate(sequence, length)
        self.kept[sequence] = [[x[:length] for x in pair] for pair in self.kept[sequence]]

    def error(self, sequences, tokens, batch=None, **options):
        """The greatest difference of `decode`, over all layers, from dense attention."""
        batch = self.cache.extend(sequences, 0) if batch is None else batch
        worst = 0.0
        for layer in range(self.layers):
            q = self.random(len(sequences), tokens, self.heads[0], self.dims[0])
            out = ra.decode(q, self.cache, batch, layer=layer, **options)
            assert torch.equal(out, ra.decode(q, self.cache, batch, layer=layer, **options))
            expected = [reference(q[i], *self.kept[x][layer], **options) for i, x in enumerate(sequences)]
            worst = max(worst, float((out - torch.stack(expected)).abs().max()))
        return worst


def random_changes(group, seed, steps=25, **options):
    """Random changes of a cache and its twin; returns the greatest error of `decode`. Draws equal numbers on all ranks."""
    draw = np.random.default_rng(seed)
    twin = Twin(group, seed, pages=8, page_size=16, **options)
    worst = 0.0
    for _ in range(steps):
        live = list(twin.kept)
        kind = draw.choice(["add", "grow", "grow", "fill", "fork", "free", "truncate", "decode", "decode"])
        some = [x for x in live if draw.random() < 0.6]
        one = live[draw.integers(len(live))] if live else None
        try:
            if kind == "add" or one is None:
                twin.add()
            elif kind == "grow" and some:
                twin.grow(some, int(draw.choice([0, 1, 3, 16, 33])))
            elif kind == "fill" and some:
                tokens = int(draw.integers(70))
                layouts = [ra.zigzag, ra.striped, ra.contiguous]
                twin.grow(some, tokens, layouts[draw.integers(3)](tokens, twin.size))
            elif kind == "fork":
                twin.fork(one)
            elif kind == "free":
                twin.free(one)
            elif kind == "truncate":
                twin.truncate(one, int(draw.integers(one.length + 1)))
            else:
                some = [x for x in some if x.length]
                if some:
                    worst = max(worst, twin.error(some, int(draw.integers(1, 1 + min(16, *(x.length for x in some))))))
        except ra.OutOfPages:
            twin.free(max(live, key=lambda x: x.length))
    return worst
