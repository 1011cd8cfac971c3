"""Recurrences over sequences of one device, chunk by chunk, in plain torch; the memory that they take is linear in the length.

A head's state h is a matrix (d_k, d_v) of the computation's dtype. Token t with decay a_t = exp(g_t), a number or a vector over d_k, does

    h' = a_t h_(t-1);  u_t = v_t, or with the delta rule u_t = beta_t (v_t - k_t^T h');  h_t = h' + k_t u_t^T;  out_t = q_t h_t

Sources: linear attention (Katharopoulos et al. 2020); RetNet (Sun et al. 2023); the SSD of Mamba-2 (Dao and Gu 2024); GLA (Yang et al.
2023); the delta rule's WY form (Yang et al. 2024a), with a decay (Gated DeltaNet, Yang et al. 2024b), which may be a vector (KDA,
Kimi Team 2025).

A product of decays is always the exponential of a sum of their logarithms over just its tokens. Nothing is divided by such a product and
no sum is subtracted from another, so products may underflow, and a decay may be 0 (g = -inf).

Shapes: b batch, s tokens, h heads, m sequences, n chunks of C tokens each. Tensors of chunks are (b, h, n, C, ...).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

_MOST_ROWS = 64  # of a chunk


class Chunks:
    """Some sequences, one after the other, whose states have been computed: `finals`, (m, b, h, d_k, d_v), after the last token of each.

    All tensors have one dtype, fp32 or fp64. k: (b, s, h, d_k); v: (b, s, h, d_v); decay: (b, s, h) or (b, s, h, d_k), logarithms, or None;
    beta: (b, s, h), or None for no delta rule; initial: (m, b, h, d_k, d_v). lengths: of the sequences, at least 1 each. Differentiable.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor | None,
        initial: torch.Tensor,
        lengths: Sequence[int],
    ) -> None:
        self._lengths, self._nothing = lengths, v
        self.finals = initial
        if not lengths:
            return
        size = _chunk_rows(lengths)
        self._counts = [-(-length // size) for length in lengths]
        self._k, v = _chunked(k, lengths, size), _chunked(v, lengths, size)
        self._decay = None if decay is None else _chunked(decay, lengths, size)
        self._from_start = _from_start(self._decay, self._k)  # (b, h, n, C, 1 or d_k)
        k_end = self._k * _to_end(self._decay, self._k)
        total = self._from_start[..., -1, :, None]  # (b, h, n, 1 or d_k, 1)
        if beta is None:
            self._states, self.finals = _scan(total, k_end.mT @ v, initial, self._counts, matrix=False)
            self._writes = v
            return
        # the writes u solve (1 + beta L) u = beta (v - (k from_start) h): u = fresh - erased h
        beta = _chunked(beta, lengths, size)[..., None]
        lower = beta * decayed_products(self._k, self._k, self._decay).tril(-1)
        right = torch.cat([beta * v, beta * (self._k * self._from_start)], dim=-1)
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        fresh, erased = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        diagonal = torch.diag_embed(total.squeeze(-1).expand(*total.shape[:-2], k.shape[-1]))
        self._states, self.finals = _scan(diagonal - k_end.mT @ erased, k_end.mT @ fresh, initial, self._counts, matrix=True)
        self._writes = fresh - erased @ self._states

    def read(self, q: torch.Tensor) -> torch.Tensor:
        """The outputs of queries (b, s, h, d_k): (b, s, h, d_v)."""
        if not self._lengths:
            return self._nothing
        q = _chunked(q, self._lengths, self._k.shape[3])
        weights = decayed_products(q, self._k, self._decay)  # (b, h, n, C, C)
        out = (q * self._from_start) @ self._states + weights @ self._writes
        return _rows(out, self._lengths, self._counts)


def decayed_products(q: torch.Tensor, k: torch.Tensor, decay: torch.Tensor | None) -> torch.Tensor:
    """sum over d of q_id k_jd exp(the sum of decay_td over j < t <= i), for j <= i, else 0: (..., C, C), C a power of two.

    q, k: (..., C, d_k). decay: (..., C), (..., C, d_k) or None.
    """
    if decay is None or decay.dim() < q.dim():
        products = (q @ k.mT).tril()
        return products if decay is None else products * _between(decay).exp()
    # blocks twice as long in each step: a later row meets an earlier one through the bound between their halves
    blocks = (q * k).sum(-1)[..., None, None]  # (..., C, 1, 1)
    while blocks.shape[-3] > 1:
        size = blocks.shape[-1]
        (_, q_late), (k_early, _), (early, late) = (x.unflatten(-2, (-1, 2, size)).unbind(-3) for x in (q, k, decay))
        corner = (q_late * late.cumsum(-2).exp()) @ (k_early * _sum_after(early).exp()).mT  # (..., C / (2 size), size, size)
        upper, lower = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        blocks = torch.cat([F.pad(upper, (0, size)), torch.cat([corner, lower], dim=-1)], dim=-2)
    return blocks.squeeze(-3)


def _between(decay: torch.Tensor) -> torch.Tensor:
    """(..., C) to (..., C, C): the sum of decay_t over j < t <= i; -inf for j > i."""
    rows = decay.shape[-1]
    seen = torch.ones(rows, rows, dtype=torch.bool, device=decay.device).tril()
    terms = decay[..., :, None].expand(*decay.shape, rows).masked_fill(~seen.tril(-1), 0)
    return terms.cumsum(-2).masked_fill(~seen, -torch.inf)


def _sum_after(decay: torch.Tensor) -> torch.Tensor:
    """The sum over all later rows, in dim -2."""
    return F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _from_start(decay: torch.Tensor | None, k: torch.Tensor) -> torch.Tensor:
    """What is left, at each row, of the state before its chunk."""
    if decay is None:
        return k.new_ones(*k.shape[:-1], 1)
    return (decay if decay.dim() == k.dim() else decay[..., None]).cumsum(-2).exp()


def _to_end(decay: torch.Tensor | None, k: torch.Tensor) -> torch.Tensor:
    """What is left, after its chunk, of what each row writes."""
    if decay is None:
        return k.new_ones(*k.shape[:-1], 1)
    return _sum_after(decay if decay.dim() == k.dim() else decay[..., None]).exp()


def _scan(
    transition: torch.Tensor, written: torch.Tensor, initial: torch.Tensor, counts: Sequence[int], *, matrix: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before each chunk, (b, h, n, d_k, d_v), and after each sequence, (m, b, h, d_k, d_v).

    transition: of each chunk, (b, h, n, d_k, d_k) with `matrix`, else factors (b, h, n, 1 or d_k, 1). written: (b, h, n, d_k, d_v).
    counts: chunks of each sequence.
    """
    transitions, writes = transition.unbind(2), written.unbind(2)
    states, finals, chunk = [], [], 0
    for count, state in zip(counts, initial.unbind(0)):
        for _ in range(count):
            states.append(state)
            kept = transitions[chunk] @ state if matrix else transitions[chunk] * state
            state = kept + writes[chunk]
            chunk += 1
        finals.append(state)
    return torch.stack(states, dim=2), torch.stack(finals)


def _chunk_rows(lengths: Sequence[int]) -> int:
    """Rows of a chunk, a power of two: fewer for short sequences, which fill their last chunk with rows that do nothing."""
    mean = sum(lengths) / len(lengths)
    size = 1
    while size < min(mean, _MOST_ROWS):
        size *= 2
    return size


def _chunked(x: torch.Tensor, lengths: Sequence[int], size: int) -> torch.Tensor:
    """(b, s, h, ...) to (b, h, n, C, ...): each sequence begins a chunk, and zeros fill its last one."""
    ends = (0, 0) * (x.dim() - 2)
    padded = [F.pad(part, (*ends, 0, -length % size)) if length % size else part for part, length in _parts(x, lengths)]
    whole = torch.cat(padded, dim=1) if len(padded) > 1 else padded[0]
    return whole.unflatten(1, (-1, size)).movedim(3, 1)


def _rows(x: torch.Tensor, lengths: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """The inverse, of (b, h, n, C, d) with so many chunks for each sequence: (b, s, h, d)."""
    size = x.shape[3]
    whole = x.permute(0, 2, 3, 1, 4).flatten(1, 2)
    parts = _parts(whole, [count * size for count in counts])
    found = [part[:, :length] for (part, _), length in zip(parts, lengths)]
    return torch.cat(found, dim=1) if len(found) > 1 else found[0]


def _parts(x: torch.Tensor, lengths: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
    return list(zip(x.split(list(lengths), dim=1), lengths))
