"""Attention over a set of tiles in plain torch, for devices without Triton kernels and for fp64.

It has the functions, statistics and in-place rules of the kernels. It works block by block (FlashAttention, Dao et al. 2022,
algorithms 1 and 4), so that memory grows with tokens and not with their square. Blocks are those of a tile; many small tiles share them.

It computes in fp32 (fp64 for fp64 input), but scores, a running state, dP and delta are fp64. The backward cuts other blocks than the
forward, and matrix products of other shapes round otherwise: in fp32 a score of 1e5 would differ by 0.01, and its weight by 1 %.

Shapes: b batch, sq and sk rows of q and of the k/v buffer, h query heads, hk key/value heads, g = h / hk, d and d_v head dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from ringattn_kernels.modifiers import Bias, Modifiers, ModifierSums
from ringattn_kernels.queries import Queries
from ringattn_kernels.table import TileTable

from .philox import kept

_BLOCK_Q = 256
_BLOCK_K = 512
_PAIRS = 512  # which take about as long as what a further block costs
_EXACT = torch.float64  # of numbers whose difference counts

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Block(NamedTuple):
    """Rows of q and k, in order; which of their pairs are live: (rows of q, rows of k) bool, or None if all are; and positions, where they
    matter."""

    q: slice | torch.Tensor
    k: slice | torch.Tensor
    live: torch.Tensor | None
    q_positions: torch.Tensor | None
    k_positions: torch.Tensor | None

    @property
    def distance(self) -> torch.Tensor:
        """The position of the key less that of the query: (rows of q, rows of k)."""
        assert self.q_positions is not None and self.k_positions is not None
        return self.k_positions - self.q_positions[:, None]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: TileTable,
    *,
    softmax_scale: float,
    modifiers: Modifiers | None = None,
    sinks: torch.Tensor | None = None,
    state: State | None = None,
    final: bool = True,
) -> State:
    """Attention of q (b, sq, h, d) over the tiles' pairs with k (b, sk, hk, d) and v (b, sk, hk, d_v).

    `state` is (out (b, sq, h, d_v), row_max (b, h, sq), row_sum (b, h, sq)) over other keys; it is updated in place. Returns the
    state in fp64; with `final`, rows count sinks (h,), out is in q's dtype, and the statistics in fp32 (fp64 for fp64 input).
    """
    b, sq, h, _ = q.shape
    hk, d_v = k.shape[2], v.shape[3]
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    if state is None:
        out = torch.zeros(b, sq, h, d_v, dtype=_EXACT, device=q.device)
        row_max = torch.full((b, h, sq), float("-inf"), dtype=_EXACT, device=q.device)
        row_sum = torch.zeros(b, h, sq, dtype=_EXACT, device=q.device)
    else:
        out, row_max, row_sum = state
    for block in _blocks(tiles, q.device):
        # (b, hk, g, rows, ...) throughout
        scores, _ = _scores(q, k, block, softmax_scale, modifiers)
        old_max = row_max[:, :, block.q].unflatten(1, (hk, -1))
        new_max = torch.maximum(old_max, scores.amax(-1))
        # a row with nothing live yet has row_max = -inf: avoid inf - inf
        pivot = torch.where(new_max == float("-inf"), 0.0, new_max)
        weights = scores.sub_(pivot.unsqueeze(-1)).to(acc_dtype).exp_().to(_EXACT)
        before = row_sum[:, :, block.q].unflatten(1, (hk, -1)) * (old_max - pivot).exp()
        total = before + weights.sum(-1)
        scale = 1 / torch.where(total > 0, total, 1)
        share = _share(block, weights, modifiers)
        weights = weights if share is None else weights.mul_(share)
        fresh = _product(weights, _rows(v, block.k, _EXACT)) * scale.unsqueeze(-1)
        part = out[:, block.q].unflatten(2, (hk, -1)) * (before * scale).permute(0, 3, 1, 2).unsqueeze(-1)  # (b, rows, hk, g, d_v)
        out[:, block.q] = part.add_(fresh.permute(0, 3, 1, 2, 4)).flatten(2, 3)
        row_max[:, :, block.q] = new_max.flatten(1, 2)
        row_sum[:, :, block.q] = total.flatten(1, 2)
    found = out, row_max, row_sum
    if not final:
        return found
    return settled(found if sinks is None else with_sinks(*found, sinks.to(_EXACT)), q.dtype, acc_dtype)


def with_sinks(out: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor, sinks: torch.Tensor) -> State:
    """out (b, s, h, d_v), row_max and row_sum (b, h, s) of a softmax with one more score a row, sinks (h,), which has no value."""
    total_max = torch.maximum(row_max, sinks[:, None])
    # a row with neither a live pair nor a sink has -inf: avoid inf - inf
    pivot = total_max.masked_fill(total_max == float("-inf"), 0.0)
    before = row_sum * (row_max - pivot).exp()
    total = before + (sinks[:, None] - pivot).exp()
    share = torch.where(total > 0, before / total, 0.0).transpose(1, 2).unsqueeze(-1)  # (b, s, h, 1)
    return (out * share).to(out.dtype), total_max, total


def settled(state: State, out_dtype: torch.dtype, dtype: torch.dtype) -> State:
    """A state with out in `out_dtype`, and the statistics in `dtype`: row_sum is relative to row_max as it is rounded."""
    out, exact, row_sum = state
    row_max = exact.to(dtype)
    lost = torch.where(exact == float("-inf"), 0.0, exact - row_max)
    return out.to(out_dtype), row_max, (row_sum * lost.exp()).to(dtype)


def delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """rowsum(dout * out): (b, h, sq), fp64, so that dP - delta is 0 where it should be: where a row has a single weight."""
    return (out.to(_EXACT) * dout.to(_EXACT)).sum(-1).transpose(1, 2).contiguous()


class TorchQuerySums:
    """Sums of dQ over one backward pass, in fp32 (fp64 for fp64) and q's shape (b, sq, h, d)."""

    def __init__(self, q: torch.Tensor) -> None:
        self.total = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        """dQ in `dtype`."""
        return self.total.to(dtype)


def backward(
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: TileTable,
    *,
    softmax_scale: float,
    dq: TorchQuerySums,
    dk: torch.Tensor,
    dv: torch.Tensor,
    add: bool = True,
    modifiers: Modifiers | None = None,
    sums: ModifierSums | None = None,
) -> None:
    """Adds the gradients of the tiles' pairs to dq, dk and dv, in place:

    P = exp(S - row_max) / row_sum, dV += P^T dout, dS = P (dout V^T - delta), dQ += scale dS K, dK += scale dS^T Q.

    With modifiers, dS is multiplied by the softcap's slope before it reaches dQ and dK; the gradients of slopes and values are added
    to `sums`; and what dropout does to P, it does to P in dV and to dout V^T (Dao et al. 2022, algorithm 4).

    With add=False, overwrites all of dk and dv, which may have any dtype and content; sums are always fp32 (fp64 for fp64).
    """
    q, dout, hk = queries.q, queries.dout, k.shape[2]
    acc_dtype = dq.total.dtype
    outputs = dk, dv
    if not add:
        dk, dv = (torch.zeros_like(x, dtype=acc_dtype) if x.dtype != acc_dtype else x.zero_() for x in outputs)
    pivot = torch.where(queries.row_max == float("-inf"), 0.0, queries.row_max)
    norm = torch.where(queries.row_sum > 0, 1 / queries.row_sum, 0.0).to(acc_dtype)
    for block in _blocks(tiles, q.device):
        q_rows, dout_rows = _grouped(q, block.q, hk, acc_dtype), _grouped(dout, block.q, hk, acc_dtype)
        scores, slope = _scores(q, k, block, softmax_scale, modifiers)
        weights = scores.sub_(_per_row(pivot, block.q, hk)).to(acc_dtype).exp_() * _per_row(norm, block.q, hk)
        dweights = _product(_grouped(dout, block.q, hk, _EXACT), _rows(v, block.k, _EXACT).transpose(-1, -2))
        share = _share(block, weights, modifiers)
        dweights = dweights if share is None else dweights.mul_(share)
        dscores = dweights.sub_(_per_row(queries.delta, block.q, hk)).to(acc_dtype) * weights
        if block.live is not None:
            # 0 * nan is nan: what is no number in a row of dout or v would reach keys and queries that do not see it
            dscores.masked_fill_(~block.live, 0.0)
        if modifiers is not None and sums is not None:
            _add_modifiers(sums, modifiers, block, dscores)
        dscores *= softmax_scale if slope is None else softmax_scale * slope.to(acc_dtype)
        weights = weights if share is None else weights * share.to(acc_dtype)
        dv[:, block.k] += _product_t(weights, dout_rows).transpose(1, 2)
        dk[:, block.k] += _product_t(dscores, q_rows).transpose(1, 2)
        dq.total[:, block.q] += _product(dscores, _rows(k, block.k, acc_dtype)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    for x, total in zip(outputs, (dk, dv), strict=True):
        if x is not total:
            x.copy_(total)


def _blocks(tiles: TileTable, device: torch.device) -> Iterator[_Block]:
    """All live pairs of the tiles, each in one block."""
    many = (len(tiles) - 8) * _PAIRS > tiles.q_rows * tiles.k_rows
    if not many:
        return _blocks_of_tiles(tiles, device)
    return iter(tiles.derived(("shared blocks", device), lambda: tuple(_shared_blocks(tiles, device))))


def _shared_blocks(tiles: TileTable, device: torch.device) -> Iterator[_Block]:
    """Blocks that many small tiles share: those of their rows that lie near each other. Rows that no tile names are not read."""
    q_begin, q_end, k_begin, k_end = tiles.tiles.T[:4]
    positions = _positions(tiles)
    for q0, k0 in itertools.product(range(0, tiles.q_rows, _BLOCK_Q), range(0, tiles.k_rows, _BLOCK_K)):
        live = np.zeros((min(_BLOCK_Q, tiles.q_rows - q0), min(_BLOCK_K, tiles.k_rows - k0)), dtype=bool)
        distance = q0 - k0 + np.subtract.outer(*map(np.arange, live.shape))
        meets = (q_begin < q0 + _BLOCK_Q) & (q_end > q0) & (k_begin < k0 + _BLOCK_K) & (k_end > k0)
        for a, b, c, d, low, high in tiles.tiles[meets].tolist():
            place = slice(max(a - q0, 0), max(b - q0, 0)), slice(max(c - k0, 0), max(d - k0, 0))
            live[place] |= (low <= distance[place]) & (distance[place] <= high)
        rows, columns = np.flatnonzero(live.any(1)), np.flatnonzero(live.any(0))
        if len(rows):
            q, k = (torch.from_numpy(x).to(device) for x in (rows + q0, columns + k0))
            some = torch.from_numpy(live[rows][:, columns]).to(device)
            yield _Block(q, k, some, *((None, None) if positions is None else (positions[0][q], positions[1][k])))


def _positions(tiles: TileTable) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of each row of q, and of k, that a tile names; None if they do not matter."""
    if tiles.places is None:
        return None
    q_positions, k_positions = (tiles.stride * np.arange(n) for n in (tiles.q_rows, tiles.k_rows))
    q_places, k_places = np.zeros_like(q_positions), np.zeros_like(k_positions)
    for (q_begin, q_end, k_begin, k_end, _, _), (q_place, k_place) in zip(tiles.tiles.tolist(), tiles.places):
        q_places[q_begin:q_end], k_places[k_begin:k_end] = q_place, k_place
    return torch.from_numpy(q_positions + q_places), torch.from_numpy(k_positions + k_places)


def _blocks_of_tiles(tiles: TileTable, device: torch.device) -> Iterator[_Block]:
    rows = tiles.derived(("rows",), tiles.tiles.tolist)
    for number, (q_begin, q_end, k_begin, k_end, lo, hi) in enumerate(rows):
        for q0 in range(q_begin, q_end, _BLOCK_Q):
            q1 = min(q0 + _BLOCK_Q, q_end)
            # the keys that some row of the block sees
            first, last = max(k_begin, q0 - hi), min(k_end, q1 - lo)
            for k0 in range(first, last, _BLOCK_K):
                k1 = min(k0 + _BLOCK_K, last)
                live = None
                if lo > q0 - k1 + 1 or hi < q1 - 1 - k0:
                    distance = torch.arange(q0, q1, device=device)[:, None] - torch.arange(k0, k1, device=device)
                    live = (lo <= distance) & (distance <= hi)
                q_positions = k_positions = None
                if tiles.places is not None:
                    q_place, k_place = tiles.places[number].tolist()
                    q_positions = q_place + tiles.stride * torch.arange(q0, q1, device=device)
                    k_positions = k_place + tiles.stride * torch.arange(k0, k1, device=device)
                yield _Block(slice(q0, q1), slice(k0, k1), live, q_positions, k_positions)


def _scores(
    q: torch.Tensor, k: torch.Tensor, block: _Block, softmax_scale: float, modifiers: Modifiers | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scores of a block in fp64, (b, hk, g, rows of q, rows of k), -inf for pairs that are not live; and the slope of the softcap."""
    hk, slope = k.shape[2], None
    q_rows, k_rows = _grouped(q, block.q, hk, _EXACT), _rows(k, block.k, _EXACT)
    scores = _product(q_rows, k_rows.transpose(-1, -2)) * softmax_scale
    if modifiers is not None:
        if modifiers.softcap is not None:
            share = (scores / modifiers.softcap).tanh_()
            scores, slope = share * modifiers.softcap, 1 - share * share
        if modifiers.slopes is not None:
            scores -= _per_head(modifiers.slopes, hk) * block.distance.abs()
        if modifiers.bias is not None:
            scores += modifiers.bias.values.to(_EXACT)[:, _pieces(modifiers.bias, block)].unflatten(0, (hk, -1))
    return (scores if block.live is None else scores.masked_fill_(~block.live, float("-inf"))), slope


def _share(block: _Block, weights: torch.Tensor, modifiers: Modifiers | None) -> torch.Tensor | None:
    """What dropout multiplies weights (b, hk, g, rows of q, rows of k) by, in fp64: 0 or 1 / (1 - p). None without dropout."""
    if modifiers is None or modifiers.dropout is None:
        return None
    dropout, (b, hk, g, *_) = modifiers.dropout, weights.shape
    assert block.q_positions is not None and block.k_positions is not None
    live = kept(dropout, b, hk * g, block.q_positions.numpy(), block.k_positions.numpy())
    return torch.from_numpy(live).unflatten(1, (hk, g)).to(_EXACT) / (1 - dropout.p)


def _add_modifiers(sums: ModifierSums, modifiers: Modifiers, block: _Block, dscores: torch.Tensor) -> None:
    """Add the gradients of slopes and values for a block's dS (b, hk, g, rows of q, rows of k)."""
    dscores = dscores.flatten(1, 2).to(_EXACT)
    if sums.slopes is not None:
        sums.add_distances((dscores * block.distance.abs()).sum((-1, -2)))
    if sums.values is not None and modifiers.bias is not None:
        sums.values.index_add_(1, _pieces(modifiers.bias, block).flatten(), dscores.sum(0).flatten(1).to(sums.values.dtype))


def _pieces(bias: Bias, block: _Block) -> torch.Tensor:
    """The piece of each pair's distance: (rows of q, rows of k)."""
    return torch.bucketize(block.distance, torch.tensor(bias.edges, dtype=torch.int64), right=True)


def _per_head(x: torch.Tensor, hk: int) -> torch.Tensor:
    """(b or 1, h) as (b or 1, hk, g, 1, 1) in fp64."""
    return x.to(_EXACT).unflatten(1, (hk, -1))[..., None, None]


def _grouped(x: torch.Tensor, rows: slice | torch.Tensor, hk: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of (b, s, h, d) as (b, hk, g, rows, d)."""
    return x[:, rows].to(dtype).unflatten(2, (hk, -1)).permute(0, 2, 3, 1, 4)


def _rows(x: torch.Tensor, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of (b, s, hk, d) as (b, hk, rows, d)."""
    return x[:, rows].to(dtype).transpose(1, 2)


def _per_row(x: torch.Tensor, rows: slice | torch.Tensor, hk: int) -> torch.Tensor:
    """Rows of (b, h, s) as (b, hk, g, rows, 1)."""
    return x[:, :, rows].unflatten(1, (hk, -1)).unsqueeze(-1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(b, hk, g, m, n) @ (b, hk, n, p) -> (b, hk, g, m, p), with the group's rows in one matrix."""
    return (a.flatten(2, 3) @ b).unflatten(2, a.shape[2:4])


def _product_t(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum over the group of a^T b: (b, hk, g, m, n), (b, hk, g, m, p) -> (b, hk, n, p)."""
    return a.flatten(2, 3).transpose(-1, -2) @ b.flatten(2, 3)
