"""Philox, the counter-based generator (Salmon et al. 2011), as it decides which pairs attention dropout keeps; in NumPy.

One draw of four 32-bit words decides eight pairs: those of queries q and q + 8 with keys k, k + 1, k + 8 and k + 9, each by 15 bits.
Kernels hold such pairs in one thread. The counter of a draw is the group of queries, the group of keys, and the two words of a stream; its
key is 0. The stream is drawn once for each head of each batch, with the seed as the key. So the pairs are the same on any number of
ranks, in any layout.
"""

from __future__ import annotations

import numpy as np

from ringattn_kernels.modifiers import LEVELS, ROUNDS, Dropout

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def kept(dropout: Dropout, batch: int, heads: int, q_positions: np.ndarray, k_positions: np.ndarray) -> np.ndarray:
    """Which pairs are kept: (batch, heads, queries, keys) bool, for `heads` heads from `dropout.first_head` on."""
    q, k = q_positions.astype(np.int64), k_positions.astype(np.int64)
    q_groups, q_of = np.unique((q >> 4 << 3) | (q & 7), return_inverse=True)
    k_groups, k_of = np.unique((k >> 4 << 2) | (k >> 1 & 3), return_inverse=True)
    head = np.arange(batch)[:, None] * dropout.heads + dropout.first_head + np.arange(heads)
    none = np.zeros_like(head)
    streams = philox((head, none + dropout.offset, none, none), dropout.seed)[:2]
    counter = q_groups[:, None], k_groups, *(words[..., None, None] for words in streams)
    words = np.stack(philox(tuple(np.broadcast_arrays(*counter)), 0), axis=-1)
    # (batch, heads, queries, keys, words); of the words, those of the pair's row and column
    which = (q >> 3 & 1)[:, None] * 2 + (k >> 3 & 1)
    drawn = words[:, :, q_of[:, None], k_of[None, :], which]
    return (drawn >> (16 * (k & 1)).astype(np.uint64) & np.uint64(LEVELS - 1)) >= dropout.dropped


def philox(counter: tuple[np.ndarray, ...], seed: int, rounds: int = ROUNDS) -> list[np.ndarray]:
    """Four arrays of 32-bit words, held in uint64, from four arrays of counters below 2**32 and a seed of 64 bits."""
    c0, c1, c2, c3 = (x.astype(np.uint64) for x in counter)
    keys = [seed & _LOW, seed >> 32 & _LOW]
    low, half = np.uint64(_LOW), np.uint64(32)
    for _ in range(rounds):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> half) ^ c1 ^ np.uint64(keys[0]), second & low
        c2, c3 = (first >> half) ^ c3 ^ np.uint64(keys[1]), first & low
        keys = [(key + step) & _LOW for key, step in zip(keys, _WEYL)]
    return [c0, c1, c2, c3]
